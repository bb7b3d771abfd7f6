"""Checks the policy's tokenizer and chat template on conversations and the first prompts, before submission."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from typing import NoReturn

from hpcrl.config import Config
from hpcrl.config.errors import Problem
from hpcrl.config.sections.generator import ChatTemplateConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.data.datasets import counted_prompts
from hpcrl.data.tokenizer import load_tokenizer, without_torch
from hpcrl.errors import ConfigError, DataError
from hpcrl.launch.doctor.tokenizer import TEMPLATE, TEXT_END, of_tokenizer
from hpcrl.launch.submit.models import folder_of
from hpcrl.types import Prompt

TRIED = 16
"""Rows of each dataset whose prompts are written with the chat template."""
_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
_SECONDS, _ROOM = 60, 4 << 30
_OF_ALL_RUNS = ("tokenizer", "end of a turn", TEXT_END)  # whether the rest matters shows in the rows, which are tried


def has_tokenizer(config: Config) -> bool:
    """Return whether the tokenizer of the policy lies on this machine, and transformers can load it."""
    folder = folder_of(config.trainer.policy.model.pretrained)
    return (
        folder is not None
        and any((folder / name).is_file() for name in _FILES)
        and find_spec("transformers") is not None
    )


@cache
def bomb(model: Pretrained) -> str:
    """Return why a tokenizer cannot be loaded here, after loading it in a process of its own: a tokenizer.json can take any time and memory.

    Errors of other kinds are found again, and explained, by whatever loads it.
    """
    with without_torch():
        import transformers  # noqa: F401  once, for this process too
    process = os.fork()
    if process == 0:
        _load(model)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if code == 0:
        return ""
    return (
        f"the tokenizer of {model} needs more than {_SECONDS} s of processor time, or {_ROOM >> 30} GiB, to read a few words, or panics. "
        "Take the tokenizer.json that its authors published"
    )


def _load(model: Pretrained) -> NoReturn:
    # a pool of a thread per core, each with an arena of malloc, takes the memory meant for the tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        from hpcrl.data.render_process import bound_memory  # imports Jinja, which a login node may lack

        null = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(null, stream)
        resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
        bound_memory(_ROOM)
        with without_torch():
            load_tokenizer(model, ChatTemplateConfig())
    finally:
        error = sys.exc_info()[1]  # an Exception comes again in the parent, and so do warnings; a panic of Rust is none
        os._exit(int(isinstance(error, MemoryError) or not isinstance(error, Exception | None)))


def check_tokenizer(config: Config) -> tuple[list[Problem], list[str]]:
    """Return problems that would end a run, and notes about files that disagree."""
    trainer, generator = config.trainer, config.generator
    of_answers = trainer.pairwise or trainer.unpaired
    chats = not trainer.offline or of_answers or config.data.format in ("conversations", "prompt_response")
    problems, warnings = list[Problem](), list[str]()
    try:
        for found in of_tokenizer(
            trainer.policy.model.pretrained, generator.chat_template, generator.chat_template_kwargs, chats=chats
        ):
            if found.level == "error":
                problems.append(Problem(TEMPLATE, f"{found.found}; {found.remedy}"))
            elif found.level == "warning" and found.subject in _OF_ALL_RUNS:
                warnings.append(f"{found.subject}: {found.found}; {found.remedy}")
    except (ConfigError, DataError) as error:
        setting, _, message = str(error).partition(": ")
        problems.append(Problem(setting, message))
    return problems, warnings


def check_prompts(config: Config, setting: str, path: str, prompts: Sequence[Prompt]) -> Iterator[Problem]:
    """Write the first prompts of a dataset as a run does; yield the first that it could not use."""
    try:
        count, _ = counted_prompts(config)
        for prompt in prompts[:TRIED]:
            count(prompt)
    except DataError as error:
        yield Problem(setting, f"{path}, {error}")
    except ConfigError:  # of the chat template, as of `check_tokenizer`
        return
