"""The record of a burn-in."""

from pathlib import Path

import pytest

from stack_core.abi.errors import BenchmarkError
from stack_kernels.burn_in.checks import Check, CheckResult
from stack_kernels.burn_in.state import State

CHECKS = [Check("norm", "mine", str(number), 0) for number in range(3)]


def test_a_second_run_has_the_outcomes_of_a_run_that_was_not_closed(tmp_path: Path) -> None:
    with State(tmp_path, "h100, jax 1") as killed, State(tmp_path, "h100, jax 1") as state:
        killed.add(CheckResult(CHECKS[1], "failed", "off by 2", 0.5))
        killed.add_failure("speeds", "norm rms", "failed: SIGSEGV")
        assert state.results(CHECKS) == [CheckResult(CHECKS[1], "failed", "off by 2", 0.5)]
        assert state.results(CHECKS[:1]) == []
        assert state.failures("speeds") == {"norm rms": "failed: SIGSEGV"}


def test_another_burn_in_is_refused(tmp_path: Path) -> None:
    State(tmp_path, "h100, jax 1").__exit__()
    with pytest.raises(BenchmarkError, match="holds a burn-in of h100, jax 1, and this is h100, jax 2"):
        State(tmp_path, "h100, jax 2")
