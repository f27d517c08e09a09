"""The training loop: steps, evaluation, checkpoints and stop requests, each told to observers as an event."""

import math
import signal
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from stack_core.errors import Interrupted, NonFiniteLoss
from stack_core.event_bus import EventBus
from stack_core.events import EvaluationFinished, RunFinished, StepFinished, StepStarted
from stack_train.checkpoint import CheckpointStore
from stack_train.config import RunConfig
from stack_train.data.pipeline import Pipeline
from stack_train.signals import StopRequest
from stack_train.step import LanguageModelTrainer, TrainState

__all__ = ["RunSummary", "TrainingLoop"]

_RECENT_STEPS = 100


@dataclass(frozen=True)
class RunSummary:
    """How a run ended.

    Attributes:
      validation_loss: mean over the held-out tokens after the last step; None when nothing is held out, or the run was
        stopped before its last step.
      tokens_per_s: median over the last hundred completed steps; None when no step was done.
    """

    step: int
    loss: float | None
    validation_loss: float | None
    tokens_per_s: float | None
    directory: Path
    stopped_by: str | None = None


@dataclass(frozen=True)
class _Dispatched:
    """A step whose results the device has yet to deliver."""

    step: int
    metrics: Mapping[str, jax.Array]
    row_ids: np.ndarray


