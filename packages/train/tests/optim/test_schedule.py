"""Learning rates warm up, stay at their peak and decay as the schedule says."""

import numpy as np
import pytest

from stack_core.abi.errors import ConfigError
from stack_train.optim import ScheduleConfig

STEPS = 100


@pytest.mark.parametrize(
    ("decay", "fraction", "at_60", "at_90", "last"),
    [
        ("cosine", 1.0, 0.55, 0.1 + 0.45 * (1 + np.cos(np.pi * 7 / 8)), 0.1),
        ("linear", 1.0, 0.55, 1 - 0.9 * 7 / 8, 0.1),
        ("constant", 1.0, 1.0, 1.0, 1.0),
        ("linear", 0.25, 1.0, 0.55, 0.1),  # warm-up, stable, decay
    ],
)
def test_schedules_warm_up_to_the_peak_and_decay_to_the_fraction(decay, fraction, at_60, at_90, last):
    config = ScheduleConfig(warmup_steps=20, decay=decay, decay_fraction=fraction, final_fraction=0.1)
    schedule = config.build(2.0, STEPS)
    rates = np.array([float(schedule(step)) for step in range(STEPS + 1)])
    assert rates[0] == pytest.approx(2.0 / 21)
    assert (np.diff(rates[:21]) > 0).all()
    np.testing.assert_allclose(rates[[20, 60, 90, 100]], [2.0, 2 * at_60, 2 * at_90, 2 * last], rtol=1e-5)


def test_a_decay_may_start_without_a_warm_up_and_a_warm_up_may_be_all():
    assert float(ScheduleConfig(decay="linear", decay_fraction=0.5).build(1.0, 10)(5)) == pytest.approx(1.0)
    assert float(ScheduleConfig(warmup_steps=50).build(1.0, 10)(9)) == pytest.approx(10 / 11)


@pytest.mark.parametrize("unused", [{"decay_fraction": 0.5}, {"final_fraction": 0.0}])
def test_a_constant_rate_refuses_settings_of_a_decay(unused):
    with pytest.raises(ConfigError, match=rf"'constant', so {next(iter(unused))} would have no effect"):
        ScheduleConfig(decay="constant", **unused)
