"""An OpenEnv server, as one of its packages has it: letters are to be put in order, within two steps. Prints its address."""

import socket

import uvicorn
from openenv.core.env_server import Environment, create_fastapi_app
from openenv.core.env_server.types import Action, Observation, State


class Answer(Action):
    answer: str


class Letters(Observation):
    text: str = ""


class Sorting(Environment[Answer, Letters, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._word, self._state = "", State(step_count=0)

    def reset(self, episode_id: str | None = None, word: str = "", **_: object) -> Letters:
        self._word, self._state = word, State(episode_id=episode_id, step_count=0)
        return Letters(text=f"sort: {word}")

    def step(self, action: Answer, **_: object) -> Letters:
        self._state.step_count += 1
        right = sum(one == other for one, other in zip(action.answer, sorted(self._word), strict=False))
        return Letters(text=f"sort: {self._word}", reward=right / 5, done=right == 5 or self._state.step_count == 2)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    listener = socket.create_server(("127.0.0.1", 0))
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    app = create_fastapi_app(Sorting, Answer, Letters, max_concurrent_envs=8)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
