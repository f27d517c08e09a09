"""Contract suites for ops and launchers, which every implementation must pass, from any package."""

from stack_core.testing.alone import first_call as first_call
from stack_core.testing.cases import OpCase as OpCase
from stack_core.testing.cases import OpSuite as OpSuite
from stack_core.testing.cases import Quantized as Quantized
from stack_core.testing.op_contract import TOLERANCES as TOLERANCES
from stack_core.testing.op_contract import OpCheck as OpCheck
from stack_core.testing.op_contract import accelerator_checks as accelerator_checks
from stack_core.testing.op_contract import assert_close as assert_close
from stack_core.testing.op_contract import op_checks as op_checks

__all__ = [
    "TOLERANCES",
    "OpCase",
    "OpCheck",
    "OpSuite",
    "Quantized",
    "accelerator_checks",
    "assert_close",
    "first_call",
    "op_checks",
]
