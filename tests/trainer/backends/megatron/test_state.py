"""Either backend goes on from what the other one saved, whatever the layouts: nothing of the state changes, and the training is the same."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

pytest.importorskip("megatron.core")

from tests.trainer.backends.megatron.material import write_model
from tests.trainer.backends.megatron.seam import Seam, Told, Way, expect_same, megatron
from tests.trainer.saving.hostile import REFUSED, make_hostile
from tests.trainer.scenarios import laid_over

TP2, PP2, EP2 = ({f"{name}_model_parallel_size": 2} for name in ("tensor", "pipeline", "expert"))
VPP = PP2 | {"pipeline_schedule": "Interleaved1F1B", "pipeline_layers_per_stage": 1}
ETP1, CANONICAL = {"expert_tensor_parallel_size": 1}, {"lora_type": "canonical_lora"}
WHOLE = {"optimizer_config_kwargs": {"use_distributed_optimizer": False}}
OVERLAP = {"ddp_config": {"overlap_grad_reduce": True, "overlap_param_gather": True}}
BF16 = {"dtype": "bf16"}
rarely = pytest.mark.faults_slow

LORA: dict[str, Any] = {"policy": {"model": {"lora": {"rank": 4}}}}
CRITIC: dict[str, Any] = {
    "algorithm": {"advantage_estimator": "gae", "lambd": 0.8, "gamma": 0.9, "use_kl_loss": False, "value_clip": 0.01}
}
# small steps: a bit of bfloat16 that rounding moves is as much of one
MUON: dict[str, Any] = {"policy": {"optimizer_config": {"name": "Muon", "lr": 5e-5}}}
FROZEN: dict[str, Any] = {"policy": {"freeze_pattern": [r"layernorm|layers\.2\.", "embed_tokens"]}}
# the model, the section of the trainer, what is special about the way
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "policy": ("tied", {}, {}),
    "untied": ("untied", {}, {}),
    "experts": ("moe", {}, {}),
    "mixtral": ("mixtral", {}, {}),
    "shared": ("qwen2-moe", {}, {}),
    "critic": ("tied", CRITIC, {"critic": True}),
    "critic-adapters": ("tied", CRITIC | {"critic": {"model": {"lora": {"rank": 4}}}}, {"critic": True}),
    "adapters": ("untied", LORA, {}),
    "frozen": ("untied", FROZEN, {}),
    "muon": ("untied", MUON, {}),
    "muon-experts": ("moe", MUON, {}),
}
Engine = tuple[int, dict[str, Any] | None]
FSDP: dict[int, Engine] = {size: (size, None) for size in (1, 2, 4)}
# what is trained, who saves, who goes on
PAIRS: dict[str, tuple[str, Engine, Engine]] = {
    "tp2-to-fsdp": ("policy", (2, TP2), FSDP[2]),
    "fsdp-to-pp2": ("policy", FSDP[2], (2, PP2)),
    "dp2-to-fsdp": ("untied", (2, OVERLAP), FSDP[2]),
    "fsdp-to-ep2": ("experts", FSDP[2], (2, EP2)),
    "adapters-to-fsdp": ("adapters", (2, TP2 | CANONICAL), FSDP[2]),
    "muon-tp2-to-fsdp": ("muon", (2, TP2), FSDP[1]),
}
MORE: dict[str, tuple[str, Engine, Engine]] = {
    "one-to-tp2": ("policy", (1, {}), (2, TP2)),
    "one-to-vpp2": ("policy", (1, {}), (2, VPP)),
    "tp2-to-one": ("policy", (2, TP2), (1, {})),
    "pp2-to-one": ("policy", (2, PP2), (1, {})),
    "dp2-to-tp2-pp2": ("policy", (2, OVERLAP), (4, TP2 | PP2)),
    "whole-to-pp2": ("policy", (2, PP2 | WHOLE), (2, PP2)),
    "dp2-to-whole": ("policy", (2, {}), (2, WHOLE)),
    "vpp2-to-fsdp-1": ("untied", (2, VPP), FSDP[1]),
    "fsdp-4-to-tp2-pp2": ("untied", FSDP[4], (4, TP2 | PP2)),
    "fsdp-1-to-tp2-dp2": ("policy", FSDP[1], (4, TP2)),
    "ep2-to-fsdp": ("experts", (2, EP2), FSDP[1]),
    "ep2-to-tp2": ("experts", (2, EP2), (2, TP2)),
    "ep2-to-dp2": ("experts", (2, EP2 | WHOLE), (2, {})),
    "ep2-to-ep2-tp2": ("experts", (2, EP2), (4, EP2 | TP2 | ETP1)),
    "mixtral-to-ep2": ("mixtral", FSDP[2], (2, EP2)),
    "shared-to-fsdp": ("shared", (2, TP2 | ETP1), FSDP[2]),
    "critic-to-tp2": ("critic", FSDP[2], (2, TP2)),
    "critic-to-fsdp": ("critic", (2, PP2), FSDP[1]),
    "critic-adapters-to-tp2": ("critic-adapters", FSDP[1], (2, TP2 | CANONICAL)),
    "adapters-to-pp2": ("adapters", FSDP[2], (2, PP2 | CANONICAL)),
    "adapters-to-tp4": ("adapters", FSDP[1], (4, {"tensor_model_parallel_size": 4} | CANONICAL)),
    "frozen-to-fsdp": ("frozen", (2, PP2), FSDP[2]),
    "frozen-to-dp2": ("frozen", FSDP[1], (2, {})),
    "muon-fsdp-to-dp2": ("muon", FSDP[2], (2, OVERLAP)),
    "muon-pp2-to-tp2-dp2": ("muon", (2, PP2), (4, TP2)),
    "muon-dp2-to-one": ("muon", (2, {}), (1, {})),
    "muon-ep2-to-dp2": ("muon-experts", (2, EP2), (2, {})),
    "muon-fsdp-to-ep2": ("muon-experts", FSDP[1], (2, EP2)),
}


class Played:
    """Ways of all pairs: one trains a step and saves, the other loads, saves again and trains the next step."""

    def __init__(self, seam: Seam) -> None:
        self.seam = seam
        self._ways: dict[str, Way] = {}
        for model in ("mixtral", "qwen2-moe"):
            write_model(model, seam.folder / model)

    def go(self, pairs: dict[str, tuple[str, Engine, Engine]]) -> None:
        todo = list[tuple[str, str, Engine, list[Any]]]()
        for name, (kind, first, second) in pairs.items():
            again = [("restore", self.place(name)), ("save", self.place(f"{name}-again")), ("train", 2)]
            # of several ranks a copy, written when training has gone on
            save = [("snapshot", self.place(name)), ("train", 2), ("write", None)]
            save = save if first[0] > 1 else [("save", self.place(name))]
            todo += [(f"{name}-saved", kind, first, [("train", 1), *save]), (name, kind, second, again)]
        kinds = {kind for kind, _, _ in pairs.values()}
        todo += [(f"truth-{kind}", kind, FSDP[1], [("train", 1), ("train", 2)]) for kind in kinds]
        for saved in (True, False):
            for size in (1, 2, 4):
                ways = {
                    name: self._way(name, kind, engine, do)
                    for name, kind, engine, do in todo
                    if engine[0] == size and name.endswith("-saved") == saved and name not in self._ways
                }
                if ways:
                    self.seam.play(size, list(ways.values()))
                    self._ways |= ways

    def _way(self, name: str, kind: str, engine: Engine, do: list[Any]) -> Way:
        model, trainer, special = KINDS[kind]
        return self.seam.way(name, model, laid_over(options_of(engine), trainer), do, **special)

    def place(self, name: str) -> str:
        return str(self.seam.folder / f"of-{name}")

    def told(self, name: str) -> Told:
        return self.seam.told(self._ways[name])


def options_of(engine: Engine) -> dict[str, Any]:
    return {} if engine[1] is None else megatron(**engine[1])


def contents(path: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint, whole."""
    held: dict[str, Any] = FileSystemReader(path).read_metadata().state_dict_metadata
    found = {name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in held.items()}
    load(found, checkpoint_id=path)
    return found


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    seam = Seam(tmp_path_factory.mktemp("state"))
    played = Played(seam)
    played.go(PAIRS)
    yield played
    seam.close()


