"""Images in requests to vLLM: the tensors that the trainer computes with too, in the place of vLLM's own preparation of images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from hpcrl.data.vision.families import GRID, PIXELS
from hpcrl.data.vision.reader import SeenImage
from hpcrl.errors import EngineError

_IMAGE = "image"  # vLLM's name of the modality
_KEPT = 16  # images whose texts are kept, as the turns and samples of a group ask with the same ones; 25 MB for 1,000 tokens


def features(prompt_ids: Sequence[int], images: Sequence[SeenImage], salt: str) -> dict[str, Any]:
    """Return what a request to generate says of the images in its prompt, at least one.

    Args:
        salt: vLLM takes what its tower made of an image for another request with this salt; with another one, the tower looks again.

    Raises:
        EngineError: the prompt has not the placeholders of these images.
    """
    return {
        "mm_hashes": {_IMAGE: [image.digest + salt for image in images]},
        "mm_placeholders": {_IMAGE: list(_places(prompt_ids, images))},
        "kwargs_data": {_IMAGE: [_encoded(image) for image in images]},
    }


def _places(prompt_ids: Sequence[int], images: Sequence[SeenImage]) -> Iterator[dict[str, int]]:
    """Yield where the placeholders of each image begin and how many there are."""
    at = 0
    for image in images:
        while at < len(prompt_ids) and prompt_ids[at] != image.token:
            at += 1
        if list(prompt_ids[at : at + image.tokens]) != [image.token] * image.tokens:
            raise EngineError(f"a prompt has not the {image.tokens} placeholders of an image from token {at} on")
        yield {"offset": at, "length": image.tokens}
        at += image.tokens


@lru_cache(_KEPT)
def _encoded(image: SeenImage) -> str:
    """Return the tensors of an image as vLLM's token route takes them."""
    # importing these takes seconds, and most runs have no images
    import torch
    from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import encode_mm_kwargs_item
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

    tensors: Any = {name: torch.as_tensor(array) for name, array in image.tensors.items()}
    fields = {PIXELS: MultiModalFieldConfig.batched(_IMAGE)}
    if GRID in tensors:
        sizes = torch.tensor([len(tensors[PIXELS])])
        fields = {
            PIXELS: MultiModalFieldConfig.flat_from_sizes(_IMAGE, sizes),
            GRID: MultiModalFieldConfig.batched(_IMAGE, keep_on_cpu=True),
        }
    (item,) = MultiModalKwargsItems.from_hf_inputs(tensors, fields)[_IMAGE]
    return encode_mm_kwargs_item(item)
