"""PI0.5's network is put together as transformers computes its parts, and reads the files that openpi and lerobot write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, PI0Config, PI0ForConditionalGeneration

from hpcrl.config.sections.model import Pretrained
from hpcrl.errors import DataError
from hpcrl.families.pi05.architecture import Pi05Architecture, file_name, own_name
from hpcrl.families.pi05.network import AdaptiveNorm, Pi05
from hpcrl.families.pi05.source import loaded, stored_dtype
from tests.data.pi05.material import TINY, tiny, write_tiny


def inputs() -> tuple[torch.Tensor, ...]:
    """Return two turns: one with a padded text and one camera of two, one with both."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(63, (2, 5), generator=generator)
    valid = torch.tensor([[True] * 3 + [False] * 2, [True] * 5])
    images = torch.randn(2, 2, 3, 8, 8, generator=generator)
    shown = torch.tensor([[True, False], [True, True]])
    x, t = torch.randn(2, 3, 4, 6, generator=generator), torch.rand(2, 3, generator=generator)
    return ids, valid, images, shown, x, t


def as_pi0(network: Pi05) -> PI0ForConditionalGeneration:
    """Return transformers' PI0 with the same weights, whose norms are those of `network` where they do not depend on the noise level."""
    entries = {**TINY["expert_config"], "vocab_size": 64}
    pi0 = PI0ForConditionalGeneration(
        PI0Config(
            vlm_config={"model_type": "paligemma", **TINY["vlm_config"]},
            dit_config=entries,
            chunk_size=4,
            max_action_dim=6,
        )
    )
    pi0.model.vlm.load_state_dict(network.vlm.state_dict())
    own = {name: value for name, value in network.expert.state_dict().items() if "norm.dense" not in name}
    for name, norm in network.expert.named_modules():
        if isinstance(norm, AdaptiveNorm):
            own[f"{name}.weight"] = norm.dense.bias.chunk(3)[0]
    missing, unexpected = pi0.model.dit.load_state_dict(own, strict=False)
    assert (missing, unexpected) == (["embed_tokens.weight"], [])
    return pi0


def test_velocities_are_those_of_the_layers_of_transformers() -> None:
    network = tiny()
    with torch.no_grad():
        for module in network.expert.modules():
            if isinstance(module, AdaptiveNorm):  # scales of their own, no shift, and gates that are open
                module.dense.weight.zero_()
                scale, shift, gate = module.dense.bias.chunk(3)
                scale.normal_()
                shift.zero_()
                gate.fill_(1.0)
        pi0, (ids, valid, images, shown, x, t) = as_pi0(network), inputs()
        found = network(ids, valid, images, shown, x, t)
        for row in range(2):
            text, pictures = ids[row : row + 1, valid[row]], images[row : row + 1, shown[row]]
            told = torch.cat([torch.full((1, 4 * pictures.shape[1]), 63), text], 1)
            embeds = pi0.model.embed_prefix(told, pictures, torch.ones(1, pictures.shape[1], dtype=torch.bool))
            for at in range(3):
                cache = DynamicCache()
                read = {"token_type_ids": torch.zeros(embeds.shape[:2]), "past_key_values": cache, "use_cache": True}
                pi0.model.vlm(inputs_embeds=embeds, position_ids=torch.arange(embeds.shape[1])[None], **read)
                hidden, places = network.action_in_proj(x[row : row + 1, at]), embeds.shape[1] + torch.arange(4)[None]
                mask = torch.zeros(1, 1, 4, embeds.shape[1] + 4)
                moved = pi0.model.dit(
                    inputs_embeds=hidden, attention_mask=mask, position_ids=places, past_key_values=cache
                )
                theirs = network.action_out_proj(moved.last_hidden_state)
                torch.testing.assert_close(found[row : row + 1, at], theirs, rtol=1e-5, atol=1e-5)


