"""Refuses at submit what an engine would refuse at its start: samples longer than the model takes, and the engine's own checks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from hpcrl.config import Config
from hpcrl.config.backend import backend_of, teacher_backend
from hpcrl.config.errors import Problem
from hpcrl.config.rules.model_fit import text_entries
from hpcrl.config.sections.model import Pretrained
from hpcrl.config.token_limits import longest_sample
from hpcrl.launch.backend import launch_backend
from hpcrl.launch.submit.models import entries_of, folder_of

_LENGTHS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length"),
    *("max_target_positions", "max_sequence_length", "max_seq_length", "seq_len"),
)
_HEADS = "num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules"
_SCALED_ALREADY = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "default")


def check_engine(config: Config) -> Iterator[Problem]:
    """Yield what the engines of a run would refuse, as far as the model and the engine are on this machine."""
    entries = entries_of(config.trainer.policy.model.pretrained)
    if entries is not None:
        yield from _lengths(config, entries)
        yield from _drafts(config, {**entries, **text_entries(entries)})
    if config.has_engines:
        if engine := launch_backend(backend_of(config.generator.inference_engine)):
            yield from engine.check_engine(config, entries)
        distillation = config.trainer.distillation
        teacher = teacher_backend(distillation) if distillation.enable else None
        if teacher and (own := launch_backend(teacher)):
            yield from own.check_teacher(config)


def _drafts(config: Config, entries: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield why the policy, or another model, cannot make drafts for it."""
    path, own = "generator.inference_engine.speculative", config.generator.inference_engine.speculative
    policy = f"the policy at {config.trainer.policy.model.path}"
    if own.method == "mtp" and not any(entries.get(name) for name in _HEADS):
        yield Problem(
            f"{path}.method", f"{policy} has no heads for several tokens (its config.json lacks {', '.join(_HEADS)})"
        )
    if own.method != "draft_model" or own.model is None:
        return
    drafts = Pretrained(own.model)
    found = entries_of(drafts)
    if found is None:
        return  # vLLM compares the sizes of the vocabularies too
    sizes = [each.get("vocab_size") for each in (text_entries(found), entries)]
    if sizes[0] != sizes[1]:
        yield Problem(f"{path}.model", f"expected the {sizes[1]} tokens of {policy}, found {sizes[0]}: {own.model}")
    elif (named := different_token(drafts, config.trainer.policy.model.pretrained)) is not None:
        yield Problem(f"{path}.model", f"its tokens are others than those of {policy}, such as {named}: {own.model}")


def different_token(one: Pretrained, other: Pretrained) -> str | None:
    """Return a token that two models' tokenizer.json number differently; None: there is none, or one of the files is not here."""
    found = [
        json.loads(path.read_text(encoding="utf-8"))["model"]["vocab"]
        for folder in map(folder_of, (one, other))
        if folder is not None and (path := folder / "tokenizer.json").is_file()
    ]
    if len(found) < 2 or not all(isinstance(vocabulary, dict) for vocabulary in found):
        return None
    return next((f"{token!r}" for token, number in found[1].items() if found[0].get(token) != number), None)


def merged_for_engines(config: Config) -> Iterator[str]:
    """Yield a warning where engines get whole policies although the configuration does not say so."""
    lora = config.trainer.policy.model.lora
    if config.has_engines and lora.rank and not (lora.loadable or config.generator.inference_engine.merge_lora):
        yield (
            "engines cannot load what trainer.policy.model.lora trains here (by modules_to_save, target_parameters or init_method): each "
            "version is the whole policy, merged, as with generator.inference_engine.merge_lora=true"
        )


def layers_over_nodes(config: Config) -> Iterator[str]:
    """Yield a warning where the GPUs that share each layer of a replica are on several nodes."""
    engine, gpus = config.generator.inference_engine, config.slurm.gpus
    if config.has_engines and not engine.remote_urls and 0 < gpus < engine.tensor_parallel_size:
        yield (
            f"generator.inference_engine.tensor_parallel_size={engine.tensor_parallel_size} is more than a node's {gpus} GPUs: they wait for each "
            "other over the network twice in each layer; pipeline_parallel_size shares layers among nodes instead"
        )


def _lengths(config: Config, entries: Mapping[str, Any]) -> Iterator[Problem]:
    generator = config.generator
    changes = config.trainer.policy.config_overrides
    overrides = generator.inference_engine.engine_init_kwargs.get("hf_overrides", {})
    rope, _ = config.engine_rope
    most = position_limit({**entries, **changes, **overrides}, rope)
    offline = config.trainer.offline
    wanted = longest_sample(config) if offline else config.max_model_len
    if most is None or wanted <= most:
        return
    if offline:
        yield Problem(
            "trainer.max_length",
            f"{wanted} is more than the {most} tokens that the model at {config.trainer.policy.model.path} takes (its config.json); lower it",
        )
        return
    before = config.max_input_length
    name = "trainer.max_prompt_length" if generator.max_input_length is None else "generator.max_input_length"
    yield Problem(
        name,
        f"{before} tokens before a turn and {wanted - before} of max_generate_length are {wanted}, more than the {most} that the model at "
        f"{config.trainer.policy.model.path} takes (its config.json); lower {name} or generator.sampling_params.max_generate_length",
    )


def position_limit(entries: Mapping[str, Any], rope: Mapping[str, Any] | None = None) -> int | None:
    """Return the tokens that a model takes at most, as vLLM 0.31 derives them (`_get_and_verify_max_len`); None: its config.json does not say.

    Args:
        entries: of config.json.
        rope: scaling of the rotary positions in the place of the model's own; empty: that.
    """
    own = text_entries(entries)
    limits = [own[name] for name in _LENGTHS if isinstance(own.get(name), int)]
    if not limits:
        return None
    scaling = rope or own.get("rope_parameters") or own.get("rope_scaling") or {}
    kinds = scaling.values() if all(isinstance(kind, Mapping) for kind in scaling.values()) else [scaling]
    factors = [kind.get("factor") or 1.0 for kind in kinds if _type_of(kind) not in _SCALED_ALREADY]
    scaled = factors and "gemma3" not in str(own.get("model_type", ""))
    length = own["model_max_length"] if isinstance(own.get("model_max_length"), int) else min(limits)
    return int(length * factors[-1]) if scaled else length


def _type_of(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")
