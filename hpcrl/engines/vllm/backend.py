"""vLLM: a server of its own, with all that an engine can be."""

from __future__ import annotations

from hpcrl.config.backend import OPTIONAL, Backend
from hpcrl.config.sections.tree import ConfigTree
from hpcrl.engines.vllm.rules import RULES, TEACHER_RULES


class VLLM(Backend):
    name, title, package = "vllm", "vLLM", "hpcrl.engines.vllm"
    brings = "rollout", "multi_node", "teacher", "launch", "plan", "serve"
    reads, sampling = OPTIONAL, None
    rules, teacher_rules = RULES, TEACHER_RULES
    packages = ("vllm",)
    compiles = records_experts = records_iterations = True

    def batch_dependence(self, config: ConfigTree) -> str | None:
        if config.slurm.gpus or config.generator.inference_engine.remote_urls:  # a rule of its own refuses those
            return None
        return "vLLM 0.31 has its batch-invariant mode on NVIDIA GPUs of compute capability 9.0 or higher only"


BACKEND = VLLM()
