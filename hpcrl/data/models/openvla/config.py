"""Configuration of OpenVLA, as in its config.json. Without torch."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import CONFIG_MAPPING, AutoConfig, LlamaConfig, PreTrainedConfig

_PATCH = {"patch_size": 14, "mlp_size": 4096, "num_heads": 16}
TOWERS: dict[str, dict[str, Any]] = {
    "vit_large_patch14_reg4_dinov2.lvd142m": {
        **_PATCH,
        "hidden_size": 1024,
        "depth": 24,
        "registers": 4,
        "dinov2": True,
    },
    "vit_so400m_patch14_siglip_224": {**_PATCH, "hidden_size": 1152, "depth": 27, "mlp_size": 4304, "dinov2": False},
}
"""The vision transformers that OpenVLA's files name, by timm's names (timm/models/vision_transformer.py)."""


@strict
class OpenVLAVisionConfig(PreTrainedConfig):
    """Configuration of the image encoder: one or several vision transformers, whose patches are concatenated.

    Attributes:
        towers: of each: hidden_size, depth, num_heads, mlp_size, patch_size; dinov2: it has a class token, `registers` and scaled layers.
    """

    model_type = "openvla_vision"
    base_config_key = "vision_config"

    towers: list[dict[str, Any]] | None = None
    image_size: int = 224
    initializer_range: float = 0.02

    @property
    def patch_size(self) -> int:
        return self.of_towers[0]["patch_size"]

    @property
    def num_channels(self) -> int:
        return 3 * len(self.of_towers)

    @property
    def of_towers(self) -> list[dict[str, Any]]:
        return self.towers or list(TOWERS.values())


@strict
class OpenVLAConfig(PreTrainedConfig):
    """The configuration; names as in OpenVLA's files, and `vision_config` where the towers are others than those of `timm_model_ids`.

    With parallel_decoding one forward pass predicts all tokens of actions, as in OpenVLA-OFT (arXiv:2502.19645, section 4.1). The model sees
    only placeholders of them, and each token attends to all others.

    With use_proprio what is measured of the robot, proprio_dim numbers, is a token behind those of images, as there.

    An image stands where the padding token is, which OpenVLA's tokenizer has beside Llama's tokens.
    """

    model_type = "openvla"
    attribute_map = {"image_token_id": "image_token_index"}
    sub_configs = {"text_config": AutoConfig, "vision_config": OpenVLAVisionConfig}  # pyright: ignore[reportAssignmentType]

    vision_config: dict[str, Any] | PreTrainedConfig | None = None
    text_config: dict[str, Any] | PreTrainedConfig | None = None
    timm_model_ids: list[str] | None = None
    image_sizes: list[int] | None = None
    image_token_index: int | None = None
    pad_token_id: int | None = 32000
    pad_to_multiple_of: int = 64
    n_action_bins: int = 256
    parallel_decoding: bool = False
    use_proprio: bool = False
    proprio_dim: int | None = None
    norm_stats: dict[str, Any] | None = None
    vision_feature_layer: int = -2
    vision_feature_select_strategy: str = "full"
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02

    def __post_init__(self, **kwargs: Any) -> None:
        if isinstance(self.text_config, dict):
            kind = CONFIG_MAPPING[self.text_config.get("model_type", "llama")]
            self.text_config = kind(**self.text_config)
        elif self.text_config is None:
            self.text_config = LlamaConfig(vocab_size=32064, pad_token_id=32000)
        if isinstance(self.vision_config, dict):
            self.vision_config = OpenVLAVisionConfig(**self.vision_config)
        elif self.vision_config is None:
            towers = [TOWERS[name] for name in self.timm_model_ids or TOWERS]
            self.vision_config = OpenVLAVisionConfig(towers=towers, image_size=(self.image_sizes or [224])[0])
        if self.image_token_index is None:
            self.image_token_index = self.pad_token_id
        if self.parallel_decoding:
            self.text_config.is_causal = False  # pyright: ignore[reportAttributeAccessIssue]
        super().__post_init__(**kwargs)
