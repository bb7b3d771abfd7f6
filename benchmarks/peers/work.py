"""The work that both tools do, read from a configuration of hpcrl: prompts in hpcrl's order, the reward, the greedy score.

Nothing here needs TRL, and what needs torch imports it when it runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, cast

from hpcrl.config import Config
from hpcrl.controller.prompt_stream import PromptStream
from hpcrl.data.chat.count import token_counter
from hpcrl.data.chat.prompt_tokens import ChatTurns
from hpcrl.data.datasets import load_dataset
from hpcrl.data.prompts import drop_long
from hpcrl.data.sources import training_sources, validation_sources
from hpcrl.data.tokenizer import load_tokenizer
from hpcrl.envs.base import Environment
from hpcrl.envs.registry import common_extras, make_environment
from hpcrl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.toml"
LARGER = [
    "trainer.max_steps=2",
    "generator.sampling_params.max_generate_length=96",
    "trainer.eval_interval=0",
    "trainer.eval_before_train=false",
    "trainer.ckpt_interval=0",
]
"""What makes of the quickstart a work in which computing decides, with the model of `make_larger_model`."""


@dataclass(frozen=True)
class Work:
    """What is trained and evaluated.

    Attributes:
        train: the prompts of all steps, in the order in which hpcrl trains them.
        validation: empty where the configuration evaluates nothing.
        steps: of the whole run.
    """

    config: Config
    train: list[Prompt]
    validation: list[Prompt]
    steps: int

    @classmethod
    def of(cls, config: Config) -> Work:
        data, trainer, generator = config.data, config.trainer, config.generator
        sections = data, config.environment, generator.max_turns
        count = token_counter(trainer.policy.model.pretrained, generator.chat_template, generator.chat_template_kwargs)
        prompts = drop_long(
            load_dataset(training_sources(data), ("train",), *sections), count, trainer.max_prompt_length
        )
        steps = trainer.total_steps(len(prompts))
        stream = PromptStream(len(prompts), trainer.train_batch_size, trainer.seed, config.order_seed)
        train = [prompts[stream.row(index)] for index in range(steps * trainer.train_batch_size)]
        validation = (
            load_dataset(validation_sources(data, data.val_data), ("eval",), *sections)
            if trainer.eval_interval > 0
            else []
        )
        kept = drop_long(validation, count, trainer.max_prompt_length)
        return cls(config, train, kept, steps)

    def reward(self, prompt: Prompt, text: str) -> float:
        """Return what hpcrl's environment gives for the answer."""
        extras = common_extras(self.config.environment, self.config.generator.max_turns)
        environment = cast(Environment, make_environment(prompt.env_class, {**extras, **prompt.extras}))
        environment.init(prompt.messages)
        try:
            return environment.step(text).reward
        finally:
            environment.close()

    def greedy_score(self, model: PreTrainedModel) -> float:
        """Return the mean reward of the model's greedy answers to the validation prompts."""
        import torch

        generator = self.config.generator
        tokenizer = load_tokenizer(self.config.trainer.policy.model.pretrained, generator.chat_template)
        prompts = [
            ChatTurns(tokenizer, generator.chat_template_kwargs).opening(one.messages).token_ids
            for one in self.validation
        ]
        width = max(map(len, prompts))
        ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(one)) + one for one in prompts])
        mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in prompts])
        was_training = model.training
        model.eval()
        longest = generator.eval_sampling.max_generate_length
        found = model.generate(  # pyright: ignore[reportCallIssue]
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            do_sample=False,
            max_new_tokens=longest,
        )
        model.train(was_training)
        texts = tokenizer.batch_decode(found[:, width:], skip_special_tokens=True)
        return fmean(self.reward(prompt, text) for prompt, text in zip(self.validation, texts, strict=True))


def score_of(work: Work, model: str | Path) -> float:
    """Return the greedy score of a model in Hugging Face format, in float32."""
    from transformers import AutoModelForCausalLM

    return work.greedy_score(AutoModelForCausalLM.from_pretrained(model, dtype="float32"))


def make_larger_model(place: Path) -> None:
    """Write a random model of 34 million parameters with the quickstart's vocabulary and tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    small = QUICKSTART.parent / "quickstart" / "model"
    config = AutoConfig.from_pretrained(small)
    config.update({"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 8})
    config.update({"num_hidden_layers": 8, "max_window_layers": 8, "layer_types": ["full_attention"] * 8})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(place)
    AutoTokenizer.from_pretrained(small).save_pretrained(place)
