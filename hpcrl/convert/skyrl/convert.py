"""SkyRL's configurations, YAML of the old and the present layout and command lines, to hpcrl's.

What counts is what the source's run did:

* A setting that the source leaves out has SkyRL's default, of the old layout where the source is of it. It is written where it differs
  from the default here and changes results. These are data, model, environment, sampling in evaluation, and what the old layout had
  otherwise (ranks, tensor parallelism, graphs, loss_reduction). A YAML file is of the old layout if it has a name that only that layout
  has. A command line is only if it has one that the present SkyRL refuses: flat `generator.` names are still taken, with new defaults.
* Defaults that differ on purpose (`why` of a setting) stay as they are here: names, trackers, how weights reach the engines. Colocation is
  SkyRL's default, and is written; where it cannot be, trainer and engines get nodes of their own, which costs nodes and changes no result.
* The old policy loss was a mean over samples of token means. A file of the old layout that names neither the loss's reduction nor its
  new name gets loss_reduction = "sequence_mean". In SkyRL "token_mean" is a mean per micro-batch; here it is of the whole mini-batch.
* Settings without effect in the source are dropped: a critic's without a critic, Megatron's with FSDP, fully asynchronous ones in
  synchronous training.
* `slurm.gpus_per_node` gets the most GPUs that one node needs, because 0, the default, is a run on CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_origin

from hpcrl.config.difference import value_as_toml
from hpcrl.convert.conversion import Conversion, known, location
from hpcrl.convert.mapping import Dropped, To
from hpcrl.convert.sbatch import convert_sbatch
from hpcrl.convert.script import command_of, note_command
from hpcrl.convert.skyrl import sft
from hpcrl.convert.skyrl.additions import cispo_bounds, engine_options, settled
from hpcrl.convert.skyrl.fields import OLD_DEFAULTS, TARGETS
from hpcrl.convert.skyrl.numbers import note_numbers
from hpcrl.convert.skyrl.program import is_custom, is_sft, note_program
from hpcrl.convert.skyrl.source import SkyrlSource, read_overrides, read_yaml
from hpcrl.convert.skyrl.translate import (
    TRANSLATIONS,
    colocate_all,
    engine_width,
    has_advantages,
    has_critic,
    has_reference,
    is_colocated,
    is_fully_async,
    left_out_cap,
    other_placement,
    overlong,
    packing,
    renamed_environment,
    schedules,
)

__all__ = ["TARGETS", "convert_overrides", "convert_script", "convert_yaml"]

_PLACEMENT = "trainer.placement."
_ALGORITHM = "trainer.algorithm."
_ENGINE = "generator.inference_engine."
_TRAIN, _EVAL = "generator.sampling_params.", "generator.eval_sampling_params."
_SAMPLING = (
    "max_generate_length",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "stop",
    "additional_kwargs",
)
_NAMES = ("trainer.project_name", "trainer.run_name")
_TABLES = ("transformer_config_kwargs", "optimizer_config_kwargs")
_OFFLOADED = (
    "trainer.policy.optimizer_config.offload_after_step",
    "trainer.critic.optimizer_config.offload_after_step",
)
_CRITICS = (
    "trainer.critic.",
    "trainer.critic_mini_batch_size",
    _ALGORITHM + "value_clip",
    _ALGORITHM + "value_head_prefix",
)
_ONE_TURN = ("generator.use_conversation_multi_turn", "generator.append_eos_token_after_stop_str_in_multi_turn")
_REMARKS = {
    _EVAL + "repetition_penalty": "SkyRL never hands it to the engine; here it has its effect",
    _ALGORITHM + "zero_variance_filter": "SkyRL's has no effect on rewards per token, its default; here it always has",
    _ENGINE + "enable_chunked_prefill": "SkyRL never hands it to the engine; here it has its effect",
}


def convert_yaml(text: str | bytes, origin: str) -> Conversion:
    """Return the conversion of a YAML document in SkyRL's old or present layout.

    Args:
        origin: where it comes from, for errors and the first line of the TOML.

    Raises:
        ConfigError: it is not UTF-8, not YAML, or no table of settings; names the place.
    """
    conversion = Conversion(origin)
    return _convert(read_yaml(text, conversion), conversion)


def convert_overrides(words: Sequence[str], origin: str) -> Conversion:
    """Return the conversion of a SkyRL command, whose words are split and unquoted as the shell does it.

    Args:
        words: the `key=value` words, and, if you like, the program and its options before them.
        origin: where they come from, for errors and the first line of the TOML.

    Raises:
        ConfigError: a value is not YAML; names the word.
    """
    conversion = Conversion(origin)
    return _convert(read_overrides(words, conversion), conversion)


def convert_script(text: str, origin: str) -> Conversion:
    """Return the conversion of the SkyRL command in a shell script.

    Raises:
        ConfigError: there is none, or a value of it is not YAML.
    """
    command, conversion = command_of(text, origin), Conversion(origin)
    source = read_overrides(command.words, conversion)
    note_command(command, source, conversion, source.layout.present, _NAMES)
    return _convert(source, conversion, command.batch)


def _convert(source: SkyrlSource, conversion: Conversion, batch: str = "") -> Conversion:
    if source.program is not None:
        note_program(source.program, conversion)
    for path in source.names:
        _convert_setting(source, conversion, path)
    if is_sft(source.program):
        sft.complete(source, conversion)
    else:
        _complete(source, conversion)
    convert_sbatch(batch, conversion)
    order = {name: index for index, name in enumerate(source.names.values())}
    conversion.entries.sort(key=lambda entry: order.get(entry.source, len(order)))
    conversion.finish()
    return conversion


def _complete(source: SkyrlSource, conversion: Conversion) -> None:
    for part in (
        _left_out,
        _old_loss,
        _placement,
        left_out_cap,
        cispo_bounds,
        _eager,
        settled,
        engine_options,
        _eval_sampling,
        _fully_async,
        overlong,
        renamed_environment,
        schedules,
        packing,
        _gpus_per_node,
    ):
        part(source, conversion)
    note_numbers(source, conversion)


def _convert_setting(source: SkyrlSource, conversion: Conversion, path: str) -> None:
    name, layout = source.names[path], source.layout
    target, is_rl = layout.targets[path], not is_sft(source.program)
    if reason := (_without_effect if is_rl else sft.without_effect)(source, path):
        conversion.note("dropped", name, "", reason)
    elif isinstance(target, Dropped) and not (is_rl and path in TRANSLATIONS):
        harmless = path not in layout.harmless or source.given.get(path) in layout.harmless[path]
        conversion.note("dropped" if harmless else "conflict", name, "", target.reason)
    elif path in source.unread:
        conversion.note_unread(name, target, source.unread[path])
    elif is_rl and path in TRANSLATIONS:
        TRANSLATIONS[path](source, conversion, path)
    elif isinstance(target, To):  # others are written by `sft.complete`
        _map(source, conversion, path, target)


def _map(source: SkyrlSource, conversion: Conversion, path: str, target: To) -> None:
    value, name, setting = source.given[path], source.names[path], known().get(target.path)
    if value is None or isinstance(value, str | bool):
        value = target.values.get(value, value)
    if setting and setting.location:
        value = location(value)
    if isinstance(value, str) and setting and all(get_origin(kind) is list for kind in setting.types):
        value = [value]
    if value is None and setting and not setting.optional and setting.default != {}:
        conversion.note("conflict", name, target.path, f"null has no meaning here; expected {setting.expects()}")
        return
    if value is None and setting is None:
        conversion.note("mapped", name, target.path, "null: left out")
        return
    conversion.values[target.path] = value
    default = source.layout.defaults[path]
    remark = _REMARKS.get(path, "") if value != default else ""
    if path.endswith(_TABLES) and isinstance(value, dict):
        kept = ", ".join(sorted(set(default) - set(value)))
        remark = f"SkyRL loses the defaults of a table that is given; here these stay: {kept}" if kept else ""
    conversion.note("mapped", name, target.path, remark)


def _without_effect(source: SkyrlSource, path: str) -> str | None:
    """Return why a setting changed nothing in the source's run."""
    megatron = source["trainer.strategy"] == "megatron"
    if path.startswith(_CRITICS) and path != "trainer.critic.model.path" and not has_critic(source):
        return "had no effect, there is no critic without trainer.critic.model.path"
    if path.startswith("trainer.ref.") and not has_reference(source):
        return "had no effect, there is no reference model without a KL term"
    if ".megatron_config." in path and not megatron:
        return f"had no effect with trainer.strategy={source['trainer.strategy']}"
    if ".fsdp_config." in path and megatron:
        return "had no effect with trainer.strategy=megatron"
    if path.startswith("trainer.fully_async.") and not is_fully_async(source):
        return "had no effect in synchronous training"
    if (
        path.startswith("trainer.policy.torch_profiler_config.")
        and not source["trainer.policy.torch_profiler_config.enable"]
    ):
        return "had no effect without trainer.policy.torch_profiler_config.enable"
    if (
        path in _ONE_TURN
        and source["generator.max_turns"] == 1
        and not (source[_TRAIN + "stop"] or source[_EVAL + "stop"] or source["generator.chat_template.name_or_path"])
    ):
        return "had no effect with one turn, without stop texts and with the model's own chat template"
    if path == _ALGORITHM + "use_kl_in_reward" and not has_advantages(source):
        return "had no effect with policy_loss_type=cross_entropy, which has no advantages"
    if path == _TRAIN + "repetition_penalty":
        return "SkyRL never hands it to the engine, and hpcrl refuses it in training"
    if path in _OFFLOADED and not is_colocated(source):
        return "has an effect only where trainer and engines share GPUs"
    return None


