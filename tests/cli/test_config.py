"""`hpcrl config …`: what each command prints, and its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import tomli
import yaml
from omegaconf import OmegaConf

from hpcrl.cli.main import main
from hpcrl.config import Config
from hpcrl.config.fields import leaves, settings
from hpcrl.convert.correspondence import SOURCES, TRL
from hpcrl.docs.explain import explain
from hpcrl.errors import ConfigError, SubmitError
from tests.paths import CONFIGS

QUICKSTART = str(CONFIGS / "quickstart.toml")
Output = pytest.CaptureFixture[str]


@pytest.fixture
def run_root(tmp_path: Path) -> Path:
    """Two runs of one project, as a submission leaves their configurations."""
    for name, seed in (("one", 1), ("two", 2)):
        directory = tmp_path / "runs" / "project" / name
        directory.mkdir(parents=True)
        config = Config.from_toml([Path(QUICKSTART)], [f"trainer.seed={seed}"])
        (directory / "config.toml").write_text(config.to_toml())
    return tmp_path / "runs"


def test_help_is_quick_because_it_loads_no_configuration() -> None:
    code = "import sys; from hpcrl.cli.main import main\ntry: main(['config', '--help'])\nfinally: print('hpcrl.config' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "False"
    assert "convert" in done.stdout


def test_show_prints_what_loads_again(tmp_path: Path, capsys: Output) -> None:
    assert main(["config", "show", QUICKSTART, "trainer.seed=7"]) == 0
    text = capsys.readouterr().out
    path = tmp_path / "shown.toml"
    path.write_text(text)
    assert Config.from_toml([path]) == Config.from_toml([Path(QUICKSTART)], ["trainer.seed=7"])
    comments = dict(line[2:].split(" = ") for line in text.splitlines() if line.startswith("# ") and " = " in line)
    assert comments["generator.max_input_length"] == "16"
    assert comments["generator.eval_sampling_params.temperature"] == "0.0"
    assert comments["generator.eval_sampling_params.max_generate_length"] == "8"
    main(["config", "show", QUICKSTART, "trainer.algorithm.temperature=1.0"])
    assert "# trainer.algorithm.temperature" not in capsys.readouterr().out


@pytest.mark.parametrize("options", [[], ["--changed"]])
def test_show_prints_yaml_that_gives_the_same_configuration(options: list[str], capsys: Output) -> None:
    assert main(["config", "show", QUICKSTART, "trainer.seed=7", "--yaml", *options]) == 0
    text = capsys.readouterr().out
    expected = Config.from_toml([Path(QUICKSTART)], ["trainer.seed=7"])
    assert Config.from_dict_config(OmegaConf.create(text)) == expected
    assert Config.from_dict(yaml.safe_load(text)) == expected
    if not options:
        assert "  temperature: null\n" in text
        assert "# generator.max_input_length: 16\n" in text


def test_a_converted_script_in_yaml_says_the_same_as_in_toml(tmp_path: Path, capsys: Output) -> None:
    path = tmp_path / "run.sh"
    path.write_text("python -m skyrl_train.entrypoints.main_base trainer.epochs=4 trainer.log_path=/c +x.y=1\n")
    assert main(["config", "convert", str(path), "--yaml"]) == 1
    text = capsys.readouterr().out
    main(["config", "convert", str(path)])
    assert yaml.safe_load(text) == tomli.loads(capsys.readouterr().out)
    assert "unconverted:" in text
    assert "\n# dropped       trainer.log_path" in text


def test_toml_needs_no_yaml() -> None:
    code = f"import sys; from hpcrl.cli.main import main\nmain(['config', 'show', {QUICKSTART!r}])\nprint('yaml' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_show_changed_leaves_out_the_defaults(capsys: Output) -> None:
    assert main(["config", "show", QUICKSTART, "--changed", "trainer.seed=42", "trainer.epochs=2"]) == 0
    tree = tomli.loads(capsys.readouterr().out)
    assert tree["trainer"]["epochs"] == 2
    assert "seed" not in tree["trainer"]
    assert "slurm" not in tree


def test_show_and_diff_take_runs(run_root: Path, capsys: Output) -> None:
    assert main(["config", "show", "one", "trainer.epochs=3", "--root", str(run_root), "--changed"]) == 0
    trainer = tomli.loads(capsys.readouterr().out)["trainer"]
    assert (trainer["seed"], trainer["epochs"]) == (1, 3)
    assert main(["config", "diff", "project/one", "two", "--root", str(run_root)]) == 1
    assert capsys.readouterr().out == "trainer.seed: 1 -> 2\n"
    assert main(["config", "diff", str(run_root / "project" / "one"), QUICKSTART]) == 1
    assert capsys.readouterr().out == "trainer.seed: 1 -> 42\n"
    assert main(["config", "show", "three", "--root", str(run_root)]) == 5
    assert "no run 'three'" in capsys.readouterr().err


def test_diff_shows_settings_and_keys_of_tables(tmp_path: Path, capsys: Output) -> None:
    other = tmp_path / "other.toml"
    tables = '[slurm]\npartition = "main"\nsetup = ["a", "b"]\n[slurm.extra]\nnice = 1\n[data.image_processor_kwargs]\n"a.b" = true\n'
    other.write_text(Config.from_toml([Path(QUICKSTART)]).to_toml(only_changed=True) + tables)
    assert main(["config", "diff", QUICKSTART, QUICKSTART]) == 0
    assert capsys.readouterr().out == ""
    assert main(["config", "diff", QUICKSTART, str(other)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        'slurm.partition: unset -> "main"',
        'slurm.setup: [] -> ["a", "b"]',
        'data.image_processor_kwargs."a.b": unset -> true',
        "slurm.extra.nice: unset -> 1",
    ]


def test_validate_names_every_problem(capsys: Output) -> None:
    assert main(["config", "validate", QUICKSTART]) == 0
    assert capsys.readouterr().out == "ok\n"
    assert main(["config", "validate", QUICKSTART, "trainer.epoch=1", "slurm.time_minutes=long"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_schema_and_paths_are_for_programs(capsys: Output) -> None:
    assert main(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.validate(tomli.loads(Path(QUICKSTART).read_text()), schema)
    assert main(["config", "paths"]) == 0
    header, *lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert header == ["path", "type", "default", "state"]
    known = leaves(Config)
    assert [(line[0], line[3] == "works") for line in lines] == [
        (one.path, one.facts.unimplemented is None) for one in known
    ]
    assert ["trainer.train_batch_size", "a whole number", "1024", "works"] in lines


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "trainer.algorithm.eps_clip_high",
            ["a number, at least 0", "0.2", "train.train_policy.epsilon_high", "clipped"],
        ),
        ("trainer.policy.model.path", ["required", "not SkyRL's", "policy.model_name_or_path"]),
        ("trainer.resume_mode", ['"from_path"', '"latest"']),
        ("vla.vla_type", ["not implemented yet (Cosmos Policy, "]),
        ("slurm.extra.nice", ["slurm.extra", "sbatch"]),
        ("generator.sampling_params", ["temperature = 1.0", "Divides the logits"]),
        ("", ["trainer.*", "config_class = unset"]),
        ("train.train_policy.kl_beta", ["Cosmos-RL", "trainer.algorithm.kl_loss_coef"]),
        ("generator.num_inference_engines", ["SkyRL", "generator.inference_engine.num_engines"]),
        ("trainer.log_path", ["SkyRL", "not supported"]),
        ("policy.lora", ["a section of Cosmos-RL", "policy.lora.r: trainer.policy.model.lora.rank"]),
    ],
)
def test_explain(name: str, words: list[str], capsys: Output) -> None:
    assert main(["config", "explain", *([name] if name else [])]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert not [word for word in words if word not in text]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("trainer.epoch", "trainer.epochs"),
        ("trainer.algorithm.eps_clip", "trainer.algorithm.eps_clip_low"),
        ("train.train_policy.klbeta", "train.train_policy.kl_beta (Cosmos-RL)"),
        ("generator.num_inference_engine", "generator.num_inference_engines (SkyRL)"),
        ("kl", "? hpcrl config search kl lists "),
        ("qqqqq.wwwww", "expected one of config_class, python_path, data, trainer"),
    ],
)
def test_explain_of_what_is_not_there_names_the_nearest(name: str, near: str, capsys: Output) -> None:
    assert main(["config", "explain", name]) == 2
    assert near in capsys.readouterr().err


def test_explain_names_no_setting_of_hpcrl_as_one_of_skyrl(capsys: Output) -> None:
    assert main(["config", "explain", "trainer.algorithm.eps_clip_hihg"]) == 2
    assert capsys.readouterr().err.endswith("did you mean trainer.algorithm.eps_clip_high?\n")


def test_everything_can_be_explained() -> None:
    names = [setting.path for setting in settings(Config)] + [name for targets in SOURCES.values() for name in targets]
    for name in names:
        assert len(explain(name)) > len(name) + 10


SKYRL = "trainer:\n  epochs: 3\n  policy:\n    model:\n      path: org/model\ngenerator:\n  num_inference_engines: 2\n"
COSMOS = '[policy]\nmodel_name_or_path = "org/model"\n[train]\nepoch = 3\n[train.train_policy]\ntype = "grpo"\n'


def test_convert_overrides_prints_toml_and_report(tmp_path: Path, capsys: Output) -> None:
    assert main(["config", "convert", "trainer.epochs=3", "generator.num_inference_engines=2"]) == 0
    output = capsys.readouterr()
    tree = tomli.loads(output.out)
    assert (tree["trainer"]["epochs"], tree["generator"]["inference_engine"]["num_engines"]) == (3, 2)
    assert "generator.num_inference_engines" not in output.err
    assert output.err.splitlines()[-1] == "6 mapped, 3 translated, 2 differs"
    main(["config", "convert", "--all", "trainer.epochs=3", "generator.num_inference_engines=2"])
    assert "generator.num_inference_engines -> generator.inference_engine.num_engines\n" in capsys.readouterr().err
    converted = tmp_path / "converted.toml"
    converted.write_text(output.out)
    assert main(["config", "validate", str(converted)]) == 0


@pytest.mark.parametrize(
    ("name", "text", "epochs"),
    [
        ("a.yaml", SKYRL, 3),
        ("a.yml", SKYRL, 3),
        ("a.toml", COSMOS, 3),
        ("a.sh", "python -m skyrl_train.entrypoints.main_base \\\n  trainer.epochs=4\n", 4),
    ],
)
def test_convert_tells_files_by_their_suffix(name: str, text: str, epochs: int, tmp_path: Path, capsys: Output) -> None:
    path, output = tmp_path / name, tmp_path / "out.toml"
    path.write_text(text)
    code = main(["config", "convert", str(path), "-o", str(output)])
    printed = capsys.readouterr()
    assert printed.out == ""
    assert tomli.loads(output.read_text())["trainer"]["epochs"] == epochs
    assert code == int(
        any(line.split()[0] in ("unimplemented", "unknown", "conflict") for line in printed.err.splitlines())
    )
    assert main(["config", "convert", str(path), "-o", str(output)]) == 2
    assert "exists" in capsys.readouterr().err


def test_what_is_unimplemented_or_is_unknown_makes_the_conversion_incomplete(tmp_path: Path, capsys: Output) -> None:
    path = tmp_path / "skyrl.txt"
    path.write_text(SKYRL + "vla: 1\n")
    assert main(["config", "convert", str(path)]) == 2
    assert "--from" in capsys.readouterr().err
    assert main(["config", "convert", str(path), "--from", "skyrl"]) == 1
    assert "unknown" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["missing.yaml"], ["a.yaml", "b.yaml"], ["--from", "cosmos", "missing.toml"]])
def test_convert_refuses_what_is_no_file(words: list[str], capsys: Output) -> None:
    assert main(["config", "convert", *words]) == 2
    assert capsys.readouterr().err.startswith("hpcrl: ")


def test_texts_that_an_override_leaves_empty_are_said(capsys: Output) -> None:
    assert (
        main(["config", "validate", QUICKSTART, "trainer.run_name=", "slurm.extra.nice=", "trainer.project_name=a"])
        == 0
    )
    assert capsys.readouterr().err == (
        "hpcrl: trainer.run_name= has no value and goes back to its default, unset\n"
        "hpcrl: slurm.extra.nice= has no value and is left out\n"
    )
    assert main(["config", "validate", QUICKSTART, "trainer.epochs="]) != 0
    (line,) = [one for one in capsys.readouterr().err.splitlines() if "trainer.epochs" in one]
    assert "expected a whole number, found nothing" in line


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_that_lacks_a_character_gets_its_number(encoding: str, tmp_path: Path) -> None:
    """Of names and texts in whatever a command prints."""
    file = tmp_path / "größe-日本.toml"
    file.write_text("[trainer]\ngroup_name = '日本'\n", encoding="utf-8")
    command = [sys.executable, "-m", "hpcrl.cli.main", "config", "show", QUICKSTART, str(file)]
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    done = subprocess.run(command, capture_output=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert b"\\u65e5\\u672c" in done.stdout


def test_a_root_that_slurm_would_take_for_a_pattern_is_refused(tmp_path: Path, capsys: Output) -> None:
    assert main(["submit", QUICKSTART, f"slurm.root={tmp_path}/run%j", "--dry-run"]) == SubmitError.exit_code
    assert f"slurm.root: {tmp_path}/run%j/quickstart has a %" in capsys.readouterr().err


def test_settings_behind_further_files_of_an_evaluation(tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "more.toml").write_text("[trainer]\nseed = 1\n")
    words = [
        "eval",
        str(CONFIGS / "quickstart" / "model"),
        "--data",
        "rows.parquet",
        "--config",
        str(tmp_path / "more.toml"),
    ]
    assert main([*words, "trainer.sead=2"]) == ConfigError.exit_code
    assert "trainer.sead: unknown setting; did you mean trainer.seed" in capsys.readouterr().err


def test_a_home_that_the_shell_has_left_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.toml").write_text("trainer.group_name = 'mine'\n")
    assert main(["config", "show", "--root=~/runs", QUICKSTART, "~/mine.toml"]) == 0
    assert 'group_name = "mine"' in capsys.readouterr().out
    assert main(["status", "--root=~/runs"]) == 0
    assert capsys.readouterr().out == f"no runs under {tmp_path}/runs\n"


@pytest.mark.parametrize("command", [("config", "validate"), ("submit", "--local", "--dry-run", "--seeds", "1,2")])
@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "generator.num_inference_engines=2",
            "unknown setting, but one of SkyRL; did you mean generator.inference_engine.num_engines?",
        ),
        ("trainer.log_path=/tmp", "unknown setting, but one of SkyRL, which is not supported: "),
        (
            "generator.gpu_memory_utilization=",
            "unknown setting, but one of SkyRL; did you mean generator.inference_engine.gpu_",
        ),
        ("trainer.epoch=2", "unknown setting; did you mean trainer.epochs?"),
    ],
)
def test_unknown_settings_that_another_framework_has_are_explained(
    capsys: Output, command: tuple[str, ...], override: str, expected: str
) -> None:
    assert main([*command, QUICKSTART, override]) == ConfigError.exit_code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"hpcrl: override: {override.partition('=')[0]}: {expected}")


@pytest.mark.parametrize("command", [("config", "validate"), ("submit", "--local", "--dry-run")])
@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "a.toml",
            "[train]\nepoch = 1\n[policy]\nmodel_name_or_path = 'm'\n",
            "{file}: this is a file of Cosmos-RL; hpcrl config convert {file} ",
        ),
        ("a.yaml", "# of SkyRL\ntrainer:\n  epochs: 1\n", "{file}:2: looks like YAML; a run reads TOML; "),
        ("a.sh", "#!/bin/bash\nset -x\n", "{file}:2: looks like a shell script; a run reads TOML; "),
    ],
)
def test_a_file_of_another_framework_is_recognized(
    command: tuple[str, ...], name: str, text: str, expected: str, tmp_path: Path, capsys: Output
) -> None:
    file = tmp_path / name
    file.write_text(text)
    assert main([*command, str(file)]) == ConfigError.exit_code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hpcrl: " + expected.format(file=file))
    assert "hpcrl config convert" in line


def test_convert_recognizes_a_file_of_hpcrl_and_one_that_is_not_utf8(tmp_path: Path, capsys: Output) -> None:
    assert main(["config", "convert", QUICKSTART]) == ConfigError.exit_code
    assert "this is a file of hpcrl already" in capsys.readouterr().err
    for name in ("a.toml", "a.yaml", "a.sh"):
        (tmp_path / name).write_bytes("# \n# µ".encode("latin-1"))
        assert main(["config", "convert", str(tmp_path / name)]) == ConfigError.exit_code
        expected = f"hpcrl: {tmp_path / name}:2: not UTF-8 text: byte 5; saved as Latin-1? Save it as UTF-8\n"
        assert capsys.readouterr().err == expected
    (tmp_path / "a.toml").write_text("[train]\nepoch = 1\n[train]\n")
    assert main(["config", "convert", str(tmp_path / "a.toml")]) == ConfigError.exit_code
    assert (
        capsys.readouterr().err == f"hpcrl: {tmp_path}/a.toml:3: [train] stands in line 1 already; put both together\n"
    )


def test_validate_prints_json_for_programs(tmp_path: Path, capsys: Output) -> None:
    assert main(["config", "validate", "--json", QUICKSTART]) == 0
    assert json.loads(capsys.readouterr().out) == {"valid": True, "problems": []}
    file = tmp_path / "a.toml"
    file.write_text("[trainer]\nepochs = 'two'\nckpt_path = '/tmp'\n")
    assert main(["config", "validate", "--json", QUICKSTART, str(file), "trainer.epoch=1"]) == ConfigError.exit_code
    found = json.loads(capsys.readouterr().out)
    assert found["valid"] is False
    problems = {one["path"]: one for one in found["problems"]}
    assert problems["trainer.epochs"] == {
        "source": str(file), "line": 2, "path": "trainer.epochs", "message": 'expected a whole number, found "two" (text)',
    }  # fmt: skip
    assert problems["trainer.ckpt_path"]["message"].startswith("unknown setting, but one of SkyRL")
    assert problems["trainer.epoch"]["source"] == "override"
    assert problems["trainer.epoch"]["line"] is None
    file.write_text("[trainer]\nepochs = = 1\n")
    assert main(["config", "validate", "--json", str(file)]) == ConfigError.exit_code
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert (problem["source"], problem["line"], problem["path"]) == (str(file), 2, None)


def test_a_setting_written_as_an_option_or_without_value_gets_the_remedy(capsys: Output) -> None:
    with pytest.raises(SystemExit):
        main(["config", "validate", QUICKSTART, "--trainer.epochs=3"])
    assert "settings have no dashes: trainer.epochs=3" in capsys.readouterr().err
    assert main(["config", "validate", QUICKSTART, "trainer.epochs"]) == ConfigError.exit_code
    assert capsys.readouterr().err == "hpcrl: trainer.epochs: no such file; to set it, write trainer.epochs=VALUE\n"


def test_names_of_trl_lead_to_settings(capsys: pytest.CaptureFixture[str]) -> None:
    known = {setting.path for setting in leaves(Config)}
    assert {name: path for name, path in TRL.items() if path not in known} == {}
    assert main(["config", "validate", QUICKSTART, "trainer.policy.optimizer_config.learning_rate=1"]) == 2
    expected = "learning_rate is a setting of TRL or transformers; did you mean trainer.policy.optimizer_config.lr?\n"
    assert capsys.readouterr().err.endswith(expected)
    assert main(["config", "explain", "beta"]) == 0
    assert "beta is a field of TRL; here: trainer.algorithm.kl_loss_coef" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("num_generations", "generator.n_samples_per_prompt = 5  (TRL: num_generations)"),
        ("ppo_mini_batch_size", "trainer.policy_mini_batch_size = 256"),
        ("epsilon_high", "trainer.algorithm.eps_clip_high = 0.2"),
    ],
)
def test_settings_are_found_by_words(words: str, first: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "search", *words.split()]) == 0
    assert capsys.readouterr().out.startswith(first)


def test_a_word_that_no_setting_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "search", "frobnicate"]) == 2
    assert "no setting has frobnicate" in capsys.readouterr().err
