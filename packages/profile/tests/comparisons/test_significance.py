"""Tests are wrong as often as they say, on samples that resemble their neighbours and that the machine stalled."""

import numpy as np
import pytest
import scipy.stats

from stack_profile.comparisons.significance import adjusted, against_peers, difference, student_quantile, student_tail

MANY = 2000


def noise(rng, steps, correlation, *, quantities=MANY):
    """Autocorrelated samples of the standard deviation 1."""
    samples = rng.normal(size=(steps, quantities))
    for step in range(1, steps):
        samples[step] = correlation * samples[step - 1] + np.sqrt(1 - correlation**2) * samples[step]
    return samples


@pytest.mark.parametrize("freedom", [1.0, 1.7, 2.0, 5.0, 30.0, 1000.0])
def test_students_distribution(freedom):
    distances = np.array([0.0, 0.1, 1.0, 2.5, 10.0, 50.0])
    expected = 2 * scipy.stats.t.sf(distances, freedom)
    np.testing.assert_allclose(
        student_tail(distances, np.full(distances.shape, freedom)), expected, rtol=1e-7, atol=1e-12
    )
    for tail in (0.5, 0.05, 0.001):
        expected = scipy.stats.t.isf(tail / 2, freedom)
        assert student_quantile(tail, np.array([freedom]))[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("trim", "oracle"), [(0.0, {}), (0.2, {"trim": 0.2})])
def test_independent_samples_are_compared_as_by_yuen_and_welch(trim, oracle):
    rng = np.random.default_rng(0)
    before, after = rng.normal(10, 1, 23), rng.normal(11, 2, 31)
    # Steps that alternate are less alike than independent ones, which is never taken for more of them.
    before, after = (np.sort(each)[_alternating(len(each))] for each in (before, after))
    found = difference([before[:, None]], [after[:, None]], trim=trim)
    expected = scipy.stats.ttest_ind(after, before, equal_var=False, **oracle)
    assert found.p()[0] == pytest.approx(expected.pvalue)
    interval = expected.confidence_interval(0.95)
    assert [float(end[0]) for end in found.interval(0.95)] == pytest.approx([interval.low, interval.high], rel=1e-5)


def _alternating(count):
    """The smallest, the largest, the second smallest, ..."""
    order = np.empty(count, int)
    order[::2], order[1::2] = np.arange((count + 1) // 2), np.arange(count - 1, (count + 1) // 2 - 1, -1)
    return order


@pytest.mark.parametrize("stalls", [False, True], ids=["quiet", "stalled"])
@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.8])
def test_a_test_of_samples_alike_is_wrong_as_often_as_it_says(correlation, stalls):
    rng = np.random.default_rng(1)
    sides = [100 + noise(rng, 100, correlation) for _ in range(2)]
    if stalls:
        sides = [side + rng.exponential(100, side.shape) * (rng.random(side.shape) < 0.1) for side in sides]
    p = difference([sides[0]], [sides[1]], trim=0.2).p()
    assert np.mean(p < 0.05) < 0.08
    assert np.mean(p < 0.01) < 0.025


def test_samples_that_resemble_each_other_count_for_less():
    rng = np.random.default_rng(2)
    errors = [np.median(difference([noise(rng, 200, rho)], [noise(rng, 200, rho)]).error) for rho in (0.0, 0.8)]
    assert errors[1] / errors[0] == pytest.approx(3, rel=0.2)  # sqrt((1 + 0.8) / (1 - 0.8))


def test_what_differs_between_captures_is_in_the_error_where_there_are_several():
    rng = np.random.default_rng(3)
    captures = [5 * rng.normal(size=MANY) + noise(rng, 50, 0.0) for _ in range(6)]
    one = difference(captures[:1], captures[1:2])
    several = difference(captures[:3], captures[3:])
    assert (one.of_captures, several.of_captures) == (False, True)
    assert np.mean(one.p() < 0.01) > 0.5  # which says that these captures differ, and nothing of others
    assert np.mean(several.p() < 0.01) < 0.02


def test_one_sample_does_not_show_how_much_they_vary():
    found = difference([np.ones((1, 1))], [np.full((9, 1), 2.0)])
    assert np.isnan(found.p()).all() and np.isnan(found.interval(0.95)).all()
    assert found.change[0] == 1


def test_what_never_varies_differs_for_certain_or_not_at_all():
    found = difference([np.array([[1.0, 2.0]] * 5)], [np.array([[1.0, 3.0]] * 5)])
    assert found.p().tolist() == [1, 0]


def test_a_change_that_all_share_is_nobodys_own():
    rng = np.random.default_rng(4)
    sides = [np.linspace(10, 20, 12) * (factor + 0.01 * noise(rng, 50, 0.0, quantities=12)) for factor in (1, 1.3)]
    sides[1][:, 3] *= 1.1
    found = difference([sides[0]], [sides[1]])
    assert (found.p() < 1e-6).all()
    beyond, p = against_peers(found, found, [[place] for place in range(12)])
    assert beyond[3] / found.before[3] == pytest.approx(0.13, abs=0.01)
    assert p.argmin() == 3 and p[3] < 0.001 and np.delete(p, 3).min() > 0.01
    few = found.at(np.arange(3))
    assert np.isnan(against_peers(few, few, [[place] for place in range(3)])).all()


def test_adjusted_p_values_are_those_of_benjamini_and_hochberg():
    p = np.array([0.01, np.nan, 0.04, 0.03, 0.5])
    expected = scipy.stats.false_discovery_control(p[~np.isnan(p)])
    np.testing.assert_allclose(adjusted(p)[~np.isnan(p)], expected)
    assert np.isnan(adjusted(p)[1])
