"""What can be known to fail before anything is queued: files that a run needs."""

from __future__ import annotations

from pathlib import Path

from hpcrl.config import Config
from hpcrl.errors import DataError
from hpcrl.run.commit import is_committed
from hpcrl.run.layout import step_of


def _is_local(path: str) -> bool:
    return path.startswith(("/", "~", ".")) or Path(path).exists()


def check_files(config: Config) -> None:
    """Look at every file that the configuration names.

    Raises:
        DataError: lists everything that is missing.
    """
    problems = []
    for name, sources in (("data.train_data", config.data.train_data), ("data.val_data", config.data.val_data)):
        for source in sources:
            if not Path(source).expanduser().is_file():
                problems.append(f"{name}: no file {source}")
    models = {
        "trainer.policy.model.path": config.trainer.policy.model.path,
        "trainer.ref.model.path": config.trainer.ref.model.path,
    }
    for name, path in models.items():
        if path and _is_local(path) and not (Path(path).expanduser() / "config.json").is_file():
            problems.append(f"{name}: {path} is no model directory (it has no config.json)")
    resume = config.trainer.resume_path
    if (
        config.trainer.resume_mode == "from_path"
        and resume
        and not (is_committed(Path(resume)) and step_of(Path(resume)))
    ):
        problems.append(
            f"trainer.resume_path: {resume} is no committed checkpoint; expected <run>/checkpoints/sNNNNNN with a COMMIT file"
        )
    if problems:
        raise DataError("\n".join(problems))
