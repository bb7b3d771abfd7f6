"""vLLM: a server of its own, with all that an engine can be."""

from __future__ import annotations

from hpcrl.config.backend import OPTIONAL, Backend
from hpcrl.engines.vllm.rules import RULES, TEACHER_RULES


class VLLM(Backend):
    name, title, package = "vllm", "vLLM", "hpcrl.engines.vllm"
    brings = "rollout", "multi_node", "teacher", "launch", "plan", "serve"
    reads, sampling = OPTIONAL, None
    rules, teacher_rules = RULES, TEACHER_RULES
    packages = ("vllm",)
    compiles = records_experts = records_iterations = True


BACKEND = VLLM()
