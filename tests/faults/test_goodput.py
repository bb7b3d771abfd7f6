"""What the node of a real run did that is preempted again and again: no work is lost, and Slurm's accounts agree."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hpcrl.observe.goodput import account_of
from hpcrl.observe.node_seconds import LOST
from hpcrl.rundir.ledger import read_attempts
from tests.faults.history import assert_ended
from tests.faults.scenario import Scenario
from tests.faults.test_views import assert_agrees_with_sacct
from tests.paths import CONFIGS

ATTEMPT_S = 240.0
TURNS = {
    "trainer.placement.colocate_all": True,
    "generator.inference_engine.backend": "transformers",
    "generator.on_logprob_mismatch": None,
    "generator.n_samples_per_prompt": 8,
    "trainer.train_batch_size": 256,
    "trainer.policy_mini_batch_size": 64,
    "trainer.micro_train_batch_size_per_gpu": 128,
    "trainer.micro_forward_batch_size_per_gpu": 256,
    "trainer.epochs": 10_000,
    "trainer.max_steps": 100_000,
    "trainer.ckpt_interval": 1000,
}


@pytest.mark.soak
@pytest.mark.nodes(1)
@pytest.mark.own_cluster("--accounting")
def test_goodput_with_a_preemption_every_four_minutes(scenario: Scenario) -> None:
    """Trainer and engine take turns on one node, of a model whose turns take seconds, as a real one's do."""
    model = larger_model(scenario.path / "model")
    run = scenario.submit(TURNS | {"trainer.policy.model.path": str(model)}, stand_in=False)
    for attempt in (1, 2, 3):
        scenario.wait(lambda: len(read_attempts(run)) == attempt, f"attempt {attempt}", run=run)  # noqa: B023
        scenario.pause(ATTEMPT_S)
        scenario.preempt()
        assert scenario.outcome(run, attempt, 40).kind == "interrupted"
    scenario.wait(lambda: len(read_attempts(run)) == 4, "attempt 4", run=run)
    scenario.pause(ATTEMPT_S)
    assert scenario.hpcrl("cancel", run.name).returncode == 0
    assert_ended(scenario, run, "cancelled")
    account = account_of(run)
    assert account
    print(scenario.told("goodput", run.name))
    assert_agrees_with_sacct(scenario, run)
    assert account.share(LOST) < 0.05
    assert account.goodput > 0.85


def larger_model(path: Path) -> Path:
    """Write a model of 1.5 million parameters with the quickstart's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(CONFIGS / "quickstart" / "model", path)
    sizes = {
        "hidden_size": 192,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "layer_types": ["full_attention"] * 4,
    }
    config = AutoConfig.from_pretrained(path, **sizes)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path
