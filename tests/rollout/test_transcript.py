"""Samples of several turns: a script says what the engine says, and templates in the manner of Qwen2.5, Qwen3 and Llama 3 stand around it."""

from __future__ import annotations

import asyncio
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hpcrl.config import EnvironmentConfig, GeneratorConfig, SamplingParams
from hpcrl.config.sections.environment import ScoringRewardModelConfig
from hpcrl.data.chat.prompt_tokens import ChatTurns
from hpcrl.envs.base import Messages, Turn
from hpcrl.errors import ConfigError
from hpcrl.rollout.engines.base import Generation, Heard
from hpcrl.rollout.generate import GroupGenerator
from hpcrl.rollout.group import Group
from hpcrl.types import Prompt, Row, Work

TEMPLATES = Path(__file__).with_name("templates")
ENDS = {"chatml": "<|im_end|>", "thinking": "<|im_end|>", "headers": "<|eot_id|>"}
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"]


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """A token per character, and some for two, so that most texts have several tokenizations."""
    letters = [*string.printable, "ab", "th", "in", "\n\n", "??"]
    model = Tokenizer(models.WordLevel({text: at for at, text in enumerate([*SPECIAL, *letters])}, unk_token="?"))
    model.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    model.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model, bos_token="<|begin_of_text|>", eos_token=ENDS[name], additional_special_tokens=SPECIAL
    )
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
    return tokenizer


NOBODY_JUDGES = EnvironmentConfig()


class Script:
    """An engine that says what it is told, a turn after the other, and notes what it was given."""

    version = 3

    def __init__(self, turns: Sequence[tuple[list[int], str]]) -> None:
        self._turns, self.prompts, self.seeds = iter(turns), list[list[int]](), list[int]()

    async def generate(
        self,
        prompt_ids: list[int],
        n_samples: int,
        seed: int,
        _sampling: Any,
        _name: Any,
        heard: Heard | None,
        _images: Any,
    ) -> list[Generation]:
        assert n_samples == 1
        self.prompts.append(list(prompt_ids))
        self.seeds.append(seed)
        token_ids, reason = next(self._turns)
        logprobs = [-0.5 - at for at in range(len(token_ids))]
        if heard:
            for token_id, logprob in zip(token_ids, logprobs, strict=True):
                heard([token_id], [logprob])
        return [Generation(token_ids, logprobs, reason, [self.version] * len(token_ids))]  # type: ignore[arg-type]


class Answers:
    """Answers as the row's `turns` say."""

    def __init__(self, extras: Mapping[str, Any]) -> None:
        self._turns = iter(extras["turns"])

    def init(self, messages: Messages) -> Messages:
        return messages

    def step(self, action: str) -> Turn:  # noqa: ARG002
        return next(self._turns)

    def close(self) -> None:
        pass


def played(
    tokenizer: PreTrainedTokenizerFast,
    said: Sequence[tuple[list[int], str]],
    turns: Sequence[Turn],
    environment: EnvironmentConfig = NOBODY_JUDGES,
    **settings: Any,
) -> tuple[Group, Script]:
    engine, config = Script(said), GeneratorConfig(**{"max_turns": 9, **settings})
    messages = [{"role": "user", "content": "guess"}]
    prompt = Prompt("0", messages, f"{__name__}:Answers", {"turns": turns})
    generator = GroupGenerator(engine, tokenizer, config, environment)  # type: ignore[arg-type]
    return asyncio.run(generator.generate(Work("g", "train", prompt, 1, seed=5))), engine


def user(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def text(tokenizer: PreTrainedTokenizerFast, token_ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(token_ids)))


def ended(tokenizer: PreTrainedTokenizerFast, said: str) -> tuple[list[int], str]:
    return [*tokenizer.encode(said, add_special_tokens=False), tokenizer.eos_token_id], "stop"


def chosen(sample: Row) -> list[int]:
    return sample.token_ids[sample.loss_mask > 0].tolist()


ANSWERS = [Turn(user("higher"), 0.1, False), Turn(user("lower ??"), 0.2, False), Turn(user("bye"), 1.0, True)]


