"""Combinations that trainer.deterministic refuses."""

from __future__ import annotations

from tests.config.rules.skyrl_cases import ENGINE, PLACEMENT, SERVICE, Case

DETERMINISTIC = {"trainer.deterministic": True, f"{ENGINE}.backend": "transformers"}

OF_BITS = [
    Case(
        "with one set of bits, time does not decide which version generates",
        {**DETERMINISTIC, "trainer.fully_async.max_staleness_steps": 1},
        "trainer.fully_async.max_staleness_steps", "expected 0 with trainer.deterministic, found 1",
        DETERMINISTIC,
    ),
    Case(
        "with one set of bits, no step leaves out its slowest groups",
        {**DETERMINISTIC, "trainer.fully_async.oversampling_ratio": 1.5},
        "trainer.fully_async.oversampling_ratio", "expected 1 with trainer.deterministic, found 1.5",
        DETERMINISTIC,
    ),
    Case(
        "with one set of bits, scorers do not round by what comes together",
        {**DETERMINISTIC, **SERVICE}, "trainer.deterministic", "reward models score what comes together, and round by it",
        DETERMINISTIC,
    ),
    Case(
        "with one set of bits, all requests have as many ranks",
        {
            "trainer.deterministic": True, "slurm.gpus_per_node": 2, f"{PLACEMENT}.policy_num_gpus_per_node": 2, "slurm.nodes": 2,
            "slurm.requests": {"small": {"gpus_per_node": 1}},
        },
        "slurm.requests.small", "another number of trainer ranks adds gradients in another order",
        {"trainer.deterministic": True, "slurm.gpus_per_node": 2, f"{PLACEMENT}.policy_num_gpus_per_node": 2, "slurm.requests": {"small": {}}},
    ),
    Case(
        "vLLM is batch-invariant on GPUs",
        {"trainer.deterministic": True}, f"{ENGINE}.backend", "on NVIDIA GPUs of compute capability 9.0 or higher only",
        DETERMINISTIC,
    ),
    Case(
        "vLLM is batch-invariant where hpcrl starts it so",
        {"trainer.deterministic": True, f"{ENGINE}.remote_urls": ["http://host:8000"]}, f"{ENGINE}.remote_urls", "hpcrl has to start the engines",
        {"trainer.deterministic": True, "slurm.gpus_per_node": 1},
    ),
    Case(
        "vLLM is batch-invariant without drafts",
        {"trainer.deterministic": True, "slurm.gpus_per_node": 1, f"{ENGINE}.speculative.method": "ngram"},
        f"{ENGINE}.speculative.method", "drafts are verified together would change the last bits",
        {"trainer.deterministic": True, "slurm.gpus_per_node": 1},
    ),
]  # fmt: skip
