"""Training of any model with any Optax optimizer and loss, with checkpoints, in one object."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from stack_core.abi.errors import ConfigError
from stack_core.report.document import document, framed
from stack_core.report.markup import element
from stack_train.checkpoint import CheckpointConfig, CheckpointStore
from stack_train.panels.curves import curves_of
from stack_train.step.program import Program
from stack_train.step.state import TrainState
from stack_train.step.step import Batch, make_step

__all__ = ["Trainer"]


class Trainer:
    """Trains a model on batches with a loss function and an optimizer; resumes from its directory after a kill.

        trainer = Trainer(Net, batch_of, loss=loss, optimizer=optax.adamw(1e-3), steps=1000, output="runs/net")
        trainer.train()
        trainer.model(x)

    `stack_train.train` trains models of registered families with their data, evaluation and reports.

    Args:
      model: function `build(key)` that returns an `nnx.Module`, or a model config, as in `make_step`.
      data: function from the number of a step to its batch; a sequence of batches, used in turn; or one batch. A batch
        is a mapping of arrays [batch, ...]. Iterators are rejected, because a resumed run could not find its place.
      loss: function `loss(model, batch)` that returns a scalar, or a scalar and metrics; or an `Objective`.
      optimizer: an Optax transformation, or a config of `stack_train.optim`.
      steps: total number of updates.
      output: directory of the checkpoints; None saves none.
      checkpoint: interval and retention of checkpoints; every 500 steps by default.
      seed: seed of the initial parameters and of random numbers in steps.
      step_options: further options of `make_step`, such as `accumulation_steps` or `precision`.

    Raises:
      ConfigError: an argument is not usable.
    """

    def __init__(
        self,
        model: Any,
        data: Any,
        *,
        loss: Any,
        optimizer: Any,
        steps: int,
        output: str | Path | None = None,
        checkpoint: CheckpointConfig | None = None,
        seed: int = 0,
        **step_options: Any,
    ) -> None:
        if steps < 1:
            raise ConfigError(f"steps is {steps}; expected at least 1 update.")
        if checkpoint is not None and output is None:
            raise ConfigError("checkpoint has no effect without output. Set output to a directory, or leave it out.")
        self._batch_of = _batch_function(data)
        self._program = Program(make_step(model, loss, optimizer, steps=steps, **step_options))
        self._directory = None if output is None else Path(output)
        self._checkpoint = CheckpointConfig() if checkpoint is None else checkpoint
        self._seed, self.steps = seed, steps
        self.state: TrainState | None = None
        self.history: list[dict[str, float]] = []

    def train(self, steps: int | None = None, *, log_every_steps: int = 0) -> list[dict[str, float]]:
        """Trains up to step `steps` (all by default), resuming from the newest checkpoint.

        Args:
          steps: last step of this call; a later call continues.
          log_every_steps: number of steps between printed lines; 0 prints nothing.

        Returns:
          The metrics of each step of this call, with its number as "step".

        Raises:
          CheckpointError: the directory has checkpoints of another model, or cannot be written.
          TrainingError: a batch has other arrays than the first one.
        """
        last = self.steps if steps is None else min(steps, self.steps)
        if self._directory is None:
            return self._train(last, log_every_steps, None)
        with CheckpointStore(self._directory, self._checkpoint) as store:
            return self._train(last, log_every_steps, store)

    @property
    def model(self) -> Any:
        """The module with its current parameters, in evaluation mode."""
        step = self._program.step
        return step.model.evaluation_model(step.evaluation_variables(self._state_or_new(None)))

    def _train(self, last: int, log_every_steps: int, store: CheckpointStore | None) -> list[dict[str, float]]:
        state = self._state_or_new(store)
        first, made = int(state.step), list[tuple[int, Mapping[str, Any]]]()
        if first >= last:
            return []
        step = self._program.compile(self._batch_of(first))
        for number in range(first + 1, last + 1):
            state, metrics = step(state, self._batch_of(number - 1))
            self.state = state
            made.append((number, metrics))
            if log_every_steps and number % log_every_steps == 0:
                print(number, *(f"{name} {float(value):.6g}" for name, value in metrics.items()), flush=True)  # noqa: T201
            every = self._checkpoint.every_steps
            if store is not None and (number == last or (every and number % every == 0)):
                store.save(number, state)
        # Read at the end, because reading a metric waits for its step.
        found = [{"step": float(number), **_floats(metrics)} for number, metrics in made]
        self.history += found
        return found

    def _state_or_new(self, store: CheckpointStore | None) -> TrainState:
        if self.state is None and store is not None and store.latest() is not None:
            self.state = store.restore(self._program.abstract_state).state
        if self.state is None:
            self.state = self._program.init(key=jax.random.key(self._seed))
        return self.state

    def __repr__(self) -> str:
        step, model = 0 if self.state is None else int(self.state.step), self._program.step.model
        last = "".join(f", {name} {value:.4g}" for name, value in (self.history or [{}])[-1].items() if name != "step")
        return f"<Trainer of {model.parameter_count:,} parameters at step {step:,} of {self.steps:,}{last}>"

    def _repr_html_(self) -> str:
        shown = curves_of([{"kind": "train", **each} for each in self.history])
        page = document("Trainer", element("p", repr(self)), None if shown is None else element("div", shown.body))
        return framed(page, "Trainer", height_px=100 if shown is None else 500)


def _batch_function(data: Any) -> Callable[[int], Batch]:
    if isinstance(data, Mapping):
        return lambda step: data
    if callable(data):
        return data
    if isinstance(data, Sequence) and len(data):
        return lambda step: data[step % len(data)]
    raise ConfigError(
        f"data is a {type(data).__name__}; expected a function from the number of a step to a batch, a list of batches "
        "or one batch. An iterator cannot resume: make it a list, or a function of the step."
    )


def _floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}
