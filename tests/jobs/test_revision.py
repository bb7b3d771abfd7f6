"""A model of the hub by its revision: whoever loads a part of it loads that of the same revision. The hub's cache holds two, of which main would do for nobody."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.config import Config
from hpcrl.errors import DataError
from hpcrl.launch.submit.preflight import check_files
from hpcrl.rundir.layout import Run
from tests.jobs.small_run import SMALL, finish, hpcrl, logs_of
from tests.paths import CONFIGS, QUICKSTART

MODEL, NAME, MAIN, TAGGED = CONFIGS / "quickstart" / "model", "some/letters", "a" * 40, "b" * 40
MEGATRON = [
    "trainer.strategy=megatron",
    "trainer.policy.fsdp_config.mixed_precision.param_dtype=bf16",
    "trainer.policy.megatron_config.dtype=fp32",
    "trainer.ref.megatron_config.dtype=fp32",
]
REVISION = "trainer.policy.model.revision=v2"


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of the model in a cache as huggingface_hub keeps it; processes that are started find it there, and ask nobody."""
    place = tmp_path / "hf" / "hub" / f"models--{NAME.replace('/', '--')}"
    shutil.copytree(MODEL, place / "snapshots" / TAGGED)
    shutil.copytree(MODEL, place / "snapshots" / MAIN, ignore=shutil.ignore_patterns("*.safetensors", "tokenizer*"))
    config = json.loads((MODEL / "config.json").read_text())
    (place / "snapshots" / MAIN / "config.json").write_text(json.dumps(config | {"hidden_size": 32}))
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(MAIN)
    (place / "refs" / "v2").write_text(TAGGED)
    for variable in ("HF_HUB_CACHE", "HF_ENDPOINT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return place


WHO_LOADS = """
import json, sys
from pathlib import Path
import torch
from hpcrl.config import Config
from hpcrl.data.exported_files import exported_files
from hpcrl.data.tokenizer import load_tokenizer
from hpcrl.launch.submit.models import entries_of, folder_of
from hpcrl.planning.shapes import model_shapes
from hpcrl.engines.embedded.rollout import embedded_options
from hpcrl.engines.embedded.model import load_model
from hpcrl.trainer.models.build import critic_source, policy_source, reference_source
from hpcrl.trainer.models.hf import export_config

experiment, place, *settings = sys.argv[1:]
config = Config.from_toml(experiment, settings)
trainer = config.trainer
found = {"tokenizer": load_tokenizer(trainer.policy.model.pretrained, config.generator.chat_template).vocab_size}
for make in (policy_source, reference_source, critic_source):
    source = make(trainer)
    found[make.__name__] = source.config().hidden_size, source.whole(torch.float32, "eager").config.hidden_size, str(source.stored_dtype())
export_config(policy_source(trainer), Path(place), torch.float32)
found["exported"] = [path.name for path in Path(place).iterdir()], sorted(exported_files(trainer.policy.model.pretrained, None, None))
found["engine"] = load_model(embedded_options(config).model, "float32", torch.device("cpu")).config.hidden_size
found["plan"] = {role: shapes.width.hidden for role, shapes in model_shapes(trainer, folder_of).items()}
found["submit"] = entries_of(trainer.policy.model.pretrained)["hidden_size"]
print(json.dumps(found))
"""


@pytest.mark.usefixtures("cached")
def test_every_part_of_a_model_is_of_its_revision(tmp_path: Path) -> None:
    (tmp_path / "exported").mkdir()
    critic = [
        f"trainer.critic.model.path={NAME}",
        "trainer.critic.model.revision=v2",
        "trainer.critic_mini_batch_size=64",
    ]
    command = [
        sys.executable,
        "-c",
        WHO_LOADS,
        str(QUICKSTART),
        str(tmp_path / "exported"),
        f"trainer.policy.model.path={NAME}",
        f"trainer.policy.model.revision={TAGGED}",
        "trainer.algorithm.use_kl_loss=true",
    ]
    done = subprocess.run([*command, *critic], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    size, dtype = 64, "torch.float32"
    assert json.loads(done.stdout) == {
        "tokenizer": len(json.loads((MODEL / "tokenizer.json").read_text())["model"]["vocab"]),
        **{name: [size, size, dtype] for name in ("policy_source", "reference_source", "critic_source")},
        "exported": [
            ["config.json"],
            ["chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"],
        ],
        "engine": size,
        "plan": {"policy": size, "ref": size, "critic": size},
        "submit": size,
    }


def test_a_directory_has_no_revisions() -> None:
    config = Config.from_toml(
        QUICKSTART, [REVISION, f"trainer.ref.model.path={MODEL}", "trainer.ref.model.revision=v2"]
    )
    with pytest.raises(DataError) as caught:
        check_files(config)
    first, second = [line for line in str(caught.value).splitlines() if "revision" in line]
    assert first.endswith(
        f"trainer.policy.model.revision: {MODEL} is a directory here, which has no revisions; leave it out, or name the model by its id "
        "on the hub"
    )
    assert "trainer.ref.model.revision" in second


@pytest.mark.usefixtures("cached")
def test_what_is_not_in_the_cache_is_told_with_its_revision(tmp_path: Path) -> None:
    done = hpcrl(
        "plan", str(QUICKSTART), f"trainer.policy.model.path={NAME}", "trainer.policy.model.revision=v3", cwd=tmp_path
    )
    assert f"policy: {NAME} (revision v3) is not on this machine" in done.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize("engine", ["vllm", "transformers"])
@pytest.mark.parametrize(
    "settings",
    [["trainer.strategy=fsdp2"], MEGATRON, ["trainer.policy.model.lora.rank=4"]],
    ids=["fsdp2", "megatron", "lora"],
)
def test_a_run_trains_generates_and_exports_a_revision(place: Path, engine: str, settings: list[str]) -> None:
    named = [
        f"trainer.policy.model.path={NAME}",
        f"trainer.policy.model.revision={TAGGED}",
        f"generator.inference_engine.backend={engine}",
    ]
    steps = [*SMALL, "trainer.max_steps=2", "trainer.hf_save_interval=2", "trainer.run_name=revision"]
    done = hpcrl("submit", str(QUICKSTART), "--local", *steps, *named, *settings, cwd=place)
    assert done.returncode == 0, done.stderr
    run = Run.open(place / "runs" / "quickstart" / "revision")
    assert finish(run, 1) == "done", logs_of(run)
    assert json.loads((run.export(2) / "config.json").read_text())["hidden_size"] == 64
    for written in run.export(2).rglob("adapter_config.json"):
        config = json.loads(written.read_text())
        assert (config["base_model_name_or_path"], config["revision"]) == (NAME, TAGGED)
    scored = hpcrl(
        "eval",
        "revision",
        "--checkpoint",
        "0",
        "--data",
        str(CONFIGS / "quickstart" / "data" / "validation.parquet"),
        cwd=place,
    )
    assert scored.returncode == 0, scored.stderr
