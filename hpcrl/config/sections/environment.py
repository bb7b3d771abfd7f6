"""Section `environment`: environments and rewards of responses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hpcrl.config.conditions import RL
from hpcrl.config.effects import CALLS, SAME_NUMBERS, SCORES
from hpcrl.config.fields import Location
from hpcrl.config.sections.functions import GROUP_REWARDS, REWARDS
from hpcrl.config.sections.model import ScorerFSDPConfig
from hpcrl.config.setting import COUNT, NOT_NEGATIVE, POSITIVE, SHARE, Range, any_of, section, setting, when

REWARD_MODEL, OVERALL = "reward_model", "overall_reward"
"""The reward of a reward model's service, and the name of its score."""

CLASSIFIER = "ForSequenceClassification"
"""How the names of transformers' classes end that a reward model can be of."""

ENVIRONMENTS = (
    "agent",
    "arithmetic",
    "calculator",
    "count_letters",
    "countdown",
    "direct_math",
    "format",
    "geometry3k",
    "gsm8k",
    "gsm8k_multi_turn",
    "guess_number",
    "llm_as_a_judge",
    "math",
    "python_tool",
    "reverse_word",
    "robot",
    "sandbox",
    "search",
    "single_choice",
    "sort_letters",
    "text2sql",
)
"""The environments of hpcrl, by name; hpcrl/envs/registry.py says where each is."""

SIMULATORS = ("gymnasium", "libero", "robotwin")
"""Simulators of robots, by name; hpcrl/envs/simulators/process.py says where each is."""

MOST_SIMULATORS = 256
"""Of one replica."""


def _has_pairwise(rewards: dict[str, float]) -> bool:
    return "pairwise_judge" in rewards


@dataclass(frozen=True, kw_only=True)
class Text2SQLConfig:
    db_path: Location | None = setting(
        None, why="the user names the folder; SkyRL's default is a path in its container image"
    )
    """text2sql: folder of the SQLite databases, which are opened for reading only."""


@dataclass(frozen=True, kw_only=True)
class LLMJudgeConfig:
    model: str | None = setting(None, why="the user names the judge")
    """llm_as_a_judge, pairwise_judge, rubric_judge: name of the judge model at its server."""

    base_url: str | None = None
    """llm_as_a_judge, pairwise_judge, rubric_judge: address of an OpenAI-compatible server, such as http://host:8000/v1; unset: OpenAI's. The key is in OPENAI_API_KEY, which a server of your own may not need."""

    comparisons: int = setting(
        2,
        range=COUNT,
        used_by=when(
            "environment.group_reward_function",
            test=_has_pairwise,
            needs="pairwise_judge in environment.group_reward_function",
        ),
    )
    """pairwise_judge: others of its group that the judge compares each sample with as the first answer; it is the second one as often. A group of n samples takes n times as many requests, n - 1 comparisons being the most. A comparison without a verdict is left out, and a sample without any other has failed."""


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    search_url: str = "http://127.0.0.1:8000/retrieve"
    """search: address of the retrieval service."""

    corpus: Location | None = None
    """search: JSON lines of documents that each replica searches itself, by BM25, instead of at a service."""

    topk: int = setting(3, range=COUNT)
    """search: documents per query."""

    timeout: int = setting(30, range=COUNT, on_change=CALLS)
    """search: seconds that one try of a query at the service may take; further tries begin within a minute."""

    log_requests: bool = setting(False, on_change=CALLS)
    """search: print each query and the number of its documents in the replica's log."""


@dataclass(frozen=True, kw_only=True)
class PythonToolConfig:
    require_sandbox: bool = True
    """python_tool: run the policy's programs only on nodes whose kernel can confine them wholly; false: as far as it can. The replica's log then states what a program can do there."""


@dataclass(frozen=True, kw_only=True)
class AgentServiceConfig:
    url: str | None = None
    """agent: address of a service that keeps agents running, such as http://host:8080/play, which is asked to play samples instead of starting command; docs/agents.md has the protocol."""

    token_file: Location | None = None
    """agent: file, readable on the rollout nodes by its owner alone, with the token that the service gets as `Authorization: Bearer`."""


