"""Makes everything that configs/reach_pi05.toml starts from: the tokenizer, the tiny PI0.5 and the two datasets.

    python configs/reach_pi05/make.py [FOLDER]

The task is that of configs/reach.toml, with actions that are numbers: turn the two joints of an arm until its tip touches a target. The start
model has been taught by flow matching from a weak teacher, who turns each joint by a part of what is right, and by whatever comes to mind beside it.
Reinforcement learning, which sees nothing but touched or not touched, has to find out that turning further, and straighter, pays.

FOLDER (this one unless told otherwise) receives model/ and data/. Everything comes from fixed seeds on one thread: the data are the same bytes each
time, and on the same kind of machine the weights are too.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file
from transformers import Qwen2Tokenizer

from hpcrl.families.pi05.architecture import Pi05Architecture, file_name
from hpcrl.families.pi05.inputs import written_prompt
from hpcrl.families.pi05.network import Pi05
from hpcrl.families.pi05.samples import read_inputs

TASK, JOINTS, LARGEST_TURN, BINS = "reach", 2, 0.5, 256  # the turn as a share of pi
RIGHT, WHIM = 0.4, 0.35
TRAIN_ROWS, VALIDATION_ROWS, FIRST_VALIDATION = 4096, 128, 1_000_000
STEPS, BATCH, LR = 1500, 128, 2e-3
CHUNK, NUMBERS = 2, 4
SPACE, LINE = "Ġ", "Ċ"  # as byte-level tokenizers write them

quickstart: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[1] / "quickstart" / "make.py"))


def make_tokenizer() -> Qwen2Tokenizer:
    """Return a tokenizer with one token per number of a bin, and those of the rest of a turn's text."""
    numbers = [str(number) for number in range(10, BINS)]
    return quickstart["make_tokenizer"](
        f"{SPACE}{LINE}:,;0123456789", ("Task", TASK, "State", "Action", *reversed(numbers))
    )


def make_network(vocabulary: int) -> Pi05:
    """Return the untrained network: PaliGemma of width 32, with images of 16 x 16 pixels, and an expert of width 64."""
    gemma = {
        "model_type": "gemma", "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "vocab_size": vocabulary + 1,
    }  # fmt: skip
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "patch_size": 8, "image_size": 16, "vision_use_head": False,
    }  # fmt: skip
    vlm = {"text_config": gemma, "vision_config": vision, "projection_dim": 32, "image_token_id": vocabulary}
    expert = {**gemma, "hidden_size": 64, "intermediate_size": 128}
    entries = {"vlm_config": vlm, "expert_config": expert, "chunk_size": CHUNK, "max_action_dim": NUMBERS}
    return Pi05(Pi05Architecture.of(entries))


def write_rows(path: Path, seeds: range) -> None:
    prompt = [{"role": "user", "content": TASK}]
    rows = [{"data_source": "reach", "prompt": prompt, "env_class": "robot", "seed": seed} for seed in seeds]
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def teach(states: torch.Tensor) -> torch.Tensor:
    """Return the weak teacher's chunks [N, CHUNK, NUMBERS] for states [N, JOINTS]: what is left to turn falls by what was turned."""
    chunks, left = torch.zeros(len(states), CHUNK, NUMBERS), states.clone()
    for at in range(CHUNK):
        right = (left / LARGEST_TURN).clamp(-1, 1)
        turned = (RIGHT * right + WHIM * torch.randn_like(right)).clamp(-1, 1)
        chunks[:, at, :JOINTS] = turned
        left = (left - LARGEST_TURN * turned + 1) % 2 - 1
    return chunks


def learn(network: Pi05, tokenizer: Qwen2Tokenizer) -> None:
    """Take supervised steps of flow matching (arXiv:2210.02747) on the teacher's chunks, with a cosine-decayed learning rate."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    size = network.architecture.image_size
    for _ in range(STEPS):
        states = 2 * torch.rand(BATCH, JOINTS) - 1
        texts = [torch.tensor(tokenizer(written_prompt(TASK, state.numpy())).input_ids) for state in states]
        chunks, t = teach(states), torch.rand(BATCH, 1)
        noise = torch.randn_like(chunks)
        x = t[:, :, None] * noise + (1 - t[:, :, None]) * chunks
        velocity = network(*read_inputs(texts, [None] * BATCH, size), x[:, None], t)[:, 0]
        loss = (velocity - (noise - chunks)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    print(f"{sum(each.numel() for each in network.parameters())} parameters, flow matching loss {loss:.3f}")


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    write_rows(folder / "data" / "train.parquet", range(TRAIN_ROWS))
    write_rows(folder / "data" / "validation.parquet", range(FIRST_VALIDATION, FIRST_VALIDATION + VALIDATION_ROWS))
    tokenizer = make_tokenizer()
    network = make_network(len(tokenizer))
    learn(network, tokenizer)
    tokenizer.save_pretrained(folder / "model")
    (folder / "model" / "config.json").write_text(network.architecture.written() + "\n")
    tensors = {file_name(name): each.detach().contiguous() for name, each in network.named_parameters()}
    save_file(tensors, folder / "model" / "model.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
