"""The controller of a run: python jobs/controller.py RUN

consumes   the datasets (where their rows are trained: once, into dataset/), batches/, samples/ and evals/ of earlier attempts, control/stop.json
waits for  requests of the trainer and of the rollout workers (hpcrl/runtime/controller_client.py)
produces   batches/s<step>.json, metrics/controller.jsonl, timeline/, evals/*/summary.json, tensorboard/, alerts.jsonl, what trackers get
ends       when the last step is trained and evaluated and every worker knows; under a stop request its agent ends it
"""

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import partial

from hpcrl.config import Config, max_replicas, order_seed, sampling_seed, total_steps
from hpcrl.config.derive import (
    has_engines,
    is_offline,
    needs_baselines,
    samples_per_prompt,
    surplus_groups,
)
from hpcrl.config.resume_changes import evaluation_settings
from hpcrl.config.scorers import judges_of, scorer_number, scorer_numbers, scorer_sets, scoring_reward_model
from hpcrl.config.sections.environment import REWARD_MODEL
from hpcrl.controller.api import Api
from hpcrl.controller.dataset_rows import DatasetRows
from hpcrl.controller.dynamic_sampling import DynamicSampling
from hpcrl.controller.replicas import MinReplicas
from hpcrl.controller.schedule import Schedule
from hpcrl.controller.score_queue import ScoreQueue
from hpcrl.controller.service import Service
from hpcrl.data.datasets import counted_prompts, load_dataset
from hpcrl.data.prompts import drop_long, set_aside
from hpcrl.data.token_cache import TokenCache
from hpcrl.data.tokenize import AHEAD, Recipe, Tokenizer, tokenize_datasets, training_rows
from hpcrl.envs.rewards.judged import JudgedRewards
from hpcrl.errors import HpcrlError
from hpcrl.observe.alerts.watch import watcher
from hpcrl.observe.tensorboard.event_file import Follower
from hpcrl.observe.timeline import Timeline
from hpcrl.observe.trackers.base import senders, trackers_of
from hpcrl.rundir.layout import Run, token_cache
from hpcrl.rundir.ledger import require_newest
from hpcrl.runtime.followers import Followers
from hpcrl.runtime.heartbeat import Heartbeat
from hpcrl.runtime.http_server import Guard, Signed, bind, serve
from hpcrl.runtime.process_status import RENEW_S, SERVING, StatusWriter
from hpcrl.runtime.token import read_token
from hpcrl.types import Prompt


def main(path: str) -> None:
    run, attempt = Run.open(path), int(os.environ["HPCRL_ATTEMPT"])
    # the agent writes the stop file, so that workers learn of it before the end
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    heartbeat = Heartbeat(run, attempt, "controller")
    status = StatusWriter(run, "controller", attempt, heartbeat)
    status.write("loading data")
    config = Config.from_toml([run.config])
    rows = load_rows(run, attempt, config, status) if is_offline(config.trainer) else None
    train, validation = load(config, status)
    heartbeat.beat("serve")
    steps = total_steps(len(rows or train), config.trainer, config.data.drop_last)
    sets = scorer_sets(config)
    models = [scorer_number(config, number).name for number in range(sum(each.copies for each in sets))]
    scores = ScoreQueue(models, partial(judges_of, sets), judged_rewards(config), list(needed_scorers(config)))
    beside = {
        **senders(run, trackers_of(config.trainer.logger)),
        **watcher(run, attempt, config.trainer),
    }
    service = Service(run, attempt, schedule(config, steps), train, validation, rows, scores)
    gc.freeze()  # the prompts stay, and to look through them for garbage takes long
    with Followers(run, attempt, beside), closing(Timeline(run, "controller", attempt)) as timeline:
        api = Api(
            service, config.slurm.patience.save_seconds, timeline, colocated=config.trainer.placement.colocate_all
        )
        asyncio.run(answer(run, attempt, status, api))


def judged_rewards(config: Config) -> JudgedRewards | None:
    """Return what the scores of a reward model are worth that runs as a scorer; None: there is none."""
    if scoring_reward_model(config) is None:
        return None
    return JudgedRewards.of(config.environment, stopped_only=config.generator.zero_reward_on_non_stop)


def needed_scorers(config: Config) -> Iterator[MinReplicas]:
    """Yield for each scorer's model when there are too few copies of it."""
    slurm, sets = config.slurm, scorer_sets(config)
    for each, own in zip(sets, scorer_numbers(sets), strict=True):
        yield MinReplicas(
            least=slurm.min_scorers,
            patience_s=60.0 * slurm.replica_patience_minutes,
            replicas=each.copies,
            elastic=each.pool.replicas > 0,
            what=f"{each.title}'s scorer",
            setting="slurm.min_scorers",
            names=frozenset(f"scorer-{number}" for numbers in own for number in numbers),
        )


