"""Record of the implementations chosen in this process, for logs and run directories."""

import dataclasses
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from stack_core.abi.ops import OpCall

__all__ = ["changed_choices", "choice_entry", "choices", "note_choices"]

_noted: dict[str, Mapping[str, Any]] = {}
# Threads may trace at the same time.
_lock = threading.Lock()


def choices() -> list[dict[str, Any]]:
    """Returns the choices for all distinct calls traced in this process so far, in the order of first tracing.

    An entry has the `op`, its `direction`, the `call` (the dtypes and shapes of its arrays by name, and its options as
    text), the `implementation`, its `config` as text or None, and the `reason`. Entries are JSON, and equal
    choices for equal calls give equal entries, so a later process can compare them. A call that was traced several
    times has its last choice. The backward pass of a call is listed even if the call is not differentiated.
    """
    with _lock:
        # Deep copies: the record must not change with the caller's lists.
        return [json.loads(json.dumps(entry)) for entry in _noted.values()]


def changed_choices(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lists the choices that differ between two results of `choices()`, one line for each call in both."""
    then = {_key(entry): entry for entry in before}
    found = ((then[_key(entry)], entry) for entry in now if _key(entry) in then)
    return [
        f"ops.{new['op']} {new['direction']} {', '.join(f'{name} {x}' for name, x in new['call']['arrays'].items())}: "
        f"{_got(new)}, was {_got(old)}"
        for old, new in found
        if _got(old) != _got(new)
    ]


def choice_entry(call: OpCall, implementation: str, config: Any, reason: str) -> tuple[str, Mapping[str, Any]]:
    """Returns key and entry of `choices` for one direction of a call."""
    leaves, _ = jax.tree.flatten_with_path(dict(call.arrays))
    arrays = {jax.tree_util.keystr(path, simple=True, separator="."): _describe_array(leaf) for path, leaf in leaves}
    described = {"arrays": arrays, "options": {name: str(option) for name, option in call.options.items()}}
    entry = {
        "op": call.op,
        "direction": call.direction,
        "call": described,
        "implementation": implementation,
        "config": None if config is None else _text(config),
        "reason": reason,
    }
    return _key(entry), entry


def note_choices(entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Records the choices of a call, by key of `choice_entry`."""
    with _lock:
        _noted.update(entries)


def _key(entry: Mapping[str, Any]) -> str:
    return json.dumps([entry["op"], entry["direction"], entry["call"]])


def _got(entry: Mapping[str, Any]) -> str:
    return entry["implementation"] if entry["config"] is None else f"{entry['implementation']} ({entry['config']})"


def _describe_array(leaf: Any) -> str:
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def _text(config: Any) -> str:
    if not dataclasses.is_dataclass(config):
        return str(config)
    fields: Mapping[str, Any] = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return ", ".join(f"{name}={value}" for name, value in fields.items())
