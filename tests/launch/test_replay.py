"""With what a step was trained."""

from pathlib import Path

from hpcrl.launch.replay import config_of
from hpcrl.observe.metrics import MetricsWriter
from hpcrl.run.commit import write_text
from hpcrl.run.layout import Run
from hpcrl.run.ledger import open_attempt


def test_an_attempt_that_was_interrupted_before_it_trained_has_trained_nothing(tmp_path: Path) -> None:
    """Each attempt has other settings; the second says at step 4, where it began, how long its end took."""
    run = Run(tmp_path / "project" / "run")
    run.path.mkdir(parents=True)
    reports = [{"timing/step": 1.0}, {"resilience/signal_to_commit_seconds": 0.1}, {}]
    for number, metrics in enumerate(reports, start=1):
        assert open_attempt(run, f"{number}", ["node"]).number == number
        write_text(run.config_of(number), "")
        with MetricsWriter(run, "trainer", number, 0 if number == 1 else 4) as writer:
            writer.write(4, metrics)
    with MetricsWriter(run, "trainer", 3, 4) as writer:
        writer.write(5, {"timing/step": 1.0})
    assert config_of(run, 4) == run.config_of(1)
    assert config_of(run, 5) == run.config_of(3)
