"""Rules about rewards: an environment, named rewards, a reward service."""

from __future__ import annotations

from collections.abc import Iterator

from hpcrl.config.errors import Problem
from hpcrl.config.import_path import IMPORT_PATH, misnamed
from hpcrl.config.sections.algorithm import OWN_REWARD
from hpcrl.config.sections.environment import (
    ENVIRONMENTS,
    OVERALL,
    REWARD_MODEL,
    RemoteRewardConfig,
    SearchConfig,
)
from hpcrl.config.sections.functions import GROUP_REWARDS, REWARDS
from hpcrl.config.sections.tree import ConfigTree

_OF_JUDGES = "pairwise_judge", "rubric_judge"
_SCORED_LATER = "a reward model scores instead (environment.reward_model); set environment.reward_model.use_environment=true, or leave one of them out"


def reward_names(config: ConfigTree) -> Iterator[Problem]:
    environment = config.environment
    for setting, weights, known in (
        ("reward_function", environment.reward_function, REWARDS),
        ("eval_reward_function", environment.eval_reward_function, REWARDS),
        ("group_reward_function", environment.group_reward_function, GROUP_REWARDS),
    ):
        for name in weights:
            yield from misnamed(f"environment.{setting}", name, known, "names of")
        if weights and not any(weights.values()):
            yield Problem(
                f"environment.{setting}",
                "every weight is 0, and so would be every reward; give one of them another weight",
            )


def group_rewards(config: ConfigTree) -> Iterator[Problem]:
    """Rewards of whole groups, which need the rewards of all samples when the group is finished."""
    environment, path = config.environment, "environment.group_reward_function"
    if not environment.group_reward_function:
        return
    if environment.reward_model.model is not None:
        yield Problem(
            path,
            "compares the rewards of a finished group, and the scorer of environment.reward_model scores it later; serve the model "
            "(environment.remote_reward.service.model), or leave one of them out",
        )
    if config.trainer.algorithm.needs_baselines:
        yield Problem(
            path,
            "rewards the samples of a group, not the greedy response that trainer.algorithm.advantage_estimator=remax compares them with; "
            "choose another estimator",
        )
    if not config.trainer.distillation.rewards_count:
        yield Problem(
            path,
            "rewards count for nothing with a teacher alone; set trainer.distillation.use_rewards=true, or leave the group rewards out",
        )


def judges(config: ConfigTree) -> Iterator[Problem]:
    """Rewards of a judge model, which somebody serves."""
    environment = config.environment
    own = {**environment.reward_weights("train"), **environment.skyrl_gym.agent.reward_function}
    grouped = environment.group_reward_function
    named = [name for name in _OF_JUDGES if name in {**own, **environment.eval_reward_function, **grouped}]
    if named and environment.skyrl_gym.llm_as_a_judge.model is None:
        path = "environment.skyrl_gym.llm_as_a_judge.model"
        yield Problem(path, f"required by {named[0]}: the judge's name at its server")
    if both := [name for name in _OF_JUDGES if name in own and name in grouped]:
        yield Problem(
            "environment.group_reward_function",
            f"{both[0]} grades each response already, as its own reward; leave one of them out",
        )


def filter_metrics(config: ConfigTree) -> Iterator[Problem]:
    environment = config.environment
    remote = environment.uses_reward_service("train")
    rewards = environment.remote_reward.reward_weights if remote else environment.reward_weights("train")
    setting = "environment.remote_reward.reward_function" if remote else "environment.reward_function"
    if environment.reward_model.model is not None and (rewards or not environment.reward_model.use_environment):
        rewards = {**rewards, REWARD_MODEL: environment.reward_model.weight}
    rewards = {**rewards, **environment.group_reward_function} if rewards else rewards
    algorithm = config.trainer.algorithm
    named = {"filter_reward_metric": algorithm.filter_reward_metric}
    named["gdpo.rewards"] = [name for name in algorithm.gdpo.rewards if name != OWN_REWARD]
    for path, names in named.items():
        unknown = [name for name in names if name not in rewards]
        if rewards and unknown:
            yield Problem(
                f"trainer.algorithm.{path}",
                f'"{unknown[0]}" is not in {setting}, whose rewards are {", ".join(rewards)}; '
                "list it there, with weight 0 if it is not to count",
            )