@pytest.mark.parametrize("step_wise", [False, True])
def test_a_reward_model_reads_the_conversation_up_to_what_was_said_last(step_wise: bool) -> None:
    tokenizer = tokenizer_of("chatml")
    said = [ended(tokenizer, word) for word in ("one", "two", "three")]
    judged = EnvironmentConfig(reward_model=ScoringRewardModelConfig(model="rm", use_environment=True))
    group, _ = played(tokenizer, said, ANSWERS, judged, step_wise_trajectories=step_wise)
    (conversation,) = group.judged
    contents = [(message["role"], message["content"]) for message in conversation]
    assert [text for role, text in contents if role == "user"] == ["guess", "higher", "lower ??"]
    assert [text for role, text in contents if role == "assistant"] == ["one", "two", "three"]
    assert contents[-1][0] == "assistant"
    assert group.conversations[0][-1]["content"] == "bye"
    assert sum(float(row.rewards.sum()) for row in group.samples) == pytest.approx(1.3), "the environment pays too"
    assert not played(tokenizer, said, ANSWERS)[0].judged


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("thoughts", ["", "<think>\nhm\n</think>\n\n"])
def test_each_prompt_begins_with_the_one_before_and_its_answer(name: str, thoughts: str) -> None:
    tokenizer = tokenizer_of(name)
    said = [ended(tokenizer, thoughts + word) for word in ("one", "two", "three")]
    group, engine = played(tokenizer, said, ANSWERS)
    (sample,) = group.samples
    for before, (token_ids, _), after in zip(engine.prompts, said, engine.prompts[1:], strict=False):
        assert after[: len(before) + len(token_ids)] == before + token_ids
    assert engine.prompts[-1] + said[-1][0] == sample.token_ids.tolist()
    assert chosen(sample) == [token for token_ids, _ in said for token in token_ids]
    assert len(set(engine.seeds)) == 3
    assert engine.seeds[0] == 5


@pytest.mark.parametrize(
    ("name", "options"), [("chatml", {}), ("headers", {}), ("thinking", {"enable_thinking": False})]
)
def test_the_whole_is_what_the_template_makes_of_the_conversation(name: str, options: dict[str, Any]) -> None:
    """Where it writes the past as it was; the thinking template drops the empty thoughts that it had put there itself."""
    tokenizer = tokenizer_of(name)
    said = [ended(tokenizer, word) for word in ("one", "two", "three")]
    group, _ = played(tokenizer, said, ANSWERS, chat_template_kwargs=options)
    messages = [*user("guess"), *group.conversations[0][:-1]]
    whole = str(tokenizer.apply_chat_template(messages, tokenize=False, **options)).rstrip("\n")
    found = text(tokenizer, group.samples[0].token_ids.tolist())
    empty = "<think>\n\n</think>\n\n"
    assert found.replace(empty, "") == whole.replace(empty, "")
    assert found.count(empty) == (3 if options else 0)


def test_tools_answer_side_by_side() -> None:
    tokenizer = tokenizer_of("chatml")
    results = [{"role": "tool", "content": "4"}, {"role": "tool", "content": "9"}]
    _, engine = played(
        tokenizer, [ended(tokenizer, "x"), ended(tokenizer, "y")], [Turn(results, 0, False), ANSWERS[-1]]
    )
    asked = text(tokenizer, engine.prompts[1]).split("x<|im_end|>")[1]
    responses = "\n<tool_response>\n4\n</tool_response>\n<tool_response>\n9\n</tool_response>"
    assert asked == f"\n<|im_start|>user{responses}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("name", ENDS)
def test_rewards_stand_at_the_last_token_of_their_turn(name: str) -> None:
    tokenizer = tokenizer_of(name)
    said = [ended(tokenizer, word) for word in ("one", "two", "three")]
    (sample,) = played(tokenizer, said, ANSWERS)[0].samples
    (places,) = sample.rewards.nonzero()
    assert sample.rewards[places].tolist() == pytest.approx([0.1, 0.2, 1.0])
    assert sample.token_ids[places].tolist() == [tokenizer.eos_token_id] * 3
    assert sample.loss_mask[places].all()
    assert set(sample.versions[sample.loss_mask > 0].tolist()) == {3}
    assert set(sample.versions[sample.loss_mask == 0].tolist()) == {-1}
    assert not sample.rollout_logprobs[sample.loss_mask == 0].any()
    assert (sample.rollout_logprobs[sample.loss_mask > 0] < 0).all()


@pytest.mark.parametrize("append", [True, False])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_turn_that_the_policy_did_not_end(append: bool, reason: str) -> None:
    tokenizer = tokenizer_of("chatml")
    cut = tokenizer.encode("<a>", add_special_tokens=False), reason
    settings = {"append_eos_token_after_stop_str_in_multi_turn": append}
    group, engine = played(tokenizer, [cut, ended(tokenizer, "y")], ANSWERS[1:], **settings)
    end = "<|im_end|>" if append else ""
    assert text(tokenizer, engine.prompts[1]).endswith(
        f"<a>{end}\n<|im_start|>user\nlower ??<|im_end|>\n<|im_start|>assistant\n"
    )
    assert chosen(group.samples[0]) == [*cut[0], *ended(tokenizer, "y")[0]]


def test_turns_in_one_message() -> None:
    """The end of a turn is dropped, but for the last, and texts stand as they are."""
    tokenizer = tokenizer_of("headers")
    said = [ended(tokenizer, "ab"), (tokenizer.encode("cd"), "stop"), ended(tokenizer, "e")]
    group, engine = played(tokenizer, said, ANSWERS, use_conversation_multi_turn=False)
    assert text(tokenizer, engine.prompts[2]).endswith("\n\nabhighercdlower ??")
    (sample,) = group.samples
    assert text(tokenizer, chosen(sample)) == "abcde<|eot_id|>"
    assert sample.rewards[sample.rewards > 0].tolist() == pytest.approx([0.1, 0.2, 1.0])


