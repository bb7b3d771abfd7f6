"""What makes Megatron-core run on a CPU refuses every other machine, and every other Megatron-core."""

from __future__ import annotations

import pytest

pytest.importorskip("megatron.core")

from hpcrl.errors import RunError
from hpcrl.trainer.backends.megatron.shims import VERSION, require_fitting


def test_a_machine_with_a_gpu_is_refused():
    with pytest.raises(RunError, match="this machine has a GPU"):
        require_fitting(cuda=True, version=VERSION)


def test_another_version_is_refused_with_the_remedy():
    with pytest.raises(RunError, match=f"found 0.15.3: pip install megatron-core=={VERSION}"):
        require_fitting(cuda=False, version="0.15.3")


def test_the_version_that_is_installed_is_the_one_that_fits():
    import megatron.core

    require_fitting(cuda=False, version=megatron.core.__version__)
