"""What the embedded engine says of an action's tokens is what the trainer computes, and what the model itself does among the tokens of actions."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from hpcrl.config import EnvironmentConfig, GeneratorConfig, SamplingParams
from hpcrl.config.sections.generator import ChatTemplateConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.config.sections.vla import VLAConfig
from hpcrl.data.action_tokens import action_tokens
from hpcrl.data.tokenizer import load_tokenizer
from hpcrl.data.vision.inputs import model_inputs
from hpcrl.data.vision.reader import ImageReader, row_images
from hpcrl.errors import DataError
from hpcrl.families.openvla.actions import ActionTurns
from hpcrl.families.openvla.generate import ActionGroups
from hpcrl.families.robots.family import videos_of
from hpcrl.rollout.generate import GroupGenerator
from hpcrl.rollout.group import Group
from hpcrl.rundir.layout import Run
from hpcrl.trainer.backends.fsdp.model import PackedPolicy, Sight
from hpcrl.trainer.models.forward import ForwardConfig
from hpcrl.trainer.models.hf import ModelSource
from hpcrl.trainer.models.packed.attention import PACKED
from hpcrl.trainer.packing import pack
from hpcrl.types import Prompt, Row, Work
from tests.rollout.material import started
from tests.rows import read_tensors, write_group
from tests.vla.material import parallel

CHUNK, TEMPERATURE = 2, 1.3
PARALLEL, SHOWN_STATES = "openvla-oft", "openvla-oft-shown-states"


def vla_of(model: Path) -> VLAConfig:
    kind: Literal["openvla", "openvla-oft"] = "openvla-oft" if model.name.startswith(PARALLEL) else "openvla"
    return VLAConfig(enable=True, vla_type=kind, use_proprio=model.name == SHOWN_STATES)


def is_parallel(model: Path) -> bool:
    return model.name.startswith(PARALLEL)


def generator_of(engine: Any, model: Path, run: Run) -> GroupGenerator:
    pretrained = Pretrained(str(model))
    actions = ActionTurns.of(pretrained, vla_of(model), CHUNK, CHUNK)
    assert actions is not None
    settings = GeneratorConfig(
        sampling_params=SamplingParams(max_generate_length=CHUNK, temperature=TEMPERATURE, top_k=12),
        max_turns=4,
        step_wise_trajectories=True,
    )
    return ActionGroups(
        engine,
        load_tokenizer(pretrained, ChatTemplateConfig()),
        settings,
        EnvironmentConfig(),
        reader=ImageReader.of(pretrained, states=actions.states.shown if actions.states else None),
        actions=actions,
        videos=videos_of(run, VLAConfig(enable=True, save_video=True, trace_verbosity=2)),
    )


@pytest.fixture(scope="module", params=["openvla", PARALLEL, SHOWN_STATES])
def model(request: pytest.FixtureRequest, reach: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the tiny OpenVLA as it is, one that says all tokens of a turn at once, and one of those that is shown what is measured too."""
    if request.param == "openvla":
        return reach
    measured = ([-2.0, 0.0], [2.0, 4.0]) if request.param == SHOWN_STATES else ()
    return parallel(reach, tmp_path_factory.mktemp("models") / request.param, *measured)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def group(model: Path, run: Run) -> Group:
    """Return four episodes from one start, generated together."""

    async def play(engine: Any) -> Group:
        prompt = Prompt("row", [{"role": "user", "content": "reach: "}], "tests.vla.environments:Pushes")
        return await generator_of(engine, model, run).generate(Work("g", "train", prompt, 4, 11))

    with started(model) as engine:
        return asyncio.run(play(engine.connect()))


@pytest.fixture(scope="module")
def rows(group: Group, tmp_path_factory: pytest.TempPathFactory) -> list[Row[torch.Tensor]]:
    """Return all turns, as the trainer reads them from their file."""
    path = tmp_path_factory.mktemp("actions") / "g"
    write_group(path, group.samples, group.meta(0, path.name))
    return read_tensors(path)


def test_turns_are_actions_and_nothing_else(group: Group, model: Path) -> None:
    assert not group.failures
    tokens = action_tokens(AutoModelForImageTextToText.from_pretrained(model).config)
    assert tokens is not None
    lengths = {len(row.token_ids) for row in group.samples}
    assert len(lengths) == 1, "each turn has its own prompt: what was seen before is not in it"
    for rows, messages in zip(group.rows, group.conversations, strict=True):
        said = [message["content"] for message in messages if message["role"] == "assistant"]
        assert len(said) == len(rows)
        at = 0.0
        for row, text in zip(rows, said, strict=True):
            own = row.token_ids[row.loss_mask > 0].tolist()
            assert len(own) == CHUNK
            assert set(own) <= set(tokens.ids)
            numbers = 0.9 * tokens.numbers(own)
            assert text.split() == [f"{number:.3f}" for number in numbers]
            at += numbers.sum()
            assert row.stop_reason == "stop"
        assert rows[-1].env_metrics["pushed"] == pytest.approx(at)
        assert rows[-1].rewards.sum() == float(at > 1)
        assert len(rows) == 4 or at > 1


@pytest.mark.parametrize("packing", [True, False])
def test_log_probabilities_agree(rows: list[Row[torch.Tensor]], model: Path, packing: bool) -> None:
    whole = ModelSource(path=str(model), role="trainer.policy").whole(torch.float32, PACKED)
    settings = ForwardConfig(temperature=TEMPERATURE, chunk_rows=3, packing=packing, entropy_loss=False)
    policy, batch = PackedPolicy(whole, settings), pack(rows).whole()
    trained = batch.loss_mask > 0
    assert int(trained.sum()) == CHUNK * len(rows)
    if is_parallel(model) and not packing:
        with pytest.raises(DataError, match="use_sample_packing"):
            policy.run(batch)
        return
    logprobs, entropies = policy.run(batch)
    torch.testing.assert_close(logprobs[trained], batch.rollout_logprobs[trained], rtol=0, atol=1e-5)
    assert float(entropies[trained].max()) < torch.log(torch.tensor(16.0)), "of the tokens of actions alone"


