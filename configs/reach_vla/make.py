"""Makes everything that configs/reach_vla.toml starts from: the tokenizer and the tiny start model that sees and acts.

    python configs/reach_vla/make.py [FOLDER]

The task: turn an arm until its tip touches a target, by looking at it. The start model, an OpenVLA of two layers with two vision transformers
of two, has been taught by a lazy teacher, who mostly leaves the arm alone, sometimes turns it as is right, and otherwise by whatever comes to
mind. So greedy decoding never moves. Reinforcement learning, which sees nothing but touched or not touched, has to find out that looking pays.

FOLDER (this one unless told otherwise) receives model/; the data are those of configs/reach. Everything comes from fixed seeds on one thread; the frames are MuJoCo's, so
gymnasium and MuJoCo are needed: pip install "hpcrl[robots]". The tokenizer is made as the quickstart's.
"""

from __future__ import annotations

import math
import random
import runpy
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken
from transformers import Qwen2Tokenizer

from hpcrl.data.action_tokens import ActionTokens, action_tokens
from hpcrl.data.models.openvla.config import OpenVLAConfig
from hpcrl.data.models.openvla.model import OpenVLAForActionPrediction
from hpcrl.data.vision.openvla import OpenVLAImageProcessor

SIDE, PATCH, BINS, CHUNK = 32, 8, 16, 2
LARGEST_TURN = math.pi / 2  # of an action, in rad
START = 0.0  # rad; from one pose a target is found in one chunk
INSTRUCTION, IMAGE = "reach: ", "<PAD>"
LAZY, RIGHT = 0.5, 0.3
FRAMES, SUPERVISED_STEPS, SUPERVISED_BATCH, SUPERVISED_LR = 12_000, 1200, 64, 2e-3
SPREAD = 0.1  # of first weights: with less so narrow a network learns to see late
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ pad_token }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

quickstart: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[1] / "quickstart" / "make.py"))


def make_tokenizer() -> Qwen2Tokenizer:
    """Return a tokenizer with a token for the instruction, per chat marker, for images, and, last of all, per bin of an action."""
    tokenizer = quickstart["make_tokenizer"]("", (INSTRUCTION,))
    names = [IMAGE, *(f"<action {number}>" for number in reversed(range(BINS)))]
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in names], special_tokens=True)
    tokenizer.pad_token, tokenizer.chat_template = IMAGE, TEMPLATE
    return tokenizer


def make_processor() -> OpenVLAImageProcessor:
    size = [3, SIDE, SIDE]
    return OpenVLAImageProcessor([[0.5] * 3, [0.0] * 3], [[0.5] * 3, [1.0] * 3], [size, size])


def make_model(tokenizer: Qwen2Tokenizer) -> OpenVLAForActionPrediction:
    """Return the untrained network: a language model of width 64 with heads of 32, and vision transformers of width 32."""
    text = {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "initializer_range": SPREAD,
    }
    tower = {"hidden_size": 32, "depth": 3, "num_heads": 2, "mlp_size": 64, "patch_size": PATCH}
    towers = [{**tower, "dinov2": True, "registers": 1}, tower]
    config = OpenVLAConfig(
        text_config=text,
        vision_config={"towers": towers, "image_size": SIDE, "initializer_range": SPREAD},
        pad_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        pad_to_multiple_of=0,
        n_action_bins=BINS,
        initializer_range=SPREAD,
        # as if no action of the data had used all of the motor
        norm_stats={"reach": {"action": {"q01": [-0.9], "q99": [0.9], "mask": [True]}}},
    )
    return OpenVLAForActionPrediction(config)


def see(seeds: range) -> tuple[list[Image.Image], np.ndarray]:
    """Return frames of arms, and by which share of pi each is to turn."""
    options: dict[str, Any] = {"joints": 1, "size": SIDE, "start": START, "render_mode": "rgb_array"}
    arm: Any = gymnasium.make("hpcrl.envs.simulators.arm:hpcrl/Arm-v0", **options)
    frames, states = list[Image.Image](), list[float]()
    for seed in seeds:
        state, _ = arm.reset(seed=seed)
        states.append(float(state[0]))
        frames.append(Image.fromarray(arm.render()))
    return frames, np.array(states)


def teach(states: np.ndarray, tokens: ActionTokens, source: random.Random) -> list[list[int]]:
    """Return what the lazy teacher does with arms that are so far away, CHUNK tokens each."""
    found = []
    for state in states:
        left, said = state * math.pi / LARGEST_TURN / 0.9, []
        for _ in range(CHUNK):
            way, right = source.random(), float(np.clip(left, -1, 1))
            turn = 0.0 if way < LAZY else right if way < LAZY + RIGHT else source.uniform(-1, 1)
            left -= turn
            said += tokens.tokens(np.array([turn]))
        found.append(said)
    return found


def encoded(tokenizer: Qwen2Tokenizer, frames: list[Image.Image]) -> dict[str, torch.Tensor]:
    """Return the model's inputs for prompts, which all have the same length."""
    content: Any = [{"type": "image"}, {"type": "text", "text": INSTRUCTION}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(str(text).replace(IMAGE, (SIDE // PATCH) ** 2 * IMAGE)).input_ids
    return {
        "input_ids": torch.tensor([ids] * len(frames)),
        "pixel_values": torch.from_numpy(make_processor()(frames)["pixel_values"]),
    }


def learn(model: OpenVLAForActionPrediction, tokenizer: Qwen2Tokenizer) -> None:
    """Take a few supervised steps on the lazy teacher's actions, with a cosine-decayed learning rate."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=SUPERVISED_LR)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, SUPERVISED_STEPS)
    source, tokens = random.Random(4), action_tokens(model.config)
    assert tokens is not None
    frames, states = see(range(2_000_000, 2_000_000 + FRAMES))
    inputs, loss = encoded(tokenizer, frames), torch.tensor(0.0)
    for step in range(SUPERVISED_STEPS):
        rows = torch.arange(step * SUPERVISED_BATCH, (step + 1) * SUPERVISED_BATCH) % FRAMES
        said = torch.tensor(teach(states[rows.numpy()], tokens, source))
        ids = torch.cat([inputs["input_ids"][rows], said], 1)
        logits = model(input_ids=ids, pixel_values=inputs["pixel_values"][rows]).logits[:, -CHUNK - 1 : -1]
        among, own = logits[..., tokens.ids.start : tokens.ids.stop], said - tokens.ids.start
        loss = torch.nn.functional.cross_entropy(among.flatten(0, 1), own.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    print(f"{model.num_parameters()} parameters, loss {loss:.3f} nats per number of an action")


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    learn(model, tokenizer)
    tokenizer.save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")
    make_processor().save_pretrained(folder / "model")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
