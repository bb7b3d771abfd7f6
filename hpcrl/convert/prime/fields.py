"""prime-rl's settings (autumn 2026, and those of 2025 that its published files have): names, defaults, and what becomes of each here."""

from __future__ import annotations

from hpcrl.convert.field_table import FieldTable

_PARTS = ("trainer", "orchestrator", "inference")
_SHARED = ("model.name", "model.trust_remote_code", "model.vlm", "ckpt.", "wandb.", "weight_broadcast.", "tokenizer.")
_SHARED += ("max_steps", "output_dir", "bench")
_RENAMED = {
    f"{part}.{name}": name for part in _PARTS for name in _SHARED if (part, name) != ("inference", "weight_broadcast.")
}
_RENAMED |= {
    "monitors.wandb.": "wandb.",
    "orchestrator.seq_len": "seq_len",
    "trainer.loss.ipo_threshold": "trainer.loss.eps",
    "trainer.model.experimental.lora.": "trainer.model.lora.",
    "orchestrator.algo": "orchestrator.algorithms",
    "orchestrator.train.algo": "orchestrator.algorithms",
    "orchestrator.rollouts_per_example": "orchestrator.group_size",
    "orchestrator.train.group_size": "orchestrator.group_size",
    "orchestrator.eval.rollouts_per_example": "orchestrator.eval.group_size",
    "orchestrator.eval.source": "orchestrator.eval.env",
    "orchestrator.eval.sampling.max_tokens": "orchestrator.eval.sampling.max_completion_tokens",
    "orchestrator.train.sampling.max_tokens": "orchestrator.train.sampling.max_completion_tokens",
    "orchestrator.sampling.max_tokens": "orchestrator.train.sampling.max_completion_tokens",
    "orchestrator.sampling.": "orchestrator.train.sampling.",
    "orchestrator.train.source": "orchestrator.train.env",
    "orchestrator.env": "orchestrator.train.env",
    "orchestrator.environment": "orchestrator.train.env",
}

PRIME = FieldTable.of("prime-rl", "prime/fields.tsv", _RENAMED)
TARGETS = PRIME.targets
