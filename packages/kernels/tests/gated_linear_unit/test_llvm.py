import pytest

from stack_core.testing import OpCheck, op_checks
from stack_kernels.gated_linear_unit.llvm import LLVM


@pytest.mark.parametrize("check", op_checks("gated_linear_unit"), ids=str)
def test_contract(check: OpCheck) -> None:
    check(LLVM)
