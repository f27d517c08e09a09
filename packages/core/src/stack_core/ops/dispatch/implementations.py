"""Registered implementations of an op, and the order among them."""

from collections.abc import Mapping
from typing import Any

from stack_core.abi.errors import ArgumentError, PluginError
from stack_core.abi.ops import OpImplementation
from stack_core.abi.plugins import plugins, registries
from stack_core.ops.dispatch.report import warn_once
from stack_core.ops.dispatch.request import Implementation
from stack_core.ops.dispatch.signature import check_signature

__all__ = ["implementations_of", "is_installed", "named_implementations", "preferred"]


def implementations_of(op: str) -> dict[str, OpImplementation]:
    """Returns the registered implementations by name, in order of installation with stack's own packages first.

    Implementations without an installed backend reject every call.
    """
    found: dict[str, OpImplementation] = {}
    entries = [entry for entry in registries.ops.entries() if entry.name.startswith(f"{op}/")]
    owners = {report.name: report.distribution for report in plugins.reports()}
    of_stack = {entry.name for entry in entries if owners.get(entry.provider, "").startswith("stack-")}
    # Implementations of stack's own packages come first: a plugin precedes them only by priority or `before`.
    for entry in sorted(entries, key=lambda entry: (entry.name not in of_stack, entry.provider, entry.name)):
        own = entry.name.removeprefix(f"{op}/")
        try:
            found[own] = _registered(entry.name)
        except PluginError as error:
            # Several packages register kernels of one op. If the import of one kernel fails, calls use the others.
            if isinstance(error.__cause__, ModuleNotFoundError):
                found[own] = _absent(entry.name, error.__cause__)
            else:
                warn_once(entry.name, message=f"{error} Calls go to other implementations.")
    return found


def is_installed(found: OpImplementation) -> bool:
    """Returns whether the backend of an implementation from `implementations_of` is installed."""
    return found.forward is not _never


def named_implementations(op: str, implementation: Implementation) -> list[OpImplementation]:
    """Returns the implementations that the caller of an op requests, in order of preference.

    Raises:
      UnknownName: one is not registered.
      ArgumentError: one belongs to another op.
    """
    if implementation is None:
        return []
    names = [implementation] if isinstance(implementation, str | OpImplementation) else list(implementation)
    for other in names:
        if isinstance(other, OpImplementation) and other.op != op:
            raise ArgumentError(f"{op}: {other.name!r} is an implementation of {other.op}; name one of {op}.")
    return [name if isinstance(name, OpImplementation) else _registered(f"{op}/{name}") for name in names]


def preferred(candidates: Mapping[str, OpImplementation]) -> list[str]:
    """Returns the names with the highest priority among the candidates not preceded by another candidate."""
    precedes = {name: _preceded_by(name, candidates) for name in candidates}
    leading = {
        name: each
        for name, each in candidates.items()  # precedence in a cycle does not count
        if not any(name in precedes[other] and other not in precedes[name] for other in candidates)
    }
    top = max(each.priority for each in leading.values())
    return [name for name, each in leading.items() if each.priority == top]


def _preceded_by(name: str, candidates: Mapping[str, OpImplementation]) -> set[str]:
    """Returns the candidates that `name` precedes, directly or transitively."""
    found: set[str] = set()
    reached = [name]
    while reached:
        each = candidates[reached.pop()]
        # A negative priority keeps an implementation out of the automatic choice, so its `before` does not count
        # either.
        if each.priority >= 0:
            further = (set(each.before) & set(candidates)) - found
            found |= further
            reached += further
    return found


def _registered(name: str) -> OpImplementation:
    found = registries.ops[name]
    if not isinstance(found, OpImplementation) or f"{found.op}/{found.name}" != name:
        raise PluginError(
            f"ops {name!r} is registered as {found!r}; expected an OpImplementation of that op and that name. "
            "Run `stack plugins` to find the plugin that registers it."
        )
    check_signature(found)
    return found


def _absent(name: str, error: ModuleNotFoundError) -> OpImplementation:
    """Returns a placeholder for an implementation without an installed backend, which rejects every call."""
    op, _, own = name.partition("/")
    return OpImplementation(
        op, own, _never, supports=lambda call, chip, config: f"its backend is not installed: {error}"
    )


def _never(**_: Any) -> Any:
    raise AssertionError("an implementation that refuses every call was run")
