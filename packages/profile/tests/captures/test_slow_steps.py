"""Which steps are slow, as a function of their durations."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stack_core.abi.config import parse
from stack_core.abi.errors import ConfigError
from stack_profile.captures.slow_steps import AnomalyConfig, SlowSteps

EVERY = AnomalyConfig(captures=10**6, cooldown_steps=0)


def found(durations_s, config=EVERY):
    """The numbers of the steps that are slow, from 0."""
    slow = SlowSteps(config)
    return [step for step, duration_s in enumerate(durations_s) if slow.exceeded_s(float(duration_s)) is not None]


def noisy(seed, steps, median_s=0.05):
    """Steps of a busy machine: lognormal, drifting by a tenth, one in fifty held up for an exponential time."""
    random = np.random.default_rng(seed)
    drift = 1 + 0.1 * np.sin(np.arange(steps) / 150 + random.uniform(0, 6))
    held_up = np.where(random.random(steps) < 0.02, random.exponential(0.15, steps), 0.0)
    return median_s * drift * (np.exp(random.normal(0, 0.06, steps)) + held_up)


@pytest.mark.parametrize("seed", range(100))
def test_at_most_one_of_a_thousand_normal_steps_is_slow(seed):
    assert len(found(noisy(seed, 1000))) <= 1


def test_normal_steps_are_hardly_ever_slow():
    assert sum(len(found(noisy(seed, 1000))) for seed in range(100, 150)) <= 5


@pytest.mark.parametrize("seed", range(50))
def test_a_step_of_three_medians_is_slow_in_all_that_noise(seed):
    durations_s = noisy(seed, 400)
    durations_s[300] = 3 * np.median(durations_s)
    assert 300 in found(durations_s)


@given(st.lists(st.floats(0.9, 1.1), min_size=60, max_size=200), st.integers(40, 59), st.floats(1e-6, 1e3))
@settings(deadline=None)
def test_what_is_slow_does_not_depend_on_the_unit(relative, place, scale_s):
    durations_s = np.array(relative)
    assert found(durations_s * scale_s) == []
    durations_s[place] = 3.0
    assert found(durations_s * scale_s) == [place]


@given(st.lists(st.floats(1e-4, 10), min_size=40, max_size=300), st.integers(1, 5), st.integers(0, 50))
@settings(deadline=None)
def test_the_budget_and_the_pause_hold_whatever_the_steps(durations_s, captures, cooldown_steps):
    slow = found(durations_s, AnomalyConfig(captures=captures, cooldown_steps=cooldown_steps))
    assert len(slow) <= captures
    assert all(later - earlier > cooldown_steps for earlier, later in itertools.pairwise(slow))
    assert not slow or slow[0] >= 30


def test_slow_steps_of_the_warm_up_count_for_nothing():
    assert found([5.0] * 10 + [0.05] * 20 + [0.15]) == [30]
    assert found([0.05] * 29 + [0.15]) == []


def test_a_lasting_change_becomes_the_norm():
    durations_s = [0.05] * 200 + [0.15] * 400
    last = [
        found(durations_s, AnomalyConfig(history_steps=steps, captures=10**6, cooldown_steps=0))[-1]
        for steps in (32, 128)
    ]
    assert 200 < last[0] < 200 + 32 < last[1] < 200 + 128


@pytest.mark.parametrize(
    ("changed", "expected"),
    [({"ratio": 4.0}, []), ({"deviations": 100.0}, []), ({"warmup_steps": 101}, []), ({"captures": 1}, [100]),
     ({"cooldown_steps": 2}, [100])],
)  # fmt: skip
def test_every_other_setting_changes_something(changed, expected):
    durations_s = [*np.random.default_rng(0).normal(1.0, 0.05, 100), 3.0, 1.0, 3.0]
    assert found(durations_s) == [100, 102]
    assert found(durations_s, AnomalyConfig(**{"captures": 9, "cooldown_steps": 0, **changed})) == expected


@pytest.mark.parametrize("wrong", [{"ratio": 1.0}, {"deviations": 0.0}, {"history_steps": 5}, {"captures": 0}])
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        parse(AnomalyConfig, wrong)
