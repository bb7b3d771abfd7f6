"""Section `generator`: the inference engines and how they sample."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from hpcrl.config.conditions import ENGINES, RL
from hpcrl.config.effects import ENDS_A_RUN, OBJECTIVE, OTHER_FUNCTION, OTHER_GROUPS, OTHER_TOKENS, SAMPLING, SCORES
from hpcrl.config.fields import Location
from hpcrl.config.setting import (
    ALL_OR_COUNT,
    COUNT,
    FINITE,
    NOT_EMPTY,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    SHARE_ABOVE_0,
    Effect,
    Range,
    section,
    setting,
    when,
)
from hpcrl.config.sizes import NUM_ENGINES, SIZE, one_size

NODE = "node"
"""The endpoint listens at the address of its node."""

MOST_KEPT = 256
"""The largest sampling mask: each of its tokens is 4 bytes in the sample's file, and much more in the engine's answer."""


_ADAPTERS = when("trainer.policy.model.lora.rank")
_LOADED_ADAPTERS = when(
    "trainer.policy.model.lora.loadable",
    needs="adapters that engines load: no modules_to_save or target_parameters, and no init_method that changes the weights (olora, pissa)",
)


WITH_MODEL = ("draft_model", "eagle", "eagle3")
"""Methods of speculative decoding whose drafts are another model's."""
_DRAFTS = when(".method")


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    method: Literal["ngram", "draft_model", "eagle", "eagle3", "mtp"] | None = None
    """Speculative decoding: where the engine's draft tokens come from, which one pass of the policy verifies together. ngram: what followed the last tokens before, in prompt or response. draft_model: a smaller model with the policy's vocabulary. eagle, eagle3: a head that was trained for the policy. mtp: the policy's own heads for several tokens. The weights of drafts stay as they are; the distribution of samples stays the policy's. Unset: none."""

    num_speculative_tokens: int = setting(4, range=COUNT, used_by=_DRAFTS)
    """Draft tokens per pass."""

    model: Location | None = setting(None, used_by=when(".method", *WITH_MODEL))
    """Model of the drafts, as a directory or a name on the hub."""

    prompt_lookup_min: int = setting(2, range=COUNT, used_by=when(".method", "ngram"))
    """Tokens at the end of the text that must have occurred before, at least. vLLM's own 5 finds little in short prompts."""

    prompt_lookup_max: int = setting(4, range=COUNT, used_by=when(".method", "ngram"))
    """Tokens at the end of the text that are looked for first; then fewer."""

    @property
    def options(self) -> dict[str, Any] | None:
        """vLLM's option speculative_config; None without drafts."""
        if self.method is None:
            return None
        lookup = {"prompt_lookup_min": self.prompt_lookup_min, "prompt_lookup_max": self.prompt_lookup_max}
        own = lookup if self.method == "ngram" else {"model": self.model} if self.method in WITH_MODEL else {}
        return {"method": self.method, "num_speculative_tokens": self.num_speculative_tokens, **own}


