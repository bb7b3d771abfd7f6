"""Builds the inputs of a vision-language model beside tokens: the pixels of the images of several rows, and positions.

Letters for shapes: B rows, T tokens of each, padded; N images.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from hpcrl.data.vision.families import GRID, PIXELS, SECONDS, STATES, family_of


def model_inputs(images: Sequence[Mapping[str, Any]], device: torch.device) -> dict[str, torch.Tensor]:
    """Return the tensors of images, in the order of their placeholders, as a model takes them.

    Args:
        images: those of each, as of SeenImage.
    """
    found = {
        name: [torch.as_tensor(image[name]) for image in images if name in image] for name in (PIXELS, GRID, STATES)
    }
    return {name: torch.cat(tensors).to(device) for name, tensors in found.items() if tensors}


def blank_image(model: PreTrainedModel, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the smallest image that a model takes, black, and the state 0 of a robot where it is shown one."""
    vision: Any = model.config.vision_config
    if hasattr(model.base_model, "get_rope_index"):
        side = vision.spatial_merge_size
        numbers = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        grid = torch.tensor([[1, side, side]], device=device)
        return {PIXELS: torch.zeros(side * side, numbers, device=device), GRID: grid}
    pixels = torch.zeros(1, vision.num_channels, vision.image_size, vision.image_size, device=device)
    if getattr(model.config, "use_proprio", False):
        return {PIXELS: pixels, STATES: torch.zeros(1, model.config.proprio_dim, device=device)}
    return {PIXELS: pixels}


def image_features(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return all that the vision tower gives for images: what takes the place of placeholders, and what further layers add."""
    body: Any = model.base_model
    strategy = {} if GRID in inputs else _selection(model)
    found = body.get_image_features(**inputs, **strategy, return_dict=True)
    return [*found.pooler_output, *(getattr(found, "deepstack_features", None) or [])]


def _selection(model: PreTrainedModel) -> dict[str, Any]:
    names = "vision_feature_layer", "vision_feature_select_strategy"
    return {name: getattr(model.config, name) for name in names}


def has_planes(model: PreTrainedModel) -> bool:
    """Return whether a model's tokens have three positions, in time, height and width (M-RoPE, arXiv:2409.12191, section 2.1)."""
    return hasattr(model.base_model, "get_rope_index")


def plane_positions(
    model: PreTrainedModel, ids_BT: torch.Tensor, filled_BT: torch.Tensor, images: Sequence[Mapping[str, Any]]
) -> torch.Tensor:
    """Return the positions [3, B, T] int64 of the tokens of rows (arXiv:2409.12191, section 2.1); 0 in padding.

    A text continues in all three planes alike, behind the largest position so far. Patches of an image have their row and column in the last two
    planes, and in the first the time, in steps of arXiv:2502.13923, section 2.1.2. Transformers 5.17 counts a video's seconds without their
    fraction. It continues the text behind a video from the video's height or width, however long the video is. Its generation and vLLM do not.

    Args:
        filled_BT: 1 where there is no padding.
        images: of all rows, in the order of their placeholders, as of SeenImage.
    """
    config: Any = model.config
    placeholders = torch.tensor([config.image_token_id, config.video_token_id], device=ids_BT.device)
    grids, filled_BT = iter(_grids(config, images)), filled_BT.bool()
    positions = torch.zeros(3, *ids_BT.shape, dtype=torch.int64)
    for row, (seen_T, filled_T) in enumerate(zip(torch.isin(ids_BT, placeholders).cpu(), filled_BT.cpu(), strict=True)):
        positions[:, row, filled_T] = _of_row(seen_T[filled_T], grids)
    return positions.to(ids_BT.device)


def _of_row(seen_T: torch.Tensor, grids: Iterator[tuple[int, int, int, float]]) -> torch.Tensor:
    length, begin, position, parts = len(seen_T), 0, 0, list[torch.Tensor]()
    places = seen_T.nonzero()[:, 0].tolist()
    at = 0
    while at < len(places) and (grid := next(grids, None)) is not None:
        text = places[at] - begin
        parts.append((position + torch.arange(text)).expand(3, text))
        position += text
        time, height, width, step = grid
        when = (torch.arange(time, dtype=torch.float64) * step).long()
        patches = torch.meshgrid(when, torch.arange(height), torch.arange(width), indexing="ij")
        parts.append(position + torch.stack(patches).flatten(1))
        position = int(parts[-1].max()) + 1
        begin += text + time * height * width
        at += time * height * width
    parts.append((position + torch.arange(length - begin)).expand(3, length - begin))
    return torch.cat(parts, 1)


def _grids(config: Any, images: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, int, int, float]]:
    """Yield for each run of placeholders its tokens along time, height and width, and how far the position goes on from one time to the next."""
    family, vision = family_of(config), config.vision_config
    has_timestamps = family is not None and family.videos == "timestamps"
    for image in images:
        time, *sides = (int(count) for count in image[GRID][0])
        height, width = (side // vision.spatial_merge_size for side in sides)
        step = float(image[SECONDS][0]) * vision.tokens_per_second if SECONDS in image else 1.0
        yield from [(1, height, width, step)] * time if has_timestamps else [(time, height, width, step)]


def one_kind(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return tokens with the placeholder of images for those of videos: what stands for them is made by the same tower, in one pass.

    Ranks have to gather its weights equally often, whether they see images, videos or both.
    """
    config: Any = model.config
    video = getattr(config, "video_token_id", None)
    return ids if video is None else torch.where(ids == video, config.image_token_id, ids)
