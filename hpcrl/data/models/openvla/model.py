"""OpenVLA's network: vision transformers whose patches become tokens of a language model. Importing it registers it with transformers.

The names of weights are those of OpenVLA's files (`vision_backbone.featurizer`, `projector.fc1`, `language_model`), which transformers translates
to these modules and back. The last block of each vision transformer and what follows it are not built: OpenVLA takes the patches before it.

Letters for shapes: N images, T tokens of each, D their width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention
from transformers import AutoModel, AutoModelForImageTextToText, PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.llava.modeling_llava import LlavaForConditionalGeneration, LlavaModel

from hpcrl.data.action_tokens import action_tokens
from hpcrl.data.models.openvla.config import OpenVLAConfig, OpenVLAVisionConfig

_EPS = 1e-6


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, hidden_NTD: torch.Tensor) -> torch.Tensor:
        count, length, width = hidden_NTD.shape
        query, key, value = (
            self.qkv(hidden_NTD).view(count, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        )
        return self.proj(scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class _Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.full((width,), 1e-5))

    def forward(self, hidden_NTD: torch.Tensor) -> torch.Tensor:
        return hidden_NTD * self.scale_factor


class _MLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, hidden_NTD: torch.Tensor) -> torch.Tensor:
        return self.fc2(gelu(self.fc1(hidden_NTD)))


class OpenVLABlock(GradientCheckpointingLayer):
    """A block of a vision transformer."""

    def __init__(self, width: int, heads: int, inner: int, *, scaled: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, _EPS), nn.LayerNorm(width, _EPS)
        self.attn, self.mlp = _Attention(width, heads), _MLP(width, inner)
        self.ls1, self.ls2 = (_Scale(width) if scaled else nn.Identity() for _ in range(2))

    def forward(self, hidden_NTD: torch.Tensor) -> torch.Tensor:
        hidden_NTD = hidden_NTD + self.ls1(self.attn(self.norm1(hidden_NTD)))
        return hidden_NTD + self.ls2(self.mlp(self.norm2(hidden_NTD)))


class _Patches(nn.Module):
    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, size, size)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.proj(pixels).flatten(2).transpose(1, 2)


class VisionTransformer(nn.Module):
    """A vision transformer up to the block before its last, under timm's names.

    Args:
        image_size: height and width of images, in pixels.
        registers: tokens beside those of patches (arXiv:2309.16588).
        dinov2: there are a class token and registers, and layers are scaled.
    """

    def __init__(
        self,
        image_size: int,
        hidden_size: int,
        depth: int,
        num_heads: int,
        mlp_size: int,
        patch_size: int,
        registers: int = 0,
        *,
        dinov2: bool = False,
    ) -> None:
        super().__init__()
        self.patch_embed = _Patches(hidden_size, patch_size)
        self.pos_embed = nn.Parameter(torch.randn(1, (image_size // patch_size) ** 2, hidden_size) * 0.02)
        self._extra = 0
        if dinov2:
            self._extra = 1 + registers
            self.cls_token = nn.Parameter(torch.zeros(1, 1, hidden_size))
            self.reg_token = nn.Parameter(torch.zeros(1, registers, hidden_size))
        blocks = (OpenVLABlock(hidden_size, num_heads, mlp_size, scaled=dinov2) for _ in range(depth - 1))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of patches, [N, T, D], of images [N, 3, height, width]."""
        hidden_NTD = self.patch_embed(pixels) + self.pos_embed
        if self._extra:
            extra = torch.cat([self.cls_token, self.reg_token], 1).expand(len(pixels), -1, -1)
            hidden_NTD = torch.cat([extra, hidden_NTD], 1)
        for block in self.blocks:
            hidden_NTD = block(hidden_NTD)
        return hidden_NTD[:, self._extra :]


class VisionBackbone(nn.Module):
    """All vision transformers; each is given its own three channels."""

    def __init__(self, config: OpenVLAVisionConfig) -> None:
        super().__init__()
        first, *second = config.of_towers
        self.featurizer = VisionTransformer(config.image_size, **first)
        self.fused_featurizer = VisionTransformer(config.image_size, **second[0]) if second else None

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return [N, T, D] for images [N, channels, height, width]."""
        pixels = pixels.to(self.featurizer.pos_embed.dtype)
        if self.fused_featurizer is None:
            return self.featurizer(pixels)
        own, other = pixels.split(3, 1)
        return torch.cat([self.featurizer(own), self.fused_featurizer(other)], -1)


class Projector(nn.Module):
    """From patches to tokens of the language model; with two vision transformers it has one layer more."""

    def __init__(self, vision: OpenVLAVisionConfig, width: int) -> None:
        super().__init__()
        widths = [tower["hidden_size"] for tower in vision.of_towers]
        inner = [4 * sum(widths)] if len(widths) > 1 else []
        sizes = [sum(widths), *inner, width, width]
        for at in range(len(sizes) - 1):
            self.add_module(f"fc{at + 1}", nn.Linear(sizes[at], sizes[at + 1]))

    def forward(self, hidden_NTD: torch.Tensor) -> torch.Tensor:
        first, *others = self.children()
        hidden_NTD = first(hidden_NTD)
        for layer in others:
            hidden_NTD = layer(gelu(hidden_NTD))
        return hidden_NTD


class ProprioProjector(nn.Module):
    """From what is measured of a robot to a token of the language model."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(size, width), nn.Linear(width, width)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return tokens [S, width] of states [S, size]."""
        return self.fc2(gelu(self.fc1(states.to(self.fc1.weight.dtype))))


