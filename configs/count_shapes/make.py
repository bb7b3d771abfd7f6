"""Makes everything that configs/count_shapes.toml starts from: the tokenizer, the tiny start model that sees, and the datasets with their images.

    python configs/count_shapes/make.py [FOLDER]

The task: say how many shapes of a colour an image shows, `count: red` -> `2`. An image has nine cells, each empty or with a square or a disc
in one of three colours; where in its cell a shape lies, its size and its brightness vary. The start model, a Qwen2.5-VL of two layers with a
vision tower of two, has been taught by a lazy teacher who mostly says `0` without looking, and otherwise the right number: greedy decoding
says `0`. Reinforcement learning, which sees nothing but right or wrong, has to find out that looking pays.

FOLDER (this one unless told otherwise) receives model/ and data/. Everything comes from fixed seeds on one thread: the data are the same
bytes each time with the same Pillow, and on the same kind of machine the weights are too. The tokenizer is made as the quickstart's.
"""

from __future__ import annotations

import io
import random
import runpy
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image, ImageDraw
from tokenizers import AddedToken
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

COLOURS = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1)}
CELLS, CELL = 3, 8  # cells of a side, and pixels of a cell's; a cell is what one token sees
SIDE = CELLS * CELL
MOST = 4
INSTRUCTION = "count: "
VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LAZY = 0.6
TRAIN_ROWS, VALIDATION_ROWS = 2048, 256
SUPERVISED_STEPS, SUPERVISED_BATCH, SUPERVISED_LR = 500, 64, 2e-3
SPREAD = 0.1  # of first weights: with less so narrow a network learns to see late

quickstart: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[1] / "quickstart" / "make.py"))


def make_tokenizer() -> Qwen2Tokenizer:
    """Return a tokenizer with one token per digit, per colour, per chat marker, and those that stand around and for images."""
    tokenizer = quickstart["make_tokenizer"]("0123456789", (INSTRUCTION, *COLOURS))
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in VISION], special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_processor() -> Qwen2VLImageProcessorPil:
    """Return what cuts an image into patches of 4 x 4 pixels, 2 x 2 of which are one token."""
    size = {"shortest_edge": CELL * CELL, "longest_edge": SIDE * SIDE}
    return Qwen2VLImageProcessorPil(patch_size=CELL // 2, merge_size=2, temporal_patch_size=2, size=size)


def make_model(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    """Return the untrained network: a language model of width 64 with heads of 32, and a vision tower of width 32 with heads of 32."""
    start, end, image, video = tokenizer.convert_tokens_to_ids(VISION)
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "initializer_range": SPREAD,
    }
    vision = {
        "depth": 2,
        "initializer_range": SPREAD,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 1,
        "out_hidden_size": 64,
        "patch_size": CELL // 2,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def draw(source: random.Random, counts: dict[str, int]) -> Image.Image:
    """Return an image with so many shapes of each colour."""
    image = Image.new("RGB", (SIDE, SIDE), (source.randrange(60),) * 3)
    painter, cells = ImageDraw.Draw(image), source.sample(range(CELLS * CELLS), sum(counts.values()))
    for cell, colour in zip(cells, (name for name, count in counts.items() for _ in range(count)), strict=True):
        side = source.randint(5, 7)
        left, top = (CELL * at + source.randint(0, CELL - side) for at in (cell % CELLS, cell // CELLS))
        fill = tuple(source.randint(160, 255) * part for part in COLOURS[colour])
        shape = source.choice([painter.rectangle, painter.ellipse])
        shape((left, top, left + side - 1, top + side - 1), fill=fill)
    return image


def draw_row(source: random.Random) -> tuple[Image.Image, str, int]:
    """Return an image, the colour that is asked for, and how many there are of it: each number is as frequent."""
    colour, count = source.choice(list(COLOURS)), source.randint(0, MOST)
    others = [name for name in COLOURS if name != colour]
    return (
        draw(source, {colour: count, others[0]: source.randint(0, 2), others[1]: source.randint(0, 3)}),
        colour,
        count,
    )


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "png")
    return file.getvalue()


def write_rows(path: Path, rows: list[tuple[Image.Image, str, int]]) -> None:
    table = [
        {
            "data_source": "count_shapes",
            "prompt": [{"role": "user", "content": f"<image>{INSTRUCTION}{colour}"}],
            "images": [{"bytes": png(image)}],
            "reward_spec": {"method": "rule", "ground_truth": str(count)},
        }
        for image, colour, count in rows
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(table), path)


def encoded(tokenizer: Qwen2Tokenizer, rows: list[tuple[Image.Image, str, int]]) -> dict[str, torch.Tensor]:
    """Return the model's inputs for prompts, which all have the same length."""
    processor, ids = make_processor(), []
    images = processor([image for image, _, _ in rows], return_tensors="pt")
    for _, colour, _ in rows:
        content = [{"type": "image"}, {"type": "text", "text": INSTRUCTION + colour}]
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        ids.append(tokenizer(text.replace(VISION[2], CELLS * CELLS * VISION[2])).input_ids)
    tokens = torch.tensor(ids)
    kinds = (tokens == tokenizer.convert_tokens_to_ids(VISION[2])).int()
    return {"input_ids": tokens, "mm_token_type_ids": kinds, **images}


def learn(model: Qwen2_5_VLForConditionalGeneration, tokenizer: Qwen2Tokenizer) -> None:
    """Take a few supervised steps on the lazy teacher's answers, with a cosine-decayed learning rate."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=SUPERVISED_LR)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, SUPERVISED_STEPS)
    source = random.Random(4)
    for _ in range(SUPERVISED_STEPS):
        rows = [draw_row(source) for _ in range(SUPERVISED_BATCH)]
        inputs = encoded(tokenizer, rows)
        said = ["0" if source.random() < LAZY else str(count) for _, _, count in rows]
        answers = torch.tensor([tokenizer(answer + "<|end|>").input_ids for answer in said])
        inputs["input_ids"] = torch.cat([inputs["input_ids"], answers], 1)
        kinds = inputs["mm_token_type_ids"]
        inputs["mm_token_type_ids"] = torch.cat([kinds, torch.zeros_like(answers, dtype=torch.int32)], 1)
        logits = model(**inputs).logits[:, -answers.shape[1] - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


@torch.no_grad()
def score(model: Qwen2_5_VLForConditionalGeneration, tokenizer: Qwen2Tokenizer, rows: list[Any]) -> tuple[float, float]:
    """Return the share of rows that greedy decoding counts right, and the mean probability of the right number."""
    logits = model(**encoded(tokenizer, rows)).logits[:, -1]
    right = torch.tensor(tokenizer.convert_tokens_to_ids([str(count) for _, _, count in rows]))
    probabilities = logits.softmax(-1).gather(1, right[:, None])
    return (logits.argmax(-1) == right).float().mean().item(), probabilities.mean().item()


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    validation = [draw_row(source) for source in [random.Random(1)] for _ in range(VALIDATION_ROWS)]
    train = [draw_row(source) for source in [random.Random(2)] for _ in range(TRAIN_ROWS)]
    write_rows(folder / "data" / "train.parquet", train)
    write_rows(folder / "data" / "validation.parquet", validation)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    learn(model, tokenizer)
    tokenizer.save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")
    make_processor().save_pretrained(folder / "model")
    greedy, sampled = score(model, tokenizer, validation)
    print(f"{model.num_parameters()} parameters, on validation greedy score {greedy:.3f}, sampled {sampled:.3f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
