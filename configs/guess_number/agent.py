"""Plays guess_number as a program that knows nothing of training: it has OpenAI's client, a row, and a file for its reward.

configs/guess_number_agent.toml starts it for each sample. By hand, at any server: OPENAI_BASE_URL=… OPENAI_API_KEY=… HPCRL_MODEL=… HPCRL_ROW=row.json HPCRL_REWARD=reward.json python agent.py
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from openai import OpenAI


def main() -> None:
    row = json.loads(Path(os.environ["HPCRL_ROW"]).read_text())
    low, high, secret = row["low"], row["high"], int(row["reward_spec"]["ground_truth"])
    client, messages, guesses, found = OpenAI(), row["prompt"], 0, False
    while guesses < row["max_turns"] and not found:
        answer = client.chat.completions.create(model=os.environ["HPCRL_MODEL"], messages=messages)
        text = answer.choices[0].message.content
        guesses, found = guesses + 1, text == str(secret)
        valid = text.isdecimal() and low <= int(text) <= high
        told = ("Higher." if int(text) < secret else "Lower.") if valid else f"Say a whole number from {low} to {high}."
        messages = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": told}]
    outcome = {"reward": float(found), "metrics": {"found": float(found), "guesses": guesses}}
    Path(os.environ["HPCRL_REWARD"]).write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
