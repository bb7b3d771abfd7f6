"""Checks by config.json whether ranks can share a model (Megatron-core, sequence parallelism), and whether samples can be packed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hpcrl.config.errors import Problem
from hpcrl.config.rules.megatron_groups import given_stages, layers_of_stages
from hpcrl.config.sections.megatron import MegatronModelConfig

MEGATRON_FAMILIES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "qwen2": "Qwen2",
    "qwen2_moe": "Qwen2-MoE",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE",
}
"""model_type in config.json -> name, of the models that trainer.strategy=megatron trains."""

STATE_LAYERS = {
    "bamba": "BambaMixer",
    "falcon_h1": "FalconH1Mixer",
    "falcon_mamba": "FalconMambaMixer",
    "granitemoehybrid": "GraniteMoeHybridMambaLayer",
    "jamba": "JambaMambaMixer",
    "lfm2": "Lfm2ShortConv",
    "lfm2_moe": "Lfm2MoeShortConv",
    "mamba": "MambaMixer",
    "mamba2": "Mamba2Mixer",
    "nemotron_h": "NemotronHMamba2Mixer",
    "olmo_hybrid": "OlmoHybridGatedDeltaNet",
    "qwen3_5_text": "Qwen3_5GatedDeltaNet",
    "qwen3_5_moe_text": "Qwen3_5MoeGatedDeltaNet",
    "qwen3_next": "Qwen3NextGatedDeltaNet",
    "zamba": "ZambaMambaMixer",
    "zamba2": "Zamba2MambaMixer",
}
"""model_type in config.json -> class in transformers of the layers that carry a state from token to token. Packed samples of these models
are known not to share that state."""

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_ATTENTION = {"full_attention", "sliding_attention", "attention"}
_MOST_NAMED = 12


def misfits(
    path: str, sizes: MegatronModelConfig, entries: Mapping[str, Any], whose: str = "model"
) -> Iterator[Problem]:
    """Yield what Megatron-core cannot compute, or not divide; an entry that the model does not have is not looked at.

    Args:
        path: dotted path of the section `sizes`.
        entries: of config.json, with the changes that the run makes.
        whose: what an error calls the model.
    """
    family = entries.get("model_type", next(iter(MEGATRON_FAMILIES)))
    if family not in MEGATRON_FAMILIES:
        yield Problem(
            path,
            f'the {whose} is of type "{family}", which the backend megatron does not know; it knows '
            f"{', '.join(MEGATRON_FAMILIES)}. Use fsdp2 in place of megatron, or another model",
        )
        return
    entries = text_entries(entries)
    yield from _tensor(path, sizes, entries, whose)
    yield from _stages(path, sizes, entries, whose)
    yield from _experts(path, sizes, entries, whose)


@dataclass(frozen=True)
class HeadShare:
    """The heads of one of the ranks that share the tokens of samples, with FSDP2.

    Attributes:
        queries: of the model's query heads; some ranks have one more than others where they cannot be shared equally.
        keys: the heads of keys and values that these belong to, of which several ranks may have the same.
    """

    queries: range
    keys: range
    _group: int

    @property
    def times(self) -> list[int]:
        """Return the number of these query heads for each of `keys`."""
        return [sum(head // self._group == key for head in self.queries) for key in self.keys]

    @classmethod
    def of(cls, heads: int, key_heads: int, ranks: int) -> list[HeadShare]:
        """Return the heads of each rank; there are at most as many ranks as query heads."""
        group, ends = heads // key_heads, [heads * rank // ranks for rank in range(ranks + 1)]
        queries = [range(*part) for part in pairwise(ends)]
        return [cls(own, range(own[0] // group, own[-1] // group + 1), group) for own in queries]


def cannot_share(path: str, ranks: int, entries: Mapping[str, Any], whose: str) -> Iterator[Problem]:
    """Yield why so many ranks cannot share the tokens of a model's samples (FSDP2's sequence parallelism); arguments as of `misfits`."""
    entries = text_entries(entries)
    if ranks > 1 and entries.get("model_type") in STATE_LAYERS:
        yield Problem(
            path,
            f"the {whose} has layers that carry a state from token to token, so that ranks cannot share its tokens; leave it out",
        )
    heads = _count(entries, "num_attention_heads")
    if heads and ranks > heads:
        yield Problem(
            path,
            f"in attention each of {ranks} ranks has query heads of its own, and the {whose} has {heads}{factors(heads)}; use at most {heads}, "
            "best a divisor",
        )


def cannot_spread(path: str, ranks: int, entries: Mapping[str, Any], whose: str) -> Iterator[Problem]:
    """Yield why so many ranks cannot share the experts of a model (FSDP2's expert parallelism); arguments as of `misfits`."""
    if ranks == 1:
        return
    if not has_experts(entries):
        yield Problem(path, f"the {whose} has no experts that {ranks} ranks could share; use 1")
    elif experts := experts_of(text_entries(entries)):
        yield from _divided(path, ranks, {"experts": experts}, whose)


def text_entries(entries: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the entries of the language model, where a model has other parts too."""
    text = entries.get("text_config")
    return text if isinstance(text, Mapping) else entries


def experts_of(entries: Mapping[str, Any]) -> int:
    """Return how many experts a layer has, not counting shared ones; 0: none."""
    return next((count for name in _EXPERTS if (count := _count(entries, name))), 0)


def has_experts(entries: Mapping[str, Any]) -> bool:
    """Return whether a model is a mixture of experts, by whatever name its config.json counts them."""
    return any("experts" in name and type(value) is int and value > 0 for name, value in text_entries(entries).items())


def other_layers(entries: Mapping[str, Any]) -> list[str]:
    """Return the kinds of layers that are no attention, and may carry a state from one packed sample into the next, as far as config.json names them."""
    entries = text_entries(entries)
    if entries.get("model_type") in STATE_LAYERS:
        return []
    kinds = entries.get("layer_types") or entries.get("layers_block_type") or ()
    return sorted({str(kind) for kind in kinds} - _ATTENTION)


def _count(entries: Mapping[str, Any], name: str) -> int:
    value = entries.get(name)
    return value if isinstance(value, int) else 0


def _tensor(path: str, sizes: MegatronModelConfig, entries: Mapping[str, Any], whose: str) -> Iterator[Problem]:
    heads = _count(entries, "num_attention_heads")
    counts = {
        "attention heads": heads,
        # Megatron-core could give several ranks the same key-value head; hpcrl does not cut weights that way
        "key-value heads": _count(entries, "num_key_value_heads") or heads,
    }
    if not (experts_of(entries) and _count(entries, "moe_intermediate_size")):
        counts["columns of the MLP (intermediate_size)"] = _count(entries, "intermediate_size")
    counts["columns of the shared expert"] = _count(entries, "shared_expert_intermediate_size")
    yield from _divided(f"{path}.tensor_model_parallel_size", sizes.tensor_model_parallel_size, counts, whose)


def _experts(path: str, sizes: MegatronModelConfig, entries: Mapping[str, Any], whose: str) -> Iterator[Problem]:
    experts, expert_path = experts_of(entries), f"{path}.expert_model_parallel_size"
    if experts:
        columns = _count(entries, "moe_intermediate_size") or _count(entries, "intermediate_size")
        own = sizes.expert_tensor_parallel_size is not None
        tensor_path = f"{path}.{'expert_tensor_parallel_size' if own else 'tensor_model_parallel_size'}"
        yield from _divided(expert_path, sizes.expert_model_parallel_size, {"experts": experts}, whose)
        yield from _divided(tensor_path, sizes.experts_tensor_size, {"columns of each expert": columns}, whose)
        return
    if sizes.expert_model_parallel_size > 1:
        yield Problem(
            expert_path, f"the {whose} has no experts that {sizes.expert_model_parallel_size} ranks could share; use 1"
        )
    if sizes.expert_tensor_parallel_size is not None:
        yield Problem(f"{path}.expert_tensor_parallel_size", f"the {whose} has no experts; leave it out")


def _stages(path: str, sizes: MegatronModelConfig, entries: Mapping[str, Any], whose: str) -> Iterator[Problem]:
    layers, stages, given = (
        _count(entries, "num_hidden_layers"),
        sizes.pipeline_model_parallel_size,
        given_stages(sizes),
    )
    if not layers or given is None:
        return
    spread = layers_of_stages(layers, sizes)
    if spread is None:
        stages_path = f"{path}.pipeline_model_parallel_size"
        if given == (None, None):
            uneven = f"{path}.transformer_config_kwargs.num_layers_in_first_pipeline_stage or num_layers_in_last_pipeline_stage"
            for problem in _divided(stages_path, stages, {"layers": layers}, whose):
                yield Problem(
                    problem.path, f"{problem.message}, or give the first or last stage other layers ({uneven})"
                )
            return
        parts = [
            f"{own} of the {name} stage" for name, own in zip(("first", "last"), given, strict=True) if own is not None
        ]
        rest = layers - sum(own for own in given if own is not None)
        yield Problem(
            stages_path,
            f"{layers} layers of the {whose} without {' and '.join(parts)} (transformer_config_kwargs) are {rest}, which the other "
            f"{stages - len(parts)} stages of {stages} cannot share equally; change one of them",
        )
        return
    own = sizes.pipeline_layers_per_stage
    if sizes.pipeline_schedule != "Interleaved1F1B" or own is None:
        return
    most = max(spread)
    if most % own or own == most or any(count % (most // own) for count in spread):
        allowed = [size for size in _divisors(math.gcd(*spread))[:-1] if all(c % (most // size) == 0 for c in spread)]
        remedy = f"use {_either(allowed)}" if allowed else 'set pipeline_schedule="1F1B"'
        yield Problem(
            f"{path}.pipeline_layers_per_stage",
            f"{own} does not cut the {most} layers of a rank ({layers} layers of the {whose} / {stages} stages) into several virtual "
            f"stages of equal size; {remedy}",
        )


def _divided(path: str, size: int, counts: Mapping[str, int], whose: str) -> Iterator[Problem]:
    counts = {name: count for name, count in counts.items() if count}
    wrong = [f"{count:,} {name}{factors(count)}" for name, count in counts.items() if count % size]
    if wrong:
        yield Problem(
            path,
            f"{size} does not divide the {whose}'s {' and '.join(wrong)}; use {_either(_divisors(math.gcd(*counts.values())))}",
        )


def factors(count: int) -> str:
    """Return the prime factors of a number in brackets, as an error shows them; nothing for 1 and a prime."""
    found, rest, prime = list[int](), count, 2
    while rest > 1:
        while rest % prime == 0:
            found.append(prime)
            rest //= prime
        prime = prime + 1 if prime * prime <= rest else rest
    return f" ({count:,} = {' x '.join(map(str, found))})" if len(found) > 1 else ""


def _divisors(count: int) -> list[int]:
    return [size for size in range(1, count + 1) if count % size == 0]


def _either(sizes: list[int]) -> str:
    names = [str(size) for size in sizes[:_MOST_NAMED]]
    if len(sizes) > _MOST_NAMED:
        return f"{', '.join(names)} or another divisor"
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
