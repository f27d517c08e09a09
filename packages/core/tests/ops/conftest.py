"""Registries as a third party would fill them."""

from typing import Any

import pytest

from stack_core.abi.ops import OpCall, TunedChoice
from stack_core.abi.plugins import registries
from stack_core.abi.registry import Entry, Registry
from stack_core.ops.definitions.linear import REFERENCE
from stack_core.ops.dispatch import report


class Table:
    """A tuned table that answers by the direction of the call, and keeps what it was asked."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: list[tuple[OpCall, Any]] = []

    def lookup(self, call: OpCall, chip: Any, *, candidates: Any, forward: Any = None) -> Any:
        self.asked.append((call, chip, tuple(candidates), forward))
        answer = self.answers.get(call.direction)
        if isinstance(answer, Exception):
            raise answer
        return TunedChoice(*answer) if isinstance(answer, tuple) else answer


@pytest.fixture(autouse=True)
def forget_what_was_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_reported", set())


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts implementations of `linear` beside the reference."""

    def register(*implementations: Any) -> None:
        entries = {f"linear/{found.name}": found for found in (REFERENCE, *implementations)}
        found = {name: Entry(name, target, "test") for name, target in entries.items()}
        monkeypatch.setattr(registries, "ops", Registry("ops", lambda: (found, {})), raising=False)

    return register


@pytest.fixture
def register_tables(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Registers tables, each a target or what a `Table` answers: (implementation, config, reason) by direction."""

    def register_tables(**tables: Any) -> dict[str, Any]:
        targets = {name: Table(**table) if isinstance(table, dict) else table for name, table in tables.items()}
        found = {name: Entry(name, target, "test") for name, target in targets.items()}
        monkeypatch.setattr(registries, "tuned_tables", Registry("tuned_tables", lambda: (found, {})), raising=False)
        return targets

    return register_tables
