"""The loss of prime-rl, and the other defaults that changed what a run of it learns in 2026.

A file does not name its version of prime-rl. What it leaves out has the newest default, and the report has the one before. Names that
only earlier versions take bring the earlier defaults.

Pull requests of PrimeIntellect-ai/prime-rl changed them. 2187 has made dppo with kl_tau the default. 2798 has added ipo, which 3418
has put in its place, and 3586 has given it its eps and kl_tau. With 3463, samples without an advantage are replaced.
"""

from __future__ import annotations

from typing import Any

from hpcrl.config.difference import value_as_toml
from hpcrl.convert.conversion import Conversion
from hpcrl.convert.prime.source import PrimeSource
from hpcrl.convert.rules import Rule, lost, put, seen

_ALG, _LOSS = "trainer.algorithm.", "trainer.loss."
_LOSSES = ("ipo", "icepop", "default")
_REDUCTIONS = {"token": "token_mean", "sample": "sequence_mean"}
_BEFORE = {
    _LOSS + "type": ("August 27", "default"),
    _LOSS + "eps": ("September 18", 0.1),
    _LOSS + "kl_tau": ("September 18", 0.001),
    "trainer.optim.weight_decay": ("autumn", 0.01),
    "orchestrator.constant_trainer_batch_size": ("September 1", False),
}
"""Since when a default of 2026 is what it is, and what it was before."""
_FILTERS = ("orchestrator.pre_batch_filters", "orchestrator.post_batch_filters")
_EARLIER = {_LOSS + "dppo_mask_low", _LOSS + "dppo_mask_high", *_FILTERS}
"""Settings that prime-rl has no more since August 2026."""


def _is_earlier(source: PrimeSource) -> bool:
    """Return whether a source names what prime-rl has no more since August 2026."""
    threshold = source.names.get(_LOSS + "eps") == _LOSS + "ipo_threshold"
    return threshold or source[_LOSS + "type"] == "default" or not source.names.keys().isdisjoint(_EARLIER)


def _value(source: PrimeSource, path: str) -> Any:
    """Return what a setting is, given or by the default of its time."""
    return _BEFORE[path][1] if path not in source.names and _is_earlier(source) else source[path]


def _put_changed(
    source: PrimeSource, conversion: Conversion, path: str, target: str, value: Any, how: str = ""
) -> None:
    """Set what a setting becomes whose default has changed, and note which default counts if the source leaves it out."""
    if path in source.names:
        put(source, conversion, path, target, value, how)
        return
    conversion.values[target] = value
    since, before = _BEFORE[path]
    now = value_as_toml(_value(source, path)) + (f" ({how})" if how else "")
    if _is_earlier(source):
        message = f"left out: {now}, prime-rl's default until {since} 2026, as other names here are of a version before"
        conversion.note("translated", path, target, message)
        return
    message = (
        f"left out: {now}, prime-rl's default since {since} 2026; before it was {value_as_toml(before)}, "
        f"which a run of then had: name {path}"
    )
    conversion.note("differs", path, target, message)


def _kind(source: PrimeSource) -> str:
    """Return the loss; ipo where its threshold is named without it, as the loss of that time's default has none."""
    if _LOSS + "type" not in source.names and _LOSS + "eps" in source.names:
        return "ipo"
    return _value(source, _LOSS + "type")


def _type(source: PrimeSource, conversion: Conversion, path: str) -> None:
    kind, reduction = _kind(source), _REDUCTIONS.get(source[_LOSS + "normalization"])
    if kind not in _LOSSES or reduction is None:
        message = f"{kind}: expected ipo, icepop or default; policy_loss_type names another loss, or one of your own (docs/algorithms.md)"
        lost(source, conversion, path, _ALG + "policy_loss_type", message)
        return
    conversion.values[_ALG + "loss_reduction"] = reduction
    if kind == "icepop":
        put(source, conversion, path, _ALG + "policy_loss_type", "rollout_is", "icepop")
    elif kind == "default":
        how = "masked by the difference of probabilities from the rollout (binary_tv), with kl_tau (log π/π_rollout)²"
        _put_changed(source, conversion, path, _ALG + "policy_loss_type", "dppo", how)
    else:
        _put_changed(source, conversion, path, _ALG + "policy_loss_type", "dppo", "dppo with two_sided")
        conversion.values[_ALG + "dppo.two_sided"] = True


