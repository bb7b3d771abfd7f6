"""Exports of released models in transformers 4, and in transformers 5 to the end of an answer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from hpcrl.config import FSDPConfig, MixedPrecisionConfig, ModelConfig, PolicyConfig, TrainerConfig
from hpcrl.config.sections.generator import ChatTemplateConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.data.exported_files import exported_files
from hpcrl.data.tokenizer import read_tokenizer
from hpcrl.rundir.layout import Run
from hpcrl.trainer.backends.fsdp.engine import FsdpPolicy
from hpcrl.trainer.distributed import World
from hpcrl.trainer.models.build import policy_source
from hpcrl.trainer.models.hf import export_config
from hpcrl.trainer.saving.publish import Publisher
from tests.paths import CONFIGS, ROOT
from tests.trainer.families.models import FAMILIES, write_model

pytestmark = pytest.mark.released

FOLDER = Path(os.environ.get("HPCRL_RELEASED", ROOT / ".released"))
SMOLLM2 = Path(os.environ.get("HPCRL_SMOLLM2", CONFIGS / "recipes" / "smollm2" / "model"))
PACKAGES_4 = os.environ.get("HPCRL_TRANSFORMERS_4")
"""A folder with the packages of transformers 4, before those of this Python."""
TEXT = "  Größe naïve 日本語 👩‍👩‍👧\n\n\tdef f(x): return {'a': 1234}  <|im_end|></s>"
NOT_IN_4 = {"granitemoehybrid", "lfm2_moe", "mamba2", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "zamba", "zamba2"}  # fmt: skip
"""Kinds that transformers 4 lacks, or of which it cannot load what transformers 5 saved."""

_NOTHING: dict[str, Any] = {"models": {}, "ids": [], "tokenizers": {}, "text": ""}

needs_4 = pytest.mark.skipif(PACKAGES_4 is None, reason="HPCRL_TRANSFORMERS_4 names no folder with transformers 4")


def in_transformers_4(**asked: Any) -> dict[str, Any]:
    assert PACKAGES_4 is not None
    script, text = Path(__file__).with_name("in_transformers_4.py"), json.dumps(_NOTHING | asked)
    environment = os.environ | {"PYTHONPATH": PACKAGES_4}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environment, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["version"].startswith("4."), found["version"]
    return found


def logprobs_of(folder: Path, ids: list[int]) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, torch.tensor(ids)[1:, None])[:, 0].tolist()


@needs_4
def test_transformers_4_computes_with_an_export_of_each_family(tmp_path: Path) -> None:
    """Of models that transformers 5 saved, with other bases of rotary positions than the defaults."""
    ids, folders = list(range(2, 30)), dict[str, Path]()
    for family in FAMILIES:
        if family.kind in NOT_IN_4:
            continue
        model, folder = write_model(family, tmp_path / family.kind), tmp_path / f"{family.kind}-export"
        entries = json.loads((model / "config.json").read_text())
        positions = entries.get("rope_parameters") or {}
        for one in [positions] if "rope_theta" in positions else positions.values():
            one["rope_theta"] *= 1.7
        (model / "config.json").write_text(json.dumps(entries))
        folder.mkdir()
        shutil.copyfile(model / "model.safetensors", folder / "model.safetensors")
        source = policy_source(TrainerConfig(policy=PolicyConfig(model=ModelConfig(path=str(model)))))
        export_config(source, folder, torch.float32)
        folders[family.kind] = folder
    found = in_transformers_4(models={kind: str(folder) for kind, folder in folders.items()}, ids=ids)["models"]
    for kind, folder in folders.items():
        assert found[kind] == pytest.approx(logprobs_of(folder, ids), abs=1e-4), kind
    assert len(folders) > 30


@needs_4
def test_a_released_tokenizer_of_an_export_gives_its_own_ids(tmp_path: Path) -> None:
    """As published, and as transformers 5 saved it; beside a config.json with which transformers 5 takes another class too."""
    kinds = {
        "deepseek_v3": "qwen3", "gemma3": "gemma3_text", "gptoss": "gpt_oss", "llama2": "llama", "llama3": "llama",
        "llama3_1": "llama", "mistral_nemo": "mistral", "qwen3": "qwen3",
    }  # fmt: skip
    folders, expected = dict[str, Path](), dict[str, list[int]]()
    for name, kind in kinds.items():
        published = Path(shutil.copytree(FOLDER / name, tmp_path / name))
        saved = tmp_path / f"{name}-saved"
        read_tokenizer(str(published)).save_pretrained(saved)
        for model in (published, saved):
            (model / "config.json").write_text(json.dumps({"model_type": kind}))
            own = Tokenizer.from_file(str(model / "tokenizer.json"))
            expected[model.name] = own.encode(TEXT, add_special_tokens=False).ids
            folders[model.name] = model.with_name(f"{model.name}-export")
            folders[model.name].mkdir()
            shutil.copyfile(model / "config.json", folders[model.name] / "config.json")
            for file, content in exported_files(Pretrained(str(model)), None, None).items():
                (folders[model.name] / file).write_bytes(content)
            tokenizer = AutoTokenizer.from_pretrained(folders[model.name])
            assert tokenizer.encode(TEXT, add_special_tokens=False) == expected[model.name], model.name
    found = in_transformers_4(tokenizers={name: str(folder) for name, folder in folders.items()}, text=TEXT)[
        "tokenizers"
    ]
    assert found == expected


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory, alone: World) -> Path:
    """SmolLM2, as a run exports it."""
    precision = FSDPConfig(mixed_precision=MixedPrecisionConfig(param_dtype="fp32"))
    policy = PolicyConfig(model=ModelConfig(path=str(SMOLLM2)), fsdp_config=precision)
    engine = FsdpPolicy(TrainerConfig(policy=policy), 1.0, alone)
    run = Run(tmp_path_factory.mktemp("exports") / "run")
    publisher = Publisher(run, 0, alone, torch.bfloat16, 1, engines=False)
    return publisher.export(engine, 1, Pretrained(str(SMOLLM2)), ChatTemplateConfig())


def test_an_export_of_smollm2_has_its_files_and_ends_its_answers(export: Path) -> None:
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (export / name).read_bytes() == (SMOLLM2 / name).read_bytes(), name
    own, entries = (json.loads((folder / "config.json").read_text()) for folder in (SMOLLM2, export))
    assert entries == own | {"rope_theta": own["rope_parameters"]["rope_theta"], "rope_scaling": None}
    tokenizer, model = AutoTokenizer.from_pretrained(export), AutoModelForCausalLM.from_pretrained(export)
    assert model.dtype == torch.float32, "the model's own, not the engine's"
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 7+5? Answer with one number."}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    said = model.generate(**prompt, max_new_tokens=40, do_sample=False)[0, prompt["input_ids"].shape[1] :].tolist()
    assert said[-1] == end
    assert tokenizer.decode(said[:-1]) == "7 + 5 = 12."


@needs_4
def test_transformers_4_computes_with_an_export_of_smollm2(export: Path) -> None:
    ids = Tokenizer.from_file(str(SMOLLM2 / "tokenizer.json")).encode(TEXT * 5).ids
    found = in_transformers_4(models={"smollm2": str(export)}, ids=ids)["models"]["smollm2"]
    assert found == pytest.approx(logprobs_of(export, ids), abs=1e-3)
