"""Compares the memory that the ranks of layouts need, by the estimate, with that of their devices.

python -m hpcrl.planning.layouts < CONFIGS > PROBLEMS     both JSON lists, of TOML texts and of texts
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.config import Config
from hpcrl.errors import ConfigError, DataError, RunError
from hpcrl.launch.submit.models import folder_of
from hpcrl.units import readable_size

if TYPE_CHECKING:
    from hpcrl.planning.memory import Shapes


def memory_problems(configs: Sequence[Config]) -> list[str]:
    """Return for each layout of a run why it cannot work, or an empty text; also where models, torch or the memory are not known here."""
    models = configs[0].trainer.models.values() if configs else ()
    if not (models and all(map(folder_of, models)) and find_spec("torch") and find_spec("transformers")):
        return [""] * len(configs)
    from hpcrl.planning.family import plan_family
    from hpcrl.planning.shapes import model_shapes

    try:
        if plan_family(configs[0]).describe_policy(configs[0]) is not None:
            return [""] * len(configs)
        shapes = model_shapes(configs[0].trainer, folder_of)
        return [next(_missing(config, shapes), "") for config in configs]
    except (ImportError, ConfigError, DataError, RunError):  # `hpcrl plan` names it
        return [""] * len(configs)


def memory_problems_apart(configs: Sequence[Config]) -> list[str]:
    """Return `memory_problems` from a process of its own: one that has read a tokenizer has transformers without torch.

    Where that process fails, no layout counts as too large, and the standard error says so. Runs of a sweep that differ by their seed share one
    process.
    """
    return _problems_apart(json.dumps([config.with_overrides(["trainer.seed=0"]).to_toml() for config in configs]))


@cache
def _problems_apart(texts: str) -> list[str]:
    command = [sys.executable, "-m", "hpcrl.planning.layouts"]
    # Ctrl-C is for this process, which then ends that one
    done = subprocess.run(command, input=texts, stdout=subprocess.PIPE, text=True, start_new_session=True)
    count = len(json.loads(texts))
    try:
        problems = json.loads(done.stdout)
        if done.returncode == 0 and len(problems) == count:
            return problems
    except ValueError:  # a module of config_class may write past sys.stdout
        pass
    shown = f"exit status {done.returncode}, output {done.stdout[-200:]!r}"
    print(f"hpcrl: whether ranks have enough memory was not checked: {shown}", file=sys.stderr)
    return [""] * count


def _missing(config: Config, models: Mapping[str, Shapes]) -> Iterator[str]:
    from hpcrl.planning.colocation import leased_memory
    from hpcrl.planning.devices import memory_of_rank
    from hpcrl.planning.estimate import estimate, estimate_critic

    found, critic = estimate(config, models), estimate_critic(config, models)
    device, source = memory_of_rank(config)
    needs: list[tuple[str, float, float | None, str]] = [("a rank", found.total, device, source)]
    if device is not None and config.shared_gpus:
        turns = leased_memory(config, found, device)
        needs = [("a GPU in turns", turn.trainer + turn.engine, device, source) for turn in turns]
    if critic is not None:
        apart = memory_of_rank(config, config.trainer.placement.critic_nodes[1])
        needs.append(("a rank of the critic", critic.total, *apart))
    for who, need, memory, where in needs:
        if memory is not None and need > memory:
            yield f"{who} needs {readable_size(need)} of {readable_size(memory)} ({where})"


def main() -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # who asks was killed
    try:
        texts = json.load(sys.stdin)
    except ValueError:  # it was killed before it had asked
        return
    with redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as place:  # a module of config_class may print
        configs = []
        for text in texts:
            path = Path(place) / "config.toml"
            path.write_text(text, encoding="utf-8")
            configs.append(Config.from_toml([path]))
        problems = memory_problems(configs)
    print(json.dumps(problems))


if __name__ == "__main__":
    main()
