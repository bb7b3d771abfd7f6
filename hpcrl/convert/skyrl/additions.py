"""The settings that SkyRL has got since March 2026, where their value is written differently here, or decides about several settings."""

from __future__ import annotations

from dataclasses import fields

from hpcrl.config.sections.generator import SpeculativeConfig
from hpcrl.convert.conversion import Conversion
from hpcrl.convert.skyrl.source import SkyrlSource

_ALGORITHM, _ENGINE, _MEGATRON = "trainer.algorithm.", "generator.inference_engine.", "trainer.policy.megatron_config."
_PROFILER = "trainer.policy.torch_profiler_config."
_ROUTERS = r"\.mlp\.(gate|router)\.weight$"


def _noted(source: SkyrlSource, conversion: Conversion, path: str, target: str, message: str = "") -> None:
    conversion.note("translated" if message else "mapped", source.names[path], target, message)


def fully_async(source: SkyrlSource, conversion: Conversion, path: str) -> None:
    """Also as where the program is SkyRL's fully asynchronous one; max_staleness_steps is written in any case."""
    _noted(source, conversion, path, "trainer.fully_async.max_staleness_steps")


def full_batches(source: SkyrlSource, conversion: Conversion, path: str) -> None:
    """`settled` leaves out zero_variance_filter, which has nothing to leave out of such batches."""
    target = _ALGORITHM + "dynamic_sampling.type"
    if source.given[path]:
        conversion.values[target] = "filter"
        message = 'true: "filter", which generates other groups in place of those whose rewards are all equal; zero_variance_filter is left out'
        _noted(source, conversion, path, target, message)
    else:
        conversion.note("mapped", source.names[path], "", "false: groups are trained as they come")


def cispo_anchor(source: SkyrlSource, conversion: Conversion, path: str) -> None:
    target = _ALGORITHM + "use_rollout_logprobs_for_loss"
    if source[_ALGORITHM + "policy_loss_type"] != "cispo":
        conversion.note("dropped", source.names[path], "", "had no effect without policy_loss_type=cispo")
        return
    conversion.values[target] = source.given[path] == "rollout"
    _noted(source, conversion, path, target, "the ratio of the loss is that to the rollout, or to the old policy")


def router_replay(source: SkyrlSource, conversion: Conversion, path: str) -> None:
    """Choices of experts are repeated where both the trainer and the engine are to do their part."""
    target = "trainer.policy.experts.router_replay"
    both = (_MEGATRON + "moe_enable_routing_replay", _ENGINE + "enable_return_routed_experts")
    if all(source[one] for one in both):
        conversion.values[target] = "R3"
    elif source.given[path]:
        other = both[1] if path == both[0] else both[0]
        conversion.note("dropped", source.names[path], "", f"had no effect without {other}")
        return
    _noted(source, conversion, path, target)


def freeze_routers(source: SkyrlSource, conversion: Conversion, path: str) -> None:
    target = "trainer.policy.freeze_pattern"
    if source.given[path]:
        conversion.values[target] = [_ROUTERS]
        message = "true: the names of routers in Hugging Face's models of this kind; other names need another pattern"
        _noted(source, conversion, path, target, message)
    else:
        _noted(source, conversion, path, target)


def profiled_from(source: SkyrlSource, conversion: Conversion, path: str) -> None:
    target = "trainer.profiler.wait_steps"
    conversion.values[target] = source.number(_PROFILER + "skip_first") + source.number(_PROFILER + "wait")
    _noted(source, conversion, path, target, "skip_first and wait together")


def tokens_per_pass(source: SkyrlSource, conversion: Conversion, path: str) -> None:
    target, value = "trainer.max_tokens_per_micro_batch", source.given[path]
    if isinstance(value, int) and value <= 0:
        conversion.note("mapped", source.names[path], target, f"{value}: unset")
    else:
        conversion.values[target] = value
        _noted(source, conversion, path, target)


def joined_steps(source: SkyrlSource, conversion: Conversion, path: str) -> None:
    """SkyRL joins steps of which one begins with the other; here they stay samples, and what they share is computed once."""
    name, target = source.names[path], "trainer.shared_prefixes"
    if not source.given[path]:
        _noted(source, conversion, path, target)
    elif not source["generator.step_wise_trajectories"]:
        conversion.note("dropped", name, "", "had no effect without generator.step_wise_trajectories")
    else:
        conversion.values[target] = source["trainer.strategy"] != "megatron"
        reduction = source[_ALGORITHM + "loss_reduction"]
        same = (
            "the same tokens are trained" if reduction == "token_mean" else f"{reduction} counts each step as a sample"
        )
        conversion.note(
            "translated" if reduction == "token_mean" else "differs",
            name,
            target,
            f"steps stay samples of their own: {same}",
        )


