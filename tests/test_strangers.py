"""What files of a stranger may do: a model, adapters, a dataset, a chat template and a run execute no code (docs/security.md).

Checkpoints: tests/rundir/test_checkpoint_index.py and tests/trainer/saving/test_strangers.py.
"""

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
from safetensors.torch import load_file

from hpcrl.cli.main import main
from hpcrl.config import Config
from hpcrl.config.sections.model import LoraConfig
from hpcrl.data.sources import Source
from hpcrl.data.tokenize import Recipe, tokenized
from hpcrl.errors import DataError
from hpcrl.rundir.commit import begin, finish, write_text
from hpcrl.rundir.layout import Run
from hpcrl.trainer.models.hf import ModelSource
from hpcrl.trainer.models.lora import ADAPTER_FILE, add_adapters
from tests.data.chat.forms import made as make_tokenizer
from tests.trainer.launcher import environment

LOAD = """
import sys, torch
from hpcrl.config.sections.generator import ChatTemplateConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.data.tokenizer import load_tokenizer
from hpcrl.errors import DataError
from hpcrl.trainer.models.hf import ModelSource
path = sys.argv[1]
model = ModelSource(path=path, role="trainer.policy")
loads = {
    "config": model.config, "empty": lambda: model.empty(torch.float32, "eager"), "whole": lambda: model.whole(torch.float32, "eager"),
    "tokenizer": lambda: load_tokenizer(Pretrained(path), ChatTemplateConfig()),
}
for name, load in loads.items():
    try:
        load()
        print(name, "loaded")
    except DataError as error:
        print(name, "refused:", str(error).replace("\\n", " "))
"""
MODEL_CODE = {"AutoConfig": "theirs.Theirs", "AutoModelForCausalLM": "theirs.Theirs"}
TOKENIZER_CODE = {"auto_map": {"AutoTokenizer": ["theirs.Theirs", None]}, "tokenizer_class": "Theirs"}


class Runs:
    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._marker}",)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """The file that the stranger's code would make."""
    return tmp_path / "ran"


@pytest.fixture
def theirs(model_path: Path, tmp_path: Path, marker: Path) -> Path:
    """A model with a module of its own."""
    shutil.copytree(model_path, tmp_path / "theirs")
    write_module(tmp_path / "theirs", marker)
    return tmp_path / "theirs"


def write_module(folder: Path, marker: Path) -> None:
    (folder / "theirs.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Theirs:\n    pass\n")


def change(path: Path, entries: dict[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


@pytest.mark.parametrize(
    ("file", "entries", "refused"),
    [
        ("config.json", {"auto_map": MODEL_CODE}, []),
        ("config.json", {"auto_map": MODEL_CODE, "model_type": "theirs"}, ["config", "empty", "whole"]),
        ("config.json", {"auto_map": MODEL_CODE, "model_type": "clip_text_model"}, ["empty", "whole"]),
        ("tokenizer_config.json", TOKENIZER_CODE, []),
    ],
)
def test_code_of_a_model_does_not_run(
    theirs: Path, marker: Path, file: str, entries: dict[str, Any], refused: list[str]
) -> None:
    """Nor is a person asked, who might answer yes."""
    change(theirs / file, entries)
    variables = environment() | {"HF_MODULES_CACHE": str(theirs.parent / "modules")}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(theirs)],
        env=variables,
        input="y\n" * 9,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert not marker.exists()
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    found = [line.partition(" ")[0] for line in lines if "refused: model" in line and str(theirs) in line]
    assert found == refused, done.stdout
    assert [line for line in lines if " loaded" not in line and line.partition(" ")[0] not in refused] in (
        [],
        lines[3:],
    )


def test_weights_that_are_a_pickle_run_no_code(theirs: Path, marker: Path) -> None:
    weights = load_file(theirs / "model.safetensors")
    (theirs / "model.safetensors").unlink()
    torch.save(weights, theirs / "pytorch_model.bin")
    source = ModelSource(path=str(theirs), role="trainer.policy")
    source.whole(torch.float32, "eager")
    torch.save(weights | {"more": Runs(marker)}, theirs / "pytorch_model.bin")
    with pytest.raises(
        DataError, match=rf"model '{theirs}' cannot be loaded: .* are a pickle that names more than tensors"
    ):
        source.whole(torch.float32, "eager")
    assert not marker.exists()


def test_adapters_that_are_a_pickle_are_not_read(model_path: Path, tmp_path: Path, marker: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2}))
    torch.save({"more": Runs(marker)}, tmp_path / "adapter_model.bin")
    lora = LoraConfig(rank=2, adapter_path=str(tmp_path))
    for _ in ("nothing else", "under the name of safetensors"):
        model = ModelSource(path=str(model_path), role="trainer.policy").whole(torch.float32, "eager")
        with pytest.raises(DataError, match=rf"adapter_path: {tmp_path} has no adapters that PEFT reads"):
            add_adapters(model, lora, "trainer.policy", torch.float32, 0)
        shutil.copy(tmp_path / "adapter_model.bin", tmp_path / ADAPTER_FILE)
    assert not marker.exists()


