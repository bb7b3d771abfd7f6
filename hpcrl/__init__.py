"""Post-training of language models on Slurm clusters: reinforcement learning and supervised fine-tuning."""

__version__ = "0.2.0"