@pytest.fixture(scope="module")
def all_played(played: Played) -> Played:
    played.go(MORE)
    return played


@pytest.mark.parametrize("name", PAIRS)
def test_the_other_backend_goes_on(played: Played, name: str) -> None:
    expect_same_state(played, name, PAIRS[name][0])


@rarely
@pytest.mark.parametrize("name", MORE)
def test_every_layout_goes_on(all_played: Played, name: str) -> None:
    expect_same_state(all_played, name, MORE[name][0])


def expect_same_state(played: Played, name: str, kind: str) -> None:
    saved, again = contents(played.place(name)), contents(played.place(f"{name}-again"))
    assert saved.keys() == again.keys()
    weights = {key.removeprefix("model.") for key in saved if key.startswith("model.")}
    moved = {key for key in weights if f"optimizer.state.{key}.exp_avg" in saved}
    by_muon = {key for key in weights if f"optimizer.state.{key}.momentum_buffer" in saved}
    assert moved
    assert KINDS[kind][1] == FROZEN or moved | by_muon == weights
    assert bool(by_muon) == (KINDS[kind][1] == MUON)
    for key, value in saved.items():
        assert torch.equal(value, again[key]), key
    for key in moved:
        assert saved[f"optimizer.state.{key}.step"] == 2
        assert saved[f"optimizer.state.{key}.exp_avg_sq"].abs().max() > 0, key
    for key in by_muon:
        assert saved[f"optimizer.state.{key}.momentum_buffer"].abs().max() > 0, key
        assert f"optimizer.state.{key}.step" not in saved, key
    expect_same(played.told(name), played.told(f"truth-{kind}").from_step_2())


