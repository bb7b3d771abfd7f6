"""The table of docs/models.md: what hpcrl does with which models, tried with a tiny random model of each.

python -m tests.trainer.families.table        writes it
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from tests.paths import ROOT
from tests.trainer.families.features import FEATURES, Feature, works
from tests.trainer.families.models import FAMILIES, Family

PAGE = ROOT / "docs" / "models.md"
_BEGIN, _END = "<!-- table: python -m tests.trainer.families.table -->\n", "<!-- end of the table -->"
_HEADER = ["model", "`model_type`", "what it has", *(feature.name for feature in FEATURES)]
_ANSWERS = {True: "yes", False: "no"}


def row(family: Family, answers: dict[str, bool]) -> str:
    """Return the line of a family.

    Args:
        answers: name of a feature -> whether hpcrl does it.
    """
    cells = [family.name, f"`{family.kind}`", family.tells, *(_ANSWERS[answers[feature.name]] for feature in FEATURES)]
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def header() -> str:
    return f"| {' | '.join(_HEADER)} |\n|{'---|' * len(_HEADER)}\n"


def rows_of(page: str) -> dict[str, str]:
    """Return the lines of the table by model_type."""
    _, _, rest = page.partition(_BEGIN + header())
    lines = rest.partition(_END)[0].splitlines()
    return {line.split("|")[2].strip(" `"): line for line in lines}


def promised(line: str, feature: Feature) -> bool:
    """Return whether a line of the table says that hpcrl does it."""
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    return {answer: value for value, answer in _ANSWERS.items()}[cells[_HEADER.index(feature.name)]]


def main() -> None:
    torch.set_num_threads(1)  # tiny models are slower with more
    lines = []
    for family in FAMILIES:
        answers = {}
        for feature in FEATURES:
            with tempfile.TemporaryDirectory() as folder:
                answers[feature.name] = works(family, feature, Path(folder))
        lines.append(row(family, answers) + "\n")
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    PAGE.write_text(before + _BEGIN + header() + "".join(lines) + _END + rest.partition(_END)[2])


if __name__ == "__main__":
    main()
