"""Candidates for a call: each implementation with each of its configs, forward or with its gradient.

A candidate is compiled, run once and compared with the reference before it is timed. The comparison uses the tolerances
of the contract suites, so a fast but wrong implementation is rejected.
"""

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from stack_core.abi.ops import OWN, OpCall, OpImplementation
from stack_core.chips import target_chip
from stack_core.ops.building import is_quantized, supporting
from stack_core.testing import TOLERANCES, assert_close
from stack_kernels.tuning.operands import draw_operands
from stack_kernels.tuning.tables import encoded_config

__all__ = ["Candidate", "Trial", "WrongNumbers", "candidates_of"]

_REFERENCE = "reference"


class WrongNumbers(Exception):
    """An output or a gradient that exceeds the contract's tolerance."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """An implementation with a config, or with None if it takes no config; equal if the keys are equal."""

    implementation: OpImplementation
    config: Any = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Candidate) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def key(self) -> tuple[str, str]:
        """The key that its measurements have as `Measurement.candidate`."""
        # A config's text identifies it across processes.
        return self.implementation.name, json.dumps(encoded_config(self.config), sort_keys=True)

    @property
    def is_joint(self) -> bool:
        """True if the forward pass saves private residuals; its backward pass is then not timed separately."""
        return OWN in self.implementation.residuals

    @property
    def keywords(self) -> dict[str, Any]:
        return {} if self.implementation.default is None else {"config": self.config}

    def __str__(self) -> str:
        return self.implementation.name + ("" if self.implementation.default is None else f" {self.config}")


def candidates_of(call: OpCall) -> list[Candidate]:
    """Lists the candidates that support one direction of a call on the target chip; the reference comes first."""
    # Others are compared with the reference, which therefore must be tried first.
    found = sorted(supporting(call).values(), key=lambda each: (each.name != _REFERENCE, -each.priority, each.name))
    return [Candidate(each, config) for each in found for config in _configs(each, call)]


def _configs(implementation: OpImplementation, call: OpCall) -> list[Any]:
    """Lists the default config first, then the other supported configs."""
    if implementation.default is None:
        return [None]
    chip = target_chip()
    default = implementation.default(call, chip)
    other_configs = [config for config in implementation.space(call, chip) if config != default]
    return [default, *(config for config in other_configs if implementation.supports(call, chip, config) is True)]


class Trial:
    """Operands and reference results for trying candidates on one direction of a call.

    Candidates are compiled from shapes, so `compile` may run ahead, in other threads; `prepare` creates the operands.

    Args:
      call: the call.
      gradients_of: arguments to differentiate with respect to, in the backward direction.
    """

    def __init__(self, call: OpCall, gradients_of: tuple[str, ...]) -> None:
        self._call = call
        self._names = gradients_of if call.direction == "backward" else ()
        self._tolerance = _tolerance(call)
        self._reference = candidates_of(call)[0]
        self._programs: dict[Candidate, Callable[..., Any] | Exception] = {}
        self._operands: tuple[Any, ...] = ()
        self._output: Any = None
        self._expected: Any = None

    def compile(self, candidate: Candidate) -> None:
        """Compiles a candidate; `accept` then runs the program, or raises the compiler's error."""
        try:
            self._programs[candidate] = self._compiled(candidate)
        except Exception as error:  # any failure of a compiler is the candidate's result
            self._programs[candidate] = error

    def prepare(self) -> None:
        """Runs the reference, whose results are the expected ones."""
        arrays = draw_operands(self._call)
        self._output, residuals = jax.jit(self._reference_forward)(arrays)
        self._operands = (arrays, self._output, residuals, _normal_like(self._output))
        # Waits, because an error of a running program would show only where its result is read.
        self._expected = jax.block_until_ready(self._run(self._reference)())

    def accept(self, candidate: Candidate) -> Callable[[], Any]:
        """Checks a candidate against the reference and returns the function to time.

        Raises:
          WrongNumbers: its output or a gradient exceeds the contract's tolerance.
          Exception: any error of the candidate.
        """
        run = self._run(candidate)
        actual, expected = run(), (self._output, self._expected[1])
        # A separate backward pass returns no output to compare.
        if self._names and not candidate.is_joint:
            actual = self._output, actual[1]
        try:
            assert_close(actual, expected, self._tolerance)
        except AssertionError as error:
            raise WrongNumbers(str(error)) from error
        return run

    def _reference_forward(self, arrays: Any) -> Any:
        # Only its own backward pass can read private residuals.
        kept = frozenset(self._reference.implementation.residuals) - {OWN}
        return _forward(self._reference, self._call.options, kept, arrays)

    def _run(self, candidate: Candidate) -> Callable[[], Any]:
        """Returns a compiled call that gives (output, gradients)."""
        if candidate not in self._programs:
            self.compile(candidate)
        program = self._programs[candidate]
        if isinstance(program, Exception):
            raise program
        return functools.partial(program, *self._selected(candidate, self._operands))

    def _compiled(self, candidate: Candidate) -> Callable[..., Any]:
        structs = self._selected(candidate, self._structs)
        return jax.jit(self._function(candidate)).lower(*structs).compile()

    @functools.cached_property
    def _structs(self) -> tuple[Any, ...]:
        arrays = dict(self._call.arrays)
        output, residuals = jax.eval_shape(self._reference_forward, arrays)
        return arrays, output, residuals, output

    def _function(self, candidate: Candidate) -> Callable[..., Any]:
        options = self._call.options
        if not self._names:
            return lambda arrays: (_forward(candidate, options, frozenset(), arrays)[0], {})
        function = _value_and_gradients if candidate.is_joint else _gradients
        return functools.partial(function, candidate, options, self._names)

    def _selected(self, candidate: Candidate, operands: tuple[Any, ...]) -> tuple[Any, ...]:
        """Selects the arguments of the candidate's program from (arrays, output, residuals, cotangent)."""
        arrays, output, residuals, cotangent = operands
        if not self._names:
            return (arrays,)
        return (arrays, cotangent) if candidate.is_joint else (arrays, output, residuals, cotangent)


