"""vLLM's own tokenizer, which finds stop texts: one whose files name another class than tokenizer.json is for."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hpcrl.config import SamplingParams
from hpcrl.data.tokenizer import read_tokenizer
from hpcrl.engines.vllm.client import EngineClient
from hpcrl.engines.vllm.tokenizer import tokenizer_option
from hpcrl.rollout.engines.base import Generation, engine_sampling
from hpcrl.runtime.token import bearer
from tests.data.chat.forms import CHATML, made, write_model
from tests.rollout.material import MAX_MODEL_LEN, RUN_NAME, TOKEN, options, served

LENGTH = 40


def write_misnamed(folder: Path) -> Path:
    """Write a tokenizer as R1-Distill-Llama's, which transformers loads with another pre-tokenizer and decoder, so that all spaces are lost."""
    model = write_model(folder, made("bytes", CHATML, "<|im_end|>"))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "LlamaTokenizerFast"}))
    return model


def test_the_server_is_given_a_tokenizer_that_keeps_spaces(tmp_path: Path) -> None:
    model = write_misnamed(tmp_path / "model")
    name, written = tokenizer_option(["--model", str(model)], tmp_path / "tokenizer")
    right, wrong = (AutoTokenizer.from_pretrained(path) for path in (written, model))
    assert name == "--tokenizer"
    ids = right.encode("What is")
    assert ids == read_tokenizer(str(model)).encode("What is")
    assert (right.decode(ids), wrong.decode(ids) == "What is") == ("What is", False)
    assert tokenizer_option(["--model", written], tmp_path / "again") == []


@pytest.mark.faults_slow
def test_a_stop_text_with_a_space_ends_a_response(token_file: Path, tmp_path: Path) -> None:
    model = write_misnamed(tmp_path / "model")
    tokenizer = read_tokenizer(str(model))
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=MAX_MODEL_LEN,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(model)
    wrong = AutoTokenizer.from_pretrained(model)
    prompt = tokenizer.encode("What is", add_special_tokens=False)
    spaces = [token for text, token in tokenizer.get_vocab().items() if text.startswith("Ġ") and len(text) > 3]

    async def say(engine: EngineClient, *stop: str) -> Generation:
        kwargs = {"allowed_token_ids": spaces}
        params = SamplingParams(
            temperature=0.0, stop=list(stop) or None, max_generate_length=LENGTH, additional_kwargs=kwargs
        )
        (said,) = await engine.generate(prompt, 1, 7, engine_sampling(params, "train", LENGTH))
        return said

    async def play(socket: Path) -> tuple[str, Generation]:
        engine = EngineClient(socket, bearer(TOKEN, RUN_NAME))
        try:
            text = str(tokenizer.decode((await say(engine)).token_ids))
            stop = text[: text.index(" ", 2) + 3]
            assert stop not in str(wrong.decode(tokenizer.encode(stop, add_special_tokens=False)))
            return stop, await say(engine, stop)
        finally:
            await engine.close()

    with served(options(str(model), token_file), tmp_path / "engine.log") as server:
        stop, said = asyncio.run(play(server.socket))
    assert said.stop_reason == "stop"
    assert len(said.token_ids) < LENGTH
    assert str(tokenizer.decode(said.token_ids)).startswith(stop)
