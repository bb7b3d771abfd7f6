"""Cache directories of huggingface_hub, by the environment variables of its documentation, without importing it."""

from __future__ import annotations

import os


def hub_home() -> str:
    """Return the directory of the token, and of the caches where no variable of their own names them."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return _expanded(os.environ.get("HF_HOME") or os.path.join(cache, "huggingface"))


def hub_cache() -> str:
    """Return the directory of downloaded models and datasets."""
    own = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return _expanded(own or os.path.join(hub_home(), "hub"))


def _expanded(path: str) -> str:
    return os.path.expandvars(os.path.expanduser(path))