@dataclass(frozen=True, kw_only=True)
class AgentContainerConfig:
    kind: Literal["none", "apptainer", "enroot"] = "none"
    """agent: program that starts command in a container; none: it runs as it is."""

    image: Location | None = None
    """agent: image of the container: a .sif file or a .sqsh file, or what else Apptainer or Enroot takes."""

    mounts: list[str] = setting([])
    """agent: directories of the node that the program sees, SOURCE or SOURCE:TARGET or SOURCE:TARGET:ro; its own directory is seen without."""

    env: list[str] = setting([])
    """agent: names of variables of the rollout worker that the program has as well."""

    arguments: list[str] = setting([])
    """agent: further options of `apptainer exec` or `enroot start`, such as "--nv"."""


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    command: list[Location] = setting([])
    """agent: the program and its arguments; it asks the policy as OpenAI's clients do, and is started for each sample."""

    container: AgentContainerConfig = section(AgentContainerConfig)

    service: AgentServiceConfig = section(AgentServiceConfig)

    reward: Literal["file", "exit_code"] = "file"
    """agent: where the reward is: in the file that HPCRL_REWARD names, or 1 for exit code 0 and else 0. With file, another exit code is a failure."""

    reward_function: dict[str, float] = setting({})
    """agent: named rewards and their weights, as of environment.reward_function, which judge the policy's last message, instead of the program."""


@dataclass(frozen=True, kw_only=True)
class RobotConfig:
    simulator: str | None = None
    """robot: what is simulated: gymnasium, any environment that is registered there; libero; robotwin; or your own as "package.module:Class", with the methods of hpcrl.envs.simulators.base.Simulator. Each sample that is being generated has a simulator in a process of its own, so that a replica has as many as generator.inference_engine.max_num_seqs."""

    options: dict[str, Any] = setting({})
    """robot: what the simulator is made with; gymnasium: id and what gymnasium.make takes; libero: suite; robotwin: path of its checkout. docs/environments/robot.md has all."""

    actions_per_turn: int = setting(1, range=COUNT)
    """robot: actions that the policy says at once, before it sees what came of them."""

    action_bins: int | None = setting(None, range=Range(2))
    """robot: an action's numbers are whole ones from 0 to this number less 1, spread evenly between its bounds (OpenVLA has 256); unset: they are the simulator's own."""

    show_state: bool = True
    """robot: give the policy the simulator's measurements; false: only camera images, where the simulator has cameras."""

    state_bins: int | None = setting(None, range=Range(2))
    """robot: the state is written as whole numbers from 0 to this number less 1, spread evenly between its bounds; unset: as decimal numbers."""


@dataclass(frozen=True, kw_only=True)
class SandboxToolsConfig:
    command_seconds: float = setting(60.0, range=POSITIVE, on_change=CALLS)
    """sandbox: seconds that a command of the policy may take; a call may ask for fewer. Then it is ended, with what it has started."""

    network: bool = False
    """sandbox: let the programs of the policy, and those of setup and tests, use the network of their node, its own services included."""


@dataclass(frozen=True, kw_only=True)
class SkyRLGymConfig:
    max_env_workers: int = setting(32, range=NOT_NEGATIVE, on_change=CALLS)
    """Environments of one replica that step at the same time, in threads; 0: one after the other, without threads."""

    text2sql: Text2SQLConfig = section(Text2SQLConfig)

    llm_as_a_judge: LLMJudgeConfig = section(LLMJudgeConfig)

    search: SearchConfig = section(SearchConfig)

    python_tool: PythonToolConfig = section(PythonToolConfig)

    agent: AgentConfig = section(AgentConfig)

    robot: RobotConfig = section(RobotConfig)

    sandbox: SandboxToolsConfig = section(SandboxToolsConfig)


