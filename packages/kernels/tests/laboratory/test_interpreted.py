"""Kernels for accelerators keep their contracts where memory that nobody wrote is NaN: padding, scratch, results."""

import jax
import pytest
from jax.experimental.pallas import tpu as pltpu

from stack_core.abi.plugins import registries
from stack_core.chips import use_chip
from stack_core.testing import OpCheck, accelerator_checks, op_checks
from stack_kernels.laboratory.interpreted import INTERPRETABLE, interpreted

V6E = registries.chips["v6e"]
# Of each, what runs by default: every check compiles kernels operation by operation.
COVERING = {
    "attention/splash": ("odd_sizes", "sinks_and_empty_rows", "not_a_number"),
    "norm/mosaic_tpu": ("odd_sizes", "residual", "not_a_number"),
    "ragged_dot/megablox": ("odd_sizes", "rows_of_no_group", "not_a_number"),
}


def _checks() -> list[object]:
    return [
        pytest.param(name, check, id=f"{name}-{check}", marks=() if _is_quick(name, check) else pytest.mark.slow)
        for name in INTERPRETABLE
        if name != "exchange/ragged_all_to_all"  # a collective of XLA, which leaves no memory uninitialized
        for op in (name.partition("/")[0],)
        for check in (*op_checks(op), *accelerator_checks(op))
        if check.aspect in ("float32", "bfloat16")
    ]


def _is_quick(name: str, check: OpCheck) -> bool:
    return check.aspect == "float32" and check.case.name in COVERING.get(name, ())


@pytest.mark.parametrize(("name", "check"), _checks())
def test_contract_in_poisoned_memory(name: str, check: OpCheck) -> None:
    poisoned = interpreted(name, pltpu.InterpretParams(uninitialized_memory="nan"))
    with use_chip(V6E):
        check.isolated(poisoned)


@pytest.mark.parametrize("name", INTERPRETABLE)
def test_it_is_what_is_registered(name: str) -> None:
    found, registered = interpreted(name), registries.ops[name]
    assert (found.op, found.name) == (registered.op, registered.name)
    assert jax.default_backend() == "cpu"
