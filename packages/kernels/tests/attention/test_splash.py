"""The splash kernel, interpreted."""

import pytest

from stack_core.abi.plugins import registries
from stack_core.chips import use_chip
from stack_core.testing import OpCheck, op_checks
from stack_kernels.attention.splash import splash

INTERPRETED = splash(interpret=True)
V6E = registries.chips["v6e"]


COVERING = ("odd_sizes", "segment_pair", "sinks_and_empty_rows", "not_a_number")  # windows: blocks_on_eight_devices.py


def _checks() -> list[object]:
    """A few cases in float32 by default: each check compiles three kernels, operation by operation."""
    return [
        check
        if check.aspect == "float32" and check.case.name in COVERING
        else pytest.param(check, marks=pytest.mark.slow)
        for check in op_checks("attention")
        if check.aspect != "float16"
    ]


@pytest.mark.parametrize("check", _checks(), ids=str)
def test_contract(check: OpCheck) -> None:
    with use_chip(V6E):
        check(INTERPRETED)
