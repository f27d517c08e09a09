import dataclasses
import itertools

import numpy as np
import pytest

from stack_core.abi.errors import BenchmarkError
from stack_core.chips import Chip
from stack_kernels.bench.compare import CONFIDENCE, _p_greater, check_comparable, compare

from .fakes import results, row


def drawn(rng, median, rounds=15):
    return list(median * np.exp(rng.normal(scale=0.05, size=rounds)))


def verdict(before, now, tolerance=0.05):
    (comparison,) = compare(results(row(before)), [row(now)], tolerance=tolerance)
    return comparison.verdict


def test_p_is_that_of_all_orders():
    sample, other = [3.0, 5.0, 4.5], [1.0, 4.0, 2.0, 0.5]
    wins = sum(one > two for one in sample for two in other)
    pooled = sample + other
    at_least = [
        sum(pooled[i] > pooled[j] for i in chosen for j in range(7) if j not in chosen) >= wins
        for chosen in itertools.combinations(range(7), 3)
    ]
    assert _p_greater(sample, other) == pytest.approx(np.mean(at_least))


def test_verdicts():
    rng = np.random.default_rng(0)
    before = drawn(rng, 0.5)
    assert verdict(before, drawn(rng, 0.5)) == "unchanged"
    assert verdict(before, drawn(rng, 0.52)) == "unchanged"
    assert verdict(before, drawn(rng, 0.6)) == "slower"
    assert verdict(before, drawn(rng, 0.6), tolerance=0.3) == "unchanged"
    assert verdict(before, drawn(rng, 0.4)) == "faster"
    assert verdict(before, drawn(rng, 0.6, rounds=1)) == "too few rounds"


def test_a_call_that_the_baseline_lacks_is_new():
    known, new = compare(results(row([1.0] * 15)), [row([1.0] * 15), row([9.0] * 15, dtype="bfloat16")], tolerance=0.05)
    assert (known.verdict, new.verdict, new.change) == ("unchanged", "new", None)


def test_the_more_calls_the_more_it_takes():
    rng = np.random.default_rng(3)
    before, now = drawn(rng, 1.0, 6), drawn(rng, 2.0, 6)
    cases = [str(case) for case in range(30)]
    assert verdict(before, now) == "slower"
    among_many = compare(
        results(*(row(before, case) for case in cases)), [row(now, case) for case in cases], tolerance=0.0
    )
    assert {comparison.verdict for comparison in among_many} == {"too few rounds"}


def test_a_program_beside_itself_is_named_no_more_often_than_stated():
    rng = np.random.default_rng(1)
    cases, runs = [str(case) for case in range(10)], 400
    named = 0
    for _ in range(runs):
        baseline = results(*(row(drawn(rng, 0.7), case) for case in cases))
        comparisons = compare(baseline, [row(drawn(rng, 0.7), case) for case in cases], tolerance=0.0)
        named += any(comparison.verdict == "slower" for comparison in comparisons)
    assert 0 < named <= runs * (1 - CONFIDENCE) + 3 * (runs * (1 - CONFIDENCE)) ** 0.5


def test_another_chip_and_other_calls_are_no_baseline():
    chip = Chip(
        kind="cpu",
        unit="chip",
        peak_flops={},
        hbm_bytes=None,
        hbm_bandwidth_bytes_s=None,
        on_chip_bytes=None,
        link_bandwidth_bytes_s=None,
        provenance="by hand",
        model="toy, 2 cores",
    )
    baseline = results(row([1.0]))
    check_comparable(baseline, chip, [row([1.0]).key, ("other",)], where="base.json")
    with pytest.raises(
        BenchmarkError, match=r"'base.json' was measured on cpu \(toy, 2 cores\), and this is cpu \(big\)"
    ):
        check_comparable(baseline, dataclasses.replace(chip, model="big"), [row([1.0]).key], where="base.json")
    with pytest.raises(BenchmarkError, match=r"none of the calls .* has 1, such as 'norm 66m rms float32 forward'\."):
        check_comparable(baseline, chip, [("other",)], where="base.json")
