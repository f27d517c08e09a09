"""Outcomes of checks and statuses of implementations."""

from collections import Counter

import jax
import pytest

from stack_kernels.burn_in.checks import Check, CheckResult
from stack_kernels.burn_in.contracts import contracts_of, run_check

CHECKS = [Check("norm", "mine", str(number), 0) for number in range(10)]


def status(*outcomes: str) -> str:
    found = [CheckResult(check, outcome, "why") for check, outcome in zip(CHECKS, outcomes, strict=False)]
    (contract,) = contracts_of(CHECKS, found)
    assert contract.outcomes == Counter(outcomes)
    return contract.status


@pytest.mark.parametrize(
    ("expected", "outcomes"),
    [
        ("passed", ["passed"] * 10),
        ("passed", ["passed"] + ["refused"] * 8),
        ("not tested", ["passed"] * 8),
        ("not tested", ["refused"] * 10),
        ("not tested", []),
        ("failed", ["passed"] * 9 + ["failed"]),
        ("failed", ["died"]),
    ],
)
def test_status(expected: str, outcomes: list[str]) -> None:
    assert status(*outcomes) == expected


def test_an_untested_implementation_has_its_reason() -> None:
    refused = [CheckResult(check, "refused", "float32" if place else "odd") for place, check in enumerate(CHECKS)]
    (contract,) = contracts_of(CHECKS, refused)
    assert contract.untested_reason == "it refused all 10 checks; most often: float32"
    (contract,) = contracts_of(CHECKS, refused[:3])
    assert contract.untested_reason == "the time did not reach 7 of 10 checks"


def test_outcomes_of_real_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)
    assert run_check("rope", "reference", "plain-float32")["outcome"] == "passed"
    refused = run_check("rope", "jit_x86", "plain-float32")
    assert refused["outcome"] == "refused" and refused["reason"] and "reference" not in refused["reason"]