@dataclass(frozen=True, kw_only=True)
class RewardServiceConfig:
    model: Location | None = None
    """Reward model of which the run starts a service: a sequence classifier of one label, as a directory or a name on the hub. Unset: the service is somewhere else, and its address and token are in REMOTE_REWARD_ENQUEUE_URL, _FETCH_URL and _TOKEN."""

    num_services: int = setting(1, range=COUNT, on_change=CALLS)
    """Processes that serve the model, each on a GPU of its own where nodes have GPUs. They get further nodes beside those of trainer and engines, with one process per GPU."""

    model_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Number type of the model's parameters and of its computation."""

    max_batch_tokens: int = setting(16384, range=COUNT, on_change=CALLS)
    """Tokens of a forward pass at most, padding included; a longer conversation has one of its own."""

    chat_template: Location | None = None
    """Jinja file with the chat template that the model was trained with, instead of its tokenizer's."""


@dataclass(frozen=True, kw_only=True)
class RemoteRewardConfig:
    enable: bool = False
    """Score responses at a reward service: one that the run starts (service.model), or one whose address and token are in REMOTE_REWARD_ENQUEUE_URL, _FETCH_URL and _TOKEN."""

    service: RewardServiceConfig = section(RewardServiceConfig, used_by=when(".service.model"))

    reward_function: dict[str, float] = setting({})
    """Rewards that the service computes, with their weights in the sum; each is reported as environment/<name>, unweighted. Empty with service.model: reward_model, which is the only one of such a service, with weight 1."""

    score_key: str = "overall_reward"
    """Name of the score in the reply that counts; a+b: the sum of two, and so on."""

    clip_min: float = -5.0
    """Lower bound of the weighted sum, before scaling."""

    clip_max: float = 5.0
    """Upper bound of the weighted sum, before scaling."""

    scale: float = 1.0
    """Factor on the sum, after clipping."""

    batch_size: int = setting(1, range=COUNT, on_change=CALLS)
    """Responses per request at most; no more are scored at the same time than skyrl_gym.max_env_workers."""

    @property
    def reward_weights(self) -> dict[str, float]:
        """Rewards that the service is asked for, with their weights; where they are not set: that of a reward model."""
        return self.reward_function or ({REWARD_MODEL: 1.0} if self.service.model else {})


@dataclass(frozen=True, kw_only=True)
class ScoringRewardModelConfig:
    model: Location | None = None
    """Reward model that scores finished groups, as a scorer, and not during the rollout: a sequence classifier of one label, as a directory or a name on the hub. Unset: there is none."""

    revision: str | None = None
    """Branch, tag or commit of it on the hub."""

    use_environment: bool = False
    """Add its score to the reward of the environment or of reward_function; false: it is the whole reward of a response, which has one turn, and training uses no environment."""

    weight: float = 1.0
    """Factor on the score, after clipping."""

    clip_min: float = -5.0
    """Lower bound of the score."""

    clip_max: float = 5.0
    """Upper bound of the score."""

    chat_template: Location | None = None
    """Jinja file with the chat template that the model was trained with, instead of its tokenizer's."""

    num_replicas: int = setting(1, range=NOT_NEGATIVE, on_change=SAME_NUMBERS)
    """Copies of the model, which share the groups, on nodes of their own."""

    ranks_per_replica: int = setting(1, range=COUNT, on_change=SAME_NUMBERS)
    """Ranks that share a copy, on one node, a GPU each where nodes have some."""

    fsdp_config: ScorerFSDPConfig = section(ScorerFSDPConfig, on_change=SAME_NUMBERS)

    batch_size_per_replica: int = setting(64, range=COUNT, on_change=SAME_NUMBERS)
    """Samples that a copy claims at a time, about; those of a group for each of its ranks at least."""

    max_tokens_per_micro_batch: int = setting(16384, range=COUNT, on_change=SAME_NUMBERS)
    """Tokens of a forward pass on one rank at most; a longer conversation has one of its own."""


@dataclass(frozen=True, kw_only=True)
class OverlongRewardConfig:
    buffer_length: int = setting(4096, range=COUNT)
    """overlong: tokens before the longest response over which the penalty grows from 0 (DAPO, arXiv:2503.14476)."""

    penalty_factor: float = setting(1.0, range=NOT_NEGATIVE)
    """overlong: penalty at the longest response (max_generate_length of training or evaluation); it grows linearly over the buffer."""


