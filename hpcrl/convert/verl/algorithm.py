"""Losses, advantages and rewards of verl, as settings of trainer.algorithm and environment."""

from __future__ import annotations

from hpcrl.convert.conversion import Conversion
from hpcrl.convert.rules import Rule, lost, put, seen
from hpcrl.convert.verl.source import VerlSource

_ALG = "trainer.algorithm."
_ACTOR = "actor_rollout_ref.actor."
_CORRECTION = "algorithm.rollout_correction."
_OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg."
_LOSS, _AGGREGATION = _ACTOR + "policy_loss.loss_mode", _ACTOR + "loss_agg_mode"
_LOSSES = {"vanilla": "dual_clip", "geo_mean": "gmpo", "dppo_tv": "dppo", "dppo_kl": "dppo"}
_LOSSES |= {name: name for name in ("gspo", "sapo", "gpg", "clip_cov", "kl_cov", "cispo", "dro")}
_BOUNDS = {"cispo": "cispo.cispo_eps_clip_", "gmpo": "gmpo.log_clip_", "dppo": "dppo.delta_"}
_PER_SAMPLE = ("gspo", "sapo", "geo_mean")
_ESTIMATORS = {
    "reinforce_plus_plus": "reinforce++",
    "reinforce_plus_plus_baseline": "reinforce++_baseline",
    "grpo_vectorized": "grpo",
    "rloo_vectorized": "rloo",
    "grpo_passk": "pass_at_k",
    "tir_optimal_token_baseline": "optimal_token_baseline",
}
_ESTIMATORS |= {name: name for name in ("gae", "grpo", "rloo", "remax", "opo", "optimal_token_baseline")}
_KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_REDUCTIONS = {
    name: name.replace("-", "_")
    for name in ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
}


def _loss(source: VerlSource) -> str:
    """Return the policy loss that verl's run had: bypass_mode replaces any other by the clipped one, with its ratio to the rollout."""
    return "vanilla" if source[_CORRECTION + "bypass_mode"] else source[_LOSS]


def _policy_loss(source: VerlSource, conversion: Conversion, path: str) -> None:
    mode = _loss(source)
    if mode not in _LOSSES:
        lost(source, conversion, path, _ALG + "policy_loss_type", f"there is no {mode}; expected {', '.join(_LOSSES)}")
        return
    how = "" if mode == _LOSSES[mode] else mode
    how = how if mode == source[path] else "rollout_correction.bypass_mode replaces it by the clipped loss"
    put(source, conversion, path, _ALG + "policy_loss_type", _LOSSES[mode], how)
    if mode.startswith("dppo"):
        conversion.values[_ALG + "dppo.dppo_type"] = "binary_tv" if mode == "dppo_tv" else "binary_kl"
        message = (
            "the divergence is from the rollout here, in verl from the old policy unless bypass_mode is on; and verl's weight of a token "
            "is at most clip_ratio_c"
        )
        conversion.note("differs", source.names[path], "", message)


def _bound(source: VerlSource, conversion: Conversion, path: str) -> None:
    side = path.rpartition("_")[2]
    loss = _LOSSES.get(_loss(source), "")
    target = _ALG + _BOUNDS.get(loss, "eps_clip_") + side
    value = source[path] if source[path] is not None else source[_ACTOR + "clip_ratio"]
    if side == "low" and loss not in ("gmpo", "dppo") and isinstance(value, int | float) and value > 1:
        put(source, conversion, path, target, 1.0, f"{value}: no ratio is below 0, so that 1 bounds nothing either")
    else:
        put(source, conversion, path, target, value)


def _clip_ratio(source: VerlSource, conversion: Conversion, path: str) -> None:
    if path not in source.names:
        return
    used = any(source[_ACTOR + f"clip_ratio_{side}"] is None for side in ("low", "high"))
    message = "had no effect, clip_ratio_low and clip_ratio_high count, 0.2 each by default"
    conversion.note("translated" if used else "dropped", source.names[path], "", "" if used else message)


def _reduction(source: VerlSource, conversion: Conversion, path: str) -> None:
    mode, target = source[path], _ALG + "loss_reduction"
    if _loss(source) in _PER_SAMPLE:
        how = f"{_loss(source)}, whose loss verl always reduces so"
        put(source, conversion, path if path in source.names else _LOSS, target, "sequence_mean", how)
        terms = source[_ACTOR + "use_kl_loss"] or source[_ACTOR + "entropy_coeff"]
        if terms and mode != "seq-mean-token-mean":
            message = f"KL and entropy terms are reduced as the loss is (sequence_mean), in verl as {mode}"
            conversion.note("differs", source.names.get(path, path), "", message)
    elif mode in _REDUCTIONS:
        put(source, conversion, path, target, _REDUCTIONS[mode])
    else:
        lost(source, conversion, path, target, f"there is no {mode}; expected {', '.join(_REDUCTIONS)}")


