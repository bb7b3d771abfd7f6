"""Rollout replicas and scorers that die, hang, come late or lie (scenarios 22 to 24, 37, 45 to 50, 53 and 55), and how the real vLLM starts, dies and takes its processes along."""

from __future__ import annotations

from pathlib import Path
from signal import SIGKILL, SIGSTOP

import pytest

from hpcrl.data.batch_file import read_batch
from hpcrl.data.cache_files import read_turns, turn_files
from hpcrl.data.rollouts import evaluated_samples
from hpcrl.data.score_file import read_rewards
from hpcrl.rundir.commit import read_json
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import read_attempts
from hpcrl.runtime.process_status import read_process_status, read_process_statuses
from tests.faults.history import assert_ended, assert_nothing_lost, last_saved
from tests.faults.scenario import BATCH, SAMPLES, START_S, STEPS, Scenario, fault, in_first_attempt, write_rows
from tests.faults.test_preemption import saved_when_told
from tests.jobs.small_run import curve, pid_of, trained_groups
from tests.paths import CONFIGS
from tests.processes import command_of, processes_of, send, variable
from tests.reward_service.material import write_reward_model

OWN = Path(__file__).with_name("own")
TWO = {"generator.inference_engine.num_engines": 2}


@pytest.mark.nodes(3)
@pytest.mark.faults_slow
def test_22_node_of_a_replica_goes_down(scenario: Scenario) -> None:
    """Training goes on with the other replica, in the same attempt: --no-kill."""
    run = scenario.submit({**TWO, "trainer.max_steps": 30})
    scenario.knobs(latency_s=1.0)
    scenario.reach(run, 3)
    lost = read_attempts(run)[0].hosts[-1]
    scenario.cluster.stop(lost)
    try:
        scenario.reach(run, 8)
        scenario.knobs()
        assert_nothing_lost(scenario, run, steps=30)
    finally:
        scenario.cluster.start(lost)
    assert len(read_attempts(run)) == 1


@pytest.mark.faults_slow
@pytest.mark.parametrize("victim", ["engine", "worker"])
def test_23_engine_ends(scenario: Scenario, victim: str) -> None:
    """The only replica dies: it is started again within the attempt, and its groups are generated anew."""
    run = scenario.submit()
    scenario.reach(run, 3)
    send([scenario.engine(run) if victim == "engine" else scenario.worker(run)], SIGKILL)
    assert_nothing_lost(scenario, run)
    assert len(read_attempts(run)) == 1


@pytest.mark.faults_slow
@pytest.mark.parametrize("victim", ["worker", "engine", "rank", "job"])
def test_41_in_the_middle_of_long_conversations(scenario: Scenario, victim: str) -> None:
    """What had ended of them is not generated again: neither by the worker that is started again, nor in the next attempt."""
    talks = {
        "environment.env_class": "talks:Talks",
        "python_path": [str(OWN)],
        "generator.max_turns": 5,
        "generator.max_input_length": 200,
    }
    scenario.knobs(latency_s=2.5)
    run = scenario.submit({**talks, "trainer.max_steps": 2, "trainer.eval_interval": 0})
    scenario.wait(lambda: _tokens_left(run) > 60, "turns that have ended", 60, run)
    victims = {"worker": scenario.worker, "engine": scenario.engine, "rank": scenario.rank}
    if victim == "job":
        scenario.slurm("scontrol", "requeue", scenario.job_of(run))
    else:
        send([victims[victim](run)], SIGKILL)
    left = _tokens_left(run)
    scenario.wait(lambda: trained_groups(run), "the first batch", 2 * START_S, run)
    scenario.knobs()
    assert_nothing_lost(scenario, run, steps=2, same_values=False)
    kept = curve(run, "generate/tokens_kept/rollout-0")
    print(f"{victim}: {left} tokens were left, {kept} of them kept")
    assert sum(kept.values()) >= left > 60
    assert not run.turns.exists()