def prefill_apart(source: SkyrlSource, conversion: Conversion, path: str) -> None:
    """`settled` leaves out vLLM's option for it."""
    if source.given[path]:
        message = "every engine reads prompts and generates, which gives the same samples; engine_init_kwargs.kv_transfer_config is left out"
        conversion.note("translated", source.names[path], "", message)
    else:
        conversion.note("mapped", source.names[path], "", "false: every engine does both")


def drafts(source: SkyrlSource, conversion: Conversion, path: str) -> None:
    """Give each entry of vLLM's option the setting of its name."""
    name, given = source.names[path], source.given[path]
    if not given:
        conversion.note("mapped", name, "", "no drafts on either side")
        return
    known = {one.name for one in fields(SpeculativeConfig)}
    for entry, value in given.items() if isinstance(given, dict) else [("", given)]:
        target = f"{_ENGINE}speculative.{entry}"
        if entry in known:
            conversion.values[target] = value
            conversion.note("translated", f"{name}.{entry}", target, "a setting of its own")
        else:
            what = "this entry of vLLM's option has no setting here; leave it out, or see generator.inference_engine.speculative"
            conversion.note("conflict", f"{name}.{entry}".rstrip("."), "", what)


def engine_options(source: SkyrlSource, conversion: Conversion) -> None:
    """Give vLLM's options that have a setting of their own its name, and leave out the one that hpcrl works out."""
    path, values = _ENGINE + "engine_init_kwargs", conversion.values
    given = source[path] if isinstance(source[path], dict) else {}
    name = source.names.get(path, path)
    if "quantization" in given:
        values[path] = {key: value for key, value in values[path].items() if key != "quantization"}
        values[_ENGINE + "quantization"] = given["quantization"]
        conversion.note("translated", f"{name}.quantization", _ENGINE + "quantization", "a setting of its own")
    if "max_model_len" in given:
        values[path] = {key: value for key, value in values[path].items() if key != "max_model_len"}
        prompt = source["generator.max_input_length"] or source["trainer.max_prompt_length"]
        needed, most = prompt + source["generator.sampling_params.max_generate_length"], given["max_model_len"]
        enough = isinstance(most, int) and most >= needed
        message = "follows from generator.max_input_length and max_generate_length, which are " + (
            "no more than that"
            if enough
            else f"{needed} together: longer responses end there in SkyRL; lower one of them"
        )
        conversion.note("dropped" if enough else "conflict", f"{name}.max_model_len", "", message)


def settled(source: SkyrlSource, conversion: Conversion) -> None:
    """Leave out what others of these settings replace, wherever in the source it stands."""
    values, options = conversion.values, _ENGINE + "engine_init_kwargs"
    if source["trainer.fully_async.sample_full_batch"] and values.get(_ALGORITHM + "dynamic_sampling.type") == "filter":
        for name in ("zero_variance_filter", "zero_variance_filter_tol"):
            values.pop(_ALGORITHM + name, None)
    if source[_ENGINE + "enable_pd"]:
        for path in [path for path in values if path.startswith(f"{options}.kv_transfer_config")]:
            values.pop(path)
        if isinstance(table := values.get(options), dict):
            values[options] = {name: value for name, value in table.items() if name != "kv_transfer_config"}


def cispo_bounds(source: SkyrlSource, conversion: Conversion) -> None:
    """Write the bounds of cispo that the source leaves to SkyRL's defaults, which have changed."""
    if source[_ALGORITHM + "policy_loss_type"] != "cispo" or source.old:
        return
    for name, new in {"cispo_eps_clip_low": 1.0, "cispo_eps_clip_high": 4.0}.items():
        path = f"{_ALGORITHM}cispo.{name}"
        if path not in source.names:
            conversion.values[path] = new
            before = source[path]
            message = f"left out: {new}, SkyRL's default of August 2026; until March 2026 it was {before}, which a run of then had"
            conversion.note("differs", path, path, message)
