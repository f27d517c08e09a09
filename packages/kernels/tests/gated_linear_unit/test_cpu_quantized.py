import pytest

from stack_core.testing import OpCheck, op_checks
from stack_kernels.gated_linear_unit.cpu_quantized import CPU_QUANTIZED


@pytest.mark.parametrize("check", [check for check in op_checks("gated_linear_unit") if check.case.fixed], ids=str)
def test_contract(check: OpCheck) -> None:
    check(CPU_QUANTIZED)
