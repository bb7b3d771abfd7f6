"""SkyRL's supervised fine-tuning (`python -m skyrl.train.main_sft`), a program with settings of its own, to trainer.mode = "sft".

Its loss is the mean over the trained tokens of a batch, as loss_reduction = "token_mean" is; its other defaults are written where they
differ from those here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from hpcrl.config.difference import value_as_toml
from hpcrl.convert.conversion import Conversion, directory_name, known, location
from hpcrl.convert.mapping import To, Translated
from hpcrl.convert.skyrl.source import SkyrlSource
from hpcrl.convert.skyrl.translate import always_packed, schedule

_DATASET, _SPLIT = "yahma/alpaca-cleaned", "train[:100]"
_ALPACA = (
    _DATASET,
    "tatsu-lab/alpaca",
)  # rows of instruction, input and output, which SkyRL recognizes by their columns
_SIZE = re.compile(r"\w+\[(\d*):(\d+)\]")
_AT_THE_END = 1_000_000_000
_FREE = ("data.num_workers", "trainer.ckpt_mode", "trainer.hf_save_interval")  # change no result


def complete(source: SkyrlSource, conversion: Conversion) -> None:
    """Write what the settings of fine-tuning decide about together, and defaults that differ."""
    conversion.values["trainer.mode"] = "sft"
    for part in (_data, _validation, _steps, _batches, _run, _defaults):
        part(source, conversion)
    ranks = source["placement.num_gpus_per_node"]
    conversion.values["slurm.gpus_per_node"] = ranks
    schedule(source, conversion, "optimizer_config.")
    for path, name in source.names.items():
        target = source.layout.targets[path]
        if isinstance(target, Translated) and path not in source.unread:
            same = conversion.values.get(target.paths[0]) == source.given[path]
            conversion.note("mapped" if same else "translated", name, target.paths[0], "" if same else target.how)


def without_effect(source: SkyrlSource, path: str) -> str | None:
    """Return why a setting changed nothing in the source's run."""
    megatron = source["strategy"] == "megatron"
    if path.startswith("megatron_config.") and not megatron:
        return f"had no effect with strategy={source['strategy']}"
    if path.startswith("fsdp_config.") and megatron:
        return "had no effect with strategy=megatron"
    if path.startswith("torch_profiler_config.") and not source["torch_profiler_config.enable"]:
        return "had no effect without torch_profiler_config.enable"
    return None


def _data(source: SkyrlSource, conversion: Conversion) -> None:
    values = conversion.values
    if paths := source["pretokenized_dataset_paths"]:
        values |= {"data.train_data": location(paths), "data.format": "tokens"}
        _mixed(source, conversion, [None] * len(paths))
    else:
        names = source["train_datasets"] or [source["dataset_name"] or _DATASET]
        splits = source["train_dataset_splits"] or [source["dataset_split"] or _SPLIT]
        if not {"train_datasets", "dataset_name"} & set(source.given):
            conversion.note("mapped", "train_datasets", "data.train_data", f"left out: SkyRL's default, {_DATASET}")
        values["data.train_data"] = _with_splits(names, splits, "train_dataset_splits", conversion)
        _rows_of_alpaca(names, source, conversion)
        _mixed(source, conversion, [_size(split) for split in splits])
    if source["sampler"] == "custom":
        message = "a class of the user's decides what a batch has; write the rows in its order, with data.shuffle=false"
        conversion.note("conflict", source.names["sampler"], "", message)
    else:
        values["data.shuffle"] = source["sampler"] == "random"


def _with_splits(names: Sequence[str], splits: Sequence[str], setting: str, conversion: Conversion) -> list[str]:
    if len(names) != len(splits):
        conversion.note("conflict", setting, "", f"{len(splits)} splits of {len(names)} datasets, which SkyRL refuses")
    return [f"{location(name)}:{split}" for name, split in zip(names, splits, strict=False)]


def _rows_of_alpaca(names: Sequence[str], source: SkyrlSource, conversion: Conversion) -> None:
    alpaca = [name for name in names if name in _ALPACA]
    if not alpaca:
        return
    if len(alpaca) < len(names):
        message = f"{alpaca[0]} has the columns instruction and output, others have messages; data.format is one for all datasets"
        conversion.note("conflict", source.names["train_datasets"], "", message)
        return
    columns = {"format": "prompt_response", "prompt_column": "instruction", "response_column": "output"}
    conversion.values |= {f"data.{name}": value for name, value in columns.items()}
    for name in ("data.conversation_column", "data.train_on_what"):
        conversion.values.pop(name, None)
    message = f"the columns of {alpaca[0]}, as SkyRL recognizes them; a column input follows the instruction"
    conversion.note("translated", source.names.get("train_datasets", "train_datasets"), "data.format", message)


def _size(split: str) -> int | None:
    """Return the rows of a split such as train[:100]; None: it does not say how many there are."""
    found = _SIZE.fullmatch(split)
    return int(found[2]) - int(found[1] or 0) if found else None


