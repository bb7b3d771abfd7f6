"""`hpcrl plan`: ranks, groups, parameters and memory, for both engines, with and without a model on disk."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tomli

from hpcrl.cli.main import main
from hpcrl.cli.plan import _layers, checked_plan, plan_lines
from hpcrl.config import Config
from hpcrl.config.fields import leaves
from hpcrl.config.load import nested
from hpcrl.config.validate import build
from hpcrl.errors import DataError
from hpcrl.planning.devices import memory_of_rank
from hpcrl.planning.estimate import estimate
from hpcrl.planning.prefixes import describe_prefixes
from hpcrl.planning.rank_groups import describe_ranks
from hpcrl.planning.shapes import model_shapes
from hpcrl.units import readable_size
from tests import hub as stand_in
from tests.paths import CONFIGS, ROOT

QUICKSTART, MODEL = CONFIGS / "quickstart.toml", CONFIGS / "quickstart" / "model"
POLICY = "trainer.policy.megatron_config"
SIXTEEN = {"trainer.placement.policy_num_nodes": 2, "trainer.placement.policy_num_gpus_per_node": 8}
NO_KL = {"trainer.algorithm.use_kl_loss": False}


def config(settings: dict[str, Any]) -> Config:
    base = {"data.train_data": ["t"], "data.val_data": ["v"], "trainer.policy.model.path": str(MODEL)}
    return build(Config, nested({**base, **settings}))


def megatron(settings: dict[str, Any]) -> Config:
    return config({"trainer.strategy": "megatron", **NO_KL, **settings})


def sizes(tensor: int, pipeline: int = 1, **others: Any) -> dict[str, Any]:
    return {
        f"{POLICY}.tensor_model_parallel_size": tensor,
        f"{POLICY}.pipeline_model_parallel_size": pipeline,
        **{f"{POLICY}.{name}": value for name, value in others.items()},
    }


def planned(config: Config) -> list[str]:
    return list(plan_lines(checked_plan(config)))


def test_what_shared_prefixes_save() -> None:
    settings = {
        "trainer.max_prompt_length": 512, "generator.sampling_params.max_generate_length": 128, "generator.n_samples_per_prompt": 8,
        "trainer.max_tokens_per_micro_batch": 2048, "trainer.gradient_checkpointing": False,
    }  # fmt: skip
    shared = {**settings, "trainer.shared_prefixes": True}
    assert list(describe_prefixes(config(settings))) == []
    (line, _) = describe_prefixes(config(shared))
    assert (
        "a group of 8 samples, a prompt of 512 tokens and 128 more in each, 1,536 of 5,120 tokens are computed, 3.33 times fewer, in 1 m"
        in line
    )
    (cut, _) = describe_prefixes(config({**shared, "trainer.max_tokens_per_micro_batch": 1100}))
    assert "2,048 of 5,120 tokens are computed, 2.50 times fewer, in 2 micro-batch(es)" in cut
    models = model_shapes(config(shared).trainer, lambda _: MODEL)
    plain, more = (estimate(config(each), models).needs["policy"].activations for each in (settings, shared))
    width = models["policy"].width
    copied = 2048 * (5120 - 1536) // 1536
    assert more - plain == copied * width.layers * 2 * width.kv_heads * width.head * 2, (
        "copies of keys and values in bf16"
    )


def test_ranks_of_fsdp2() -> None:
    assert describe_ranks(config({**SIXTEEN, "trainer.policy.fsdp_config.fsdp_size": 8}).trainer) == [
        "16 trainer rank(s), 8 on each of 2 node(s), fsdp2",
        "  one copy of the parameters  2 x 8: 0-7 (node 0), 8-15 (node 1)",
        "  ranks with the same part    8 x 2: 0 8 (nodes 0 1), 1 9 (nodes 0 1), 2 10 (nodes 0 1), …, 7 15 (nodes 0 1)",
    ]
    assert describe_ranks(config({}).trainer)[1:] == [
        "  one copy of the parameters  each rank alone",
        "  ranks with the same part    each rank alone",
    ]


CRITIC = {
    "trainer.critic.model.path": str(MODEL),
    "trainer.critic_mini_batch_size": 32,
    "trainer.placement.critic_num_nodes": 2,
    "trainer.placement.critic_num_gpus_per_node": 2,
}


def test_ranks_of_a_critic_of_its_own() -> None:
    assert describe_ranks(config({**SIXTEEN, **CRITIC, "trainer.critic.fsdp_config.fsdp_size": 2}).trainer)[-3:] == [
        "4 rank(s) of the critic, 2 on each of 2 node(s)",
        "  one copy of the parameters  2 x 2: 16 17 (node 2), 18 19 (node 3)",
        "  ranks with the same part    2 x 2: 16 18 (nodes 2 3), 17 19 (nodes 2 3)",
    ]


def test_memory_of_policy_and_critic_apart(capsys: pytest.CaptureFixture[str]) -> None:
    told = [f"{path}={value}" for path, value in CRITIC.items()]
    assert main(["plan", str(QUICKSTART), "slurm.mem_gb=2", *told]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "node 1: critic, ranks 1 to 2" in lines
    (apart,) = (
        at for at, line in enumerate(lines) if line.startswith("memory of each rank of the critic (ranks 1 to 4)")
    )
    assert [line.split() for line in lines if line.split()[:1] == ["policy"]] == [["policy", "reference"]]
    assert lines[apart + 1].split() == ["critic"]
    assert any("shared by 2 rank(s)" in line for line in lines[apart:])
    weights = next(line.split() for line in lines[apart:] if "weights" in line)
    assert weights == ["weights", f"{83840 / 4 * 4 / 2**20:.2f}"], "a quarter of it, in float32"


def test_a_node_holds_a_copy_where_it_fits() -> None:
    """Weights, gradients and moments are 16 bytes of each of 84,928 parameters: 166 KiB on each of eight ranks, 83 on each of 16."""
    assert any("or a copy on each node" in line for line in describe_ranks(config(SIXTEEN).trainer))
    held = {}
    for memory in (1.0, 4e-4):
        lines = planned(config({**SIXTEEN, "slurm.gpus_per_node": 8, "slurm.gpu_memory_gb": memory}))
        held[memory] = next(line for line in lines if line.startswith("  on a rank at most"))
    most, least = (int(line.split()[-1].replace(",", "")) for line in held.values())
    assert most == pytest.approx(2 * least, rel=0.1)


def test_ranks_of_megatron() -> None:
    layout = sizes(2, 2, expert_model_parallel_size=4, expert_tensor_parallel_size=1)
    assert describe_ranks(megatron({**SIXTEEN, **layout}).trainer) == [
        "16 trainer rank(s), 8 on each of 2 node(s), megatron: 2 (tensor) x 1 (context) x 4 (data) x 2 (pipeline) = 16",
        "  experts: 1 (tensor) x 4 (expert) x 2 (copies) x 2 (pipeline) = 16",
        "  TP (tensor parallel)              8 x 2: 0 1 (node 0), 2 3 (node 0), 4 5 (node 0), …, 14 15 (node 1)",
        "  CP (context parallel)             each rank alone",
        "  DP (data parallel)                4 x 4: 0 2 4 6 (node 0), 1 3 5 7 (node 0), 8 10 12 14 (node 1), 9 11 13 15 (node 1)",
        "  PP (pipeline)                     8 x 2: 0 8 (nodes 0 1), 1 9 (nodes 0 1), 2 10 (nodes 0 1), …, 7 15 (nodes 0 1)",
        "  ETP (tensor parallel in experts)  each rank alone",
        "  EP (expert parallel)              4 x 4: 0-3 (node 0), 4-7 (node 0), 8-11 (node 1), 12-15 (node 1)",
        "  EDP (copies of an expert)         8 x 2: 0 4 (node 0), 1 5 (node 0), 2 6 (node 0), …, 11 15 (node 1)",
    ]


def test_a_slow_layout_is_a_warning() -> None:
    *_, warning = describe_ranks(megatron({**SIXTEEN, **sizes(16)}).trainer)
    assert warning.startswith(
        "  warning: TP groups cross nodes, such as 0-15 (nodes 0 1), and wait for the network in every layer"
    )
    assert warning.endswith(f"make {POLICY}.tensor_model_parallel_size a divisor of the 8 ranks of a node")
    assert not any("warning" in line for line in describe_ranks(megatron({**SIXTEEN, **sizes(8)}).trainer))


def test_layers_of_megatron() -> None:
    """By what is installed here, and whether the run has GPUs."""
    two = {"trainer.placement.policy_num_gpus_per_node": 2}
    shared = {**two, **sizes(1, context_parallel_size=2)}
    lines = planned(megatron(shared))
    at = lines.index("layers: Megatron-core's, with torch's attention (TransformerEngine's need a GPU)")
    assert lines[at + 1].startswith("  hint: without TransformerEngine each of the 2 context-parallel ranks gathers")
    assert not any("hint" in line for line in planned(megatron(two)))
    experts = {**two, "slurm.gpus_per_node": 2, **sizes(1, expert_model_parallel_size=2)}
    hints = [line for line in _layers(megatron(experts)) if "hint" in line]
    assert bool(hints) != bool(find_spec("transformer_engine"))
    assert all(line.endswith("one after the other; it is the extra transformer-engine") for line in hints)
    on_gpus = [line for line in planned(megatron({**shared, "slurm.gpus_per_node": 2})) if "layers: " in line]
    assert on_gpus == [
        "layers: TransformerEngine's"
        if find_spec("transformer_engine")
        else "layers: Megatron-core's, with torch's attention (transformer_engine is not installed here)"
    ]
    assert not any(line.startswith("layers") for line in planned(config(two)))


def test_memory_of_a_rank() -> None:
    on_cpu = config({"slurm.mem_gb": 12, "trainer.placement.policy_num_gpus_per_node": 4})
    assert memory_of_rank(on_cpu) == (3 * 2**30, "slurm.mem_gb, shared by 4 rank(s)")
    unknown = (None, "a run on CPU; slurm.mem_gb does not say how much memory a node has")
    assert memory_of_rank(config({})) == memory_of_rank(config({"slurm.mem_gb": 0})) == unknown
    given = config({"slurm.gpus_per_node": 4, "slurm.gpu_memory_gb": 79.5})
    assert memory_of_rank(given) == (79.5 * 2**30, "slurm.gpu_memory_gb")


def test_memory_of_this_machines_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = tmp_path / "nvidia-smi"
    shown.write_text(
        '#!/bin/sh\necho "0, GPU-1, NVIDIA H100, 570.1, 81559 MiB, Default"\necho "1, GPU-2, NVIDIA H100, 570.1, 71559 MiB, Default"\n'
    )
    shown.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    size, source = memory_of_rank(config({"slurm.gpus_per_node": 2}))
    assert size == 71559 * 2**20
    assert source.startswith("NVIDIA H100 of this machine")
    shown.write_text("#!/bin/sh\nexit 1\n")
    assert memory_of_rank(config({"slurm.gpus_per_node": 2}))[0] is None


def test_trainer_and_engine_in_turns() -> None:
    """Each turn has to fit: what the trainer needs beside an engine that sleeps, and the engine's share beside what the trainer keeps."""
    both = {
        "trainer.placement.colocate_all": True,
        "slurm.gpus_per_node": 1,
        "slurm.gpu_memory_gb": 8,
    }

    def told(**settings: Any) -> list[str]:
        lines = planned(config({**both, **{name.replace("__", "."): v for name, v in settings.items()}}))
        assert re.fullmatch(
            r"node 0: trainer, \d rank\(s\) and the controller, in turns with rollout-0, \d GPU\(s\)", lines[0]
        )
        return [line for line in lines if "turn" in line or "of the device" in line]

    _, trains, room, generates, _, host = told()
    assert trains.startswith("  in the trainer's turn ")
    assert trains.endswith(" 2,048.00 of the engine")
    assert room.endswith(" left")
    assert generates == "  in the engine's turn 1,024.00 of the trainer and 6,553.60 of the engine"
    moments = told(trainer__policy__optimizer_config__offload_after_step=False)
    assert moments[3] != generates, "its moments stay"
    assert float(moments[-1].split()[-4]) < float(host.split()[-4])
    greedy = told(generator__inference_engine__gpu_memory_utilization=0.95)
    assert "warning: 614.40 too few" in greedy[4]
    assert "unknown" in told(slurm__gpu_memory_gb=None)[1]
    eight = {"slurm__gpus_per_node": 8, "trainer__placement__policy_num_gpus_per_node": 8}
    wide = told(generator__inference_engine__tensor_parallel_size=8, **eight)
    assert wide[1].endswith(" 3,584.00 of the engine"), (
        "communicators of tensor parallel ranks, and vLLM's own all-reduce"
    )
    assert wide[3].startswith("  in the engine's turn 1,536.00 of the trainer"), "the ranks that share a copy"
    eager = told(generator__inference_engine__enforce_eager=True)
    assert eager[1].endswith(" 1,024.00 of the engine")
    lines = planned(megatron(both))
    rows = {line[2:20].strip(): line[20:].split() for line in lines if line.startswith("  ")}
    leaves = sum(float(each) for row in ("weights", "optimizer") for each in rows[row] if each != "-")
    (host,) = (line for line in lines if "host memory for what leaves" in line)
    assert float(host.split()[-4]) == pytest.approx(leaves, abs=0.02), "gradient buffers are dropped"


