"""What makes a case one that hpcrl answers differently: conditions on its inputs, and places in its outputs.

differences.toml names these functions. Where a difference shows only if something happened (a mask left tokens out, say), the other
framework's own numbers may be asked whether it did.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import yaml

from hpcrl.convert.skyrl.fields import HARMLESS
from tests.golden.case import Case

_EOS = 1
_FARTHEST = 20.0  # where a log-ratio is clamped


# --- rows of tokens ---


def _mask(case: Case) -> list[list[float]]:
    """Return which cells are trained; all, where a case has no mask."""
    names = ("response_mask", "loss_mask", "mask", "attention_mask")
    found = next((case.inputs[name] for name in names if case.inputs.get(name) is not None), None)
    if found is None:
        found = [[1.0] * len(row) for row in case.inputs.get("log_probs", [])]
    return found


def _trained(row: Sequence[float]) -> int:
    return sum(1 for cell in row if cell)


def some_cell_untrained(case: Case) -> bool:
    return any(not cell for row in _mask(case) for cell in row)


def nothing_trained(case: Case) -> bool:
    return not any(_trained(row) for row in _mask(case))


def row_without_trained_token(case: Case) -> bool:
    return any(not _trained(row) for row in _mask(case))


def fewer_than_two_trained(case: Case) -> bool:
    return sum(_trained(row) for row in _mask(case)) < 2


def untrained_cells(case: Case) -> list[str]:
    return [f"{at}.{t}" for at, row in enumerate(_mask(case)) for t, cell in enumerate(row) if not cell]


def _steps_beside(case: Case) -> Iterator[int]:
    """Yield the rows in which a recursion that minds no mask passes something: a hole, or a reward or value where nothing is trained."""
    values = case.inputs.get("values") or [[0.0] * len(row) for row in _mask(case)]
    rows = zip(_mask(case), case.inputs.get("token_level_rewards") or case.inputs["rewards"], values, strict=True)
    for at, (mask, rewards, expected) in enumerate(rows):
        last = max((t for t, cell in enumerate(mask) if cell), default=-1)
        hole = any(not cell for cell in mask[:last])
        if hole or any(rewards[t] or expected[t] for t in range(last + 1, len(mask))):
            yield at


def rows_with_steps_beside(case: Case) -> list[str]:
    return [str(at) for at in _steps_beside(case)]


def steps_beside(case: Case) -> bool:
    return any(True for _ in _steps_beside(case))


def _cut_off(case: Case) -> Iterator[int]:
    """Yield the rows in which something is earned between or after trained tokens with a token between them that is not."""
    for at, (mask, rewards) in enumerate(zip(_mask(case), case.inputs["token_level_rewards"], strict=True)):
        places = [t for t, cell in enumerate(mask) if cell]
        if places and any(not mask[t] and any(rewards[t : places[-1] + 1]) for t in range(places[0], places[-1])):
            yield at


def rows_with_rewards_cut_off(case: Case) -> list[str]:
    return [str(at) for at in _cut_off(case)]


def rewards_cut_off(case: Case) -> bool:
    return any(True for _ in _cut_off(case))


def padding_moves_mean(case: Case) -> bool:
    pairs = [
        (a, m)
        for row, mask in zip(case.inputs["advantages"], _mask(case), strict=True)
        for a, m in zip(row, mask, strict=True)
    ]
    chosen = [a for a, m in pairs if m]
    return bool(chosen) and not math.isclose(
        sum(a for a, _ in pairs) / len(pairs), sum(chosen) / len(chosen), abs_tol=1e-9
    )


# --- whole batches ---


def _metadata(case: Case) -> Mapping[str, Any]:
    return case.inputs.get("metadata") or {}


def _last_steps(case: Case) -> Sequence[Any] | None:
    return case.inputs.get("is_last_step") or _metadata(case).get("is_last_step")


def added_rows(case: Case) -> list[str]:
    count = len(case.inputs["rewards"])
    return [str(at) for at in range(count - (_metadata(case).get("pad_size") or 0), count)]


def statistics_with_added_rows(case: Case) -> bool:
    named = case.params.get("trainer.algorithm.advantage_estimator", "grpo")
    whole = named in ("gae", "reinforce++") or case.params.get("trainer.algorithm.advantage_batch_normalize")
    return bool(whole and _metadata(case).get("pad_size"))


def cells_of_another_mask(case: Case) -> list[str]:
    """Cells in which loss and response masks differ, and of turns those whose mask is not that of the sample's last turn."""
    response, loss = case.inputs["response_mask"], case.inputs.get("loss_mask") or case.inputs["response_mask"]
    last, used = _last_steps(case), list(response)
    if last:
        ends = [next(other for other in range(at, len(last)) if last[other]) for at in range(len(last))]
        used = [response[end] for end in ends]
    size = len(response) - (_metadata(case).get("pad_size") or 0)
    return [f"{at}.{t}" for at in range(size) for t, cell in enumerate(loss[at]) if bool(cell) != bool(used[at][t])]