@dataclass(frozen=True, kw_only=True)
class InferenceEngineConfig:
    backend: str = "vllm"
    """The engine. vllm: a server process. transformers: in the rollout worker's process, for trials, for machines without vLLM and for models
    that vLLM does not support. diffusers: in that process too, for diffusion pipelines. Other packages add names of their own."""

    model_dtype: Literal["bfloat16", "float16", "float32"] = setting("bfloat16", on_change=SAMPLING)
    """Number type of weights and activations in the engine; weights are cast to it on arrival."""

    quantization: Literal["fp8", "fp8_per_channel", "fp8_per_block", "mxfp8", "mxfp4"] | None = setting(
        None, on_change=SAMPLING
    )
    """Quantize weights when they arrive, which come in model_dtype; vLLM's names, fp8 has one scale for each weight. Unset: do not."""

    num_engines: int | str = setting(1, range=NOT_NEGATIVE, check=SIZE)
    """Replicas that generate; or a range, "2-16", of which each attempt takes as many as Slurm gives it nodes for."""

    tensor_parallel_size: int = setting(1, range=COUNT)
    """GPUs that share one replica's weights."""

    pipeline_parallel_size: int = setting(1, range=COUNT)
    """Groups of GPUs that share one replica's layers."""

    data_parallel_size: int = setting(1, range=COUNT)
    """Copies of a replica's weights, each of which computes other requests on GPUs of its own; of a mixture's experts there is one copy,
    split over all of them."""

    expert_parallel_size: int = setting(1, range=COUNT)
    """GPUs that have a replica's experts, whole ones each; 1 or data_parallel_size * tensor_parallel_size. 1: each has a part of every
    expert."""

    seed: int | None = setting(None, range=NOT_NEGATIVE, on_change=SAMPLING)
    """Seed of what is sampled, in training and evaluation; unset: trainer.seed. Each sample has a seed of its own, made from it."""

    weight_sync_backend: Literal["filesystem", "nccl", "gloo"] = setting(
        "filesystem", why="every replica can read files, also one that starts later or on another partition"
    )
    """How new weights reach the nodes of the engines: as files that they read, or over NCCL or gloo from the memory of the trainer's ranks.
    Each rank sends its part. The files are written in any case, and read by nodes that the transfer does not reach. Needs
    weight_copy_dir."""

    weight_sync_timeout_seconds: float = setting(30.0, range=POSITIVE)
    """With nccl or gloo, how long one stage may take: to meet, to move 64 MiB, to end. Then the node reads the files."""

    full_weights_interval: int = setting(1, range=COUNT)
    """Versions from one that is published whole to the next. Those between hold only the exact changes since the version before: with small
    learning rates in bfloat16 a small part. Above 1 it needs weight_copy_dir, and the memory of one version on the trainer's nodes."""

    weight_copy_dir: str | None = None
    """Directory on each node's own disk, or below /dev/shm, for copies of the weights. The first of a run's replicas on a node copies each
    version, and all of them load the copy: for shared filesystems whose page cache processes do not share. It takes the room of two versions;
    environment variables, such as $TMPDIR, are the node's; in a container it is below /tmp or /dev/shm, or one of slurm.container.mounts.
    Unset: no copies; engines read the run directory."""

    enable_prefix_caching: bool = True
    """Reuse the key-value cache of equal prompt beginnings under the same weights."""

    enable_chunked_prefill: bool = True
    """Let long prompts share a batch with decoding, in parts. Has no effect on a processor, where prompts are read whole."""

    max_num_batched_tokens: int = setting(8192, range=COUNT)
    """Tokens per forward pass of the engine; where prompts are read whole, raised to the longest prompt and response together."""

    speculative: SpeculativeConfig = section(SpeculativeConfig)

    enforce_eager: bool | None = setting(
        None, why="unset: CUDA graphs wherever there are GPUs, without which decoding waits for kernel launches"
    )
    """Run without compiled code and CUDA graphs: faster start, slower generation; unset: only without GPUs."""

    keep_cache_on_update: bool = False
    """Keep the key-value caches of running requests when new weights arrive, instead of computing them again. This saves time,
    but is biased: later tokens are sampled with keys and values of older weights, thus by no version of the policy. The trainer's
    probabilities for them are of another distribution than the engine's."""

    merge_lora: bool = setting(
        False,
        used_by=_ADAPTERS,
        on_change=Effect("refused", "a step that was begun would go on with weights of the other kind"),
    )
    """Give engines the policy with its adapters merged into it, instead of the adapters. This costs as many bytes as without LoRA and a pause
    for each version, but saves the adapters' computation for each token, and works with any model of the engine."""

    fully_sharded_loras: bool = setting(False, used_by=(_ADAPTERS, when(".merge_lora", False), _LOADED_ADAPTERS))
    """Split both matrices of adapters over the GPUs of a replica, and not one of them alone; faster with large ranks or many GPUs."""

    use_flashinfer: bool = False
    """Use FlashInfer for attention; needs GPUs with vLLM's FlashInfer. Otherwise vLLM chooses."""

    gpu_memory_utilization: float | None = setting(
        None,
        range=SHARE_ABOVE_0,
        why="unset: 0.9 where nothing but engines is on the GPU, of which SkyRL's 0.8 would leave a fifth empty",
    )
    """Share of a GPU's memory that the engine may use; no effect on CPU. Unset: 0.9, and 0.8 where the trainer shares the GPU
    (trainer.placement.colocate_all, lend)."""

    max_num_seqs: int = setting(1024, range=COUNT)
    """Sequences that the engine decodes together."""

    enable_http_endpoint: bool = False
    """Let environments call the policy themselves, as env_class = "agent" does. Each rollout worker serves OpenAI's protocol, with a key for each sample, and keeps the tokens of its answers for training."""

    http_endpoint_host: str = setting("127.0.0.1", used_by=when(".enable_http_endpoint", True))
    """Address on the node of each replica at which the endpoint listens; agents must reach it. node: the address of the run's other servers (slurm.network_interface), for agents on other nodes."""

    http_endpoint_port: int | None = setting(
        None,
        range=Range(1, 65535),
        used_by=when(".enable_http_endpoint", True),
        why="unset: each replica finds a free port, also beside others on its node",
    )
    """Port of the first replica; each further one has the next. Unset: each finds a free one."""

    served_model_name: str | None = setting(None, used_by=when(".enable_http_endpoint", True))
    """Name of the policy in requests; unset: trainer.policy.model.path."""

    engine_init_kwargs: dict[str, Any] = setting({}, on_change=SAMPLING)
    """Further options of the vLLM server, by their names there."""

    remote_urls: list[str] = setting([])
    """Addresses, such as https://host:8000, of engines that somebody else started with `hpcrl engine`, one for each of num_engines: the run
    starts none, and its rollout workers are on the trainer's nodes. `hpcrl eval` takes any vLLM server with the right model. Empty: the run
    starts its engines."""

    remote_key_file: Location | None = None
    """File with the key that they want, which this user alone may read; unset: they want none, as only `hpcrl eval` may ask."""

    remote_ca_file: Location | None = None
    """File of certificates, in PEM, with which those of https addresses are signed; unset: those that the machine trusts."""

    probe_tolerance: float | None = setting(None, range=POSITIVE)
    """Largest mean absolute difference between the engine's and the trainer's log-probabilities of a few probe tokens, which the trainer
    publishes with each version of the weights. A larger one ends the replica. Unset: 0.3 where trainer or engine compute in bfloat16, 0.1 with float16,
    0.01 with float32."""

    start_timeout_seconds: int = setting(1800, range=COUNT)
    """How long an engine may take until it answers, and later to take in new weights; then it counts as failed."""

    stall_timeout_seconds: int = setting(300, range=COUNT)
    """How long an engine may leave requests waiting without generating a token; then it counts as failed. Longer than the longest
    prefill takes."""

    @property
    def engines(self) -> int:
        """Replicas that start with an attempt, in one layout. Raises ConfigError where they are a range."""
        return one_size(NUM_ENGINES, self.num_engines)

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    def runs_eagerly(self, *, on_cpu: bool) -> bool:
        """Return whether engines run without compiled code and CUDA graphs; where it is not set: if there is no GPU."""
        return on_cpu if self.enforce_eager is None else self.enforce_eager


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    max_generate_length: int = setting(1024, range=COUNT)
    """Tokens per response at most, in each turn."""

    temperature: float = setting(
        1.0,
        range=Range(
            0,
            low_open=True,
            at_low="0 makes all samples of a group equal, so that there is nothing to learn from; expected more than 0",
        ),
    )
    """Divides the logits before sampling; 0: greedy."""

    top_p: float = setting(1.0, range=SHARE_ABOVE_0)
    """Sample among the most probable tokens that together reach this probability."""

    top_k: int = setting(-1, check=ALL_OR_COUNT)
    """Sample among this many most probable tokens; -1: all."""

    min_p: float = setting(0.0, range=SHARE)
    """Drop tokens less probable than this share of the most probable one."""

    repetition_penalty: float = setting(1.0, range=POSITIVE)
    """Above 1: tokens that already occurred become less probable."""

    stop: list[str] | None = setting(None, check=NOT_EMPTY)
    """Texts that end a response; unset: none beside the end-of-sequence tokens."""

    include_stop_str_in_output: bool = True
    """The environment sees that text at the end of the response; the sample keeps its tokens either way."""

    additional_kwargs: dict[str, Any] = setting({}, why="an empty table means what SkyRL's null means")
    """Further sampling parameters of vLLM, by their names there; those that hpcrl sets are refused."""

    @property
    def mask_size(self) -> int:
        """How many tokens each token is sampled among at most, where sampling leaves tokens out; 0: it leaves none out."""
        return max(0, self.top_k)


