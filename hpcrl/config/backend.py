"""Declares what the configuration requires of an inference engine, and returns the engine that a configuration names.

An engine is a package such as hpcrl.engines.vllm. Its object `BACKEND` answers the configuration; its modules answer the layers above, each by a
Protocol: `rollout` and `multi_node` (hpcrl/rollout/engines/launch.py), `teacher` (hpcrl/trainer/scoring/engine.py), `launch` (hpcrl/launch/backend.py),
`plan` (hpcrl/planning/backend.py), `serve` (hpcrl/cli/engine.py). All of them are imported by name when they are needed, so that no layer depends
on an engine.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import ModuleType
from typing import ClassVar, Literal

from hpcrl.config.errors import Problem
from hpcrl.config.import_path import installed
from hpcrl.config.sections.distillation import IN_RANKS, DistillationConfig
from hpcrl.config.sections.generator import InferenceEngineConfig
from hpcrl.config.sections.tree import ConfigTree
from hpcrl.errors import ConfigError, did_you_mean

GROUP = "hpcrl.engines"
"""The entry points of other packages; each leads to an object as `Backend`. hpcrl's own engines are listed in hpcrl/engines/__init__.py."""

Layer = Literal["rollout", "multi_node", "teacher", "launch", "plan", "serve"]
Rule = Callable[[ConfigTree], Iterator[Problem]]

OPTIONAL = (
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "expert_parallel_size", "quantization"),
    *("enable_prefix_caching", "enable_chunked_prefill", "enforce_eager", "use_flashinfer", "fully_sharded_loras"),
    *("remote_urls", "remote_key_file", "remote_ca_file", "engine_init_kwargs", "speculative"),
)
"""Settings of generator.inference_engine that some engines read only."""


class Backend:
    """An inference engine. The answers here are those of one that computes in the rollout worker's process, on one device.

    Attributes:
        name: value of generator.inference_engine.backend.
        title: for messages.
        package: with the modules of `brings`.
        brings: layers that the engine has a module for. Without `multi_node` a replica is on one node, without `teacher` it scores no samples,
            without `serve` there is no `hpcrl engine`. Without `launch` and `plan` nothing is checked at submit, and nothing planned.
        reads: settings of `OPTIONAL` that it reads; the others are refused.
        sampling: names of generator.sampling_params.additional_kwargs that it takes; None: any.
        rules: refuse combinations of settings where a run's engines are of this backend.
        teacher_rules: where the engine of a teacher is.
        packages: Python packages that it needs beside hpcrl's own.
        compiles: it compiles kernels on GPUs when it starts.
        records_experts: it returns the experts of each token (trainer.policy.experts.router_replay).
        records_iterations: Nsight Systems can record some of its iterations (trainer.profiler.nsys_engine_iterations).
    """

    name: ClassVar[str]
    title: ClassVar[str]
    package: ClassVar[str]
    brings: ClassVar[tuple[Layer, ...]] = ("rollout",)
    reads: ClassVar[tuple[str, ...]] = ()
    sampling: ClassVar[tuple[str, ...] | None] = ()
    rules: ClassVar[tuple[Rule, ...]] = ()
    teacher_rules: ClassVar[tuple[Rule, ...]] = ()
    packages: ClassVar[tuple[str, ...]] = ()
    compiles: ClassVar[bool] = False
    records_experts: ClassVar[bool] = False
    records_iterations: ClassVar[bool] = False

    def batch_dependence(self, config: ConfigTree) -> str | None:  # noqa: ARG002
        """Return why the bits of a response depend on what else is generated, even with trainer.deterministic; None: they do not."""
        return f"{self.title} computes a response together with others, and rounds by them"

    def layer(self, name: Layer) -> ModuleType:
        """Import the engine's module for a layer that it brings."""
        return importlib.import_module(f"{self.package}.{name}")


def backend_of(engine: InferenceEngineConfig) -> Backend:
    """Return the backend of a run's engines."""
    return backends()[engine.backend]


def teacher_backend(distillation: DistillationConfig) -> Backend | None:
    """Return the backend of a teacher's engine; None: the scorer's ranks compute the teacher."""
    return None if distillation.backend in IN_RANKS else backends()[distillation.backend]


def unknown_backends(config: ConfigTree) -> Iterator[Problem]:
    """Yield a problem for each setting that names no engine."""
    teachers = *IN_RANKS, *(name for name, backend in backends().items() if "teacher" in backend.brings)
    for path, name, known in (
        ("generator.inference_engine.backend", config.generator.inference_engine.backend, tuple(backends())),
        ("trainer.distillation.backend", config.trainer.distillation.backend, teachers),
    ):
        if name not in known:
            names = ", ".join(f'"{one}"' for one in known)
            yield Problem(path, f'expected one of {names}, found "{name}"{did_you_mean(name, known)}')


@lru_cache(maxsize=1)
def backends() -> dict[str, Backend]:
    """Return all engines by their names: hpcrl's own, then those of other packages.

    Raises:
        ConfigError: an entry point leads to no engine, or to one whose name another has.
    """
    own: tuple[str, ...] = importlib.import_module("hpcrl.engines").PACKAGES
    found = dict[str, Backend]()
    for backend in [importlib.import_module(f"{package}.backend").BACKEND for package in own] + installed(
        GROUP, "engine", Backend
    ):
        if backend.name in found:
            raise ConfigError(
                f"two engines are named {backend.name}, of {found[backend.name].package} and of {backend.package}; uninstall one"
            )
        found[backend.name] = backend
    return found