def masks_differ(case: Case) -> bool:
    return bool(cells_of_another_mask(case))


def _token_level(case: Case) -> list[Sequence[float]]:
    return [row for row in case.inputs["rewards"] if isinstance(row, list)]


def last_reward_misleads(case: Case) -> bool:
    return any((row[-1] > 0) != (sum(row) > 0) for row in _token_level(case) if row)


def rewards_of_both_signs(case: Case) -> bool:
    return any(
        not math.isclose(sum(max(r, 0.0) for r in row), max(sum(row), 0.0), abs_tol=1e-9) for row in _token_level(case)
    )


def rewards_per_token(case: Case) -> bool:
    return bool(_token_level(case))


# --- settings of SkyRL ---


def refused(case: Case) -> bool:
    return case.refusal is not None


def engines_of_others(case: Case) -> bool:
    """Whether a setting names engines that somebody else started."""
    given = {name: yaml.safe_load(value) if isinstance(value, str) else value for name, value in case.params.items()}
    engine = "generator.inference_engine."
    harmless = {
        **HARMLESS,
        f"{engine}run_engines_locally": (True,),
        f"{engine}remote_urls": (None, []),
        f"{engine}external_server_urls": (None, []),
    }
    return any(name in harmless and value not in harmless[name] for name, value in given.items())


def _sizes(case: Case) -> Callable[[str, int], int]:
    def size(name: str, otherwise: int) -> int:
        return int(case.params.get(name, otherwise))

    return size


def partial_micro_batch(case: Case) -> bool:
    """Whether a rank's share of a mini-batch is no multiple of a micro-batch."""
    size = _sizes(case)
    micro, ranks = (
        size("trainer.micro_train_batch_size_per_gpu", 1),
        size("trainer.placement.policy_num_gpus_per_node", 1),
    )
    share = size("trainer.policy_mini_batch_size", 256) * size("generator.n_samples_per_prompt", 5) // ranks
    return micro > 0 and share % micro != 0


def unequal_critic_shares(case: Case) -> bool:
    """Whether the ranks of a critic cannot share a mini-batch equally."""
    size = _sizes(case)
    samples = size("trainer.critic_mini_batch_size", 256) * size("generator.n_samples_per_prompt", 5)
    has_critic = case.params.get("trainer.critic.model.path") not in (None, "null")
    return has_critic and samples % size("trainer.placement.critic_num_gpus_per_node", 1) != 0


def reference_of_default_size(case: Case) -> bool:
    """Whether the policy has more GPUs on a node than one, and nobody says how many the reference has."""
    ranks = _sizes(case)("trainer.placement.policy_num_gpus_per_node", 1)
    return ranks != 1 and "trainer.placement.ref_num_gpus_per_node" not in case.params


def no_cap(case: Case) -> bool:
    return "trainer.algorithm.tis_imp_ratio_cap" not in case.params


# --- losses of SkyRL ---


def _metrics(case: Case) -> Mapping[str, Any]:
    return case.outputs.get("metrics") or {}


def cells_beyond_clamp(case: Case) -> list[str]:
    rows = list(zip(case.inputs["log_probs"], case.inputs["old_log_probs"], _mask(case), strict=True))
    return [
        f"{at}.{t}"
        for at, row in enumerate(rows)
        for t, (new, old, m) in enumerate(zip(*row, strict=True))
        if m and abs(new - old) > _FARTHEST
    ]


