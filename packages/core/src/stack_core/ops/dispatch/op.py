"""What core knows of an op besides its mathematics: how its axes meet, which fold and which may be split."""

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from stack_core.abi.errors import PluginError, UnknownName, nearest
from stack_core.abi.ops import OWN, OpCall, OpImplementation
from stack_core.abi.plugins import registries
from stack_core.ops.dispatch.differentiated import differentiated
from stack_core.ops.references.quantized import is_quantized

__all__ = ["Op", "OpAxes", "function_of", "op_named", "suite_of", "symbols"]


@dataclass(frozen=True)
class OpAxes:
    """The axes of one call's arrays, by name: "... d_in". Axes of one name have one size, or 1.

    Attributes:
      operands: by parameter name; a tuple for a parameter that is a tuple of arrays.
      outputs: of each leaf of the result.
      residuals: of what the op names, as `Op.residuals` does.
      whole: names of axes that no device may hold a part of. An axis that operands have and an output lacks is summed
        over: where it is split, the outputs of the devices are added.
      together: pairs of names that are split over the same devices, or not at all.
    """

    operands: Mapping[str, str | tuple[str, ...]]
    outputs: tuple[str, ...]
    residuals: Mapping[str, str] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()
    together: tuple[tuple[str, str], ...] = ()

    def of_leaves(self, arrays: Mapping[str, Any]) -> list[str | None]:
        """The axes of each leaf of the operands; None for the parts of a quantized array, which have their own."""
        found: list[str | None] = []
        for name, array in arrays.items():
            if is_quantized(array):
                found += [None] * len(jax.tree.leaves(array))
            elif array is not None:
                axes = self.operands[name]
                found += axes if isinstance(axes, tuple) else [axes]
        return found


@dataclass(frozen=True, eq=False)
class Op:
    """An op: its reference and its axes.

    Attributes:
      reference: the forward pass of the implementation "reference". JAX can differentiate it forward and backward,
        any number of times, where `plain.is_plain()`.
      axes: the axes of a call's arrays.
      folds: the axis that the mapped axis of a `jax.vmap` becomes a part of: "..." or a name; None if there is none.
      residuals: what a forward pass may hand to the backward pass of another implementation.
      backward: of the reference; by default JAX's derivative of it, which computes it again.
      keeps: that derivative rather keeps what JAX would save for it.
      linear_in: array parameters that the result is linear (or affine) in while the others are fixed. The derivative by
        one of them alone does not read it, so that it is not kept for the backward pass.
    """

    name: str
    reference: Callable[..., tuple[Any, Mapping[str, Any]]]
    axes: Callable[[OpCall], OpAxes]
    folds: str | None = None
    residuals: tuple[str, ...] = ()
    backward: Callable[..., Mapping[str, Any]] | None = None
    keeps: bool = False
    linear_in: tuple[str, ...] = ()

    @functools.cache  # noqa: B019  ops live as long as their modules
    def implementation(self) -> OpImplementation:
        """The reference as the implementation of the lowest priority."""
        forward, backward = differentiated(self.reference)
        backward = self.backward or backward
        kept = (*self.residuals, OWN) if self.keeps else self.residuals
        return OpImplementation(self.name, "reference", forward, backward, residuals=kept, priority=0)


def op_named(name: str) -> Op:
    """Returns a registered op.

    Raises:
      UnknownName: no plugin defines it.
      PluginError: what is registered is not an `Op` of that name.
    """
    found = registries.op_definitions[name]
    if not isinstance(found, Op) or found.name != name:
        raise PluginError(f"op_definitions {name!r} is registered as {found!r}; expected an Op of that name.")
    return found


def function_of(op: str) -> Callable[..., Any]:
    """Returns the function of an op that models call, with `implementation` and `axes` among its parameters.

    Raises:
      UnknownName: no plugin defines the op.
      PluginError: it is registered without one.
    """
    # Core's own are found without the registry, so that a plugin may implement an op in the module that registers it.
    own = getattr(importlib.import_module("stack_core.ops"), op, None)
    if inspect.isfunction(own) and _is_of_an_op(own):
        return own
    function = _detail(op, "function")
    if not _is_of_an_op(function):
        raise PluginError(
            f"op_definitions {op!r}: {function!r} does not take `implementation`, as a function of an op."
        )
    return function


def _is_of_an_op(function: Callable[..., Any]) -> bool:
    return "implementation" in inspect.signature(function).parameters


def suite_of(op: str) -> Any:
    """Returns the `OpSuite` of an op's contract; raises what `function_of` raises."""
    return _detail(op, "suite")


def _detail(op: str, detail: str) -> Any:
    entry = next((entry for entry in registries.op_definitions.entries() if entry.name == op), None)
    if entry is None:
        known = registries.op_definitions.names()
        raise UnknownName(
            f"Unknown op {op!r}.{nearest(op, known)} There are: {', '.join(known)}. A plugin adds one with "
            "stack_register_op_definitions."
        )
    module, _, attribute = str(entry.details.get(detail, "")).partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise PluginError(
            f"op_definitions {op!r} of plugin {entry.provider!r}: {detail}={entry.details.get(detail)!r} cannot be "
            f"loaded ({error}); expected 'module:attribute'."
        ) from error


def symbols(axes: str, rank: int) -> tuple[str, ...]:
    """A name for each axis of an array: "... d_in" of three axes is ("...0", "...1", "d_in")."""
    names = axes.split()
    if "..." not in names:
        return tuple(names)
    at, leading = names.index("..."), rank - len(names) + 1
    return (*names[:at], *(f"...{number}" for number in range(leading)), *names[at + 1 :])
