"""Progress on standard error: a live bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Mapping, Sequence
from functools import singledispatchmethod

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from stack_core.abi.event_bus import ObserverContext
from stack_core.abi.events import (
    CheckpointRestored,
    CheckpointSaved,
    CheckpointSkipped,
    EvaluationFinished,
    Event,
    FormationFormed,
    RunFinished,
    RunStarted,
    StepFinished,
    WorkerDied,
)

__all__ = ["TerminalObserver", "terminal_observer"]

_SECONDS_BETWEEN_LINES = 5.0
_SMOOTHING = 0.9


def terminal_observer(context: ObserverContext) -> "TerminalObserver":
    """Builds the terminal observer of a run."""
    return TerminalObserver(live=context.terminal)


class TerminalObserver:
    """Shows the loss, the objective's `shown_metrics`, throughput, MFU and remaining time of completed steps.

    Args:
      live: show a progress bar; otherwise print a line every few seconds.
    """

    def __init__(self, *, live: bool, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        columns = (MofNCompleteColumn(), BarColumn(bar_width=24), TextColumn("{task.description}"))
        self._progress = Progress(*columns, console=self._console) if live else None
        self._task = self._progress.add_task("compiling") if self._progress else None
        self._steps, self._unit = 0, "tokens"
        self._shown_metrics: tuple[str, ...] = ()
        self._rate_metrics: tuple[str, ...] = ()
        self._smoothed_s: float | None = None
        self._last_line_s = -_SECONDS_BETWEEN_LINES

    def close(self) -> None:
        if self._progress:
            self._progress.stop()

    @singledispatchmethod
    def observe(self, event: Event) -> None:
        """Shows an event; events without a registered handler are ignored."""

    @observe.register
    def _(self, event: RunStarted) -> None:
        self._steps, self._unit = event.steps, event.work[0]
        self._shown_metrics, self._rate_metrics = event.shown_metrics, event.rate_metrics
        self._console.print(
            f"{event.parameters:,} parameters, {event.work[1]:,} {self._unit} a step, "
            f"steps {event.first_step + 1:,} to {event.steps:,} -> {event.directory}",
            markup=False,
        )
        for note in event.notes:
            self._print(note)
        if self._progress and self._task is not None:
            self._progress.update(self._task, total=event.steps, completed=event.first_step)
            self._progress.start()

    @observe.register
    def _(self, event: StepFinished) -> None:
        before = event.duration_s if self._smoothed_s is None else self._smoothed_s
        self._smoothed_s = _SMOOTHING * before + (1 - _SMOOTHING) * event.duration_s
        left_s = (self._steps - event.step) * self._smoothed_s
        selected = {"shown_metrics": self._shown_metrics, "rate_metrics": self._rate_metrics}
        line = describe(event, self._unit, left_s=left_s, **selected)
        if self._progress and self._task is not None:
            self._progress.update(self._task, completed=event.step, description=line)
        elif time.monotonic() - self._last_line_s >= _SECONDS_BETWEEN_LINES or event.step == self._steps:
            self._last_line_s = time.monotonic()
            self._print(f"step {event.step:,}/{self._steps:,}  {line}")

    @observe.register
    def _(self, event: EvaluationFinished) -> None:
        line = "  ".join(_figures(event.metrics, self._shown_metrics))
        self._print(f"step {event.step:,}  validation {line}  ({event.duration_s:.1f} s)")

    @observe.register
    def _(self, event: CheckpointSaved) -> None:
        self._print(f"step {event.step:,}  saved {event.path.name} (training waited {event.blocked_s * 1e3:.0f} ms)")

    @observe.register
    def _(self, event: CheckpointRestored) -> None:
        self._print(f"restored step {event.step:,} from {event.path}")

    @observe.register
    def _(self, event: CheckpointSkipped) -> None:
        self._print(f"skipped checkpoint {event.path}: {event.reason}")

    @observe.register
    def _(self, event: RunFinished) -> None:
        self._print(f"finished at step {event.step:,}")

    @observe.register
    def _(self, event: FormationFormed) -> None:
        hosts = len(event.hosts)
        self._print(f"formation {event.number}: {hosts} {'host' if hosts == 1 else 'hosts'}")

    @observe.register
    def _(self, event: WorkerDied) -> None:
        self._print(f"lost {event.reason}; going on from the last checkpoint")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False)


def describe(
    event: StepFinished,
    unit: str,
    *,
    left_s: float,
    shown_metrics: Sequence[str] = (),
    rate_metrics: Sequence[str] = (),
) -> str:
    """Formats a step in one line: loss, shown metrics, rates, MFU for chips with a known peak, time left."""
    parts = _figures(event.metrics, shown_metrics)
    amounts = {name.replace("_", " "): event.metrics[name] for name in rate_metrics if name in event.metrics}
    rates = {unit: event.work_per_s, **{name: amount / event.duration_s for name, amount in amounts.items()}}
    parts += [f"{rate:,.0f} {name}/s" if rate >= 100 else f"{rate:.3g} {name}/s" for name, rate in rates.items()]
    if event.mfu is not None:
        parts.append(f"MFU {event.mfu:.1%}")
    minutes, seconds = divmod(round(left_s), 60)
    hours, minutes = divmod(minutes, 60)
    parts.append(f"{hours}:{minutes:02}:{seconds:02} left")
    return "  ".join(parts)


def _figures(metrics: Mapping[str, float], shown_metrics: Sequence[str]) -> list[str]:
    shown = [f"{name.replace('_', ' ')} {metrics[name]:#.3g}" for name in shown_metrics if name in metrics]
    return [f"loss {metrics['loss']:#.5g}", *shown]