def ratio_beyond_clamp(case: Case) -> bool:
    return bool(cells_beyond_clamp(case))


def row_left_out_before_token_mask(case: Case) -> bool:
    return "token_mask_ratio" in _metrics(case) and bool(_metrics(case).get("outlier_seq_masked_ratio"))


def divisor_shrinks(case: Case) -> bool:
    """Whether a correction left out tokens that the reduction divides by; a mean of rows still counts rows without a token."""
    tokens = bool(_metrics(case).get("token_mask_ratio"))
    rows = any(name.endswith("_masked_ratio") and value for name, value in _metrics(case).items())
    reduction = case.params.get("loss_reduction")
    return (tokens and reduction in ("token_mean", "sequence_mean")) or (rows and reduction == "token_mean")


# --- rollouts of SkyRL ---


def _one_message(case: Case) -> bool:
    return case.params.get("generator.use_conversation_multi_turn") is False


def turn_without_observation(case: Case) -> bool:
    """Whether in a conversation a turn that is not the last is answered with nothing."""
    return not _one_message(case) and any(not turn["obs"] and not turn["done"] for turn in case.inputs["env_script"])


def no_logprobs(case: Case) -> bool:
    given = case.inputs.get("engine_script")
    if given is None:
        return not case.inputs.get("output_logprobs")
    return any(turn["lp"] is None for turn in given)


def end_of_message(case: Case) -> list[str]:
    """The last token of a response that is one message, where it is the end-of-sequence token."""
    ids = case.outputs.get("response_ids") or []
    ends = _one_message(case) and ids[-1:] == [_EOS] and case.outputs["stop_reason"] != "length"
    return [str(len(ids) - 1)] if ends else []


def added_end(case: Case) -> list[str]:
    """The same, where the policy did not choose it."""
    return end_of_message(case) if case.inputs["engine_script"][-1]["ids"][-1] != _EOS else []


def before_added_end(case: Case) -> list[str]:
    return [str(int(at) - 1) for at in added_end(case)]


def after_turn(case: Case) -> list[str]:
    """What follows the policy's own tokens in the row of a turn."""
    if not case.params.get("generator.step_wise_trajectories"):
        return []
    columns = ("response_ids", "reward", "loss_mask", "rollout_logprobs")
    found = []
    for at, (step, turn) in enumerate(zip(case.outputs.get("steps", []), case.inputs["engine_script"], strict=False)):
        found += [f"{at}.{name}.{t}" for name in columns for t in range(len(turn["ids"]), len(step[name]))]
    return found


def after_turns(case: Case) -> list[str]:
    """The same in the columns of a whole batch."""
    if not case.params.get("generator.step_wise_trajectories"):
        return []
    pairs = zip(case.outputs.get("response_ids", []), case.inputs["engine_script"], strict=False)
    return [f"{at}.{t}" for at, (row, turn) in enumerate(pairs) for t in range(len(turn["ids"]), len(row))]


def reward_outside(case: Case) -> bool:
    """Whether a reward has no place, or one that is not within what is left of the response, or goes to a token that is added."""
    places = [at for _, at in case.inputs["per_step_rewards"]]
    added = bool(case.params.get("appended_eos_token"))
    return added or any(at is None or at >= case.inputs["response_len"] for at in places)


def several_checkpoints(case: Case) -> bool:
    return sum(name.startswith("global_step_") for name in case.inputs["dirs"]) > 1


# --- Cosmos-RL ---


def alone(case: Case) -> bool:
    return len(case.inputs["rewards"]) == 1


def rewards_differ(case: Case) -> bool:
    return len(set(case.inputs["rewards"])) > 1


def groups_of_unequal_rewards(case: Case) -> list[str]:
    return [f"{at}.advantages" for at, group in enumerate(case.outputs["groups"]) if len(set(group["rewards"])) > 1]


def beyond_longest(case: Case) -> bool:
    return case.inputs["n_tokens"] > case.params["max_response_length"]


def old_keys_missing(case: Case) -> bool:
    """Whether some key is left out by which the version of January 2026 knows grpo."""
    given = case.inputs["toml"].get("train", {}).get("train_policy", {})
    return not {"temperature", "epsilon_low", "epsilon_high", "kl_beta"} <= set(given)


