"""The panel `summary`: model, data, devices, results and end of a run."""

import datetime
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from stack_core.abi.reports import Fragment
from stack_core.report.document import key_values
from stack_core.report.markup import Markup, element
from stack_train.panels.records import number_in, records

__all__ = ["summary"]

Record = Mapping[str, Any]


def summary(directory: Path, config: Mapping[str, Any]) -> Fragment:
    """Summarizes a run from its config and the JSON lines in its directory; unknown values are dashes."""
    metrics, history = records(directory / "metrics.jsonl"), records(directory / "history.jsonl")
    lines = [*_sessions(history), *_changes(records(directory / "changes.jsonl"))]
    whole = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
    body = element(
        "div",
        _ending(history),
        key_values(_results(metrics, history, config)),
        key_values(_subject(history, config)),
        _sizes(config),
        element("ul", *(element("li", line) for line in lines), class_="notes") if len(lines) > 1 else None,
        element("details", element("summary", "The resolved config"), element("pre", whole)),
    )
    return Fragment("summary", body)


def _ending(history: Sequence[Record]) -> Markup:
    """Describes the end of the last session; errors are highlighted."""
    if not history:
        return element("p", "When the run began, and how it ended, is not recorded.")
    last = history[-1]
    match last["event"]:
        case "started":
            said = f"No end is recorded since {_moment(last)}: the run is still running, or was killed."
        case "failed":
            said = f"Failed after step {last['step']:,}, {_moment(last)}. {last['error']}"
        case how:
            said = f"{how.capitalize()} at step {last['step']:,}, {_moment(last)}."
    return element("p", said, class_="failure" if last["event"] == "failed" else None)


def _results(metrics: Sequence[Record], history: Sequence[Record], config: Mapping[str, Any]) -> dict[str, Any]:
    train = [record for record in metrics if record.get("kind") == "train"]
    held_out = [record for record in metrics if record.get("kind") == "evaluation"]
    started: Mapping[str, Any] = next((each for each in reversed(history) if each["event"] == "started"), {})
    unit, work = started.get("work", ("work", None))
    last = train[-1] if train else {}
    shown = {name: number_in(last, name) for name in started.get("shown_metrics", ())}
    step = last.get("step", 0)
    losses = [(loss, each["step"]) for each in held_out if (loss := number_in(each, "loss")) is not None]
    best, at = min(losses, default=(None, None))
    return {
        "steps": f"{step:,} of {_setting(config, 'run', 'steps') or 0:,}",
        "last loss": _loss(number_in(last, "loss")),
        **{f"last {name.replace('_', ' ')}": f"{value:#.3g}" for name, value in shown.items() if value is not None},
        "last held-out loss": _loss(losses[-1][0]) if losses else None,
        "best held-out loss": None if best is None else f"{_loss(best)}, step {at:,}",
        f"{unit} trained": None if work is None else step * work,
        "duration": _duration(history, train),
        "step, median_s": _median(train, "duration_s"),
        f"{unit}_per_s": _median(train, f"{unit}_per_s"),
        "mfu": _median(train, "mfu"),
    }


def _subject(history: Sequence[Record], config: Mapping[str, Any]) -> dict[str, Any]:
    """Lists the model, data, objective, optimizer and devices of a run."""
    start: Record = next((each for each in reversed(history) if each["event"] == "started"), {})
    mesh = config.get("mesh", {})
    axes = {axis: size for axis, size in mesh.items() if type(size) is int and size not in (1, -1)}
    unit, work = start.get("work", ("work", None))
    subject = {
        "model": _setting(config, "model", "name"),
        "parameters": start.get("parameters"),
        "data": " ".join(filter(None, (_setting(config, "data", "name"), _setting(config, "data", "source")))),
        f"{unit} in a step": work,
        "objective": _setting(config, "objective", "name"),
        "optimizer": _setting(config, "optimizer", "name"),
        "learning rate": _setting(config, "optimizer", "learning_rate"),
        "starts from": _setting(config, "run", "init_from"),
        "devices": start.get("devices"),
        "mesh": ", ".join(f"{axis} {size}" for axis, size in axes.items()),
        "compiled in_s": start.get("compile_s"),
    }
    return {name: value for name, value in subject.items() if value not in (None, "")}


def _sizes(config: Mapping[str, Any]) -> Markup | None:
    sizes = [f"{key} {value:,}" for key, value in config.get("model", {}).items() if type(value) is int]
    return element("p", f"The model's sizes: {', '.join(sizes)}.", class_="help") if sizes else None


def _setting(config: Mapping[str, Any], section: str, key: str) -> Any:
    return config.get(section, {}).get(key)


def _loss(value: float | None) -> str | None:
    return None if value is None else f"{value:#.5g}"


def _median(found: Sequence[Record], name: str) -> float | None:
    values = [value for record in found if (value := number_in(record, name)) is not None]
    return statistics.median(values) if values else None


def _duration(history: Sequence[Record], train: Sequence[Record]) -> str | None:
    """Sums the wall time of all sessions, or the durations of steps, a lower bound, if the end of one is missing."""
    total = datetime.timedelta()
    for begin, end in zip(history[::2], history[1::2], strict=False):
        if begin["event"] != "started" or end["event"] == "started":
            break
        elapsed_s = number_in(end, "elapsed_s")  # monotonic clock; missing in older runs
        total += _time(end) - _time(begin) if elapsed_s is None else datetime.timedelta(seconds=elapsed_s)
    else:
        if history and len(history) % 2 == 0:
            return _clock(total.total_seconds())
    steps_s = sum(number_in(record, "duration_s") or 0.0 for record in train)
    return f"{_clock(steps_s)} in steps" if train else None


def _clock(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _sessions(history: Sequence[Record]) -> Iterator[str]:
    for each in history:
        error = f": {each['error']}" if "error" in each else ""
        yield f"{_moment(each)}: {each['event']} at step {each['step']:,}{error}"


def _changes(found: Sequence[Record]) -> Iterator[str]:
    yield from (f"changed when resumed, {each['time']}: {'; '.join(each['changes'])}" for each in found)


def _time(record: Record) -> datetime.datetime:
    return datetime.datetime.fromisoformat(record["time"])


def _moment(record: Record) -> str:
    return f"{_time(record):%Y-%m-%d %H:%M:%S} UTC"