def test_the_plan_of_the_quickstart(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(QUICKSTART), "slurm.mem_gb=2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "node 0: trainer, 1 rank(s) and the controller"
    assert f"policy: Qwen2ForCausalLM of {MODEL}, 84,928 parameters" in lines
    assert "  on a rank at most 84,928" in lines
    rows = {line[2:20].strip(): line[20:].split() for line in lines if line.startswith("  ")}
    assert rows["weights"] == [f"{84928 * 4 / 2**20:.2f}"] * 2  # float32, the reference too
    assert rows["gradients"] == ["0.32", "-"]
    assert rows["optimizer"] == ["0.65", "-"]
    (device,) = (line for line in lines if "memory of the device" in line)
    assert device.startswith("  memory of the device: 2,048.00 (slurm.mem_gb, shared by 1 rank(s)), 2,0")


def json_of(path: Path, *settings: str) -> tuple[dict[str, Any], list[str]]:
    """Return a plan as JSON and as lines."""
    plan = checked_plan(Config.from_toml([path], list(settings)))
    return json.loads(json.dumps(plan.to_json())), list(plan_lines(plan))


@pytest.mark.parametrize("command", [["plan"], ["submit", "--dry-run", "--seeds", "1,2"]], ids=["plan", "a sweep"])
def test_a_request_for_nodes_without_a_layout_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    """The jobs would be refused by nobody else before `hpcrl submit` makes them."""
    settings = [str(QUICKSTART), f"slurm.root={tmp_path}", "trainer.placement.policy_num_nodes=1-4"]
    requests = ["slurm.requests.small={nodes=2}", "slurm.requests.large={nodes=9}"]
    assert main([*command, *settings, *requests]) == DataError.exit_code
    assert (
        "slurm.requests.large.nodes: expected nodes for which the run has a layout (2, 3, 5)" in capsys.readouterr().err
    )
    assert main([*command, *settings, requests[0]]) == 0
    printed = capsys.readouterr().out
    assert "sbatch --nodes" not in printed
    assert "request small: partition of the cluster, 2 nodes, 60 minutes" in printed


def test_json_has_the_numbers_of_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    on_four = ["trainer.placement.policy_num_gpus_per_node=4", "slurm.mem_gb=8", 'data.train_data=["nowhere.jsonl"]']
    assert main(["plan", str(QUICKSTART), *on_four, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert main(["plan", str(QUICKSTART), *on_four]) == 0
    lines = capsys.readouterr().out.splitlines()
    page = (ROOT / "docs" / "planning.md").read_text().partition("## For programs")[2].partition("## ")[0]
    keys = [key for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for key in re.findall(r"`(\w+)`", row)]
    assert list(value) == keys
    nodes = [line.split(":")[0] for line in lines if line.startswith("node ")]
    assert nodes == [f"node {node['node']}" for node in value["nodes"]]
    assert value["nodes"][1]["workers"] == ["rollout-0"]
    assert value["groups"]["policy"]["one copy of the parameters"] == [[0, 1, 2, 3]]
    assert any(line.startswith("  one copy of the parameters  1 x 4: 0-3") for line in lines)
    (policy, memory) = value["models"]["policy"], value["memory"][0]
    assert f"policy: {policy['class']} of {policy['model']}, {policy['parameters']:,} parameters" in lines
    assert f"  on a rank at most {policy['on_a_rank'][0]:,}" in lines
    rows = {line[2:20].strip(): line[20:].split() for line in lines if line.startswith("  ")}
    names = {"weights": "weights", "gradients": "gradients", "optimizer": "optimizer", "gathered": "gathered by FSDP"}
    for key, row in {**names, "activations": "activations", "logprobs": "log-probabilities"}.items():
        both = [memory["bytes"][role][key] / 2**20 for role in ("policy", "ref")]
        assert rows[row] == [f"{size:,.2f}" if size else "-" for size in both]
    assert any(line.startswith(f"  in all {memory['total'] / 2**20:,.2f}: ") for line in lines)
    assert any(f"device: {memory['device'] / 2**20:,.2f} ({memory['device_from']})" in line for line in lines)
    assert any(f"a checkpoint has about {readable_size(value['disk']['checkpoint'])};" in line for line in lines)
    refused = [f"hpcrl submit would refuse this: {each['path']}: {each['message']}" for each in value["problems"]]
    assert refused
    assert refused == [line for line in lines if "would refuse" in line]


def test_json_of_engines_teachers_and_what_is_not_known() -> None:
    on_gpus = ["slurm.gpus_per_node=1", "slurm.gpu_memory_gb=8", "generator.inference_engine.backend=vllm"]
    colocated = [*on_gpus, "trainer.placement.colocate_all=true", "generator.inference_engine.num_engines=1"]
    value, lines = json_of(QUICKSTART, *colocated)
    turn = value["memory"][0]["turns"][1]
    assert turn["holder"] == "engine"
    assert any(
        f"turn {turn['trainer'] / 2**20:,.2f} of the trainer and {turn['engine'] / 2**20:,.2f}" in line
        for line in lines
    )
    assert any(f"keys and values of {value['replica']['tokens']:,} tokens" in line for line in lines)
    value, lines = json_of(CONFIGS / "distillation_tiny.toml")
    (teacher,) = value["served"]
    assert any(
        line.startswith(f"{teacher['name']}: ") and f" {teacher['parameters']:,} parameters" in line for line in lines
    )
    assert f"  in all {teacher['memory']['total'] / 2**20:,.2f}" in lines
    value, lines = json_of(QUICKSTART, "trainer.policy.model.path=some/model")
    assert (value["models"], value["memory"], value["disk"]) == ({}, [], None)
    assert set(value["unknown"]) <= set(lines)
    assert len(value["unknown"]) == 2
    value, lines = json_of(CONFIGS / "diffusion_tiny.toml")
    assert value["memory"][0]["total"] == sum(value["memory"][0]["bytes"]["policy"].values())


def test_the_plan_of_a_pipeline() -> None:
    more = {"trainer.placement.policy_num_gpus_per_node": 4, "slurm.gpus_per_node": 4, "slurm.gpu_memory_gb": 0.02}
    lines = planned(megatron({**more, **sizes(2, 2), "trainer.micro_train_batch_size_per_gpu": 64}))
    entries = json.loads((MODEL / "config.json").read_text())
    rows, layers = entries["vocab_size"], entries["num_hidden_layers"]
    assert f"  vocabulary {rows} + {rows % 2} padding; samples are padded to a multiple of 2 tokens" in lines
    stages = [line for line in lines if line.startswith("  on a rank of stage")]
    assert [line.partition(":")[0] for line in stages] == [
        f"  on a rank of stage 0 (ranks 0 to 1, {layers // 2} layers)",
        f"  on a rank of stage 1 (ranks 2 to 3, {layers // 2} layers)",
    ]
    (memory,) = (line for line in lines if line.startswith("memory of a rank "))
    assert memory.startswith("memory of a rank (ranks 0 to 1 need most), in MiB")  # activations of two micro-batches
    assert any("too few" in line for line in lines)


def test_a_plan_needs_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "trainer.seed=1"]) == 2
    assert "expected hpcrl plan FILE.toml" in capsys.readouterr().err


def test_a_layout_that_cannot_be_has_no_plan() -> None:
    with pytest.raises(DataError, match="does not divide the model's"):
        planned(megatron({**SIXTEEN, **sizes(16)}))


def test_a_layer_split_that_is_not_known_is_said() -> None:
    split = {"pipeline_model_parallel_layout": "Et|tL"}
    more = {"trainer.placement.policy_num_gpus_per_node": 2}
    lines = planned(megatron({**more, **sizes(1, 2, transformer_config_kwargs=split)}))
    assert any(
        line.startswith("memory: trainer.policy.megatron_config.transformer_config_kwargs splits the layers")
        for line in lines
    )


def test_a_model_that_is_elsewhere_costs_no_import() -> None:
    """The rest of the plan is printed, and torch is not even loaded."""
    code = (
        "import sys; from hpcrl.cli.main import main; from pathlib import Path\n"
        f"main(['plan', {str(QUICKSTART)!r}, 'trainer.policy.model.path=some/model'])\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "node 0: trainer" in done.stdout
    assert (
        "policy: some/model is not on this machine, and the hub does not answer or has no such model, so parameters"
        in done.stdout
    )


EXPERIMENTS = sorted(CONFIGS.rglob("*.toml"))
SITE = ROOT / "slurm" / "sites" / "example.toml"
SMOLLM2 = CONFIGS / "recipes" / "smollm2"
_QWEN = {"vocab_size": 151936, "max_position_embeddings": 32768}
_QWEN2 = {**_QWEN, "model_type": "qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True}
_QWEN3 = {**_QWEN, "num_attention_heads": 32, "head_dim": 128, "tie_word_embeddings": False}
_SMOLLM2 = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
HUB: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-1.5B-Instruct": {
        **_QWEN2,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
    },
    "Qwen/Qwen2.5-3B-Instruct": {
        **_QWEN2,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
    },
    "Qwen/Qwen3-8B-Base": {
        **_QWEN3,
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
    },
    "Qwen/Qwen3-30B-A3B-Base": {
        **_QWEN3,
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
}
"""What the config.json of each model of a recipe says about its shape."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the hub that holds the config.json of the recipes' models."""
    for name, entries in HUB.items():
        model = tmp_path / f"models--{name.replace('/', '--')}"
        (model / "snapshots" / "0").mkdir(parents=True)
        (model / "snapshots" / "0" / "config.json").write_text(json.dumps(entries))
        (model / "refs").mkdir()
        (model / "refs" / "main").write_text("0")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: str(path.relative_to(CONFIGS).with_suffix("")))
def test_every_experiment_is_planned(path: Path, tmp_path: Path) -> None:
    values = list[str]()
    if path.parent == SMOLLM2:  # a script of the recipe makes its model
        (tmp_path / "config.json").write_text(json.dumps(_SMOLLM2))
        values = [f"trainer.policy.model.path={tmp_path}"]
    lines = planned(Config.from_toml([path, SITE], values))
    memory = [line for line in lines if line.startswith("  memory of the device: ")]
    assert memory  # of trainer ranks first, then of what only computes
    assert all(line.endswith(" left") for line in memory), memory
    if path.parent.name != "recipes":
        return
    page = (path.parent / "README.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith(f"| [{path.name}]"))
    _, _, nodes, gib = (cell.strip() for cell in row.strip("|").split("|"))
    assert sum(line.startswith("node ") for line in lines) == int(nodes)
    (whole,) = (line for line in lines if line.startswith("  in all "))
    assert whole.startswith(f"  in all {gib}:"), f"{path.name}: README.md says {gib} GiB"
    assert "Not run on GPUs yet." in path.read_text().split("[data]")[0]


@pytest.mark.parametrize("path", sorted((CONFIGS / "recipes").rglob("*.toml")), ids=lambda path: path.stem)
def test_a_recipe_repeats_no_default(path: Path) -> None:
    for setting in leaves(Config):
        entry: Any = tomli.loads(path.read_text())
        for part in setting.path.split("."):
            entry = entry.get(part) if isinstance(entry, dict) else None
        assert entry is None or setting.required or entry != setting.default, f"{setting.path} is the default"


def test_what_submit_would_refuse_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    given = ['data.train_data=["nowhere.jsonl"]', "trainer.max_steps=400"]
    assert main(["plan", str(QUICKSTART), *given]) == 0
    assert "hpcrl submit would refuse this: data.train_data: no file nowhere.jsonl" in capsys.readouterr().out
    assert main(["plan", str(QUICKSTART), "trainer.max_steps=100000"]) == 0
    assert "note: trainer.max_steps: 100000 steps are asked for, and the data end at" in capsys.readouterr().out


def test_config_json_of_a_model_on_the_hub_is_enough(tmp_path: Path) -> None:
    published = tmp_path / "hub" / "org" / "small"
    published.mkdir(parents=True)
    (published / "config.json").write_text((MODEL / "config.json").read_text())
    with stand_in.hub(tmp_path / "hub") as address:
        environment = {
            **os.environ,
            "HF_ENDPOINT": address,
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_HUB_OFFLINE": "0",
        }
        command = [
            sys.executable,
            "-m",
            "hpcrl.cli.main",
            "plan",
            str(QUICKSTART),
            "trainer.policy.model.path=org/small",
        ]
        found = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=ROOT).stdout
    assert "policy: Qwen2ForCausalLM of org/small, 84,928 parameters" in found
    assert "note" not in found
    assert [path.name for path in (tmp_path / "cache").rglob("snapshots/*/*")] == ["config.json"]
