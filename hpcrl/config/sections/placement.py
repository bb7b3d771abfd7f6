"""Section `trainer.placement`: nodes and ranks of the trainer's models."""

from __future__ import annotations

from dataclasses import dataclass

from hpcrl.config.conditions import CRITIC, RL
from hpcrl.config.setting import COUNT, NOT_NEGATIVE, setting
from hpcrl.config.sizes import POLICY_NODES, SIZE, one_size

_BESIDE_POLICY = "unset: beside the policy; SkyRL gives a critic GPUs of its own as soon as engines have theirs"
_AS_POLICY = "unset: as the policy; SkyRL's 1 is wrong as soon as the policy has more"


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    policy_num_nodes: int | str = setting(1, range=COUNT, check=SIZE)
    """Nodes of the trainer; or a range, "1-4", of which each attempt takes as many as Slurm gives it and can share the batches."""

    policy_num_gpus_per_node: int = setting(1, range=COUNT)
    """Trainer ranks per node, on CPU too."""

    critic_num_nodes: int | None = setting(None, range=COUNT, used_by=CRITIC, why=_BESIDE_POLICY)
    """Nodes of a critic that has its own, after the policy's; unset: as the policy. With neither this nor critic_num_gpus_per_node the critic is
    beside the policy, on the same ranks."""

    critic_num_gpus_per_node: int | None = setting(None, range=COUNT, used_by=CRITIC, why=_BESIDE_POLICY)
    """Ranks of such a critic per node; unset: as the policy."""

    ref_num_nodes: int | None = setting(None, range=NOT_NEGATIVE, why=_AS_POLICY)
    """Nodes of the reference model; unset: as the policy."""

    ref_num_gpus_per_node: int | None = setting(None, range=COUNT, why=_AS_POLICY)
    """Reference ranks per node; unset: as the policy."""

    colocate_policy_ref: bool = True
    """The reference model shares the policy's GPUs; otherwise it has nodes of its own, one copy on each of ref_num_nodes, shared by its ranks."""

    colocate_all: bool = setting(False, why="trainer and engines have nodes of their own")
    """Trainer and engines share GPUs and take turns; otherwise each has nodes of its own. With trainer.fully_async.max_staleness_steps
    above 0 a turn of the engines ends when the batch is there, and unfinished samples go on in the next one."""

    lend: bool = setting(False, used_by=RL)
    """While the trainer waits for samples, further replicas generate on its GPUs, as many as these have room for. They do so only where the
    expected wait is longer than the measured seconds of sleeping and waking, and only groups that no other replica has room for."""

    @property
    def policy_nodes(self) -> int:
        """Nodes of the policy in one layout. Raises ConfigError where they are a range."""
        return one_size(POLICY_NODES, self.policy_num_nodes)

    @property
    def policy_ranks(self) -> int:
        """Ranks of the policy, and of all that is beside it: the first ones of the trainer."""
        return self.policy_nodes * self.policy_num_gpus_per_node

    @property
    def critic_nodes(self) -> tuple[int, int]:
        """Nodes of the critic, and its ranks on each; what is not set: the policy's."""
        nodes, ranks = self.critic_num_nodes, self.critic_num_gpus_per_node
        return nodes or self.policy_nodes, ranks or self.policy_num_gpus_per_node

    @property
    def critic_ranks(self) -> int:
        """Ranks of the critic; where they are not set: the policy's."""
        nodes, ranks = self.critic_nodes
        return nodes * ranks

    @property
    def ref_ranks(self) -> int:
        """Ranks of the reference model; where they are not set: the policy's."""
        nodes, ranks = self.ref_num_nodes, self.ref_num_gpus_per_node
        return (nodes or self.policy_nodes) * (ranks or self.policy_num_gpus_per_node)
