"""One element of a run's evaluation job: python jobs/evaluation.py RUN ELEMENT

consumes   the validation sets, the initial model, weights/v<k> of the versions that wait, and rows that an earlier start has finished
waits for  its own engine; serves sandboxes, where config.toml asks for some
produces   evals/v<k>/<replica>.jsonl, .rows, job.json and summary.json, metrics/evaluation-<element>.jsonl
ends       with 0 when no version waits for this element, or on SIGTERM; with the exit code of hpcrl/errors.py otherwise. The engine
           never outlives it
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

from hpcrl.config import Config
from hpcrl.config.resume_changes import evaluation_settings
from hpcrl.controller.evaluation import evaluation_work, finished_rows
from hpcrl.data.cache_files import EvalRow, append_rows
from hpcrl.errors import CommitError, EngineError, HpcrlError
from hpcrl.launch.agent.environment import raise_open_files
from hpcrl.observe.conclude import conclude_generated
from hpcrl.rollout.engines.launch import launched
from hpcrl.rundir.attempt_config import attempt_config
from hpcrl.rundir.commit import verify
from hpcrl.rundir.evaluations import attempt_of_evaluation, generated_at, note_generated, versions_of_element
from hpcrl.rundir.layout import Run
from hpcrl.rundir.process_names import evaluation_name
from hpcrl.rundir.records import append_text
from hpcrl.runtime.process_status import StatusWriter, ending_told
from hpcrl.runtime.scratch import weight_copy_dir
from hpcrl.runtime.signals import die_with_parent
from hpcrl.sandboxes.local import configured_sandboxes
from hpcrl.types import GroupMeta, Prompt

if TYPE_CHECKING:
    from hpcrl.envs.tools.sandboxes import Sandboxes
    from hpcrl.rollout.engines.base import Engine, Launched
    from hpcrl.rollout.family import LoadedGenerator
    from hpcrl.rollout.generate import Generator
    from hpcrl.rollout.group import Group
    from hpcrl.rollout.weights.copies import NodeCopies


def main(path: str, element: int) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    raise_open_files()
    run, attempt, name = Run.open(path), int(os.environ["HPCRL_ATTEMPT"]), evaluation_name(element)
    config, status = attempt_config(run, attempt), StatusWriter(run, name, attempt)
    status.write("starting engine")
    with ExitStack() as stack:
        stack.enter_context(ending_told(status))
        replica, log = config.lent_replicas.stop + element, run.log(attempt, f"engine-{name}")
        sandboxes = stack.enter_context(configured_sandboxes(config.slurm.sandboxes, run.root))
        engine = stack.enter_context(launched(run, config, log, replica, attempt=attempt))
        # torch and transformers take seconds to import, while the engine starts
        from hpcrl.controller.build import load_prompts
        from hpcrl.rollout.family import load_generator
        from hpcrl.rollout.weights.copies import NodeCopies

        parent = weight_copy_dir(config.generator.inference_engine)
        copies = stack.enter_context(closing(NodeCopies(parent, run, attempt))) if parent else None
        _, prompts, _ = load_prompts(config, status)
        loaded = load_generator(run, config, config.trainer.multi_modal_log_interval)
        start_s = config.generator.inference_engine.start_timeout_seconds
        engine.wait_ready(start_s, lambda: status.write("starting engine"))
        waiting = WaitingVersions(run, config, element, replica, prompts, loaded, copies, sandboxes, status)
        asyncio.run(waiting.evaluate(engine))


class WaitingVersions:
    """Evaluates the versions that wait for one element, the oldest first, with one engine.

    Args:
        replica: number under which samples and rows are written.
        prompts: of the validation sets.
        copies: of weights on this node; None: the engine reads them in the run directory.
        sandboxes: of this node; None: the run has none.
    """

    def __init__(
        self,
        run: Run,
        config: Config,
        element: int,
        replica: int,
        prompts: list[Prompt],
        loaded: LoadedGenerator,
        copies: NodeCopies | None,
        sandboxes: Sandboxes | None,
        status: StatusWriter,
    ) -> None:
        self._run, self._config, self._element, self._replica = run, config, element, replica
        self._prompts, self._loaded, self._copies, self._status = prompts, loaded, copies, status
        self._sandboxes = sandboxes
        self._settings, self._tried = evaluation_settings(config), dict[int, int]()

    async def evaluate(self, launched: Launched) -> None:
        """Evaluate with a ready engine until no version waits.

        Raises:
            EngineError: the engine died, hangs, or refused weights or a request.
            HpcrlError: an environment failed.
        """
        from hpcrl.rollout.engines.watchdog import run_watched

        settings = self._config.generator.inference_engine
        engine = launched.connect(replica=evaluation_name(self._element))

        async def all_versions() -> None:
            async with self._loaded.maker(sandboxes=self._sandboxes)(engine) as groups:
                while found := self._next(engine):
                    await self._evaluate(engine, groups, *found)

        try:
            stall_s, load_s = settings.stall_timeout_seconds, settings.start_timeout_seconds
            await run_watched(launched, engine, [all_versions()], stall_s, load_s)
        finally:
            await engine.close()

    def _next(self, engine: Engine) -> tuple[int, int] | None:
        """Return the next version and the attempt that it belongs to; None: this engine can have no more.

        A version that a later attempt trained again needs an engine that has not loaded the earlier one: vLLM keeps adapters by number.
        """
        elements, interval = self._config.slurm.evaluation.engines, self._config.trainer.eval_interval
        for version in versions_of_element(self._run, self._element, elements, interval):
            attempt = attempt_of_evaluation(self._run, version)
            left = version == 0 and engine.version > 0 and self._config.engines_begin_with_model
            if attempt is None or left or generated_at(self._run, version) is not None:
                continue
            if version in self._tried:
                return None
            self._tried[version] = attempt
            return version, attempt
        return None

    async def _evaluate(self, engine: Engine, groups: Generator, version: int, attempt: int) -> None:
        from hpcrl.rollout.evaluate import generate_rows

        generator = self._config.generator
        try:
            weights = await self._load(engine, version)
        except CommitError as error:
            self._pass_over(version, attempt, error)
            return
        except EngineError:
            try:
                verify(self._run.weights_of(version))
            except CommitError as error:
                self._pass_over(version, attempt, error)
            raise
        n, seed = generator.eval_n_samples_per_prompt, self._config.sampling_seed
        work = evaluation_work(self._prompts, version, n, seed, None, self._settings)
        finished = finished_rows(self._run, version, work)

        async def note(group: Group) -> GroupMeta:
            meta = finished[group.work.group_id] = await self._write(version, group, weights)
            self._status.write(f"evaluating v{version}: {len(finished)} of {len(work)} prompts", version=version)
            return meta

        left = [item for item in work if item.group_id not in finished]
        await generate_rows(groups, left, generator, note)
        asked = {item.group_id: item.asked for item in work}
        rows = [EvalRow(meta, asked[name], weights) for name, meta in finished.items() if meta.failures]
        append_rows(self._run.eval_rows(version, self._replica), rows)
        note_generated(self._run, version, attempt)
        for done in conclude_generated(self._run, evaluation_name(self._element), generator.success_reward):
            print(f"version {done} is evaluated", flush=True)

    def _pass_over(self, version: int, attempt: int, error: CommitError) -> None:
        print(f"version {version} is not evaluated: {error}", flush=True)
        note_generated(self._run, version, attempt, damaged=True)

    async def _load(self, engine: Engine, version: int) -> str:
        """Load a version unless it is the model that the engine was started with; return its digest, as of `EvalRow`."""
        from hpcrl.rollout.weights.fetch import fetch
        from hpcrl.runtime.threads import in_thread

        if version == 0 and self._config.engines_begin_with_model:
            return ""
        settings = self._config.generator.inference_engine
        self._status.write(f"loading v{version}")
        weights = await in_thread(fetch, self._run.weights_of(version), self._copies)
        await engine.update_weights(weights)
        if self._copies:
            self._copies.release()
        await engine.probe(weights, settings.quantization or settings.model_dtype, settings.probe_tolerance)
        return weights.digest

    async def _write(self, version: int, group: Group, weights: str) -> GroupMeta:
        """Write the samples of a finished group, and then that it is finished; a failed one is evaluated again by the next start."""
        from hpcrl.rollout.evaluate import evaluated_text
        from hpcrl.runtime.threads import in_thread

        dump = self._run.eval_dump(version, self._replica)
        meta = group.meta(self._replica, str(dump.relative_to(self._run.path)))
        if self._config.trainer.dump_eval_results:
            await in_thread(append_text, dump, evaluated_text([group], self._loaded.decode))
        if not group.failures:
            rows = [EvalRow(meta, group.work.asked, weights)]
            await in_thread(append_rows, self._run.eval_rows(version, self._replica), rows)
        return meta


if __name__ == "__main__":
    die_with_parent()
    try:
        main(sys.argv[1], int(sys.argv[2]))
    except HpcrlError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
