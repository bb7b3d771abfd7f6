"""Images and videos in requests to vLLM: the trainer's tensors in place of vLLM's own preparation of images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hpcrl.data.vision.families import GRID, PIXELS, SECONDS
from hpcrl.data.vision.reader import SeenImage
from hpcrl.errors import RefusedRequestError

_KEPT = 16  # images whose texts are kept, as the turns and samples of a group ask with the same ones; 25 MB for 1,000 tokens


@dataclass(frozen=True)
class _Item:
    """What vLLM knows as one image or video: what stands for it is one run of placeholders.

    Attributes:
        modality: vLLM's name of it.
        places: where the run begins, and how long it is.
        part: number of the run, of as many as the image has.
    """

    modality: str
    places: dict[str, int]
    image: SeenImage
    part: int
    parts: int


def features(prompt_ids: Sequence[int], images: Sequence[SeenImage], salt: str) -> dict[str, Any]:
    """Return the multimodal features of a prompt in a request to vLLM, at least one.

    Args:
        salt: vLLM takes what its tower made of an image for another request with this salt; with another one, the tower looks again.
    """
    found: dict[str, Any] = {"mm_hashes": {}, "mm_placeholders": {}, "kwargs_data": {}}
    for item in _items(prompt_ids, images):
        part = f"-{item.part}" if item.parts > 1 else ""
        values = (
            item.image.digest + part + salt,
            item.places,
            _encoded(item.image, item.modality, item.part, item.parts),
        )
        for of_kind, value in zip(found.values(), values, strict=True):
            of_kind.setdefault(item.modality, []).append(value)
    return found


def _items(prompt_ids: Sequence[int], images: Sequence[SeenImage]) -> Iterator[_Item]:
    """Yield what stands in a prompt, in its order.

    A video whose pairs of frames have placeholders of their own is sent as that many images. Their positions are the same, and vLLM's
    places in requests with tokens have no gaps.
    """
    at = 0
    for image in images:
        ids, first = list(image.ids), image.ids[0]
        while at < len(prompt_ids) and (prompt_ids[at] != first or list(prompt_ids[at : at + len(ids)]) != ids):
            at += 1
        if at == len(prompt_ids):
            raise RefusedRequestError(f"a prompt has not the {image.tokens} placeholders of an image")
        seen = [own == image.token for own in ids]
        runs = [place for place, stands in enumerate(seen) if stands and not (place and seen[place - 1])]
        length, times = image.tokens // len(runs), int(image.tensors[GRID][0, 0]) if GRID in image.tensors else 1
        modality = "video" if times > len(runs) else "image"
        for part, run in enumerate(runs):
            yield _Item(modality, {"offset": at + run, "length": length}, image, part, len(runs))
        at += len(ids)


@lru_cache(_KEPT)
def _encoded(image: SeenImage, modality: str, part: int, parts: int) -> str:
    # importing these takes seconds, and most runs have no images
    import torch
    from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import encode_mm_kwargs_item
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

    tensors: Any = {name: torch.as_tensor(array) for name, array in image.tensors.items()}
    if GRID not in tensors:
        fields = {PIXELS: MultiModalFieldConfig.batched(modality)}
    else:
        pixels = tensors[PIXELS].chunk(parts)[part]
        time, *sides = tensors[GRID][0].tolist()
        names = {"image": (PIXELS, GRID), "video": ("pixel_values_videos", "video_grid_thw")}[modality]
        tensors |= dict(zip(names, (pixels, torch.tensor([[time // parts, *sides]])), strict=True))
        kept = {name: MultiModalFieldConfig.batched(modality, keep_on_cpu=True) for name in (names[1], SECONDS)}
        fields = {names[0]: MultiModalFieldConfig.flat_from_sizes(modality, torch.tensor([len(pixels)])), **kept}
    (item,) = MultiModalKwargsItems.from_hf_inputs(tensors, fields)[modality]
    return encode_mm_kwargs_item(item)
