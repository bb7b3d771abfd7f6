"""Post-training of language models on Slurm clusters: reinforcement learning, supervised fine-tuning and preferences."""

__version__ = "0.2.0"