def _forward(
    candidate: Candidate, options: Mapping[str, Any], requested: frozenset[str], arrays: Mapping[str, Any]
) -> Any:
    return candidate.implementation.forward(**arrays, **options, **candidate.keywords, requested=requested)


def _value_and_gradients(
    candidate: Candidate, options: Mapping[str, Any], names: tuple[str, ...], arrays: Any, cotangent: Any
) -> Any:
    output, residuals = _forward(candidate, options, frozenset(candidate.implementation.residuals), arrays)
    return output, _gradients(candidate, options, names, arrays, output, residuals, cotangent)[1]


def _gradients(
    candidate: Candidate,
    options: Mapping[str, Any],
    names: tuple[str, ...],
    arrays: Any,
    output: Any,
    residuals: Any,
    cotangent: Any,
) -> Any:
    """Returns (None, gradients) of the candidate's own backward pass; missing gradients are zero, as in the ABI."""
    backward = candidate.implementation.backward
    assert backward is not None, f"{candidate} has no backward pass of its own"
    requested = frozenset(names)
    found = backward(arrays, options, output, residuals, cotangent, requested=requested, **candidate.keywords)
    zeros = {name: [jnp.zeros_like(leaf) for leaf in _floating(arrays[name])] for name in names}
    return None, {name: zeros[name] if found.get(name) is None else _floating(found[name]) for name in names}


def _floating(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]


def _normal_like(output: Any) -> Any:
    leaves, structure = jax.tree.flatten(output)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    values = [jax.random.normal(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, values)


def _tolerance(call: OpCall) -> float:
    """Returns the contract's tolerance for the narrowest dtype among the unquantized operands."""
    plain = [array for array in call.arrays.values() if not is_quantized(array)]
    dtypes = {jnp.dtype(leaf.dtype).name for leaf in jax.tree.leaves(plain)}
    return max((TOLERANCES[dtype] for dtype in dtypes & TOLERANCES.keys()), default=TOLERANCES["float32"])
