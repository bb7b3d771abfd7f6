"""Rules about nodes, their GPUs, engines, and options of sbatch that hpcrl sets itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields

from hpcrl.config.backend import OPTIONAL, backend_of, backends, teacher_backend
from hpcrl.config.errors import Problem
from hpcrl.config.family import family_of
from hpcrl.config.secrets import name_of_secret
from hpcrl.config.sections.generator import InferenceEngineConfig
from hpcrl.config.sections.slurm import PYXIS_LISTS, ElasticConfig, RequestConfig, SlurmConfig
from hpcrl.config.sections.tree import ConfigTree

_SBATCH_OWN = {"nodes", "array", "signal", "ntasks", "ntasks_per_node", "job_name", "output", "error", "open_mode"}
_SBATCH_OWN |= {"requeue", "no_requeue", "no_kill"}
_REQUEST = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}", re.ASCII)  # part of the names of jobs
_SANDBOX = "sandbox"  # of hpcrl/envs/registry.py
_SBATCH_NAMES = {
    "partition": "partition",
    "account": "account",
    "qos": "qos",
    "constraint": "constraint",
    "time": "time_minutes",
    "time_min": "time_min_minutes",
    "gpus_per_node": "gpus_per_node",
    "cpus_per_task": "cpus_per_task",
    "mem": "mem_gb",
    "exclusive": "exclusive",
}


def engine_options(config: ConfigTree) -> Iterator[Problem]:
    path, engine = "generator.inference_engine", config.generator.inference_engine
    if engine.max_num_batched_tokens < engine.max_num_seqs:
        yield Problem(
            f"{path}.max_num_batched_tokens",
            f"expected at least {path}.max_num_seqs ({engine.max_num_seqs}), found {engine.max_num_batched_tokens}",
        )


def settings_of_engines(config: ConfigTree) -> Iterator[Problem]:
    """Refuse settings and sampling parameters that the run's engines do not read, because a file should not promise what does not happen."""
    path, generator, usual = "generator.inference_engine", config.generator, InferenceEngineConfig()
    engine, backend = generator.inference_engine, backend_of(generator.inference_engine)
    for name in OPTIONAL:
        if name not in backend.reads and getattr(engine, name) != getattr(usual, name):
            others = " or ".join(other.name for other in backends().values() if name in other.reads)
            yield Problem(
                f"{path}.{name}", f'has no effect with {path}.backend="{backend.name}"; leave it out, or set {others}'
            )
    for section in ("sampling_params", "eval_sampling_params"):
        for name in getattr(generator, section).additional_kwargs or {}:
            if backend.sampling is not None and name not in backend.sampling:
                only = f"only {' and '.join(backend.sampling)}" if backend.sampling else "none"
                yield Problem(
                    f"generator.{section}.additional_kwargs.{name}",
                    f'{path}.backend="{backend.name}" has {only}; leave it out, or use another engine',
                )


def engine_of_family(config: ConfigTree) -> Iterator[Problem]:
    family, engine = family_of(config), config.generator.inference_engine
    if config.has_engines and family.backend not in (None, engine.backend):
        yield Problem(
            "generator.inference_engine.backend",
            f'expected "{family.backend}" with {family.chosen_by}, found "{engine.backend}"',
        )


def rules_of_backends(config: ConfigTree) -> Iterator[Problem]:
    """Check the rules of the run's engines, and of its teachers' engines."""
    for rule in backend_of(config.generator.inference_engine).rules:
        yield from rule(config)
    distillation = config.trainer.distillation
    teacher = teacher_backend(distillation)
    if teacher and distillation.enable and not config.trainer.offline:
        for rule in teacher.teacher_rules:
            yield from rule(config)


def copies_of_weights(config: ConfigTree) -> Iterator[Problem]:
    found = config.generator.inference_engine.weight_copy_dir
    if found is not None and not found.startswith(("/", "~/", "$")):
        expected = "expected an absolute path or one that begins with a variable of the nodes, such as $TMPDIR"
        yield Problem("generator.inference_engine.weight_copy_dir", f"{expected}, found {found!r}")


