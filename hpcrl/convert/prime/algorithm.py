"""Batches, lengths and advantages of prime-rl."""

from __future__ import annotations

from typing import Any

from hpcrl.convert.conversion import Conversion
from hpcrl.convert.prime.source import PrimeSource
from hpcrl.convert.rules import Rule, lost, put, seen

_ALG, _SAMPLING = "trainer.algorithm.", "generator.sampling_params."
_ORCHESTRATOR, _LENGTH = "orchestrator.", "orchestrator.train.sampling.max_completion_tokens"
_IN_BODY = ("top_k", "top_p", "min_p", "repetition_penalty")


def _steps(source: PrimeSource, conversion: Conversion, path: str) -> None:
    if source[path] is None:
        lost(source, conversion, path, "trainer.max_steps", "prime-rl runs until it is stopped; write the last step")
        return
    put(source, conversion, path, "trainer.max_steps", source[path])
    conversion.values["trainer.epochs"] = source[path]


def _lengths(source: PrimeSource, conversion: Conversion, path: str) -> None:
    whole, response = source.number("seq_len"), source[_LENGTH]
    if path == "trainer.model.seq_len":
        put(
            source,
            conversion,
            path,
            "trainer.max_tokens_per_micro_batch",
            source[path] or whole,
            "" if source[path] else "seq_len",
        )
    elif path == _LENGTH:
        seen(source, conversion, path, _SAMPLING + "max_generate_length")
    else:
        bounded = isinstance(response, int) and response < whole
        prompt = whole - response if bounded else max(1, whole // 4)
        conversion.values[_SAMPLING + "max_generate_length"] = whole - prompt
        put(source, conversion, path, "trainer.max_prompt_length", prompt, f"{whole} less the longest response")
        if not bounded:
            message = f"prime-rl generates until a sample has {whole} tokens; here {prompt} are for what comes before a response, set both as you need them"
            conversion.note("differs", source.names.get(path, path), _SAMPLING + "max_generate_length", message)


def _batch(source: PrimeSource, conversion: Conversion, path: str) -> None:
    group, in_tokens = source.number(_ORCHESTRATOR + "group_size"), _ORCHESTRATOR + "token_batch_size" in source.names
    samples = None if in_tokens and path not in source.names else source[path]  # a batch of tokens has no default
    if not isinstance(samples, int) or samples % group:
        message = f"expected a number of samples that group_size, {group}, divides; found {samples}"
        lost(source, conversion, path, "trainer.train_batch_size", message)
        return
    put(
        source,
        conversion,
        path,
        "trainer.train_batch_size",
        samples // group,
        f"{samples} samples of {group} for each prompt",
    )
    conversion.values["trainer.policy_mini_batch_size"] = samples // group


def _group(source: PrimeSource, conversion: Conversion, path: str) -> None:
    put(source, conversion, path, "generator.n_samples_per_prompt", source[path])
    conversion.values[_ALG + "grpo_norm_by_std"] = False
    message = "as in prime-rl the advantage is the reward less the mean of its group, not divided by a deviation"
    conversion.note("translated", source.names.get(path, path), _ALG + "grpo_norm_by_std", message)


def _staleness(source: PrimeSource, conversion: Conversion, path: str) -> None:
    older = source[_ORCHESTRATOR + "max_async_level"]
    if path.endswith("max_async_level"):
        seen(source, conversion, path)
        return
    value = source[path] if older is None else min(source[path], older)
    how = "the policy may be as many steps old; prime-rl counts the policies that generated one sample"
    put(source, conversion, path, "trainer.fully_async.max_staleness_steps", value, how)


def _body(source: PrimeSource, conversion: Conversion, path: str) -> None:
    for key, value in source[path].items():
        if key in _IN_BODY:
            put(source, conversion, path, _SAMPLING + key, value)
        else:
            lost(
                source,
                conversion,
                path,
                "",
                f"{key}: expected {', '.join(_IN_BODY)}; further words are additional_kwargs",
            )


def _named(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else value


def _advantage(source: PrimeSource, conversion: Conversion, path: str) -> None:
    given = source[path] if isinstance(source[path], list) else [source[path]]
    plain = {"grpo", "default", None}
    if (
        len(given) > 1
        or any(_named(one, "id") not in plain or _named(one, "type") not in plain for one in given)
        or (given and isinstance(given[0], dict) and set(given[0]) - {"id", "type"})
    ):
        message = "expected grpo or default; trainer.algorithm.advantage_estimator has others, under other names (docs/algorithms.md)"
        lost(source, conversion, path, _ALG + "advantage_estimator", message)
    else:
        seen(source, conversion, path)


def _seed(source: PrimeSource, conversion: Conversion, path: str) -> None:
    if source[path] is not None:
        put(source, conversion, path, "trainer.seed", source[path])


ALGORITHM: dict[str, Rule[PrimeSource]] = {
    "max_steps": _steps,
    "seq_len": _lengths,
    "trainer.model.seq_len": _lengths,
    _LENGTH: _lengths,
    "orchestrator.train.sampling.extra_body": _body,
    _ORCHESTRATOR + "batch_size": _batch,
    _ORCHESTRATOR + "group_size": _group,
    _ORCHESTRATOR + "max_off_policy_steps": _staleness,
    _ORCHESTRATOR + "max_async_level": _staleness,
    _ORCHESTRATOR + "algorithms": _advantage,
    _ORCHESTRATOR + "advantage": _advantage,
    _ORCHESTRATOR + "seed": _seed,
}
