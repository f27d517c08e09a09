"""Definition of an op: its reference implementation and the roles of its axes."""

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
    """Named axes of the arrays of one call, as in "... d_in". Axes with the same name have the same size, or 1.

    Attributes:
      operands: axes by parameter name; a tuple for a parameter that is a tuple of arrays.
      outputs: axes of each leaf of the result.
      residuals: axes of each of `Op.residuals`, by name.
      whole: names of axes that must not be split over devices. Any other axis of operands that an output lacks is
        contracted: if it is split, the outputs of the devices are added.
      together: pairs of axes that must be split over the same devices, or not at all.
    """

    operands: Mapping[str, str | tuple[str, ...]]
    outputs: tuple[str, ...]
    residuals: Mapping[str, str] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()
    together: tuple[tuple[str, str], ...] = ()

    def of_leaves(self, arrays: Mapping[str, Any]) -> list[str | None]:
        """Returns the axes of each leaf of the operands; None for leaves of quantized arrays, whose axes differ."""
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
    """Op with its reference implementation and axes.

    Attributes:
      name: the op's name.
      reference: forward pass of the implementation "reference". If `plain.is_plain()`, JAX can differentiate it in
        forward and reverse mode, any number of times.
      axes: computes the axes of a call.
      folds: axis into which the mapped axis of a `jax.vmap` is merged: "..." or a name; None if it cannot be merged.
      residuals: names of residuals that a forward pass may pass to the backward pass of any implementation.
      backward: backward pass of the reference; by default JAX's derivative, which recomputes the forward pass.
      keeps: whether the default backward pass stores JAX's residuals instead of recomputing them.
      linear_in: array parameters in which the result is linear (or affine) for fixed values of the rest. The
        derivative with respect to only one of them does not read it, so it is not stored for the backward pass.
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
        """Returns the reference as the implementation with the lowest priority."""
        forward, backward = differentiated(self.reference)
        backward = self.backward or backward
        residuals = (*self.residuals, OWN) if self.keeps else self.residuals
        return OpImplementation(self.name, "reference", forward, backward, residuals=residuals, priority=0)


def op_named(name: str) -> Op:
    """Returns a registered op.

    Raises:
      UnknownName: no plugin defines it.
      PluginError: the registered object is not an `Op` of that name.
    """
    found = registries.op_definitions[name]
    if not isinstance(found, Op) or found.name != name:
        raise PluginError(f"op_definitions {name!r} is registered as {found!r}; expected an Op of that name.")
    return found


def function_of(op: str) -> Callable[..., Any]:
    """Returns the public function of an op, with `implementation` and `axes` among its parameters.

    Raises:
      UnknownName: no plugin defines the op.
      PluginError: the op is registered without a valid function.
    """
    # Core's ops are found without the registry: a plugin may implement one in the module that is being registered.
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
    """Returns the contract suite (`OpSuite`) of an op; raises as `function_of`."""
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
    """Returns a name for each axis of an array: ("...0", "...1", "d_in") for "... d_in" with rank 3."""
    names = axes.split()
    if "..." not in names:
        return tuple(names)
    at, leading = names.index("..."), rank - len(names) + 1
    return (*names[:at], *(f"...{number}" for number in range(leading)), *names[at + 1 :])
