"""Draws quickstart.svg from a recorded quickstart: one moment while it trains, and how it ends.

script -qec 'make demo' demo.typescript
python docs/images/terminal.py demo.typescript
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

COMMAND = "hpcrl submit configs/quickstart.toml --local --follow"


def main(typescript: Path) -> None:
    text = typescript.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n")
    text = text.replace(str(Path.cwd()), "~/hpcrl")
    frames = re.split(r"(?:\x1b\[2K|\x1b\[1A|\x1b\[\?25[hl])+", text)
    training = next(frame for frame in frames if "step 20/" in frame)
    summary = next(frame for frame in reversed(frames) if "outcome" in frame).partition("\nScript done")[0]
    console = Console(record=True, width=92, file=io.StringIO(), color_system="truecolor")
    for part in (f"$ {COMMAND}", training, "", summary):
        console.print(Text.from_ansi(part), soft_wrap=True)
    drawn = console.export_svg(title="make demo")
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)  # nothing is fetched from elsewhere
    (Path(__file__).parent / "quickstart.svg").write_text(drawn.replace("Fira Code", "DejaVu Sans Mono"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
