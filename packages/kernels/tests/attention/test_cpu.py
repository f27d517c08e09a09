import pytest

from stack_core.testing import OpCheck, op_checks
from stack_kernels.attention.cpu import CPU


@pytest.mark.parametrize("check", op_checks("attention"), ids=str)
def test_contract(check: OpCheck) -> None:
    check(CPU)
