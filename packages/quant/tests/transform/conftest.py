"""A check that any function must pass, whatever it is made of."""

import functools
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_core.ops.building import is_quantized
from stack_quant.model import quantize_function, report
from stack_quant.rules import Rule


def floats(params: Any) -> Any:
    """The parameters that quantized ones stand for."""
    return jax.tree.map(
        lambda leaf: ops.dequantize(leaf, leaf.dtype) if is_quantized(leaf) else leaf, params, is_leaf=is_quantized
    )


def traced(fn: Any, *args: Any) -> str:
    """The program of a function traced anew, without addresses."""
    return re.sub("0x[0-9a-f]+", "", str(jax.make_jaxpr(functools.partial(fn))(*args)))


@pytest.fixture
def check() -> Any:
    def check(
        fn: Any, params: Any, *args: Any, rules: Sequence[Rule] = (Rule(path=".*", weights="int8"),), tol: float = 1e-5
    ) -> Any:
        """Quantizes `fn`; it must give what `fn` gives on the rounded parameters, and leave `fn` as it was."""
        program, compiled = traced(fn, params, *args), jax.jit(fn)
        before = compiled(params, *args)
        quantized = quantize_function(fn, params, rules, args)
        result = jax.jit(quantized.apply)(quantized.params, *args)
        expected = compiled(floats(quantized.params), *args)
        norm = jnp.linalg.norm(expected.astype(jnp.float32))
        assert jnp.linalg.norm((result - expected).astype(jnp.float32)) <= tol * norm
        assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_array_equal(compiled(params, *args), before)
        assert traced(fn, params, *args) == program
        return report(quantized)

    return check


def scales(report: Any) -> dict[str, Any]:
    """The shapes of the scales, by path; None where a parameter is left in float."""
    return {row.path: row.scale_shape for row in report.parameters}


def computed(report: Any) -> list[str]:
    return [row.computed for row in report.operations]
