import pytest

from stack_core.testing import OpCheck, op_checks
from stack_kernels.gated_linear_unit.xla_cpu_quantized import XLA_CPU_QUANTIZED


@pytest.mark.covering
@pytest.mark.parametrize("check", [check for check in op_checks("gated_linear_unit") if check.case.fixed], ids=str)
def test_contract(check: OpCheck) -> None:
    check(XLA_CPU_QUANTIZED)
