"""The environment of the experiment, which experiment.toml names in environment.env_class."""

from hpcrl.envs.base import Environment, Turn
from hpcrl.envs.rewards.response import ground_truth, truth_of


class Letters(Environment):
    """Put letters in order. A wrong first answer is answered with the letters in their places, and may be corrected."""

    def __init__(self, extras):
        self._right = ground_truth(truth_of(extras))
        self._turns = 0

    def step(self, action):
        self._turns += 1
        solved = action == self._right
        if solved or self._turns == 2:
            return Turn([], float(solved), done=True, metrics={"turns": self._turns})
        in_place = "".join(a for a, b in zip(action, self._right, strict=False) if a == b)
        return Turn([{"role": "user", "content": in_place}], 0.0, done=False)
