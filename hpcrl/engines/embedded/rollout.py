"""Starts the embedded engine: loads the model and finds out how many rows it has room for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from hpcrl.config import Config, InferenceEngineConfig
from hpcrl.config.rules.determinism import has_bits_of_engine
from hpcrl.data.chat.ending import end_ids
from hpcrl.data.model_config import ConfiguredModel
from hpcrl.data.models.routers import ExpertRecorder, routers
from hpcrl.data.tokenizer import decoder, read_tokenizer
from hpcrl.engines.embedded.batch import DecodingBatch
from hpcrl.engines.embedded.compute import Compute, Limits
from hpcrl.engines.embedded.engine import EmbeddedEngine
from hpcrl.engines.embedded.model import load_model
from hpcrl.errors import EngineError
from hpcrl.rollout.engines.base import Engine, Launched
from hpcrl.rollout.engines.in_process import InProcess
from hpcrl.rollout.engines.launch import EnginePlace

_CPU_CACHE_BYTES = 1 << 30


def launch(config: Config, place: EnginePlace) -> Launched:
    return Embedded(embedded_options(config, place.replica))


@dataclass(frozen=True)
class EmbeddedOptions:
    """Options of one replica.

    Attributes:
        max_model_len: tokens of prompt and response together at most.
        on_cpu: whether it has no GPU.
        records_experts: whether it returns the experts of tokens.
        memory_share: of the GPU's memory, for model and caches.
        deterministic: a response has the same bits whatever else is generated, and by how many threads.
        in_blocks: and log-probabilities those of an FSDP2 trainer on CPUs.
    """

    model: ConfiguredModel
    engine: InferenceEngineConfig
    max_model_len: int
    on_cpu: bool
    records_experts: bool = False
    memory_share: float = 0.9
    deterministic: bool = False
    in_blocks: bool = False


class Embedded(InProcess[tuple[PreTrainedModel, Compute]]):
    """The embedded engine of this process."""

    def __init__(self, options: EmbeddedOptions) -> None:
        self._options = options
        super().__init__(f"the model at {options.model.path}")

    def connect(self, *, version: int = 0, replica: str = "") -> Engine:
        model, compute = self._loaded.result()
        compute.version = version
        keep = self._options.engine.keep_cache_on_update
        return EmbeddedEngine(model, compute, keep_cache=keep, replica=replica)

    def alive(self) -> bool:
        return super().alive() and self._loaded.result()[1].failure is None

    def failure(self, what: str) -> EngineError:
        _, compute = self._loaded.result()
        return EngineError(f"the inference engine {what}: {type(compute.failure).__name__}: {compute.failure}")

    def stop(self) -> None:
        if self.alive():
            self._loaded.result()[1].end()

    def _load(self) -> tuple[PreTrainedModel, Compute]:
        options, device = self._options, torch.device("cpu" if self._options.on_cpu else "cuda")
        if options.deterministic and options.on_cpu:
            torch.set_num_threads(1)  # how sums are divided among threads changes their last bits
        model = load_model(options.model, options.engine.model_dtype, device, in_blocks=options.in_blocks)
        tokenizer = read_tokenizer(options.model.path, **options.model.at_revision)
        # requests name those of the chat template too
        ends = sorted(end_ids(tokenizer, options.model, ()), key=lambda one: one != tokenizer.eos_token_id)
        if options.records_experts and not routers(model):
            raise EngineError(
                f"trainer.policy.experts.router_replay: {type(model).__name__} has no routers known to transformers"
            )
        recorder = ExpertRecorder(model) if options.records_experts else None
        batch = DecodingBatch(model, ends, decoder(tokenizer), options.engine.max_num_batched_tokens, recorder)
        most, alone = places(model, options.memory_share), options.deterministic
        limits = Limits(options.engine.max_num_seqs, most, options.max_model_len, alone=alone)
        return model, Compute(batch, limits)


def places(model: PreTrainedModel, share: float) -> int:
    """Return the tokens whose keys and values fit beside the model.

    Args:
        share: of a GPU's memory for model and caches together.
    """
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    of_a_token = 2 * config.num_hidden_layers * heads * width * model.dtype.itemsize
    room = _CPU_CACHE_BYTES
    if model.device.type == "cuda":
        _, total = torch.cuda.mem_get_info(model.device)
        room = int(total * share) - torch.cuda.memory_allocated(model.device)
    return max(1, room // of_a_token)


def embedded_options(config: Config, replica: int = 0) -> EmbeddedOptions:
    engine, (rope_scaling, rope_theta) = config.generator.inference_engine, config.engine_rope
    model = ConfiguredModel(
        **vars(config.trainer.policy.model.pretrained),
        role="trainer.policy",
        rope="generator",
        config_kwargs=config.trainer.policy.config_overrides,
        rope_scaling=rope_scaling,
        rope_theta=rope_theta,
    )
    replayed = config.trainer.policy.experts.router_replay != "none"
    on_cpu, share = config.slurm.gpus == 0, config.engine_memory_share(shared=config.shares_gpus(replica))
    return EmbeddedOptions(
        model,
        engine,
        config.max_model_len,
        on_cpu,
        replayed,
        share,
        deterministic=config.trainer.deterministic,
        in_blocks=on_cpu and has_bits_of_engine(config.trainer),
    )