@pytest.mark.faults_slow
@pytest.mark.parametrize("victim", ["worker", "engine", "rank", "controller", "agent", "job"])
def test_55_an_episode_goes_on_from_its_last_turn(scenario: Scenario, victim: str) -> None:
    """Its environment answers at random, and is not asked again for what was kept: what the policy is shown stays, and what it said is found."""
    answers = scenario.path / "answers"
    plays = {
        "environment.env_class": "dice:Dice",
        "environment.custom.answers": str(answers),
        "python_path": [str(OWN)],
        "generator.max_turns": 5,
        "generator.max_input_length": 240,
    }
    scenario.knobs(latency_s=2.5)
    run = scenario.submit({**plays, "trainer.max_steps": 2, "trainer.eval_interval": 0})
    scenario.wait(lambda: len(_answers_left(run)) > 12, "answers that are kept", START_S, run)
    victims = {
        "worker": scenario.worker,
        "engine": scenario.engine,
        "rank": scenario.rank,
        "controller": scenario.controller,
        "agent": scenario.agent,
    }
    if victim == "job":
        scenario.slurm("scontrol", "requeue", scenario.job_of(run))
    else:
        send([victims[victim](run)], SIGKILL)
    kept, before = _answers_left(run), len(answers.read_text().splitlines())
    scenario.wait(lambda: trained_groups(run), "the first batch", 2 * START_S, run)
    scenario.knobs()
    assert_nothing_lost(scenario, run, steps=2, same_values=False)
    given = answers.read_text().splitlines()
    wanted = 2 * BATCH * SAMPLES * 5
    print(f"{victim}: {len(kept)} of {before} answers were kept; {len(given) - wanted} were given again")
    assert len(given) - wanted <= before - len(kept), "no kept answer is asked for again"
    assert curve(run, "environment/turns") == {1: 5.0, 2: 5.0}


def _answers_left(run: Run) -> list[str]:
    """Return the answers to turns that are kept."""
    files = [path for found in turn_files(run).values() for path in found]
    kept = [one["answer"] for path in files for one in read_turns(path).answers]
    return [one["observations"][0]["content"] for one in kept if one["metrics"]]


EVALUATED = 40


