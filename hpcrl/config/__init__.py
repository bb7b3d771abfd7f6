"""The configuration of a run: TOML files to checked, frozen dataclasses, one module per section. Works without torch."""

from hpcrl.config.derive import (
    engine_gpus,
    engine_rope,
    eval_sampling,
    max_replicas,
    max_seq_len,
    order_seed,
    replicas_per_node,
    sampling_seed,
    steps_per_epoch,
    temperature,
    total_steps,
    trainer_ranks,
    uses_reference,
)
from hpcrl.config.root import Config, make_config
from hpcrl.config.sections.algorithm import AlgorithmConfig
from hpcrl.config.sections.data import DataConfig
from hpcrl.config.sections.environment import EnvironmentConfig
from hpcrl.config.sections.generator import GeneratorConfig, InferenceEngineConfig, SamplingParams
from hpcrl.config.sections.model import (
    FSDPConfig,
    MixedPrecisionConfig,
    ModelConfig,
    OptimizerConfig,
    PolicyConfig,
    RefConfig,
    RefModelConfig,
)
from hpcrl.config.sections.slurm import ElasticConfig, SlurmConfig
from hpcrl.config.sections.trainer import FullyAsyncConfig, PlacementConfig, TrainerConfig

__all__ = [
    "AlgorithmConfig",
    "Config",
    "DataConfig",
    "ElasticConfig",
    "EnvironmentConfig",
    "FSDPConfig",
    "FullyAsyncConfig",
    "GeneratorConfig",
    "InferenceEngineConfig",
    "MixedPrecisionConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PlacementConfig",
    "PolicyConfig",
    "RefConfig",
    "RefModelConfig",
    "SamplingParams",
    "SlurmConfig",
    "TrainerConfig",
    "engine_gpus",
    "engine_rope",
    "eval_sampling",
    "make_config",
    "max_replicas",
    "max_seq_len",
    "order_seed",
    "replicas_per_node",
    "sampling_seed",
    "steps_per_epoch",
    "temperature",
    "total_steps",
    "trainer_ranks",
    "uses_reference",
]
