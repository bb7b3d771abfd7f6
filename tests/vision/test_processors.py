"""Videos as hpcrl prepares them are those of transformers' own processors, which need torchvision: `make vision`.

`python -m tests.vision.test_processors FOLDER` compares them, in a process that finds torchvision.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcrl.config.sections.generator import ChatTemplateConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.data.chat.prompt_tokens import ChatTurns
from hpcrl.data.tokenizer import load_tokenizer
from hpcrl.data.vision.families import GRID, PIXELS, SECONDS, Videos
from hpcrl.data.vision.frames import FrameChoice, Video, frames_of
from hpcrl.data.vision.messages import with_images
from hpcrl.data.vision.reader import ImageReader
from hpcrl.data.vision.video_processor import VideoProcessor
from tests.paths import ROOT
from tests.vision.material import drawn, write_model

FRAMES, FPS = 7, 3.0
LEAST, MOST = 128 * 28 * 28, 768 * 28 * 28


@pytest.mark.vision
def test_videos_are_those_of_transformers(tmp_path: Path) -> None:
    paths = Path(__file__).parent / "operators", Path(os.environ["HPCRL_TORCHVISION"]), ROOT
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    subprocess.run([sys.executable, "-m", "tests.vision.test_processors", str(tmp_path)], check=True, env=environment)


class Sizes:
    patch_size, merge_size, temporal_patch_size = 14, 2, 2


def compare_sizes(videos: Videos) -> None:
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import smart_resize as of_each
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as of_all

    processor, drawn_from = VideoProcessor(Sizes(), videos, LEAST, MOST), random.Random(0)
    for _ in range(5000):
        frames = drawn_from.choice([2, 3, 4, 5, 9, 64])
        height, width = (drawn_from.randint(20, 1500) for _ in range(2))
        _, rows, columns = processor.grid(FrameChoice(range(frames), [0.0] * frames, 1.0, height, width))
        wanted = (
            of_all(frames, height, width, 2, 28, LEAST, MOST)
            if videos == "timestamps"
            else of_each(height, width, 28, LEAST, MOST)
        )
        assert (rows * 14, columns * 14) == wanted, (videos, frames, height, width)


def compare_prompts(model: Path, kind: str) -> None:
    """Tokens, grids and times, and pixels of frames that are not resized; of others transformers' resizing differs by rounding."""
    from transformers import Qwen2_5_VLProcessor, Qwen2VLVideoProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.video_utils import VideoMetadata

    pretrained = Pretrained(str(model))
    tokenizer, reader = load_tokenizer(pretrained, ChatTemplateConfig()), ImageReader.of(pretrained)
    makes = {
        "qwen2_5_vl": (Qwen2_5_VLProcessor, Qwen2VLVideoProcessor),
        "qwen3_vl": (Qwen3VLProcessor, Qwen3VLVideoProcessor),
    }
    whole, of_videos = makes[kind]
    images = Qwen2VLImageProcessorPil.from_pretrained(model)
    patches = {
        name: getattr(images, name)
        for name in ("patch_size", "merge_size", "temporal_patch_size", "image_mean", "image_std")
    }
    theirs: Any = whole(
        images, tokenizer, of_videos.from_pretrained(model, **patches), chat_template=tokenizer.chat_template
    )
    for width, largest in ((24, 1e-5), (40, 0.06)):
        video = Video.of([drawn(at, width, 24) for at in range(FRAMES)], fps=FPS)
        messages = [{"role": "user", "content": [video.part, {"type": "text", "text": "count: red"}]}]
        ids, (seen,) = ChatTurns(tokenizer, {}, reader=reader).opening(with_images(messages))
        frames = np.stack([np.asarray(frame) for frame in frames_of(video, FrameChoice.of(video, FRAMES))])
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": [{"type": "video"}, messages[0]["content"][1]]}],
            tokenize=False,
            add_generation_prompt=True,
        )
        metadata = VideoMetadata(total_num_frames=FRAMES, fps=FPS, frames_indices=list(range(FRAMES)))
        wanted = theirs(
            text=[text], videos=[frames], video_metadata=[metadata], do_sample_frames=False, return_tensors="pt"
        )
        assert wanted["input_ids"][0].tolist() == ids
        assert wanted["video_grid_thw"].tolist() == seen.tensors[GRID].tolist()
        assert wanted.get("second_per_grid_ts", [None])[0] == pytest.approx(seen.tensors.get(SECONDS, [None])[0])
        np.testing.assert_allclose(wanted["pixel_values_videos"].numpy(), seen.tensors[PIXELS], rtol=0, atol=largest)


if __name__ == "__main__":
    compare_sizes("seconds")
    compare_sizes("timestamps")
    for kind in ("qwen2_5_vl", "qwen3_vl"):
        compare_prompts(write_model(Path(sys.argv[1]) / kind, kind), kind)
