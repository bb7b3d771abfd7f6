"""What an evaluation's samples said and scored, as JSON lines: trainer.dump_eval_results, `hpcrl eval`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from hpcrl.data.rollouts import Decode, parts_of
from hpcrl.rollout.generate import Group, earned


def append_evaluated(path: Path, group: Group, decode: Decode) -> None:
    """Append a line per sample of a group; hpcrl/data/rollouts.py reads them.

    Args:
        decode: token ids to text, special tokens included.
    """
    prompt = group.work.prompt
    several = any(len(messages) > 1 for messages in group.conversations)
    lines = [
        {
            "prompt": prompt.messages,
            "env_class": prompt.env_class,
            "data_source": prompt.data_source,
            "response": messages if several else text,
            "score": earned(rows),
            "stop_reason": rows[-1].stop_reason,
            "env_metrics": rows[-1].env_metrics,
            "group_id": group.work.group_id,
            "parts": [
                asdict(part)
                for sample in rows
                for part in parts_of(
                    sample.token_ids.numpy(),
                    sample.versions.numpy(),
                    sample.loss_mask.numpy(),
                    sample.rewards.numpy(),
                    decode,
                )
            ],
        }
        for text, messages, rows in zip(group.texts, group.conversations, group.rows, strict=True)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
