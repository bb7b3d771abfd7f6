"""What an agent finds on its node, and what it refuses. The machine of these tests has no GPU; a program prints what nvidia-smi prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from hpcrl.config import Config
from hpcrl.errors import CommitError, ConfigError, DataError, DeviceError, HpcrlError, RunError
from hpcrl.launch.agent import preflight
from hpcrl.launch.agent.preflight import check_node, compiling, make_room, sharing, wanting_nvcc
from hpcrl.launch.agent.start import NodeContext
from hpcrl.launch.doctor.disk_space import Sizes, disk_needs
from hpcrl.launch.doctor.node import gpu_processes, gpus_here
from hpcrl.launch.nodes import Node
from hpcrl.rundir.commit import begin, committed_directory, write_text
from hpcrl.rundir.evaluations import MOST_OPEN
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import open_attempt
from tests.filesystem.small import small_filesystem
from tests.paths import QUICKSTART

CONFIG = Config.from_toml([QUICKSTART])
FIRST = Node(0, "rollout", 0, (0, 1), 0, 0)
ON_GPUS, ON_CPUS = Node(0, "trainer", 4, (), 4, 0), Node(1, "rollout", 0, (0, 1), 0, 0)
UUIDS = [f"GPU-{index}932f937-d72c-4106-c12f-20bd9faed9f6" for index in range(4)]
GPUS = [f"{index}, {uuid}, NVIDIA H100 80GB HBM3, 535.104.05, 81559 MiB, Default" for index, uuid in enumerate(UUIDS)]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(preflight, "_LEAVING_S", 0.0)
    return monkeypatch


def nvidia_smi(machine: pytest.MonkeyPatch, folder: Path, processes: list[str] | None = None) -> None:
    """Put an nvidia-smi first that knows four GPUs and these processes."""
    write_text(folder / "gpus", "".join(f"{line}\n" for line in GPUS))
    write_text(folder / "processes", "".join(f"{line}\n" for line in processes or []))
    answers = f"--query-gpu=*) cat {folder}/gpus ;; --query-compute-apps=*) cat {folder}/processes ;; *) exit 2"
    write_text(folder / "nvidia-smi", f'#!/bin/sh\ncase "$1" in {answers} ;; esac\n', mode=0o700)
    machine.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def check(
    folder: Path, node: Node = ON_CPUS, sizes: Sizes | None = None, config: Config = CONFIG, name: str = "run"
) -> None:
    run = Run(folder / name)
    run.path.mkdir(exist_ok=True)
    check_node(run, config, node, NodeContext(node.index, ["here", "here"], "local-1", 0, True), sizes)


def refused(
    folder: Path, node: Node, sizes: Sizes | None = None, kind: type[HpcrlError] = DeviceError, name: str = "run"
) -> str:
    with pytest.raises(kind) as caught:
        check(folder, node, sizes, name=name)
    return str(caught.value)


def test_fewer_gpus_than_needed(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert refused(tmp_path, ON_GPUS) == (
        "4 GPU(s) are needed on this node, and it was given 2 (CUDA_VISIBLE_DEVICES='0,1'): ask for them with "
        "slurm.gpus_per_node, or with slurm.extra where the site counts them by another name"
    )


def test_torch_that_sees_none_names_driver_and_build(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvidia_smi(machine, tmp_path)
    message = refused(tmp_path, ON_GPUS)
    assert message.startswith("4 GPU(s) are needed on this node, and torch 2.")
    assert "sees 0 (driver 535.104.05 with 4 x NVIDIA H100 80GB HBM3; CUDA_VISIBLE_DEVICES is not set): " in message
    assert message.endswith("; slurm.gpus_per_node=0 is a run on CPUs")


def test_torch_that_cannot_be_imported(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    machine.setenv("PYTHONPATH", str(tmp_path))
    message = "torch cannot be imported on this node: OSError: libcudart.so.13: cannot open shared object file: "
    assert refused(tmp_path, ON_GPUS).startswith(message)


def test_a_run_on_cpus_asks_neither_torch_nor_driver(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError")
    machine.setenv("PYTHONPATH", str(tmp_path))
    nvidia_smi(machine, tmp_path, [f"{UUIDS[0]}, 1, 70000 MiB, python3"])
    check(tmp_path)


def test_processes_on_the_gpus_that_a_node_was_given(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mine = os.getpid()
    lines = [
        f"{UUIDS[1]}, {mine}, 30156 MiB, /usr/bin/python3, with a comma",
        f"{UUIDS[2]}, 4194305, [N/A], nvidia-cuda-mps-server",
        f"{UUIDS[3]}, 4194306, 500 MiB, [Not Found]",
        "no running processes",
    ]
    nvidia_smi(machine, tmp_path, lines)
    found = gpu_processes(gpus_here(), ["1", UUIDS[2][:12]])
    user = os.environ.get("USER", "root") if os.geteuid() else "root"
    assert found == [
        {"gpu": "1", "pid": mine, "name": "/usr/bin/python3, with a comma", "user": user, "memory": 30156},
        {"gpu": UUIDS[2][:12], "pid": 4194305, "name": "nvidia-cuda-mps-server", "user": "somebody", "memory": None},
    ]
    assert gpu_processes(gpus_here(), ["MIG-5c"]) == []


def test_what_compiles_and_what_shares_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (compiling(CONFIG, ON_GPUS), sharing(CONFIG, ON_GPUS)) == ([], [])
    served = Config.from_toml([QUICKSTART], ["generator.inference_engine.backend=vllm"])
    assert (compiling(served, ON_CPUS), compiling(CONFIG, ON_CPUS)) == (["vLLM"], []), "transformers compiles nothing"
    compiled = Config.from_toml([QUICKSTART], ["trainer.policy.compile_model=true"])
    assert compiling(compiled, ON_GPUS) == ["trainer.policy.compile_model"]
    turns = Config.from_toml([QUICKSTART], ["trainer.placement.colocate_all=true"])
    assert sharing(turns, ON_GPUS) == ["trainer.placement.colocate_all"]
    engine = "generator.inference_engine."
    own = [
        f"{engine}backend=vllm",
        f"{engine}model_dtype=bfloat16",
        f"{engine}use_flashinfer=true",
        f"{engine}quantization=fp8_per_block",
    ]
    built = Config.from_toml([QUICKSTART], ["slurm.gpus_per_node=1", *own])
    monkeypatch.delenv("VLLM_USE_DEEP_GEMM", raising=False)
    assert wanting_nvcc(built, Node(1, "rollout", 0, (0,), 1, 0)) == [
        f"{engine}use_flashinfer",
        f"{engine}quantization",
    ]
    assert wanting_nvcc(built, Node(0, "trainer", 1, (), 1, 0)) == []
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "0")
    assert wanting_nvcc(built, Node(1, "rollout", 0, (0,), 1, 0)) == [f"{engine}use_flashinfer"]


Place = namedtuple("Place", "f_bavail f_frsize f_favail f_files")


@pytest.fixture
def nearly_full(machine: pytest.MonkeyPatch) -> None:
    """A machine whose filesystems all have 1 GB left."""
    machine.setattr(os, "statvfs", lambda _path: Place(10**6, 1000, 10**7, 10**8))


@pytest.mark.usefixtures("nearly_full")
def test_too_little_room_for_a_checkpoint_is_refused_and_blames_no_node(tmp_path: Path) -> None:
    sizes = Sizes(weights=10**8, checkpoint=10**9, export=0)
    check(tmp_path, sizes=sizes)  # the first node makes room, and looks
    message = refused(tmp_path, FIRST, sizes, RunError)
    assert "1.0 GB free" in message
    assert "a checkpoint and the weights for the engines take about 1.0 GiB" in message
    assert "trainer.max_ckpts_to_keep" in message


def test_room_is_counted_by_filesystem(tmp_path: Path, machine: pytest.MonkeyPatch) -> None:
    """Of what lies below other roots, at the first of the places that share a filesystem; a place that is lost is named."""
    sizes, saving = Sizes(weights=2, checkpoint=30, export=500), ["trainer.hf_save_interval=1"]
    config = Config.from_toml([QUICKSTART], saving)
    for link in (False, True):
        run = Run(tmp_path / f"run-{link}")
        with TemporaryDirectory(dir="/dev/shm") as scratch:
            run.path.mkdir()
            if link:
                run.checkpoints.symlink_to(scratch)
                run.exports.symlink_to(scratch)
            found = {name: (need.least, need.what) for name, need in disk_needs(run, config, sizes).items()}
            del found["copies"]
            if not link:
                assert found == {"root": (532, "an export and a checkpoint and the weights for the engines")}
                continue
            assert found == {
                "root": (2, "the weights for the engines"),
                "checkpoints": (530, "an export and a checkpoint"),
            }
            machine.setattr(os, "access", lambda path, mode: "shm" not in str(path) and mode > 0)
            assert "you cannot write there" in refused(run.path.parent, FIRST, kind=RunError, name=run.name)
    assert "which is not there on" in refused(run.path.parent, FIRST, kind=DataError, name=run.name)
    check(run.path.parent, ON_CPUS, name=run.name)  # it writes into none of these folders


@pytest.mark.parametrize(("interval", "versions"), [(0, 2 + 3), (5, 2 + 3 + MOST_OPEN)])
def test_room_for_the_weights_of_open_evaluations_is_counted(tmp_path: Path, interval: int, versions: int) -> None:
    settings = [
        f"trainer.eval_interval={interval}",
        "trainer.fully_async.max_staleness_steps=3",
        "trainer.ckpt_interval=0",
    ]
    config, run = Config.from_toml([QUICKSTART], settings), Run(tmp_path / "run")
    run.path.mkdir()
    need = disk_needs(run, config, Sizes(weights=7, checkpoint=0, export=0))["root"]
    assert (need.least, need.most) == (7, 7 * versions)


@pytest.mark.usefixtures("nearly_full")
def test_room_for_one_checkpoint_alone_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(tmp_path, ON_CPUS, Sizes(weights=10**8, checkpoint=5 * 10**8, export=0))
    said = capsys.readouterr().out
    assert "warning: slurm.root: " in said


def test_an_attempt_that_keeps_fewer_checkpoints_makes_room_for_the_next(tmp_path: Path) -> None:
    """On a filesystem that is full of them, and of what an attempt left that was killed while it wrote."""
    checkpoints = tmp_path / "run" / "checkpoints"
    with small_filesystem(checkpoints, "2m") as mounted:
        if not mounted:
            pytest.skip("no filesystem can be mounted here")
        run, there = Run(tmp_path / "run"), os.statvfs(checkpoints)
        size = there.f_bavail * there.f_frsize // 6 // 4096 * 4096
        run.config.touch()
        open_attempt(run, "local-1", ["here"])
        for step in range(1, 6):
            with committed_directory(run.checkpoint(step), 1, step=step) as directory:
                (directory / "model").write_bytes(bytes(size - 4 * 4096))
        (begin(run.checkpoint(6), 1) / "model").write_bytes(bytes(size // 2))
        free = lambda: os.statvfs(checkpoints).f_bavail * there.f_frsize  # noqa: E731
        assert free() < size
        fewer = replace(CONFIG, trainer=replace(CONFIG.trainer, max_ckpts_to_keep=2, ckpt_keep_every=2))
        open_attempt(run, "local-2", ["here"])
        with pytest.raises(CommitError, match="attempt"):
            make_room(run, fewer, 1)
        make_room(run, fewer, 2)
        assert sorted(path.name for path in checkpoints.iterdir()) == ["s000002", "s000004", "s000005"]
        assert free() > 2 * size
        (run.checkpoint(4) / "model").unlink()
        (run.checkpoint(2) / "model").unlink()
        make_room(run, replace(fewer, trainer=replace(fewer.trainer, ckpt_keep_every=0)), 2)
        assert len(list(checkpoints.iterdir())) == 3, "only one has all its files"


def with_copies(place: Path | str) -> Config:
    return Config.from_toml([QUICKSTART], [f"generator.inference_engine.weight_copy_dir={place}"])


@pytest.mark.usefixtures("nearly_full")
def test_room_for_copies_of_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "local" / "disk"
    check(tmp_path, ON_CPUS, Sizes(weights=6 * 10**8, checkpoint=0, export=0), with_copies(place))
    found = f"{place} on {os.uname().nodename}: "
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "copies of weights: " in line]
    assert said.startswith(f"warning: copies of weights: {found}")
    assert "1.0 GB free" in said
    assert "2 versions of the weights take about 1.1 GiB" in said


def test_copies_of_weights_where_a_node_cannot_have_them(tmp_path: Path, machine: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    machine.delenv("LOCAL_SCRATCH", raising=False)
    with pytest.raises(DeviceError, match=r"weight_copy_dir cannot be made: .*file"):
        check(tmp_path, ON_CPUS, config=with_copies(tmp_path / "file" / "copies"))
    with pytest.raises(ConfigError, match="weight_copy_dir: expected an absolute path whose variables the node has"):
        check(tmp_path, ON_CPUS, config=with_copies("$LOCAL_SCRATCH/copies"))
    machine.setenv("LOCAL_SCRATCH", str(tmp_path))
    check(tmp_path, ON_CPUS, config=with_copies("$LOCAL_SCRATCH/copies"))
    assert (tmp_path / "copies").is_dir()


def test_sizes_of_a_model(tmp_path: Path) -> None:
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "a": {"dtype": "BF16", "shape": [10, 20], "data_offsets": [0, 400]},
            "b": {"dtype": "BF16", "shape": [], "data_offsets": [400, 402]},
        }
    ).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    settings = ["generator.inference_engine.model_dtype=bfloat16"]
    config = Config.from_toml([QUICKSTART], settings)
    assert Sizes.of(config, lambda _: tmp_path) == Sizes(weights=2 * 201, checkpoint=12 * 201, export=2 * 201)
    adapted = Config.from_toml([QUICKSTART], [*settings, "trainer.policy.model.lora.rank=4"])
    assert Sizes.of(adapted, lambda _: tmp_path) == Sizes(
        weights=2 * 4 * (10 + 20), checkpoint=12 * 4 * (10 + 20), export=2 * 201
    )
    assert Sizes.of(config, lambda _: None) is None
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    assert Sizes.of(config, lambda _: tmp_path) is None


def test_torchs_part_runs_without_a_gpu() -> None:
    command = [sys.executable, "-m", "hpcrl.launch.doctor.torch_facts"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    found = json.loads(done.stdout)
    assert (found["devices"], found["matmul"]) == (0, [])


def test_a_node_without_what_starts_agents_containers_is_refused(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    box = "environment.skyrl_gym.agent.container"
    config = Config.from_toml([QUICKSTART], [f"{box}.kind=apptainer", f"{box}.image=/agents.sif"])
    machine.setenv("PATH", "/usr/bin:/bin")
    with pytest.raises(
        DeviceError, match=r"not on the PATH of .*/usr/bin:/bin\): .*agent\.container\.kind.*slurm\.setup"
    ):
        check(tmp_path, config=config)
    check(tmp_path, Node(0, "trainer", 1, (), 0, 0), config=config)  # starts no agents
    write_text(tmp_path / "apptainer", "#!/bin/sh\n", mode=0o700)
    machine.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    check(tmp_path, config=config)
