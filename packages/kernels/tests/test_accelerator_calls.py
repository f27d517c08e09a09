"""Implementations for the CPU keep the contracts at the sizes of accelerators' calls, too."""

from collections.abc import Iterator

import pytest

from stack_core.abi.ops import OpImplementation
from stack_core.abi.plugins import registries
from stack_core.testing import OpCheck, accelerator_checks


def _checks() -> Iterator[object]:
    for name in sorted(registries.ops.names()):
        implementation = registries.ops[name]
        if implementation.platforms != ("cpu",):
            continue
        for place, check in enumerate(accelerator_checks(implementation.op)):
            # The first call in bf16; the others differ from the small calls in nothing that matters to a CPU.
            marks = () if place == 0 else pytest.mark.slow
            yield pytest.param(implementation, check, id=f"{name}-{check}", marks=marks)


@pytest.mark.parametrize(("implementation", "check"), list(_checks()))
def test_contract(implementation: OpImplementation, check: OpCheck) -> None:
    check(implementation)
