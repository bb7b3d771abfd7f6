"""`hpcrl rescore`: score the samples of an evaluation with other rewards; nothing is generated."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrl.cli._common import add_root
from hpcrl.cli.compare import EVALUATION, find_evaluation

if TYPE_CHECKING:
    from hpcrl.config import Config
    from hpcrl.observe.evaluations import Evaluation
    from hpcrl.rundir.layout import Run

_ASKED = "evaluation.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_root(parser)
    parser.epilog = "example: hpcrl rescore my-run@40 'environment.eval_reward_function={ math = 1 }'"
    parser.add_argument("evaluation", metavar="EVALUATION", help=EVALUATION)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings to change, such as rewards")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="default: evaluations/… of the run, or beside the evaluation"
    )
    parser.add_argument("--json", action="store_true", help="print results.json instead of a table")
    parser.set_defaults(action=_rescore)


def _rescore(arguments: argparse.Namespace) -> int:
    from json import dumps
    from shlex import quote

    from hpcrl.config import Config
    from hpcrl.errors import RunError
    from hpcrl.launch.sharing import made_for
    from hpcrl.observe.eval_report import summary
    from hpcrl.rundir.layout import Run, default_root

    root = arguments.root or default_root()
    evaluation = find_evaluation(arguments.evaluation, root)
    config = Config.from_toml([evaluation.run.config], arguments.settings).largest()
    place = Run((arguments.output or _default_place(evaluation)).absolute())
    if place.path.exists():
        raise RunError(f"{place.path} exists; move it away, or choose another --output")
    with made_for(config.slurm.readable_by, place.path):  # before rewards are paid for
        results = _scored(evaluation, config, place, root)
    if arguments.json:
        print(dumps(results, indent=2))
        return 0
    print("\n".join(summary(results)))
    before = f"{evaluation.run.path}@{evaluation.version}"
    print(f"{place.path}\n  hpcrl compare {quote(before)} {quote(str(place.path))}    shows what differs")
    return 0


def _default_place(evaluation: Evaluation) -> Path:
    run, stamp = evaluation.run, time.strftime("%m%d-%H%M%S")
    if (run.path / _ASKED).exists():
        return run.path.with_name(f"{run.name}-rescored-{stamp}")
    return run.evaluations / f"v{evaluation.version:06d}-rescored-{stamp}"


def _asked(run: Run) -> dict[str, Any] | None:
    """Return what `hpcrl eval` was asked for, or None where the evaluation is one of a run. Raises RunError where the file is damaged."""
    from hpcrl.rundir.records import damaged, read_object

    path = run.path / _ASKED
    asked = read_object(path, remedy := "evaluate again with `hpcrl eval`")
    if asked is not None and not isinstance(asked.get("root", ""), str):
        raise damaged(path, f"expected a path as 'root', found {asked['root']!r:.80}", remedy)
    return asked


def _scored(evaluation: Evaluation, config: Config, place: Run, root: Path) -> dict[str, Any]:
    import asyncio
    from dataclasses import asdict
    from json import dumps

    from hpcrl.observe.eval_report import write_results
    from hpcrl.observe.evaluations import EvaluatedPrompt
    from hpcrl.observe.scores import results_of
    from hpcrl.rollout.rescore import evaluation_prompts, prompts_of, rescore
    from hpcrl.rundir.commit import write_json, write_text
    from hpcrl.rundir.eval_dumps import dumped_samples
    from hpcrl.rundir.records import append_text
    from hpcrl.sandboxes.local import configured_sandboxes

    run, generator, began = evaluation.run, config.generator, time.monotonic()
    asked = _asked(run)
    _, samples = dumped_samples(run, evaluation.version)
    all_prompts = evaluation_prompts(
        config.data, config.environment, generator.max_turns, offline=config.trainer.offline
    )
    prompts = prompts_of({group_id: line for (group_id, _), line in samples.items()}, all_prompts)
    images = run.root if asked is None else asked.get("root", root)  # as they were evaluated with
    with configured_sandboxes(config.slurm.sandboxes, images) as sandboxes:
        most = config.slurm.sandboxes.most_of_a_node
        found = asyncio.run(rescore(samples, prompts, config.environment, generator, sandboxes, most or None))
    by_group: dict[str, list[dict[str, Any]]] = {}
    for line in found.lines:
        by_group.setdefault(line["group_id"], []).append(line)
    asked = asked or {
        "subject": run.name,
        "version": evaluation.version,
        "model": str(config.trainer.policy.model.pretrained),
        "data": config.data.val_data,
        "seed": config.sampling_seed,
        "sampling": asdict(generator.eval_sampling),
    }
    asked |= {
        "n_samples": max(map(len, by_group.values())),
        "rescored_from": f"{run.path}, version {evaluation.version}",
    }
    results = {
        **asked,
        "too_long": len(all_prompts) - len(prompts),
        "seconds": time.monotonic() - began,
        "failures": found.failures,
        **results_of(
            [EvaluatedPrompt.of(group_id, lines) for group_id, lines in by_group.items()], generator.success_reward
        ),
    }
    write_text(place.config, config.to_toml())
    write_json(place.path / _ASKED, asked)
    text = "".join(dumps(line, ensure_ascii=False) + "\n" for line in found.lines)
    append_text(place.eval_dump(evaluation.version, 0), text)
    write_results(place, results)
    return results
