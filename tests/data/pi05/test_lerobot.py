"""PI0.5 is what lerobot's own code computes, with weights that lerobot wrote. `make lerobot` installs it in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hpcrl.algorithms.diffusion.actions import walk
from hpcrl.config.sections.model import Pretrained
from hpcrl.config.sections.vla import Pi05Config
from hpcrl.envs.simulators.base import Bounds
from hpcrl.families.pi05.architecture import Pi05Architecture, file_name, own_name
from hpcrl.families.pi05.generate import Robotics
from hpcrl.families.pi05.inputs import resized, written_prompt
from hpcrl.families.pi05.network import Pi05
from hpcrl.families.pi05.sampler import ActionSampler, Ask
from hpcrl.families.pi05.source import loaded
from tests.paths import ROOT

PYTHON = Path(os.environ.get("HPCRL_LEROBOT", ROOT / ".venv-lerobot")) / "bin" / "python"
SIZE, CHUNK, WIDTH, STEPS = 16, 5, 7, 4
LOW, HIGH = [-2.0, 0.0, -0.5], [2.0, 1.0, 0.25]
ASKED: dict[str, Any] = {
    "cameras": ["base", "wrist", "absent"],
    "statistics": {
        "observation.state": {"q01": LOW, "q99": HIGH},
        "action": {"q01": [-1.0, -0.2, 0.0, -3.0], "q99": [1.0, 0.4, 5.0, 2.0]},
    },
    "chunk_size": CHUNK,
    "max_action_dim": WIDTH,
    "num_steps": STEPS,
    "tasks": [" pick_up the\ncup ", "reach"],
}
IDLE = {  # what configurations say of neither weights nor the forward pass, or of the two models as one
    *("dtype", "torch_dtype", "_name_or_path", "architectures", "transformers_version", "use_cache", "vocab_size"),
    *("projector_hidden_act", "use_adarms", "adarms_cond_dim", "use_bidirectional_attention", "num_image_tokens"),
    "image_token_index",
}


@dataclass(frozen=True)
class Compared:
    """What was asked, and what lerobot has answered.

    Attributes:
        model: the directory that lerobot wrote.
        given, theirs: tensors that lerobot was given, and what it made of them.
        said: what it said beside.
    """

    model: Pretrained
    given: dict[str, torch.Tensor]
    theirs: dict[str, torch.Tensor]
    said: dict[str, Any]

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Return what the network reads, as `Pi05.forward` takes it."""
        pixels = self.given["images"].movedim(-1, 2).float() / 127.5 - 1
        return self.given["token_ids"], self.given["valid"], pixels, self.given["shown"]


def write_tokenizer(folder: Path) -> None:
    """Write one of bytes that puts a token before each text, as PaliGemma's does."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: number for number, word in enumerate(["<pad>", "<bos>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", pad_token="<pad>").save_pretrained(folder)


def drawn() -> dict[str, torch.Tensor]:
    """Return three turns with texts of 4, 9 and 6 tokens and one, three and two cameras of three; and two turns of a robot."""
    generator = torch.Generator().manual_seed(1)

    def pixels(*shape: int) -> torch.Tensor:
        return torch.randint(256, (*shape, 3), generator=generator, dtype=torch.uint8)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    lengths, cameras = torch.tensor([4, 9, 6]), torch.tensor([1, 3, 2])
    return {
        "token_ids": torch.randint(512, (3, 9), generator=generator),
        "valid": torch.arange(9) < lengths[:, None],
        "images": pixels(3, 3, SIZE, SIZE),
        "shown": torch.arange(3) < cameras[:, None],
        "x": normal(3, 4, CHUNK, WIDTH),
        "t": torch.tensor([[1.0, 0.75, 0.5, 0.001], [0.9, 0.3, 0.02, 1.0], [0.6, 0.1, 0.33, 0.8]]),
        "actions": normal(3, CHUNK, WIDTH),
        "noise": normal(3, CHUNK, WIDTH),
        "time": torch.tensor([0.999, 0.42, 0.05]),
        "state": torch.tensor([[-2.0, 0.51, 0.9], [-2.5, 0.013, -0.1]]),
        "camera.base": pixels(2, SIZE, SIZE),
        "camera.wrist": pixels(2, SIZE, SIZE),
        "small": pixels(6, 10),
        "large": pixels(40, 30),
        "way": torch.stack(
            [torch.randn(CHUNK, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
        ),
    }


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    place, given = tmp_path_factory.mktemp("lerobot"), drawn()
    save_file(given, place / "inputs.safetensors")
    (place / "asked.json").write_text(json.dumps(ASKED))
    write_tokenizer(place / "tokenizer")
    program = [PYTHON, Path(__file__).with_name("lerobot_forward.py"), place]
    done = subprocess.run(program, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr
    said, model = json.loads((place / "said.json").read_text()), place / "model"
    write_tokenizer(model)
    config = model / "config.json"  # it names none of the sizes but those of published models
    config.write_text(json.dumps(json.loads(config.read_text()) | said["sizes"]))
    return Compared(Pretrained(str(model)), given, load_file(place / "outputs.safetensors"), said)


def close(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    largest = float((ours - theirs).abs().max() / theirs.abs().max())
    print(f"{name}: largest difference {largest:.1e} of the largest value")
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.lerobot
def test_velocities_and_the_way_to_actions(compared: Compared) -> None:
    """Of lerobot's pass over all layers at once, with which it trains, and of that on keys that it keeps, with which it acts."""
    network, (given, theirs) = loaded(compared.model, torch.float32), (compared.given, compared.theirs)
    with torch.no_grad():
        close("velocities", network(*compared.inputs(), given["x"], given["t"]), theirs["velocities"])
        time = given["time"][:, None, None]
        x = time * given["noise"] + (1 - time) * given["actions"]
        close(
            "velocities in training",
            network(*compared.inputs(), x[:, None], given["time"][:, None])[:, 0],
            theirs["trained"],
        )
        prefix = network.read(*compared.inputs())

        def velocity(x: torch.Tensor, sigma: float) -> torch.Tensor:
            return network.velocity(x, torch.full((3,), sigma), prefix)

        way, _ = walk(velocity, given["noise"], STEPS, "flow_sde", 0.5, None)
        close("chunks", way[:, -1], theirs["sampled"])