def _left_out(source: SkyrlSource, conversion: Conversion) -> None:
    wanted = ["data.train_data", "trainer.policy.model.path"]
    if not is_custom(source.program):  # another program may set or replace environments
        wanted.append("environment.env_class")
    interval = source["trainer.eval_interval"]
    if isinstance(interval, int) and interval > 0:
        wanted.append("data.val_data")
    if source["environment.env_class"] == "llm_as_a_judge":
        wanted.append("environment.skyrl_gym.llm_as_a_judge.model")
    if source["environment.env_class"] == "text2sql":
        wanted.append("environment.skyrl_gym.text2sql.db_path")
    if source.old:
        wanted += [
            "trainer.placement.policy_num_gpus_per_node",
            _ENGINE + "tensor_parallel_size",
            _ENGINE + "enforce_eager",
        ]
        wanted += ["generator.use_conversation_multi_turn"] if source.number("generator.max_turns") > 1 else []
    for path in wanted:
        if path not in source.names:
            _write_default(source, conversion, path)


def _write_default(source: SkyrlSource, conversion: Conversion, path: str) -> None:
    conversion.values[path] = source[path]
    layout = "old layout's default" if source.old and path in OLD_DEFAULTS else "default"
    conversion.note("mapped", path, path, f"left out: SkyRL's {layout}, {value_as_toml(source[path])}")


