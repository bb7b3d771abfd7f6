"""Names, before submission, images of sandboxes that the root of runs lacks: their samples would fail behind the queue."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from hpcrl.config import Config
from hpcrl.data.datasets import row_reader
from hpcrl.data.sources import Source
from hpcrl.envs.registry import environment_class, is_agent
from hpcrl.envs.tasks.sandbox import SandboxEnvironment
from hpcrl.errors import did_you_mean
from hpcrl.launch.submit.truths import spread
from hpcrl.rundir.layout import root_of
from hpcrl.sandboxes.images import ImageStore
from hpcrl.types import Kind

_ROWS, _READ_S, _MOST_SHOWN = 1000, 5.0, 5
_named = dict[str, list[str]]()


def missing_of_network(config: Config) -> Iterator[str]:
    """Yield a warning where slurm.sandboxes.network names images that are not there."""
    if config.sandbox_servers:
        yield from _warning("slurm.sandboxes.network", config, config.slurm.sandboxes.network)


def missing_of_rows(setting: str, source: Source, kinds: Sequence[Kind], config: Config, changed: int) -> Iterator[str]:
    """Yield a warning where rows of a file name images that are not there: of up to `_ROWS` rows, evenly spaced.

    Args:
        setting: that names the file.
        kinds: what the rows serve.
        changed: when the file was. Elements of a sweep mostly have the same files, each of which is read once.

    Raises:
        DataError: a row cannot be read.
    """
    if not config.sandbox_servers:
        return
    asked = source, kinds, config.data, config.environment, config.generator.max_turns
    if (key := repr((changed, asked))) not in _named:
        read = row_reader(*asked)
        prompts = (read(row, number) for number, row in spread(source.rows(), _ROWS, _READ_S))
        found = (prompt.extras.get("image") for prompt in prompts if _has_sandbox(prompt.env_class))
        _named[key] = [name for name in found if isinstance(name, str)]
    yield from _warning(f"{setting}: {source.location}", config, _named[key])


def _has_sandbox(env_class: str) -> bool:
    found = environment_class(env_class)
    return found is SandboxEnvironment or is_agent(found)


def _warning(subject: str, config: Config, named: Iterable[str]) -> Iterator[str]:
    root = root_of(config.slurm.root)
    there, wanted = ImageStore(root).names(), dict.fromkeys(named)
    if missing := [name for name in wanted if name not in there]:
        shown = ", ".join(missing[:_MOST_SHOWN]) + (", …" if len(missing) > _MOST_SHOWN else "")
        yield (
            f"{subject} has images that {root} lacks: {shown}{did_you_mean(missing[0], there)}; "
            f"what needs one fails until `hpcrl image add NAME SOURCE --root {root}` has stored it"
        )
