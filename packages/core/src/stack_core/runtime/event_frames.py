"""Serialization of a run's events to JSON, for observers in another process."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stack_core.abi import events
from stack_core.abi.errors import ClusterError, TrainingError
from stack_core.abi.events import Event, RunFailed

__all__ = ["from_frame", "to_frame"]


def to_frame(event: Event) -> dict[str, Any]:
    """Serializes an event to {"event": class name, **fields}; an exception becomes its name and message."""
    fields = {field.name: _plain(getattr(event, field.name)) for field in dataclasses.fields(event)}
    return {"event": type(event).__name__, **fields}


def from_frame(frame: Mapping[str, Any]) -> Event:
    """Deserializes an event.

    Raises:
      ClusterError: this stack-core does not know the event, or its fields differ.
    """
    fields = dict(frame)
    name = fields.pop("event", None)
    kind = getattr(events, str(name), None) if name in events.__all__ else None
    if kind is None:
        raise ClusterError(f"A worker sent the event {name!r}, which this stack-core does not know.")
    if kind is RunFailed:
        # The class of the exception may not exist in this process.
        fields["error"] = TrainingError(str(fields.get("error")))
    for field in dataclasses.fields(kind):
        if field.type in (Path, "Path") and field.name in fields:
            fields[field.name] = Path(fields[field.name])
        elif str(field.type).startswith("tuple") and field.name in fields:  # JSON has only lists
            fields[field.name] = tuple(fields[field.name])
    try:
        return kind(**fields)
    except TypeError as error:
        raise ClusterError(f"A worker sent the event {name!r} with other fields: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return str(value) if isinstance(value, Path) else value
