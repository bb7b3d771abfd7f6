"""`hpcrl upload`: copy exports and checkpoints to the hub or to S3, from any machine with a network and the run directory."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from hpcrl.cli._common import add_runs, each_run, positive
from hpcrl.text import printable

if TYPE_CHECKING:
    from pathlib import Path

    from hpcrl.config import Config
    from hpcrl.config.sections.upload import UploadConfig
    from hpcrl.rundir.layout import Run
    from hpcrl.upload.send import Uploader

_LOOK_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_runs(parser)
    parser.add_argument("--to", choices=("hf", "s3"), help="where to (default: what trainer.upload of the run names)")
    parser.add_argument(
        "--step",
        type=positive,
        metavar="N",
        help="the export of this step (default: as trainer.upload says, else the newest)",
    )
    parser.add_argument(
        "--checkpoints",
        action=argparse.BooleanOptionalAction,
        help="to S3, also checkpoints (default: trainer.upload.s3_checkpoints)",
    )
    parser.add_argument("--watch", action="store_true", help="go on until the run is over, and what is due is there")
    parser.add_argument("--repo", metavar="[OWNER/]NAME", help="in place of trainer.upload.hf_repo_name")
    parser.add_argument("--bucket", metavar="NAME", help="in place of trainer.upload.s3_bucket")
    parser.add_argument("--prefix", metavar="PREFIX", help="in place of trainer.upload.s3_prefix")
    parser.add_argument("--endpoint", metavar="URL", help="in place of trainer.upload.s3_endpoint or hf_endpoint")
    parser.set_defaults(action=_upload)


def _upload(arguments: argparse.Namespace) -> int:
    return each_run(arguments, lambda run: _upload_run(run, arguments))


def _upload_run(run: Run, arguments: argparse.Namespace) -> None:
    from hpcrl.config import Config
    from hpcrl.errors import RunError
    from hpcrl.upload.send import Uploader, stores_of
    from hpcrl.upload.store import Patience

    config = Config.from_toml([run.config])
    stores = [arguments.to] if arguments.to else stores_of(config.trainer.upload)
    if not stores:
        raise RunError(f"{run.name} names nowhere to upload to; give --to hf with --repo, or --to s3 with --bucket")
    _require_no_other(run, config, stores)
    upload = _asked(config, arguments)
    uploaders = [Uploader(run, store, upload, Patience(total_s=60.0)) for store in stores]
    try:
        if arguments.watch:
            _watch(run, uploaders)
        else:
            _send(run, uploaders, upload, arguments.step)
    except KeyboardInterrupt:
        raise RunError("interrupted; the same command goes on where this one ended") from None


def _asked(config: Config, arguments: argparse.Namespace) -> UploadConfig:
    from dataclasses import replace

    from hpcrl.config.errors import raise_together
    from hpcrl.config.rules.uploads import upload_names

    upload = config.trainer.upload
    given = {
        "hf_repo_name": arguments.repo,
        "s3_bucket": arguments.bucket,
        "s3_prefix": arguments.prefix,
        "s3_checkpoints": arguments.checkpoints if upload.s3 else bool(arguments.checkpoints),
        f"{arguments.to or 's3'}_endpoint": arguments.endpoint,
    }
    upload = replace(upload, **{name: value for name, value in given.items() if value is not None})
    raise_together(list(upload_names(upload)), lambda _: None)
    return upload


def _require_no_other(run: Run, config: Config, stores: list[str]) -> None:
    """Refuse where an attempt that goes on uploads to the same store, because that would be sent twice."""
    from hpcrl.errors import RunError
    from hpcrl.launch.manage.registry import states_of
    from hpcrl.upload.send import stores_of

    both = {*stores} & {*stores_of(config.trainer.upload)}
    if both and config.slurm.upload.by == "run" and not states_of([run])[0].over:
        raise RunError(
            f"{run.name} is not over, and uploads to {' and '.join(sorted(both))} itself; `hpcrl status {run.name}` says how far it is"
        )


def _send(run: Run, uploaders: list[Uploader], upload: UploadConfig, step: int | None) -> None:
    """Send what is asked for once, whatever is known of earlier uploads; the store is compared with the files."""
    from hpcrl.errors import HpcrlError, RunError

    failures = list[HpcrlError]()
    for uploader in uploaders:
        paths = _chosen(run, uploader.name, upload, step)
        if not paths:
            which = f"no export of step {step}" if step else "no exports"
            raise RunError(f"{run.name} has {which}; `hpcrl checkpoint export {run.name}` makes one of a checkpoint")
        for path in paths:
            try:
                print(uploader.send(path), flush=True)
            except HpcrlError as error:
                failures.append(error)
            except OSError as error:
                failures.append(RunError(f"{error.filename or path} cannot be read: {error.strerror}"))
    for failure in failures[1:]:
        print(f"hpcrl: {printable(str(failure))}", file=sys.stderr)
    if failures:
        raise failures[0]


def _chosen(run: Run, store: str, upload: UploadConfig, step: int | None) -> list[Path]:
    from hpcrl.rundir.commit import is_committed
    from hpcrl.upload.send import wanted

    if step is None:
        return wanted(run, store, upload, done=True)
    paths = [run.export(step), *([run.checkpoint(step)] if store == "s3" and upload.s3_checkpoints else [])]
    return [path for path in paths if is_committed(path)]


def _watch(run: Run, uploaders: list[Uploader]) -> None:
    from hpcrl.errors import RunError
    from hpcrl.launch.manage.poll import RunPoller
    from hpcrl.launch.manage.registry import known_states
    from hpcrl.upload.send import follow

    poller = RunPoller([run], known_states)
    follow(run, uploaders, _until(poller.over))
    failed = [f"{one.name}: {name}: {why}" for one in uploaders for name, why in one.failed.items()]
    if failed:
        raise RunError("\n".join(failed))


def _until(over: Callable[[], bool]) -> Callable[[], bool]:
    def more() -> bool:
        if over():
            return False
        time.sleep(_LOOK_S)
        return True

    return more
