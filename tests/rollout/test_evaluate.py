"""An evaluation outside of training: every prompt once, the same at each time, and an engine that dies is told of."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import EnvironmentConfig, GeneratorConfig, SamplingParams
from hpcrl.config.sections.generator import ChatTemplateConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.controller.evaluation import evaluation_work
from hpcrl.data.rollouts import evaluated_samples
from hpcrl.data.tokenizer import decoder, load_tokenizer
from hpcrl.errors import EngineError
from hpcrl.rollout.engines.base import Engine, Launched
from hpcrl.rollout.evaluate import evaluate
from hpcrl.rollout.generate import conversations
from hpcrl.rundir.commit import write_text
from hpcrl.rundir.layout import Run
from hpcrl.types import GroupMeta, Prompt
from tests.rollout.conftest import WithEngine
from tests.rollout.material import ENGINE, QUICKSTART, RUN_NAME, TOKEN, break_head, started

PROMPTS = [
    Prompt(str(row), [{"role": "user", "content": f"sort: {letters}"}], "sort_letters", {"reward_spec": {"ground_truth": letters}}, "a/b")
    for row, letters in enumerate(["ba", "dcba", "ca"])
]  # fmt: skip
GENERATOR = GeneratorConfig(
    inference_engine=replace(ENGINE, max_num_seqs=4),  # two prompts at a time
    eval_n_samples_per_prompt=2,
    sampling_params=SamplingParams(max_generate_length=12),
    eval_sampling_params=replace(GeneratorConfig().eval_sampling_params, temperature=1.0),
)


def place(path: Path) -> Run:
    run = Run(path / RUN_NAME)
    write_text(run.token, TOKEN + "\n", mode=0o600)
    return run


def played(place: Run, launched: Launched, told: list[int]) -> list[GroupMeta]:
    work = evaluation_work(PROMPTS, 3, 2, seed=5)
    tokenizer = load_tokenizer(Pretrained(str(QUICKSTART)), ChatTemplateConfig())
    maker = conversations(tokenizer, GENERATOR, EnvironmentConfig())
    return asyncio.run(evaluate(place, launched, maker, decoder(tokenizer), work, 3, GENERATOR, told.append))


def test_each_prompt_is_played_and_dumped(
    launched: Launched, with_each_engine: WithEngine[Any], tmp_path: Path
) -> None:
    async def nothing(_engine: Engine) -> None: ...

    with_each_engine(nothing)  # the first model again
    told: list[int] = []
    first, again = place(tmp_path / "first"), place(tmp_path / "again")
    groups = played(first, launched, told)
    assert told == [1, 2, 3]
    assert [group.group_id for group in groups] == [f"e000003-{row:08d}" for row in range(3)]
    assert all(len(group.rewards) == 2 and group.oldest_version == group.newest_version == 3 for group in groups)
    version, samples = evaluated_samples(first, None)
    assert (version, len(samples)) == (3, 6)
    assert [sample.reward for sample in samples] == [reward for group in groups for reward in group.rewards]
    for sample, group in zip(samples[::2], groups, strict=True):
        prompt, said = sample.parts
        assert (prompt.by, said.by, said.tokens) == ("prompt", "policy", group.response_lengths[0])
        assert "sort: " in prompt.text
        assert sample.ground_truth in prompt.text.partition("sort: ")[2]
        assert sample.ground_truth
    lines = [json.loads(line) for line in first.eval_dump(3, 0).read_text().splitlines()]
    assert {line["data_source"] for line in lines} == {"a/b"}
    played(again, launched, told)
    assert [sample.parts for sample in evaluated_samples(again, 3)[1]] == [sample.parts for sample in samples]


def test_an_engine_that_dies_ends_the_evaluation(models: list[Path], tmp_path: Path) -> None:
    with started(models[0]) as engine:
        break_head(engine)
        with pytest.raises(EngineError):
            asyncio.run(engine.connect().generate([4], 1, 1, {}))
        with pytest.raises(EngineError, match="the inference engine died: RuntimeError"):
            played(place(tmp_path), engine, [])
