"""Which node does what: reward models have nodes of their own, behind trainers and replicas, and the run cannot do without them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcrl.config import Config
from hpcrl.engines.vllm.server import server_options
from hpcrl.errors import SubmitError
from hpcrl.launch.agent.environment import Environments
from hpcrl.launch.nodes import Node, describe_plan, make_plan, needed_nodes
from hpcrl.launch.pools import elastic_pools
from hpcrl.launch.submit.executors import Element, Submission, batch_scripts
from hpcrl.launch.submit.submit import launch
from hpcrl.rundir.layout import Run
from tests.paths import QUICKSTART, ROOT

REWARD = [
    "environment.env_class=",
    "environment.remote_reward.enable=true",
    "environment.remote_reward.service.model=r",
]
ON_GPUS = [
    "slurm.gpus_per_node=4",
    "trainer.placement.policy_num_gpus_per_node=4",
    "generator.inference_engine.num_engines=4",
]


def plan(*settings: str) -> list[Node]:
    return make_plan(Config.from_toml([QUICKSTART], [*REWARD, *settings]))


def test_services_share_nodes_by_their_gpus() -> None:
    nodes = plan(*ON_GPUS, "environment.remote_reward.service.num_services=5")
    assert [(node.role, node.gpus, node.gpu_offset, node.workers) for node in nodes] == [
        ("trainer", 4, 0, []),
        ("rollout", 4, 4, ["rollout-0", "rollout-1", "rollout-2", "rollout-3"]),
        ("reward", 4, 8, ["reward-0", "reward-1", "reward-2", "reward-3"]),
        ("reward", 1, 12, ["reward-4"]),
    ]
    assert [node.devices for node in nodes] == [
        [["rank-0"]],
        [["rollout-0"], ["rollout-1"], ["rollout-2"], ["rollout-3"]],
        [["reward-0"], ["reward-1"], ["reward-2"], ["reward-3"]],
        [["reward-4"]],
    ]
    assert needed_nodes(nodes, 0) == [0, 1, 2, 3], "the only node with replicas"
    assert needed_nodes(nodes, 1) == [0, 2, 3]
    two = plan(*ON_GPUS, "generator.inference_engine.num_engines=8")
    assert [node.role for node in two if node.index not in needed_nodes(two, 0)] == ["rollout", "rollout"]
    assert describe_plan(nodes)[3] == "node 3: reward-4, 1 GPU(s)"


@pytest.mark.parametrize(
    ("settings", "roles"),
    [
        ([], ["trainer", "rollout", "reward"]),
        (["environment.remote_reward.service.num_services=2"], ["trainer", "rollout", "reward", "reward"]),
        (["environment.eval_reward_function={format=1.0}"], ["trainer", "rollout", "reward"]),
        (
            ["environment.remote_reward.service.model=", "environment.remote_reward.reward_function={x=1.0}"],
            ["trainer", "rollout"],
        ),
    ],
)
def test_a_run_has_services_where_it_names_a_model(settings: list[str], roles: list[str]) -> None:
    assert [node.role for node in plan(*settings)] == roles


COPIES = "trainer.distillation.placement.num_replicas"
SCORED = [
    "trainer.distillation.enable=true",
    "trainer.distillation.model_path=t",
    f"{COPIES}=3",
    "trainer.distillation.placement.fsdp_size=2",
    "trainer.placement.colocate_policy_ref=false",
]


def test_scorers_share_nodes_by_their_ranks_and_each_model_has_nodes_of_its_own() -> None:
    nodes = make_plan(Config.from_toml([QUICKSTART], [*ON_GPUS, *SCORED]))
    assert [(node.role, node.gpus, node.gpu_offset, node.workers, node.scorer_ranks) for node in nodes[2:]] == [
        ("scorer", 4, 8, ["scorer-0", "scorer-1"], 2),
        ("scorer", 2, 12, ["scorer-2"], 2),
        ("scorer", 4, 14, ["scorer-3"], 4),
    ]
    assert needed_nodes(nodes, 0) == [0, 1, 4], "of three teachers on two nodes some are left, of one reference none"
    assert needed_nodes(nodes, 2) == [0, 4], "replicas of the pool are left"
    alone = make_plan(Config.from_toml([QUICKSTART], [*SCORED, f"{COPIES}=1"]))
    assert needed_nodes(alone, 0) == [node.index for node in alone]
    assert describe_plan(nodes)[2] == "node 2: scorer-0, scorer-1 (teacher), 2 rank(s) each, 4 GPU(s)"
    assert describe_plan(nodes)[4] == "node 4: scorer-3 (reference), 4 rank(s) each, 4 GPU(s)"
    on_cpus = make_plan(Config.from_toml([QUICKSTART], SCORED))
    assert [(node.role, node.workers, node.gpus) for node in on_cpus[2:]] == [
        ("scorer", [f"scorer-{number}"], 0) for number in range(4)
    ]


def test_a_copy_of_a_teacher_may_be_on_several_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    over = [
        "trainer.distillation.placement.fsdp_size=8",
        "trainer.distillation.placement.nodes_per_replica=2",
        f"{COPIES}=2",
    ]
    config = Config.from_toml([QUICKSTART], [*ON_GPUS, *SCORED, *over, "slurm.cpus_per_task=16"])
    nodes = make_plan(config)
    assert [(node.workers, node.follows, node.gpus, node.gpu_offset) for node in nodes[2:]] == [
        (["scorer-0"], None, 4, 8),
        ([], "scorer-0-part-1", 4, 12),
        (["scorer-1"], None, 4, 16),
        ([], "scorer-1-part-1", 4, 20),
        (["scorer-2"], None, 4, 24),
    ]
    assert needed_nodes(nodes, 1) == [0, 6], "a copy of the teacher is left whichever node is lost"
    alone = make_plan(Config.from_toml([QUICKSTART], [*ON_GPUS, *SCORED, *over, f"{COPIES}=1"]))
    assert needed_nodes(alone, 1) == [0, 2, 3, 4], "without one of its nodes there is no teacher"
    assert describe_plan(nodes)[3] == "node 3: scorer-0 (teacher), 4 of its 8 ranks, 4 GPU(s)"
    given = Environments(config, nodes[3], 1, "127.0.0.1", None, tmp_path, False).of("scorer-0-part-1")
    assert given["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert given["OMP_NUM_THREADS"] == "4"


CRITIC = ["trainer.critic.model.path=c", "trainer.critic_mini_batch_size=32"]


def test_a_critic_of_its_own_comes_after_the_policy() -> None:
    apart = ["trainer.placement.critic_num_nodes=2", "trainer.placement.critic_num_gpus_per_node=2"]
    nodes = make_plan(Config.from_toml([QUICKSTART], [*ON_GPUS, *CRITIC, *apart]))
    assert [(node.role, node.critic, node.ranks, node.first_rank, node.gpus) for node in nodes] == [
        ("trainer", False, 4, 0, 4),
        ("trainer", True, 2, 4, 2),
        ("trainer", True, 2, 6, 2),
        ("rollout", False, 0, 8, 4),
    ]
    assert needed_nodes(nodes, 0) == [0, 1, 2, 3], "the only node with replicas too"
    assert describe_plan(nodes)[2] == "node 2: critic, ranks 6 to 7, 2 GPU(s)"


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        ([], []),
        (["trainer.placement.critic_num_nodes=1"], [4]),
        (["trainer.placement.critic_num_gpus_per_node=1"], [1]),
    ],
)
def test_a_critic_without_a_place_is_beside_the_policy(settings: list[str], ranks: list[int]) -> None:
    nodes = make_plan(Config.from_toml([QUICKSTART], [*ON_GPUS, *CRITIC, *settings]))
    assert [node.ranks for node in nodes if node.critic] == ranks


def test_each_scorer_has_the_devices_of_its_ranks(tmp_path: Path) -> None:
    config = Config.from_toml([QUICKSTART], [*ON_GPUS, *SCORED, "slurm.cpus_per_task=16"])
    node = make_plan(config)[2]
    environments = Environments(config, node, 1, "127.0.0.1", None, tmp_path, False)
    given = [environments.of(name) for name in node.workers]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in given] == ["0,1", "2,3"]
    assert given[0]["OMP_NUM_THREADS"] == "4"


COLOCATED = [
    "trainer.placement.colocate_all=true",
    "trainer.placement.policy_num_nodes=2",
    "trainer.placement.policy_num_gpus_per_node=4",
    "generator.inference_engine.num_engines=4",
    "generator.inference_engine.backend=vllm",
    "generator.inference_engine.tensor_parallel_size=2",
    "slurm.gpus_per_node=4",
    "slurm.cpus_per_task=16",
]


def test_colocated_engines_are_on_the_nodes_and_devices_of_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = Config.from_toml([QUICKSTART], COLOCATED)
    nodes = make_plan(config)
    assert [(node.role, node.ranks, node.replicas, node.gpus, node.gpu_offset) for node in nodes] == [
        ("trainer", 4, (0, 1), 4, 0),
        ("trainer", 4, (2, 3), 4, 4),
    ]
    assert needed_nodes(nodes, 0) == [0, 1], "neither can be lost"
    assert describe_plan(nodes) == [
        "node 0: trainer, 4 rank(s) and the controller, in turns with rollout-0, rollout-1, 4 GPU(s)",
        "node 1: trainer, 4 rank(s), in turns with rollout-2, rollout-3, 4 GPU(s)",
    ]
    environments = Environments(config, nodes[1], 1, "127.0.0.1", None, tmp_path, False)
    given = {name: environments.of(name) for name in ("trainer-1", "rollout-2", "rollout-3")}
    assert [one["CUDA_VISIBLE_DEVICES"] for one in given.values()] == ["0,1,2,3", "0,1", "2,3"]
    assert {one["OMP_NUM_THREADS"] for one in given.values()} == {"4"}, "replicas have the cores of ranks that wait"
    assert "PYTORCH_ALLOC_CONF" not in given["rollout-2"], "with which vLLM's engines cannot sleep"


def test_lent_replicas_are_on_the_nodes_and_devices_of_the_trainer_after_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    settings = [*COLOCATED[1:], "trainer.placement.lend=true", "slurm.elastic.replicas=1"]
    config = Config.from_toml([QUICKSTART], settings)
    nodes = make_plan(config)
    assert [(node.role, node.ranks, node.replicas, node.lends) for node in nodes] == [
        ("trainer", 4, (5, 6), True),
        ("trainer", 4, (7, 8), True),
        ("rollout", 0, (0, 1), False),
        ("rollout", 0, (2, 3), False),
    ], "rollout-4 is the elastic one"
    assert needed_nodes(nodes, 0) == [0, 1]
    assert describe_plan(nodes)[1] == "node 1: trainer, 4 rank(s), lent to rollout-7, rollout-8, 4 GPU(s)"
    environments = Environments(config, nodes[1], 1, "127.0.0.1", None, tmp_path, False)
    given = {name: environments.of(name) for name in ("trainer-1", "rollout-7", "rollout-8")}
    assert [one["CUDA_VISIBLE_DEVICES"] for one in given.values()] == ["0,1,2,3", "0,1", "2,3"]
    assert [config.shares_gpus(replica) for replica in (0, 4, 5, 8)] == [False, False, True, True]
    shares = [server_options(Run(tmp_path), config, replica) for replica in (3, 5)]
    assert [(one.sleeps, one.memory_share) for one in shares] == [(False, 0.9), (True, 0.8)]


def test_a_colocated_run_asks_for_the_nodes_of_the_trainer_alone(tmp_path: Path) -> None:
    settings = [*COLOCATED, *REWARD]
    config = Config.from_toml([QUICKSTART, ROOT / "slurm" / "sites" / "devcluster.toml"], settings)
    (script,) = batch_scripts(
        Submission(tmp_path / "project" / ".slurm" / "mine", [Element("mine", config, [])])
    ).values()
    assert "#SBATCH --nodes=3" in script, "the reward model has one of its own"
    assert "--no-kill" not in script


def test_a_lost_replica_is_no_loss_but_a_lost_reward_model_is(tmp_path: Path) -> None:
    """Slurm keeps the job of a run that has replicas elsewhere; with one of them it has none left."""
    for engines, kept in ((1, False), (2, True)):
        settings = [*REWARD, f"generator.inference_engine.num_engines={engines}"]
        config = Config.from_toml([QUICKSTART, ROOT / "slurm" / "sites" / "devcluster.toml"], settings)
        folder = tmp_path / "project" / ".slurm" / "mine"
        (script,) = batch_scripts(Submission(folder, [Element("mine", config, [])])).values()
        assert ("--no-kill" in script) == kept
        assert f"#SBATCH --nodes={engines + 2}" in script


def test_each_service_sees_its_own_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    settings = [*REWARD, *ON_GPUS, "environment.remote_reward.service.num_services=3"]
    config = Config.from_toml([QUICKSTART], settings)
    environments = Environments(config, make_plan(config)[2], 1, "127.0.0.1", None, tmp_path, False)
    assert [environments.of(f"reward-{number}")["CUDA_VISIBLE_DEVICES"] for number in range(3)] == ["0", "1", "2"]


REMOTE = [
    'generator.inference_engine.remote_urls=["http://a:1", "http://b:1", "http://c:1"]',
    "generator.inference_engine.num_engines=3",
    "generator.inference_engine.backend=vllm",
    "generator.inference_engine.tensor_parallel_size=8",
    "trainer.placement.policy_num_nodes=2",
    "trainer.placement.policy_num_gpus_per_node=4",
    "slurm.gpus_per_node=4",
    "slurm.cpus_per_task=16",
]


def test_workers_of_engines_elsewhere_are_on_the_trainers_nodes_without_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = Config.from_toml([QUICKSTART], REMOTE)
    nodes = make_plan(config)
    assert [(node.role, node.ranks, node.replicas, node.gpus, node.elsewhere) for node in nodes] == [
        ("trainer", 4, (0, 2), 4, True),
        ("trainer", 4, (1,), 4, True),
    ]
    environments = Environments(config, nodes[0], 1, "127.0.0.1", None, tmp_path, False)
    assert environments.of("rollout-0")["CUDA_VISIBLE_DEVICES"] == ""
    assert environments.of("trainer-0")["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert environments.of("rollout-0")["OMP_NUM_THREADS"] == "2", "they do not take turns"
    served = Config.from_toml([QUICKSTART], [*REMOTE, *REWARD])
    reward = make_plan(served)[2]
    assert (
        Environments(served, reward, 1, "127.0.0.1", None, tmp_path, False).of("reward-0")["CUDA_VISIBLE_DEVICES"]
        == "0"
    )
    assert describe_plan(nodes)[0] == (
        "node 0: trainer, 4 rank(s) and the controller, and, for engines elsewhere, rollout-0, rollout-2, 4 GPU(s)"
    )


def test_a_replica_has_the_devices_of_all_its_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    sizes = [f"generator.inference_engine.{kind}_parallel_size=2" for kind in ("tensor", "data")]
    more = [
        "generator.inference_engine.num_engines=2",
        "generator.inference_engine.backend=vllm",
        "slurm.gpus_per_node=8",
    ]
    config = Config.from_toml([QUICKSTART], [*more, *sizes])
    node = make_plan(config)[1]
    assert (node.replicas, node.gpus) == ((0, 1), 8)
    environments = Environments(config, node, 1, "127.0.0.1", None, tmp_path, False)
    assert [environments.of(name)["CUDA_VISIBLE_DEVICES"] for name in node.workers] == ["0,1,2,3", "4,5,6,7"]


def test_a_replica_on_several_nodes_has_all_of_their_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    engine = "generator.inference_engine"
    sizes = [f"{engine}.tensor_parallel_size=4", f"{engine}.pipeline_parallel_size=3", f"{engine}.num_engines=2"]
    config = Config.from_toml([QUICKSTART], [*sizes, f"{engine}.backend=vllm", "slurm.gpus_per_node=4"])
    nodes = make_plan(config)
    assert [(node.role, node.workers, node.gpus) for node in nodes[1:]] == [
        ("rollout", [name], 4) for name in ("rollout-0", "part-0", "part-1", "rollout-1", "part-2", "part-3")
    ]
    assert needed_nodes(nodes, 0) == [0], "of two replicas one is left"
    alone = make_plan(Config.from_toml([QUICKSTART], [*sizes[:2], f"{engine}.backend=vllm", "slurm.gpus_per_node=4"]))
    assert needed_nodes(alone, 0) == [0, 1, 2, 3], "all of its nodes"
    for index in (1, 2):
        environments = Environments(config, nodes[index], 1, "127.0.0.1", None, tmp_path, False)
        assert environments.of(nodes[index].workers[0])["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    copies = [f"{engine}.tensor_parallel_size=2", f"{engine}.data_parallel_size=4", f"{engine}.backend=vllm"]
    nodes = make_plan(Config.from_toml([QUICKSTART], [*copies, "slurm.gpus_per_node=4"]))
    assert [node.workers for node in nodes[1:]] == [["rollout-0"], ["part-0"]]


def test_sandboxes_have_nodes_of_their_own_and_places_beside_replicas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    asked = ["slurm.sandboxes.nodes=2", "slurm.sandboxes.per_rollout_node=8", "slurm.sandboxes.partition=cpu"]
    settings = [*ON_GPUS, *asked, "generator.inference_engine.num_engines=8", "slurm.cpus_per_task=16"]
    config = Config.from_toml([QUICKSTART], settings)
    nodes = make_plan(config)
    assert [node.workers[-1:] for node in nodes] == [[], ["sandbox-2"], ["sandbox-3"]]
    assert config.sandbox_servers == 4
    environments = Environments(config, nodes[1], 1, "127.0.0.1", None, tmp_path, False)
    plain = Environments(config, make_plan(Config.from_toml([QUICKSTART], ON_GPUS))[1], 1, "a", None, tmp_path, False)
    for name in ("rollout-0", "rollout-3"):
        found, expected = environments.of(name), plain.of(name)
        assert found["CUDA_VISIBLE_DEVICES"] == expected["CUDA_VISIBLE_DEVICES"] == name[-1]
        assert found["OMP_NUM_THREADS"] == expected["OMP_NUM_THREADS"], "the server takes no share of the cores"
    assert environments.of("sandbox-2")["CUDA_VISIBLE_DEVICES"] == ""
    (pool,) = elastic_pools(config)
    assert [(node.role, node.workers, node.gpus) for node in pool.nodes] == [
        ("sandbox", [f"sandbox-{server}"], 0) for server in range(2)
    ]
    scripts = batch_scripts(Submission(tmp_path / ".slurm" / "mine", [Element("mine", config, [])]))
    lines = scripts["batch script of the elastic pool of sandboxes"].splitlines()
    options = [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH --")]
    assert {"array=0-1%2", "partition=cpu", "nodes=1", "requeue"} <= set(options)
    assert not [option for option in options if "gpu" in option or option.startswith(("mem", "exclusive"))]
    colocated = ["trainer.placement.colocate_all=true", "slurm.sandboxes.per_rollout_node=8"]
    config = Config.from_toml([QUICKSTART], [*ON_GPUS, *colocated])
    assert [node.workers[-1] for node in make_plan(config)] == ["sandbox-0"]
    assert config.sandbox_servers == 1


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("slurm.sandboxes.nodes=1", "slurm.sandboxes.nodes: this machine has no partitions; with --local, set it to 0"),
        ("slurm.sandboxes.per_rollout_node=1", "slurm.sandboxes: sandboxes are for ordinary users"),
    ],
)
def test_what_sandboxes_a_local_run_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, said: str
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: int("nodes" in setting))
    config = Config.from_toml([QUICKSTART], [setting, f"slurm.root={tmp_path}"])
    with pytest.raises(SubmitError, match=said):
        launch(Submission(tmp_path / ".slurm" / "mine", [Element("mine", config, [])]), local=True)
