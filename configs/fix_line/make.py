"""Makes everything that configs/fix_line.toml starts from but its image: the tokenizer, the tiny start model and the two datasets.

    python configs/fix_line/make.py [FOLDER]

The task: a shell script of one line does not compute what the prompt asks for, `fix f.sh: times 4`. The policy looks at the file with
the tool `view`, and corrects the operator with the tool `edit`; tests run the script. The start model has been taught by a stubborn
teacher: six edits in ten write `+`, whatever the prompt asks for, and the others are right. So it knows the tools and has seen what words
are good for, but greedy decoding is stubborn too, and right for one word of three. Reinforcement learning, which sees nothing but the
results of tests, has to do better than the teacher.

FOLDER (default: this one) receives model/ and data/. Everything comes from fixed seeds on one thread: the data are
the same bytes each time, and on the same kind of machine the weights are too. Tokenizer and network are made as the quickstart's.
"""

from __future__ import annotations

import json
import random
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from hpcrl.envs.terminal.task import TaskTests, TerminalTask

OPERATORS = {"plus": "+", "minus": "-", "times": "*"}
NUMBERS = range(2, 10)
VALIDATION_NUMBERS = (3, 6)
IMAGE, DIRECTORY, FILE = "shell", "/repo", "f.sh"
LINE = "echo $(($1{operator}{number}))"
INPUTS = (5, 7)
STUBBORN = 0.6
SPACE = "Ġ"  # as a vocabulary of bytes writes it

_LINE_BEGIN, _LINE_END = LINE.split("{operator}{number}")
_CALL = '<tool_call>{"name": "'
VIEW = f'{_CALL}view", "arguments": {{"path": "{FILE}"}}}}</tool_call>'
EDIT, NEW, CLOSE = f'{_CALL}edit", "arguments": {{"path": "{FILE}", "old": "', '", "new": "', '"}}</tool_call>'
INSTRUCTION = f"fix {FILE}: "
PHRASES = (INSTRUCTION, *(f"{word} " for word in OPERATORS), f"1  {_LINE_BEGIN}", _LINE_END, VIEW, EDIT, NEW, CLOSE)
TEMPLATE = (
    "{% for message in messages %}<|{{ 'user' if message['role'] == 'tool' else message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

guess_number: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[1] / "guess_number" / "make.py"))
quickstart: dict[str, Any] = guess_number["quickstart"]


def make_tokenizer() -> Qwen2Tokenizer:
    """Return a tokenizer with one token per word, number, operator, part of a tool call, and chat marker."""
    characters = "".join([*map(str, NUMBERS), *OPERATORS.values(), SPACE])
    tokenizer = quickstart["make_tokenizer"](characters, PHRASES)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_row(word: str, number: int, wrong: str) -> dict[str, Any]:
    """Return the row of a script whose operator is `wrong` for the word."""
    right = OPERATORS[word]
    expected = {x: {"+": x + number, "-": x - number, "*": x * number}[right] for x in INPUTS}
    command = " && ".join(f'test "$(sh {FILE} {x})" = {value}' for x, value in expected.items())
    task = TerminalTask(
        name=f"{word}-{number}",
        prompt=f"{INSTRUCTION}{word} {number}",
        image=IMAGE,
        directory=DIRECTORY,
        files={f"{DIRECTORY}/{FILE}": f"{LINE.format(operator=wrong, number=number)}\n".encode()},
        tests=TaskTests(command, seconds=60.0, keep=(DIRECTORY,)),
    )
    return {"data_source": "fix_line", **task.row()}


def cases(numbers: Sequence[int]) -> list[tuple[str, int, str]]:
    """Return each word with each of the numbers and each wrong operator once."""
    return [
        (word, number, wrong)
        for number in numbers
        for word, right in OPERATORS.items()
        for wrong in OPERATORS.values()
        if wrong != right
    ]


def rows_of(numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Return the row of each case, in a drawn order."""
    found = [make_row(*case) for case in cases(numbers)]
    random.Random(1).shuffle(found)
    return found


def conversation(word: str, number: int, old: str, new: str) -> list[dict[str, str]]:
    """Return how a policy looks at a script and exchanges its operator `old` for `new`."""
    return [
        {"role": "user", "content": f"{INSTRUCTION}{word} {number}"},
        {"role": "assistant", "content": VIEW},
        {"role": "tool", "content": f"1  {LINE.format(operator=old, number=number)}"},
        {"role": "assistant", "content": f"{EDIT}{old}{NEW}{new}{CLOSE}"},
    ]


def conversations() -> list[list[dict[str, str]]]:
    """Return what the start model is taught."""
    source, found = random.Random(3), list[list[dict[str, str]]]()
    for _ in range(guess_number["CONVERSATIONS"]):
        word, number = source.choice(list(OPERATORS)), source.choice(NUMBERS)
        right = OPERATORS[word]
        old = source.choice([one for one in OPERATORS.values() if one != right])
        new = "+" if source.random() < STUBBORN else right
        found.append(conversation(word, number, old, new))
    return found


@torch.no_grad()
def score(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer) -> float:
    """Return the share of the validation rows that greedy decoding corrects."""
    right = [conversation(word, number, old, OPERATORS[word]) for word, number, old in cases(VALIDATION_NUMBERS)]
    solved = 0
    for chat in right:
        begun: list[dict[str, str]] = []
        for message in chat:
            if message["role"] != "assistant":
                begun.append(message)
                continue
            ids = tokenizer.apply_chat_template(
                begun, add_generation_prompt=True, return_tensors="pt", return_dict=False
            )
            written = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
            begun.append({"role": "assistant", "content": tokenizer.decode(written, skip_special_tokens=True)})
        solved += begun == chat
    return solved / len(right)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train = [number for number in NUMBERS if number not in VALIDATION_NUMBERS]
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for name, numbers in (("train", train), ("validation", VALIDATION_NUMBERS)):
        lines = [json.dumps(row) + "\n" for row in rows_of(numbers)]
        (folder / "data" / f"{name}.jsonl").write_text("".join(lines))
    tokenizer = make_tokenizer()
    model = quickstart["make_model"](tokenizer)
    guess_number["learn"](model, *guess_number["encode"](tokenizer, conversations()))
    tokenizer.save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")
    print(f"{model.num_parameters()} parameters, greedy score {score(model, tokenizer):.3f} on validation")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