def test_log_probabilities_are_those_of_the_model(rows: list[Row[torch.Tensor]], model: Path) -> None:
    """By transformers' forward of one row alone. OpenVLA-OFT's row ends with the token that ends a text, and whatever stands in the place of its
    actions changes nothing."""
    reference: Any = AutoModelForImageTextToText.from_pretrained(model)
    ids, parallel = action_tokens(reference.config).ids, is_parallel(model)  # pyright: ignore[reportOptionalMemberAccess]
    for row in rows[:3]:
        assert row.sampling_mask is not None
        inputs, end = model_inputs(row_images(row.tensors), row.token_ids.device), len(row.token_ids) - parallel
        assert ("states" in inputs) == (model.name == SHOWN_STATES)
        assert (row.token_ids[end:] == reference.config.get_text_config().eos_token_id).all()
        said, given = row.token_ids[end - CHUNK : end], row.token_ids.clone()
        if parallel:
            given[end - CHUNK : end] = ids.start
        logits = reference(input_ids=given[None], **inputs).logits[0, end - CHUNK - 1 : end - 1] / TEMPERATURE
        outside = torch.ones_like(logits, dtype=torch.bool)
        outside[:, ids.start : ids.stop] = False
        logits = logits.masked_fill(outside, -torch.inf)
        logits = logits.masked_fill(logits < logits.topk(12).values[:, -1:], -torch.inf)
        found = logits.log_softmax(-1).gather(1, said[:, None])[:, 0]
        torch.testing.assert_close(found, row.rollout_logprobs[end - CHUNK : end], rtol=0, atol=1e-5)


@pytest.mark.parametrize("model", [SHOWN_STATES], indirect=True)
def test_what_is_measured_is_a_token_behind_those_of_the_image(rows: list[Row[torch.Tensor]], model: Path) -> None:
    """As OpenVLA-OFT has it: two layers with GELU between them, of numbers that statistics scale. Another state is another policy."""
    reference: Any = AutoModelForImageTextToText.from_pretrained(model)
    body = reference.model
    row = next(row for row in rows if float(row.tensors["states.1"][0, 0]))
    assert float(row.tensors["states.1"][0, 1]) == pytest.approx(0.5), "3 of 0 to 4"
    first, second = body.proprio_projector.fc1, body.proprio_projector.fc2
    state = second(torch.nn.functional.gelu(first(row.tensors["states.1"])))
    patches = body.projector(body.vision_backbone(row.tensors["pixel_values.0"]))[0]
    ids, embeds = row.token_ids[None], body.get_input_embeddings()(row.token_ids[None]).clone()
    (places,) = (row.token_ids == reference.config.image_token_id).nonzero(as_tuple=True)
    assert places.tolist() == list(range(1, 2 + len(patches))), "behind the token that begins a text"
    embeds[0, places] = torch.cat([patches, state])
    inputs = model_inputs(row_images(row.tensors), ids.device)
    found, by_hand = reference(input_ids=ids, **inputs).logits, reference(inputs_embeds=embeds).logits
    torch.testing.assert_close(found, by_hand, rtol=0, atol=1e-5)
    other = reference(input_ids=ids, **{**inputs, "states": -inputs["states"]}).logits
    assert (other - found)[0, -CHUNK - 2 :].abs().max() > 1e-3


def test_gradients_reach_the_eyes_and_no_head_of_other_tokens(rows: list[Row[torch.Tensor]], model: Path) -> None:
    whole = ModelSource(path=str(model), role="trainer.policy").whole(torch.float32, PACKED)
    policy = PackedPolicy(whole, ForwardConfig(temperature=TEMPERATURE, chunk_rows=3))
    batch = pack(rows).whole()
    (policy.run(batch)[0] * batch.loss_mask).sum().backward()
    gradients = {name: parameter.grad for name, parameter in policy.model.named_parameters()}
    assert all(
        gradient is not None and gradient.any()
        for name, gradient in gradients.items()
        if "vision" in name or "proprio" in name
    )
    assert any("proprio" in name for name in gradients) == (model.name == SHOWN_STATES)
    policy.zero_grad()
    Sight(policy.model).nothing(torch.device("cpu")).backward()  # of a rank whose turns were shown nothing
    eyes = [one for name, one in policy.model.named_parameters() if "vision" in name or "proprio" in name]
    assert all(one.grad is not None and not one.grad.any() for one in eyes)
    head, ids = gradients["lm_head.weight"], action_tokens(whole.config).ids  # pyright: ignore[reportOptionalMemberAccess]
    assert head is not None
    assert not head[: ids.start].any()
    assert head[ids.start : ids.stop].any()


def test_videos_show_every_turn(group: Group, run: Run) -> None:
    for at, rows in enumerate(group.rows):
        with Image.open(run.picture(f"g.{at}")) as video:
            frames: int = getattr(video, "n_frames", 1)
            assert video.size == (40, 30)
            assert frames <= len(rows) + 1, (
                "what was seen before each turn, and at the end; frames that are alike are one"
            )
            assert frames > 1
    assert videos_of(run, VLAConfig(enable=True)) is None
    of_evaluations = videos_of(run, VLAConfig(enable=True, save_video=True))
    assert of_evaluations is not None
    assert (of_evaluations.wants("eval"), of_evaluations.wants("train")) == (True, False)