def test_the_front_matter_of_a_dataset_makes_no_objects(tmp_path: Path, marker: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}\n")
    (tmp_path / "README.md").write_text(f"---\nconfigs: !!python/object/apply:os.system ['touch {marker}']\n---\n")
    (tmp_path / "rows.py").write_text(f"open({str(marker)!r}, 'w')")
    with pytest.raises(DataError, match=rf"the front matter of {tmp_path}/README.md is no YAML"):
        list(Source(str(tmp_path)).rows())
    assert not marker.exists()


@pytest.mark.parametrize(
    "template",
    [
        "{{{{ cycler.__init__.__globals__.os.system('touch {}') }}}}",
        "{{{{ ''.__class__.__mro__[1].__subclasses__() }}}}{{{{ '{}' }}}}",
        "{{{{ lipsum.__globals__['os'].system('touch {}') }}}}",
        "{{% set f = '{{0.__class__}}'.format %}}{{{{ f(messages).nothing() }}}}{{{{ '{}' }}}}",
    ],
)
def test_a_chat_template_reaches_nothing_of_python(tmp_path: Path, marker: Path, template: str) -> None:
    from tests.trainer.material import write_model

    tokenizer = make_tokenizer("bytes", template.format(marker), "<|im_end|>")
    model = write_model(tmp_path / "model")
    tokenizer.save_pretrained(model)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        json.dumps({"conversations": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}) + "\n"
    )
    config = Config.from_dict(
        {
            "data": {"train_data": [str(rows)]},
            "trainer": {"mode": "sft", "max_length": 64, "policy": {"model": {"path": str(model)}}, "eval_interval": 0},
        }
    )
    with pytest.raises(DataError, match="row 0: the chat template refuses its messages"):
        list(tokenized(Source(str(rows)), Recipe.of(config)))
    assert not marker.exists()


@pytest.mark.parametrize(
    "command",
    ["status", "samples", "checkpoint ls", "checkpoint verify", "verify", "trace", "report", "logs", "config show"],
)
def test_commands_that_look_at_a_run_import_nothing_of_it(
    theirs: Path, marker: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither modules that its settings name, though they can be found, nor what lies in its folder."""
    run = Run(theirs.parent / "runs" / "p" / "run")
    config = {
        "data": {"train_data": ["t.jsonl"]},
        "trainer": {"policy": {"model": {"path": str(theirs)}}, "eval_interval": 0},
        "environment": {"env_class": "theirs:Theirs"},
        "generator": {"chat_template": {"source": "file", "name_or_path": str(theirs / "template.jinja")}},
    }
    (theirs / "template.jinja").write_text("{{ cycler.__init__.__globals__.os.system('touch " + str(marker) + "') }}")
    write_text(run.config, Config.from_dict(config).to_toml())
    begin(run.checkpoint(1), 1)
    finish(run.checkpoint(1), 1, step=1)
    for folder in (run.path, run.path.parent):
        write_module(folder, marker)
        (folder / "sitecustomize.py").write_text((folder / "theirs.py").read_text())
    monkeypatch.syspath_prepend(str(theirs))
    monkeypatch.chdir(run.path)
    name = str(run.config) if command == "config show" else str(run.path)
    main([*command.split(), name])
    assert not marker.exists()
    assert "theirs" not in sys.modules
