"""Scalars of a run's events, named for experiment trackers."""

from stack_core.abi.events import EvaluationFinished, StepFinished

__all__ = ["scalars"]


def scalars(event: StepFinished | EvaluationFinished, unit: str) -> dict[str, float]:
    """Returns the metrics of a step under `train/`, with its rates, or of an evaluation under `validation/`.

    Args:
      event: completed step or evaluation.
      unit: unit of the work of a step, see `RunStarted.work`.
    """
    if isinstance(event, EvaluationFinished):
        return {f"validation/{name}": value for name, value in event.metrics.items()}
    rates = {f"{unit}_per_s": event.work_per_s, "duration_s": event.duration_s}
    if event.mfu is not None:
        rates["mfu"] = event.mfu
    return {f"train/{name}": value for name, value in {**event.metrics, **rates}.items()}
