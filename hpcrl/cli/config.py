"""`hpcrl config …`: show, compare, explain and convert configurations."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.cli._common import Subcommands, add_root, split
from hpcrl.text import NotUtf8Error, utf8

if TYPE_CHECKING:
    from hpcrl.config import Config
    from hpcrl.convert.conversion import Conversion
    from hpcrl.errors import ConfigError

_SCRIPTS = (".sh", ".bash", ".sbatch", ".slurm")
_KINDS = {".toml": "toml", ".yaml": "skyrl", ".yml": "skyrl", **dict.fromkeys(_SCRIPTS, "skyrl")}

_MOST_FOUND = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command = Subcommands(parser).add
    show = command("show", "print the whole configuration of files and overrides, or of a run", _show)
    show.add_argument("settings", nargs="+", metavar="FILE|RUN|KEY=VALUE", help="files or one run, then overrides")
    show.add_argument("--changed", action="store_true", help="only what differs from the defaults")
    diff = command("diff", "print each setting that differs; exit code 1 if there is one", _diff)
    diff.add_argument("left", metavar="FILE|RUN")
    diff.add_argument("right", metavar="FILE|RUN")
    for parser in (show, diff):
        add_root(parser)
    explain = command(
        "explain", "say what a setting, a section, or a field of SkyRL, Cosmos-RL, verl or prime-rl is", _explain
    )
    explain.add_argument("path", nargs="?", default="", metavar="PATH", help="such as trainer.algorithm.eps_clip_high")
    find = command(
        "search", "list settings by words of their names, their meanings or other frameworks' names", _search
    )
    find.add_argument("words", nargs="+", metavar="WORD", help="such as learning_rate, num_generations or 'kl'")
    validate = command("validate", "name everything that is wrong; exit code 2 if something is", _validate)
    validate.add_argument("settings", nargs="+", metavar="FILE|KEY=VALUE", help="files, then overrides")
    validate.add_argument("--json", action="store_true", help="print valid and problems as JSON, for programs")
    command("schema", "print the JSON Schema of configuration files, for editors", _schema)
    command("paths", "print path, type, default and state of every setting, separated by tabs", _paths)
    convert = command(
        "convert",
        "turn a configuration of SkyRL, Cosmos-RL, verl or prime-rl into TOML; exit code 1 if it is not complete",
        _convert,
    )
    convert.add_argument(
        "settings",
        nargs="+",
        metavar="FILE|KEY=VALUE",
        help="one file (.toml, .yaml, .sh, .sbatch, .slurm), those of prime-rl's processes, or the words of a command behind --",
    )
    convert.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the result here (default: print it)")
    convert.add_argument("--all", action="store_true", help="report what is as it was too, a line for each setting")
    for parser in (show, convert):
        parser.add_argument(
            "--yaml", action="store_true", help="YAML instead of TOML, to compare; a run reads TOML alone"
        )
    convert.add_argument(
        "--from", dest="source", choices=("skyrl", "cosmos", "verl", "prime"), help="default: by suffix and content"
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


def _search(arguments: argparse.Namespace) -> int:
    from hpcrl.docs.explain import default_of, search, theirs
    from hpcrl.errors import ConfigError

    settings = search(arguments.words)
    if not settings:
        raise ConfigError(
            f"no setting has {' and '.join(arguments.words)} in its name, its meaning or another framework's name"
        )
    for setting in settings[:_MOST_FOUND]:
        other = f"  (TRL: {', '.join(names)})" if (names := theirs(setting)) else ""
        print(f"{setting.path} = {default_of(setting)}{other}\n    {setting.meaning.partition('. ')[0]}")
    if len(settings) > _MOST_FOUND:
        print(f"and {len(settings) - _MOST_FOUND} more; add a word")
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
    """Return problems as JSON: of each the file or override, its line, the setting and the message; null without problems."""
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
    from hpcrl.rundir.commit import write_text

    if arguments.output and arguments.output.exists():
        raise ConfigError(f"{arguments.output} exists; move it away, or choose another --output")
    conversion = _converted(arguments.settings, arguments.source)
    text = conversion.to_yaml() if arguments.yaml else conversion.to_toml()
    if arguments.output:
        write_text(arguments.output, text)
    else:
        print(text, end="", flush=True)
    print(conversion.report(arguments.all), end="", file=sys.stderr)
    return int(conversion.incomplete)


def _converted(words: list[str], source: str | None) -> Conversion:
    from hpcrl.convert.prime import convert as prime
    from hpcrl.convert.skyrl import convert as skyrl
    from hpcrl.convert.verl import convert as verl
    from hpcrl.errors import ConfigError

    path = Path(words[0])
    if prime.is_command(words):
        return prime.convert_words(words, "a command line", Path())
    if any("=" in word for word in words) and not path.is_file():
        of_verl = source == "verl" or (source is None and verl.is_verl(" ".join(words)))
        return (verl.convert_words if of_verl else skyrl.convert_overrides)(words, "a command line")
    texts = [(_text(Path(word)), word) for word in words]
    if len(texts) > 1 and not all(Path(word).suffix == ".toml" for word in words):
        raise ConfigError("expected one file, the TOML files of prime-rl's processes, or the words of a command alone")
    (text, origin), kind = texts[0], source or _KINDS.get(path.suffix)
    if kind is None:
        raise ConfigError(f"{path}: expected {', '.join(_KINDS)}; or say of which framework it is with --from")
    if kind == "toml":
        kind = "prime" if len(texts) > 1 or prime.is_prime(_tables(text)) else "cosmos"
    elif source is None and verl.is_verl(text):
        kind = "verl"
    elif path.suffix in _SCRIPTS and source is None and prime.is_script(text):
        kind = "prime"
    if kind == "prime":
        return prime.convert_script(text, origin) if path.suffix in _SCRIPTS else prime.convert_toml(texts)
    return _of_one_file(kind, path.suffix in _SCRIPTS, text, origin)


def _of_one_file(kind: str, script: bool, text: str, origin: str) -> Conversion:
    from hpcrl.convert.cosmos import convert as cosmos
    from hpcrl.convert.skyrl import convert as skyrl
    from hpcrl.convert.verl import convert as verl

    if kind == "cosmos":
        return cosmos.convert_toml(text, origin)
    of = verl if kind == "verl" else skyrl
    return of.convert_script(text, origin) if script else of.convert_yaml(text, origin)


def _tables(text: str) -> dict[str, object]:
    """Return the tables of a TOML file; none where it is not TOML, which its converter tells."""
    import tomli

    try:
        return tomli.loads(text)
    except tomli.TOMLDecodeError:
        return {}


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