def _mixed(source: SkyrlSource, conversion: Conversion, sizes: Sequence[int | None]) -> None:
    """Write how often an epoch has the rows of each of several datasets, whose shares in a batch SkyRL is given."""
    if len(sizes) == 1 or source["sampler"] != "random":
        return
    shares = source["train_dataset_weights"] or [1 / len(sizes)] * len(sizes)
    name = source.names.get("train_dataset_weights", "train_dataset_weights")
    known_sizes = [size for size in sizes if size]
    if len(known_sizes) < len(sizes) or len(shares) != len(sizes):
        message = (
            f"the shares of the datasets in a batch, {value_as_toml(shares)}: data.weights says how often an epoch has the rows of each, which "
            "follows from how many there are; set it"
        )
        conversion.note("conflict", name, "", message)
        return
    often = [
        round(share / sum(shares) * sum(known_sizes) / size, 6) for share, size in zip(shares, known_sizes, strict=True)
    ]
    if any(number != 1 for number in often):
        conversion.values["data.weights"] = often
    message = "each batch has these shares of the datasets in SkyRL; here an epoch has them, in an order that is drawn"
    conversion.note("differs", name, "data.weights", message)


def _validation(source: SkyrlSource, conversion: Conversion) -> None:
    names = source["eval_datasets"] or ([source["eval_dataset_name"]] if source["eval_dataset_name"] else [])
    splits = source["eval_dataset_splits"] or [source["eval_dataset_split"] or "validation"]
    found = location(source["eval_pretokenized_dataset_paths"] or [])
    if names:
        found = _with_splits(names, splits, "eval_dataset_splits", conversion)
    conversion.values["data.val_data"] = found
    interval = source["eval_interval"]
    conversion.values["trainer.eval_interval"] = (interval or _AT_THE_END) if found else 0


def _steps(source: SkyrlSource, conversion: Conversion) -> None:
    values, steps, most = conversion.values, source["num_steps"], source["max_training_steps"]
    values["trainer.epochs"] = source["num_epochs"] or 1
    if steps is not None:
        values["trainer.epochs"] = steps
        message = f"epochs = {steps} too, which is as many as such a run can begin: max_steps ends it"
        conversion.note("translated", source.names["num_steps"], "trainer.epochs", message)
    limits = [limit for limit in (steps, most) if limit is not None]
    if limits:
        values["trainer.max_steps"] = min(limits)


def _batches(source: SkyrlSource, conversion: Conversion) -> None:
    values, longest = conversion.values, source["max_length"]
    always_packed(source, conversion, "remove_microbatch_padding")
    values |= {f"trainer.{name}_batch_size": source["batch_size"] for name in ("train", "policy_mini")}
    if longest is None:
        message = "no bound: rows of any length are trained whole. Here it is a number, such as that of the longest row (`hpcrl data check` prints it)"
        conversion.note("conflict", source.names.get("max_length", "max_length"), "trainer.max_length", message)
    else:
        values["trainer.max_length"] = longest
    if source["use_sequence_packing"]:
        values["trainer.max_tokens_per_micro_batch"] = source["max_tokens_per_microbatch"] or longest
        values["trainer.use_sample_packing"] = True
    else:
        values["trainer.micro_train_batch_size_per_gpu"] = source["micro_train_batch_size_per_gpu"]


def _run(source: SkyrlSource, conversion: Conversion) -> None:
    values, resume = conversion.values, source["resume_from"]
    values["trainer.ckpt_interval"] = source["ckpt_interval"] if source["ckpt_path"] else 0
    for name in ("project_name", "run_name"):
        if name in source.given:
            values[f"trainer.{name}"] = directory_name(str(source.given[name]))
    if resume not in ("", None, "latest"):
        message = f"{resume} is a checkpoint of SkyRL, which hpcrl cannot read; name an export of it as trainer.policy.model.path"
        conversion.note("conflict", source.names["resume_from"], "", message)


def _defaults(source: SkyrlSource, conversion: Conversion) -> None:
    """Write SkyRL's defaults of what is left out, where they are others; those that differ here on purpose stay."""
    alpaca = conversion.values.get("data.format") == "prompt_response"
    for path, target in source.layout.targets.items():
        if path not in source.layout.defaults or path in source.names or not isinstance(target, To):
            continue
        setting, value = known().get(target.path), source.layout.defaults[path]
        value = target.values.get(value, value) if isinstance(value, str | bool) else value
        if setting is None or without_effect(source, path) or target.path in _FREE:
            continue
        if setting.facts.why and not setting.required:
            continue
        if setting.is_default(value) or isinstance(value, dict) or (alpaca and path == "train_on_what"):
            continue
        conversion.values[target.path] = value
        conversion.note("mapped", path, target.path, f"left out: SkyRL's default, {value_as_toml(value)}")