def _unseen(actions: range, _: nn.Module, given: tuple[torch.Tensor, ...], hidden: torch.Tensor) -> torch.Tensor:
    of_actions = (given[0] >= actions.start) & (given[0] < actions.stop)
    return hidden.masked_fill(of_actions[..., None], 0)


class OpenVLAModel(LlavaModel):
    """LLaVA's model with other eyes."""

    config_class = OpenVLAConfig
    _no_split_modules = ["OpenVLABlock"]

    def __init__(self, config: OpenVLAConfig) -> None:
        PreTrainedModel.__init__(self, config)
        vision: Any = config.vision_config
        self.vision_backbone = VisionBackbone(vision)
        self.projector = Projector(vision, config.get_text_config().hidden_size)
        width = config.get_text_config().hidden_size
        self.proprio_projector = ProprioProjector(config.proprio_dim or 0, width) if config.use_proprio else None
        self.language_model = AutoModel.from_config(config.text_config)
        if config.parallel_decoding:
            for layer in self.language_model.layers:
                layer.self_attn.is_causal = False
            tokens = action_tokens(config)
            assert tokens is not None
            self.language_model.embed_tokens.register_forward_hook(partial(_unseen, tokens.ids))
        self.post_init()

    def get_image_features(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, pixel_values: torch.Tensor, states: torch.Tensor | None = None, **_: Any
    ) -> BaseModelOutputWithPooling:
        """Return the tokens of images, and behind those of a turn, of which all have as many, that of its state.

        Args:
            states: [S, proprio_dim], one of each turn, as the network has them; None: they are not shown.
        """
        tokens_NTD = self.projector(self.vision_backbone(pixel_values))
        found: Any = list(tokens_NTD)
        if states is not None:
            assert self.proprio_projector is not None, "vla.use_proprio"
            of_a_turn, left = divmod(len(found), len(states))
            assert not left, f"{len(found)} images of {len(states)} turns"
            behind = self.proprio_projector(states).unsqueeze(1)
            parts = [found[at * of_a_turn : (at + 1) * of_a_turn] for at in range(len(states))]
            found = [one for images, state in zip(parts, behind, strict=True) for one in (*images, state)]
        return BaseModelOutputWithPooling(pooler_output=found)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_ids: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        states: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if states is None or pixel_values is None or input_ids is None:
            return super().forward(input_ids, pixel_values, inputs_embeds=inputs_embeds, **kwargs)  # pyright: ignore[reportArgumentType]
        embeds: Any = self.get_input_embeddings()(input_ids)
        features: Any = torch.cat(list(self.get_image_features(pixel_values, states).pooler_output)).to(embeds.dtype)  # pyright: ignore[reportArgumentType]
        places = self.get_placeholder_mask(input_ids, embeds, features)  # pyright: ignore[reportArgumentType]
        return super().forward(inputs_embeds=embeds.masked_scatter(places, features), **kwargs)


class OpenVLAForActionPrediction(LlavaForConditionalGeneration):
    """OpenVLA, whose outputs are tokens of actions (hpcrl/data/action_tokens.py)."""

    config_class = OpenVLAConfig
    _no_split_modules = ["OpenVLABlock"]

    def __init__(self, config: OpenVLAConfig) -> None:
        PreTrainedModel.__init__(self, config)
        text: Any = config.get_text_config()
        self.model = OpenVLAModel(config)
        self.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)
        self.post_init()


_NAMES = {
    r"^language_model\.lm_head": "lm_head",
    r"^language_model\.model": "model.language_model",
    r"^vision_backbone": "model.vision_backbone",
    r"^projector": "model.projector",
    r"^proprio_projector": "model.proprio_projector",
}
register_checkpoint_conversion_mapping(
    "openvla", [WeightRenaming(source_patterns=there, target_patterns=here) for there, here in _NAMES.items()]
)
AutoModel.register(OpenVLAConfig, OpenVLAModel)
AutoModelForImageTextToText.register(OpenVLAConfig, OpenVLAForActionPrediction)
