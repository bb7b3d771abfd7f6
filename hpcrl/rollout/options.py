"""What the configuration asks of a vLLM server."""

from __future__ import annotations

from hpcrl.config import Config, engine_rope, eval_sampling
from hpcrl.config.derive import max_input_length, model_config_kwargs
from hpcrl.rollout.server import ServerOptions
from hpcrl.run.layout import Run


def server_options(run: Run, config: Config) -> ServerOptions:
    generator, (rope_scaling, rope_theta) = config.generator, engine_rope(config)
    longest = max(generator.sampling_params.max_generate_length, eval_sampling(generator).max_generate_length)
    return ServerOptions(
        model=config.trainer.policy.model.path,
        engine=generator.inference_engine,
        seed=config.trainer.seed if generator.inference_engine.seed is None else generator.inference_engine.seed,
        max_model_len=max_input_length(generator, config.trainer) + longest,
        on_cpu=config.slurm.gpus_per_node == 0,
        run_name=run.name,
        token_file=run.token,
        model_config_kwargs=model_config_kwargs(config.trainer.policy),
        rope_scaling=rope_scaling,
        rope_theta=rope_theta,
    )
