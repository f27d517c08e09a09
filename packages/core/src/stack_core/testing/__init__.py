"""Contract suites that every implementation must pass, whoever wrote it."""

from stack_core.testing._op_contract import OpCheck as OpCheck
from stack_core.testing._op_contract import op_checks as op_checks

__all__ = ["OpCheck", "op_checks"]
