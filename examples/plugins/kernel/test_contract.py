import pytest
from acme_rows.kernel import acme_rows

from stack_core.testing import op_checks


@pytest.mark.parametrize("check", op_checks("norm"), ids=str)
def test_contract(check):
    check(acme_rows)