def _token_level(source: VerlSource, conversion: Conversion, path: str) -> None:
    if source[path] is None:
        return
    mode = source[_AGGREGATION]
    if source[path] == (mode == "token-mean"):
        seen(source, conversion, path)
    else:
        lost(
            source, conversion, path, "", f"{source[path]}, but loss_agg_mode, which replaces it, is {mode}; write that"
        )


def _scale(source: VerlSource, conversion: Conversion, path: str) -> None:
    if source[_AGGREGATION] == "seq-mean-token-sum-norm":
        value = source[path] if source[path] is not None else source["data.max_response_length"]
        put(source, conversion, path, _ALG + "max_seq_len", value, "" if source[path] else "null: the longest response")
    elif path in source.names:
        message = "had no effect, it is the divisor of seq-mean-token-sum-norm alone"
        conversion.note("dropped", source.names[path], "", message)


def _entropy(source: VerlSource, conversion: Conversion, path: str) -> None:
    coefficient = source[path]
    put(source, conversion, path, _ALG + "use_entropy_loss", coefficient != 0)
    if coefficient != 0:
        conversion.values[_ALG + "entropy_loss_coef"] = coefficient


def _kl(kind: str) -> Rule[VerlSource]:
    used_by = _ACTOR + "use_kl_loss" if kind == "loss" else "algorithm.use_kl_in_reward"

    def kl(source: VerlSource, conversion: Conversion, path: str) -> None:
        estimator = path.endswith(("kl_loss_type", "kl_penalty"))
        if not source[used_by]:
            if path in source.names:
                conversion.note("dropped", source.names[path], "", f"had no effect without {used_by}")
        elif not estimator:
            put(source, conversion, path, _ALG + "kl_loss_coef", source[path])
        elif (plain := str(source[path]).removesuffix("+")) in _KL:
            straight = kind == "loss" and plain != source[path]  # a + changes the gradient alone
            name = "k2" if straight else _KL[plain]
            how = f"{source[path]}, whose gradient is that of k2" if straight else str(source[path])
            put(source, conversion, path, _ALG + "kl_estimator_type", name, "" if name == source[path] else how)
        else:
            message = f"there is no {source[path]}; expected {', '.join(_KL)}"
            lost(source, conversion, path, _ALG + "kl_estimator_type", message)

    return kl


def _estimator(source: VerlSource, conversion: Conversion, path: str) -> None:
    name, target = source[path], _ALG + "advantage_estimator"
    if name in _ESTIMATORS:
        put(source, conversion, path, target, _ESTIMATORS[name], "" if name == _ESTIMATORS[name] else str(name))
        if name == "grpo_passk":
            conversion.values[_ALG + "pass_at_k.k"] = source["actor_rollout_ref.rollout.n"]
        corrected = source[_CORRECTION + "rollout_is"] and not source[_CORRECTION + "bypass_mode"]
        if _ESTIMATORS[name] == "optimal_token_baseline" and corrected:
            message = "with rollout_is, verl multiplies the baseline's weights by the squares of the correction's; here they are those of the policy"
            conversion.note("differs", source.names[path], "", message)
    else:
        more = "; gdpo needs the rewards that it weighs (trainer.algorithm.gdpo.rewards)" if name == "gdpo" else ""
        lost(source, conversion, path, target, f"there is no {name}; expected {', '.join(_ESTIMATORS)}{more}")


def _filter_groups(source: VerlSource, conversion: Conversion, path: str) -> None:
    on = source["algorithm.filter_groups.enable"]
    if not on:
        if path in source.names and path.endswith("enable"):
            conversion.note("mapped", source.names[path])
        elif path in source.names:
            conversion.note("dropped", source.names[path], "", "had no effect without algorithm.filter_groups.enable")
    elif path.endswith("enable"):
        put(source, conversion, path, _ALG + "dynamic_sampling.type", "filter", "true")
    elif path.endswith("metric"):
        same = source[path] in (None, "reward", "seq_reward", "seq_final_reward", "score")
        message = f"{source[path]} decides in verl whether a group is equal, here the reward itself, a penalty of length included"
        if path in source.names:
            conversion.note("mapped" if same else "differs", source.names[path], "", "" if same else message)
    else:
        put(source, conversion, path, _ALG + "dynamic_sampling.max_sample_batches", source[path])


def _gen_batch(source: VerlSource, conversion: Conversion, path: str) -> None:
    if path in source.names:
        message = "how many prompts are generated at once to fill a filtered batch; here as many as the batch has"
        conversion.note("dropped", source.names[path], "", message)


def _correction(source: VerlSource, conversion: Conversion, path: str) -> None:
    kind = source[_CORRECTION + "rollout_is"]
    if source[_CORRECTION + "bypass_mode"]:
        if path in source.names:
            message = "had no effect with bypass_mode, whose ratio is to the rollout already"
            conversion.note("dropped", source.names[path], "", message)
    elif path.endswith("rollout_is"):
        if kind in ("token", "sequence", None):
            put(source, conversion, path, _ALG + "off_policy_correction.tis_ratio_type", kind)
        else:
            lost(source, conversion, path, "", f"{kind}: expected token or sequence")
    elif kind not in ("token", "sequence"):
        if path in source.names:
            conversion.note("dropped", source.names[path], "", "had no effect without rollout_is")
    elif isinstance(source[path], int | float):
        put(source, conversion, path, f"{_ALG}off_policy_correction.{kind}_tis_ratio_clip_high", source[path])
    else:
        message = f"{source[path]}: two bounds, out of which verl's weight is 0; token_mask_is_threshold_low and _high are that here"
        lost(source, conversion, path, "", message)


