"""Calls in programs whose operands are donated, and in programs that are exported."""

import functools
from typing import Any

import jax
import jax.export
import numpy as np
import pytest

from stack_core import ops
from stack_core.testing import OpCheck, op_checks

ONE_OF_EACH = [
    pytest.param(op_checks(op)[0], id=op)
    for op in (
        "attention",
        "gated_linear_unit",
        "linear",
        "linear_attention",
        "linear_cross_entropy",
        "low_rank",
        "norm",
        "paged_attention",
        "ragged_dot",
        "rope",
        "state_space",
    )
]


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("check", ONE_OF_EACH)
def test_donated_and_exported_calls_give_what_plain_ones_give(check: OpCheck) -> None:
    case = check.case

    def drawn() -> Any:
        arrays = dict(case.arrays(np.random.default_rng(0)))
        return {name: jax.numpy.asarray(x, "float32" if x.dtype == np.float64 else None) for name, x in arrays.items()}

    call = functools.partial(getattr(ops, case.op), **case.options)
    plain = jax.jit(lambda arrays: call(**arrays))(drawn())
    donated = jax.jit(lambda arrays: call(**arrays), donate_argnums=0)(drawn())
    with ops.for_export():
        exported = jax.export.export(jax.jit(lambda arrays: call(**arrays)))(drawn())
    for found in (donated, exported.call(drawn())):
        for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
            np.testing.assert_allclose(a, e, rtol=0, atol=2e-5 * max(float(np.abs(e).max()), 1.0))