@pytest.mark.lerobot
def test_the_loss_of_flow_matching_and_its_gradients(compared: Compared) -> None:
    network, given = loaded(compared.model, torch.float32), compared.given
    time = given["time"][:, None, None]
    x = time * given["noise"] + (1 - time) * given["actions"]
    velocity = network(*compared.inputs(), x[:, None], given["time"][:, None])[:, 0]
    losses = (velocity - (given["noise"] - given["actions"])).square()
    close("losses", losses.detach(), compared.theirs["losses"])
    losses.mean().backward()
    theirs = {
        own_name(name.removeprefix("gradient.")): value
        for name, value in compared.theirs.items()
        if name.startswith("gradient.")
    }
    largest, compared_names = 0.0, 0
    for name, weight in network.named_parameters():
        assert weight.grad is not None
        expected = theirs.get(name)
        if expected is None or not expected.any():  # of what PaliGemma's last layer does behind its keys
            assert not weight.grad.any(), name
        elif not name.endswith("k_proj.bias"):  # it moves all scores of a query alike, so its gradient is rounding
            difference = (weight.grad - expected).abs().max() / expected.abs().max()
            largest, compared_names = max(largest, float(difference)), compared_names + 1
    print(f"gradients of {compared_names} tensors: largest difference {largest:.1e} of a tensor's largest value")
    assert largest < 1e-4
    assert compared_names > 80


@pytest.mark.lerobot
def test_what_a_robot_is_shown_and_does(compared: Compared) -> None:
    """From task, state and cameras to what is done: texts, tokens, statistics, a camera that is absent, and numbers of an action that a robot does not have."""
    robotics, (given, theirs) = Robotics.of(compared.model), (compared.given, compared.theirs)
    bounds = Bounds(*(np.full(count, end) for count, end in ((4, -9.0), (4, 9.0), (3, -9.0), (3, 9.0))))
    asks = list[Ask]()
    for row, (task, state) in enumerate(zip(ASKED["tasks"], given["state"].numpy(), strict=True)):
        text = written_prompt(task, robotics.state(state, bounds))
        assert text == compared.said["prompts"][row]
        ids = robotics.tokenizer(text).input_ids
        assert ids == theirs["read_tokens"][row][theirs["read_valid"][row]].tolist()
        images = np.stack([resized(given[f"camera.{name}"][row].numpy(), SIZE) for name in ("base", "wrist")])
        asks.append(Ask(ids, images, 4, row, "eval"))
    made = ActionSampler(compared.model, Pi05Config(num_steps=STEPS), torch.float32, torch.device("cpu")).make(asks)
    actions = np.stack([robotics.actions(chunk.path[-1], bounds) for chunk in made])
    close("actions of a robot", torch.from_numpy(actions).float(), theirs["robot_actions"])


@pytest.mark.lerobot
def test_images_are_as_large(compared: Compared) -> None:
    """Ours are whole numbers, and each pixel of an image that is made smaller is a mean, as openpi's: lerobot takes points between pixels."""
    for name in ("small", "large"):
        ours = torch.tensor(resized(compared.given[name].numpy(), SIZE)).float()
        theirs = (compared.theirs[name] + 1) * 127.5
        difference = float((ours - theirs).abs().max())
        print(f"{name} image: largest difference {difference:.1f} of 255")
        assert torch.equal(ours.sum(-1) == 0, theirs.sum(-1) == 0)
        assert name == "large" or difference < 1.5


@pytest.mark.lerobot
def test_published_models_have_these_weights(compared: Compared) -> None:
    """The names and shapes of lerobot's whole model, which is not built, are those of the network that its config.json makes, and exports have such names."""
    with torch.device("meta"):
        network = Pi05(Pi05Architecture.of({"type": "pi05", "paligemma_variant": "gemma_2b", "chunk_size": 50}))
    published: dict[str, list[int]] = compared.said["published"]
    theirs = {own_name(name): shape for name, shape in published.items()}
    del theirs[None]
    exported = {f"model.{file_name(name)}" for name, _ in network.named_parameters()}
    assert exported <= published.keys()
    assert theirs == {name: list(weight.shape) for name, weight in network.named_parameters()}
    for key, own in (("vlm_config", network.architecture.vlm), ("expert_config", network.architecture.expert)):
        assert differing(own.to_dict(), compared.said["published_sizes"][key]) == []


def differing(own: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Return what two configurations say differently of a network."""
    found = list[str]()
    for name in sorted(own.keys() & theirs.keys() - IDLE):
        if isinstance(own[name], dict) and isinstance(theirs[name], dict):
            found += [f"{name}.{inner}" for inner in differing(own[name], theirs[name])]
        elif own[name] != theirs[name]:
            found.append(f"{name}: {own[name]} and {theirs[name]}")
    return found
