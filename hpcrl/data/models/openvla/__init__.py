"""OpenVLA (arXiv:2406.09246) as a model of transformers, which has none: importing this tells transformers of its configuration, without torch."""

from __future__ import annotations

from transformers import AutoConfig

from hpcrl.data.models.openvla.config import OpenVLAConfig

AutoConfig.register("openvla", OpenVLAConfig)
