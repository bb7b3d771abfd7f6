"""The engine of diffusion pipelines, which the family starts itself (rollout.py)."""

from __future__ import annotations

from hpcrl.config.backend import Backend


class Diffusers(Backend):
    name, title, package = "diffusers", "diffusers", "hpcrl.families.diffusion"
    brings = ()
    sampling = None  # none are used: pictures have settings of their own


BACKEND = Diffusers()
