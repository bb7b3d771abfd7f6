"""Folders of a run that lie below other roots than slurm.root, on scratch or project space: checkpoints, exports, TensorBoard's events.

    <slurm.root>/<project>/<run>/checkpoints -> <slurm.checkpoint_root>/<project>/<run>/checkpoints
    <slurm.checkpoint_root>/<project>/<run>/run -> <slurm.root>/<project>/<run>

All readers and writers use the symbolic link of the run directory. A commit is staged, renamed, marked and deleted below the folder to which the
link leads, so on one filesystem. The folder is made at submit alone: where it is gone, an attempt does not begin.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.errors import DataError, RunError
from hpcrl.rundir.commit import children
from hpcrl.rundir.layout import OTHER_ROOTS, Run

if TYPE_CHECKING:
    from hpcrl.config.sections.slurm import SlurmConfig

_OWNER = "run"
_LOST = {
    "checkpoints": "Without its checkpoints the run cannot go on: bring them back, or submit a new run",
    "exports": "Bring them back; or make the folder again (mkdir -p), and exports by `hpcrl checkpoint export`",
    "tensorboard": "Bring it back; or make the folder again (mkdir -p), and its files by `hpcrl tensorboard --rebuild`",
}


def places_of(run: Run, slurm: SlurmConfig) -> dict[str, Path]:
    """Return which folders of a run lie below other roots, by the setting; a root that is slurm.root itself changes nothing."""
    own, roots = os.path.realpath(run.root), (slurm.checkpoint_root, slurm.export_root, slurm.tensorboard_root)
    return {
        name: Path(root) / run.project / run.name / OTHER_ROOTS[name]
        for name, root in zip(OTHER_ROOTS, roots, strict=True)
        if root and os.path.realpath(root) != own
    }


def make_folders(run: Run, staged: Run, slurm: SlurmConfig, made: list[Path]) -> None:
    """Make the folders of a run below other roots, and the links to them in its staged directory.

    Args:
        made: gets what a caller removes if it fails later.

    Raises:
        RunError: another run has such a folder.
    """
    places = places_of(run, slurm)
    for home in dict.fromkeys(place.parent for place in places.values()):
        home.parent.mkdir(parents=True, exist_ok=True)
        require_unused(home)
        home.mkdir(mode=0o700)
        made.append(home)
        (home / _OWNER).symlink_to(run.path)
    for place in places.values():
        place.mkdir()
        (staged.path / place.name).symlink_to(place)


def require_unused(home: Path) -> None:
    """Look whether the folder of a run below another root is there already.

    Raises:
        RunError: it is; the message names the run to which it belongs.
    """
    if os.path.lexists(home):
        owner = home / _OWNER
        whose = f"of the run {owner.readlink()}" if owner.is_symlink() else "which no run names as its own"
        raise RunError(
            f"{home} exists, {whose}; choose another trainer.run_name, or delete that folder if nobody needs what is in it"
        )


def lost_folders(run: Run) -> dict[Path, str]:
    """Return the folders below other roots that are not there or belong to another run: by the link, a sentence that says so."""
    found = {link: _lost(run, link, place) for link, place in run.elsewhere.items()}
    return {link: f"{link} leads to {found[link]}" for link in found if found[link]}


def _lost(run: Run, link: Path, place: Path) -> str:
    owner, host = place.parent / _OWNER, socket.gethostname()
    try:
        there = place.name in children(place.parent) and place.is_dir()
        whose = os.path.realpath(owner) if owner.is_symlink() else None
    except OSError as error:
        return f"{place}, which {host} cannot read: {error.strerror}"
    if not there:
        return (
            f"{place}, which is not there on {host}: its filesystem is not mounted, or it was deleted, as sites do on scratch. "
            f"{_LOST[link.name]}"
        )
    if whose not in (None, os.path.realpath(run.path)):
        return (
            f"{place}, which belongs to {whose}, and a copy of a run cannot go on beside it. If the run was moved: "
            f"ln -sfn {run.path} {owner}"
        )
    return ""


def own_homes(run: Run) -> list[Path]:
    """Return the folders below other roots that belong to a run and are there, by a link that this user has made."""
    return [home for home in _homes(run) if _is_own(run, home)]


def readable_homes(run: Run) -> list[Path]:
    """Return the folders below other roots that lead back to a run, of another user too, without those that this user may not see."""

    def leads_back(home: Path) -> bool:
        try:
            return _leads_back(run, home)
        except OSError:
            return False

    return list(filter(leads_back, _homes(run)))


def _homes(run: Run) -> list[Path]:
    return list(dict.fromkeys(place.parent for place in run.elsewhere.values()))


def _leads_back(run: Run, home: Path) -> bool:
    owner = home / _OWNER
    return owner.is_symlink() and os.path.realpath(owner) == os.path.realpath(run.path)


def _is_own(run: Run, home: Path) -> bool:
    """Return whether a folder leads back to a run by a link that this user has made: any link can lead from a run to a folder."""
    return _leads_back(run, home) and (home / _OWNER).lstat().st_uid == home.stat().st_uid == os.getuid()


def require_own(run: Run, *links: Path) -> None:
    """Look whether folders of a run may be deleted from: a link of a copied run may lead to anything of the user's.

    Raises:
        RunError: one is a link to a folder that does not lead back to the run.
    """
    for link in links:
        place = run.elsewhere.get(link)
        if place is not None and not _is_own(run, place.parent):
            raise RunError(
                f"{link} leads to {place}, which is not known to be of this run, so nothing there is deleted. If it is: "
                f"ln -sfn {run.path} {place.parent / _OWNER}"
            )


def require_folders(run: Run, *links: Path) -> None:
    """Look whether folders of a run that lie below other roots are there.

    Args:
        links: which ones; none: all.

    Raises:
        DataError: one is not.
    """
    if lost := [sentence for link, sentence in lost_folders(run).items() if link in links or not links]:
        raise DataError("; ".join(lost))


def run_of(checkpoint: Path) -> Run:
    """Return the run that has a checkpoint, also where that is named below another root."""
    home = checkpoint.parent.parent
    owner = home / _OWNER
    return Run(owner.readlink() if owner.is_symlink() else home)
