"""What sbatch and srun are asked for: by the example sites, for a pool's elements, and in containers."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.config import Config
from hpcrl.config.sections.slurm import ContainerConfig
from hpcrl.errors import ConfigError
from hpcrl.launch.container import lines_of_a_restart
from hpcrl.launch.doctor.cluster import request_findings
from hpcrl.launch.nodes import describe_plan, make_plan
from hpcrl.launch.pools import with_few_cores
from hpcrl.launch.submit.executors import Element, Submission, batch_scripts
from tests.paths import QUICKSTART, ROOT

SITES = ROOT / "slurm" / "sites"
RECIPE = ROOT / "configs" / "recipes" / "gsm8k_1.5b.toml"
ENGINE = "generator.inference_engine"


def scripts(folder: Path, config: Config) -> list[str]:
    return list(
        batch_scripts(Submission(folder / "project" / ".slurm" / "mine", [Element("mine", config, [])])).values()
    )


def options(script: str) -> dict[str, str | None]:
    return {name: value or None for name, value in re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", script, re.MULTILINE)}


def last(script: str) -> str:
    """Return the command that decides, at the end of a batch script, whether the job is requeued."""
    (line,) = [line.strip() for line in script.splitlines() if "-m hpcrl.launch.requeue." in line]
    return line


@pytest.mark.parametrize("site", sorted(path.name for path in SITES.glob("*.toml")))
def test_every_site_is_planned_with_an_experiment(tmp_path: Path, site: str) -> None:
    experiment = QUICKSTART if site == "devcluster.toml" else RECIPE
    config = Config.from_toml([experiment, SITES / site])
    assert len(describe_plan(make_plan(config))) == int(options(scripts(tmp_path, config)[0])["nodes"] or 0)
    assert not list(request_findings(config.slurm))


@pytest.mark.parametrize(
    ("site", "asked"),
    [
        ("gres.toml", {"gres": "gpu:a100:8", "cpus-per-task": "64", "mem": "900GB"}),
        ("exclusive.toml", {"exclusive": None, "mem": "0"}),
        ("example.toml", {"gpus-per-node": "8", "exclusive": None, "mem": "0"}),
    ],
)
def test_what_sites_ask_for(tmp_path: Path, site: str, asked: dict[str, str | None]) -> None:
    found = options(scripts(tmp_path, Config.from_toml([RECIPE, SITES / site]))[0])
    names = ("gpus-per-node", "gres", "exclusive", "cpus-per-task", "mem")
    assert {name: found[name] for name in names if name in found} == asked


@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        (
            ["slurm.gpus_per_node=8", "slurm.cpus_per_task=96", "slurm.mem_gb=800"],
            {"cpus-per-task": "24", "mem": "200GB"},
        ),
        (["slurm.gpus_per_node=2"], {"exclusive": None, "mem": "0"}),
        (["slurm.gpus_per_node=8"], {}),
        (["slurm.gpus_per_node=8", "slurm.cpus_per_task=96", "slurm.elastic.cpus_per_task=7"], {"cpus-per-task": "7"}),
        (["slurm.gpus_per_node=2", "slurm.elastic.mem_gb=7"], {"mem": "7GB"}),
        (["slurm.gpus_per_node=8", "slurm.gpu_option=none"], {"exclusive": None, "mem": "0"}),
        (["slurm.cpus_per_task=5"], {"cpus-per-task": "5"}),
        (["slurm.cpus_per_task=5", "slurm.replicas_per_node=2", "slurm.mem_gb=0"], {"cpus-per-task": "2"}),
        ([], {}),
    ],
)
def test_an_element_of_a_pool_asks_for_its_share(
    tmp_path: Path, settings: list[str], asked: dict[str, str | None]
) -> None:
    """A replica has two GPUs here; its share used to be the cluster's default, one core."""
    settings = [*settings, f"{ENGINE}.backend=vllm", f"{ENGINE}.tensor_parallel_size=2"]
    config = Config.from_toml([QUICKSTART], [*settings, "slurm.elastic.replicas=3"])
    found = options(scripts(tmp_path, config)[1])
    assert {name: found[name] for name in ("exclusive", "cpus-per-task", "mem") if name in found} == asked


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        (["slurm.gpus_per_node=8", "slurm.exclusive=false"], True),
        (["slurm.gpus_per_node=8", "slurm.mem_gb=900"], True),
        (["slurm.gpus_per_node=8", "slurm.mem_gb=900", "slurm.extra.cpus-per-gpu=8"], False),
        (["slurm.gpus_per_node=8", "slurm.cpus_per_task=64"], False),
        (["slurm.gpus_per_node=8"], False),
        ([], False),
    ],
)
def test_a_run_on_gpus_that_would_get_one_core_is_warned(settings: list[str], warned: bool) -> None:
    found = [one.found for one in request_findings(Config.from_toml([QUICKSTART], settings).slurm)]
    assert found == ["slurm.cpus_per_task is not set, and the run takes no whole nodes"] * warned


