"""What can be measured of a call: each implementation with each of its configs, forward or with its gradient.

A candidate is compiled, run once and compared with the reference before it is timed. The comparison is that of the
contract suites: an implementation that is fast and wrong is no candidate.
"""

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from stack_core.abi import AUTODIFF, OpCall, OpImplementation
from stack_core.ops.building import is_quantized, supporting
from stack_core.testing import TOLERANCES, assert_close
from stack_kernels.tuning.operands import draw_operands
from stack_kernels.tuning.tables import encoded_config

__all__ = ["Candidate", "Trial", "candidates_of"]

_REFERENCE = "reference"


@dataclass(frozen=True, eq=False)
class Candidate:
    """An implementation with one of its configs, None if it has none; equal by what tables know them by."""

    implementation: OpImplementation
    config: Any = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Candidate) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def key(self) -> tuple[str, str]:
        """That of its measurements, `Measurement.candidate`."""
        return self.implementation.name, json.dumps(encoded_config(self.config), sort_keys=True)

    @property
    def is_whole(self) -> bool:
        """Whether its forward and backward pass are one function, whose gradient is not timed alone."""
        return self.implementation.vjp == AUTODIFF

    @property
    def keywords(self) -> dict[str, Any]:
        return {"config": self.config} if self.implementation.configs else {}

    def __str__(self) -> str:
        return self.implementation.name + (f" {self.config}" if self.implementation.configs else "")


def candidates_of(call: OpCall) -> list[Candidate]:
    """What supports one direction of a call on the target chip, with all its configs; the reference first."""
    found = sorted(supporting(call).values(), key=lambda each: (each.name != _REFERENCE, -each.priority, each.name))
    return [Candidate(each, config) for each in found for config in each.configs or (None,)]


class Trial:
    """One direction of a call, with operands to try candidates on.

    Args:
      gradients_of: the arguments to differentiate by, in the backward direction.
    """

    def __init__(self, call: OpCall, gradients_of: tuple[str, ...]) -> None:
        self._call = call
        self._names = gradients_of if call.direction == "backward" else ()
        self._arrays = draw_operands(call)
        self._tolerance = _tolerance(call)
        self._output: Any = None
        self._cotangent: Any = None
        self._expected: Any = None

    def prepare(self, reference: Candidate) -> None:
        """Runs the reference, which says what is right."""
        self._output = jax.jit(functools.partial(_forward, reference, self._call.options))(self._arrays)
        self._cotangent = _normal_like(self._output)
        self._expected = jax.block_until_ready(self._run(reference)())

    def accept(self, candidate: Candidate) -> Callable[[], Any]:
        """What to time of a candidate, once it has run and was found right.

        Raises:
          AssertionError: its output or a gradient leaves the contract's tolerance.
          Exception: whatever it raises.
        """
        run = self._run(candidate)
        actual, expected = run(), self._expected
        if self._names and not candidate.is_whole:
            actual, expected = (self._output, actual[1]), (self._output, expected[1])
        assert_close(actual, expected, self._tolerance)
        return run

    def _run(self, candidate: Candidate) -> Callable[[], Any]:
        """A compiled call that gives (output, gradients)."""
        options = self._call.options
        if not self._names:
            forward = jax.jit(lambda arrays: (_forward(candidate, options, arrays), {}))
            return functools.partial(forward, self._arrays)
        if candidate.is_whole:
            whole = jax.jit(functools.partial(_value_and_gradients, candidate, options, self._names))
            return functools.partial(whole, self._arrays, self._cotangent)
        alone = jax.jit(functools.partial(_gradients, candidate, options, self._names))
        return functools.partial(alone, self._arrays, self._output, self._cotangent)


def _forward(candidate: Candidate, options: Mapping[str, Any], arrays: Mapping[str, Any]) -> Any:
    return candidate.implementation.function(**arrays, **options, **candidate.keywords)


def _value_and_gradients(
    candidate: Candidate, options: Mapping[str, Any], names: tuple[str, ...], arrays: Any, cotangent: Any
) -> Any:
    moving = {name: _floating(arrays[name]) for name in names}

    def moved(moving: Mapping[str, list[Any]]) -> Any:
        replaced = {name: _with_floating(arrays[name], leaves) for name, leaves in moving.items()}
        return _forward(candidate, options, {**arrays, **replaced})

    output, vjp = jax.vjp(moved, moving)
    return output, vjp(cotangent)[0]


def _gradients(
    candidate: Candidate, options: Mapping[str, Any], names: tuple[str, ...], arrays: Any, output: Any, cotangent: Any
) -> Any:
    """(None, gradients) by a `vjp` of its own; a missing one is zero, as the ABI has it."""
    vjp = candidate.implementation.vjp
    assert callable(vjp), f"{candidate} has no backward pass of its own"
    found = vjp(arrays, options, output, cotangent, **candidate.keywords)
    zeros = {name: [jnp.zeros_like(leaf) for leaf in _floating(arrays[name])] for name in names}
    return None, {name: zeros[name] if found.get(name) is None else _floating(found[name]) for name in names}


def _floating(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]


def _with_floating(tree: Any, replacements: list[Any]) -> Any:
    remaining = iter(replacements)
    return jax.tree.map(lambda leaf: next(remaining) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree)


def _normal_like(output: Any) -> Any:
    leaves, structure = jax.tree.flatten(output)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    drawn = [jax.random.normal(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, drawn)


def _tolerance(call: OpCall) -> float:
    """The contract's, of the narrowest dtype among the operands that are not quantized."""
    plain = [array for array in call.arrays.values() if not is_quantized(array)]
    dtypes = {jnp.dtype(leaf.dtype).name for leaf in jax.tree.leaves(plain)}
    return max((TOLERANCES[dtype] for dtype in dtypes & TOLERANCES.keys()), default=TOLERANCES["float32"])
