"""Rows of an action policy's samples: a turn's text tokens, then one entry for each executed action.

The id of such an entry is the number of the tokens that there are, plus the place of the action in its chunk. `Row.tensors` has beside them:

    path     [S + 1, H, D] float32, the chunk from noise to actions
    actions  [2] int32, how many of its H actions were done, and how many of the D numbers the robot has
    images   [C, size, size, 3] uint8, what cameras showed; absent without cameras
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PATH, ACTIONS, IMAGES = "path", "actions", "images"


def read_inputs(
    texts: Sequence[torch.Tensor], images: Sequence[torch.Tensor | None], size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the network's inputs of B turns: text [B, T] and its mask without padding, images [B, C, 3, size, size] and their mask.

    Args:
        texts: [T] int64 of each turn.
        images: [C, size, size, 3] uint8 of each turn; None: no camera has shown any. There is always room for one.
        size: height and width of an image.
    """
    import torch

    device, lengths = texts[0].device, torch.tensor([len(text) for text in texts], device=texts[0].device)
    ids = torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True)
    valid = torch.arange(ids.shape[1], device=device) < lengths[:, None]
    most = max(1, *(0 if each is None else len(each) for each in images))
    pixels = torch.zeros(len(texts), most, 3, size, size, device=device)
    shown = torch.zeros(len(texts), most, dtype=torch.bool, device=device)
    for row, each in enumerate(images):
        if each is not None:
            pixels[row, : len(each)] = each.movedim(-1, 1).float() / 127.5 - 1
            shown[row, : len(each)] = True
    return ids, valid, pixels, shown
