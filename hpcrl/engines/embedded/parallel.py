"""Actions of which all tokens are sampled in one forward pass (OpenVLA-OFT, arXiv:2502.19645, section 4.1), by models that make them so.

Behind the prompt stand as many places as the actions have tokens, which the model sees nothing of, and the token that ends a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from hpcrl.data.vision.inputs import model_inputs
from hpcrl.engines.embedded.sampling import RowSampling, Sampling, allowed, among_allowed, choose
from hpcrl.rollout.engines.base import Generation


def decodes_in_parallel(model: PreTrainedModel) -> bool:
    return bool(getattr(model.config, "parallel_decoding", False))


@torch.inference_mode()
def said_at_once(model: PreTrainedModel, asked: Sequence[Any], end: int, version: int) -> list[list[Generation]]:
    """Return the responses to some requests with prompts of their own and equally many tokens to generate.

    Args:
        asked: as of `batch.Request`.
        end: the token that ends a text.
        version: of the weights.
    """
    device, count = model.device, asked[0].limit
    width = max(len(request.prompt) for request in asked)
    missing = [width - len(request.prompt) for request in asked]
    ids = [
        [0] * short + request.prompt + [request.sampling.allowed_token_ids[0]] * count + [end]
        for short, request in zip(missing, asked, strict=True)
    ]
    columns, begins = torch.arange(width + count + 1, device=device), torch.tensor(missing, device=device)
    images = [image.tensors for request in asked for image in request.images]
    logits_QKV = model(
        input_ids=torch.tensor(ids, device=device),
        attention_mask=columns >= begins[:, None],
        position_ids=(columns - begins[:, None]).clamp(min=0),
        use_cache=False,
        logits_to_keep=count + 2,
        **(model_inputs(images, device) if images else {}),
    ).logits[:, :count]
    return [
        _sampled(logits_KV, request.sampling, request.seeds, version)
        for logits_KV, request in zip(logits_QKV, asked, strict=True)
    ]


def _sampled(logits_KV: torch.Tensor, sampling: Sampling, seeds: Sequence[int], version: int) -> list[Generation]:
    """Return a response for each seed; its token n is drawn as that of any response would be at that place."""
    count, device = len(logits_KV), logits_KV.device
    own = allowed([sampling], device)
    if own is not None:
        logits_KV = among_allowed(logits_KV, own.expand(count, -1))
    rows, places = (
        RowSampling.of([(sampling, seed) for seed in seeds for _ in range(count)], device),
        torch.arange(count, device=device),
    )
    choice = choose(logits_KV.repeat(len(seeds), 1), rows, places.repeat(len(seeds)))
    tokens, logprobs = (values.view(len(seeds), count).tolist() for values in (choice.tokens, choice.logprobs))
    masks: list[list[list[int]]] | None = None
    if choice.kept is not None and sampling.logprobs > 0:
        masks = [
            [kept.nonzero()[:, 0].tolist() for kept in of_row] for of_row in choice.kept.view(len(seeds), count, -1)
        ]
    return [
        Generation(said, chances, "length", [version] * count, masks[at] if masks else None)
        for at, (said, chances) in enumerate(zip(tokens, logprobs, strict=True))
    ]
