"""Which line of a file sets a setting."""

import pytest

from hpcrl.config.lines import line_of

TEXT = """\
# a = 1
top = 1  # say \"\"\" or ''' here
[trainer]
run_name = "a#b"
seed = 3
policy.model.path = '#x'
"quoted" . name = 1

[[list]]
x = 1
[slurm]
setup = [
    "seed = 5",
    "export A=b",
]
comment = \"\"\"
seed = 4
[data]
\"\"\"
extra = {nice = 1}
  [ data . "x" ]
\ty = 2
"""


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("a", None),
        ("top", 2),
        ("trainer", 3),
        ("trainer.run_name", 4),
        ("trainer.seed", 5),
        ("trainer.policy.model.path", 6),
        ("trainer.quoted.name", 7),
        ("trainer.epochs", 3),
        ("list.x", 10),
        ("slurm.setup", 12),
        ("slurm.export", 11),
        ("slurm.comment", 16),
        ("slurm.seed", 11),
        ("slurm.extra.nice", 20),
        ("data", None),
        ("data.x", 21),
        ("data.x.y", 22),
    ],
)
def test_line_of(path: str, line: int | None) -> None:
    assert line_of(TEXT, path) == line
