import pytest

from stack_core.testing import OpCheck, op_checks
from stack_kernels.jit_cpu.gated_linear_unit.jit_x86 import JIT_X86


@pytest.mark.covering
@pytest.mark.parametrize("check", op_checks("gated_linear_unit"), ids=str)
def test_contract(check: OpCheck) -> None:
    check(JIT_X86)
