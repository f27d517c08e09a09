"""Division of the time and of the machine."""

import pytest

from stack_kernels.burn_in.budget import STAGES, Workers, stage_s, workers_for

GIB = 2**30


@pytest.mark.parametrize("budget_s", [20.0, 60.0, 120.0, 600.0])
def test_each_stage_has_its_share_of_the_whole(budget_s: float) -> None:
    left_s, shares_s = budget_s, []
    for name in STAGES:
        shares_s.append(stage_s(name, left_s))
        left_s -= shares_s[-1]
    assert left_s == pytest.approx(0.0, abs=1e-6) and min(shares_s) > 0
    assert shares_s[0] == max(shares_s) or budget_s < 100


def test_time_that_a_stage_leaves_goes_to_later_ones() -> None:
    assert stage_s("profile", 300.0) == 300.0
    assert stage_s("speeds", 300.0) > stage_s("speeds", 200.0)
    assert stage_s("contracts", -5.0) == 0.0


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        (workers_for("gpu", 16, memory_bytes=128 * GIB, device_bytes=80 * GIB), Workers(16)),
        (workers_for("gpu", 16, memory_bytes=128 * GIB, device_bytes=12 * GIB), Workers(6)),
        (workers_for("gpu", 16, memory_bytes=9 * GIB, device_bytes=None), Workers(3)),
        (workers_for("cpu", 8, memory_bytes=GIB, device_bytes=None), Workers(1)),
        (workers_for("tpu", 16, memory_bytes=128 * GIB, device_bytes=32 * GIB), Workers(1, threads=15)),
    ],
)
def test_workers_fit_the_machine(workers: Workers, expected: Workers) -> None:
    assert workers == expected
