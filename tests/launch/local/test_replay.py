"""With what a step was trained."""

from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import Config
from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.errors import ConfigError
from hpcrl.launch.local.replay import config_of, differences, ranks_here
from hpcrl.observe.metrics import MetricsWriter
from hpcrl.rundir.commit import write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import open_attempt


def test_an_attempt_that_was_interrupted_before_it_trained_has_trained_nothing(tmp_path: Path) -> None:
    """Each attempt has other settings; the second says at step 4, where it began, how long its end took."""
    run = Run(tmp_path / "project" / "run")
    run.path.mkdir(parents=True)
    reports = [{"timing/step": 1.0}, {"resilience/signal_to_commit_seconds": 0.1}, {}]
    for number, metrics in enumerate(reports, start=1):
        assert open_attempt(run, f"{number}", ["node"]).number == number
        write_text(run.config_of(number), "")
        with MetricsWriter(run, "trainer", number, 0 if number == 1 else 4) as writer:
            writer.write(4, metrics)
    with MetricsWriter(run, "trainer", 3, 4) as writer:
        writer.write(5, {"timing/step": 1.0})
    assert config_of(run, 4) == run.config_of(1)
    assert config_of(run, 5) == run.config_of(3)


def test_ranks_of_a_replay_share_the_model_as_those_of_the_run_did() -> None:
    """One rank on each of two nodes has half of the model: a replay on one machine has both."""
    two_nodes = {"placement": {"policy_num_nodes": 2, "policy_num_gpus_per_node": 1}}
    halves = trainer(**two_nodes, strategy="megatron", sizes={"tensor_model_parallel_size": 2})
    assert ranks_here(halves, None) == 2
    assert ranks_here(halves, 4) == 4
    with pytest.raises(ConfigError, match=r"--ranks: by trainer.policy.megatron_config 2 ranks share .* found 3"):
        ranks_here(halves, 3)
    assert ranks_here(trainer(**two_nodes), None) == 1
    four = {"placement": {"policy_num_gpus_per_node": 4}}
    experts = {"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1}
    with pytest.raises(ConfigError, match="4 ranks share a copy of the model, expected a multiple of that, found 2"):
        ranks_here(trainer(**four, strategy="megatron", sizes=experts), 2)
    policy = {"model": {"path": "/m"}, "fsdp_config": {"expert_parallel_size": 4}, "sequence_parallel_size": 2}
    with pytest.raises(ConfigError, match=r"policy\.fsdp_config.expert_parallel_size 4 ranks share .* found 2"):
        ranks_here(trainer(**four, policy=policy), 2)


def test_ranks_of_a_reference_on_megatron_share_it_as_the_policy_where_it_has_no_sizes_of_its_own() -> None:
    four = {"placement": {"policy_num_gpus_per_node": 4}, "strategy": "megatron"}
    assert ranks_here(trainer(**four, sizes={"tensor_model_parallel_size": 2}), 2, "ref") == 2
    experts = {"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1}
    with pytest.raises(ConfigError, match=r"trainer\.ref\.megatron_config 4 ranks share .* found 2"):
        ranks_here(trainer(**four, sizes=experts), 2, "ref")


def trainer(sizes: dict[str, Any] | None = None, **settings: Any) -> TrainerConfig:
    model = {"model": {"path": "/m"}, "megatron_config": sizes or {}}
    algorithm = {"use_kl_loss": False}
    section = {"policy": model, "algorithm": algorithm, "eval_interval": 0, **settings}
    return Config.from_dict({"data": {"train_data": ["/t.parquet"]}, "trainer": section}).trainer


def test_a_step_is_compared_to_the_last_bit() -> None:
    plan = {"recorded": {"3": {"policy/final_loss": 0.1, "loss/x": float("nan")}}, "versions": {"3": "aa"}}
    metrics = {"policy/final_loss": 0.1, "loss/x": float("nan"), "timing/step": 2.0}
    assert differences(plan, {"step": 3, "metrics": metrics, "weights": "aa"}) == []
    nearly = metrics | {"policy/final_loss": 0.1 + 2**-56}
    assert differences(plan, {"step": 3, "metrics": nearly, "weights": "ab"}) == [
        "policy/final_loss: 0.1 and 0.10000000000000002",
        "weights: aa and ab",
    ]
    assert differences(plan, {"step": 4, "metrics": nearly}) == []