def _bound(source: PrimeSource, conversion: Conversion, path: str) -> None:
    """Write a bound that one of the losses has; the others do nothing with it."""
    last, kind = path.removeprefix(_LOSS), _kind(source)
    if last == "eps" and kind == "ipo":
        _put_changed(source, conversion, path, _ALG + "dppo.delta_low", _value(source, path), "and delta_high")
        conversion.values[_ALG + "dppo.delta_high"] = _value(source, path)
    elif last.startswith("dppo_mask_") and kind == "default":
        put(source, conversion, path, _ALG + last.replace("dppo_mask_", "dppo.delta_"), source[path])
    elif last.startswith("ratio_") and kind == "icepop":
        bound, target = source[path], _ALG + last.replace("ratio_", "eps_clip_")
        if isinstance(bound, int | float):
            away = 1 - bound if last == "ratio_low" else bound - 1
            put(source, conversion, path, target, away, "its distance from 1")
        else:
            lost(source, conversion, path, target, f"expected a number; found {value_as_toml(bound)}")
    else:
        _unused(source, conversion, path)


def _unused(source: PrimeSource, conversion: Conversion, path: str) -> None:
    """Note a given setting of another loss, or of one that has no place here."""
    kind = _kind(source)
    if path in source.names and kind in _LOSSES:
        conversion.note("dropped", source.names[path], "", f"had no effect with loss.type={kind}")
    elif path in source.names:
        lost(source, conversion, path, "", f"of the loss {kind}, which has no place here")


def _divergence(source: PrimeSource, conversion: Conversion, path: str) -> None:
    if _kind(source) in ("ipo", "default"):
        _put_changed(source, conversion, path, _ALG + "dppo.kl_tau", _value(source, path))
    else:
        _unused(source, conversion, path)


def _normalization(source: PrimeSource, conversion: Conversion, path: str) -> None:
    seen(source, conversion, path, _ALG + "loss_reduction", _REDUCTIONS.get(source[path], ""))


def _decay(source: PrimeSource, conversion: Conversion, path: str) -> None:
    value, target = _value(source, path), "trainer.policy.optimizer_config.weight_decay"
    _put_changed(source, conversion, path, target, 0.0 if value == "auto" else value, "0" if value == "auto" else "")


def _refilled(source: PrimeSource, conversion: Conversion, path: str) -> None:
    """Write what becomes of samples without an advantage; filters, which were named until August 2026, write it themselves."""
    if not source.names.keys().isdisjoint(_FILTERS):
        seen(source, conversion, path)
    elif _value(source, path) and source.number("orchestrator.group_size") > 1:
        _put_changed(
            source,
            conversion,
            path,
            _ALG + "dynamic_sampling.type",
            "filter",
            "samples without an advantage are replaced",
        )
        conversion.values[_ALG + "dynamic_sampling.max_sample_batches"] = 0
    else:
        _put_changed(
            source, conversion, path, _ALG + "zero_variance_filter", True, "samples without an advantage are left out"
        )


def _filters(source: PrimeSource, conversion: Conversion, path: str) -> None:
    before = "pre_batch" in path
    if source.names.keys().isdisjoint(_FILTERS):
        return
    zero = not before and path not in source.names
    for one in source[path]:
        if one.get("type") == "zero_advantage":
            zero = one.get("enforce", True)
        elif one.get("enforce"):
            lost(
                source,
                conversion,
                path,
                "",
                f"{one.get('type')}: samples are not left out by what they repeat or how rare it is",
            )
    if before and zero:
        put(source, conversion, path, _ALG + "dynamic_sampling.type", "filter", "zero_advantage")
    elif not before:
        zero = zero and conversion.values.get(_ALG + "dynamic_sampling.type") != "filter"  # nothing of them is left
        put(source, conversion, path, _ALG + "zero_variance_filter", zero, "zero_advantage" if zero else "")
    else:
        seen(source, conversion, path)


LOSS: dict[str, Rule[PrimeSource]] = {
    _LOSS + "type": _type,
    **{_LOSS + last: _bound for last in ("eps", "dppo_mask_low", "dppo_mask_high", "ratio_low", "ratio_high")},
    _LOSS + "kl_tau": _divergence,
    _LOSS + "normalization": _normalization,
    "trainer.optim.weight_decay": _decay,
    "orchestrator.constant_trainer_batch_size": _refilled,
    **dict.fromkeys(_FILTERS, _filters),
}
