"""Generates and scores samples with a real engine: the sections `generator` and `environment` alone, no trainer and no run.

python docs/config/generate_alone.py configs/quickstart/model
"""

import asyncio
import secrets
import sys
import tempfile
from pathlib import Path

from hpcrl.config.sections.environment import EnvironmentConfig
from hpcrl.config.sections.generator import GeneratorConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.config.validate import build
from hpcrl.data.tokenizer import load_tokenizer
from hpcrl.engines.vllm.client import EngineClient
from hpcrl.engines.vllm.server import Server, ServerOptions
from hpcrl.rollout.generate import GroupGenerator
from hpcrl.rollout.group import Group
from hpcrl.rundir.commit import write_text
from hpcrl.runtime.scratch import Scratch
from hpcrl.runtime.token import bearer
from hpcrl.types import Prompt, Work

NAME, TOKEN = "alone", secrets.token_hex()
GENERATOR = {
    "inference_engine": {"model_dtype": "float32", "max_num_seqs": 8, "max_num_batched_tokens": 256},
    "sampling_params": {"max_generate_length": 8},
}
LETTERS = Prompt(
    uid="0",
    messages=[{"role": "user", "content": "sort: gdbca"}],
    env_class="sort_letters",
    extras={"reward_spec": {"ground_truth": "abcdg"}},
)


async def generate(server: Server, model: str, config: GeneratorConfig) -> Group:
    engine = EngineClient(server.socket, bearer(TOKEN, NAME))
    try:
        tokenizer = load_tokenizer(Pretrained(model), config.chat_template)
        generator = GroupGenerator(engine, tokenizer, config, build(EnvironmentConfig, {}))
        return await generator.generate(Work("g0", "train", LETTERS, n_samples=4, seed=0))
    finally:
        await engine.close()


def main(model: str) -> None:
    config = build(GeneratorConfig, GENERATOR)
    scratch = Scratch("engine")
    with tempfile.TemporaryDirectory() as folder:
        token_file = Path(folder) / "token"
        write_text(token_file, TOKEN + "\n", mode=0o600)
        options = ServerOptions(
            model=Pretrained(model),
            engine=config.inference_engine,
            seed=0,
            max_model_len=32,
            on_cpu=True,
            run_name=NAME,
            token_file=token_file,
        )
        server = Server(options, scratch.path, Path(folder) / "engine.log")
        try:
            server.wait_ready(180.0)
            group = asyncio.run(generate(server, model, config))
        finally:
            server.stop()
            scratch.remove()
    for text, sample in zip(group.texts, group.samples, strict=True):
        print(f"reward {float(sample.rewards.sum()):.0f}  {len(sample.token_ids)} tokens  {text}")


if __name__ == "__main__":
    main(str(Path(sys.argv[1]).resolve()))
