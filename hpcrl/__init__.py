"""Post-training of language models on Slurm clusters: reinforcement learning, supervised fine-tuning and preferences."""

import os

_LIBRARIES = ("HF_", "HUGGINGFACE_", "TORCH", "XDG_")
# what is empty counts as not set: huggingface_hub would take HF_HOME="" for the current directory, and torch looks for numbers
for _name in [name for name, value in os.environ.items() if name.startswith(_LIBRARIES) and not value]:
    del os.environ[_name]

__version__ = "0.2.0"
