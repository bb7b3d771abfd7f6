"""Whether small runs of each kind go through on one GPU, trainer and engine in turns: one line of JSON per run, one run after the other.

    python benchmarks/gpu_runs.py [KEY=VALUE ...] [--only NAME ...] [--cpu] [--keep FOLDER] [--seconds N]

Each is a configuration of configs/ for some steps, with overrides for all of them behind; those with vLLM train random Qwen3 with heads of 64,
one of them a mixture of experts. A run without a failed or restarted process is what to expect, and a better score of models that have begun to
learn; with --cpu the same runs compute on the CPU. Simulators render with what MUJOCO_GL names. --keep leaves the runs there. One that takes
more than --seconds is cancelled; with --cpu it may take five times as many.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_STEPS, _TAIL = 4, 400  # characters of an error
_TURNS = ["trainer.placement.colocate_all=true"]
_HALF = [
    "trainer.policy.fsdp_config.mixed_precision.param_dtype=bf16",
    "generator.inference_engine.model_dtype=bfloat16",
]
_CRITIC = [
    "trainer.algorithm.advantage_estimator=gae",
    "trainer.critic_mini_batch_size=32",
    f"trainer.critic.model.path={ROOT}/configs/quickstart/model",
]
_ADAPTERS = [
    "trainer.policy.model.lora.rank=8",
    "trainer.policy.model.lora.alpha=16.0",
    "trainer.algorithm.use_kl_loss=false",
]
_VLLM = [
    *_TURNS,
    *_HALF,
    "generator.inference_engine.backend=vllm",
    # with a size, vLLM measures no memory while it starts, which others on the GPU would disturb
    "generator.inference_engine.engine_init_kwargs.kv_cache_memory_bytes=4000000000",
    "generator.inference_engine.gpu_memory_utilization=0.3",
]
_MEGATRON = ["trainer.strategy=megatron", "trainer.policy.fsdp_config=default"]
_DENSE, _EXPERTS = "trainer.policy.model.path={dense}", "trainer.policy.model.path={experts}"
_RUNS: dict[str, tuple[str, list[str]]] = {
    "float32": ("quickstart_colocated", _TURNS),
    "bfloat16": ("quickstart_colocated", [*_TURNS, *_HALF]),
    "critic": ("quickstart_colocated", [*_TURNS, *_HALF, *_CRITIC]),
    "adapters": ("quickstart_colocated", [*_TURNS, *_ADAPTERS]),
    "vllm": ("quickstart_colocated", _VLLM),
    "vllm, checkpoints beside training": (
        "quickstart_colocated",
        [*_VLLM, _DENSE, "trainer.ckpt_mode=async", "trainer.ckpt_interval=1"],
    ),
    "vllm, router replay": ("quickstart_colocated", [*_VLLM, _EXPERTS, "trainer.policy.experts.router_replay=R3"]),
    "vllm, no router replay": ("quickstart_colocated", [*_VLLM, _EXPERTS]),
    "vllm, fp8": (
        "quickstart_colocated",
        [*_VLLM, _DENSE, "generator.inference_engine.quantization=fp8_per_channel"],
    ),
    "vllm, adapters": ("quickstart_colocated", [*_VLLM, _DENSE, *_ADAPTERS]),
    "images": ("count_shapes", _TURNS),
    "diffusion": ("diffusion_tiny", _TURNS),
    "openvla": ("reach_vla", _TURNS),
    "pi05": ("reach_pi05", _TURNS),
    "supervised": ("sft_tiny", []),
    "supervised diffusion": ("diffusion_sft_tiny", []),
    "supervised, Megatron-core": ("sft_tiny", _MEGATRON),
    "supervised, Megatron-core, experts": ("sft_tiny", [*_MEGATRON, _EXPERTS]),
    "Megatron-core": ("quickstart_colocated", [*_TURNS, *_MEGATRON, "trainer.ckpt_interval=1", "trainer.hf_save_interval=1"]),
}  # fmt: skip
_METRICS = (
    "policy/logprob_mismatch", "weights/probe_difference", "experts/replayed_share", "memory/engines_asleep_gib",
    "memory/trainer_away_gib", "weights/wake_seconds", "weights/pause_seconds", "timing/step",
)  # fmt: skip


def make_models(folder: Path) -> dict[str, str]:
    """Write random Qwen3 models for the quickstart's tokenizer, four layers with heads of 64; one has experts. Returns their paths by name."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = ROOT / "configs" / "quickstart" / "model"
    sizes: dict[str, Any] = {
        "vocab_size": 18, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048, "initializer_range": 0.05,
        "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
    }  # fmt: skip
    torch.manual_seed(0)
    experts = Qwen3MoeConfig(**sizes, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256)
    for name, model in {
        "dense": Qwen3ForCausalLM(Qwen3Config(**sizes)),
        "experts": Qwen3MoeForCausalLM(experts),
    }.items():
        model.bfloat16().save_pretrained(folder / name)
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            (folder / name / file).write_bytes((tokenizer / file).read_bytes())
    return {name: str(folder / name) for name in ("dense", "experts")}


