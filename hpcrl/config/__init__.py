"""The configuration of a run: TOML files to checked, frozen dataclasses, one module per section. Works without torch."""

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
from hpcrl.config.sections.placement import PlacementConfig
from hpcrl.config.sections.slurm import ElasticConfig, SlurmConfig
from hpcrl.config.sections.trainer import FullyAsyncConfig, TrainerConfig

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
    "make_config",
]
