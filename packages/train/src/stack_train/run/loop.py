"""The training loop: steps, evaluation, checkpoints and stop requests, each reported to observers as an event."""

import math
import signal
import statistics
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from stack_core.abi.config import to_yaml
from stack_core.abi.data import MeasuresData
from stack_core.abi.errors import Interrupted, NonFiniteLoss
from stack_core.abi.event_bus import EventBus
from stack_core.abi.events import EvaluationFinished, RunFinished, StepFinished, StepStarted
from stack_core.abi.metrics import Metrics, combine_all
from stack_core.abi.policy import PolicyBatches
from stack_core.report.document import framed
from stack_core.report.markup import text
from stack_core.runtime.signals import StopRequest
from stack_train.checkpoint import CheckpointStore, FrozenRecord
from stack_train.panels.records import records
from stack_train.run.placing import shard_batch
from stack_train.run.run import Run
from stack_train.step.program import array_shapes
from stack_train.step.state import TrainState
from stack_train.variables.model_variables import join

__all__ = ["RunSummary", "TrainingLoop"]

_RECENT_STEPS = 100


@dataclass(frozen=True, repr=False)
class RunSummary:
    """Result of a run.

    Attributes:
      step: last completed step.
      loss: loss of the last completed step; None if no step was completed.
      validation_loss: mean loss of the validation tokens after the last step; None without a validation split, or if
        the run was stopped before its last step.
      work_per_s: throughput in `work_unit` per second, the median of the last hundred completed steps; None if no step
        was completed.
      work_unit: unit of the work of a step, such as "tokens".
      directory: run directory.
      stopped_by: name of the signal that stopped the run, "SIGALRM" for the limit `run.minutes`; None if it ran to its
        last step.
      metrics, validation_metrics: the objective's `shown_metrics` of the last step and the last evaluation.
    """

    step: int
    loss: float | None
    validation_loss: float | None
    work_per_s: float | None
    work_unit: str
    directory: Path
    stopped_by: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    validation_metrics: Mapping[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        metrics = {"loss": self.loss, "validation loss": self.validation_loss}
        metrics |= {f"validation {name}": value for name, value in self.validation_metrics.items()}
        parts = [
            f"step {self.step:,}",
            *(f"{name} {value:.4g}" for name, value in metrics.items() if value is not None),
        ]
        if self.work_per_s is not None:
            parts.append(f"{self.work_per_s:,.0f} {self.work_unit}/s")
        if self.stopped_by is not None:
            parts.append(f"stopped by {self.stopped_by}")
        return f"<run {self.directory}: {', '.join(parts)}>"

    def _repr_html_(self) -> str:
        """Shows the run's report in a notebook, or its text before the first report."""
        report = self.directory / "report.html"
        if not report.is_file():
            return text(repr(self))
        return framed(report.read_text(encoding="utf-8"), str(self.directory))


@dataclass(frozen=True)
class _Dispatched:
    """A dispatched step whose metrics have not been read."""

    step: int
    metrics: Metrics
    row_ids: np.ndarray | None
    data_wait_s: float = 0.0
    share_of_rows: float = 1.0  # rows of the batch, relative to the rows of `DataConfig.spec`
    data_metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_finished(self) -> bool:
        """True once the device has finished the step."""
        arrays: list[Any] = [leaf for leaf in jax.tree.leaves(self.metrics) if isinstance(leaf, jax.Array)]
        return all(array.is_ready() for array in arrays)  # `Any` above, since jax.Array does not declare is_ready


@dataclass
class TrainingLoop:
    """Drives one run over a compiled step.

    The device runs one step ahead of the host: step n is dispatched before the results of step n - 1 are read, so
    durations are measured between completions. A state is saved only after its loss was read and is finite.

    Attributes:
      of: the run.
      compiled: compiled step, (state, batch) -> (state, metrics); donates the state.
      store: checkpoint store of the run.
      bus: event bus to the observers.
      ideal_step_s: duration of a step at the peak FLOPs of the hardware; None if unknown.
      frozen: sources of the variables that checkpoints do not store, by model name.
    """

    of: Run
    compiled: Callable[[TrainState, Any], tuple[TrainState, Metrics]]
    store: CheckpointStore
    bus: EventBus
    ideal_step_s: float | None = None
    frozen: Mapping[str, FrozenRecord] = field(default_factory=dict)
    _stop: StopRequest = field(default_factory=StopRequest)
    _clock_s: float = 0.0
    _saved_step: int = -1
    _evaluate: dict[Any, Callable[..., Metrics]] = field(default_factory=dict)  # by the shapes of a batch
    _scorer: Callable[..., Mapping[str, jax.Array]] | None = None
    _last: Mapping[str, float] = field(default_factory=dict)
    _last_evaluation: Mapping[str, float] = field(default_factory=dict)
    _is_evaluation_cut: bool = False
    _rates: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT_STEPS))

    def run(self, state: TrainState, batches: Any, first_step: int, stop: StopRequest) -> RunSummary:
        """Trains from `first_step` to the config's last step, or to a stop request.

        Args:
          batches: iterator with `get_state`, positioned after the batches of `first_step` steps.
          first_step: number of steps already done.

        Raises:
          NonFiniteLoss: a loss is not finite; names the step and the documents of its batch. The step is not saved.
          Interrupted: Ctrl-C was pressed; raised after the state is saved.
          CheckpointError: a checkpoint could not be written.
        """
        step, steps, self._stop = first_step, self.of.config.run.steps, stop
        self._hand_over(state, step)
        # The checkpoint of a resumed step exists already; step 0 is not saved yet.
        self._saved_step = first_step or -1
        if self._evaluation_missing(first_step):
            self._report_evaluation(first_step, state)
        pending: _Dispatched | None = None
        self._clock_s = time.perf_counter()
        agreed = self.of.processes.name("stop")
        while step < steps:
            self._watch_time(stop)
            if self.of.processes.agree_on_stop(agreed, step, stop):
                break
            step += 1
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                batch, data_wait_s = self._next(batches, pending)
                state, dispatched = self._dispatch(step, state, batch, data_wait_s)
                if isinstance(batches, MeasuresData):
                    dispatched = replace(dispatched, data_metrics=batches.data_metrics())
                self._hand_over(state, step)
                self._finish(pending)
            pending = dispatched
            self.store.poll()
            if self._due(step):
                self._finish(pending)
                pending = None
                self._pause(step, state, batches)
        self._finish(pending)
        return self._stopped(step, state, batches) if step < steps else self._finished(step, state, batches)

    def evaluate(self, state: TrainState) -> dict[str, float] | None:
        """Computes the metrics of the validation split; None without a split, or if interrupted by a stop signal."""
        data, program = self.of.data, self.of.program
        variables, auxiliary = program.step.evaluation_variables(state), program.step.evaluation_auxiliary(state)
        found: list[Any] = []
        self._is_evaluation_cut = False
        for batch in data.validation_batches():
            # With several processes, evaluation runs to the end: the signal may have reached only some processes.
            if self._stop and self.of.processes.count == 1:
                self._is_evaluation_cut = True
                return None
            arrays, _ = self._to_device(batch)
            shapes = array_shapes(arrays)
            if shapes not in self._evaluate:
                self._evaluate[shapes] = program.compile_evaluation(arrays)
            found.append(jax.device_get(self._evaluate[shapes](variables, arrays, auxiliary)))
        metrics = combine_all(found)
        weighed = "loss" in metrics and metrics["loss"].weight
        return {name: float(metric) for name, metric in metrics.items()} if weighed else None

    def _watch_time(self, stop: StopRequest) -> None:
        """Requests a stop once the session has lasted `run.minutes`."""
        minutes = self.of.config.run.minutes
        if minutes is not None and not stop and time.perf_counter() - self.of.began_s >= 60 * minutes:
            stop.received = signal.SIGALRM

    @staticmethod
    def _next(batches: Any, pending: _Dispatched | None) -> tuple[Any, float]:
        """Returns the next batch and the seconds that the device was idle for it, 0 if the device was still busy."""
        started_s = time.perf_counter()
        with jax.profiler.TraceAnnotation("next_batch"):
            batch = next(batches)
        waited_s = time.perf_counter() - started_s
        return batch, waited_s if pending is None or pending.is_finished else 0.0

    def _dispatch(self, step: int, state: TrainState, batch: Any, data_wait_s: float) -> tuple[TrainState, _Dispatched]:
        arrays, row_ids = self._to_device(batch, self.of.rows)
        self.bus.emit(StepStarted(step))
        state, metrics = self.compiled(state, arrays)
        return state, _Dispatched(step, metrics, row_ids, data_wait_s, self._share_of_rows(arrays))

    def _share_of_rows(self, arrays: Mapping[str, jax.Array]) -> float:
        """Returns the rows of a batch relative to the largest batch, whose FLOPs `ideal_step_s` counts."""
        name, largest = next(iter(self.of.config.batches.spec(self.of.config.model).items()))
        return arrays[name].shape[0] / largest.shape[0]

    def _hand_over(self, state: TrainState, step: int) -> None:
        """Passes the current weights to data that is sampled from the policy."""
        if isinstance(self.of.data, PolicyBatches):
            auxiliary = {name: each.params for name, each in state.auxiliary.items()}
            alone = self.of.data.takes_trained
            frozen = state.frozen if alone else {}
            given = join(state.params, state.mutable) if alone else self.of.program.step.variables(state)
            self.of.data.update_weights(given, step, partial(self._score, auxiliary, frozen))

    def _score(
        self, auxiliary: Any, frozen: Any, params: Any, batch: Mapping[str, np.ndarray]
    ) -> Mapping[str, np.ndarray]:
        """Scores a batch of host arrays with the program and returns host arrays."""
        if self._scorer is None:
            self._scorer = self.of.program.compiled_scores()
        arrays, _ = self._to_device(batch)
        return jax.device_get(self._scorer(join(params, frozen), arrays, auxiliary))

    def _to_device(
        self, batch: Mapping[str, np.ndarray], rows: np.ndarray | None = None
    ) -> tuple[dict[str, jax.Array], np.ndarray | None]:
        arrays = dict(batch)
        row_ids = arrays.pop("row_ids", None)
        shapes = None if rows is None else self.of.config.batches.spec(self.of.config.model)
        return shard_batch(self.of.program, arrays, rows=rows, shapes=shapes), row_ids

    def _finish(self, dispatched: _Dispatched | None) -> None:
        """Waits for a step, checks its loss and reports the step."""
        if dispatched is None:
            return
        results = jax.device_get(self.of.processes.ready(dispatched.metrics))
        metrics = {name: float(value) for name, value in results.items()} | dict(dispatched.data_metrics)
        now_s = time.perf_counter()
        duration_s, self._clock_s = now_s - self._clock_s, now_s
        skipped = metrics.get("skipped", 0.0) > 0
        if not skipped and not all(map(math.isfinite, _checked(metrics).values())):
            raise NonFiniteLoss(self._describe_non_finite(dispatched, metrics))
        self._last = metrics
        ideal_step_s = None if self.ideal_step_s is None else self.ideal_step_s * dispatched.share_of_rows
        mfu = None if ideal_step_s is None else ideal_step_s / duration_s
        if mfu is not None and mfu > 1:  # a CPU's peak is measured; above 1, the CPU was busy then: unknown
            mfu = None
        # Packed rollouts do the same work in fewer rows; smaller batches of `run.ramp` do less.
        rate = self._work * (dispatched.share_of_rows if self.of.config.run.ramp else 1) / duration_s
        self._rates.append(rate)
        self.bus.emit(StepFinished(dispatched.step, metrics, duration_s, rate, mfu, dispatched.data_wait_s))

    def _describe_non_finite(self, dispatched: _Dispatched, metrics: Mapping[str, float]) -> str:
        # The save in flight may become the newest checkpoint, which the message names.
        self.store.wait()
        data, row_ids = self.of.data, dispatched.row_ids
        rows = ""
        if row_ids is not None and (described := data.describe_rows(row_ids)):
            documents = "\n".join(f"  {line}" for line in described)
            rows = f" The batch holds rows {row_ids.tolist()}:\n{documents}"
        saved = self.store.latest()
        remedy = "no checkpoint was written yet" if saved is None else f"the last checkpoint is step {saved}"
        found = ", ".join(f"{name} is {value}" for name, value in _checked(metrics).items())
        return (
            f"Step {dispatched.step}: {found}; all must be finite.{rows}\n"
            f"Nothing of this step is saved; {remedy}. Lower optimizer.learning_rate, or look "
            "at the data of this step."
        )

    def _due(self, step: int) -> bool:
        return self._evaluation_due(step) or self._save_due(step)

    def _evaluation_due(self, step: int) -> bool:
        every = self.of.config.run.evaluate_every_steps
        # `_finished` evaluates the last step.
        return every > 0 and step % every == 0 and step < self.of.config.run.steps

    def _evaluation_missing(self, step: int) -> bool:
        """Checks whether the resumed run ended between saving `step` and its evaluation."""
        if step == 0 or not self._evaluation_due(step):
            return False

        def is_missing() -> bool:
            found = (each for each in records(self.of.directory.metrics) if each.get("kind") == "evaluation")
            return all(each.get("step") != step for each in found)

        return self.of.processes.on_first("evaluation", is_missing)

    def _save_due(self, step: int) -> bool:
        every = self.of.config.checkpoint.every_steps
        return every > 0 and step % every == 0

    def _pause(self, step: int, state: TrainState, batches: Any) -> None:
        # Before the evaluation, which a resumed run makes up if this run is killed in between (`_evaluation_missing`).
        if self._save_due(step):
            self._save(step, state, batches)
        if self._evaluation_due(step):
            self._report_evaluation(step, state)
        # Saving and evaluating do not count as a step's duration.
        self._clock_s = time.perf_counter()

    def _report_evaluation(self, step: int, state: TrainState) -> float | None:
        started_s = time.perf_counter()
        metrics = self.evaluate(state)
        if metrics is None:
            self._warn_of_no_evaluation()
            return None
        self._last_evaluation = metrics
        self.bus.emit(EvaluationFinished(step, metrics, time.perf_counter() - started_s))
        return metrics["loss"]

    def _warn_of_no_evaluation(self) -> None:
        every, data = self.of.config.run.evaluate_every_steps, self.of.config.data
        if every and not self._is_evaluation_cut:
            warnings.warn(
                f"run.evaluate_every_steps is {every}, but nothing is evaluated: data of kind {data.name!r} has no "
                "held-out examples here. Hold some out, or leave run.evaluate_every_steps out.",
                stacklevel=2,
            )

    def _save(self, step: int, state: TrainState, batches: Any) -> None:
        if step != self._saved_step:
            self.bus.flush()  # a run resumed from this checkpoint needs all metrics of earlier steps
            stored, config_yaml = state.without_frozen(), to_yaml(self.of.config)
            self.store.save(step, stored, batches.get_state(), config_yaml, frozen=self.frozen)
            self._saved_step = step

    def _finished(self, step: int, state: TrainState, batches: Any) -> RunSummary:
        self._save(step, state, batches)
        validation_loss = self._report_evaluation(step, state)
        if self._is_evaluation_cut:
            return self._stopped(step, state, batches)
        self.store.wait()
        summary = self._summary(step, validation_loss)
        self.bus.emit(RunFinished(step, self._last))
        return summary

    def _stopped(self, step: int, state: TrainState, batches: Any) -> RunSummary:
        stop = self._stop
        self._save(step, state, batches)
        self.store.wait()
        if stop.received is signal.SIGINT:
            raise Interrupted(
                f"Stopped by Ctrl-C after step {step} of {self.of.config.run.steps}; it is saved. "
                "Add --resume to continue."
            )
        return self._summary(step, None, stopped_by=stop.received.name if stop.received else None)

    def _summary(self, step: int, validation_loss: float | None, stopped_by: str | None = None) -> RunSummary:
        # The median ignores the few steps that waited for a save.
        rate = statistics.median(self._rates) if self._rates else None
        unit = self.of.config.batches.work()[0]
        return RunSummary(
            step,
            self._last.get("loss"),
            validation_loss,
            rate,
            unit,
            self.of.directory.path,
            stopped_by,
            metrics=self._displayed(self._last),
            validation_metrics=self._displayed(self._last_evaluation),
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines about the objective to print at the start of the run."""
        return tuple(self.of.program.step.objective.notes)

    @property
    def shown_metrics(self) -> tuple[str, ...]:
        """Names of the metrics that the objective selects for display next to the loss."""
        return tuple(self.of.program.step.objective.shown_metrics)

    def _displayed(self, metrics: Mapping[str, float]) -> dict[str, float]:
        return {name: metrics[name] for name in self.shown_metrics if name in metrics}

    @property
    def _work(self) -> int:
        return self.of.config.batches.work()[1]


def _checked(metrics: Mapping[str, float]) -> dict[str, float]:
    """Selects the metrics that must be finite: the loss, and the gradient norms of the model and auxiliary models."""
    return {name: metrics[name] for name in ("loss", *(name for name in metrics if name.endswith("grad_norm")))}