def load(config: Config, status: StatusWriter) -> tuple[list[Prompt], list[Prompt]]:
    """Return the prompts to train and those to evaluate, without those that are too long."""
    data, generator, evaluates = config.data, config.generator, config.trainer.eval_interval > 0
    sections, offline = (data, config.environment, generator.max_turns), is_offline(config.trainer)
    kinds = ("train",) if data.test_size is None else ("train", "eval")
    train = [] if offline else load_dataset(data.train_data, kinds, *sections)
    prompts = data.val_prompts if offline else data.val_data
    validation = load_dataset(prompts, ("eval",), *sections) if evaluates and prompts else []
    if offline and not validation:
        return [], []
    if data.test_size is not None and not offline:
        train, validation = set_aside(train, data.test_size)
    count_tokens, most = counted_prompts(config)

    def count(prompt: Prompt) -> int:
        status.write("loading data")  # renewed, because the others wait only as long as a large dataset makes progress
        return count_tokens(prompt)

    def fitting(prompts: list[Prompt], what: str) -> list[Prompt]:
        kept = drop_long(prompts, count, most)
        print(f"{len(kept)} of {len(prompts)} {what} prompts have at most max_prompt_length tokens", flush=True)
        return kept

    return fitting(train, "training"), fitting(validation, "evaluation") if evaluates else []


def load_rows(run: Run, attempt: int, config: Config, status: StatusWriter) -> DatasetRows:
    """Return the rows of datasets that the run trains, tokenized now where no earlier attempt has done it."""
    data = config.data
    tokenize_datasets(
        config,
        Tokenizer(
            run, attempt, Recipe.of(config), data.num_workers, data.prefetch_factor or AHEAD,
            fence=lambda: require_newest(run, attempt), progress=lambda: status.write("loading data"),
            cache=TokenCache(token_cache(run.root)) if data.cache else None,
        ),
    )  # fmt: skip
    return DatasetRows(run, training_rows(run, data), data.weights, config.trainer.seed)


def schedule(config: Config, steps: int) -> Schedule:
    trainer, generator, slurm = config.trainer, config.generator, config.slurm
    algorithm = trainer.algorithm
    return Schedule(
        batch_size=trainer.train_batch_size,
        n_samples=samples_per_prompt(config),
        staleness=trainer.fully_async.max_staleness_steps,
        total_steps=steps,
        seed=sampling_seed(generator.inference_engine, trainer),
        eval_interval=trainer.eval_interval,
        eval_before_train=trainer.eval_before_train,
        eval_n_samples=generator.eval_n_samples_per_prompt,
        order_seed=order_seed(config.data, trainer),
        groups_at_once=trainer.fully_async.num_parallel_generation_workers,
        eval_prompts_at_once=trainer.eval_batch_size,
        surplus=surplus_groups(trainer),
        drop_last=config.data.drop_last,
        sampling=DynamicSampling(
            algorithm.dynamic_sampling,
            algorithm.filter_reward_metric,
            trainer.seed,
            later=[REWARD_MODEL] if scoring_reward_model(config) else [],
            rewards=algorithm.gdpo.rewards,
        ),
        baselines=needs_baselines(algorithm),
        min_replicas=MinReplicas(
            least=slurm.min_replicas if has_engines(config) else 0,
            patience_s=60.0 * slurm.replica_patience_minutes,
            replicas=max_replicas(config),
            elastic=slurm.elastic.replicas > 0,
        ),
        max_failed_ratio=config.environment.max_failed_ratio,
        eval_settings=evaluation_settings(config),
    )


async def answer(run: Run, attempt: int, status: StatusWriter, api: Api) -> None:
    """Answer requests until the run has ended, and renew the process status meanwhile."""
    listener = bind(os.environ["HPCRL_ADDRESS"])
    host, port = listener.getsockname()[:2]
    url = f"http://{host}:{port}"

    async def renew() -> None:
        while True:
            status.write(SERVING, url=url, **await api.status({}))
            await asyncio.sleep(RENEW_S)

    renewing = asyncio.create_task(renew())
    with Follower(run):
        app = Guard(api.routes(), Signed(read_token(run), run.name, attempt))
        await serve(app, listener, api.watch(run, attempt, lambda text: print(text, flush=True)))
    renewing.cancel()
    status.write("finished", url=url)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except HpcrlError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