def test_a_checkpoint_has_adapters_only(played: Played) -> None:
    names = contents(played.place("adapters-to-fsdp")).keys()
    of_model = {name for name in names if name.startswith("model.")}
    assert len(of_model) == 4 * 7 * 2, "A and B of seven linear layers"
    assert "model.model.model.layers.3.mlp.down_proj.lora_A.default.weight" in of_model
    assert all(".lora_" in name for name in names if name != "updates")


def test_weights_of_bf16_are_saved_as_the_optimizer_has_them(played: Played) -> None:
    place = played.place("bf16")
    way = played.seam.way("bf16", "tied", megatron(**TP2, **BF16), [("train", 1), ("save", place)])
    on = played.seam.way("bf16-on", "tied", {}, [("restore", place), ("save", f"{place}-again")])
    back = played.seam.way("bf16-back", "tied", megatron(**BF16), [("restore", place), ("save", f"{place}-back")])
    played.seam.play(2, [way, on, back])
    saved, again, returned = contents(place), contents(f"{place}-again"), contents(f"{place}-back")
    name = "model.model.model.layers.0.mlp.down_proj.weight"
    assert saved[name].dtype == torch.float32
    assert not torch.equal(saved[name], saved[name].bfloat16().float())
    for key, value in saved.items():
        assert torch.equal(value, again[key]), key
        assert torch.equal(value, returned[key]), key
    kept = played.seam.told(back).tensors["weights.model.layers.0.mlp.down_proj.weight"]
    assert torch.equal(kept.bfloat16(), saved[name].bfloat16())


def test_shared_adapters_are_read_by_engines_that_share_them(played: Played) -> None:
    trainer, place = laid_over(megatron(**TP2), LORA), played.place("sharing")
    saving = played.seam.way("sharing", "untied", trainer, [("train", 1), ("save", place), ("train", 2)])
    ways = {
        "sharing-too": (laid_over(megatron(**PP2), LORA), [("restore", place), ("train", 2)]),
        "not-sharing": (LORA, [("restore", place)]),
        "reverse": (trainer, [("restore", played.place("adapters-to-fsdp"))]),
    }
    made = {name: played.seam.way(name, "untied", *way) for name, way in ways.items()}
    played.seam.play(2, [saving, *made.values()])
    expect_same(played.seam.told(made["sharing-too"]), played.seam.told(saving).from_step_2())
    for name in ("not-sharing", "reverse"):
        error = played.seam.told(made[name]).told["error"]
        assert "CommitError" in error
        assert "with lora_type=lora layers share adapters" in error


