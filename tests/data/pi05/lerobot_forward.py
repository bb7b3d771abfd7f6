"""Says what lerobot's own PI0.5 computes, for test_lerobot.py: `python lerobot_forward.py FOLDER`, with a Python that has lerobot.

FOLDER has inputs.safetensors, asked.json and tokenizer/. Written are model/, a policy and its processors as lerobot saves them, what it computes as
outputs.safetensors, and what it says of itself as said.json: its prompts, its sizes, and the names and shapes of the weights of published models.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.pi05 import PI05Config, PI05Policy, make_pi05_pre_post_processors, modeling_pi05
from lerobot.processor import tokenizer_processor
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

TEXT = modeling_pi05.GemmaConfig(width=64, depth=3, mlp_dim=96, num_heads=8, num_kv_heads=1, head_dim=8)
EXPERT = modeling_pi05.GemmaConfig(width=32, depth=3, mlp_dim=48, num_heads=8, num_kv_heads=1, head_dim=8)
VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4, "projection_dim": 64}
WORDS = 512
SIZE = 16


def make_small() -> None:
    """Have lerobot build networks of these sizes: it has its own written into its code."""
    modeling_pi05.get_gemma_config = {"gemma_2b": TEXT, "gemma_300m": EXPERT}.__getitem__
    paligemma, gemma = modeling_pi05.PaliGemmaForConditionalGenerationWithPiGemma, modeling_pi05.PiGemmaForCausalLM

    def small_paligemma(config: Any) -> Any:
        for name, value in VISION.items():
            setattr(config.vision_config, name, value)
        config.projection_dim, config.text_config.vocab_size = TEXT.width, WORDS
        return paligemma(config=config)

    def small_gemma(config: Any) -> Any:
        config.vocab_size = WORDS
        return gemma(config=config)

    modeling_pi05.PaliGemmaForConditionalGenerationWithPiGemma = small_paligemma
    modeling_pi05.PiGemmaForCausalLM = small_gemma


def configured(asked: dict[str, Any]) -> PI05Config:
    cameras = {
        f"observation.images.{name}": PolicyFeature(FeatureType.VISUAL, (3, SIZE, SIZE)) for name in asked["cameras"]
    }
    state = PolicyFeature(FeatureType.STATE, (len(asked["statistics"]["observation.state"]["q01"]),))
    action = PolicyFeature(FeatureType.ACTION, (len(asked["statistics"]["action"]["q01"]),))
    return PI05Config(
        device="cpu",
        input_features={**cameras, "observation.state": state},
        output_features={"action": action},
        image_resolution=(SIZE, SIZE),
        chunk_size=asked["chunk_size"],
        n_action_steps=asked["chunk_size"],
        max_action_dim=asked["max_action_dim"],
        num_inference_steps=asked["num_steps"],
        tokenizer_max_length=96,
    )


def randomized(policy: PI05Policy) -> PI05Policy:
    """Return the policy with weights none of which is idle: as lerobot begins, norms do not depend on the noise level."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.normal_(0, 0.3 if weight.ndim < 2 else weight[0].numel() ** -0.5, generator=generator)
    return policy.eval()


def computed(policy: PI05Policy, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the velocities of sampling, the way's end, and the velocity, loss and gradients of training."""
    model, found, prefix, velocities = policy.model, dict[str, torch.Tensor](), dict[str, Any](), list[torch.Tensor]()
    images = [(each.movedim(-1, 1).float() / 255) * 2 - 1 for each in given["images"].unbind(1)]
    shown = list(given["shown"].unbind(1))
    read = images, shown, given["token_ids"], given["valid"]
    denoise = model.denoise_step

    def recorded(**arguments: Any) -> torch.Tensor:
        prefix.update((name, arguments[name]) for name in ("prefix_pad_masks", "past_key_values"))
        return denoise(**arguments)

    model.denoise_step = recorded
    found["sampled"] = model.sample_actions(*read, noise=given["noise"])
    model.denoise_step = denoise
    with torch.no_grad():
        for x, t in zip(given["x"].unbind(1), given["t"].unbind(1), strict=True):
            velocities.append(denoise(**prefix, x_t=x, timestep=t))
    found["velocities"] = torch.stack(velocities, 1)

    model.action_out_proj.register_forward_hook(lambda _, __, out: found.update(trained=out.detach()))
    losses = model.forward(*read, given["actions"], given["noise"], given["time"])
    found["losses"] = losses.detach()
    losses.mean().backward()
    gradients = {name: weight.grad for name, weight in policy.named_parameters() if weight.grad is not None}
    return {**found, **{f"gradient.{name}": grad.contiguous() for name, grad in gradients.items()}}


def acted(policy: PI05Policy, asked: dict[str, Any], given: dict[str, torch.Tensor], folder: Path) -> dict[str, Any]:
    """Return the actions of a robot that is shown what cameras see, the text that is read, and its tokens; save the processors."""

    class Tokenizers:
        """The folder in the place of the hub."""

        @staticmethod
        def from_pretrained(_: str) -> Any:
            return AutoTokenizer.from_pretrained(folder.parent / "tokenizer")

    tokenizer_processor.AutoTokenizer = Tokenizers
    statistics = {key: {name: torch.tensor(q) for name, q in own.items()} for key, own in asked["statistics"].items()}
    before, after = make_pi05_pre_post_processors(policy.config, statistics)
    before.save_pretrained(folder)
    after.save_pretrained(folder)
    seen = {
        f"observation.images.{name}": given[f"camera.{name}"].movedim(-1, 1).float() / 255
        for name in asked["cameras"]
        if f"camera.{name}" in given
    }
    batch = before({**seen, "observation.state": given["state"], "task": asked["tasks"]})
    actions = after(policy.predict_action_chunk(batch, noise=given["way"]))
    pictures = {
        name: modeling_pi05.resize_with_pad_torch(given[name][None].float() / 255, SIZE, SIZE)[0] * 2 - 1
        for name in ("small", "large")
    }
    return {
        "prompts": batch["task"],
        "robot_actions": actions,
        "read_tokens": batch["observation.language.tokens"],
        "read_valid": batch["observation.language.attention_mask"].bool(),
        **pictures,
    }


def sizes(model: Any) -> dict[str, Any]:
    """Return transformers' configurations of the two models."""
    both = model.paligemma_with_expert
    return {"vlm_config": both.paligemma.config.to_dict(), "expert_config": both.gemma_expert.config.to_dict()}


def main(place: Path) -> None:
    asked, given = json.loads((place / "asked.json").read_text()), load_file(place / "inputs.safetensors")
    with torch.device("meta"):
        published = modeling_pi05.PI05Pytorch(PI05Config(device="cpu"))
    shapes = {f"model.{name}": list(weight.shape) for name, weight in published.state_dict().items()}
    said: dict[str, Any] = {"published": shapes, "published_sizes": sizes(published)}
    make_small()
    policy = randomized(PI05Policy(configured(asked)))
    policy.save_pretrained(place / "model")
    outputs = acted(policy, asked, given, place / "model")
    said |= {"prompts": outputs.pop("prompts"), "sizes": sizes(policy.model)}
    said["versions"] = {name: version(name) for name in ("lerobot", "transformers", "torch")}
    outputs = {name: tensor.contiguous() for name, tensor in (outputs | computed(policy, given)).items()}
    save_file(outputs, place / "outputs.safetensors")
    (place / "said.json").write_text(json.dumps(said, default=str))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