def several_rewards(config: ConfigTree) -> Iterator[Problem]:
    """Require several rewards for gdpo, and refuse settings that change the one reward that it does not read."""
    algorithm, path = config.trainer.algorithm, "trainer.algorithm.gdpo.rewards"
    if algorithm.advantage_estimator != "gdpo":
        return
    if not any(algorithm.gdpo.rewards.values()):
        yield Problem(
            path,
            "required with trainer.algorithm.advantage_estimator=gdpo: named rewards, or metrics that the environment reports, with "
            "weights that are not all 0, such as {correct = 1.0, format = 0.3}",
        )
    changing = {
        "trainer.algorithm.use_kl_in_reward": algorithm.use_kl_in_reward,
        "generator.zero_reward_on_non_stop": config.generator.zero_reward_on_non_stop,
    }
    for setting in (name for name, used in changing.items() if used):
        yield Problem(
            setting,
            f"changes the reward of a sample alone, and trainer.algorithm.advantage_estimator=gdpo looks at all of {path}; set it to false",
        )


def one_reward_source(config: ConfigTree) -> Iterator[Problem]:
    environment = config.environment
    if environment.reward_function and environment.env_class is not None:
        yield Problem(
            "environment.env_class",
            f"environment.reward_function scores instead, so that {environment.env_class} has no effect; leave one of them out (environment.env_class= unsets it)",
        )
    if not environment.remote_reward.enable:
        return
    if environment.reward_function:
        yield Problem(
            "environment.reward_function",
            "given beside environment.remote_reward.enable, where a service scores; leave one of them out",
        )
    elif environment.env_class is not None:
        yield Problem(
            "environment.env_class",
            f"a service scores instead (environment.remote_reward.enable), so that {environment.env_class} has no effect; leave one of them out",
        )


def overlong(config: ConfigTree) -> Iterator[Problem]:
    environment, path = config.environment, "environment.overlong_reward"
    listed = [kind for kind in ("train", "eval") if "overlong" in environment.reward_weights(kind)]
    longest = {"train": config.generator.sampling_params, "eval": config.generator.eval_sampling}
    for kind in listed:
        most = longest[kind].max_generate_length
        if environment.overlong_reward.buffer_length > most:
            section = "sampling_params" if kind == "train" else "eval_sampling_params"
            yield Problem(
                f"{path}.buffer_length",
                f"expected at most the longest response (generator.{section}.max_generate_length = {most}), "
                f"found {environment.overlong_reward.buffer_length}",
            )
            return


def remote_reward(config: ConfigTree) -> Iterator[Problem]:
    remote = config.environment.remote_reward
    if remote.enable and not remote.reward_weights:
        yield Problem(
            "environment.remote_reward.reward_function",
            "required with environment.remote_reward.enable: the rewards that the service computes, with their weights",
        )
    yield from _of_reward_model(remote)
    if remote.enable and remote.reward_function and not any(remote.reward_function.values()):
        yield Problem(
            "environment.remote_reward.reward_function",
            "every weight is 0, and so would be every reward; give one of them another weight",
        )
    if remote.clip_min > remote.clip_max:
        yield Problem(
            "environment.remote_reward.clip_min",
            f"expected at most clip_max ({remote.clip_max}), found {remote.clip_min}",
        )


def _of_reward_model(remote: RemoteRewardConfig) -> Iterator[Problem]:
    if remote.service.model is None:
        return
    for name in remote.reward_function:
        if name != REWARD_MODEL:
            yield Problem(
                "environment.remote_reward.reward_function",
                f'the service of a reward model (service.model) has only "{REWARD_MODEL}", found "{name}"; leave it out',
            )
    if remote.score_key != OVERALL:
        yield Problem(
            "environment.remote_reward.score_key",
            f'the service of a reward model (service.model) sends only "{OVERALL}", found "{remote.score_key}"; leave it out',
        )


