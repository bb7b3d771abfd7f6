"""Rules about generation: datasets, lengths, chat templates and sampling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from hpcrl.config.errors import Problem
from hpcrl.config.family import family_of
from hpcrl.config.import_path import IMPORT_PATH
from hpcrl.config.sections.data import DATASET_FILES, DataConfig
from hpcrl.config.sections.generator import MOST_KEPT, SamplingParams
from hpcrl.config.sections.tree import ConfigTree

_TEMPLATES = ("openvla", "qwen3_with_thinking", "qwen3_without_thinking")
_SAMPLING_NAMES = {field.name: field.name for field in fields(SamplingParams)} | {"max_tokens": "max_generate_length"}
_SAMPLING_OWN = {"n", "seed", "logprobs", "detokenize", "output_kind", "skip_special_tokens", "flat_logprobs"}
_ENDINGS = {"stop_token_ids", "ignore_eos", "repetition_detection"}  # change when a response ends, not what is sampled
_LEAVING_OUT = {"min_tokens", "bad_words", "allowed_token_ids", "structured_outputs"}
_WEIGHING = {"presence_penalty", "frequency_penalty", "logit_bias"}
_COLDEST = 0.01  # vLLM raises temperatures below to it


def _selectors(data: DataConfig) -> Iterator[Problem]:
    for settings, named, locations in (
        ({"subset": data.subset, "revision": data.revision}, "train_data", data.train_data),
        (
            {"val_subset": data.val_subset, "val_revision": data.val_revision},
            "val_data or data.val_prompts",
            data.val_data + data.val_prompts,
        ),
    ):
        if locations and all(location.endswith(DATASET_FILES) for location in locations):
            for name, value in settings.items():
                if value is not None:
                    message = f"has no effect on files; no dataset of data.{named} is a folder or on the hub"
                    yield Problem(f"data.{name}", message)


def _endless(config: ConfigTree) -> Iterator[Problem]:
    """Yield what cannot be with prompts that a function makes: it has neither rows to choose among nor an end."""
    data, trainer, name = config.data, config.trainer, config.data.train_function or ""
    if not IMPORT_PATH.fullmatch(name):
        yield Problem("data.train_function", f'expected "package.module:function", found "{name}"')
    if trainer.max_steps is None:
        yield Problem("trainer.max_steps", "required with data.train_function, whose prompts have no end")
    for setting, is_set in (
        ("data.train_data", data.train_data),
        ("data.weights", data.weights),
        ("data.test_size", data.test_size is not None),
        ("data.curriculum", data.curriculum.is_on),
        ("trainer.ckpt_interval_epochs", trainer.ckpt_interval_epochs is not None),
        ("trainer.distillation.source_models", trainer.distillation.source_models),
    ):
        if is_set:
            yield Problem(
                setting, "has no effect on the prompts of data.train_function, which are all new; leave one out"
            )


def datasets(config: ConfigTree) -> Iterator[Problem]:
    data = config.data
    if data.train_function is not None:
        yield from _endless(config)
    elif not data.train_data:
        yield Problem("data.train_data", "expected at least one dataset, found an empty list")
    if config.trainer.eval_interval > 0 and not (data.val_data or data.val_prompts) and data.test_size is None:
        yield Problem(
            "trainer.eval_interval",
            f"{config.trainer.eval_interval} asks for evaluation, but data.val_data is empty; name a dataset there or set trainer.eval_interval=0",
        )
    if data.test_size is not None and data.val_data:
        yield Problem("data.test_size", "has no effect with data.val_data; leave one of them out")
    for name, size in (("test_size", data.test_size), ("val_size", data.val_size)):
        if size is not None and size > 1 and size % 1:
            yield Problem(f"data.{name}", f"expected a share below 1 or a whole number of prompts, found {size}")
    yield from _selectors(data)
    if config.trainer.offline and family_of(config).longest_row(config) is None:
        yield Problem(
            "trainer.max_length", f'required with trainer.mode="{config.trainer.mode}": the longest row in tokens'
        )
    if data.weights and len(data.weights) != len(data.train_data):
        yield Problem(
            "data.weights",
            f"expected one per dataset of data.train_data ({len(data.train_data)}), found {len(data.weights)}",
        )
    if data.curriculum.hard_to >= data.curriculum.easy_from:
        yield Problem(
            "data.curriculum.hard_to",
            f"expected less than data.curriculum.easy_from ({data.curriculum.easy_from:g}), found {data.curriculum.hard_to:g}",
        )
    columns = {"prompt": data.prompt_column, "chosen": data.chosen_column, "rejected": data.rejected_column}
    pairs = config.trainer.pairwise or (config.trainer.unpaired and data.label_column is None)
    if pairs and len(set(columns.values())) < len(columns):
        yield Problem("data.rejected_column", f"expected three columns of a pair, found {columns}; name each once")
    if data.prompt_column == data.response_column:
        yield Problem("data.response_column", f"expected another column than data.prompt_column ({data.prompt_column})")


def lengths(config: ConfigTree) -> Iterator[Problem]:
    longest, prompt = config.max_input_length, config.trainer.max_prompt_length
    if config.generator.max_turns == 1 and longest != prompt:
        yield Problem(
            "generator.max_input_length",
            f"expected trainer.max_prompt_length ({prompt}) where generator.max_turns=1, found {longest}; leave it out",
        )
    elif longest < prompt:
        yield Problem(
            "generator.max_input_length",
            f"expected at least trainer.max_prompt_length ({prompt}), found {longest}",
        )


def several_turns(config: ConfigTree) -> Iterator[Problem]:
    if config.generator.max_turns > 1 and config.environment.reward_function:
        yield Problem(
            "generator.max_turns",
            "has no effect with environment.reward_function, which scores after one turn; leave it out, or use an environment",
        )
    elif config.generator.max_turns > 1 and config.environment.is_rewarded_later("train"):
        yield Problem(
            "generator.max_turns",
            "has no effect with environment.reward_model alone, which scores one turn; leave it out, or set use_environment=true",
        )


def learned_observations(config: ConfigTree) -> Iterator[Problem]:
    path, generator = "trainer.algorithm.observation_nll_coef", config.generator
    if config.trainer.algorithm.observation_nll_coef is None:
        return
    if generator.step_wise_trajectories:
        yield Problem(
            path,
            "has no effect with generator.step_wise_trajectories, where what the environment answers belongs to the prompt of the next turn; leave one of them out",
        )
    if generator.max_turns == 1 and not generator.inference_engine.enable_http_endpoint:
        yield Problem(
            path,
            "has no effect with generator.max_turns=1, where nothing is answered; leave it out, or raise max_turns",
        )


def chat(config: ConfigTree) -> Iterator[Problem]:
    template = config.generator.chat_template
    if template.source == "file" and not template.name_or_path:
        yield Problem("generator.chat_template.name_or_path", 'required with source="file": a Jinja file')
    if template.source == "name" and template.name_or_path and template.name_or_path not in _TEMPLATES:
        yield Problem(
            "generator.chat_template.name_or_path",
            f'expected one of {", ".join(_TEMPLATES)}, or source="file", found "{template.name_or_path}"',
        )


def step_wise(config: ConfigTree) -> Iterator[Problem]:
    path, generator = "generator.step_wise_trajectories", config.generator
    if not generator.step_wise_trajectories:
        return
    if generator.max_turns == 1:
        yield Problem(path, "has no effect with generator.max_turns=1; leave it out, or raise max_turns")
    if not generator.use_conversation_multi_turn:
        yield Problem(path, "needs generator.use_conversation_multi_turn=true, where each turn is a message of its own")


def best_of_samples(config: ConfigTree) -> Iterator[Problem]:
    algorithm, samples = config.trainer.algorithm, config.generator.n_samples_per_prompt
    if algorithm.advantage_estimator == "pass_at_k" and algorithm.pass_at_k.k > samples:
        yield Problem(
            "trainer.algorithm.pass_at_k.k",
            f"expected at most generator.n_samples_per_prompt={samples}, of which k are compared, found {algorithm.pass_at_k.k}",
        )


def dynamic_sampling(config: ConfigTree) -> Iterator[Problem]:
    path, algorithm = "trainer.algorithm.dynamic_sampling", config.trainer.algorithm
    sampling = algorithm.dynamic_sampling
    if sampling.type is None:
        return
    if config.generator.n_samples_per_prompt == 1:
        yield Problem(
            f"{path}.type",
            "has no effect with generator.n_samples_per_prompt=1, because a single sample has nothing to differ from; leave it out",
        )
    if algorithm.zero_variance_filter:
        yield Problem(
            "trainer.algorithm.zero_variance_filter",
            f"has no effect with {path}.type={sampling.type}, which leaves no group of equal rewards in a batch; leave one of them out",
        )


def sampling_parameters(config: ConfigTree) -> Iterator[Problem]:
    for section in ("sampling_params", "eval_sampling_params"):
        path = f"generator.{section}"
        for name in getattr(config.generator, section).additional_kwargs or {}:
            if own := _SAMPLING_NAMES.get(name):
                yield Problem(f"{path}.additional_kwargs.{name}", f"set {path}.{own} instead")
            elif name in _SAMPLING_OWN:
                yield Problem(
                    f"{path}.additional_kwargs.{name}", "hpcrl sets this sampling parameter itself; leave it out"
                )


def sampled_distribution(config: ConfigTree) -> Iterator[Problem]:
    """The trainer can work out the probabilities that what is trained was sampled with; evaluation may sample in any way."""
    path, sampling = "generator.sampling_params", config.generator.sampling_params
    evaluation = "generator.eval_sampling_params may have it"
    own = config.trainer.algorithm.temperature
    if own is not None and own != sampling.temperature:
        yield Problem(
            "trainer.algorithm.temperature",
            f"expected {path}.temperature ({sampling.temperature:g}), with which tokens are sampled, found {own:g}; leave it out",
        )
    if 0 < sampling.temperature < _COLDEST:
        yield Problem(
            f"{path}.temperature",
            f"expected at least {_COLDEST}, the lowest at which vLLM samples, found {sampling.temperature:g}",
        )
    if sampling.repetition_penalty != 1:
        yield Problem(
            f"{path}.repetition_penalty",
            f"changes probabilities in a way that the trainer does not compute; leave it out, {evaluation}",
        )
    if sampling.top_k > MOST_KEPT:
        yield Problem(f"{path}.top_k", f"expected at most {MOST_KEPT}, or -1, found {sampling.top_k}; {evaluation}")
    for name in sampling.additional_kwargs:
        if name not in {*_ENDINGS, *_LEAVING_OUT, *_SAMPLING_OWN, *_SAMPLING_NAMES}:
            why = "changes probabilities in a way" if name in _WEIGHING else "may change probabilities in a way"
            yield Problem(
                f"{path}.additional_kwargs.{name}",
                f"{why} that the trainer does not compute; leave it out, {evaluation}",
            )
    for name in config.generator.inference_engine.engine_init_kwargs:
        if name.replace("-", "_") == "logits_processors":
            yield Problem(
                f"generator.inference_engine.engine_init_kwargs.{name}",
                "may change probabilities in a way that the trainer does not compute; leave it out",
            )
    leaving_out = {f"{path}.top_p": sampling.top_p < 1, f"{path}.min_p": sampling.min_p > 0} | {
        f"{path}.additional_kwargs.{name}": name in sampling.additional_kwargs for name in sorted(_LEAVING_OUT)
    }
    for setting in (name for name, used in leaving_out.items() if used and not sampling.mask_size):
        yield Problem(
            setting,
            f"leaves tokens out, which the trainer has to know; set {path}.top_k from 1 to {MOST_KEPT} too, so that they can be "
            f"recorded, or leave it out, {evaluation}",
        )