def test_a_sample_ends_at_the_longest_input_or_the_last_turn() -> None:
    tokenizer = tokenizer_of("headers")
    said = [ended(tokenizer, "one"), ended(tokenizer, "two")]
    whole, engine = played(tokenizer, said, ANSWERS, max_turns=2)
    assert whole.samples[0].stop_reason == "stop"
    room = len(engine.prompts[1])
    assert played(tokenizer, said, ANSWERS, max_turns=2, max_input_length=room)[0].samples[0].token_ids.tolist() == (
        whole.samples[0].token_ids.tolist()
    )
    short, engine = played(tokenizer, said, ANSWERS, max_turns=2, max_input_length=room - 1)
    assert len(engine.prompts) == 1
    assert short.samples[0].stop_reason == "length"
    assert short.samples[0].token_ids.tolist() == engine.prompts[0] + said[0][0], "what nobody answers is left out"
    assert short.samples[0].rewards.sum() == pytest.approx(0.1)
    none, engine = played(tokenizer, said, ANSWERS, max_input_length=3)
    assert engine.prompts == []
    assert (none.samples[0].stop_reason, none.oldest_version, none.response_lengths) == ("length", 3, [0])


def test_an_action_that_the_environment_rewrites() -> None:
    """A beginning of what was said is trained as it was sampled; other words are not trained."""
    tokenizer = tokenizer_of("chatml")
    call, other = Turn(user("4"), 0.5, False, action="<sum>"), Turn(user("!"), 0.25, False, action="SORRY")
    said = [ended(tokenizer, "<sum>and so on"), ended(tokenizer, "bad word"), ended(tokenizer, "4")]
    group, engine = played(tokenizer, said, [call, other, ANSWERS[-1]])
    (sample,) = group.samples
    assert text(tokenizer, chosen(sample)) == "<sum>4<|im_end|>"
    assert "<sum><|im_end|>\n<|im_start|>user\n4" in text(tokenizer, engine.prompts[2])
    assert "assistant\nSORRY<|im_end|>\n<|im_start|>user\n!" in text(tokenizer, engine.prompts[2])
    assert [message["content"] for message in group.conversations[0]] == ["<sum>", "4", "SORRY", "!", "4", "bye"]
    assert sample.rewards.sum() == pytest.approx(1.75)


def test_a_template_that_hides_the_answer_is_refused() -> None:
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(ConfigError, match="leaves out what the assistant says"):
        ChatTurns(tokenizer, {}).following([])


def test_a_template_whose_answers_end_differently_is_refused() -> None:
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% if loop.last %}<|im_end|>{% else %}|{% endif %}{% endfor %}"
    )
    with pytest.raises(ConfigError, match=r"ends a message of the assistant with .*, but before"):
        ChatTurns(tokenizer, {}).following(user("more"))


def test_metrics_of_later_turns_take_the_place_of_earlier_ones() -> None:
    tokenizer = tokenizer_of("headers")
    turns = [Turn(user("a"), 0, False, {"tries": 1, "first": 7}), Turn([], 1, True, {"tries": 2})]
    group, _ = played(tokenizer, [ended(tokenizer, "x"), ended(tokenizer, "y")], turns)
    assert group.samples[0].env_metrics == {"tries": 2.0, "first": 7.0}


def test_stop_texts_do_not_reach_the_environment_when_they_are_left_out() -> None:
    tokenizer = tokenizer_of("chatml")
    params = SamplingParams(stop=["</q>"], include_stop_str_in_output=False)
    cut = tokenizer.encode("ask</q>", add_special_tokens=False), "stop"
    group, engine = played(tokenizer, [cut, ended(tokenizer, "y")], ANSWERS[1:], sampling_params=params)
    assert group.conversations[0][0]["content"] == "ask"
    assert "ask</q><|im_end|>" in text(tokenizer, engine.prompts[1]), "the tokens stay"


@pytest.mark.parametrize("settings", [{}, {"step_wise_trajectories": True}, {"use_conversation_multi_turn": False}])
def test_an_answer_that_cannot_be_given_as_text_costs_its_sample(settings: dict[str, Any]) -> None:
    """A special token of one character has no place for a cut."""
    tokenizer = tokenizer_of("chatml")
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL, "#"]})
    group, engine = played(tokenizer, [ended(tokenizer, "a")] * 2, [Turn(user("take #1"), 0.5, False)], **settings)
    (failure,) = group.failures
    assert failure.startswith("'#' is a special token that cannot be given as text")
    assert group.samples[-1].stop_reason == "failed"
    assert len(engine.prompts) == 1
