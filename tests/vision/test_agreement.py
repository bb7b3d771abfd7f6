"""What an engine says of a token is what the trainer computes and what transformers computes of one sample, images included.

vLLM wants torchvision: `make vision` installs it beside the environment and runs these tests with vLLM too.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from hpcrl.config import EnvironmentConfig, GeneratorConfig, SamplingParams
from hpcrl.config.sections.generator import ChatTemplateConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.data.tokenizer import load_tokenizer
from hpcrl.data.vision.families import FAMILIES, GRID, PIXELS, SECONDS, family_of, placeholders
from hpcrl.data.vision.inputs import model_inputs
from hpcrl.data.vision.messages import with_images
from hpcrl.data.vision.reader import ImageReader, row_images
from hpcrl.errors import DataError
from hpcrl.rollout.engines.base import Engine, Launched
from hpcrl.rollout.generate import GroupGenerator
from hpcrl.rollout.images.saved import SampleImages
from hpcrl.rundir.commit import write_text
from hpcrl.rundir.layout import Run
from hpcrl.trainer.backends.fsdp.model import PackedPolicy
from hpcrl.trainer.models.forward import ForwardConfig
from hpcrl.trainer.models.hf import ModelSource
from hpcrl.trainer.models.packed.attention import PACKED
from hpcrl.trainer.packing import pack
from hpcrl.types import Prompt, Row, Work
from tests.rollout.material import TOKEN, options, publish, served, slowly, started
from tests.rows import read_tensors, write_group
from tests.vision.material import IMAGE, KINDS, VIDEO, asks, plays, write_model

SAMPLING = SamplingParams(max_generate_length=12, temperature=0.9)
LONG = replace(SAMPLING, max_generate_length=200, additional_kwargs={"ignore_eos": True})
ENVIRONMENT = "tests.vision.environments:ShowMore"
CLIPS = "tests.vision.environments:ShowClips"


ENGINES = [
    *(("transformers", kind) for kind in KINDS),
    *(pytest.param(("vllm", kind), marks=pytest.mark.vision) for kind in KINDS if FAMILIES[kind].vllm),
]


@pytest.fixture(scope="module", params=ENGINES, ids="-".join)
def used(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """An engine, and a model that it serves."""
    backend, kind = request.param
    return backend, write_model(tmp_path_factory.mktemp("vision") / kind, kind)


@pytest.fixture(scope="module")
def model(used: tuple[str, Path]) -> Path:
    return used[1]


@pytest.fixture(scope="module")
def engine(used: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    backend, model = used
    if backend == "vllm":
        folder = tmp_path_factory.mktemp("server")
        write_text(folder / "token", TOKEN + "\n", mode=0o600)
        given = replace(options(str(model), folder / "token"), max_model_len=256)
        beside = Path(__file__).parent / "operators", Path(os.environ["HPCRL_TORCHVISION"])
        with served(given, folder / "engine.log", *beside) as server:
            yield server
    else:
        with started(model) as found:
            yield found


def generator_of(engine: Engine, model: Path, kept: SampleImages | None = None, **config: Any) -> GroupGenerator:
    reader = ImageReader.of(Pretrained(str(model)))
    tokenizer = load_tokenizer(Pretrained(str(model)), ChatTemplateConfig())
    settings = GeneratorConfig(**{"sampling_params": SAMPLING, **config})
    return GroupGenerator(engine, tokenizer, settings, EnvironmentConfig(), reader=reader, kept=kept)


def work(
    number: int, *seeds: int, n: int = 4, video: dict[str, Any] | None = None, environment: str = ENVIRONMENT
) -> Work:
    asked = asks(*seeds) if seeds else [{"role": "user", "content": "count: red"}]
    if video is not None:
        asked[0]["content"].insert(1, video)
    messages = with_images(asked)
    return Work(f"g{number}", "train", Prompt(f"row{number}", messages, environment), n, 40 * number)


def played(
    engine: Launched, model: Path, folder: Path, *items: Work, kept: SampleImages | None = None, **config: Any
) -> list[Row[torch.Tensor]]:
    """Return the rows of groups that are generated together, as the trainer reads them from their files."""

    async def play() -> list[Any]:
        groups = generator_of(engine.connect(), model, kept, **config)
        return await asyncio.gather(*(groups.generate(item) for item in items))

    found = list[Row[torch.Tensor]]()
    for group in asyncio.run(play()):
        assert not group.failures
        path = folder / group.work.group_id
        write_group(path, group.samples, group.meta(0, path.name))
        found += read_tensors(path)
    return found


def policy_of(model: Path, *, packing: bool = True, temperature: float = SAMPLING.temperature) -> PackedPolicy:
    whole = ModelSource(path=str(model), role="trainer.policy").whole(torch.float32, PACKED)
    return PackedPolicy(whole, ForwardConfig(temperature=temperature, chunk_rows=64, packing=packing))


def told(row: Row[torch.Tensor]) -> dict[str, Any]:
    """Return a row's images and videos as transformers' own processors give them to its models."""
    seen = row.token_ids[(row.token_ids == IMAGE) | (row.token_ids == VIDEO)]
    kinds, at = {IMAGE: list[Any](), VIDEO: list[Any]()}, 0
    for image in row_images(row.tensors):
        kinds[int(seen[at])].append(image)
        at += int(image[GRID].prod()) // 4
    assert at == len(seen)
    types = (row.token_ids == IMAGE).int() + 2 * (row.token_ids == VIDEO).int()
    found: dict[str, Any] = {"mm_token_type_ids": types[None]}
    if kinds[IMAGE]:
        found |= model_inputs(kinds[IMAGE], row.token_ids.device)
    if kinds[VIDEO]:
        videos = model_inputs(kinds[VIDEO], row.token_ids.device)
        found |= {"pixel_values_videos": videos[PIXELS], "video_grid_thw": videos[GRID]}
    if seconds := [video[SECONDS] for video in kinds[VIDEO] if SECONDS in video]:
        found["second_per_grid_ts"] = torch.cat(seconds)
    return found


def of_one(reference: Any, row: Row[torch.Tensor], temperature: float) -> torch.Tensor:
    """Return transformers' own log-probabilities of a row's tokens, [T - 1], among those that may be said."""
    ids = row.token_ids[None]
    inputs: dict[str, Any] = {}
    if images := row_images(row.tensors):
        inputs = told(row) if GRID in images[0] else model_inputs(images, ids.device)
    logits = reference(input_ids=ids, **inputs).logits[0, :-1] / temperature
    logits = logits.index_fill(1, torch.tensor(placeholders(reference.config)), -torch.inf)
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


def test_rows_with_and_without_images(engine: Launched, model: Path, tmp_path: Path) -> None:
    """Prompts with one image, with two of other sizes, and with none, together; three turns, of which later ones show more."""
    items = work(1, 1), work(2, 2, 3), work(3)
    run = Run(tmp_path)
    rows = played(engine, model, tmp_path, *items, kept=SampleImages(run, 1), max_turns=3)
    assert len(rows) == 12
    assert [len(run.pictures_of(f"g{number}.0")) for number in (1, 2, 3)] == [4, 5, 3]
    assert [len(row_images(row.tensors)) for row in rows[::4]] == [4, 5, 3]
    samples, reference = pack(rows).whole(), AutoModelForImageTextToText.from_pretrained(model)
    trained = samples.loss_mask > 0
    said = samples.labels[trained]
    assert not torch.isin(said, torch.tensor([IMAGE])).any()
    found = {packing: policy_of(model, packing=packing).run(samples)[0] for packing in (True, False)}
    torch.testing.assert_close(found[True][trained], samples.rollout_logprobs[trained], rtol=0, atol=2e-4)
    torch.testing.assert_close(found[True], found[False], rtol=0, atol=2e-4)
    alone = torch.cat([torch.cat([of_one(reference, row, 0.9), torch.zeros(1)]) for row in rows])
    torch.testing.assert_close(found[True][trained], alone[trained], rtol=0, atol=2e-4)


def test_videos_among_images(engine: Launched, model: Path, tmp_path: Path) -> None:
    """Of frames at whole seconds, as transformers computes them too, and of an odd number at thirds of them; further turns show images, and
    those of the last prompt videos too."""
    if family_of({"model_type": model.name}).videos is None:
        with pytest.raises(DataError, match="takes no videos; show their frames as images"):
            played(engine, model, tmp_path, work(1, 1, video=plays(2)))
        return
    # two images first, as high as they are wide: where transformers 5.17 counts on from behind a video does not matter
    items = work(1, 1, 3, video=plays(4)), work(2, 2, video=plays(5, fps=3.0)), work(3, 1, environment=CLIPS)
    run = Run(tmp_path)
    rows = played(engine, model, tmp_path, *items, kept=SampleImages(run, 1), max_turns=3)
    assert [Image.open(run.shown_picture("g1", at)).n_frames for at in range(3)] == [1, 4, 1]
    assert [int((row.token_ids == VIDEO).sum()) for row in rows[::4]] == [2 * 9, 3 * 9, 2 * 9]
    samples, reference = pack(rows).whole(), AutoModelForImageTextToText.from_pretrained(model)
    trained = samples.loss_mask > 0
    assert not torch.isin(samples.labels[trained], torch.tensor([IMAGE, VIDEO])).any()
    found = {packing: policy_of(model, packing=packing).run(samples)[0] for packing in (True, False)}
    torch.testing.assert_close(found[True][trained], samples.rollout_logprobs[trained], rtol=0, atol=2e-4)
    torch.testing.assert_close(found[True], found[False], rtol=0, atol=2e-4)
    of_rows = found[True].split([len(row.token_ids) for row in rows])
    for at in (0, *((4,) if model.name == "qwen3_vl" else ()), 8):
        alone, chosen = of_one(reference, rows[at], 0.9), rows[at].loss_mask[1:] > 0
        torch.testing.assert_close(of_rows[at][:-1][chosen], alone[chosen], rtol=0, atol=2e-4)


def test_gradients_of_packed_rows_are_those_of_each(engine: Launched, model: Path, tmp_path: Path) -> None:
    video = plays(4) if family_of({"model_type": model.name}).videos else None
    rows = played(engine, model, tmp_path, work(1, 1, n=2, video=video), work(2, 2, 3, n=2), work(3, n=2))
    policy, reference = policy_of(model, temperature=1.0), AutoModelForImageTextToText.from_pretrained(model)
    for row in rows:
        of_one(reference, row, 1.0)[row.loss_mask[1:] > 0].sum().backward()
    batch = pack(rows).whole()
    (policy.run(batch)[0] * batch.loss_mask).sum().backward()
    expected = dict(reference.named_parameters())
    seen = 0
    for name, parameter in policy.model.named_parameters():
        wanted = expected[name].grad
        if wanted is None:  # the last norms of a CLIP tower, of which LLaVA takes an earlier layer
            assert parameter.grad is None or not parameter.grad.any()
            continue
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()) + 1e-6)
        seen += ("visual" in name or "vision_tower" in name) and bool(wanted.any())
    assert seen > 4, "the vision tower learns too"


def test_a_micro_batch_without_images_gives_the_tower_gradients_of_zero(model: Path) -> None:
    """Ranks with images and ranks without take part in the same sums."""
    ids = torch.tensor([3, 5, 7, 6, 1])
    zeros = torch.zeros(5)
    batch = pack([Row(ids, torch.ones(5), zeros, zeros.int(), zeros, "stop")]).whole()
    policy = policy_of(model)
    policy.run(batch)[0].sum().backward()
    tower = {
        name: each.grad for name, each in policy.model.named_parameters() if "visual" in name or "projector" in name
    }
    assert tower
    for name, gradient in tower.items():
        assert gradient is not None, name
        assert not gradient.any(), name


def test_placeholders_are_never_said(engine: Launched, model: Path, tmp_path: Path) -> None:
    """Also by a policy that finds an image the most probable token of all."""
    other = AutoModelForImageTextToText.from_pretrained(model)
    with torch.no_grad():
        head = other.get_output_embeddings().weight
        hidden = other.base_model.language_model.norm.weight
        hidden.copy_(hidden.abs())
        head[IMAGE] = 3 * head[5]
    other.save_pretrained(tmp_path / "other")

    async def play() -> list[list[int]]:
        client = engine.connect()
        await client.update_weights(publish(tmp_path / "other", tmp_path / "v000001", 1))
        group = await generator_of(client, model).generate(work(1, 1, n=16))
        plain = await client.generate([3, 5], 16, 1, {"max_tokens": 12, "temperature": 1.0})
        await client.update_weights(publish(model, tmp_path / "v000002", 2))
        said = [row.token_ids[row.loss_mask > 0].tolist() for row in group.samples]
        assert any(IMAGE in one.token_ids for one in plain), "without the bias it would be said"
        return said

    said = asyncio.run(play())
    assert not any(IMAGE in tokens for tokens in said)


def test_rows_under_way_see_on_with_new_weights(engine: Launched, model: Path, tmp_path: Path) -> None:
    """The caches are computed anew, images included, so that each token has the log-probability of one version."""
    other = write_model(tmp_path / "other", model.name, seed=8)
    weights = publish(other, tmp_path / "v000003", 3)

    async def play() -> Any:
        client = engine.connect()
        groups = generator_of(client, model, sampling_params=LONG)
        before = await client.tokens()
        with slowly(model):
            running = asyncio.create_task(groups.generate(replace(work(1, 1, 2, n=6), seed=3)))
            while await client.tokens() == before:
                await asyncio.sleep(0)
            await client.update_weights(weights)
        group = await running
        await client.update_weights(publish(model, tmp_path / "v000004", 4))
        return group

    group = asyncio.run(play())
    write_group(tmp_path / "group", group.samples, group.meta(0, "group"))
    rows = read_tensors(tmp_path / "group")
    batch = pack(rows).whole()
    versions = torch.cat([torch.cat([row.versions[1:], torch.tensor([-1])]) for row in rows])
    trained = batch.loss_mask > 0
    new = (versions == 3) & trained
    assert new.any()
    assert (versions[trained] != 3).any()
    torch.testing.assert_close(policy_of(other).run(batch)[0][new], batch.rollout_logprobs[new], rtol=0, atol=2e-4)