def ways_of_weights(config: ConfigTree) -> Iterator[Problem]:
    engine, path = config.generator.inference_engine, "generator.inference_engine."
    backend, network = engine.weight_sync_backend, engine.weight_sync_backend != "filesystem"
    wanted = {"weight_sync_backend": network, "full_weights_interval": engine.full_weights_interval > 1}
    for name in [name for name, is_set in wanted.items() if is_set]:
        if config.loads_adapters:
            yield Problem(
                path + name,
                f"adapters are small, and reach engines as files; leave it out, or set {path}merge_lora=true",
            )
        elif engine.weight_copy_dir is None:
            yield Problem(
                path + name,
                f"needs a place for a copy of the weights on each node; set {path}weight_copy_dir, such as to /dev/shm or $TMPDIR",
            )
    if not network and not _is_default(engine, "weight_sync_timeout_seconds"):
        yield Problem(
            path + "weight_sync_timeout_seconds",
            f"has no effect with {path}weight_sync_backend=filesystem; leave it out",
        )
    if backend == "nccl" and config.slurm.gpus == 0:
        yield Problem(
            path + "weight_sync_backend", "nccl needs GPUs, but slurm.gpus_per_node=0; use gloo or filesystem"
        )
    elif backend == "nccl" and (
        shared := [name for name in ("colocate_all", "lend") if getattr(config.trainer.placement, name)]
    ):
        yield Problem(
            path + "weight_sync_backend",
            f"NCCL refuses two processes of one GPU, and trainer.placement.{shared[0]}=true has them; use gloo or filesystem",
        )


def _is_default(engine: InferenceEngineConfig, name: str) -> bool:
    return getattr(engine, name) == next(field.default for field in fields(engine) if field.name == name)


def gpus_of_nodes(config: ConfigTree) -> Iterator[Problem]:
    gpus, ranks = config.slurm.gpus, config.trainer.placement.policy_num_gpus_per_node
    if gpus <= 0:
        return
    parallel, replicas = config.generator.inference_engine.gpus, config.slurm.replicas_per_node
    has = f"but a node has {gpus} GPUs (slurm.gpus_per_node)"
    if ranks > gpus:
        yield Problem("trainer.placement.policy_num_gpus_per_node", f"{ranks} ranks need a GPU each, {has}")
    elif config.trainer.has_own_critic and (of_critic := config.trainer.placement.critic_nodes[1]) > gpus:
        yield Problem("trainer.placement.critic_num_gpus_per_node", f"{of_critic} ranks need a GPU each, {has}")
    if config.generator.inference_engine.remote_urls:
        return
    if parallel > gpus:
        yield from _engines_on_several_nodes(config, has)
    elif replicas is not None and parallel >= 1 and config.replicas_per_node * parallel > gpus:
        yield Problem("slurm.replicas_per_node", f"{replicas} replicas need {replicas * parallel} GPUs, {has}")


def _engines_on_several_nodes(config: ConfigTree, has: str) -> Iterator[Problem]:
    path = "generator.inference_engine"
    engine, gpus = config.generator.inference_engine, config.slurm.gpus
    copy = engine.tensor_parallel_size * engine.pipeline_parallel_size
    several = "multi_node" in backend_of(engine).brings
    if not several or engine.gpus % gpus or (copy % gpus and gpus % copy):
        where = (
            "on several nodes it has all GPUs of each, and on each as much of a copy of the weights, or as many of them"
            if several
            else f'with {path}.backend="{engine.backend}" it is on one node'
        )
        yield Problem(
            f"{path}.tensor_parallel_size",
            f"a replica needs {engine.gpus} GPUs (times pipeline_parallel_size and data_parallel_size), {has}; {where}",
        )
    for name, found in (
        ("slurm.elastic.replicas", config.slurm.elastic.replicas),
        ("slurm.replicas_per_node", config.slurm.replicas_per_node),
        ("generator.inference_engine.weight_copy_dir", config.generator.inference_engine.weight_copy_dir),
    ):
        if found:
            yield Problem(
                name,
                f"does not work where a replica is on several nodes: it needs {engine.gpus} GPUs, {has}; leave it out",
            )


def enough_replicas(config: ConfigTree) -> Iterator[Problem]:
    if not config.has_engines:
        return
    least, most = config.slurm.min_replicas, config.max_replicas - config.slurm.eval_replicas
    engines = "generator.inference_engine.num_engines"
    if config.max_replicas < 1:
        yield Problem(engines, "expected at least 1, or replicas of an elastic pool (slurm.elastic.replicas), found 0")
    elif least > most and not list(eval_replicas(config)):
        yield Problem(
            "slurm.min_replicas",
            f"expected at most {most}, {engines} and slurm.elastic.replicas together without slurm.eval_replicas, found {least}",
        )


def eval_replicas(config: ConfigTree) -> Iterator[Problem]:
    path, own, engines = (
        "slurm.eval_replicas",
        config.slurm.eval_replicas,
        config.generator.inference_engine.engines,
    )
    if not own:
        return
    if config.trainer.placement.colocate_all:
        yield Problem(
            path, "has no effect with trainer.placement.colocate_all, where all evaluate in turns; leave it out"
        )
    elif not config.has_engines or config.trainer.eval_interval <= 0:
        yield Problem(
            path, "has no effect where no policy is evaluated while it trains (trainer.eval_interval); leave it out"
        )
    elif own >= engines:
        yield Problem(
            path,
            f"expected fewer than generator.inference_engine.num_engines ({engines}), the others of which generate, found {own}",
        )


