"""What README and docs name exists: pages and their headings, paths, modules, settings, commands and their options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import tomli

from hpcrl.cli.main import main
from hpcrl.config import Config
from hpcrl.config.fields import settings
from hpcrl.launch.nodes import make_plan
from tests.paths import ROOT

PAGES = sorted(
    [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "configs").rglob("*.md")]
)
WRITTEN = [page for page in PAGES if page.name != "CHANGELOG.md" and page.parent.name != "config"]
"""Pages that are neither history nor made from the settings."""
_FOLDERS = "hpcrl|jobs|tests|benchmarks|configs|slurm|docs"
_SECTIONS = "data|trainer|generator|environment|slurm"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def code(page: Path) -> Iterator[str]:
    """Yield what stands in backticks, and the lines of blocks."""
    text = page.read_text(encoding="utf-8")
    blocks = r"^```.*?\n(.*?)^```"
    for block in re.findall(blocks, text, re.MULTILINE | re.DOTALL):
        yield from block.splitlines()
    yield from re.findall(r"`([^`\n]+)`", re.sub(blocks, "", text, flags=re.MULTILINE | re.DOTALL))


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not re.match(r"https?:", link):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_paths_and_modules_exist(page: Path) -> None:
    for text in code(page):
        for path in re.findall(rf"(?<![\w/.\-])(?:{_FOLDERS})/[\w./\-]*", text):
            assert (ROOT / path.rstrip(".")).exists(), path
        for module in re.findall(r"python -m ((?:hpcrl|tests)[\w.]*)", text):
            assert find_spec(module), module


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_settings_exist(page: Path) -> None:
    known = {setting.path for setting in settings(Config)}
    entries = {setting.path: setting.entry for setting in settings(Config) if setting.entry}
    for text in code(page):
        for path in re.findall(rf"(?<![\w/.\-])(?:{_SECTIONS})(?:\.\w+)+(?![\w/*])", text):
            parts = path.split(".")
            entry = entries.get(".".join(parts[:-2]))
            held = {setting.name for setting in settings(entry)} if entry else ()
            named = any(".".join(parts[:count]) in known for count in (len(parts), len(parts) - 1))
            assert named or parts[-1] in held, path


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_commands_and_options_exist(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in code(page):
        for words in re.findall(r"(?:^|[ /(])hpcrl ((?:[a-z]+ ?)+(?:(?! hpcrl )[^|;&#>)])*)", text):
            command = words.split()
            with pytest.raises(SystemExit) as end:
                main([command[0], "--help"])
            shown = capsys.readouterr().out
            assert end.value.code == 0, text
            if " COMMAND ..." in shown and len(command) > 1:  # a command of commands
                with pytest.raises(SystemExit) as end:
                    main([command[0], command[1], "--help"])
                assert end.value.code == 0, text
                shown = capsys.readouterr().out
            own = words.split(" -- ")[0]
            for option in re.findall(r"(?<=\s)(--?[a-z][\w-]*)", own):
                assert re.search(rf"(?<![\w-]){option}(?![\w-])", shown), f"{text}: {option}"


def test_the_glossary_names_what_there_is() -> None:
    page = (ROOT / "docs" / "development.md").read_text(encoding="utf-8")
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "hpcrl").rglob("*.py"))
    table = page.split("| name | what it is |")[1].split("\n\n")[0]
    names = re.findall(r"`(\w+)`", table)
    assert len(names) > 20
    assert [name for name in names if not re.search(rf"^\s*(?:class|def) {name}\b", source, re.MULTILINE)] == []


def test_the_experiment_of_the_front_page_is_valid() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (experiment,) = re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    config = Config.from_dict({**tomli.loads(experiment), "slurm": {"gpus_per_node": 8}})
    assert [(node.role, node.gpus) for node in make_plan(config)] == [("trainer", 8), ("rollout", 8)]


def test_the_index_lists_all_pages() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / link).resolve() for link in re.findall(r"\]\(([^)#]+)\)", index.read_text())}
    own = {path for path in PAGES if path.parent in (ROOT / "docs", ROOT / "docs" / "config")}
    assert own - linked == {index}
