"""PI0.5's network (arXiv:2504.16054): a Gemma, the action expert, denoises a chunk of actions.

At each layer the expert's queries see the keys of PaliGemma's layer, which has read images and text, and its own. The noise level enters by adaptive
norms alone, and the robot's state by the text, unlike in PI0. PaliGemma and the parts of Gemma's layers are transformers'.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, GemmaConfig, PaliGemmaModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.gemma.modeling_gemma import GemmaAttention, GemmaMLP, GemmaRotaryEmbedding

from hpcrl.families.pi05.architecture import Pi05Architecture


class AdaptiveNorm(nn.Module):
    """Root mean square norm whose scale and shift come from a condition, with a gate for what follows (arXiv:2212.09748, section 3.2)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.dense = nn.Linear(width, 3 * width)

    def forward(self, hidden: torch.Tensor, condition: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of hidden [N, H, W] by a condition [N, W], and the gate [N, 1, W]."""
        values = hidden.float()
        normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + self.eps)
        scale, shift, gate = self.dense(condition)[:, None].chunk(3, -1)
        return (normed * (1 + scale.float()) + shift.float()).to(hidden.dtype), gate


@dataclass(frozen=True)
class Prefix:
    """Keys and values of PaliGemma's prefix, [B, heads, L, head] of each layer, and its valid places.

    Attributes:
        valid: [B, L] bool.
    """

    layers: list[tuple[torch.Tensor, torch.Tensor]]
    valid: torch.Tensor

    def repeated(self, times: int) -> Prefix:
        """Return each row `times` times in a row."""
        pairs = [(key.repeat_interleave(times, 0), value.repeat_interleave(times, 0)) for key, value in self.layers]
        return Prefix(pairs, self.valid.repeat_interleave(times, 0))

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the layer's keys and values with these appended, as attention expects of a cache. Nothing is stored."""
        before, values = self.layers[layer]
        return torch.cat([before, key], 2), torch.cat([values, value], 2)


class ExpertLayer(GradientCheckpointingLayer):
    """A layer of Gemma with adaptive norms."""

    def __init__(self, config: GemmaConfig, number: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = GemmaAttention(config, number), GemmaMLP(config)
        self.input_layernorm = AdaptiveNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = AdaptiveNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        hidden: torch.Tensor,
        condition: torch.Tensor,
        prefix: Prefix,
        mask: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        normed, gate = self.input_layernorm(hidden, condition)
        found, _ = self.self_attn(normed, position_embeddings=rotary, attention_mask=mask, past_key_values=prefix)
        hidden = hidden + gate * found
        normed, gate = self.post_attention_layernorm(hidden, condition)
        return hidden + gate * self.mlp(normed)


class Expert(nn.Module):
    """The layers that move actions."""

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ExpertLayer(config, number) for number in range(config.num_hidden_layers))
        self.norm = AdaptiveNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = GemmaRotaryEmbedding(config)

    def forward(self, hidden: torch.Tensor, condition: torch.Tensor, prefix: Prefix) -> torch.Tensor:
        """Return the last hidden states [N, H, W] of actions that see the prefix and each other."""
        count = hidden.shape[1]
        places = prefix.valid.sum(1, keepdim=True) + torch.arange(count, device=hidden.device)
        seen = torch.cat([prefix.valid, prefix.valid.new_ones(len(hidden), count)], 1)
        mask, rotary = _mask(seen, count, hidden.dtype), self.rotary_emb(hidden, places)
        for layer in self.layers:
            hidden = layer(hidden, condition, prefix, mask, rotary)
        return self.norm(hidden, condition)[0]


class Pi05(nn.Module):
    """The whole network.

    Attributes:
        config: the expert's, which answers what is asked of a model of transformers.
    """

    _no_split_modules = ("GemmaDecoderLayer", "SiglipEncoderLayer", "ExpertLayer")

    def __init__(self, architecture: Pi05Architecture) -> None:
        super().__init__()
        self.architecture, self.config = architecture, architecture.expert
        for config in (architecture.vlm.text_config, architecture.expert):
            config._attn_implementation = "sdpa"
        self.vlm = PaliGemmaModel._from_config(architecture.vlm, attn_implementation="sdpa")
        self.expert = Expert(architecture.expert)
        width = architecture.expert.hidden_size
        self.action_in_proj = nn.Linear(architecture.action_dim, width)
        self.action_out_proj = nn.Linear(width, architecture.action_dim)
        self.time_mlp_in, self.time_mlp_out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(
        self,
        token_ids: torch.Tensor,
        valid: torch.Tensor,
        images: torch.Tensor,
        shown: torch.Tensor,
        x: torch.Tensor,
        t: torch.Tensor,
    ) -> torch.Tensor:
        """Return the velocity [B, S, H, D] float32 at S points of each of B rows.

        Args:
            token_ids, valid: [B, T], text, and which of its places are not padding.
            images, shown: [B, C, 3, size, size] from -1 to 1, and [B, C], which of them there are.
            x: [B, S, H, D] noised actions.
            t: [B, S] noise levels, 1 is noise.
        """
        points = x.shape[1]
        prefix = self.read(token_ids, valid, images, shown).repeated(points)
        return self.velocity(x.flatten(0, 1), t.flatten(), prefix).unflatten(0, (-1, points))

    def read(self, token_ids: torch.Tensor, valid: torch.Tensor, images: torch.Tensor, shown: torch.Tensor) -> Prefix:
        """Return the prefix of images, then text, with full attention. Arguments as of `forward`."""
        vlm: Any = self.vlm
        pictures = vlm.get_image_features(images.flatten(0, 1).to(self.action_in_proj.weight.dtype)).pooler_output
        pictures = pictures.unflatten(0, images.shape[:2])
        patches = pictures.shape[2]
        hidden = torch.cat([pictures.flatten(1, 2), vlm.get_input_embeddings()(token_ids).to(pictures.dtype)], 1)
        seen = torch.cat([shown.repeat_interleave(patches, 1), valid], 1)
        cache: Any = DynamicCache()
        last = vlm.language_model(
            inputs_embeds=hidden,
            attention_mask=_mask(seen, hidden.shape[1], hidden.dtype),
            position_ids=(seen.long().cumsum(1) - 1).clamp(min=0),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        pairs = [(layer.keys, layer.values) for layer in cache.layers]
        if (
            last.requires_grad
        ):  # what comes after the last keys gets gradients of 0, so that an optimizer knows all that it has
            pairs[-1] = (pairs[-1][0] + 0 * last.sum().to(pairs[-1][0].dtype), pairs[-1][1])
        return Prefix(pairs, seen)

    def velocity(self, x: torch.Tensor, t: torch.Tensor, prefix: Prefix) -> torch.Tensor:
        """Return the velocity [N, H, D] float32 of noised actions x [N, H, D] at noise levels t [N]; it points to the noise."""
        kind = self.action_in_proj.weight.dtype
        condition = silu(self.time_mlp_out(silu(self.time_mlp_in(self._embedded(t).to(kind)))))
        return self.action_out_proj(self.expert(self.action_in_proj(x.to(kind)), condition, prefix)).float()

    def _embedded(self, t: torch.Tensor) -> torch.Tensor:
        sizes = self.architecture
        shares = torch.linspace(0.0, 1.0, sizes.expert.hidden_size // 2, dtype=torch.float64, device=t.device)
        period = sizes.min_period * (sizes.max_period / sizes.min_period) ** shares
        angles = 2 * math.pi * t[:, None].double() / period
        return torch.cat([angles.sin(), angles.cos()], 1)

    @property
    def device(self) -> torch.device:
        return self.action_in_proj.weight.device

    def get_input_embeddings(self) -> nn.Module:
        return self.vlm.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Linear:
        return self.action_out_proj

    def tie_weights(self) -> None:
        """Do nothing: no weights are tied."""

    def gradient_checkpointing_enable(self, options: dict[str, Any], every: int) -> None:  # noqa: ARG002
        """Recompute the expert's layers in backward. PaliGemma's cannot be: their keys are read from outside."""
        layers: Any = self.expert.layers
        for layer in layers:
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = partial(checkpoint, **options)


def _mask(seen_L: torch.Tensor, queries: int, dtype: torch.dtype) -> torch.Tensor:
    """Return what is added to scores [B, 1, queries, L]: all queries see the same places."""
    hidden = torch.zeros(seen_L.shape, dtype=dtype, device=seen_L.device).masked_fill(~seen_L, torch.finfo(dtype).min)
    return hidden[:, None, None].expand(-1, 1, queries, -1)
