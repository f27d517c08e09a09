"""A server of the real OpenEnv with a game about a hidden number; prints its port."""

import socket
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    number: int


class Hint(Observation):
    hint: str
    guesses: int = 0


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._hidden = self._guesses = 0

    def reset(self, seed=None, episode_id=None, below=10, **kwargs):
        self._hidden, self._guesses = seed % below, 0
        return Hint(hint=f"below {below}")

    def step(self, action, timeout_s=None, **kwargs):
        self._guesses += 1
        if action.number == 77:
            raise ZeroDivisionError("the game broke")
        if action.number == self._hidden:
            return Hint(hint="right", guesses=self._guesses, done=True, reward=1.0)
        hint = "more" if action.number < self._hidden else "less"
        return Hint(hint=hint, guesses=self._guesses, reward=-0.25)

    @property
    def state(self):
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Game, Guess, Hint, max_concurrent_envs=int(sys.argv[1]))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(listening.getsockname()[1], flush=True)  # noqa: T201  # read by the test
        uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])
