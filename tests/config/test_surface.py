"""The settings as a whole: every one is documented, every file in configs/ loads, nothing heavy is imported."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcrl.config import Config
from hpcrl.config.check import _AT_LEAST
from hpcrl.config.describe import meanings, replace_table
from hpcrl.config.surface import settings

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").rglob("*.toml"))
SITES = sorted((ROOT / "slurm" / "sites").glob("*.toml"))


def test_the_table_in_the_docs_is_current() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert replace_table(page) == page, "run: python -m hpcrl.config.describe docs/configuration.md"


def test_every_setting_says_what_it_means() -> None:
    for setting in settings(Config):
        if not setting.is_section:
            assert meanings(setting.section).get(setting.name), setting.path


def test_limits_are_of_settings_that_exist() -> None:
    assert set(_AT_LEAST) <= {setting.path for setting in settings(Config)}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_experiment_loads(path: Path) -> None:
    config = Config.from_toml([path])
    assert Config.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("site", SITES, ids=lambda path: path.stem)
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_experiment_loads_with_every_site(path: Path, site: Path) -> None:
    Config.from_toml([path, site])


def test_loading_needs_no_torch_and_little_time(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[data]\ntrain_data=["t"]\nval_data=["v"]\n[trainer.policy.model]\npath="m"\n')
    code = (
        "import sys; from pathlib import Path; from hpcrl.config import Config\n"
        f"Config.from_toml([Path({str(file)!r})]).to_toml()\n"
        "heavy = {'torch', 'transformers', 'vllm', 'numpy', 'rich', 'submitit', 'httpx'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True)
    assert time.monotonic() - start < 2.0  # about 0.2 s on an idle core
