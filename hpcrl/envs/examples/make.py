"""Makes rows for the environments whose tasks can be drawn: python -m hpcrl.envs.examples.make NAME [--rows N] [--seed S]

Prints JSON lines, the same ones for the same seed; the rows beside this file are eight of seed 0. No row comes twice, so that rows
for evaluation can be had from the end of a longer list: its beginning stays as it is.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import islice
from typing import Any

from hpcrl.envs.terminal.task import TaskScript, TaskTests, TerminalTask
from hpcrl.envs.tools.expression import evaluate

Row = dict[str, Any]

WORDS = [
    "anchor",
    "banana",
    "cathedral",
    "dinosaur",
    "elephant",
    "feather",
    "gallery",
    "horizon",
    "igloo",
    "jungle",
    "kettle",
    "lantern",
    "mississippi",
    "nightingale",
    "orchard",
    "parallel",
    "quarrel",
    "raspberry",
    "strawberry",
    "telescope",
    "umbrella",
    "volcano",
    "whistle",
    "xylophone",
    "yesterday",
    "zeppelin",
    "bookkeeper",
    "committee",
    "assessment",
    "coffee",
    "balloon",
    "successful",
    "tomorrow",
    "necessary",
    "address",
    "possession",
]

_COUNTDOWN = (
    "Use the numbers {nums} with + - * / and parentheses to make {target}. Each number may be used at most once. Write the expression "
    "between <answer> and </answer>, and nothing else there."
)
_GUESS = (
    "I am thinking of a whole number from {low} to {high}. Guess it: write one number between <answer> and </answer>, and I will tell "
    "you whether mine is higher or lower."
)
_CALCULATE = (
    "Compute {expression}. You have a calculator: write "
    '<tool_call>{{"name": "calculator", "arguments": {{"expression": "2 * 3"}}}}</tool_call> and wait for its result. When you know '
    "the answer, write it between <answer> and </answer>."
)
_FIX = (
    "One line of {path} has a bug: the function does not return what its docstring says. Correct the line. Call a tool as in "
    '<tool_call>{{"name": "shell", "arguments": {{"command": "cat {path}"}}}}</tool_call> and wait for its answer. There are shell (command), '
    "view (path), edit (path, old, new) and submit, which ends the work."
)
_FUNCTION = '''def {name}(x):
    """Return x times {factor}, {sign} {added}."""
    return x {bug} {added}
'''
_TESTED = """import sys

sys.path.insert(0, "/repo")
from {name} import {name}

for x in range(-3, 20):
    assert {name}(x) == {right}, x
"""


def arithmetic(source: random.Random) -> Row:
    expression = _expression(source, 99)
    return _compared(f"{expression} = ? Answer with the number alone.", _value(expression))


def calculator(source: random.Random) -> Row:
    expression = _expression(source, 99999)
    return _compared(_CALCULATE.format(expression=expression), _value(expression))


def count_letters(source: random.Random) -> Row:
    word = source.choice(WORDS)
    letter = source.choice(sorted(set(word)) if source.random() < 0.8 else "abcdefghijklmnopqrstuvwxyz")
    return _asked(
        f"How often is the letter {letter} in {word}? Answer with the number alone.", word=word, letter=letter
    )


def countdown(source: random.Random) -> Row:
    """Numbers of which all, by operations drawn at random, make the target: a whole number from 10 to 999."""
    while True:
        nums = [source.randint(1, 25) for _ in range(source.choice((3, 4)))]
        target = Fraction(nums[0])
        for one in nums[1:]:
            target = source.choice([target + one, target - one, target * one, target / one])
        if target.denominator == 1 and 10 <= target <= 999:
            break
    source.shuffle(nums)
    text = _COUNTDOWN.format(nums=", ".join(map(str, nums)), target=target)
    return _asked(text, nums=nums, target=int(target))


def guess_number(source: random.Random) -> Row:
    low = source.randint(1, 100)
    high = low + source.choice((14, 30, 62))
    row = _compared(_GUESS.format(low=low, high=high), str(source.randint(low, high)))
    return {**row, "low": low, "high": high}


def reverse_word(source: random.Random) -> Row:
    word = source.choice(WORDS)
    return _asked(f"Write {word} backwards, and nothing else.", word=word)


def sandbox(source: random.Random) -> Row:
    """A file with a bug in one line, in an image that has `sh` and `python3`."""
    name, factor, added = source.choice(WORDS), source.randint(2, 12), source.randint(1, 20)
    sign, operator = source.choice((("plus", "+"), ("minus", "-")))
    right = f"x * {factor} {operator} {added}"
    wrong = [f"+ {factor} {operator}", f"* {factor + 1} {operator}", f"* {factor} {'+' if operator == '-' else '-'}"]
    names = {"name": name, "factor": factor, "sign": sign, "added": added}
    path, fixed = f"/repo/{name}.py", _FUNCTION.format(**names, bug=f"* {factor} {operator}")
    task = TerminalTask(
        name=name,
        prompt=_FIX.format(path=path),
        image="python",
        directory="/repo",
        files={path: _FUNCTION.format(**names, bug=source.choice(wrong)).encode()},
        tests=TaskTests(
            "python3 /tests/test.py",
            {"/tests/test.py": _TESTED.format(name=name, right=right).encode()},
            60.0,
            keep=("/repo",),
        ),
        solution=TaskScript(f"cat /solution/{name}.py > {path}", {f"/solution/{name}.py": fixed.encode()}, 60.0),
    )
    return task.row()


def sort_letters(source: random.Random) -> Row:
    word = "".join(source.choices("abcdefghijkl", k=5))
    return _compared(f"sort: {word}", "".join(sorted(word)))


MAKERS: dict[str, Callable[[random.Random], Row]] = {
    function.__name__: function
    for function in (
        arithmetic,
        calculator,
        count_letters,
        countdown,
        guess_number,
        reverse_word,
        sandbox,
        sort_letters,
    )
}


def rows(environment: str, seed: int) -> Iterator[Row]:
    """Yield different rows of an environment in `MAKERS`, for as long as there are any."""
    source, seen = random.Random(seed), set[str]()
    missed = 0
    while missed < 1000:
        row = {"data_source": environment, "env_class": environment, **MAKERS[environment](source)}
        missed = missed + 1 if (text := json.dumps(row)) in seen else 0
        if not missed:
            seen.add(text)
            yield row


def _asked(text: str, **columns: Any) -> Row:
    return {"prompt": [{"role": "user", "content": text}], **columns}


def _compared(text: str, answer: str) -> Row:
    return _asked(text, reward_spec={"method": "rule", "ground_truth": answer})


def _expression(source: random.Random, largest: int) -> str:
    a, b, c = (source.randint(2, largest) for _ in range(3))
    return source.choice((f"{a} + {b} * {c}", f"({a} - {b}) * {c}", f"{a} * {b} - {c}", f"{a} - ({b} + {c})"))


def _value(expression: str) -> str:
    return str(evaluate(expression).value)


def main() -> None:
    parser = argparse.ArgumentParser(description="Print rows of an environment as JSON lines.")
    parser.add_argument("name", choices=sorted(MAKERS))
    parser.add_argument("--rows", type=int, default=8, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    arguments = parser.parse_args()
    made = list(islice(rows(arguments.name, arguments.seed), arguments.rows))
    for row in made:
        print(json.dumps(row, ensure_ascii=False))
    if len(made) < arguments.rows:
        parser.exit(1, f"there are only about {len(made)} different rows of {arguments.name}\n")


if __name__ == "__main__":
    main()
