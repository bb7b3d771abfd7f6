"""`hpcrl eval`: what a checkpoint, or any model, scores on prompts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hpcrl.cli._common import add_root, positive, split
from hpcrl.text import one_line

_OUTER = ("avg_score", "generate/avg_num_tokens")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_root(parser)
    parser.epilog = "example: hpcrl eval my-run --data math.jsonl -n 8 generator.eval_sampling_params.temperature=1.0"
    parser.set_defaults(action=_eval)
    parser.add_argument(
        "subject",
        metavar="RUN|MODEL",
        help="name, project/name or path of a run, a model directory, or the id of a model on the hub",
    )
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings to change")
    parser.add_argument(
        "--data", nargs="+", action="extend", metavar="FILE", required=True, help="datasets of prompts, then settings"
    )
    parser.add_argument("--checkpoint", metavar="STEP", help="of the run; 0: before training (default: the newest)")
    parser.add_argument("-n", type=positive, metavar="K", help="samples per prompt (default: as configured)")
    parser.add_argument(
        "--config", type=Path, nargs="+", action="extend", default=[], metavar="FILE", help="further TOML files"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="default: RUN/evaluations/…, of a model ./evaluations/…"
    )
    parser.add_argument("--json", action="store_true", help="print results.json instead of a table")


def _eval(arguments: argparse.Namespace) -> int:
    from json import dumps

    from hpcrl.launch.local.evaluate import configured, default_place, evaluate, find_subject
    from hpcrl.launch.local.foreground import to_stderr
    from hpcrl.rundir.layout import Run, default_root

    data, settings = split(arguments.data)
    settings += arguments.settings
    subject = find_subject(arguments.subject, arguments.checkpoint, arguments.root or default_root())
    config = configured(subject, data, arguments.n, arguments.config, settings)
    place = (arguments.output or default_place(subject)).absolute()
    results = evaluate(subject, config, Run(place), to_stderr)
    if arguments.json:
        print(dumps(results, indent=2))
        return 0
    print("\n".join(_table(results)))
    print(f"{place}\n  hpcrl samples {place} --eval --worst    shows the responses")
    return 0


def _table(results: dict[str, Any]) -> list[str]:
    """Return a line per data source, and one for all of them where there are several."""
    prompts, metrics = results["prompts"], results["metrics"]
    passes = [name.removeprefix("eval/all/") for name in metrics if name.startswith("eval/all/pass_at_")]
    columns = [_OUTER[0], *passes, _OUTER[1]]
    heads = ["prompts", "score", *(name.replace("pass_at_", "pass@") for name in passes), "tokens"]
    sources = [name for name in prompts if name != "all"]
    shown = [*sources, "all"] if len(sources) > 1 else sources
    width = max(len("source"), *map(len, shown))
    dropped = f", {results['too_long']} were longer than trainer.max_prompt_length" if results["too_long"] else ""
    n, failures = results["n_samples"], results["failures"]
    lines = [
        f"{results['subject']}: {prompts['all']} prompts, {n} sample{'s' if n > 1 else ''} each, {results['seconds']:.0f} s{dropped}",
        "  ".join([f"{'source':{width}}", *(f"{head:>8}" for head in heads)]),
    ]
    for source in shown:
        values = [metrics[f"eval/{source}/{name}"] for name in columns]
        cells = [f"{prompts[source]:8}", *(f"{value:8.4g}" for value in values)]
        lines.append("  ".join([f"{source:{width}}", *cells]))
    if failures:
        lines.append(f"{len(failures)} samples failed, the first: {failures[0]}")
    return [one_line(line) for line in lines]