def evaluation_job(config: ConfigTree) -> Iterator[Problem]:
    """Refuse evaluation by a job where it has no effect, or where its engine could not have the versions or the rewards."""
    path, asked = "slurm.evaluation", config.slurm.evaluation
    if asked.when == "never":
        return
    if not config.has_engines or config.trainer.eval_interval <= 0:
        yield Problem(
            f"{path}.when",
            "has no effect where no policy is evaluated while it trains (trainer.eval_interval); leave it out",
        )
    others = {
        "slurm.eval_replicas": config.slurm.eval_replicas,
        "generator.inference_engine.remote_urls": config.generator.inference_engine.remote_urls,
        "environment.remote_reward.service.model": config.reward_services,
        "a replica on several nodes (generator.inference_engine.tensor_parallel_size)": config.engine_nodes > 1,
    }
    for name, found in others.items():
        if found:
            yield Problem(f"{path}.when", f'does not go together with {name}; set one of them, or "never"')
    limit, least = asked.time_minutes, asked.time_min_minutes
    if least is not None and least > limit:
        yield Problem(f"{path}.time_min_minutes", f"expected at most {path}.time_minutes ({limit}), found {least}")
    if 60 * (least or limit) < 2 * config.slurm.signal_seconds:
        yield Problem(
            f"{path}.time_minutes",
            f"expected at least twice slurm.signal_seconds ({config.slurm.signal_seconds}), found {least or limit} minutes",
        )


def sandboxes(config: ConfigTree) -> Iterator[Problem]:
    """Refuse sandboxes where no environment could start one, or no node has them."""
    path, asked = "slurm.sandboxes", config.slurm.sandboxes
    if config.sandbox_servers == 0:
        if config.environment.env_class == _SANDBOX and config.has_engines:
            yield Problem(
                f"{path}.nodes", f"expected at least 1, or {path}.per_rollout_node, with environment {_SANDBOX}"
            )
        return
    first = f"{path}.{'nodes' if asked.nodes else 'per_rollout_node'}"
    if not config.has_engines:
        yield Problem(first, "has no effect where nothing is generated; leave it out")
    elif asked.per_rollout_node and config.generator.inference_engine.remote_urls:
        yield Problem(
            f"{path}.per_rollout_node",
            f"a run has no rollout nodes with generator.inference_engine.remote_urls; set {path}.nodes",
        )


def sbatch_options(config: ConfigTree) -> Iterator[Problem]:
    slurm = config.slurm
    for section, asked, owned in (
        ("slurm", slurm, _SBATCH_OWN | ({"dependency"} if slurm.requests else set())),
        *((path, asked, {*_SBATCH_OWN, "dependency"}) for path, asked in _requests(slurm).items()),
        *((path, asked, {*_SBATCH_OWN, "dependency", "gpus_per_node"}) for path, asked in _pools(slurm).items()),
        ("slurm.upload", slurm.upload, {*_SBATCH_OWN, "dependency"}),
        ("slurm.evaluation", slurm.evaluation, {*_SBATCH_OWN, "dependency", "gpus_per_node"}),
        ("slurm.sandboxes", slurm.sandboxes, {*_SBATCH_OWN, "dependency"}),
    ):
        for name in asked.extra:
            own = _SBATCH_NAMES.get(name.replace("-", "_"), "")
            if hasattr(asked, own):
                yield Problem(f"{section}.extra.{name}", f"set {section}.{own} instead")
            elif section.startswith("slurm.requests.") and own:
                yield Problem(f"{section}.extra.{name}", f"set slurm.{own}, which holds for all requests, instead")
            elif name.replace("-", "_") in owned:
                yield Problem(f"{section}.extra.{name}", "hpcrl sets this option of sbatch itself; leave it out")


