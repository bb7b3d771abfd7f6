"""The controller's service, built from a run's configuration: prompts or rows of datasets, the schedule, scores of models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

from hpcrl.config import Config
from hpcrl.config.resume_changes import evaluation_settings
from hpcrl.config.scorers import judges_of, scorer_number, scorer_numbers, scorer_sets
from hpcrl.config.sections.environment import REWARD_MODEL
from hpcrl.controller.dataset_rows import DatasetRows, Mixture
from hpcrl.controller.dynamic_sampling import DynamicSampling
from hpcrl.controller.replicas import MinReplicas
from hpcrl.controller.schedule import Schedule
from hpcrl.controller.score_queue import ScoreQueue
from hpcrl.controller.service import Service
from hpcrl.data.datasets import counted_prompts, load_by_dataset, load_dataset, row_reader
from hpcrl.data.endless import EndlessPrompts
from hpcrl.data.prompts import drop_long, set_aside
from hpcrl.data.sources import MadeSource, training_sources, validation_sources
from hpcrl.data.token_cache import TokenCache
from hpcrl.data.tokenize import AHEAD, Recipe, Tokenizer, tokenize_datasets, training_rows
from hpcrl.envs.rewards.judged import JudgedRewards
from hpcrl.rundir.layout import Run, token_cache
from hpcrl.rundir.ledger import require_newest
from hpcrl.rundir.process_names import scorer_name, worker_name
from hpcrl.runtime.process_status import StatusWriter
from hpcrl.types import Prompt


def build_service(run: Run, attempt: int, config: Config, status: StatusWriter) -> Service:
    """Load the datasets and return the service of this attempt, which goes on where earlier attempts ended.

    Args:
        status: renewed while datasets load, since other processes wait only as long as it changes.
    """
    rows = _load_rows(run, attempt, config, status) if config.trainer.offline else None
    train, validation, sizes = load_prompts(config, status)
    weights = config.data.weights if rows is None else []
    mixture = Mixture(tuple(sizes), tuple(weights), config.trainer.seed) if weights else None
    steps = config.trainer.total_steps(len(rows or mixture or train), config.data.drop_last)
    schedule = build_schedule(config, steps)
    return Service(run, attempt, schedule, train, validation, rows, _score_queue(config), mixture)


def build_schedule(config: Config, steps: int) -> Schedule:
    """Return the schedule of a run of `steps` steps."""
    trainer, generator, slurm = config.trainer, config.generator, config.slurm
    algorithm = trainer.algorithm
    return Schedule(
        batch_size=trainer.train_batch_size,
        n_samples=config.samples_per_prompt,
        staleness=trainer.fully_async.max_staleness_steps,
        total_steps=steps,
        seed=config.sampling_seed,
        eval_interval=trainer.eval_interval,
        eval_before_train=trainer.eval_before_train,
        eval_n_samples=generator.eval_n_samples_per_prompt,
        order_seed=config.order_seed,
        groups_at_once=trainer.fully_async.num_parallel_generation_workers,
        eval_prompts_at_once=trainer.eval_batch_size,
        surplus=trainer.surplus_groups,
        drop_last=config.data.drop_last,
        sampling=DynamicSampling(
            algorithm.dynamic_sampling,
            algorithm.filter_reward_metric,
            trainer.seed,
            later=[REWARD_MODEL] if config.scoring_reward_model else [],
            rewards=algorithm.gdpo.rewards,
        ),
        curriculum=config.data.curriculum,
        baselines=algorithm.needs_baselines,
        colocated=trainer.placement.colocate_all,
        lent=tuple(map(worker_name, config.lent_replicas)),
        engines_begin_with_model=config.engines_begin_with_model,
        min_replicas=MinReplicas(
            least=slurm.min_replicas if config.has_engines else 0,
            patience_s=60.0 * slurm.replica_patience_minutes,
            replicas=config.max_replicas - slurm.eval_replicas,
            elastic=slurm.elastic.replicas > 0,
            names=frozenset(map(worker_name, set(range(config.max_replicas)).difference(config.evaluators))),
        ),
        evaluators=frozenset(map(worker_name, config.evaluators)),
        eval_by_job=slurm.evaluation.when != "never",
        max_failed_ratio=config.environment.max_failed_ratio,
        eval_settings=evaluation_settings(config),
        success_reward=generator.success_reward,
    )


def _score_queue(config: Config) -> ScoreQueue:
    sets = scorer_sets(config)
    models = [scorer_number(config, number).name for number in range(sum(each.copies for each in sets))]
    judged = None
    if config.scoring_reward_model is not None:
        judged = JudgedRewards.of(config.environment, stopped_only=config.generator.zero_reward_on_non_stop)
    return ScoreQueue(models, partial(judges_of, sets), judged, list(_needed_scorers(config)))


def _needed_scorers(config: Config) -> Iterator[MinReplicas]:
    slurm, sets = config.slurm, scorer_sets(config)
    for each, own in zip(sets, scorer_numbers(sets), strict=True):
        yield MinReplicas(
            least=slurm.min_scorers,
            patience_s=60.0 * slurm.replica_patience_minutes,
            replicas=each.copies,
            elastic=each.pool.replicas > 0,
            what=f"{each.title}'s scorer",
            setting="slurm.min_scorers",
            names=frozenset(scorer_name(number) for numbers in own for number in numbers),
        )


def load_prompts(config: Config, status: StatusWriter) -> tuple[Sequence[Prompt], list[Prompt], list[int]]:
    """Return the prompts that a run trains, those that it evaluates, and how many it trains of each dataset.

    Args:
        config, status: as of `build_service`.
    """
    data, generator, evaluates = config.data, config.generator, config.trainer.eval_interval > 0
    sections, offline = (data, config.environment, generator.max_turns), config.trainer.offline
    kinds = ("train",) if data.test_size is None else ("train", "eval")
    reads = not offline and data.train_function is None
    datasets = [] if not reads else load_by_dataset(training_sources(data), kinds, *sections)
    train = [*chain.from_iterable(datasets)]
    prompts = validation_sources(data, data.val_prompts if offline else data.val_data)
    validation = load_dataset(prompts, ("eval",), *sections) if evaluates and prompts else []
    if offline and not validation:
        return [], [], []
    if data.test_size is not None and reads:
        train, validation = set_aside(train, data.test_size)
    count_tokens, most = counted_prompts(config)

    def count(prompt: Prompt) -> int:
        status.write("loading data")
        return count_tokens(prompt)

    def fitting(prompts: list[Prompt], what: str) -> list[Prompt]:
        kept = drop_long(prompts, count, most)
        if prompts:
            print(f"{len(kept)} of {len(prompts)} {what} prompts have at most max_prompt_length tokens", flush=True)
        return kept

    train, of = fitting(train, "training"), {one.uid: at for at, rows in enumerate(datasets) for one in rows}
    trained = Counter(of[prompt.uid] for prompt in train)
    validation = fitting(validation, "evaluation") if evaluates else []
    if data.train_function is not None:
        return _endless(config, lambda prompt: count_tokens(prompt) <= most), validation, []
    return train, validation, [trained[at] for at in range(len(datasets))]


def _endless(config: Config, fits: Callable[[Prompt], bool]) -> EndlessPrompts:
    """Return the prompts of data.train_function, of which the first one is made now, so that a mistake ends the run at once."""
    (source,) = training_sources(config.data)
    assert isinstance(source, MadeSource)
    made = replace(source, seed=config.prompt_seed)
    read = row_reader(made, ("train",), config.data, config.environment, config.generator.max_turns)
    prompts = EndlessPrompts(lambda number: read(made.row(number), number), fits)
    print(f"{made.location} makes training prompts, the first of {prompts[0].data_source}", flush=True)
    return prompts


def _load_rows(run: Run, attempt: int, config: Config, status: StatusWriter) -> DatasetRows:
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