def _bypass(source: VerlSource, conversion: Conversion, path: str) -> None:
    put(source, conversion, path, _ALG + "use_rollout_logprobs_for_loss", bool(source[path]))


def _dro(source: VerlSource, conversion: Conversion, path: str) -> None:
    if source[path] is not None:
        put(source, conversion, path, _ALG + "dro.beta", source[path])
    else:
        seen(source, conversion, path)


def _reward(source: VerlSource, conversion: Conversion, path: str) -> None:
    """Choose the reward of each row by its data_source, as verl does."""
    if path == "reward.reward_manager.name":
        if source[path] in ("naive", "batch", "dapo"):
            seen(source, conversion, path, "", "the score is chosen by data.reward_fn_key")
        else:
            message = f"{source[path]}: expected naive, batch or dapo; write a reward function (docs/rewards.md)"
            lost(source, conversion, path, "", message)
    elif source["reward.custom_reward_function.path"]:
        seen(source, conversion, path, "", "the function of reward.custom_reward_function scores")
    elif source[path] != "data_source":
        message = f"{source[path]}: rewards are chosen by the column data_source here; rename it, and reward_model stays as it is"
        lost(source, conversion, path, "environment.reward_function", message)
    else:
        conversion.values["environment.reward_function"] = {"by_data_source": 1.0}
        message = "by_data_source: the reward that belongs to a row's data_source; rows of others are refused when the data is read"
        conversion.note("translated", source.names.get(path, path), "environment.reward_function", message)
        message = (
            "answers of another form than the ground truth: gsm8k takes the first number behind ####, not the last, and 42.0 for 42. "
            "boxed_math compares by computer algebra, verl as texts; direct_math reads no \\boxed{}"
        )
        conversion.note("differs", source.names.get(path, path), "", message)


def _overlong(source: VerlSource, conversion: Conversion, path: str) -> None:
    if path not in source.names:
        return
    if not source[_OVERLONG + "enable"] or source["reward.reward_manager.name"] != "dapo":
        message = "had no effect without overlong_buffer_cfg.enable and reward_manager=dapo"
        conversion.note("dropped", source.names[path], "", message)
    elif path.endswith("enable"):
        rewards = conversion.values.get("environment.reward_function")
        if rewards is None:
            lost(
                source,
                conversion,
                path,
                "",
                "the reward overlong stands beside a score, which environment.reward_function lacks",
            )
            return
        conversion.values["environment.reward_function"] = {**rewards, "overlong": 1.0}
        evaluated = {name: weight for name, weight in rewards.items() if name != "overlong"}
        conversion.values["environment.eval_reward_function"] = evaluated
        message = "the reward overlong beside the score, in training; evaluation reports the score alone"
        conversion.note("translated", source.names[path], "environment.reward_function", message)
    else:
        last = "buffer_length" if path.endswith("len") else "penalty_factor"
        put(source, conversion, path, f"environment.overlong_reward.{last}", source[path])


ALGORITHM: dict[str, Rule[VerlSource]] = {
    _LOSS: _policy_loss,
    _ACTOR + "clip_ratio": _clip_ratio,
    _ACTOR + "clip_ratio_low": _bound,
    _ACTOR + "clip_ratio_high": _bound,
    _ACTOR + "policy_loss.dro_beta": _dro,
    _AGGREGATION: _reduction,
    _ACTOR + "loss_scale_factor": _scale,
    _ACTOR + "use_token_level_loss": _token_level,
    _ACTOR + "entropy_coeff": _entropy,
    _ACTOR + "kl_loss_coef": _kl("loss"),
    _ACTOR + "kl_loss_type": _kl("loss"),
    "algorithm.kl_penalty": _kl("reward"),
    "algorithm.kl_ctrl.kl_coef": _kl("reward"),
    "algorithm.adv_estimator": _estimator,
    "algorithm.filter_groups.enable": _filter_groups,
    "algorithm.filter_groups.metric": _filter_groups,
    "algorithm.filter_groups.max_num_gen_batches": _filter_groups,
    "data.gen_batch_size": _gen_batch,
    _CORRECTION + "rollout_is": _correction,
    _CORRECTION + "rollout_is_threshold": _correction,
    _CORRECTION + "bypass_mode": _bypass,
    "data.reward_fn_key": _reward,
    "reward.reward_manager.name": _reward,
    _OVERLONG + "enable": _overlong,
    _OVERLONG + "len": _overlong,
    _OVERLONG + "penalty_factor": _overlong,
}
