"""Post-training of language models on Slurm clusters: reinforcement learning, supervised fine-tuning and preferences."""

import os

_LIBRARIES = ("HF_", "HUGGINGFACE_", "TORCH", "XDG_")
# what is empty counts as not set: huggingface_hub would take HF_HOME="" for the current directory, and torch looks for numbers
for _name in [name for name, value in os.environ.items() if name.startswith(_LIBRARIES) and not value]:
    del os.environ[_name]

__version__ = "0.2.0"

_PUBLIC = "RunHandle", "open_run", "submit"
"""Names of hpcrl.launch.run_handle, which is imported when one of them is read: `import hpcrl` alone costs nothing. Their types are in __init__.pyi."""


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module("hpcrl.launch.run_handle"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
