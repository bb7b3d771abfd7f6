"""Images in packed samples: what the vision tower is given, and the positions of tokens among them.

Letters for shapes as in hpcrl/types.py; N images.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from hpcrl.data.vision.inputs import blank_image, has_planes, image_features, model_inputs, one_kind, plane_positions
from hpcrl.data.vision.reader import row_images
from hpcrl.types import MicroBatch, to_device

Inputs = dict[str, torch.Tensor]


class Sight:
    """What of a vision-language model looks at images; its text part is as that of any other model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def inputs(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor, Inputs]:
        """Return what the model takes of a micro-batch.

        Returns:
            Its tokens [P], with the placeholder of images for those of videos; their positions [P], or [P, 3] where the model has three; the
            pixels of images in the order of their placeholders, empty without any.
        """
        images = [image for row in batch.tensors for image in row_images(row)]
        device = batch.token_ids.device
        inputs = model_inputs(images, device) if images else Inputs()
        token_ids = one_kind(self._model, batch.token_ids) if images else batch.token_ids
        if not inputs or not has_planes(self._model):
            return token_ids, batch.positions, inputs
        rows_BT, lengths = _rows(batch), to_device(torch.tensor(batch.lengths), device)
        filled_BT = torch.arange(rows_BT.shape[1], device=device) < lengths[:, None]
        positions = plane_positions(self._model, rows_BT, filled_BT, images)
        return token_ids, positions.movedim(0, -1)[filled_BT], inputs

    def nothing(self, device: torch.device) -> torch.Tensor:
        """Return 0, which depends on all of the vision tower: ranks whose micro-batch shows no image take part in gathering its weights and
        adding its gradients."""
        features = image_features(self._model, blank_image(self._model, device))
        return torch.stack([feature.sum() for feature in features]).sum() * 0.0


def _rows(batch: MicroBatch) -> torch.Tensor:
    """Return the tokens as [B, Tmax], zeros on the right."""
    return torch.nn.utils.rnn.pad_sequence(list(batch.token_ids.split(batch.lengths)), batch_first=True)
