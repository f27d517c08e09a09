"""Methods by name: what becomes of a parameter that a rule quantizes."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from stack_core.errors import UnknownName, nearest
from stack_quant.rules import Rule

__all__ = ["METHODS", "Method", "method"]


@dataclass(frozen=True)
class Method:
    """A method of quantization.

    Attributes:
      name: "ptq".
      check: raises RuleError where a rule asks for what the method does not do.
      parameter: `(array, spec, path)` to what the model holds in the parameter's place, a pytree class with
        `__stack_qview__`; `spec` is the `ArraySpec` that the rule and the parameter's uses give.
    """

    name: str
    check: Callable[[Sequence[Rule]], None]
    parameter: Callable[[Any, Any, str], Any]


METHODS: Final = {"ptq": "stack_quant.methods.ptq:PTQ"}
"""Where each is, "module:attribute"."""


def method(name: str) -> Method:
    """The method of a name.

    Raises:
      UnknownName: there is none; names the nearest and all.
    """
    if name not in METHODS:
        raise UnknownName(f"Unknown method {name!r}.{nearest(name, METHODS)} Methods: {', '.join(METHODS)}.")
    module, attribute = METHODS[name].split(":")
    return getattr(importlib.import_module(module), attribute)
