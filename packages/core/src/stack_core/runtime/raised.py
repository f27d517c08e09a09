"""Exceptions of worker processes as plain values, which the driver raises again."""

import importlib
import traceback
from dataclasses import dataclass
from typing import Any

from stack_core.abi.errors import ClusterError, StackError

__all__ = ["Raised"]


@dataclass(frozen=True)
class Raised:
    """An exception without its frames.

    Exceptions cannot be pickled in general: unpickling calls the constructor, which may need other arguments.

    Attributes:
      module: module of its class.
      name: qualified name of its class.
      arguments: its arguments as text, the message first.
      facts: its attributes, such as the parameter at fault of a `GenerationError`.
      is_expected: True for a `StackError`, which the driver raises as such.
      traceback: formatted traceback.
    """

    module: str
    name: str
    arguments: tuple[str, ...]
    facts: dict[str, Any]
    is_expected: bool
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> "Raised":
        """Describes an exception that is being handled."""
        expected = isinstance(error, StackError)
        arguments = tuple(map(str, error.args))
        facts = dict(vars(error)) if expected else {}
        kind = type(error)
        return cls(kind.__module__, kind.__qualname__, arguments, facts, expected, traceback.format_exc())

    def exception(self) -> StackError:
        """Returns the exception to raise, a `ClusterError` unless the class is derived from `StackError`."""
        if not self.is_expected:
            message = ", ".join(self.arguments)
            return ClusterError(f"A worker process raised {self.name}: {message}\n{self.traceback}")
        kind: Any = importlib.import_module(self.module)
        for part in self.name.split("."):
            kind = getattr(kind, part)
        error = kind.__new__(kind, *self.arguments)
        error.args = self.arguments
        vars(error).update(self.facts)
        return error