_AS_TRAINING = "unset: as in training; SkyRL uses fixed values as soon as one setting of the section is given"


@dataclass(frozen=True, kw_only=True)
class EvalSamplingParams:
    max_generate_length: int | None = setting(None, range=COUNT, why=_AS_TRAINING)
    """Tokens per response at most, in each turn; unset: as in training."""

    temperature: float | None = setting(None, range=NOT_NEGATIVE, why=_AS_TRAINING)
    """Divides the logits before sampling, 0: greedy; unset: as in training, or 0 where nothing of this section is set."""

    top_p: float | None = setting(None, range=SHARE_ABOVE_0, why=_AS_TRAINING)
    """Sample among the most probable tokens that together reach this probability; unset: as in training."""

    top_k: int | None = setting(None, check=ALL_OR_COUNT, why=_AS_TRAINING)
    """Sample among this many most probable tokens, -1: all; unset: as in training."""

    min_p: float | None = setting(None, range=SHARE, why=_AS_TRAINING)
    """Drop tokens less probable than this share of the most probable one; unset: as in training."""

    repetition_penalty: float | None = setting(None, range=POSITIVE, why=_AS_TRAINING)
    """Above 1: tokens that already occurred become less probable; unset: as in training."""

    stop: list[str] | None = setting(None, check=NOT_EMPTY)
    """Texts that end a response; unset: as in training."""

    include_stop_str_in_output: bool | None = None
    """The environment sees that text at the end of the response; unset: as in training."""

    additional_kwargs: dict[str, Any] | None = None
    """Further sampling parameters of vLLM, by their names there; unset: as in training."""