def _old_loss(source: SkyrlSource, conversion: Conversion) -> None:
    reduction = _ALGORITHM + "loss_reduction"
    renamed = source.names.get(_ALGORITHM + "policy_loss_type") == _ALGORITHM + "policy_loss_type"
    if source.old and reduction not in source.names and not renamed:
        conversion.values[reduction] = source[reduction]
        conversion.note(
            "translated",
            reduction,
            reduction,
            "left out: the old policy loss is a mean over samples of means over their tokens",
        )


def _eager(source: SkyrlSource, conversion: Conversion) -> None:
    """Report the default of enforce_eager that the run gets, as SkyRL's pull request 1818 has changed it."""
    path = _ENGINE + "enforce_eager"
    if not source.old and path not in source.names:
        message = "left out: false, SkyRL's default since June 2026; from October 2025 until then it was true"
        conversion.note("translated", path, path, message)


def _placement(source: SkyrlSource, conversion: Conversion) -> None:
    if _PLACEMENT + "colocate_all" not in source.names:
        colocate_all(source, conversion, _PLACEMENT + "colocate_all")
    for model in ("ref", "critic"):
        for what in ("num_nodes", "num_gpus_per_node"):
            if (path := f"{_PLACEMENT}{model}_{what}") not in source.names:
                other_placement(source, conversion, path)


def _eval_sampling(source: SkyrlSource, conversion: Conversion) -> None:
    """Write what evaluation samples with: SkyRL fills the section up with fixed values, hpcrl with training's."""
    given = {name for name in _SAMPLING if _EVAL + name in source.given}
    chosen = {name: source[_EVAL + name] for name in _SAMPLING}
    if "max_generate_length" not in given and (source.old or not given):
        chosen["max_generate_length"] = source[_TRAIN + "max_generate_length"]
    if not given and not source.old:
        chosen["temperature"] = 0.0
    differing = [name for name in _SAMPLING if (chosen[name] or None) != (source[_TRAIN + name] or None)]
    if not given and not source.old and differing == ["temperature"]:
        return  # greedy, which is the rule here too
    written = [name for name in _SAMPLING if name in differing or name == "temperature" or name in given]
    empty: dict[str, Any] = {"stop": [], "additional_kwargs": {}}
    for name in written:
        value = chosen[name]
        if value is None and source[_TRAIN + name]:
            value = empty.get(name)
        conversion.values[_EVAL + name] = value
    if added := [f"{name} = {value_as_toml(chosen[name])}" for name in written if name not in given]:
        conversion.note(
            "translated",
            _EVAL[:-1],
            _EVAL[:-1],
            f"SkyRL's values for what is left out, where training has others: {', '.join(added)}",
        )


def _fully_async(source: SkyrlSource, conversion: Conversion) -> None:
    if source.program is not None and source.program.last == "main_async":
        conversion.values["trainer.fully_async.max_staleness_steps"] = 1
    if is_fully_async(source):
        for path in ("trainer.fully_async.max_staleness_steps", "trainer.fully_async.num_parallel_generation_workers"):
            if path not in source.names:
                _write_default(source, conversion, path)


def _gpus_per_node(source: SkyrlSource, conversion: Conversion) -> None:
    ranks = _PLACEMENT + "policy_num_gpus_per_node"
    conversion.values["slurm.gpus_per_node"] = most = max(source.number(ranks), engine_width(source))
    conversion.note(
        "translated", ranks, "slurm.gpus_per_node", f"{most}, the most that one node needs; name what your nodes have"
    )