def test_the_noise_level_is_embedded_as_pi0_does_and_counts() -> None:
    network = tiny()
    (ids, valid, images, shown, x, t), pi0 = inputs(), as_pi0(network)
    theirs = pi0.embed_action_time.sinusoid_embeds(t.flatten())
    torch.testing.assert_close(network._embedded(t.flatten()).float(), theirs, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        first, other = network(ids, valid, images, shown, x, t), network(ids, valid, images, shown, x, 1 - t)
    assert (first - other).abs().max() > 1e-3


def test_what_is_masked_has_no_effect() -> None:
    network, (ids, valid, images, shown, x, t) = tiny(), inputs()
    with torch.no_grad():
        found = network(ids, valid, images, shown, x, t)
        other = network(
            torch.where(valid, ids, 7), valid, torch.where(shown[:, :, None, None, None], images, 3.0), shown, x, t
        )
    assert torch.equal(found, other)


def test_all_that_is_trained_gets_a_gradient_and_layers_may_be_computed_again() -> None:
    network, given = tiny().train(), inputs()
    network(*given).square().sum().backward()
    plain = {name: value.grad for name, value in network.named_parameters()}
    assert [name for name, grad in plain.items() if grad is None] == []
    assert plain["vlm.language_model.layers.0.self_attn.k_proj.weight"].abs().max() > 0  # pyright: ignore[reportOptionalMemberAccess]
    network.zero_grad(set_to_none=True)
    network.gradient_checkpointing_enable({"use_reentrant": False}, 1)
    network(*given).square().sum().backward()
    for name, value in network.named_parameters():
        torch.testing.assert_close(value.grad, plain[name])


@pytest.mark.parametrize("prefix", ["", "model."])
def test_files_of_openpi_and_lerobot_are_read(prefix: str, tmp_path: Path) -> None:
    place, network = write_tiny(tmp_path / "model"), tiny()
    tensors = load_file(place / "model.safetensors")
    embedding = tensors.pop("paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight")
    tensors["paligemma_with_expert.paligemma.lm_head.weight"] = embedding  # tied, and kept once
    tensors["paligemma_with_expert.gemma_expert.lm_head.weight"] = torch.zeros(2, 2)
    save_file({prefix + name: value for name, value in tensors.items()}, place / "model.safetensors")
    statistics = place / "policy_preprocessor_step_3_normalizer_processor.safetensors"  # which lerobot keeps there
    save_file({"action.q01": torch.zeros(6, dtype=torch.float64)}, statistics)
    read = loaded(Pretrained(str(place)), torch.float32)
    given = inputs()
    with torch.no_grad():
        assert torch.equal(read(*given), network(*given))
    assert stored_dtype(Pretrained(str(place))) is torch.float32


def test_sizes_are_those_that_the_files_name() -> None:
    lerobot = Pi05Architecture.of(
        {
            "type": "pi05",
            "paligemma_variant": "gemma_300m",
            "action_expert_variant": "gemma_300m",
            "chunk_size": 10,
            "max_action_dim": 7,
        }
    )
    assert (lerobot.chunk_size, lerobot.action_dim, lerobot.image_size) == (10, 7, 224)
    assert (lerobot.vlm.text_config.hidden_size, lerobot.expert.num_hidden_layers) == (1024, 18)
    openpi = Pi05Architecture.of({"action_horizon": 15, "action_dim": 32, "pi05": True})
    assert (openpi.chunk_size, openpi.vlm.text_config.hidden_size, openpi.expert.hidden_size) == (15, 2048, 1024)
    names = [name for name, _ in tiny().named_parameters()]
    assert [own_name(file_name(name)) for name in names] == names


def test_what_is_no_such_model_says_so(tmp_path: Path) -> None:
    place = write_tiny(tmp_path / "model")
    config = json.loads((place / "config.json").read_text())
    for entries, error in (
        (config | {"type": "pi0"}, "it is a pi0"),
        (config | {"max_action_dim": 7}, "size"),
        (config | {"paligemma_variant": "gemma_9b"}, "gemma_9b"),
    ):
        (place / "config.json").write_text(json.dumps(entries))
        with pytest.raises(DataError, match=error):
            loaded(Pretrained(str(place)), torch.float32)
    (place / "config.json").write_text(json.dumps(config))
    tensors = load_file(place / "model.safetensors")
    del tensors["time_mlp_in.weight"]
    save_file(tensors, place / "model.safetensors")
    with pytest.raises(DataError, match=r"no weights for time_mlp_in\.weight"):
        loaded(Pretrained(str(place)), torch.float32)
