"""Where the time of a run goes, by a clock of the test's own."""

from pathlib import Path

import pytest

from stack_core.events import CheckpointSaved, EvaluationFinished, RunFinished, RunStarted, StepFinished
from stack_core.runtime.ledger import Ledger


def started(first_step):
    return RunStarted(
        first_step=first_step,
        steps=9,
        parameters=1,
        work=("tokens", 1),
        flops_per_step=1,
        ideal_step_s=None,
        compile_s=0.0,
        directory=Path("x"),
    )


def step(number, duration_s):
    return StepFinished(number, {"loss": 1.0}, duration_s, 1.0, None)


def test_every_second_is_given_to_one_activity_through_a_failure_and_a_killed_driver():
    ledger = Ledger(100.0)
    ledger.switch("forming", 103.0)
    ledger.observe(started(0), 105.0)
    ledger.observe(step(1, 2.0), 107.0)
    ledger.observe(CheckpointSaved(1, Path("c"), 0.5), 107.5)
    ledger.observe(step(2, 3.0), 110.5)
    ledger.failed(112.0)  # 1.5 s into step 3
    ledger.switch("forming", 112.5)
    ledger.observe(started(1), 115.0)  # step 2 is done again
    ledger.observe(step(2, 3.0), 118.0)

    ledger = Ledger.restored(ledger.saved(), 125.0)
    ledger.switch("training", 125.0)
    ledger.observe(EvaluationFinished(2, {"loss": 1.0}, 2.0), 127.0)
    ledger.observe(RunFinished(2, {}), 127.0)
    ledger.switch("finishing", 128.0)

    assert ledger.seconds == pytest.approx(
        {
            "starting agents": 3.0,
            "forming": 2.0 + 2.5,
            "training": 2.0 + 3.0,
            "saving": 0.5,
            "done again": 3.0 + 1.5,
            "ending": 0.5,
            "evaluating": 2.0,
            "unattended": 7.0,
            "finishing": 1.0,
        }
    )
    assert sum(ledger.seconds.values()) == pytest.approx(28.0)
    assert ledger.goodput() == pytest.approx(5 / 28)


def test_what_a_failure_loses_is_what_no_checkpoint_holds():
    ledger = Ledger(0.0)
    ledger.observe(started(0), 0.0)
    for number in range(1, 6):
        ledger.observe(step(number, 1.0), float(number))
    ledger.observe(CheckpointSaved(4, Path("c"), 0.0), 5.0)
    ledger.failed(5.0)
    ledger.observe(started(4), 5.0)
    assert ledger.seconds["done again"] == pytest.approx(1.0) and ledger.seconds["training"] == pytest.approx(4.0)
