"""Registers OpenVLA (arXiv:2406.09246) with transformers, which lacks it, without torch."""

from __future__ import annotations

from transformers import AutoConfig

from hpcrl.data.models.openvla.config import OpenVLAConfig

AutoConfig.register("openvla", OpenVLAConfig)