def scoring_reward_model(config: ConfigTree) -> Iterator[Problem]:
    """A reward model that scores finished groups."""
    environment, algorithm, path = config.environment, config.trainer.algorithm, "environment.reward_model"
    own, remote = environment.reward_model, environment.remote_reward
    if own.model is None:
        return
    if own.clip_min > own.clip_max:
        yield Problem(f"{path}.clip_min", f"expected at most clip_max ({own.clip_max}), found {own.clip_min}")
    if own.weight == 0 and not own.use_environment:
        yield Problem(
            f"{path}.weight",
            "0 would make every reward 0; give it another one, or set use_environment=true, beside which it is only reported",
        )
    if algorithm.needs_baselines:
        yield Problem(
            f"{path}.model",
            "scores the samples of a group, not the greedy response that trainer.algorithm.advantage_estimator=remax compares them with; choose "
            "another estimator, or serve the model (environment.remote_reward.service.model)",
        )
    if not config.trainer.distillation.rewards_count:
        yield Problem(
            f"{path}.model",
            "rewards count for nothing with a teacher alone; set trainer.distillation.use_rewards=true, or leave the reward model out",
        )
    if remote.enable and REWARD_MODEL in remote.reward_weights:
        yield Problem(
            f"{path}.model",
            f'the service has a reward "{REWARD_MODEL}" too (environment.remote_reward), by which name both would be reported; leave one of them out',
        )
    elif remote.enable and not own.use_environment:
        yield Problem("environment.remote_reward.enable", _SCORED_LATER)
    if environment.reward_function and not own.use_environment:
        yield Problem("environment.reward_function", f"{_SCORED_LATER}; eval_reward_function scores evaluation")
    evaluates = config.trainer.eval_interval > 0 and not environment.eval_reward_function
    if environment.env_class is not None and not own.use_environment and not evaluates:
        yield Problem("environment.env_class", _SCORED_LATER)


def environments(config: ConfigTree) -> Iterator[Problem]:
    """Check the settings of the default environment; environments that rows name are checked when they are rolled out."""
    gym, path, name = config.environment.skyrl_gym, "environment.skyrl_gym", config.environment.env_class
    if name is not None:
        yield from misnamed(
            "environment.env_class", name, (*ENVIRONMENTS, *config.environment.names), "one of", "Class"
        )
    for own, imported in config.environment.names.items():
        if own in ENVIRONMENTS:
            yield Problem(
                "environment.names",
                f'"{own}" is an environment of hpcrl, which rows of that name get; give yours another name, also in the column env_class',
            )
        if not own or ":" in own or not IMPORT_PATH.fullmatch(imported):
            yield Problem(
                "environment.names",
                f'expected a name without ":" and its "package.module:Class", found "{own}" = "{imported}"',
            )
    for own in config.environment.allowed_env_classes:
        yield from misnamed("environment.allowed_env_classes", own, ENVIRONMENTS, "one of", "Class")
    if name == "text2sql" and gym.text2sql.db_path is None:
        yield Problem(f"{path}.text2sql.db_path", "required by text2sql: the folder of the databases")
    if name == "llm_as_a_judge" and gym.llm_as_a_judge.model is None:
        yield Problem(f"{path}.llm_as_a_judge.model", "required by llm_as_a_judge: the judge's name at its server")
    for setting, url in (
        ("llm_as_a_judge.base_url", gym.llm_as_a_judge.base_url),
        ("search.search_url", gym.search.search_url),
    ):
        if url is not None and not url.startswith(("http://", "https://")):
            yield Problem(f"{path}.{setting}", f'expected an address such as "http://host:8000/v1", found "{url}"')
    if gym.search.corpus is not None and gym.search.search_url != SearchConfig.search_url:
        yield Problem(f"{path}.search.corpus", "is searched instead of search_url; leave one of them out")
