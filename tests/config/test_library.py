"""The configuration as a library: what docs/config/library.md shows is run as it stands there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import AlgorithmConfig, Config, GeneratorConfig, TrainerConfig, make_config
from hpcrl.config.fields import settings
from hpcrl.errors import ConfigError
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "config" / "library.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
EXPERIMENT = (
    '[data]\ntrain_data = ["t.parquet"]\n[trainer]\neval_interval = 0\n[trainer.policy.model]\npath = "org/model"\n'
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files that the page speaks of."""
    (tmp_path / "experiment.toml").write_text(EXPERIMENT)
    (tmp_path / "site.toml").write_text("[slurm]\ngpus_per_node = 8\n")
    (tmp_path / "my_package").mkdir()
    for name in ("my_package/my_config.py", "my_package/my_losses.py"):
        (tmp_path / name).write_text(next(text for _, text in BLOCKS if text.startswith(f"# {name}")))
    own = next(text for language, text in BLOCKS if language == "toml")
    (tmp_path / "own.toml").write_text(own + EXPERIMENT)
    return tmp_path


def python(folder: Path, code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_reading_building_and_changing(folder: Path) -> None:
    code = [text for language, text in BLOCKS if language == "python" and not text.startswith("# my_package")]
    assert len(code) == 2
    ends = (
        "assert Config.from_dict(config.to_dict()) == config\n"
        "from hpcrl.config.rules.combinations import impossible\nassert impossible(config) == []\n"
        "assert config.trainer.seed == 7\n"
        "import sys; assert 'torch' not in sys.modules\n"
    )
    python(folder, "\n".join([*code, ends]))


def test_own_settings_are_chosen_from_toml(folder: Path) -> None:
    code = (
        "from pathlib import Path; from hpcrl.config import Config; from hpcrl.docs.explain import explain\n"
        "config = Config.from_toml([Path('own.toml')], ['notes.author=you'])\n"
        "assert type(config).__name__ == 'MyConfig'\n"
        "assert (config.trainer.algorithm.surprise, config.notes.author) == (0.25, 'you')\n"
        "Path('again.toml').write_text(config.to_toml())\n"
        "assert Config.from_toml([Path('again.toml')]) == config\n"
        "print(explain('trainer.algorithm.surprise', type(config)))\n"
    )
    assert "Weight of the surprise in my loss." in python(folder, code)


def test_own_loss_has_its_setting(folder: Path) -> None:
    code = (
        "from pathlib import Path; from hpcrl.config import Config; from hpcrl.trainer.loss import build_policy_loss\n"
        "loss = 'trainer.algorithm.policy_loss_type=my_package.my_losses:surprised'\n"
        "config = Config.from_toml([Path('own.toml')], [loss])\n"
        "print(build_policy_loss(config.trainer.algorithm).keywords)\n"
    )
    assert python(folder, code) == "{'surprise': 0.25}\n"


REFUSED = {
    "notes.autor=you": "notes.autor: unknown setting; did you mean notes.author?",
    "trainer.algorithm.surprise=high": "trainer.algorithm.surprise: expected a number",
    "config_class=my_package.my_config:Notes": 'expected "package.module:Class" of a dataclass below',
    "config_class=my_package.nothing:C": "No module named",
    "+notes.more=1": "declare them in a subclass of hpcrl.config.Config",
}


def test_errors_of_own_settings(folder: Path) -> None:
    code = (
        "import contextlib, io, json; from hpcrl.cli.main import main\n"
        "found = {}\n"
        f"for override in {list(REFUSED)}:\n"
        "    with contextlib.redirect_stderr(io.StringIO()) as told:\n"
        "        code = main(['config', 'validate', 'own.toml', override])\n"
        "    found[override] = [code, told.getvalue()]\n"
        "print(json.dumps(found))\n"
    )
    found = json.loads(python(folder, code))
    for override, expected in REFUSED.items():
        assert found[override][0] == 2, found[override]
        assert expected in found[override][1]


def test_a_class_that_cannot_be_a_configuration_is_refused() -> None:
    class Undeclared(Config):
        mine: int = 1

    with pytest.raises(ConfigError, match=r"Undeclared: .* put @dataclass"):
        settings(Undeclared)
    with pytest.raises(ConfigError, match=r"Held\.where: TOML cannot hold a value of type .*Path"):
        settings(_held())


@pytest.mark.parametrize("default", [{}, {"default": True}])
def test_a_setting_does_not_hide_a_property(default: dict[str, bool]) -> None:
    offline: Any = field(**default)
    cls = make_dataclass("Trainer", [("offline", bool, offline)], bases=(TrainerConfig,), frozen=True, kw_only=True)
    with pytest.raises(ConfigError, match=r"Trainer\.offline: a property of this section has the name"):
        settings(cls)


def test_own_classes_stand_in_for_all_three_sections() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Algorithm(AlgorithmConfig):
        surprise: float = 0.5

    @dataclass(frozen=True, kw_only=True)
    class Trainer(TrainerConfig):
        epochs: int = 7

    @dataclass(frozen=True, kw_only=True)
    class Generator(GeneratorConfig):
        n_samples_per_prompt: int = 9

    own = make_config(algorithm_cls=Algorithm, trainer_cls=Trainer, generator_cls=Generator)
    config = own.from_dict(
        {"data.train_data": ["t"], "trainer.eval_interval": 0, "trainer.policy.model.path": "m", "trainer.seed": 1}
    )
    assert isinstance(config.trainer.algorithm, Algorithm)
    assert (config.trainer.epochs, config.generator.n_samples_per_prompt) == (7, 9)
    assert own.from_dict(config.to_dict()) == config
    assert "epochs" not in config.to_toml(only_changed=True)


def test_a_default_that_a_file_would_lose_is_refused() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Own(Config):
        generator: GeneratorConfig = field(default_factory=lambda: GeneratorConfig(n_samples_per_prompt=9))

    @dataclass(frozen=True, kw_only=True)
    class Optional(Config):
        mine: float | None = 3.0

    with pytest.raises(ConfigError, match=r"Optional\.mine: TOML has no None"):
        settings(Optional)
    with pytest.raises(ConfigError, match=r"Own\.generator: .* into a subclass of GeneratorConfig"):
        settings(Own)


def test_what_an_own_class_refuses_is_told_as_everything_else(tmp_path: Path) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Algorithm(AlgorithmConfig):
        surprise: float = 0.5

        def __post_init__(self) -> None:
            if self.surprise < 0:
                raise ValueError("surprise: expected at least 0")

    path = tmp_path / "experiment.toml"
    path.write_text(EXPERIMENT)
    own = make_config(algorithm_cls=Algorithm)
    assert own.from_toml([path]).trainer.seed == 42
    with pytest.raises(ConfigError, match=r"^override: trainer\.algorithm: surprise: expected at least 0$"):
        own.from_toml([path], ["trainer.algorithm.surprise=-1"])


@pytest.mark.parametrize(
    ("module", "told"),
    [
        ("import nowhere", "No module named 'nowhere'"),
        ("def (:", "SyntaxError"),
        ("from hpcrl.config import Config\nclass Other: pass", "see "),
        (
            "from dataclasses import dataclass\nfrom hpcrl.config import Config\n@dataclass\nclass Mine(Config):\n    a: int = 1",
            "TypeError: cannot inherit non-frozen dataclass",
        ),
    ],
)
def test_a_module_that_is_not_right_yet(tmp_path: Path, module: str, told: str) -> None:
    (tmp_path / "own.py").write_text(module)
    (tmp_path / "own.toml").write_text('config_class = "own:Mine"\npython_path = ["."]\n' + EXPERIMENT)
    words = [sys.executable, "-m", "hpcrl.cli.main", "config", "validate", "own.toml"]
    done = subprocess.run(words, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("hpcrl: own.toml:1: config_class: expected ")
    assert told in done.stderr


def _held() -> type:
    @dataclass(frozen=True, kw_only=True)
    class Held(make_config()):
        where: Path | None = None

    return Held


@pytest.mark.faults_slow
def test_a_generator_without_a_trainer() -> None:
    """Runs the page's program: a real engine samples from the quickstart's model."""
    program = [sys.executable, "docs/config/generate_alone.py", "configs/quickstart/model"]
    done = subprocess.run(program, cwd=ROOT, check=True, capture_output=True, text=True, timeout=300)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 4
    for word, reward, _, _, *text in lines:
        assert word == "reward"
        assert float(reward) == float(text == ["abcdg"])
