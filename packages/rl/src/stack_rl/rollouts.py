"""`data.kind: rollouts`: batches of what the policy itself did in an environment."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt

from stack_core.config import Selected, config
from stack_core.contracts.data import Batch, Shapes
from stack_core.contracts.environments import Tasks, Trajectory
from stack_core.contracts.formats import GenerativeCheckpoint
from stack_core.contracts.generation import Engine
from stack_core.errors import ConfigError, DataError
from stack_core.plugins import registries
from stack_rl.episodes import Attempt, OnFailure, Player
from stack_rl.experience import batch_of, batch_shapes, credited_by_values

__all__ = ["RolloutBatches", "RolloutData", "RolloutIterator"]

SAMPLES_FILE = "samples.jsonl"
_SHOWN = 16
_SCORED = ("tokens", "targets", "positions", "segment_ids")
_TRAINING, _HELD_OUT = 0, 1

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


@config
class RolloutData:
    """Episodes of an environment, a group of attempts at each task, drawn anew for every step from its weights.

    A batch has a row for each episode: what the policy saw and drew, the log-probabilities by which it drew, and for
    each token the advantage of its episode within the group and its weight in the loss. The policy draws at temperature
    1 from all tokens, which is the distribution that an objective differentiates.

    Evaluation plays every held-out task once, taking the most likely token each time, and keeps the first episodes for
    the run's report.

    Attributes:
      environment: an entry of the registry `environments`.
      groups: tasks in a batch.
      group_size: attempts at each.
      seq_tokens: of an episode, prompts and observations included, at most.
      advantage: what of its reward an episode is credited with, among those of its group: "group", the reward's
        distance from the mean in standard deviations; "centred", the distance; "leave_one_out", that from the mean of
        the others; "whitened", the distance in standard deviations of the whole batch; "gae", each token by what
        the objective's critic expected from before it on, which "ppo" has.
      discount, decay, whiten: of "gae": gamma and lambda, and whether advantages are whitened over the batch's tokens.
      critic_warmup_steps: of "gae": the first steps, in which nothing is credited and the critic alone learns. While it
        expects 0 and rewards are far from 0, tokens would be credited by how near they stand to an answer's end.
      weights: what tokens weigh in the loss. "sequence": episodes weigh the same; "token": tokens do; "constant": a
        token is 1 / (rows * seq_tokens); "prompt": tasks weigh the same, and within them tokens; "sum": a token is 1.
      engine: an entry of the registry `engines`, which generates.
      on_failure: an episode whose environment or reward fails stops the run ("stop"), or is left out ("drop").
    """

    environment: Annotated[Any, Selected(registries.environments, "name")]
    kind: Literal["rollouts"] = "rollouts"
    groups: PositiveInt = 16
    group_size: Annotated[int, Field(ge=2)] = 8
    seq_tokens: PositiveInt = 256
    advantage: Literal["group", "centred", "leave_one_out", "whitened", "gae"] = "group"
    discount: Fraction = 1.0
    decay: Fraction = 0.95
    whiten: bool = True
    critic_warmup_steps: NonNegativeInt = 0
    weights: Literal["sequence", "token", "constant", "prompt", "sum"] = "sequence"
    engine: str = "static"
    on_failure: OnFailure = "stop"

    @property
    def batch_size(self) -> int:
        """Rows of a batch."""
        return self.groups * self.group_size

    def spec(self, model: Any) -> Shapes:
        return batch_shapes(self.batch_size, self.seq_tokens, values=self.advantage == "gae")

    def work(self) -> tuple[str, int]:
        return "episodes", self.batch_size

    def check(self, model: Any) -> None:
        if self.seq_tokens > model.max_positions:
            raise ConfigError(
                f"data.seq_tokens is {self.seq_tokens}, but model.max_positions is {model.max_positions}. Lower the "
                "first or raise the second."
            )
        self.environment.check(model)

    def build(self, *, seed: int, model: Any) -> "RolloutBatches":
        return RolloutBatches(self, model, seed=seed)


class RolloutBatches:
    """Batches that the policy makes; see `PolicyBatches`, `NeedsPolicy`, `Validates` and `WritesFiles`."""

    def __init__(self, config: RolloutData, model: Any, *, seed: int) -> None:
        self._config, self._seed = config, seed
        self._shapes = config.spec(model)
        self._tasks: Tasks | None = None
        self._engine: Engine | None = None
        self._player: Player | None = None
        self._version = 0
        self._scores: Callable[[Batch], Mapping[str, Any]] | None = None
        self._directory: Path | None = None

    def take_policy(self, policy: GenerativeCheckpoint) -> None:
        """Makes the tasks, and the engine that plays them.

        Raises:
          StackError: the tasks or the engine cannot be made.
        """
        settings = self._config
        self._tasks = settings.environment.build(policy, seq_tokens=settings.seq_tokens, seed=self._seed)
        if self._tasks.training == 0:
            raise DataError(f"The environment {settings.environment.name!r} has no task to train on.")
        self._engine = registries.engines[settings.engine](policy)
        self._engine.start()
        self._player = Player(self._tasks, self._engine, seq_tokens=settings.seq_tokens, on_failure=settings.on_failure)

    def update_weights(self, params: Any, version: int, score: Callable[[Any, Batch], Mapping[str, Any]]) -> None:
        """Hands the engine a copy of the weights, which the next batch is drawn from."""
        if self._engine is None:
            raise DataError("No policy was given yet to draw from: call take_policy first.")
        self._engine.update_weights(params, version=version)
        self._version, self._scores = version, partial(score, params)

    def train_iterator(self) -> "RolloutIterator":
        settings = self._config
        fingerprint = {
            "seed": self._seed,
            "data.environment": settings.environment.name,
            "data.groups": settings.groups,
            "data.group_size": settings.group_size,
        }
        return RolloutIterator(self._training_batch, fingerprint)

    def validation_batches(self) -> Iterator[Batch]:
        """Every held-out task, played greedily by the weights of now."""
        tasks, player = self._playing()
        rows, shown = self._config.batch_size, _SHOWN
        for first in range(0, tasks.held_out, rows):
            numbers = range(first, min(first + rows, tasks.held_out))
            attempts = [Attempt(task, task, held_out=True) for task in numbers]
            found = player.play(attempts, seed=(self._seed, _HELD_OUT, first), greedy=True)
            self._write_samples(tasks, found[:shown])
            shown = max(shown - len(found), 0)
            batch = self._batch(found, training=False)
            yield {**batch, "advantages": np.zeros_like(batch["advantages"])}

    def write(self, directory: Path) -> None:
        """Remembers where samples of evaluations are to be written."""
        self._directory = directory

    def _training_batch(self, number: int) -> Batch:
        """The batch of a step, a function of its number and of the weights."""
        tasks, player = self._playing()
        first = number * self._config.groups
        groups = range(first, first + self._config.groups)
        attempts = [
            Attempt(group, self._task(tasks, group)) for group in groups for _ in range(self._config.group_size)
        ]
        found = player.play(attempts, seed=(self._seed, _TRAINING, number), greedy=False)
        if all(each is None for each in found):
            raise DataError("Every episode of a batch failed and was dropped; set data.on_failure: stop to see why.")
        return self._batch(found, training=True)

    def _task(self, tasks: Tasks, group: int) -> int:
        """The task of a group: all tasks in an order of their own in each epoch."""
        if tasks.training is None:
            return group
        epoch, place = divmod(group, tasks.training)
        return int(np.random.default_rng([self._seed, epoch]).permutation(tasks.training)[place])

    def _batch(self, found: Sequence[Trajectory | None], *, training: bool) -> dict[str, np.ndarray]:
        settings, by_values = self._config, self._config.advantage == "gae"
        advantage = settings.advantage if training and not by_values else None
        options = {"shapes": self._shapes, "weights": settings.weights, "version": self._version}
        batch = batch_of(found, advantage=advantage, **options)
        if not by_values:
            return batch
        how = {"discount": settings.discount, "decay": settings.decay, "whiten": settings.whiten}
        credited = credited_by_values(batch, found, self._values(batch), **how)
        if self._version >= settings.critic_warmup_steps:
            return credited
        return {**credited, "advantages": np.zeros_like(credited["advantages"])}

    def _values(self, batch: Batch) -> np.ndarray:
        """What the critic expects before each target of a batch.

        Raises:
          DataError: the objective has no critic.
        """
        assert self._scores is not None, "no weights were given yet"
        scores = self._scores({name: batch[name] for name in _SCORED})
        if "values" not in scores:
            raise DataError(
                "data.advantage is 'gae', which needs a critic's values, but the objective gives none. Choose "
                "objective.name: ppo, or another data.advantage."
            )
        return np.asarray(scores["values"])

    def _playing(self) -> tuple[Tasks, Player]:
        if self._tasks is None or self._player is None:
            raise DataError("No policy was given yet to play with: call take_policy first.")
        return self._tasks, self._player

    def _write_samples(self, tasks: Tasks, found: Sequence[Trajectory | None]) -> None:
        if self._directory is None:
            return
        with (self._directory / SAMPLES_FILE).open("a", encoding="utf-8") as file:
            for each in found:
                if each is not None:
                    file.write(json.dumps(self._sample(tasks, each)) + "\n")

    def _sample(self, tasks: Tasks, each: Trajectory) -> dict[str, Any]:
        """An episode for people: pieces of what the environment showed and what the policy wrote, in turn."""
        turns = np.flatnonzero(np.diff(each.sampled)) + 1
        pieces = [tuple(map(int, piece)) for piece in np.split(each.tokens, turns)]
        return {
            "step": self._version,
            "task": tasks.name(each.task, held_out=True),
            "turns": [tasks.text(piece) for piece in pieces],
            "reward": float(each.rewards.sum()),
            "verdict": each.verdict,
            **({"facts": dict(each.facts)} if each.facts else {}),
        }


class RolloutIterator:
    """Batches of rollouts; its state is how many were taken, as a batch is a function of its number and the weights."""

    def __init__(self, make: Callable[[int], Batch], fingerprint: Mapping[str, Any]) -> None:
        self._make, self._fingerprint = make, dict(fingerprint)
        self._taken = 0

    def __iter__(self) -> "RolloutIterator":
        return self

    def __next__(self) -> Batch:
        batch = self._make(self._taken)
        self._taken += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        return {"batches": self._taken, **self._fingerprint}

    def set_state(self, state: Any) -> None:
        """Makes the next batch the one that followed when `state` was taken.

        Raises:
          DataError: the state is of other rollouts.
        """
        if not isinstance(state, Mapping) or {**state, "batches": 0} != {"batches": 0, **self._fingerprint}:
            raise DataError(f"The saved position {state!r} is not one of these rollouts: {self._fingerprint}.")
        self._taken = state["batches"]
