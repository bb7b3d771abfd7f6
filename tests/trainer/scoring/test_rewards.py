"""A reward model that runs as a scorer says what its service would have said, and training gets it as if an environment had paid it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from hpcrl.config import Config
from hpcrl.config.scorers import REWARD, scorer_sets
from hpcrl.data.batch_file import write_batch
from hpcrl.data.group_file import Conversation, check_group, group_bytes, read_conversations, read_group
from hpcrl.data.score_file import GroupRewards, read_rewards, write_scores
from hpcrl.envs.rewards.judged import JudgedRewards
from hpcrl.errors import ConfigError, DamagedError, DataError
from hpcrl.rundir.commit import write_bytes, write_text
from hpcrl.rundir.layout import Run
from hpcrl.trainer.batching import mini_batches
from hpcrl.trainer.distributed import World
from hpcrl.trainer.read_batch import load_rows
from hpcrl.trainer.scoring.model import ScoringModel
from hpcrl.trainer.scoring.reward import RewardScoringModel
from hpcrl.types import Batch, GroupMeta
from tests.paths import QUICKSTART
from tests.reward_service.material import POLICY, load, write_reward_model
from tests.rows import group_meta
from tests.trainer.material import make_batch, make_run, views
from tests.trainer.ranks import Ranks

FP32 = "environment.reward_model.fsdp_config.mixed_precision.param_dtype=fp32"
WORDS = ["abcd", "", "dcba" * 5, "a<|end|>", "bc", "cab" * 9]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reward_model(tmp_path_factory.mktemp("judge"))


def said(group: int, sample: int) -> Conversation:
    """Return a conversation, some of them of two turns."""
    answer = {"role": "assistant", "content": WORDS[(3 * group + sample) % len(WORDS)]}
    asked = {"role": "user", "content": f"sort: {WORDS[group]}"}
    return [asked, answer, {"role": "user", "content": "sort: ba"}, answer] if sample == 2 else [asked, answer]


def with_conversations(run: Run, batch: Batch) -> Batch:
    metas = list[GroupMeta]()
    for at, meta in enumerate(batch.groups):
        path = run.path / meta.path
        content, meta = group_bytes(read_group(path), meta, [said(at, sample) for sample in range(3)])
        write_bytes(path, content)
        metas.append(meta)
    return replace(batch, groups=metas)


def configured(path: Path, judge: Path, *settings: str) -> tuple[Run, Config, Batch]:
    run = make_run(path)
    config = Config.from_toml([QUICKSTART], [f"environment.reward_model.model={judge}", FP32, *settings])
    write_text(run.config, config.to_toml())
    batch = with_conversations(run, make_batch(run, 1, groups=4, size=3))
    write_batch(run, batch, "")
    return run, config, batch


def test_scores_are_those_of_the_service_on_any_number_of_ranks(
    judge: Path, tmp_path: Path, alone: World, two: Ranks
) -> None:
    run, config, batch = configured(tmp_path / "run", judge, "environment.reward_model.max_tokens_per_micro_batch=60")
    (scorers,) = scorer_sets(config)
    assert scorers.role == REWARD
    passes = list[int]()
    one = RewardScoringModel(run, config, scorers, alone).scores(batch.groups, lambda: passes.append(1))
    assert len(passes) > 2
    two.play([("scoring.scenarios:scores", {"run": str(run.path), "out": str(tmp_path)})])
    parts = [load_file(tmp_path / f"{rank}.safetensors") for rank in range(2)]
    assert all(parts), "both ranks have some of the groups"
    together = parts[0] | parts[1]
    service = load(judge)
    for at, group in enumerate(batch.groups):
        rows = [service.tokens(said(at, index)[:-1], said(at, index)[-1]["content"]) for index in range(3)]
        expected = service.scores(rows)
        assert len({round(value, 3) for value in expected}) == 3
        assert one[group.group_id].scores == pytest.approx(expected, abs=1e-5)
        assert together[group.group_id].tolist() == pytest.approx(expected, abs=1e-5)


def test_it_fails_at_what_it_cannot_read(judge: Path, tmp_path: Path, alone: World, capsys: Any) -> None:
    run, config, batch = configured(tmp_path / "run", judge)
    group = batch.groups[1]
    long = [{"role": "user", "content": "ab" * 500}, {"role": "assistant", "content": "c"}]
    content, group = group_bytes(read_group(run.path / group.path), group, [said(0, 0), long, said(0, 2)])
    write_bytes(run.path / group.path, content)
    model = RewardScoringModel(run, config, scorer_sets(config)[0], alone)
    scores = model.scores([group], lambda: None)[group.group_id].scores
    assert [score is None for score in scores] == [False, True, False]
    assert f"a sample of group {group.group_id} is not scored: a conversation has 10" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("what", "error", "problem"),
    [
        ("policy", DataError, r"environment.reward_model.model: .* is no reward model"),
        ("headless", DataError, r"the reward model .* cannot be loaded: no weights for score.weight"),
        ("template", ConfigError, r"has no chat template; .*\(environment.reward_model.chat_template\)"),
    ],
)
def test_what_is_no_reward_model_is_named(
    what: str, error: type[Exception], problem: str, tmp_path: Path, alone: World
) -> None:
    path = POLICY if what == "policy" else write_reward_model(tmp_path / "model")
    if what == "headless":
        from safetensors.torch import save_file

        weights = load_file(path / "model.safetensors")
        del weights["score.weight"]
        save_file(weights, path / "model.safetensors", {"format": "pt"})
    if what == "template":
        (path / "chat_template.jinja").unlink()
    run, config, _ = configured(tmp_path / "run", path)
    with pytest.raises(error, match=problem):
        RewardScoringModel(run, config, scorer_sets(config)[0], alone)


def test_settings_that_decide_scores_are_in_their_name(judge: Path) -> None:
    def name(*settings: str) -> str:
        settings = (f"environment.reward_model.model={judge}", *settings)
        return scorer_sets(Config.from_toml([QUICKSTART], settings))[0].name

    section = "environment.reward_model"
    assert name(f"{section}.weight=0.5", f"{section}.clip_max=9", f"{section}.num_replicas=3") == name()
    assert name(FP32) == name(), "that of the policy"
    assert (
        len(
            {
                name(),
                name(FP32.replace("fp32", "bf16")),
                name(f"{section}.revision=v2"),
                name(f"{section}.chat_template=x.jinja"),
            }
        )
        == 4
    )


# What training makes of it.


def judged(run: Run, batch: Batch, scores: list[list[float | None]]) -> Batch:
    """Return a batch as the controller composes it."""
    digests = write_scores(run, "reward-0", zip(batch.groups, map(GroupRewards, scores), strict=True))
    rewards = JudgedRewards(2.0, -5.0, 5.0)
    groups = [replace(group, scores={"reward-0": digests[group.group_id]}) for group in batch.groups]
    for group, own in zip(groups, scores, strict=True):
        assert read_rewards(run, "reward-0", group) == own
    return replace(batch, groups=[rewards.complete(group, own) for group, own in zip(groups, scores, strict=True)])


def test_a_score_is_paid_at_the_last_token(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    batch = make_batch(run, 1, groups=2, size=3)
    scores: list[list[float | None]] = [[0.5, -1.0, 2.0], [1.0, None, 0.25]]
    named = judged(run, batch, scores)
    refs = mini_batches(named, 2)[0]
    plain, found = load_rows(run, batch, refs), load_rows(run, named, refs)
    assert found.unscored == 1
    for before, after in zip(views([plain]), views([found]), strict=True):
        group, index = after.ref.group, after.ref.index
        paid_T = after.of(found.rewards) - before.of(plain.rewards)
        assert paid_T.nonzero()[:, 0].tolist() == [after.ref.length - 2], "entry t speaks about token t + 1"
        assert after.of(found.rewards).sum().item() == pytest.approx(named.groups[group].rewards[index], abs=1e-6)
        score = scores[group][index]
        assert bool(after.trained) == (score is not None)
        if score is not None:
            assert paid_T.sum().item() == pytest.approx(2.0 * score, abs=1e-6)


def test_of_a_sample_of_several_rows_the_last_one_has_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    batch = make_batch(run, 1, groups=1, size=3)
    (group,) = batch.groups
    rows = group_meta(
        group_id=group.group_id, path=group.path, rewards=group.rewards[1:], lengths=group.lengths,
        response_lengths=[2, 2], stop_reasons=["stop"] * 2, rows=[2, 1],
    )  # fmt: skip
    content, rows = group_bytes(read_group(run.path / group.path), rows, [said(0, 0), said(0, 1)])
    write_bytes(run.path / group.path, content)
    assert read_conversations(run.path / group.path, rows) == [said(0, 0), said(0, 1)]
    assert check_group(run.path / group.path, rows)
    named = judged(run, replace(batch, groups=[rows]), [[1.0, None]])
    found = load_rows(run, named, mini_batches(named, 1)[0])
    sums = {view.ref.index: view.of(found.rewards).sum().item() for view in views([found])}
    assert sums[0] == pytest.approx(group.rewards[0], abs=1e-6), "an earlier turn is as it was"
    assert sums[1] == pytest.approx(named.groups[0].rewards[0], abs=1e-6)
    assert {view.ref.index for view in views([found]) if view.trained} == {0, 1}


def test_what_teachers_and_reward_models_say_lies_beside_each_other(judge: Path, tmp_path: Path, alone: World) -> None:
    run, config, batch = configured(tmp_path / "run", judge, "trainer.placement.colocate_policy_ref=false")
    reference, reward = scorer_sets(config)
    found = ScoringModel(run, config, reference, alone).scores(batch.groups, lambda: None)
    digests = write_scores(run, reference.name, [(group, found[group.group_id]) for group in batch.groups])
    named = judged(run, batch, [[1.0, 2.0, 3.0]] * 4)
    groups = [
        replace(group, scores={**group.scores, reference.name: digests[group.group_id]}) for group in named.groups
    ]
    packed = load_rows(run, replace(named, groups=groups), mini_batches(named, 4)[0])
    assert packed.scores.ref_logprobs is not None
    assert reward.role == REWARD


def test_files_without_what_a_reward_model_reads_are_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (group,) = make_batch(run, 1, groups=1, size=3).groups
    with pytest.raises(DamagedError, match="0 conversations for 3 samples"):
        read_conversations(run.path / group.path, group)
    with pytest.raises(DamagedError, match="not the one that the batch was composed of"):
        read_conversations(run.path / group.path, replace(group, digest="0" * 32))
    named = judged(run, Batch(1, [group], 0), [[1.0, 2.0, 3.0]]).groups[0]
    (path,) = run.scores_of("reward-0").iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedError, match="is damaged"):
        read_rewards(run, "reward-0", named)
