"""The controller of a run: python jobs/controller.py RUN

consumes   the datasets, batches/ and samples/ of earlier attempts, control/stop.json
waits for  requests of the trainer and of the rollout workers (hpcrl/run/call.py)
produces   batches/s<step>.json, metrics/controller.jsonl, evals/*/summary.json, tensorboard/
ends       when the last step is trained and evaluated and every worker knows; under a stop request its agent ends it
"""

import asyncio
import os
import signal
import sys

from hpcrl.config import Config, most_replicas, order_seed, total_steps
from hpcrl.config.derive import needs_baselines, surplus_groups
from hpcrl.controller.api import Api, Guard, bind, serve
from hpcrl.controller.dynamic_sampling import DynamicSampling
from hpcrl.controller.roster import Floor
from hpcrl.controller.service import Schedule, Service
from hpcrl.data.chat import load_tokenizer, prompt_ids
from hpcrl.data.prompts import drop_long, load_prompts, set_aside
from hpcrl.envs.rewards.rows import needs
from hpcrl.errors import HpcrlError
from hpcrl.observe.tensorboard import Follower
from hpcrl.run.call import read_token
from hpcrl.run.layout import Run
from hpcrl.run.lease import RENEW_S, LeaseWriter
from hpcrl.run.pulse import Pulse
from hpcrl.types import Kind, Prompt


def main(path: str) -> None:
    run, attempt = Run.open(path), int(os.environ["HPCRL_ATTEMPT"])
    for number in (signal.SIGTERM, signal.SIGUSR2):  # the agent writes the stop file; workers are told before the end
        signal.signal(number, signal.SIG_IGN)
    pulse = Pulse(run, attempt, "controller")
    lease = LeaseWriter(run, "controller", attempt, pulse)
    lease.say("loading data")
    config = Config.from_toml([run.config])
    tokenizer = load_tokenizer(config.trainer.policy.model.path, config.generator.chat_template)

    def count_tokens(prompt: Prompt) -> int:
        lease.say("loading data")  # a large dataset takes its time; the others wait for as long as this is renewed
        return len(prompt_ids(tokenizer, prompt.messages, config.generator.chat_template_kwargs))

    def load(sources: list[str], kinds: tuple[Kind, ...]) -> list[Prompt]:
        columns = config.environment.env_class, config.data.prompt_column, config.data.response_column
        return load_prompts(sources, *columns, **needs(config.environment, kinds, config.generator.max_turns))

    def fit(prompts: list[Prompt], what: str) -> list[Prompt]:
        kept = drop_long(prompts, count_tokens, config.trainer.max_prompt_length)
        print(f"{len(kept)} of {len(prompts)} {what} prompts have at most max_prompt_length tokens", flush=True)
        return kept

    trainer, data = config.trainer, config.data
    train = load(data.train_data, ("train",) if data.test_size is None else ("train", "eval"))
    validation = load(data.val_data, ("eval",)) if trainer.eval_interval > 0 else []
    if data.test_size is not None:
        train, validation = set_aside(train, data.test_size)
    train, validation = fit(train, "training"), fit(validation, "evaluation") if trainer.eval_interval > 0 else []
    schedule = Schedule(
        batch_size=trainer.train_batch_size,
        n_samples=config.generator.n_samples_per_prompt,
        staleness=trainer.fully_async.max_staleness_steps,
        total_steps=total_steps(len(train), trainer),
        seed=trainer.seed,
        eval_interval=trainer.eval_interval,
        eval_before_train=trainer.eval_before_train,
        eval_n_samples=config.generator.eval_n_samples_per_prompt,
        order_seed=order_seed(data, trainer),
        groups_at_once=trainer.fully_async.num_parallel_generation_workers,
        eval_prompts_at_once=trainer.eval_batch_size,
        surplus=surplus_groups(trainer),
        sampling=DynamicSampling(
            trainer.algorithm.dynamic_sampling, trainer.algorithm.filter_reward_metric, trainer.seed
        ),
        baselines=needs_baselines(trainer.algorithm),
        floor=Floor(
            least=config.slurm.min_replicas,
            patience_s=60.0 * config.slurm.replica_patience_minutes,
            replicas=most_replicas(config),
            elastic=config.slurm.elastic.replicas > 0,
        ),
        max_failed_ratio=config.environment.max_failed_ratio,
    )
    pulse.beat("serve")
    api = Api(Service(run, attempt, schedule, train, validation), config.slurm.patience.save_seconds)
    asyncio.run(_serve(run, attempt, lease, api))


async def _serve(run: Run, attempt: int, lease: LeaseWriter, api: Api) -> None:
    listener = bind(os.environ["HPCRL_ADDRESS"])
    host, port = listener.getsockname()[:2]
    url = f"http://{host}:{port}"

    async def tell() -> None:
        while True:
            lease.say("serving", url=url, **await api.status({}))
            await asyncio.sleep(RENEW_S)

    telling = asyncio.create_task(tell())
    guarded = Guard(api.routes(), read_token(run), run.name, attempt)
    with Follower(run):
        await serve(guarded, listener, api.watch(run, attempt, lambda text: print(text, flush=True)))
    telling.cancel()
    lease.say("finished", url=url)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except HpcrlError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
