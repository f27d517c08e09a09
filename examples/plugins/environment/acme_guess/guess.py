"""`environment: {name: guess}`: a conversation in which the policy finds a number by "higher" and "lower"."""

import random
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_rl.environments.messages import MessageEnvironment, Reply, renderer_of
from stack_rl.environments.tasks import SeededTasks


@config
class GuessConfig:
    """Settings of the game.

    Attributes:
      name: selects this environment.
      largest: largest number; the smallest is 1.
      held_out: number of held-out games.
      max_turns: maximum number of guesses.
      max_tokens: maximum number of tokens per guess.
    """

    name: Literal["guess"] = "guess"
    largest: Annotated[int, Field(ge=2)] = 8
    held_out: PositiveInt = 16
    max_turns: PositiveInt = 4
    max_tokens: PositiveInt = 8

    def check(self, model):
        """Refuses a model of a run before anything is written."""
        if getattr(model, "max_positions", None) and model.max_positions < self.max_turns * self.max_tokens:
            raise ConfigError(f"model.max_positions is {model.max_positions}. Lower environment.max_turns.")

    def build(self, policy, *, seq_tokens, seed):
        """Returns the tasks: a game per number, always the same for one seed of the run."""
        renderer = renderer_of(policy)

        def start(game_seed):
            game = Game(random.Random(game_seed).randint(1, self.largest), self.largest)
            return MessageEnvironment(game, renderer, max_tokens=self.max_tokens, max_turns=self.max_turns)

        return SeededTasks(seed, self.held_out, start=start, label=self.name, renderer=renderer)


class Game:
    """One episode. An exception fails the episode; it is not a reward."""

    def __init__(self, hidden, largest):
        self._hidden, self._largest = hidden, largest

    async def begin(self):
        return [{"role": "user", "content": f"Guess my number from 1 to {self._largest}."}]

    async def reply(self, text, *, is_finished, tokens):
        guess = text.strip()
        if not guess.isdecimal():
            return Reply(verdict="unparsed")  # no messages: the episode ends
        if int(guess) == self._hidden:
            return Reply(reward=1.0, verdict="correct")
        hint = "higher" if int(guess) < self._hidden else "lower"
        return Reply(messages=[{"role": "user", "content": hint}], verdict="wrong")

    async def close(self):
        """Frees resources, such as a process or a connection; this game has none."""
