"""What the tuned tables of plugins advise for a call. A table that is wrong is reported, and stops nothing."""

from collections.abc import Mapping
from typing import Any

from stack_core.abi import OpCall, OpImplementation, TunedChoice
from stack_core.errors import nearest
from stack_core.hardware.target_chip import target_chip
from stack_core.ops._report import warn_once
from stack_core.plugins import registries

__all__ = ["tuned_choices"]


def tuned_choices(
    call: OpCall, candidates: Mapping[str, OpImplementation], answers: Mapping[str, bool | str]
) -> dict[str, TunedChoice]:
    """What can be followed of what the tables advise, by the table's name, in the order of the names.

    Advice that cannot be followed is passed over with a warning: an implementation that is unknown or does not support
    the call, or a config of another type than that of its own configs.

    Args:
      candidates: the implementations of the op by name.
      answers: whether each supports the call, True or the reason why not.
    """
    choices: dict[str, TunedChoice] = {}
    for table in registries.tuned_tables.names():
        choice = _looked_up(table, call)
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


def _looked_up(table: str, call: OpCall) -> TunedChoice | None:
    chip = target_chip()
    try:
        choice = registries.tuned_tables[table].lookup(call, chip)
    except Exception as error:  # A table may fail in any way; that must cost its advice and nothing else.
        warn_once(
            table,
            message=f"The tuned table {table!r} is ignored where it fails; asked about {call.op} {call.direction} it "
            f"raised {type(error).__name__}: {error}",
        )
        return None
    if choice is None or isinstance(choice, TunedChoice):
        return choice
    warn_once(
        table,
        message=f"The tuned table {table!r} is ignored where it answers with a {type(choice).__name__}; "
        "expected a TunedChoice or None.",
    )
    return None


def _problem(
    choice: TunedChoice, candidates: Mapping[str, OpImplementation], answers: Mapping[str, bool | str]
) -> str | None:
    """Why a choice cannot be followed; None where it can."""
    name = choice.implementation
    if name not in candidates:
        return f"there is no such implementation.{nearest(str(name), candidates)} Known: {', '.join(candidates)}"
    if answers[name] is not True:
        return f"that does not support the call: {answers[name] or 'no reason given'}"
    if not _fits(choice.config, candidates[name].configs):
        known = ", ".join(sorted({type(config).__name__ for config in candidates[name].configs}))
        expected = f"expected {known}" if known else "it takes none"
        return f"its config {choice.config!r} is of type {type(choice.config).__name__}; {expected}"
    return None


def _fits(config: Any, configs: tuple[Any, ...]) -> bool:
    return config is None or any(isinstance(config, type(known)) for known in configs)
