from __future__ import annotations

from hpcrl.config import Config
from jobs.controller import schedule


def test_samples_follow_the_seed_of_the_engines_and_prompts_that_of_the_run() -> None:
    required = {"data.train_data": ["t.parquet"], "trainer.policy.model.path": "m", "trainer.eval_interval": 0}
    config = Config.from_dict({**required, "trainer.seed": 7, "generator.inference_engine.seed": 5})
    found = schedule(config, 2048)
    assert (found.seed, found.order_seed) == (5, 7)