def test_a_pool_on_a_part_of_a_whole_node_is_warned() -> None:
    settings = ["slurm.gpus_per_node=8", "slurm.elastic.replicas=2", f"{ENGINE}.backend=vllm"]
    assert with_few_cores(Config.from_toml([QUICKSTART], settings)) == ["slurm.elastic"]
    for more in (
        "slurm.elastic.cpus_per_task=8",
        "slurm.cpus_per_task=64",
        f"{ENGINE}.tensor_parallel_size=8",
        "slurm.gpus_per_node=0",
    ):
        assert not with_few_cores(Config.from_toml([QUICKSTART], [*settings, more]))


def test_a_pool_of_scorers_on_a_part_of_a_node_is_warned() -> None:
    section = "slurm.elastic_scorers.reference"
    settings = ["slurm.gpus_per_node=8", f"{section}.replicas=2", "trainer.placement.colocate_policy_ref=false"]
    config = Config.from_toml([QUICKSTART], settings)
    assert with_few_cores(config) == [section]
    (found,) = request_findings(config.slurm, with_few_cores(config))
    assert found.found == f"{section}.cpus_per_task is not set, and an element takes no whole node"
    whole = "trainer.placement.ref_num_gpus_per_node=8"
    assert not with_few_cores(Config.from_toml([QUICKSTART], [*settings, whole]))


def contained(tmp_path: Path, kind: str, *settings: str) -> list[str]:
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.jsonl").write_text("{}")
    (tmp_path / "link.jsonl").symlink_to(data / "train.jsonl")
    (tmp_path / "model").mkdir()
    config = Config.from_toml(
        [QUICKSTART],
        [
            f"slurm.root={tmp_path}/runs", f"data.train_data=['{tmp_path}/link.jsonl']", f"data.val_data=['{tmp_path}/link.jsonl']",
            f"trainer.policy.model.path={tmp_path}/model", f"slurm.container.kind={kind}", "slurm.container.image=/images/h.sif",
            "slurm.container.python=/opt/env/bin/python", "slurm.container.mounts=['/local','/site:/opt/site:ro']", "slurm.elastic.replicas=1",
            *settings,
        ],
    )  # fmt: skip
    return scripts(tmp_path / "runs", config)


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", "/nowhere")
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)


def seen(tmp_path: Path) -> list[str]:
    """The example rows of the quickstart are the only thing that lies elsewhere."""
    return [str(tmp_path / name) for name in ("data/train.jsonl", "link.jsonl", "model", "runs")]


def test_apptainer_starts_agents_and_the_end_of_the_batch_script(tmp_path: Path) -> None:
    binds = [f"--bind={path}" for path in [*seen(tmp_path), "/local", "/site:/opt/site:ro"]]
    command = f'apptainer exec --nv {" ".join(binds)} --bind="${{TMPDIR:-/tmp}}" /images/h.sif /opt/env/bin/python'
    run, pool = contained(tmp_path, "apptainer", "slurm.gpus_per_node=1")
    for script, module in ((run, "epilogue"), (pool, "elastic")):
        assert f" {command} -u -m submitit.core._submit " in script
        assert last(script).startswith(f"{command} -m hpcrl.launch.requeue.{module} ")
        assert last(script).endswith(" $status")
        assert script.index("export PYTHONNOUSERSITE=1") < script.index("export PYTHONPATH=")


