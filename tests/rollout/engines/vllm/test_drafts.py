"""Speculative decoding by real vLLM: log-probabilities stay the policy's, new weights count at once, and what drafts gain is counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcrl.config.sections.generator import SpeculativeConfig
from hpcrl.engines.vllm.client import EngineClient
from hpcrl.engines.vllm.server import Server
from hpcrl.rollout.engines.base import Drafts, Generation
from hpcrl.rollout.engines.weight_check import TOLERANCES
from tests.paths import ON_GPU
from tests.rollout.conftest import WithEngine, runner
from tests.rollout.engines.test_contract import LENGTH, updated_while_running
from tests.rollout.material import LONG_PROMPT, as_version, distribution, options, served

needs_engine = pytest.mark.faults_slow  # of its own
EXACT = TOLERANCES["bfloat16"] if ON_GPU else 1e-4
WHOLE: dict[str, Any] = {"temperature": 1.0, "max_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def drafting(models: list[Path], token_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose drafts are what followed a token before: of 18 tokens, most have occurred."""
    given = options(str(models[0]), token_file)
    drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=3)
    # a logits processor of one's own is refused with drafts
    engine = replace(given.engine, engine_init_kwargs={"block_size": 32}, speculative=drafts)
    with served(replace(given, engine=engine), tmp_path_factory.mktemp("drafts") / "engine.log") as server:
        yield server


@pytest.fixture
def with_drafts(drafting: Server, models: list[Path]) -> WithEngine[Any]:
    return runner(drafting, models[0])


def differs(said: Generation, model: Path, temperature: float = 1.0) -> float:
    """Return the largest difference from transformers' log-probabilities."""
    all_TV = distribution(model, LONG_PROMPT, said.token_ids, temperature)
    if said.sampling_mask is not None:
        kept = torch.zeros_like(all_TV).scatter(1, torch.tensor(said.sampling_mask), 1.0)
        all_TV = (all_TV.masked_fill(kept == 0, -torch.inf)).log_softmax(-1)
    expected = all_TV.gather(1, torch.tensor(said.token_ids)[:, None])[:, 0]
    return (torch.tensor(said.logprobs) - expected).abs().max().item()


def test_passes_are_counted_since_the_last_metrics() -> None:
    """Ten passes over thirty drafts, twelve of them accepted: each generates its own token, too."""
    before = Drafts(passes=5, tokens=15, accepted=1)
    found = Drafts(passes=15, tokens=45, accepted=13).metrics(before)
    assert found == {
        "generate/draft_accepted_share": pytest.approx(0.4),
        "generate/tokens_per_pass": pytest.approx(2.2),
    }
    assert before.metrics(before) == {}


@needs_engine
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7}, {"top_k": 3, "logprobs": 3}], ids=str)
def test_logprobs_are_those_of_the_policy(
    with_drafts: WithEngine[Any], models: list[Path], sampling: dict[str, Any]
) -> None:
    async def play(engine: EngineClient) -> list[Generation]:
        await engine.load()
        before = engine.drafts or Drafts()
        said = await engine.generate(LONG_PROMPT, 8, 3, {**WHOLE, **sampling})
        again = await engine.generate(LONG_PROMPT, 8, 3, {**WHOLE, **sampling})
        assert [one.token_ids for one in said] == [one.token_ids for one in again], "seeds reproduce"
        await engine.load()
        assert engine.drafts is not None
        found = engine.drafts.metrics(before)
        assert 0 < found["generate/draft_accepted_share"] < 1
        assert 1 < found["generate/tokens_per_pass"] <= 4
        return said

    found = with_drafts(play)
    assert max(differs(said, models[0], sampling.get("temperature", 1.0)) for said in found) < EXACT


@needs_engine
def test_greedy_responses_are_those_without_drafts(with_drafts: WithEngine[Any], with_engine: WithEngine[Any]) -> None:
    sampling = {**WHOLE, "temperature": 0.0}
    (drafted,), (plain,) = (
        run(lambda engine: engine.generate(LONG_PROMPT, 1, 3, sampling)) for run in (with_drafts, with_engine)
    )
    assert drafted.token_ids == plain.token_ids
    torch.testing.assert_close(torch.tensor(drafted.logprobs), torch.tensor(plain.logprobs), atol=EXACT, rtol=0)


@needs_engine
def test_drafts_meet_new_weights_while_requests_run(with_drafts: WithEngine[Any], models: list[Path]) -> None:
    async def play(engine: EngineClient) -> list[Generation]:
        await engine.update_weights(as_version(models[0], 0))
        return await updated_while_running(engine, models[1])

    for said in with_drafts(play):
        switch, given = said.versions.count(0), torch.tensor(said.logprobs)
        assert 0 < switch < LENGTH
        for model, part in ((models[0], slice(0, switch)), (models[1], slice(switch, None))):
            expected = distribution(model, LONG_PROMPT, said.token_ids).gather(1, torch.tensor(said.token_ids)[:, None])
            torch.testing.assert_close(given[part], expected[part, 0], atol=EXACT, rtol=0)
