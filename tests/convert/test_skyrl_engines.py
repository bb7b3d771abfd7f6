"""Engines of SkyRL: of several GPUs, and those that somebody else started."""

import pytest

from tests.convert.skyrl_material import ENGINE, command


@pytest.mark.parametrize(
    "words",
    [
        ("generator.run_engines_locally=false", "generator.remote_inference_engine_urls=['a:1', 'b:1']"),
        (ENGINE + "external_server_urls=['http://a:1', 'http://b:1']",),
    ],
)
def test_engines_of_others_are_named(words: tuple[str, ...]) -> None:
    conversion = command(*words)
    assert conversion.values[ENGINE + "remote_urls"] == ["http://a:1", "http://b:1"]
    assert conversion.values[ENGINE + "num_engines"] == 2
    assert conversion.values["trainer.placement.colocate_all"] is False
    assert "start each with `hpcrl engine`" in str(conversion.entries[0])
    assert not conversion.incomplete


def test_engines_of_several_gpus_have_room_on_a_node() -> None:
    sizes = [f"{ENGINE}{kind}_parallel_size=2" for kind in ("tensor", "pipeline", "data")]
    assert command(*sizes).values["slurm.gpus_per_node"] == 8
