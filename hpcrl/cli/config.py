"""`hpcrl config …`: show, compare, explain and convert configurations."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.cli._common import add_root, split
from hpcrl.text import NotUtf8Error, utf8

if TYPE_CHECKING:
    from hpcrl.config import Config
    from hpcrl.convert.conversion import Conversion
    from hpcrl.errors import ConfigError

_KINDS = {".toml": "cosmos", ".yaml": "skyrl", ".yml": "skyrl", ".sh": "skyrl"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, text: str, action: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        command = group.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        command.set_defaults(action=action)
        return command

    show = command("show", "print the whole configuration of files and overrides, or of a run", _show)
    show.add_argument("settings", nargs="+", metavar="FILE|RUN|KEY=VALUE", help="files or one run, then overrides")
    show.add_argument("--changed", action="store_true", help="only what differs from the defaults")
    diff = command("diff", "print each setting that differs; exit code 1 if there is one", _diff)
    diff.add_argument("left", metavar="FILE|RUN")
    diff.add_argument("right", metavar="FILE|RUN")
    for parser in (show, diff):
        add_root(parser)
    explain = command("explain", "say what a setting, a section, or a field of SkyRL, Cosmos-RL or verl is", _explain)
    explain.add_argument("path", nargs="?", default="", metavar="PATH", help="such as trainer.algorithm.eps_clip_high")
    validate = command("validate", "name everything that is wrong; exit code 2 if something is", _validate)
    validate.add_argument("settings", nargs="+", metavar="FILE|KEY=VALUE", help="files, then overrides")
    validate.add_argument("--json", action="store_true", help="print valid and problems as JSON, for programs")
    command("schema", "print the JSON Schema of configuration files, for editors", _schema)
    command("paths", "print path, type, default and state of every setting, separated by tabs", _paths)
    convert = command(
        "convert",
        "turn a configuration of SkyRL, Cosmos-RL or verl into TOML; exit code 1 if it is not complete",
        _convert,
    )
    convert.add_argument(
        "settings",
        nargs="+",
        metavar="FILE|KEY=VALUE",
        help="one file (.toml, .yaml, .sh), or the words of a command of SkyRL or verl",
    )
    convert.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the result here (default: print it)")
    convert.add_argument("--all", action="store_true", help="report what is as it was too, a line for each setting")
    for parser in (show, convert):
        parser.add_argument(
            "--yaml", action="store_true", help="YAML instead of TOML, to compare; a run reads TOML alone"
        )
    convert.add_argument(
        "--from", dest="source", choices=("skyrl", "cosmos", "verl"), help="default: by suffix and content"
    )


def _show(arguments: argparse.Namespace) -> int:
    from hpcrl.docs.show import show

    print(show(_load(arguments.settings, arguments.root), arguments.changed, arguments.yaml), end="")
    return 0


def _diff(arguments: argparse.Namespace) -> int:
    from hpcrl.config.difference import differences

    found = differences(_load([arguments.left], arguments.root), _load([arguments.right], arguments.root))
    for difference in found:
        print(difference)
    return int(bool(found))


def _explain(arguments: argparse.Namespace) -> int:
    from hpcrl.docs.explain import explain

    print(explain(arguments.path), end="")
    return 0


def _validate(arguments: argparse.Namespace) -> int:
    from hpcrl.cli.foreign import with_names_elsewhere
    from hpcrl.config import Config
    from hpcrl.errors import ConfigError

    files, overrides = split(arguments.settings)
    try:
        Config.from_toml([Path(file) for file in files], overrides)
    except ConfigError as error:
        if not arguments.json:
            raise
        print(_as_json(with_names_elsewhere(error)))
        return error.exit_code
    print('{"valid": true, "problems": []}' if arguments.json else "ok")
    return 0


def _as_json(error: ConfigError) -> str:
    """Return what is wrong as JSON: of each problem the file or override, its line, the setting and the message; null where there is none."""
    import json

    problems = []
    for one in error.problems:
        source, _, line = one.source.rpartition(":")
        source, line = (source, int(line)) if line.isdecimal() else (one.source, None)
        problems.append({"source": source or None, "line": line, "path": one.path or None, "message": one.message})
    problems = problems or [{"source": None, "line": None, "path": None, "message": str(error)}]
    return json.dumps({"valid": False, "problems": problems}, indent=2)


def _schema(arguments: argparse.Namespace) -> int:  # noqa: ARG001 - as every command
    import json

    from hpcrl.docs.schema import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0


def _paths(arguments: argparse.Namespace) -> int:  # noqa: ARG001 - as every command
    from hpcrl.config import Config
    from hpcrl.config.fields import leaves
    from hpcrl.docs.explain import default_of, state_of

    print("path\ttype\tdefault\tstate")
    for setting in leaves(Config):
        print(setting.path, setting.expects(), default_of(setting), state_of(setting), sep="\t")
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    from hpcrl.errors import ConfigError

    if arguments.output and arguments.output.exists():
        raise ConfigError(f"{arguments.output} exists; move it away, or choose another --output")
    conversion = _converted(arguments.settings, arguments.source)
    text = conversion.to_yaml() if arguments.yaml else conversion.to_toml()
    if arguments.output:
        arguments.output.write_text(text)
    else:
        print(text, end="", flush=True)
    print(conversion.report(arguments.all), end="", file=sys.stderr)
    return int(conversion.incomplete)


def _converted(words: list[str], source: str | None) -> Conversion:
    from hpcrl.convert.cosmos import convert as cosmos
    from hpcrl.convert.skyrl import convert as skyrl
    from hpcrl.convert.verl import convert as verl
    from hpcrl.errors import ConfigError

    path = Path(words[0])
    if any("=" in word for word in words) and not path.is_file():
        of_verl = source == "verl" or (source is None and verl.is_verl(" ".join(words)))
        return (verl.convert_words if of_verl else skyrl.convert_overrides)(words, "a command line")
    if len(words) > 1:
        raise ConfigError("expected one file, or the words of a command alone")
    kind = source or _KINDS.get(path.suffix)
    if kind is None:
        raise ConfigError(
            f"{path}: expected .yaml or .sh of SkyRL or verl, or .toml of Cosmos-RL; or say which with --from skyrl, cosmos or verl"
        )
    text, origin = _text(path), str(path)
    if kind == "cosmos":
        return cosmos.convert_toml(text, origin)
    if kind == "verl" or (source is None and verl.is_verl(text)):
        return verl.convert_script(text, origin) if path.suffix == ".sh" else verl.convert_yaml(text, origin)
    if path.suffix == ".sh":
        return skyrl.convert_script(text, origin)
    return skyrl.convert_yaml(text, origin)


def _text(path: Path) -> str:
    from hpcrl.errors import ConfigError

    try:
        return utf8(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except NotUtf8Error as error:
        raise ConfigError(f"{path}:{error.line}: {error}") from None
    except ValueError as error:  # a name that no file can have
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def _load(words: list[str], root: Path | None) -> Config:
    from hpcrl.config import Config
    from hpcrl.launch.manage.registry import find_run
    from hpcrl.rundir.layout import default_root

    files, overrides = split(words)
    if len(files) == 1 and not Path(files[0]).is_file() and Path(files[0]).suffix != ".toml":
        paths = [find_run(files[0], root or default_root()).config]
    else:
        paths = [Path(file) for file in files]
    return Config.from_toml(paths, overrides)