def test_folders_below_other_roots_are_seen_inside(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    run, _ = contained(tmp_path, "apptainer", f"slurm.checkpoint_root={tmp_path}/scratch")
    assert f" --bind={tmp_path}/scratch " in run


def test_a_sweep_sees_the_data_of_all_its_elements(tmp_path: Path) -> None:
    elements = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        settings = [
            f"slurm.root={tmp_path}/runs",
            f"trainer.policy.model.path={tmp_path}/{name}",
            "slurm.container.kind=apptainer",
        ]
        config = Config.from_toml([QUICKSTART], [*settings, "slurm.container.image=/h.sif"])
        elements.append(Element(name, config, []))
    (script,) = batch_scripts(Submission(tmp_path / "runs" / "project" / ".slurm" / "mine", elements)).values()
    assert all(f"--bind={tmp_path}/{name} " in script for name in ("one", "two", "runs"))


def test_apptainer_without_gpus_and_with_a_python_outside(tmp_path: Path) -> None:
    settings = ("slurm.container.arguments=['--no-home']", "slurm.container.host_python=/env/bin/python")
    run, _ = contained(tmp_path, "apptainer", *settings)
    assert " apptainer exec --no-home --bind=" in run
    assert last(run).startswith("/env/bin/python -m hpcrl.launch.requeue.epilogue ")


@pytest.mark.parametrize(("kills", "calls", "code"), [(0, 1, 7), (2, 3, 7), (99, 5, 137)])
def test_the_end_of_a_batch_script_is_begun_again_where_it_is_killed(
    tmp_path: Path, kills: int, calls: int, code: int
) -> None:
    """A real shell; the program notes the status of srun, here 75, and kills itself so often."""
    program, noted = tmp_path / "program", tmp_path / "noted"
    program.write_text(
        f'#!/bin/sh\necho "$4" >> {noted}\n[ $(wc -l < {noted}) -gt {kills} ] || kill -KILL $$\nexit 7\n'
    )
    program.chmod(0o755)
    run, _ = contained(tmp_path, "apptainer", f"slurm.container.host_python={program}")
    end = "(exit 75)\n" + run[run.index("status=$?") :]
    assert subprocess.run(["bash", "-c", end], stderr=subprocess.DEVNULL, check=False).returncode == code
    assert noted.read_text().split() == ["75"] * calls


def test_pyxis_is_options_of_srun(tmp_path: Path) -> None:
    arguments = "slurm.container.arguments=['--no-container-mount-home','--container-env=SITE,MORE']"
    run, pool = contained(tmp_path, "pyxis", "slurm.gpus_per_node=1", arguments)
    mounts = ",".join(f"{path}:{path}" for path in ["/tmp", *seen(tmp_path), "/local"]) + ",/site:/opt/site:ro"
    wanted = [
        "--container-image=/images/h.sif",
        f"--container-mounts={mounts}",
        "--container-env=PYTHONPATH,PYTHONSAFEPATH,PYTHONUNBUFFERED,PYTHONNOUSERSITE,SITE,MORE",
        "--no-container-mount-home",
    ]
    for script, module in ((run, "epilogue"), (pool, "elastic")):
        words = shlex.split(next(line for line in script.splitlines() if "submitit.core._submit" in line))
        at = words.index(wanted[0])
        assert words[at : at + 5] == [*wanted, "/opt/env/bin/python"]
        end = shlex.split(last(script).removesuffix(" $status"))
        assert sum(word.startswith("--container-env") for word in words) == 1, "Slurm passes only the last one on"
        step = ["srun", "--nodelist=$SLURMD_NODENAME", "--overlap", "--nodes=1", "--ntasks=1", "--unbuffered"]
        assert end[:-1] == [*step, *wanted, "/opt/env/bin/python", "-m", f"hpcrl.launch.requeue.{module}"]


def test_an_interpreter_of_the_jobs_runs_after_the_setup(tmp_path: Path) -> None:
    """In the run, its pool and its upload, and at the end of their batch scripts."""
    upload = [
        "trainer.upload.s3=final",
        "trainer.upload.s3_bucket=mine",
        "slurm.upload.by=job",
        "trainer.hf_save_interval=1",
    ]
    settings = [
        "slurm.python=/my env/bin/python",
        'slurm.setup=["module load cuda"]',
        "slurm.elastic.replicas=1",
        *upload,
    ]
    run, pool, sent = scripts(tmp_path, Config.from_toml([QUICKSTART], settings))
    for script in (run, pool, sent):
        assert sys.executable not in script
        assert script.index("\nmodule load cuda\n") < script.index("'/my env/bin/python' -u -m submitit.core._submit ")
    for script, module in ((run, "epilogue"), (pool, "elastic")):
        assert last(script).startswith(f"'/my env/bin/python' -m hpcrl.launch.requeue.{module} ")


def test_without_a_container_it_is_the_interpreter_of_the_submitter(tmp_path: Path) -> None:
    script = scripts(tmp_path, Config.from_toml([QUICKSTART]))[0]
    assert f" {shlex.quote(sys.executable)} -u -m submitit.core._submit " in script
    assert last(script).startswith(f"{shlex.quote(sys.executable)} -m hpcrl.launch.requeue.epilogue ")
    assert "PYTHONNOUSERSITE" not in script


@pytest.mark.parametrize(("kind", "folder"), [("apptainer", "a,b"), ("pyxis", "a,b"), ("pyxis", "a b")])
def test_a_path_that_a_container_cannot_be_given_is_refused(tmp_path: Path, kind: str, folder: str) -> None:
    (tmp_path / folder).mkdir()
    with pytest.raises(ConfigError, match=rf"{re.escape(folder)}/\S+: .* that {kind} cannot mount"):
        contained(tmp_path / folder, kind)
    contained(tmp_path, kind)


def test_apptainer_is_given_a_path_with_a_blank(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    run, _ = contained(tmp_path / "a b", "apptainer")
    assert f"--bind='{tmp_path}/a b/model'" in run


def test_what_pyxis_left_on_a_node_is_removed_before_a_requeued_job_starts(tmp_path: Path) -> None:
    """Pyxis would name the container of step 0 as before, and starts none beside one that a node kept when it lost power."""
    programs, removed = tmp_path / "bin", tmp_path / "removed"
    programs.mkdir()
    listed = "pyxis_70.0 pyxis_7.0 mine pyxis_7_7.4294967291"
    enroot = (
        f'env | grep -qE "^(ENROOT|XDG)_" && exit 1; [ $1 = list ] && printf "%s\\n" {listed} || echo "$@" >> {removed}'
    )
    for name, program in (("srun", 'while [ "$1" != bash ]; do shift; done; exec "$@"'), ("enroot", enroot)):
        (programs / name).write_text(f"#!/bin/sh\n{program}\n")
        (programs / name).chmod(0o755)
    for script in contained(tmp_path, "pyxis"):
        lines = script.splitlines()
        (at,) = [index for index, line in enumerate(lines) if "SLURM_RESTART_COUNT" in line]
        assert at < next(index for index, line in enumerate(lines) if "submitit.core._submit" in line)
        for count in ("", "0", "1"):
            environment = {"PATH": f"{programs}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": count}
            environment |= {"ENROOT_DATA_PATH": "/my/own", "XDG_RUNTIME_DIR": "/run/user/of/the/login/node"}
            subprocess.run(["bash", "-c", lines[at]], env=environment, check=True)
    assert removed.read_text().splitlines() == ["remove --force -- pyxis_7.0 pyxis_7_7.4294967291"] * 2


def test_a_node_that_hangs_keeps_no_requeued_job_from_its_start(tmp_path: Path) -> None:
    """As one whose disk does not answer, where the removal of a container waits for ever."""
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\nsleep 600\n")
    srun.chmod(0o755)
    (line,) = lines_of_a_restart(ContainerConfig(kind="pyxis", image="/h.sqsh"))
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_RESTART_COUNT": "1"}
    soon = line.replace(" 600 ", " 1 ")
    assert subprocess.run(["bash", "-c", soon], env=environment, timeout=300, check=False).returncode == 124