KEPT = {"optimizer_config": {"offload_after_step": False}}
AWAY: dict[str, tuple[str, dict[str, Any]]] = {
    "tp2": ("policy", megatron(**TP2)),
    "overlap": ("untied", megatron(**OVERLAP)),
    "bf16": ("untied", megatron(**BF16)),
    "bf16-whole": ("policy", megatron(**BF16, **PP2 | WHOLE)),
    "moments-stay": ("policy", laid_over(megatron(), {"policy": KEPT})),
    "experts": ("experts", megatron(**EP2)),
    "adapters": ("adapters", laid_over(megatron(**TP2), {"algorithm": {"reference_reset_interval": 9}})),
    "critic": ("critic", megatron(**TP2)),
    "muon": ("muon", megatron(**TP2)),
}


@pytest.mark.parametrize(
    "names",
    [
        ("tp2", "bf16-whole"),
        pytest.param(("overlap", "bf16", "moments-stay", "experts", "adapters", "critic", "muon"), marks=rarely),
    ],
    ids="+".join,
)
def test_a_state_that_has_left_its_device_is_saved_and_exported_from_host_memory(
    played: Played, names: tuple[str, ...]
) -> None:
    """As by a model that stays, to the bit; its reference follows it there, and training goes on alike."""
    places, ways = {}, dict[tuple[str, bool], Way]()
    for name in names:
        kind, trainer = AWAY[name]
        model, section, special = KINDS[kind]
        for away in (False, True):
            places[name, away] = [played.place(f"{name}-{way}-{away}") for way in ("saved", "copied")]
            saved, copied = places[name, away]
            follows = [] if kind == "critic" else [("reset_reference", False)]
            turn = [("keep", "while"), *follows, ("snapshot", copied), ("save", saved)]
            left, back = ([("leave", None)], [("come_back", None)]) if away else ([], [])
            do = [*left, *back, ("train", 1), *left, *turn, *back, ("train", 2), ("write", None), *left, *back]
            ways[name, away] = played.seam.way(f"{name}-{away}", model, laid_over(trainer, section), do, **special)
    played.seam.play(2, list(ways.values()))
    for name in names:
        away, still = (played.seam.told(ways[name, away]) for away in (True, False))
        assert away.told == still.told
        assert not still.told["error"]
        for own, other in ((away.tensors, still.tensors), (away.samples, still.samples)):
            assert own.keys() == other.keys()
            assert all(torch.equal(value, own[key]) or value.isnan().any() for key, value in other.items())
        for own, other in zip(places[name, True], places[name, False], strict=True):
            first, second = contents(own), contents(other)
            assert first.keys() == second.keys()
            assert all(torch.equal(value, second[key]) for key, value in first.items())


def test_what_an_earlier_version_wrote_is_refused(played: Played) -> None:
    old = Path(played.place("old"))
    old.mkdir()
    (old / "common.pt").touch()
    ways = [
        played.seam.way(f"old-{number}", "tied", trainer, [("restore", str(old))])
        for number, trainer in enumerate(({}, megatron()))
    ]
    played.seam.play(2, ways)
    for way in ways:
        assert "hpcrl checkpoint export" in played.seam.told(way).told["error"]


def test_a_strangers_checkpoint_runs_no_code(played: Played) -> None:
    place = Path(played.place("hostile"))
    shutil.copytree(played.place("tp2-to-fsdp"), place)
    marker = make_hostile(place)
    ways = [
        played.seam.way(f"hostile-{number}", "tied", trainer, [("restore", str(place))])
        for number, trainer in enumerate(({}, megatron(**TP2)))
    ]
    played.seam.play(2, ways)
    assert not marker.exists()
    for way in ways:
        error = played.seam.told(way).told["error"]
        assert "CommitError" in error
        assert re.search(REFUSED, error), error
