"""What `hpcrl plan` says of ranks that share the experts of each layer."""

from __future__ import annotations

from pathlib import Path

from hpcrl.launch.submit.models import folder_of
from hpcrl.planning.estimate import estimate
from hpcrl.planning.rank_groups import describe_ranks
from hpcrl.planning.shapes import model_shapes
from tests.planning.test_memory import configuration
from tests.trainer.backends.test_lora_experts import write_mixture

SIZE, ON_NODE = "fsdp_config.expert_parallel_size", "trainer.placement.policy_num_gpus_per_node"


def test_ranks_that_share_experts(tmp_path: Path) -> None:
    def lines(size: int) -> list[str]:
        nodes = {ON_NODE: 4, "trainer.placement.policy_num_nodes": 2}
        return describe_ranks(configuration(tmp_path, **nodes, **{f"trainer.policy.{SIZE}": size}).trainer)

    assert "  ranks that share experts    2 x 4: 0-3 (node 0), 4-7 (node 1)" in lines(4)
    assert not any("warning" in line for line in lines(4))
    (warning,) = [line for line in lines(8) if "warning" in line]
    assert warning == (
        "  warning: ranks that share experts cross nodes, such as 0-7 (nodes 0 1), and wait for the network in every layer; make "
        "trainer.policy.fsdp_config.expert_parallel_size a divisor of the 4 ranks of a node"
    )
    assert not any("experts" in line for line in lines(1))
    critic = {"trainer.critic.model.path": "c", f"trainer.critic.{SIZE}": 2}
    own = configuration(tmp_path, **critic, **{"trainer.placement.critic_num_gpus_per_node": 4})
    assert "  ranks that share experts    2 x 2: 1 2 (node 1), 3 4 (node 1)" in describe_ranks(own.trainer)


def test_ranks_gather_no_experts_of_others(tmp_path: Path) -> None:
    path, four = write_mixture(tmp_path), {ON_NODE: 4}
    gathered, states = [], []
    for size in (1, 2, 4):
        config = configuration(path, **four, **{f"trainer.{role}.{SIZE}": size for role in ("policy", "ref")})
        needs = estimate(config, model_shapes(config.trainer, folder_of)).needs
        gathered.append(needs["policy"].gathered)
        states.append((needs["policy"].weights, needs["policy"].optimizer, needs["ref"].weights))
    assert states[0] == states[1] == states[2], "4 experts of 4 ranks are shared equally by rows too"
    layer = 4 * 24 * 32 * 3  # of experts
    # two layers in bf16, and of one a gradient in bf16 and in fp32
    assert gathered[0] - gathered[1] == layer // 2 * (2 * 2 + 2 + 4)
    assert gathered[0] - gathered[2] == 3 * layer // 4 * (2 * 2 + 2 + 4)
