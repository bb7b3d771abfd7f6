"""hpcrl's own inference engines, one package each. Nothing outside imports them: hpcrl/config/backend.py finds them by these names."""

PACKAGES = (
    "hpcrl.engines.vllm",
    "hpcrl.engines.embedded",
    "hpcrl.families.diffusion",
)
"""Packages with a module `backend`."""