def shared_secrets(config: ConfigTree) -> Iterator[Problem]:
    """Refuse a secret in a line of a run that a group may read: config.toml and the batch script hold the line."""
    slurm = config.slurm
    if slurm.readable_by is None:
        return
    jobs = {
        "slurm.upload": slurm.upload,
        "slurm.evaluation": slurm.evaluation,
        "slurm.sandboxes": slurm.sandboxes,
    }
    sections = {"slurm": slurm, **jobs, **_pools(slurm), **_requests(slurm)}
    lines = [("slurm.setup", line) for line in slurm.setup]
    lines += [("slurm.container.arguments", word) for word in slurm.container.arguments]
    lines += [
        (f"{path}.extra.{name}", str(value)) for path, one in sections.items() for name, value in one.extra.items()
    ]
    for setting, line in lines:
        if found := name_of_secret(line):
            yield Problem(
                setting,
                f"{found} would be read by the group of slurm.readable_by; write it into a file of mode 600, and "
                f'"export {found}=$(cat FILE)" in slurm.setup',
            )


def requests(config: ConfigTree) -> Iterator[Problem]:
    slurm = config.slurm
    for name, one in slurm.requests.items():
        path = f"slurm.requests.{name}"
        if not _REQUEST.fullmatch(name):
            yield Problem(path, f"expected a name of at most 32 letters, digits, - and _, found {name!r:.80}")
        elif (slurm.asked_by(name).gpus > 0) != (slurm.gpus > 0):
            has = f"{slurm.gpus} GPUs" if slurm.gpus else "none"
            yield Problem(
                f"{path}.gpus_per_node",
                f"a run computes on GPUs in all of its requests or in none; slurm.gpus_per_node has {has}, found {one.gpus_per_node!r}",
            )


def _requests(slurm: SlurmConfig) -> Mapping[str, RequestConfig]:
    return {f"slurm.requests.{name}": one for name, one in slurm.requests.items()}


def _pools(slurm: SlurmConfig) -> Mapping[str, ElasticConfig]:
    scorers = slurm.elastic_scorers
    return {"slurm.elastic": slurm.elastic} | {
        f"slurm.elastic_scorers.{one.name}": getattr(scorers, one.name) for one in fields(scorers)
    }


def container(config: ConfigTree) -> Iterator[Problem]:
    container = config.slurm.container
    if container.kind != "none" and config.slurm.python is not None:
        yield Problem(
            "slurm.python", f"leave it out: slurm.container.kind is {container.kind}; set slurm.container.python"
        )
    if container.kind == "none" and container.image:
        yield Problem("slurm.container.kind", 'set it to "apptainer" or "pyxis", or leave out slurm.container.image')
    elif container.kind != "none" and not container.image:
        yield Problem("slurm.container.image", f"set it: slurm.container.kind is {container.kind}")
    yield from mount_problems("slurm.container.mounts", container.mounts, enroot=container.kind == "pyxis")
    for name in PYXIS_LISTS if container.kind == "pyxis" else ():
        if name in container.arguments:
            yield Problem(
                "slurm.container.arguments", f"write {name}=VALUE as one word, which hpcrl joins with its own"
            )


def mount_problems(setting: str, mounts: Sequence[str], *, enroot: bool) -> Iterator[Problem]:
    """Yield the problems of mounts of a container, which Enroot starts or another program."""
    for mount in mounts:
        if not mount.startswith("/") or "," in mount or mount.count(":") > 2:
            expected = "expected SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro with absolute paths without commas"
            yield Problem(setting, f"{expected}, found {mount!r}")
        elif enroot and set(mount) & set(" \t"):
            yield Problem(setting, f"expected paths without blanks, which Enroot does not mount, found {mount!r}")


def counted_gpus(config: ConfigTree) -> Iterator[Problem]:
    slurm = config.slurm
    if slurm.gpu_option == "none" and slurm.gpus > 0 and not slurm.whole_nodes:
        yield Problem("slurm.gpu_option", 'with "none" a run needs whole nodes: set slurm.exclusive=true')


def time_to_save(config: ConfigTree) -> Iterator[Problem]:
    slurm, signal = config.slurm, config.slurm.signal_seconds
    asked = {"slurm": slurm}
    if slurm.requests:  # one without a time limit of its own has the section's
        sections = {
            name: "slurm" if one.time_minutes is None else f"slurm.requests.{name}"
            for name, one in slurm.requests.items()
        }
        asked = {section: slurm.asked_by(name) for name, section in sections.items()}
    for path, one in asked.items():
        least = one.time_min_minutes
        name = f"{path}.time_minutes" if least is None else "slurm.time_min_minutes"
        limit = 60 * (one.time_minutes if least is None else least)
        if 300 <= limit < 2 * signal:
            yield Problem(
                "slurm.signal_seconds",
                f"expected at most half of {name} ({limit // 2} s), found {signal}: a run would be stopped before it has "
                "done anything",
            )
        if least is not None and least > one.time_minutes:
            yield Problem(
                "slurm.time_min_minutes", f"expected at most {path}.time_minutes ({one.time_minutes}), found {least}"
            )
