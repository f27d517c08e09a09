"""What becomes of checks that fail, and of those that take their process down."""

import json
from collections import Counter
from pathlib import Path

import jax
import pytest

from stack_core import testing
from stack_core.testing import op_checks
from stack_kernels.burn_in import contracts
from stack_kernels.burn_in.children import ChildResult
from stack_kernels.burn_in.contracts import Contract, contract_of, implementations_for

CHECKS = ("plain", "odd", "empty", "wide")


def child(outcomes: dict[str, str], crashes: str | None, ended: ChildResult):
    """In place of a process: checks one after the other, until one takes it down."""

    def run(arguments, deadline_s, *, log, on_message):
        for check in CHECKS[int(arguments[-1]) :]:
            row = {"implementation": "mine", "check": check}
            on_message(row)
            if check == crashes:
                return ended
            on_message({**row, "outcome": outcomes.get(check, "passed"), "reason": "off by 2"})
        return ChildResult(0, "")

    return run


def test_the_checks_after_a_crash_are_made_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(contracts, "run_child", child({"wide": "failed"}, "odd", ChildResult(-11, "")))
    found, missing = contract_of("norm", 0.0, log=tmp_path / "log")
    outcomes = Counter(passed=2, died=1, failed=1)
    assert found == [Contract("norm", "mine", outcomes, ("odd: SIGSEGV", "wide: off by 2"))] and missing is None


def test_what_the_time_did_not_reach_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(contracts, "run_child", child({}, "empty", ChildResult(None, "")))
    (found,), missing = contract_of("norm", 0.0, log=tmp_path / "log")
    assert found.outcomes == Counter(passed=2)
    assert missing == "norm: the time budget ended it"


def test_a_platform_has_its_own_implementations() -> None:
    assert {"reference", "mosaic_tpu"} <= set(implementations_for("norm", "tpu"))
    assert "mosaic_tpu" not in implementations_for("norm", "gpu")


def test_each_check_is_named_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [check for check in op_checks("rope") if check.is_covering][:2]
    monkeypatch.setattr(testing, "op_checks", lambda op: few)
    monkeypatch.setattr(contracts, "implementations_for", lambda op, platform: ["reference"])
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)
    rows = list(contracts._outcomes("rope", skip=1))
    assert [row["check"] for row in rows] == 2 * [str(few[1])]
    assert "outcome" not in rows[0] and rows[1]["outcome"] == "passed"
    assert json.loads(json.dumps(rows)) == rows