def metrics_of(run: Path) -> dict[str, list[float]]:
    """Return some metrics of a run, of each step."""
    from hpcrl.observe.metrics import merged
    from hpcrl.rundir.layout import Run

    found: dict[str, list[float]] = {}
    for step in merged(Run(run)).values():
        for name, value in step.items():
            if name.startswith(_METRICS):  # those of engines end in their replica
                found.setdefault(name, []).append(round(value, 4))
    return found


def play(configuration: str, overrides: list[str], root: str, limit: float | None = None) -> dict[str, Any]:
    """Run it to its end and say how it went: scores or validation losses at first and at last, failures of processes."""
    environment = {**os.environ, "HPCRL_ROOT": root}
    command = [sys.executable, "-m", "hpcrl.cli.main"]
    toml, began = f"configs/{configuration}.toml", time.monotonic()
    submit = [*command, "submit", toml, f"trainer.max_steps={_STEPS}", *overrides, "--local", "--follow"]
    with subprocess.Popen(
        submit, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as following:
        try:
            output, _ = following.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            following.terminate()
            output, _ = following.communicate()
            for path in Path(root).glob("*/*"):
                subprocess.run(
                    [*command, "cancel", "--now", str(path)], env=environment, check=False, stdout=subprocess.DEVNULL
                )
    seconds = round(time.monotonic() - began, 1)
    told = subprocess.run([*command, "status", "--json"], env=environment, capture_output=True, text=True, check=False)
    runs = json.loads(told.stdout) if told.returncode == 0 else []
    if not runs:  # it was refused
        return {"seconds": seconds, "failed": output[-_TAIL:]}
    (run,) = runs
    summary = run["summary"]
    return {
        "seconds": seconds,
        "state": run["state"],
        "detail": run["detail"][:_TAIL],
        "score": [summary["eval_first"], summary["eval_last"]],
        "loss": [summary["loss_first"], summary["loss_last"]],
        "restarts": [line[:_TAIL] for line in output.splitlines() if "to be started again" in line],
        "metrics": metrics_of(Path(run["path"])),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=_RUNS, default=list(_RUNS))
    parser.add_argument("--cpu", action="store_true", help="without a GPU")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where the runs are left")
    parser.add_argument("--seconds", type=float, help="that a run may take")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    given = parser.parse_args()
    device, failed = f"slurm.gpus_per_node={0 if given.cpu else 1}", False
    with tempfile.TemporaryDirectory() as place:
        models = make_models(Path(place))
        for name in given.only:
            configuration, overrides = _RUNS[name]
            root = (given.keep or Path(place)) / f"{name.replace(', ', '-').replace(' ', '-')}"
            own = [one.format_map(models) for one in overrides]
            limit = given.seconds and given.seconds * (5 if given.cpu else 1)
            found = play(configuration, [device, *own, *given.overrides], str(root), limit)
            failed |= found.get("state") != "done" or bool(found["restarts"])
            print(json.dumps({"run": name, "configuration": configuration, **found}), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