@dataclass
class TrainingLoop:
    """Drives one run over a compiled step.

    The device is kept one step ahead of the host: step n is dispatched before the results of step n - 1 are read, so
    durations are measured between completions. Nothing is saved before its loss has been read and found finite.

    Attributes:
      compiled: (state, batch) -> (state, metrics); donates the state.
      ideal_step_s: a step's duration at the peak of the hardware, or None.
    """

    config: RunConfig
    trainer: LanguageModelTrainer
    compiled: Callable[[TrainState, Any], tuple[TrainState, Mapping[str, jax.Array]]]
    pipeline: Pipeline
    store: CheckpointStore
    bus: EventBus
    directory: Path
    config_yaml: str
    ideal_step_s: float | None = None
    _clock_s: float = 0.0
    _saved_step: int = -1
    _evaluate: Callable[[Any, Any], Mapping[str, jax.Array]] | None = None
    _last: Mapping[str, float] = field(default_factory=dict)
    _durations_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT_STEPS))

    def run(self, state: TrainState, batches: Any, first_step: int, stop: StopRequest) -> RunSummary:
        """Trains from `first_step` steps done to the config's last step, or to a stop request.

        Args:
          batches: an iterator with `get_state`; it stands where `first_step` steps left it.

        Raises:
          NonFiniteLoss: names the step and the documents of its batch; no checkpoint of it is written.
          Interrupted: after Ctrl-C, once the state is saved.
          CheckpointError: a checkpoint could not be written.
        """
        step, steps = first_step, self.config.trainer.steps
        self._saved_step = first_step or -1
        pending: _Dispatched | None = None
        self._clock_s = time.perf_counter()
        while step < steps and not stop:
            step += 1
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                state, dispatched = self._dispatch(step, state, self._next(batches))
                self._finish(pending)
            pending = dispatched
            self.store.poll()
            if self._due(step):
                self._finish(pending)
                pending = None
                self._pause(step, state, batches)
        self._finish(pending)
        return self._stopped(stop, step, state, batches) if step < steps else self._finished(step, state, batches)

    def evaluate(self, params: Any) -> dict[str, float] | None:
        """Means over all held-out tokens, or None when nothing is held out."""
        total: dict[str, float] = {}
        for batch in self.pipeline.validation_batches():
            arrays, _ = self._to_device(batch)
            if self._evaluate is None:
                self._evaluate = self.trainer.compile_evaluation(arrays)
            metrics = {name: float(value) for name, value in jax.device_get(self._evaluate(params, arrays)).items()}
            weight = metrics.pop("weight")
            total["weight"] = total.get("weight", 0.0) + weight
            for name, value in metrics.items():
                total[name] = total.get(name, 0.0) + value * weight
        weight = total.pop("weight", 0.0)
        return {name: value / weight for name, value in total.items()} if weight else None

    @staticmethod
    def _next(batches: Any) -> Any:
        with jax.profiler.TraceAnnotation("next_batch"):
            return next(batches)

    def _dispatch(self, step: int, state: TrainState, batch: Any) -> tuple[TrainState, _Dispatched]:
        arrays, row_ids = self._to_device(batch)
        self.bus.emit(StepStarted(step))
        state, metrics = self.compiled(state, arrays)
        return state, _Dispatched(step, metrics, row_ids)

    def _to_device(self, batch: Mapping[str, np.ndarray]) -> tuple[dict[str, jax.Array], np.ndarray]:
        arrays = dict(batch)
        row_ids = arrays.pop("row_ids")
        return jax.device_put(arrays, self.trainer.batch_shardings(arrays)), row_ids

    def _finish(self, dispatched: _Dispatched | None) -> None:
        """Waits for a step, checks its loss and reports it."""
        if dispatched is None:
            return
        metrics = {name: float(value) for name, value in jax.device_get(dispatched.metrics).items()}
        now_s = time.perf_counter()
        duration_s, self._clock_s = now_s - self._clock_s, now_s
        if not all(math.isfinite(metrics[name]) for name in ("loss", "grad_norm")):
            raise NonFiniteLoss(self._describe_non_finite(dispatched, metrics))
        self._last = metrics
        self._durations_s.append(duration_s)
        mfu = None if self.ideal_step_s is None else self.ideal_step_s / duration_s
        self.bus.emit(StepFinished(dispatched.step, metrics, duration_s, self._tokens_per_step / duration_s, mfu))

    def _describe_non_finite(self, dispatched: _Dispatched, metrics: Mapping[str, float]) -> str:
        self.store.wait()
        documents = "\n".join(f"  {line}" for line in self.pipeline.describe_rows(dispatched.row_ids))
        saved = self.store.latest()
        remedy = "no checkpoint was written yet" if saved is None else f"the last checkpoint is step {saved}"
        return (
            f"Step {dispatched.step}: the loss is {metrics['loss']} and the gradient norm {metrics['grad_norm']}; both "
            f"must be finite. The batch holds rows {dispatched.row_ids.tolist()}:\n{documents}\n"
            f"Nothing of this step is saved; {remedy}. Lower optimizer.learning_rate, or look at these documents."
        )

    def _due(self, step: int) -> bool:
        return self._evaluation_due(step) or self._save_due(step)

    def _evaluation_due(self, step: int) -> bool:
        every = self.config.trainer.evaluate_every_steps
        return every > 0 and step % every == 0 and step < self.config.trainer.steps

    def _save_due(self, step: int) -> bool:
        every = self.config.checkpoint.every_steps
        return every > 0 and step % every == 0

    def _pause(self, step: int, state: TrainState, batches: Any) -> None:
        if self._save_due(step):
            self._save(step, state, batches)
        if self._evaluation_due(step):
            self._report_evaluation(step, state)
        self._clock_s = time.perf_counter()

    def _report_evaluation(self, step: int, state: TrainState) -> float | None:
        started_s = time.perf_counter()
        metrics = self.evaluate(state.params)
        if metrics is None:
            return None
        self.bus.emit(EvaluationFinished(step, metrics, time.perf_counter() - started_s))
        return metrics["loss"]

    def _save(self, step: int, state: TrainState, batches: Any) -> None:
        if step != self._saved_step:
            self.store.save(step, state, batches.get_state(), self.config_yaml)
            self._saved_step = step

    def _finished(self, step: int, state: TrainState, batches: Any) -> RunSummary:
        self._save(step, state, batches)
        validation_loss = self._report_evaluation(step, state)
        self.store.wait()
        summary = self._summary(step, validation_loss)
        self.bus.emit(RunFinished(step, self._last))
        return summary

    def _stopped(self, stop: StopRequest, step: int, state: TrainState, batches: Any) -> RunSummary:
        self._save(step, state, batches)
        self.store.wait()
        if stop.received is signal.SIGINT:
            raise Interrupted(
                f"Stopped by Ctrl-C after step {step} of {self.config.trainer.steps}; it is saved. Go on with --resume."
            )
        return self._summary(step, None, stopped_by=stop.received.name if stop.received else None)

    def _summary(self, step: int, validation_loss: float | None, stopped_by: str | None = None) -> RunSummary:
        rate = self._tokens_per_step / statistics.median(self._durations_s) if self._durations_s else None
        return RunSummary(step, self._last.get("loss"), validation_loss, rate, self.directory, stopped_by)

    @property
    def _tokens_per_step(self) -> int:
        return self.config.data.batch_size * self.config.data.seq_tokens