@pytest.mark.faults_slow
@pytest.mark.parametrize("end", ["preempted", "killed"])
def test_43_in_the_middle_of_an_evaluation(scenario: Scenario, end: str) -> None:
    """Training went on beside it, to a checkpoint of a later version. The next attempt loads the weights of the evaluated one for the rows
    that are left; the scores are those of all rows, each once."""
    validation, at_once = scenario.path / "validation.jsonl", 4
    write_rows(validation, EVALUATED)
    evaluation = {"eval_interval": 3, "eval_before_train": False, "eval_batch_size": at_once, "max_steps": 4}
    settings = {f"trainer.{name}": value for name, value in evaluation.items()}
    scenario.knobs(latency_s=1.0)
    run = scenario.submit({**settings, "data.val_data": [str(validation)]})
    scenario.wait(lambda: len(_evaluated(run, 3)) >= EVALUATED // 2, "rows that are finished", START_S, run)
    scenario.knobs(latency_s=600)  # no more of them are, however long it takes until the attempt ends
    scenario.wait(lambda: last_saved(run) == (4, 0), "the checkpoint of the next step", 60, run)
    if end == "preempted":
        scenario.preempt()
        assert scenario.outcome(run, 1, 60).kind == "interrupted"
    else:
        spared = {scenario.batch_shell(run), *scenario.sruns(run), *scenario.agents(run)}
        send([pid for pid in processes_of(run) if pid not in spared], SIGKILL)
    finished = len(_evaluated(run, 3))
    assert finished < EVALUATED
    scenario.wait(lambda: len(read_attempts(run)) == 2, "the second attempt", START_S, run)
    scenario.knobs()
    assert_nothing_lost(scenario, run, steps=4)
    again = scenario.noted("asked") - 4 * BATCH * SAMPLES - 2 * EVALUATED
    told = read_json(run.eval_summary(3))
    assert told is not None
    tokens = round(again * told["eval/all/generate/avg_num_tokens"])
    print(f"{end}: {finished} of {EVALUATED} rows were finished; {again} samples, {tokens} tokens were generated again")
    assert again <= at_once, "only rows that were under way"
    assert told == read_json(run.eval_summary(4)), "which nothing interrupted: tokens depend on prompt and seed alone"
    for version in (3, 4):
        assert _evaluated(run, version) == [f"e{version:06d}-{row:08d}.0" for row in range(EVALUATED)]


def _evaluated(run: Run, version: int) -> list[str]:
    """Return the names of the samples whose texts a worker has written."""
    return [one.name for one in evaluated_samples(run, version)[1]] if run.eval_dump(version, 0).exists() else []


def _tokens_left(run: Run) -> int:
    files = [path for found in turn_files(run).values() for path in found]
    return sum(len(turn["token_ids"]) for path in files for turn in read_turns(path).turns)


@pytest.mark.nodes(3)
@pytest.mark.faults_slow
def test_23_engine_core_hangs_while_its_server_is_healthy(scenario: Scenario) -> None:
    """SIGSTOP of the engine core, /health answers 200: noticed by its lack of progress, its groups go to the other replica."""
    run = scenario.submit({**TWO, "trainer.max_steps": 20, "generator.inference_engine.stall_timeout_seconds": 5})
    scenario.reach(run, 3)
    send([scenario.engine_core(run, 1)], SIGSTOP)
    assert_nothing_lost(scenario, run, steps=20, same_values=False)
    assert len(read_attempts(run)) == 1


@pytest.mark.nodes(3)
@pytest.mark.faults_slow
def test_23_out_of_memory_at_load(scenario: Scenario) -> None:
    """One replica never loads its model: it is given up after its restarts, and the other one does the work."""
    scenario.knobs(**{"rollout-1": {"out_of_memory": True}})
    run = scenario.submit({**TWO, "slurm.replica_restarts": 1})
    assert_nothing_lost(scenario, run)
    assert len(read_attempts(run)) == 1
    (process_status,) = [
        process_status for process_status in read_process_statuses(run) if process_status.process == "rollout-1"
    ]
    assert "given up" in process_status.state
    assert "OutOfMemory" in process_status.state


@pytest.mark.faults_slow
def test_23_weights_that_the_engine_did_not_take(scenario: Scenario) -> None:
    """The engine says that it holds another version than it was given: it does not serve, and is started again."""
    run = scenario.submit()
    scenario.reach(run, 3)
    scenario.knobs(stale=True)
    scenario.wait(lambda: "and reports version" in run.log(1, "rollout-0").read_text(), "it is noticed", 60, run)
    scenario.knobs()
    assert_nothing_lost(scenario, run)
    assert len(read_attempts(run)) == 1


@pytest.mark.nodes(3)
@pytest.mark.faults_slow
def test_23_slow_start(scenario: Scenario) -> None:
    """A replica comes when the others have trained for long: it loads the newest weights first, and then works."""
    scenario.knobs(latency_s=0.5, **{"rollout-1": {"start_s": 20}})
    run = scenario.submit({**TWO, "trainer.max_steps": 60})
    scenario.reach(run, 3)
    scenario.wait(lambda: list(run.samples_of(1).glob("g*")), "the late replica's first group", 90, run)
    scenario.knobs()
    assert_nothing_lost(scenario, run, steps=60)
    assert len(read_attempts(run)) == 1


@pytest.mark.faults_slow
def test_24_all_replicas_are_gone(scenario: Scenario) -> None:
    """The only replica cannot come back: a bounded wait, everything trained is saved, and the attempt ends with the reason."""
    patience = {"slurm.replica_restarts": 1, "slurm.replica_patience_minutes": 1}
    run = scenario.submit({**patience, "trainer.ckpt_interval": 100})
    scenario.reach(run, 4)
    scenario.knobs(out_of_memory=True)
    send([scenario.engine(run)], SIGKILL)
    outcome = scenario.outcome(run, 1, 150)
    assert outcome.kind == "failed"
    assert "rollout-0" in outcome.message or "replica" in outcome.message
    scenario.knobs()
    scenario.wait(lambda: len(read_attempts(run)) == 2, "the second attempt", START_S, run)
    assert_nothing_lost(scenario, run)


@pytest.mark.faults_slow
def test_engine_is_killed(scenario: Scenario) -> None:
    """The only engine dies: started again within the attempt."""
    run = scenario.submit(stand_in=False)
    scenario.reach(run, 3)
    send([scenario.engine(run)], SIGKILL)
    assert_nothing_lost(scenario, run, same_values=False)
    assert len(read_attempts(run)) == 1


@pytest.mark.faults_slow
def test_worker_is_killed(scenario: Scenario) -> None:
    """Its engine ends with it, and both come again."""
    run = scenario.submit(stand_in=False)
    scenario.reach(run, 3)
    engine = scenario.engine(run)
    send([scenario.worker(run)], SIGKILL)
    scenario.wait(lambda: engine not in scenario.processes(run), "its engine ends", 20, run)
    assert_nothing_lost(scenario, run, same_values=False)
    assert len(read_attempts(run)) == 1


@pytest.mark.faults_slow
def test_signal_while_the_engine_starts(scenario: Scenario) -> None:
    run = scenario.submit(stand_in=False)
    scenario.wait(
        lambda: scenario.processes(run, "hpcrl.engines.vllm.main"), "the engine is being started", START_S, run
    )
    scenario.slurm("scancel", "--signal=USR2", scenario.job_of(run))
    assert scenario.outcome(run, 1, 60).kind == "interrupted"
    scenario.outcome(run, 2, 240)
    assert_nothing_lost(scenario, run, same_values=False)


@pytest.mark.nodes(3)
@pytest.mark.faults_slow
def test_45_a_scorer_dies_and_its_node_is_taken(scenario: Scenario) -> None:
    """The reference is on a node of its own. Its scorer is started again within the attempt, and with the next one; losses are those of a run whose
    reference is beside the policy, and to which nothing happens."""
    run = scenario.submit({"trainer.placement.colocate_policy_ref": False})
    scenario.reach(run, 3)
    send([pid_of(run, "scorer")], SIGKILL)
    scenario.reach(run, 6)
    assert len(read_attempts(run)) == 1
    scenario.preempt(5, nodes=scenario.nodes[2:])
    scenario.wait(lambda: len(read_attempts(run)) == 2, "the second attempt", START_S, run)
    assert_nothing_lost(scenario, run)
    assert "scorer-0: killed by SIGKILL" in scenario.told("logs", str(run.path), "--role", "agent", "--attempt", "1")


@pytest.mark.nodes(3)
@pytest.mark.faults_slow
def test_46_the_node_of_a_reward_service_is_taken(scenario: Scenario) -> None:
    """The service is killed, and is started again within the attempt; then a job of a higher partition takes its node, and the next attempt has it
    again. Every step is rewarded by the same model, of each group once."""
    model = write_reward_model(scenario.path / "reward_model")
    remote = "environment.remote_reward"
    service = {f"{remote}.enable": True, f"{remote}.service.model": str(model), "environment.env_class": None}
    run = scenario.submit(service)
    scenario.reach(run, 3)
    send([pid_of(run, "reward")], SIGKILL)
    scenario.reach(run, 6)
    assert len(read_attempts(run)) == 1
    scenario.preempt(5, nodes=scenario.nodes[2:])
    scenario.wait(lambda: len(read_attempts(run)) == 2, "the second attempt", START_S, run)
    assert_nothing_lost(scenario, run, same_values=False)
    assert "reward-0: killed by SIGKILL" in scenario.told("logs", str(run.path), "--role", "agent", "--attempt", "1")
    rewards, said = curve(run, "reward/avg_raw_reward"), curve(run, "environment/reward_model")
    assert rewards == said
    assert sorted(said) == list(range(1, STEPS + 1))
    assert len(set(said.values())) > 1


@pytest.mark.nodes(4)
@pytest.mark.faults_slow
def test_47_a_node_of_a_scorer_goes_down(scenario: Scenario) -> None:
    """The reference has two copies. The one that is left scores what the other one had claimed, in the same attempt; losses are those of a run whose
    reference is beside the policy, and to which nothing happens."""
    run = scenario.submit({"trainer.placement.colocate_policy_ref": False, "trainer.placement.ref_num_nodes": 2})
    scenario.reach(run, 3)
    lost = read_attempts(run)[0].hosts[-1]
    scenario.cluster.stop(lost)
    try:
        scenario.reach(run, 6)
        assert_nothing_lost(scenario, run)
    finally:
        scenario.cluster.start(lost)
    assert len(read_attempts(run)) == 1
    assert set(curve(run, "scorers/total").values()) == {2}


@pytest.mark.nodes(3)
@pytest.mark.faults_slow
def test_48_a_reward_model_that_is_a_scorer_is_killed(scenario: Scenario) -> None:
    """Within the attempt, and with its node: every step is rewarded by the model, each sample of it once."""
    model = write_reward_model(scenario.path / "reward_model")
    run = scenario.submit({"environment.reward_model.model": str(model), "environment.env_class": None})
    scenario.reach(run, 3)
    send([pid_of(run, "scorer")], SIGKILL)
    scenario.reach(run, 6)
    assert len(read_attempts(run)) == 1
    scenario.preempt(5, nodes=scenario.nodes[2:])
    scenario.wait(lambda: len(read_attempts(run)) == 2, "the second attempt", START_S, run)
    assert_nothing_lost(scenario, run, same_values=False)
    assert "scorer-0: killed by SIGKILL" in scenario.told("logs", str(run.path), "--role", "agent", "--attempt", "1")
    rewards, said = curve(run, "reward/avg_raw_reward"), curve(run, "environment/reward_model")
    assert rewards == pytest.approx(said)
    assert sorted(said) == list(range(1, STEPS + 1))
    assert len(set(said.values())) > 1
    for step in range(1, STEPS + 1):
        file = read_batch(run.batch(step))
        assert file
        for group in file.batch.groups:
            (name,) = group.scores
            scores = [sample.env_metrics["reward_model"] for sample in group.samples]
            assert scores == group.rewards == [sample.model_reward for sample in group.samples]
            if run.inside(group.path).exists():
                assert scores == read_rewards(run, name, group)


@pytest.mark.nodes(4)
@pytest.mark.faults_slow
def test_50_a_copy_of_a_teacher_on_two_nodes_loses_a_rank_and_a_node(scenario: Scenario) -> None:
    """The rank of its second node is killed: both are started again in the same attempt. Then that node is taken, and with it the attempt."""
    own = "trainer.distillation"
    run = scenario.submit(
        {
            f"{own}.enable": True,
            f"{own}.model_path": str(CONFIGS / "quickstart" / "teacher"),
            f"{own}.top_k": 4,
            f"{own}.placement.fsdp_size": 2,
            f"{own}.placement.nodes_per_replica": 2,
            "trainer.algorithm.use_kl_loss": False,
        }
    )
    scenario.reach(run, 3)
    ranks = scenario.processes(run, "/jobs/scorer.py")
    send([next(pid for pid in ranks if variable(pid, "RANK") == "1")], SIGKILL)
    scenario.reach(run, 6)
    assert len(read_attempts(run)) == 1
    told = scenario.told("logs", str(run.path), "--role", "agent", "--attempt", "1")
    assert "scorer-0-part-1 on" in told
    assert "; ending scorer-0" in told
    scenario.preempt(5, nodes=scenario.nodes[3:])
    scenario.wait(lambda: len(read_attempts(run)) == 2, "the second attempt", START_S, run)
    assert_nothing_lost(scenario, run, same_values=False)
    assert sorted(curve(run, "distillation/divergence")) == list(range(1, STEPS + 1))


COLOCATED = {"trainer.placement.colocate_all": True}
ONCE = {**COLOCATED, "trainer.ckpt_interval": 100}
ASYNCHRONOUS = {**COLOCATED, "trainer.fully_async.max_staleness_steps": 1}
IN_STEP_4 = "update.micro_batch@14"  # four of them make a step
RECALLED = "lease.recalled"


def until_it_trains(scenario: Scenario, run: Run) -> None:
    """Return when the trainer is in the middle of step 4, where a fault point holds it."""
    log = run.log(1, "trainer-0")
    held = f"fault point {IN_STEP_4.partition('@')[0]}"
    scenario.wait(lambda: log.exists() and held in log.read_text(), "the middle of step 4", START_S, run)
    assert state_of(run, "rollout-0") == "asleep"


def until_it_generates(scenario: Scenario, run: Run) -> None:
    scenario.reach(run, 3)
    scenario.knobs(latency_s=4.0)
    scenario.wait(lambda: state_of(run, "trainer").startswith("waiting"), "the engine's turn", START_S, run)
    scenario.wait(lambda: state_of(run, "rollout-0").startswith("generating"), "groups in flight", START_S, run)


def state_of(run: Run, process: str, attempt: int = 1) -> str:
    status = read_process_status(run, process, attempt)
    return status.state if status else ""


@pytest.mark.nodes(1)
@pytest.mark.faults_slow
def test_49_the_worker_is_killed_while_the_trainer_trains(scenario: Scenario) -> None:
    """The one in its place waits for its turn before it starts its engine, within the attempt."""
    run = scenario.submit(COLOCATED, setup=[fault(f"{IN_STEP_4}:sleep=12")])
    until_it_trains(scenario, run)
    send([scenario.worker(run)], SIGKILL)
    scenario.wait(lambda: state_of(run, "rollout-0") == "waiting for the GPU lease", "a new worker", 10, run)
    assert not scenario.processes(run, "hpcrl.engines.vllm.main"), "and no engine"
    assert_nothing_lost(scenario, run)
    assert len(read_attempts(run)) == 1


def until_recalled(scenario: Scenario, run: Run) -> None:
    """Return when a fault point holds the worker between the recall of its lease and its engine's sleep."""
    log = run.log(1, "rollout-0")
    scenario.wait(lambda: log.exists() and RECALLED in log.read_text(), "a recall", START_S, run)


@pytest.mark.nodes(1)
@pytest.mark.faults_slow
@pytest.mark.parametrize("lease", ["asking", "awake", "recalled", "asleep"])
def test_49_the_worker_is_killed_with_begun_samples(scenario: Scenario, lease: str) -> None:
    """In each state of its lease, in asynchronous turns: the one in its place generates what it had begun, each group once."""
    held = f"{RECALLED}@3:sleep=8" if lease == "recalled" else f"{IN_STEP_4}:sleep=15"
    run = scenario.submit(ASYNCHRONOUS, setup=[] if lease == "awake" else [fault(held)])
    reached = {"awake": until_it_generates, "recalled": until_recalled}.get(lease, until_it_trains)
    reached(scenario, run)
    send([scenario.worker(run)], SIGKILL)
    if lease == "asking":
        scenario.wait(lambda: state_of(run, "rollout-0") == "waiting for the GPU lease", "a new worker", 30, run)
        send([scenario.worker(run)], SIGKILL)
    scenario.knobs()
    assert_nothing_lost(scenario, run, same_values=False)
    assert len(read_attempts(run)) == 1


@pytest.mark.nodes(1)
@pytest.mark.faults_slow
@pytest.mark.parametrize("victim", ["worker", "engine", "rank"])
def test_49_one_of_them_is_killed_while_the_engine_generates(scenario: Scenario, victim: str) -> None:
    """A worker is started again at once, as it is its turn; without the trainer the attempt is over, and the next one goes on."""
    run = scenario.submit(COLOCATED)
    until_it_generates(scenario, run)
    victims = {"worker": scenario.worker, "engine": scenario.engine, "rank": scenario.rank}
    send([victims[victim](run)], SIGKILL)
    scenario.wait(lambda: len(scenario.processes(run, "/jobs/")) < 3, "it is gone", 30, run)
    scenario.knobs()
    assert_nothing_lost(scenario, run)
    assert len(read_attempts(run)) == (2 if victim == "rank" else 1)


@pytest.mark.nodes(1)
@pytest.mark.faults_slow
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("turn", ["trainer", "engine"])
def test_49_preemption_in_the_turn_of(scenario: Scenario, turn: str, staleness: int) -> None:
    """All that was trained is saved, from the device or from host memory, and the run comes back."""
    settings = {**ONCE, "trainer.fully_async.max_staleness_steps": staleness}
    held = [in_first_attempt(fault(f"{IN_STEP_4}:sleep=5"))] if turn == "trainer" else []
    run = scenario.submit(settings, setup=held)
    (until_it_trains if turn == "trainer" else until_it_generates)(scenario, run)
    scenario.preempt()
    if turn == "trainer":
        assert scenario.outcome(run, 1, 30).kind == "interrupted"
    else:
        saved_when_told(scenario, run)
    scenario.knobs()
    assert_nothing_lost(scenario, run, same_values=not staleness)
    assert len(read_attempts(run)) == 2


LENT = {"trainer.placement.lend": True, "generator.inference_engine.max_num_seqs": SAMPLES, "trainer.max_steps": 20}
WORKER = "rollout-1"


def lent_worker(run: Run) -> int:
    """Return the process of the worker whose engine has the trainer's GPUs while it waits."""
    workers = (pid for pid in processes_of(run) if "/jobs/rollout.py" in command_of(pid))
    return next(pid for pid in workers if variable(pid, "HPCRL_REPLICA") == "1")


@pytest.mark.nodes(2)
@pytest.mark.faults_slow
@pytest.mark.parametrize(
    ("state", "victim"),
    [
        ("waiting", "worker"),
        ("generating", "worker"),
        ("generating", "rank"),
        ("generating", "job"),
        ("asleep", "worker"),
    ],
)
def test_53_in_a_state_of_a_lease(scenario: Scenario, state: str, victim: str) -> None:
    """The trainer waits for an engine with room for one group, and lends its node to another one. Without the trainer, or the job, the next
    attempt goes on."""
    run = scenario.submit(LENT)
    scenario.knobs(latency_s=1.0)
    scenario.wait(lambda: state_of(run, WORKER).startswith(state), f"{WORKER} {state}", 2 * START_S, run)
    if victim == "job":
        scenario.preempt()
        saved_when_told(scenario, run)
    else:
        send([lent_worker(run) if victim == "worker" else scenario.rank(run)], SIGKILL)
    assert_nothing_lost(scenario, run, steps=20)
    assert len(read_attempts(run)) == (1 if victim == "worker" else 2)
    assert sum(curve(run, "replicas/leases").values())


@pytest.mark.nodes(1)
@pytest.mark.faults_slow
def test_49_an_engine_has_no_memory_to_wake(scenario: Scenario) -> None:
    """The run ends, and says what the engine wants."""
    run = scenario.submit({**COLOCATED, "slurm.replica_restarts": 0, "slurm.crash_budget": 1})
    scenario.reach(run, 2)
    scenario.knobs(short_of_memory=True)
    assert_ended(scenario, run, "failed")
    told = scenario.told("status", str(run.path))
    assert "does not wake" in told, told
    assert "generator.inference_engine.gpu_memory_utilization" in told
