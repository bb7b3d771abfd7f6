"""Environments that the program of a SkyRL script registers become environment.names; the program is read, never run."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.config import Config
from hpcrl.convert.conversion import Conversion
from hpcrl.convert.skyrl.convert import convert_script
from hpcrl.errors import ConfigError
from tests.convert.skyrl_material import load

IMPORTS = """
import sys

import ray
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp, validate_cfg
from skyrl.train.utils import initialize_ray
from skyrl_gym.envs import register
"""
REGISTERED = 'register(id="calc", entry_point="calc_env.env:Calc")'
MAIN = """
@ray.remote(num_cpus=1)
def train(cfg: SkyRLTrainConfig):
    {registered}
    exp = BasePPOExp(cfg)
    exp.run()


def main() -> None:
    cfg = SkyRLTrainConfig.from_cli_overrides(sys.argv[1:])
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(train.remote(cfg))


if __name__ == "__main__":
    main()
"""
COMMAND = "uv run -m calc_env.main_calc data.train_data=['t'] trainer.eval_interval=0 environment.env_class=calc\n"


def converted(
    folder: Path, program: str, command: str = COMMAND, place: str = "calc_env/main_calc.py"
) -> tuple[Conversion, Path]:
    path = folder / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(program)
    return convert_script(command, str(folder / "run.sh")), path


def conflicts(conversion: Conversion) -> dict[str, str]:
    return {entry.source: entry.message for entry in conversion.entries if entry.kind == "conflict"}


@pytest.mark.parametrize(
    ("command", "place"),
    [
        (COMMAND, "calc_env/main_calc.py"),
        (COMMAND, "main_calc.py"),
        (COMMAND.replace("-m calc_env.main_calc", "python calc_env/main_calc.py"), "calc_env/main_calc.py"),
    ],
)
def test_a_program_that_only_registers_is_converted_whole(tmp_path: Path, command: str, place: str) -> None:
    conversion, path = converted(tmp_path, IMPORTS + MAIN.format(registered=REGISTERED), command, place)
    assert conflicts(conversion) == {}
    environment = load(conversion, tmp_path).environment
    assert (environment.env_class, environment.names) == ("calc", {"calc": "calc_env.env:Calc"})
    assert f"registered in {path}: calc; python_path" in conversion.to_toml().replace("\n#" + " " * 15, " ")


@pytest.mark.parametrize(
    "statement",
    [
        "import skyrl_gym\nskyrl_gym.register('calc', 'calc_env.env:Calc')",
        "import skyrl_gym.envs\nskyrl_gym.envs.register('calc', entry_point='calc_env.env:Calc')",
        "import skyrl_gym.envs as gym\ngym.register(entry_point='calc_env.env:Calc', id='calc')",
        "from skyrl_gym.envs.registration import register as add\nadd(id='calc', entry_point='calc_env.env:Calc')",
    ],
)
def test_register_is_found_however_it_is_imported(tmp_path: Path, statement: str) -> None:
    conversion, _ = converted(tmp_path, statement)
    assert conversion.values["environment.names"] == {"calc": "calc_env.env:Calc"}
    assert not conflicts(conversion)


@pytest.mark.parametrize(
    "further",
    [
        "cfg.trainer.epochs = 3",
        "import my_losses",
        "from . import my_losses",
        "from skyrl.train.other import OtherExp as BasePPOExp",
        "class Mine(BasePPOExp):\n    pass",
        "@PolicyLossRegistry.register\ndef loss():\n    pass",
        "PolicyLossRegistry.register('mine', loss)",
        "replace_generator()",
    ],
)
def test_a_program_that_may_do_more_stays_a_conflict(tmp_path: Path, further: str) -> None:
    conversion, _ = converted(tmp_path, IMPORTS + further + "\n" + MAIN.format(registered=REGISTERED))
    assert conversion.values["environment.names"] == {"calc": "calc_env.env:Calc"}
    assert "a program of its own" in conflicts(conversion)["calc_env.main_calc"]
    with pytest.raises(ConfigError, match="a program of its own"):
        load(conversion, tmp_path)


@pytest.mark.parametrize(
    "registered",
    [
        'register(id=NAME, entry_point="calc_env.env:Calc")',
        'register(id="calc", entry_point=Calc)',
        'register(id="calc", entry_point="calc_env.env.Calc")',
        'register(id="calc", entry_point="calc_env.env:Calc", kwargs={"hint": "no"})',
        "register(**calc)",
    ],
)
def test_what_cannot_be_read_is_a_conflict_with_its_line(tmp_path: Path, registered: str) -> None:
    program = f"{IMPORTS}register(id='other', entry_point='others:Other')\n{registered}\n"
    conversion, path = converted(tmp_path, program)
    assert conversion.values["environment.names"] == {"other": "others:Other"}
    assert "write it in environment.names" in conflicts(conversion)[f"{path}:10"]


def test_the_register_of_other_packages_is_none(tmp_path: Path) -> None:
    program = f"import atexit\nfrom gymnasium import register\natexit.register(print)\n{REGISTERED}\n"
    for text in (program, "register(", ""):
        conversion, _ = converted(tmp_path, text)
        assert "environment.names" not in conversion.values
        assert "a program of its own" in conflicts(conversion)["calc_env.main_calc"]


def test_a_name_of_hpcrls_own_is_refused(tmp_path: Path) -> None:
    registered = REGISTERED.replace('"calc"', '"countdown"')
    conversion, _ = converted(tmp_path, IMPORTS + MAIN.format(registered=registered))
    assert "countdown" in conflicts(conversion)["environment.names"]
    with pytest.raises(ConfigError, match=r'environment\.names: "countdown" is an environment of hpcrl'):
        Config.from_toml([_written(conversion, tmp_path)])


def _written(conversion: Conversion, folder: Path) -> Path:
    path = folder / "converted.toml"
    path.write_text(conversion.to_toml())
    return path
