import pytest
from acme_conv.grouped import GROUPED
from acme_conv.op import REFERENCE

from stack_core.testing import op_checks


@pytest.mark.parametrize("implementation", [REFERENCE, GROUPED], ids=lambda each: each.name)
@pytest.mark.parametrize("check", op_checks("short_conv"), ids=str)
def test_contract(check, implementation):
    check(implementation)