def has_rollout_logprobs(case: Case) -> bool:
    return case.inputs.get("rollout_per_token_logps") is not None


def empty_sample(case: Case) -> bool:
    ends = case.inputs["cu_seqlens"]
    return any(one == other for one, other in pairwise(ends))


def equal_lengths_apart(case: Case) -> bool:
    """Whether samples of the same length lie in several micro-batches, so that they may be exchanged."""
    lengths = case.inputs["seq_len_effective"]
    home = [next(n for n, part in enumerate(case.outputs["batches"]) if at in part) for at in range(len(lengths))]
    pairs = [(one, other) for one in range(len(lengths)) for other in range(one)]
    return any(lengths[one] == lengths[other] and home[one] != home[other] for one, other in pairs)


def _warm_up(case: Case) -> int:
    steps, total = case.params["optm_warmup_steps"], case.params["training_steps"]
    return round(steps * total) if isinstance(steps, float) and steps <= 1 else int(steps)


def warm_up_to_the_end(case: Case) -> bool:
    return _warm_up(case) >= case.params["training_steps"]


def _room(case: Case) -> int:
    """Return how many samples may be begun until all that train in time are under way."""
    batch = case.params["train_batch_per_replica"] * case.params["n_policy_replicas"]
    steps = 0 if case.params.get("on_policy") else case.params["allowed_outdated_steps"]
    return (steps + 1) * batch - case.inputs["samples_on_the_fly"]


def fetches_beyond_bound(case: Case) -> bool:
    return (
        _room(case) <= 0
        and case.params["outdated_rollout_fetch_batch_size"] > 0
        and case.outputs.get("n_prompts", 0) > 0
    )


def room_for_a_part(case: Case) -> bool:
    return 0 < _room(case) < case.inputs["n"] * case.params["n_generation"]


def more_under_way_than_bound(case: Case) -> bool:
    return _room(case) < 0


def last_step_without_validation(case: Case) -> bool:
    return case.params["step"] == case.params["total_steps"] and not case.params["validation_enabled"]


def begins_afresh(case: Case) -> bool:
    return case.inputs.get("resume_mode") in (None, "none")


def nobody_rewarded(case: Case) -> bool:
    return not any(case.inputs["rewards"])


def means_of_nothing(case: Case) -> list[str]:
    """Lengths of samples with, or without, a reward, of which there are none."""
    names = ("generate/avg_tokens_non_zero_rewards", "generate/avg_tokens_zero_rewards")
    return [name for name in names if case.outputs.get("rollout_metrics", {}).get(name) == 0]


CONDITIONS: dict[str, Callable[[Case], bool]] = {
    function.__name__: function
    for function in (
        alone, begins_afresh, beyond_longest, divisor_shrinks, empty_sample, engines_of_others, equal_lengths_apart, fetches_beyond_bound,
        fewer_than_two_trained, has_rollout_logprobs, last_reward_misleads, last_step_without_validation, masks_differ,
        more_under_way_than_bound, no_cap, no_logprobs, nobody_rewarded, nothing_trained, old_keys_missing, padding_moves_mean,
        partial_micro_batch, ratio_beyond_clamp, reference_of_default_size, refused, reward_outside, rewards_cut_off,
        rewards_differ, rewards_of_both_signs, rewards_per_token, room_for_a_part, row_left_out_before_token_mask,
        row_without_trained_token, several_checkpoints, some_cell_untrained, statistics_with_added_rows, steps_beside,
        turn_without_observation, unequal_critic_shares, warm_up_to_the_end,
    )
}  # fmt: skip

PLACES: dict[str, Callable[[Case], list[str]]] = {
    function.__name__: function
    for function in (
        added_end, added_rows, after_turn, after_turns, before_added_end, cells_beyond_clamp, cells_of_another_mask,
        end_of_message, groups_of_unequal_rewards, means_of_nothing,
        rows_with_rewards_cut_off, rows_with_steps_beside, untrained_cells,
    )
}  # fmt: skip
"""Paths below an output; entries of lists count from 0."""