@dataclass(frozen=True, kw_only=True)
class ChatTemplateConfig:
    source: Literal["name", "file"] = "name"
    """What name_or_path is: a template that comes with hpcrl, or a Jinja file."""

    name_or_path: Location | None = None
    """Chat template instead of the tokenizer's own: a file of at most 1 MiB, or a name. qwen3_with_thinking is ChatML;
    qwen3_without_thinking is the same without the thoughts of all but the assistant's last turn."""

    allow_special_tokens: bool = False
    """Whether special tokens (<|im_end|>, <s>, …) that are written in messages, of datasets and of environments, become those tokens; false: they are text like any other."""


@dataclass(frozen=True, kw_only=True)
class GeneratorConfig:
    inference_engine: InferenceEngineConfig = section(
        InferenceEngineConfig,
        on_change=Effect("harmless", "it concerns the engines, which start again in each attempt"),
    )

    n_samples_per_prompt: int = setting(5, range=COUNT, used_by=RL, on_change=OTHER_GROUPS)
    """Samples per group in training."""

    eval_n_samples_per_prompt: int = setting(1, range=COUNT, used_by=ENGINES, on_change=SCORES)
    """Samples per prompt in evaluation; the k of pass@k."""

    success_reward: float = setting(1.0, range=FINITE, used_by=ENGINES, on_change=SCORES)
    """Reward from which on a sample has solved its prompt, in pass@k of training and evaluation; an environment's metric `success`, where it reports one, decides instead."""

    max_turns: int = setting(1, range=COUNT, used_by=ENGINES, on_change=SAMPLING)
    """Actions of the policy per sample at most."""

    max_input_length: int | None = setting(None, range=COUNT, on_change=SAMPLING)
    """Tokens of everything before a turn at most, at which a sample ends; unset: trainer.max_prompt_length."""

    chat_template: ChatTemplateConfig = section(ChatTemplateConfig, on_change=OTHER_TOKENS)

    chat_template_kwargs: dict[str, Any] = setting({}, on_change=OTHER_TOKENS)
    """Further arguments of the chat template, such as enable_thinking."""

    sampling_params: SamplingParams = section(SamplingParams, used_by=ENGINES, on_change=SAMPLING)

    eval_sampling_params: EvalSamplingParams = section(EvalSamplingParams, used_by=ENGINES, on_change=SCORES)

    use_conversation_multi_turn: bool = setting(True, on_change=SAMPLING)
    """Each turn is a chat message of its own; otherwise all are one message of the assistant, in which observations are plain text."""

    append_eos_token_after_stop_str_in_multi_turn: bool = setting(True, on_change=SAMPLING)
    """End a turn as the chat template does, with tokens that are not trained, where a stop text, the length or the environment ended it. The last turn stays as it is."""

    step_wise_trajectories: bool = setting(False, used_by=RL, on_change=OTHER_GROUPS)
    """Train each turn on its own, after the conversation so far as the chat template renders it again. The reward of a sample is that of its last turn, and its advantage is that of all its turns, unless turns or roles are compared."""

    zero_reward_on_non_stop: bool = setting(False, on_change=OBJECTIVE)
    """Samples that neither an end token nor a stop text ended get reward 0, in evaluation too."""

    apply_overlong_filtering: bool = setting(False, on_change=OBJECTIVE)
    """Samples that neither an end token nor a stop text ended are left out of the loss; their rewards still count in the group."""

    max_logprob_mismatch: float = setting(0.3, range=POSITIVE, on_change=ENDS_A_RUN)
    """Largest mean absolute difference between the log-probabilities of engines and trainer, over tokens of the same version, before the first
    optimizer step of a batch."""

    on_logprob_mismatch: Literal["stop", "warn"] = setting("stop", on_change=ENDS_A_RUN)
    """What follows a larger difference, by which engine and trainer compute different models. stop: the run ends before it trains on
    that batch; warn: the trainer's log has a warning."""

    rope_scaling: dict[str, Any] = setting(
        {}, on_change=OTHER_FUNCTION, why="an empty table means what SkyRL's null means"
    )
    """Scaling of rotary positions in the engines; empty: trainer.rope_scaling."""

    rope_theta: float | None = setting(None, range=POSITIVE, on_change=OTHER_FUNCTION)
    """Base of rotary positions in the engines; unset: trainer.rope_theta."""

    @property
    def eval_sampling(self) -> SamplingParams:
        """Sampling of evaluations: as in training where it is not set, but greedy where nothing of it is set."""
        chosen = {name: value for name, value in vars(self.eval_sampling_params).items() if value is not None}
        return replace(self.sampling_params, **(chosen or {"temperature": 0.0}))
