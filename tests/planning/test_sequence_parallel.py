"""What `hpcrl plan` says of ranks that share the tokens of each sample."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from hpcrl.launch.submit.models import folder_of
from hpcrl.planning.estimate import estimate
from hpcrl.planning.memory import activations, exchanged_heads
from hpcrl.planning.rank_groups import describe_ranks
from hpcrl.planning.served import served
from hpcrl.planning.shapes import model_shapes
from tests.planning.test_memory import configuration, width
from tests.trainer.ranks import Ranks

SIZE, ON_NODE = "trainer.policy.sequence_parallel_size", "trainer.placement.policy_num_gpus_per_node"
TOKENS = (64, 128)


def test_ranks_that_share_samples(model_path: Path) -> None:
    def lines(size: int) -> list[str]:
        nodes = {ON_NODE: 4, "trainer.placement.policy_num_nodes": 2}
        return describe_ranks(configuration(model_path, **nodes, **{SIZE: size}).trainer)

    assert "  ranks with the same samples  2 x 4: 0-3 (node 0), 4-7 (node 1)" in lines(4)
    assert not any("warning" in line for line in lines(4))
    (warning,) = [line for line in lines(8) if "warning" in line]
    assert warning == (
        "  warning: ranks with the same samples cross nodes, such as 0-7 (nodes 0 1), and wait for the network in every layer; make "
        "trainer.policy.sequence_parallel_size a divisor of the 4 ranks of a node"
    )
    assert not any("samples" in line for line in lines(1))


def test_a_critic_on_ranks_of_its_own(model_path: Path) -> None:
    settings = {"trainer.critic.model.path": "c", "trainer.critic.sequence_parallel_size": 2}
    config = configuration(model_path, **settings, **{"trainer.placement.critic_num_gpus_per_node": 4})
    assert "  ranks with the same samples  2 x 2: 1 2 (node 1), 3 4 (node 1)" in describe_ranks(config.trainer)


def test_a_rank_needs_memory_for_its_own_tokens(model_path: Path) -> None:
    settings = {ON_NODE: 4, "trainer.logprobs_chunk_size": 10**6, "trainer.gradient_checkpointing": False}
    one, four = (configuration(model_path, **settings, **{SIZE: size}) for size in (1, 4))
    whole, part = (estimate(config, model_shapes(config.trainer, folder_of)).needs for config in (one, four))
    assert part["policy"].weights == whole["policy"].weights
    assert part["ref"].logprobs * 4 == whole["ref"].logprobs
    # two heads of keys and values for four ranks, and what attention gives twice
    assert 1 / 4 < part["policy"].activations / whole["policy"].activations < 1 / 3
    teacher = {"trainer.distillation.enable": True, "trainer.distillation.model_path": "t"}
    placement = "trainer.distillation.placement"
    tokens = [
        next(each.tokens for each in served(configuration(model_path, **teacher, **sizes)))
        for sizes in ({}, {f"{placement}.fsdp_size": 2, f"{placement}.sequence_parallel_size": 2})
    ]
    assert tokens == [1536, 768]


def test_what_autograd_keeps_on_each_rank(tmp_path: Path, two: Ranks) -> None:
    sizes = width(vocabulary=64, kv_heads=1)
    config = AutoConfig.for_model(
        "qwen2",
        num_hidden_layers=sizes.layers,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.ffn,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        vocab_size=sizes.vocabulary,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    options = {"model": str(tmp_path / "model"), "out": str(tmp_path / "kept"), "sizes": [1, 2], "tokens": TOKENS}
    two.play([("sequence.scenarios:kept", options)])
    for rank in range(2):
        kept = json.loads(Path(f"{options['out']}.{rank}").read_text())
        # what does not grow with the tokens are parameters
        whole, part = ((more - less) / (TOKENS[1] - TOKENS[0]) for less, more in (kept["1"], kept["2"]))
        own = {"size": 4, "recompute": False}
        counted = activations(sizes, 1, fused=False, layers=sizes.layers, **own)
        assert whole == pytest.approx(counted, rel=0.15)
        assert part == pytest.approx((counted + exchanged_heads(sizes, 1, 2, **own)) / 2, rel=0.15)
        assert part < 0.65 * whole
