"""Computes with exports in transformers 4, by a Python that has it and not hpcrl: reads a JSON object, writes one.

{"models": {name: folder}, "ids": [ids], "tokenizers": {name: folder}, "text": text} -> {"models": {name: logprobs}, "tokenizers": {name: ids}}
"""

import json
import sys

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    asked = json.load(sys.stdin)
    ids, found = torch.tensor([asked["ids"]]), {"version": transformers.__version__, "models": {}, "tokenizers": {}}
    for name, folder in asked["models"].items():
        model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32)
        with torch.no_grad():
            logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        found["models"][name] = logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()
    for name, folder in asked["tokenizers"].items():
        found["tokenizers"][name] = AutoTokenizer.from_pretrained(folder).encode(
            asked["text"], add_special_tokens=False
        )
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
