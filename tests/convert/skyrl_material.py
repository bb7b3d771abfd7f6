"""How conversions of SkyRL's files and command lines are looked at."""

from pathlib import Path

from hpcrl.config import Config
from hpcrl.convert.conversion import Conversion, Entry
from hpcrl.convert.skyrl.convert import convert_overrides

CRITIC = "trainer.critic.model.path=critic"


ALGORITHM = "trainer.algorithm."


CORRECTION = "trainer.algorithm.off_policy_correction."


ENGINE = "generator.inference_engine."


def command(*words: str) -> Conversion:
    return convert_overrides(words, "command")


def entries(conversion: Conversion, source: str) -> list[Entry]:
    return [entry for entry in conversion.entries if entry.source == source]


def kinds(conversion: Conversion, source: str) -> set[str]:
    return {entry.kind for entry in entries(conversion, source)} - {"unimplemented"}


def load(conversion: Conversion, folder: Path) -> Config:
    (folder / "converted.toml").write_text(conversion.to_toml())
    return Config.from_toml([folder / "converted.toml"])
