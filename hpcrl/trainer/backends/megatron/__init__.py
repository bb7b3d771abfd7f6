"""Training by Megatron-core.

Megatron-core 0.16 would fill the logs of each rank with warnings about optional packages, all parameters and its whole configuration. They
are filtered here; hpcrl logs once which layers it uses. Its warnings about
settings stay.
"""

import logging
import warnings

for _message in (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",  # its own default, of CUDA graphs that are not used
    r"`torch\.distributed\.\w+` is deprecated",  # by torch, which it calls by that name
    "The 'megatron.core.transformer.custom_layers",  # itself, in an import of its own
    r"`torch\.jit\.\w+` is deprecated",
):
    warnings.filterwarnings("ignore", rf"\s*{_message}")
logging.getLogger("megatron").setLevel(logging.WARNING)
