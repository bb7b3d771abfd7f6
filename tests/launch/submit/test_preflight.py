"""A run that starts from another run's checkpoint is compared with that run before anything is queued."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import Config
from hpcrl.errors import ConfigError, DataError
from hpcrl.launch.submit.preflight import check_checkpoint, check_files, look
from hpcrl.launch.submit.tokenizer import TRIED
from hpcrl.rundir.commit import begin, finish, write_text
from hpcrl.rundir.layout import Run
from tests.data.pi05.material import write_lerobot
from tests.paths import CONFIGS

QUICKSTART, MODEL = CONFIGS / "quickstart.toml", CONFIGS / "quickstart" / "model"
GSM8K = "environment.reward_function={gsm8k=1}"


@pytest.fixture
def saved(tmp_path: Path) -> Run:
    """The run that saved the checkpoint of step 2."""
    run = Run(tmp_path / "runs" / "project" / "first")
    write_text(run.config, Config.from_toml([QUICKSTART], ["trainer.max_steps=2"]).to_toml())
    begin(run.checkpoint(2), 1)
    finish(run.checkpoint(2), 1, step=2)
    return run


def config(saved: Run, *overrides: str) -> Config:
    start = ["trainer.resume_mode=from_path", f"trainer.resume_path={saved.checkpoint(2)}"]
    return Config.from_toml([QUICKSTART], [*start, *overrides])


def copied_model(to: Path, **entries: object) -> Path:
    shutil.copytree(MODEL, to)
    content = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(content | entries))
    return to


def test_what_a_new_run_may_choose_freely_is_not_mentioned(saved: Run) -> None:
    free = ["trainer.max_steps=9", "trainer.run_name=b", "trainer.policy.optimizer_config.lr=1", "slurm.time_minutes=5"]
    assert check_checkpoint(config(saved, *free)) == []
    assert check_checkpoint(Config.from_toml([QUICKSTART])) == []


def test_other_prompts_are_a_warning(saved: Run) -> None:
    found = check_checkpoint(config(saved, "trainer.seed=1", "trainer.train_batch_size=32"))
    assert [line.partition(" (")[0] for line in found] == [
        "first -> this run: warning: trainer.seed: 42 -> 1",
        "first -> this run: warning: trainer.train_batch_size: 64 -> 32",
    ]


def test_model_of_another_shape_is_refused_and_everything_is_told(saved: Run, tmp_path: Path) -> None:
    wide = copied_model(tmp_path / "wide", hidden_size=128, num_hidden_layers=4)
    with pytest.raises(ConfigError) as caught:
        check_checkpoint(config(saved, f"trainer.policy.model.path={wide}", "trainer.seed=1"))
    refused, warned, end = str(caught.value).splitlines()
    assert refused.startswith("first -> this run: refused: trainer.policy.model.path: ")
    assert "config.json differs in hidden_size, num_hidden_layers" in refused
    assert "warning: trainer.seed: 42 -> 1" in warned
    assert "cannot be loaded by this run" in end


def test_model_of_the_same_shape_elsewhere_is_a_warning(saved: Run, tmp_path: Path) -> None:
    export = copied_model(tmp_path / "export", transformers_version="9", dtype="bfloat16")
    (line,) = check_checkpoint(config(saved, f"trainer.policy.model.path={export}"))
    assert "same shape" in line
    (line,) = check_checkpoint(config(saved, "trainer.policy.model.path=some/model"))
    assert "cannot see whether both have the same shape" in line


def test_checkpoint_without_its_run_cannot_be_compared(saved: Run) -> None:
    saved.config.unlink()
    (line,) = check_checkpoint(config(saved))
    assert "cannot be compared with this one" in line
    assert "config.toml" in line


def test_a_checkpoint_that_is_none(saved: Run) -> None:
    with pytest.raises(DataError, match=r"s000003 is no committed checkpoint; expected <run>/checkpoints/sNNNNNN"):
        check_checkpoint(config(saved, f"trainer.resume_path={saved.checkpoint(3)}"))


def test_folders_of_ones_own_modules_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"python_path: no folder {tmp_path}/nowhere"):
        check_files(Config.from_toml([QUICKSTART], [f'python_path=["{tmp_path}/nowhere", "{tmp_path}"]']))


@pytest.mark.parametrize(
    ("row", "overrides", "told"),
    [
        ({"prompt": "2+2"}, [], r"data.train_data: dataset .*rows.jsonl, row uid 0: no `env_class`"),
        ({"question": "2+2"}, [GSM8K], r"no column `prompt` \(data.prompt_column\); its columns are question"),
        ({"prompt": "2+2", "answer": "4"}, [GSM8K], r"row uid 0: the row needs a ground truth, a text or a number"),
        ({"prompt": "2+2", "answer": "4"}, [GSM8K, "data.response_column=answer"], "line 17 cannot be read as JSON"),
        (
            {"prompt": "2+2", "answer": "four"},
            [GSM8K, "data.response_column=answer"],
            "expected a number as ground truth",
        ),
        ({"prompt": "2+2"}, ["environment.reward_function={format=1}"], None),
        ({"prompt": "2+2", "env_class": "arithmetic"}, [], r"row uid 0: the row needs a ground truth"),
        ({"prompt": "2+2", "env_class": "arithmetics"}, [], r"row uid 0: .* did you mean arithmetic"),
        (
            {"prompt": "2+2", "env_class": "subprocess:Popen"},
            [],
            r"rows.jsonl, row uid 0: .*environment\.allowed_env_classes",
        ),
        (
            {"prompt": "2+2", "env_class": "mine.envs:Mine"},
            ["environment.allowed_env_classes=['mine.envs:Mine']"],
            r"allowed_env_classes: .*cannot import 'mine.envs'",
        ),
    ],
)
def test_the_first_rows_of_a_dataset_are_looked_at_and_more_where_rewards_compare(
    tmp_path: Path, row: dict[str, str], overrides: list[str], told: str | None
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text((json.dumps(row) + "\n") * TRIED + "no json")
    given = Config.from_toml(
        [QUICKSTART],
        [
            f'data.train_data=["{rows}"]',
            "data.val_data=[]",
            "trainer.eval_interval=0",
            "environment.env_class=",
            "trainer.train_batch_size=1",
            "trainer.policy_mini_batch_size=1",
            *overrides,
        ],
    )
    if told is None:
        check_files(given)
    else:
        with pytest.raises(DataError, match=told):
            check_files(given)


def test_data_of_an_evaluation_that_never_happens_is_not_looked_at(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "2+2"}))
    for path, told in (
        (rows, "data.val_data: .*no column `prompt`"),
        (tmp_path / "none.jsonl", "data.val_data: no file"),
    ):
        check_files(Config.from_toml([QUICKSTART], [f'data.val_data=["{path}"]', "trainer.eval_interval=0"]))
        with pytest.raises(DataError, match=told):
            check_files(Config.from_toml([QUICKSTART], [f'data.val_data=["{path}"]', "trainer.eval_interval=1"]))


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_data_that_end_before_the_last_step_are_told(tmp_path: Path, kind: str) -> None:
    file, rows = tmp_path / f"rows.{kind}", [{"prompt": "2+2"}] * 100
    if kind == "parquet":
        pytest.importorskip("pyarrow").parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist(rows), file)
    else:
        file.write_text(json.dumps(rows) if kind == "json" else "\n".join(map(json.dumps, rows)) + "\n\n")
    given = [
        f'data.train_data=["{file}"]',
        "data.val_data=[]",
        "trainer.eval_interval=0",
        "environment.env_class=format",
    ]
    given += ["trainer.train_batch_size=20", "trainer.policy_mini_batch_size=20", "trainer.epochs=2"]

    def warnings(*more: str) -> list[str]:
        return check_files(Config.from_toml([QUICKSTART], [*given, *more]))

    assert warnings("trainer.max_steps=10") == []
    (line,) = warnings("trainer.max_steps=11")
    assert "the data end at step 10: 100 prompts are 5 steps of 20, and trainer.epochs is 2; raise it to 3" in line
    (line,) = warnings("trainer.max_steps=10", "data.test_size=0.3", "trainer.eval_interval=1")
    assert "at step 6: 70 prompts are 3 steps" in line
    with pytest.raises(
        DataError, match=r"data.train_data: has 100 usable prompts, fewer than trainer.train_batch_size"
    ):
        warnings("trainer.train_batch_size=120", "trainer.policy_mini_batch_size=120")


def few_rows(folder: Path, mode: str, count: int) -> str:
    """Return the override of a training dataset of few rows, as the mode reads them."""
    answers = {"chosen": "cat", "rejected": "dog"} if mode != "sft" else {"response": "cat"}
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": "act", **answers}) + "\n" for _ in range(count)))
    return f"data.train_data=[{file}]"


@pytest.mark.parametrize("mode", ["sft", "dpo", "reward_model"])
def test_rows_of_datasets_fill_a_batch_as_prompts_do(tmp_path: Path, mode: str) -> None:
    given = [
        few_rows(tmp_path, mode, 20),
        "trainer.train_batch_size=32",
        "trainer.policy_mini_batch_size=32",
        "trainer.epochs=3",
    ]
    if mode == "sft":
        given += ["data.format=prompt_response", f"data.val_data=[{tmp_path}/rows.jsonl]"]

    def warnings(*more: str) -> list[str]:
        return check_files(Config.from_toml([CONFIGS / f"{mode}_tiny.toml"], [*given, *more]))

    with pytest.raises(
        DataError, match=r"data.train_data: has 20 usable prompts, fewer than trainer.train_batch_size = 32"
    ):
        warnings()
    assert warnings("data.drop_last=false") == [], "60 rows"
    (line,) = warnings("data.drop_last=false", "trainer.max_steps=2")
    assert "2 steps are asked for, and the data end at step 1" in line
    assert line.endswith("raise it to 4")
    assert warnings("data.drop_last=false", "trainer.max_steps=2", "trainer.epochs=4") == []
    with pytest.raises(DataError, match=r"trainer.epochs = 1 of them do not fill one batch .* raise trainer.epochs"):
        warnings("data.drop_last=false", "trainer.epochs=1")
    assert warnings("data.weights=[2.0]") == []
    aside = "data.val_data=[]", "data.weights=[2.0]", "trainer.eval_interval=1"
    with pytest.raises(DataError, match="has 30 usable prompts, fewer"):
        warnings(*aside, "data.test_size=5")
    with pytest.raises(DataError, match="test_size = 20 leaves none of the 20 prompts to train"):
        warnings(*aside, "data.test_size=20")


def test_kto_needs_another_prompt(tmp_path: Path) -> None:
    rows = [{"prompt": "sort: ab", "completion": "ab", "label": at % 2 == 0} for at in range(3)]
    own = [f"data.train_data=[{tmp_path / 'rows.jsonl'}]", "data.label_column=label"]

    def refused(rows: list[dict[str, Any]], loss: str) -> bool:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        problems, _ = look(Config.from_toml([CONFIGS / "kto_tiny.toml"], [*own, f"trainer.dpo.loss_type=[{loss}]"]))
        return "all rows of" in " ".join(problem.message for problem in problems)

    assert refused(rows, "kto")
    assert not refused(rows, "apo_zero_unpaired")
    other = {"prompt": "sort: ba", "completion": "ab", "label": True}
    assert not refused([*rows, other], "kto")
    (tmp_path / "others.jsonl").write_text(json.dumps(other) + "\n")
    own[0] = f"data.train_data=[{tmp_path / 'rows.jsonl'}, {tmp_path / 'others.jsonl'}]"
    assert not refused(rows, "kto"), "an epoch has the prompts of both"


def test_a_directory_without_adapters(tmp_path: Path) -> None:
    given = ["trainer.policy.model.lora.rank=8", f"trainer.policy.model.lora.adapter_path={tmp_path}"]
    with pytest.raises(
        DataError, match=r"adapter_path: .* is no directory of adapters \(it has no adapter_model.safetensors\)"
    ):
        check_files(Config.from_toml([QUICKSTART], given))


def test_teachers_are_looked_at(tmp_path: Path) -> None:
    distillation = CONFIGS / "distillation_tiny.toml"
    check_files(Config.from_toml([distillation], [f"trainer.distillation.source_models.sort_letters={MODEL}"]))
    wrong = [
        f"trainer.distillation.model_path={tmp_path}",
        "trainer.distillation.model_revision=v2",
        f"trainer.distillation.source_models={{ letters = '{MODEL}', sort_letters = '{tmp_path}/none' }}",
    ]
    with pytest.raises(DataError) as caught:
        check_files(Config.from_toml([distillation], wrong))
    for problem in (
        f"trainer.distillation.model_path: {tmp_path} is no model directory",
        f"trainer.distillation.model_revision: {tmp_path} is a directory here",
        f"trainer.distillation.source_models.sort_letters: {tmp_path}/none is no model directory",
        "trainer.distillation.source_models.letters: expected a data_source of rows of data.train_data: sort_letters",
    ):
        assert problem in str(caught.value)


def test_who_is_told_of_alerts(tmp_path: Path) -> None:
    low, file = "trainer.alerts.rules.low={kind='entropy_below', value=0.1}", tmp_path / "webhook"
    alerts = "trainer.alerts"
    with pytest.raises(DataError, match=f"{alerts}.webhook_file: no file {file} that can be read"):
        check_files(Config.from_toml([QUICKSTART], [low, f"{alerts}.webhook_file={file}"]))
    file.write_text("https://hooks.example")
    settings = [low, f"{alerts}.webhook_file={file}", f"{alerts}.command=['no-such-program', 'x']"]
    told = check_files(Config.from_toml([QUICKSTART], settings))
    assert [line for line in told if "alerts" in line] == [
        f"{alerts}.command: there is no program no-such-program on this machine"
    ]
    assert not any(
        "alerts" in line for line in check_files(Config.from_toml([QUICKSTART], [low, f"{alerts}.command=['true']"]))
    )


def test_files_of_agents_are_there(tmp_path: Path) -> None:
    agent, endpoint = "environment.skyrl_gym.agent", "generator.inference_engine.enable_http_endpoint=true"
    image, token = tmp_path / "agent.sif", tmp_path / "token"
    boxed = [f"{agent}.container.kind=apptainer", f"{agent}.container.image={image}"]
    served = [f"{agent}.service.url=http://127.0.0.1:9/play", f"{agent}.service.token_file={token}", endpoint]
    for path, setting, settings in (
        (image, "container.image: no image", boxed),
        (token, "service.token_file: no file", served),
    ):
        with pytest.raises(DataError, match=rf"{agent}\.{setting} {path}"):
            check_files(Config.from_toml([QUICKSTART], settings))
        path.write_text("x")
        check_files(Config.from_toml([QUICKSTART], settings))


def test_rows_that_name_another_environment_are_a_warning(tmp_path: Path) -> None:
    row = {"prompt": "sort: b", "env_class": "sort_letters", "reward_spec": {"ground_truth": "b"}}
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(row) + "\n")
    sizes = ["trainer.train_batch_size=1", "trainer.policy_mini_batch_size=1", "trainer.eval_interval=0"]
    given = [f'data.train_data=["{rows}"]', "data.val_data=[]", *sizes]
    told = [given, [*given, "environment.env_class=gsm8k"], [*given, "environment.env_class=sort_letters"]]
    warned = [["env_class" in line for line in check_files(Config.from_toml([QUICKSTART], one))] for one in told]
    assert [any(lines) for lines in warned] == [False, True, False]


def test_keys_are_not_sent_to_a_public_network_in_the_clear() -> None:
    service = "environment.skyrl_gym.agent.service.url"
    given = [f"generator.inference_engine.{one}" for one in ("http_endpoint_host=node", "enable_http_endpoint=true")]
    for url in ("https://8.8.8.8/play", "http://10.0.0.7/play", "http://no-such-host.invalid/play"):
        check_files(Config.from_toml([QUICKSTART], [*given, f"{service}={url}"]))
    with pytest.raises(DataError, match=rf"{service}: .* is 8\.8\.8\.8, no address of a private network"):
        check_files(Config.from_toml([QUICKSTART], [*given, f"{service}=http://8.8.8.8/play"]))


@pytest.mark.parametrize(
    ("name", "transformer", "overrides", "expected"),
    [
        ("WanPipeline", {"patch_size": [1, 2, 2]}, [], "is_video: .* makes videos; set it to true"),
        ("StableDiffusion3Pipeline", {"patch_size": 2}, ["is_video=true"], "is_video: .* makes pictures; set it to false"),
        ("StableDiffusion3Pipeline", {"patch_size": 2}, ["inference_size=[36, 32]"], "inference_size: expected multiples of 8"),
        ("WanPipeline", {"patch_size": [1, 2, 2]}, ["is_video=true", "train_frames=6"], "train_frames: .* multiple of 4, .*found 6"),
        ("KandinskyPipeline", {}, [], "model.path: .* is a KandinskyPipeline; the pipelines that can be trained are"),
    ],
)  # fmt: skip
def test_a_pipeline_makes_what_is_configured(
    name: str, transformer: dict[str, object], overrides: list[str], expected: str, tmp_path: Path
) -> None:
    entries = {
        "model_index.json": {"_class_name": name},
        "transformer/config.json": {"in_channels": 4, **transformer},
        "vae/config.json": {"_class_name": "AutoencoderKLWan", "block_out_channels": [8, 16, 16]},
    }
    for file, content in entries.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(json.dumps(content))
    settings = [f"trainer.policy.diffusers.{override}" for override in overrides]
    tiny = Config.from_toml([CONFIGS / "diffusion_tiny.toml"], [f"trainer.policy.model.path={tmp_path}", *settings])
    with pytest.raises(DataError, match=f"trainer.policy.{'' if name.startswith('Kand') else 'diffusers.'}{expected}"):
        check_files(tiny)


def test_statistics_of_a_robot_that_mean_something_else(tmp_path: Path) -> None:
    place = tmp_path / "model"
    shutil.copytree(CONFIGS / "reach_pi05" / "model", place)
    robot = Config.from_toml([CONFIGS / "reach_pi05.toml"], [f"trainer.policy.model.path={place}"])
    write_lerobot(place)
    check_files(robot)
    write_lerobot(place, mode="MEAN_STD")
    with pytest.raises(DataError, match=r"trainer\.policy\.model\.path: .*MEAN_STD: expected QUANTILES"):
        check_files(robot)
