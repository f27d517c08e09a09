import pytest
from acme_glu.one_product import IMPLEMENTATION

from stack_core.testing import op_checks


@pytest.mark.parametrize("check", op_checks("gated_linear_unit"), ids=str)
def test_contract(check):
    check(IMPLEMENTATION)