def _has_overlong(rewards: dict[str, float]) -> bool:
    return "overlong" in rewards


_OVERLONG = any_of(
    when(".reward_function", test=_has_overlong),
    when(".eval_reward_function", test=_has_overlong),
    needs="overlong in {section}.reward_function",
)


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    env_class: str | None = setting(None, why="no environment fits every run; the rows or the user name it")
    """Environment of rows that have no env_class column: a name that `hpcrl env ls` shows, or your own as "package.module:Class"; unset: every row must have one, unless reward_function or remote_reward scores."""

    allowed_env_classes: list[str] = setting([])
    """Environments of your own, as "package.module:Class", that rows may name in their column env_class beside those of hpcrl and the one of env_class. Rows that name any other are refused, so that no dataset chooses what code runs."""

    names: dict[str, str] = setting({})
    """Names of environments of your own, with "package.module:Class" of each, which rows and env_class may use, such as names.calc = "calc_env:Calc" for rows with env_class "calc". Names of hpcrl's environments are refused."""

    reward_function: dict[str, float] = setting({}, named=REWARDS)
    """Named rewards and their weights in the sum that is each sample's reward, instead of an environment's. {names}; or your own as "package.module:function". With weight 0 a reward is only reported, as environment/<name>. Empty: the environment scores."""

    eval_reward_function: dict[str, float] = setting({}, on_change=SCORES)
    """The same for evaluation; empty: reward_function."""

    group_reward_function: dict[str, float] = setting({}, named=GROUP_REWARDS, used_by=RL)
    """Named rewards of whole groups and their weights, whose sum takes the place of each sample's reward in training; evaluation keeps that of each sample. {names}; or your own as "package.module:function". With weight 0 one is only reported, as environment/<name>. Empty: samples keep their own rewards."""

    overlong_reward: OverlongRewardConfig = section(OverlongRewardConfig, used_by=_OVERLONG)

    remote_reward: RemoteRewardConfig = section(RemoteRewardConfig, used_by=when(".remote_reward.enable", True))

    reward_model: ScoringRewardModelConfig = section(
        ScoringRewardModelConfig, used_by=(RL, when(".reward_model.model"))
    )

    skyrl_gym: SkyRLGymConfig = section(SkyRLGymConfig)

    timeout_seconds: float = setting(300.0, range=NOT_NEGATIVE, on_change=CALLS)
    """How long a call of an environment or a reward may take; then its sample has failed. 0: no limit. Not enforced with max_env_workers=0."""

    max_failed_ratio: float = setting(0.5, range=SHARE, on_change=CALLS)
    """Share of a step's samples whose environments may raise or take too long, or whose requests the inference engine may refuse. Such samples are left out of the loss, and count in their groups as the mean of the others; with more of them the run ends."""

    custom: dict[str, Any] = setting({})
    """Handed to every environment, untouched, as the extra `custom`; rows with a column of that name keep theirs."""

    def path_of(self, env_class: str) -> str:
        """Return the import path of an environment that has a name in `names`; any other name as it is."""
        return self.names.get(env_class, env_class)

    def reward_weights(self, kind: Literal["train", "eval"]) -> dict[str, float]:
        """Return the named rewards of training or evaluation samples, with their weights; none where an environment or a service scores them."""
        own = self.eval_reward_function if kind == "eval" else {}
        return own or self.reward_function

    def uses_reward_service(self, kind: Literal["train", "eval"]) -> bool:
        """Return whether a reward service scores samples of training or evaluation."""
        return self.remote_reward.enable and not self.reward_weights(kind)

    def is_rewarded_later(self, kind: Literal["train", "eval"]) -> bool:
        """Return whether nothing but a reward model that scores finished groups rewards samples of training; evaluation never waits for one."""
        own = self.reward_model
        return kind == "train" and own.model is not None and not own.use_environment
