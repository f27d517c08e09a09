"""Advice of tuned tables for a call. A faulty table causes a warning, never an error."""

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

from stack_core.abi.errors import nearest
from stack_core.abi.ops import OpCall, OpImplementation, TunedChoice
from stack_core.abi.plugins import registries
from stack_core.abi.tuning import TunedTable
from stack_core.chips.context import target_chip
from stack_core.chips.jit_context import JitContext
from stack_core.ops.dispatch.report import warn_once

__all__ = ["in_use", "tuned_choices", "use_tuned_table"]

in_use: Final[JitContext[TunedTable]] = JitContext()
"""The table of the surrounding `use_tuned_table`, or None."""

_IN_USE = "in use"


def use_tuned_table(table: TunedTable) -> contextlib.AbstractContextManager[None]:
    """Uses only `table` for calls traced in this context; contexts may be nested.

    A function that `jax.jit` traced under another table, or under the tables of plugins, is traced again. Tables are
    compared by `==` and hash.
    """
    return in_use(table)


def tuned_choices(
    call: OpCall,
    candidates: Mapping[str, OpImplementation],
    answers: Mapping[str, bool | str],
    requested: OpImplementation | None = None,
    forward: TunedChoice | None = None,
) -> dict[str, TunedChoice]:
    """Returns the applicable advice of the tables by table name, sorted by name.

    Other advice is skipped with a warning: an unknown or unsupported implementation, or a config for an implementation
    without configs.

    Args:
      call: one direction of a call.
      candidates: implementations of the op by name.
      answers: True for each implementation that supports the call, else the reason.
      requested: implementation that the caller requested and that runs the call; tables then only advise on its config.
      forward: choice for the forward pass, if this is the backward pass.
    """
    able = {name: candidate for name, candidate in candidates.items() if answers[name] is True}
    # A table that prefers another implementation would otherwise lack a config for the requested one.
    among = able if requested is None else {requested.name: requested}
    choices: dict[str, TunedChoice] = {}
    for table, load in _tables().items():
        choice = _looked_up(table, load, call, among, forward)
        if choice is None:
            continue
        problem = _problem(choice, candidates, answers)
        if problem is None:
            choices[table] = choice
            continue
        warn_once(
            table,
            call.op,
            str(choice.implementation),
            message=f"The tuned table {table!r} chooses {choice.implementation!r} for {call.op} {call.direction}, but "
            f"{problem}. The choice is passed over; tune again, or block the plugin that registers the table.",
        )
    return choices


def _tables() -> dict[str, Callable[[], Any]]:
    """Returns a loader for each table to consult, by table name."""
    table = in_use.value
    if table is not None:
        return {_IN_USE: lambda: table}
    registered = registries.tuned_tables
    return {name: functools.partial(registered.__getitem__, name) for name in registered.names()}


def _looked_up(
    table: str,
    load: Callable[[], Any],
    call: OpCall,
    among: Mapping[str, OpImplementation],
    forward: TunedChoice | None,
) -> TunedChoice | None:
    chip = target_chip()
    try:
        choice = load().lookup(call, chip, candidates=among, forward=forward)
    except Exception as error:  # The table of a plugin may raise anything; only its advice is lost.
        warn_once(
            table,
            message=f"The tuned table {table!r} is ignored if it fails; its lookup for {call.op} {call.direction} "
            f"raised {type(error).__name__}: {error}",
        )
        return None
    if choice is None or isinstance(choice, TunedChoice):
        return choice
    warn_once(
        table,
        message=f"The tuned table {table!r} is ignored if it returns a {type(choice).__name__}; "
        "expected a TunedChoice or None.",
    )
    return None


def _problem(
    choice: TunedChoice, candidates: Mapping[str, OpImplementation], answers: Mapping[str, bool | str]
) -> str | None:
    """Returns the reason why a choice cannot be followed, or None."""
    name = choice.implementation
    if name not in candidates:
        return f"there is no such implementation.{nearest(str(name), candidates)} Known: {', '.join(candidates)}"
    if answers[name] is not True:
        return f"that does not support the call: {answers[name] or 'no reason given'}"
    if choice.config is not None and candidates[name].default is None:
        return f"its config {choice.config!r} is of type {type(choice.config).__name__}; it takes none"
    return None
