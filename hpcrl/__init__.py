"""Reinforcement-learning post-training of language models on Slurm clusters."""

__version__ = "0.2.0"
