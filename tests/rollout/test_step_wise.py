"""generator.step_wise_trajectories: each turn of a sample becomes a row, whose prompt is what the policy was shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcrl.config import SamplingParams
from hpcrl.data.group_file import check_group, read_group
from hpcrl.data.rollouts import evaluated_samples, read_trained
from hpcrl.envs.base import Turn
from hpcrl.rollout.evaluate import evaluated_text
from hpcrl.rollout.group import Group, neutralize_failed
from hpcrl.rundir.layout import Run
from hpcrl.rundir.records import append_text
from tests.rollout.conftest import WithEngine
from tests.rollout.material import logprobs
from tests.rollout.test_generate import CONFIG, TOKENIZER, generate, work
from tests.rollout.test_transcript import ANSWERS, Script, chosen, ended, played, text, tokenizer_of, user
from tests.rows import group_meta, write_group

THOUGHT = "<think>\nhm\n</think>\n\n"
WORDS = ("one", "two", "three")


def stepped(template: str = "thinking", **settings: Any) -> tuple[Group, Script]:
    tokenizer = tokenizer_of(template)
    said = [ended(tokenizer, THOUGHT + word) for word in WORDS]
    return played(tokenizer, said, ANSWERS, step_wise_trajectories=True, **settings)


def test_a_row_is_what_the_engine_was_given_and_what_it_said() -> None:
    group, engine = stepped()
    tokenizer, (rows,) = tokenizer_of("thinking"), group.rows
    assert len(rows) == len(engine.prompts) == 3
    for row, prompt, word in zip(rows, engine.prompts, WORDS, strict=True):
        said = ended(tokenizer, THOUGHT + word)[0]
        assert row.token_ids.tolist() == prompt + said
        assert row.loss_mask.tolist() == [0.0] * len(prompt) + [1.0] * len(said)
        assert row.versions.tolist() == [-1] * len(prompt) + [3] * len(said)
        assert row.rollout_logprobs[len(prompt) :].tolist() == [-0.5 - at for at in range(len(said))]
        assert not row.rollout_logprobs[: len(prompt)].any()
    places = [int(row.rewards.nonzero()[0][0]) for row in rows]
    assert places == [len(row.token_ids) - 1 for row in rows], "at the last token of the turn"
    assert [row.rewards.sum().item() for row in rows] == pytest.approx([0.1, 0.2, 1.0])
    assert len(set(engine.seeds)) == 3


def test_the_past_is_what_the_template_makes_of_it() -> None:
    """This template drops earlier thoughts, so that no prompt begins with the one before and its answer."""
    group, engine = stepped()
    tokenizer = tokenizer_of("thinking")
    messages = user("guess")
    for prompt, word, answer in zip(engine.prompts, WORDS, ANSWERS, strict=True):
        assert prompt == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert "hm" not in text(tokenizer, prompt)
        messages += [{"role": "assistant", "content": THOUGHT + word}, *answer.observations]
    assert "assistant\none<|im_end|>" in text(tokenizer, engine.prompts[2])
    assert group.conversations[0] == messages[1:]


def test_a_template_that_keeps_the_past_gives_the_turns_of_the_whole_sample() -> None:
    tokenizer = tokenizer_of("headers")
    said = [ended(tokenizer, word) for word in WORDS]
    whole, engine = played(tokenizer, said, ANSWERS)
    group, other = played(tokenizer, said, ANSWERS, step_wise_trajectories=True)
    assert other.prompts == engine.prompts
    assert [token for row in group.samples for token in chosen(row)] == chosen(whole.samples[0])
    assert (group.response_lengths, group.texts) == (whole.response_lengths, whole.texts)


def test_meta_counts_samples_and_says_which_rows_they_have() -> None:
    group, _ = stepped()
    meta = group.meta(0, "path")
    assert meta.owners == [0, 0, 0]
    assert meta.rewards == [meta.samples[0].raw_reward] == [1.0], "the outcome, which the last turn has"
    assert meta.lengths == [len(row.token_ids) for row in group.samples]
    assert meta.response_lengths == [sum(int(row.loss_mask.sum()) for row in group.samples)]
    assert (meta.stop_reasons, len(meta.samples)) == (["stop"], 1)
    first, second, third = (row.token_ids.tolist() for row in group.samples)
    shared = meta.samples[0].shared
    assert shared[0] == 0
    for size, one, other in zip(shared[1:], (first, second), (second, third), strict=True):
        assert one[:size] == other[:size]
        assert 0 < size < len(other)
        assert size == len(one) or one[size] != other[size]
    group.samples[0].versions[-1] = 1
    assert (group.meta(0, "path").oldest_version, group.meta(0, "path").newest_version) == (1, 3)
    columns = {"rewards": [0.0] * 3, "response_lengths": [1] * 3, "stop_reasons": ["stop"] * 3}
    assert group_meta(**columns, lengths=[2] * 3).owners == [0, 1, 2]
    assert group_meta(**columns, lengths=[2] * 6, rows=[2, 1, 3]).owners == [0, 0, 1, 2, 2, 2]


def test_a_sample_that_becomes_too_long_ends_with_its_last_turn() -> None:
    whole, engine = stepped()
    room = len(engine.prompts[1])
    short, engine = stepped(max_input_length=room, zero_reward_on_non_stop=True, apply_overlong_filtering=True)
    (rows,) = short.rows
    assert len(rows) == len(engine.prompts) == 2
    assert [row.token_ids.tolist() for row in rows] == [row.token_ids.tolist() for row in whole.samples[:2]]
    assert {row.stop_reason for row in rows} == {"length"}
    assert not any(row.loss_mask.any() or row.rewards.any() for row in rows), "all turns are judged alike"
    meta = short.meta(0, "path")
    assert (meta.rewards, meta.samples[0].raw_reward) == ([0.0], pytest.approx(0.2))
    none, engine = stepped(max_input_length=3)
    assert engine.prompts == []
    assert (none.response_lengths, none.meta(0, "path").owners) == ([0], [0])


def test_what_the_policy_is_shown_of_its_past() -> None:
    """A rewritten action as it was rewritten; a stop text also where the environment does not see it."""
    tokenizer = tokenizer_of("chatml")
    call = Turn(user("4"), 0.5, False, action="<sum>")
    params = SamplingParams(stop=["</q>"], include_stop_str_in_output=False)
    said = [
        ended(tokenizer, "<sum>and so on"),
        (tokenizer.encode("ask</q>", add_special_tokens=False), "stop"),
        ended(tokenizer, "y"),
    ]
    group, engine = played(tokenizer, said, [call, *ANSWERS[1:]], step_wise_trajectories=True, sampling_params=params)
    assert text(tokenizer, engine.prompts[1]).endswith(
        "assistant\n<sum><|im_end|>\n<|im_start|>user\n4<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "assistant\nask</q><|im_end|>" in text(tokenizer, engine.prompts[2])
    assert text(tokenizer, chosen(group.samples[0])) == "<sum>", "of what was said, what stands"
    assert group.conversations[0][2]["content"] == "ask"


def test_a_failed_sample_is_left_out_with_all_its_turns() -> None:
    good, _ = stepped()
    lost = [replace(row, stop_reason="failed", rewards=np.zeros_like(row.rewards)) for row in good.samples]
    first, second = neutralize_failed([good.rows[0], lost])
    assert first == good.rows[0]
    assert [float(row.rewards.sum()) for row in second] == [0.0, 0.0, 1.0], "the mean of the others, as its outcome"


def test_an_environment_that_fails_in_a_later_turn() -> None:
    tokenizer = tokenizer_of("thinking")
    said = [ended(tokenizer, word) for word in WORDS]
    group, _ = played(tokenizer, said, ANSWERS[:1], step_wise_trajectories=True)  # StopIteration in the second turn
    assert [row.stop_reason for row in group.samples] == ["failed"] * 2
    assert not any(row.loss_mask.any() for row in group.samples)
    assert "raised RuntimeError: StopIteration" in group.failures[0]


def test_files_and_what_a_person_sees(tmp_path: Path) -> None:
    run, (group, engine) = Run(tmp_path / "project" / "run"), stepped()
    tokenizer = tokenizer_of("thinking")
    meta = group.meta(0, "samples/0/g.safetensors")
    meta = write_group(run.path / meta.path, group.samples, meta)
    assert check_group(run.path / meta.path, meta).owners == [0] * 3
    assert [row.token_ids.tolist() for row in read_group(run.path / meta.path, [1, 2], meta)] == [
        row.token_ids.tolist() for row in group.samples[1:]
    ]
    (shown,) = read_trained(run, [(meta, 0)], lambda ids: text(tokenizer, ids))
    assert [part.by for part in shown.parts] == ["prompt", "policy"] * 3
    assert [part.reward for part in shown.parts[1::2]] == pytest.approx([0.1, 0.2, 1.0])
    assert [part.text for part in shown.parts[::2]] == [text(tokenizer, prompt) for prompt in engine.prompts]
    assert (shown.reward, shown.versions, shown.stop_reason) == (1.0, (3, 3), "stop")
    append_text(run.eval_dump(3, 0), evaluated_text([group], lambda ids: text(tokenizer, ids)))
    _, (evaluated,) = evaluated_samples(run, None)
    assert (evaluated.parts, evaluated.reward, evaluated.stop_reason) == (shown.parts, 1.0, "stop")


@pytest.mark.parametrize("kind", ["train", "eval"])
def test_turns_with_an_engine(with_engine: WithEngine[Any], models: list[Path], kind: str) -> None:
    """Each row has the log-probabilities of its own prompt; a greedy response is paid as samples are."""
    config = replace(CONFIG, max_turns=5, step_wise_trajectories=True)
    group = generate(with_engine, work("Talks", kind), config, baselines=True)
    meta = group.meta(0, "path")
    assert (len(group.rows), [len(sample.lengths) for sample in meta.samples]) == (6, [3] * 6)
    assert (meta.baseline is not None) == (kind == "train")
    for rows, messages, reward in zip(group.rows, group.conversations, meta.rewards, strict=True):
        assert reward == len(messages[-2]["content"])
        for at, row in enumerate(rows):
            start = int(row.loss_mask.argmax())
            past = [*work().prompt.messages, *messages[: 2 * at]]
            prompt = TOKENIZER.apply_chat_template(past, add_generation_prompt=True, return_dict=False)
            assert row.token_ids[:start].tolist() == prompt
            temperature = 0.8 if kind == "train" else 1.0
            expected = logprobs(models[0], prompt, row.token_ids[start:].tolist(), temperature)
            np.testing.assert_allclose(row.rollout_logprobs[start:], expected, atol=1e-3)
