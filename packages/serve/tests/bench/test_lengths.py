import random
import statistics

import pytest

from stack_core.abi.errors import BenchmarkError
from stack_serve.bench.lengths import Lengths


def drawn(text: str) -> list[int]:
    source = random.Random(0)
    lengths = Lengths.parse(text)
    assert str(lengths) == text
    return [lengths.draw(source) for _ in range(2000)]


def test_a_number_is_every_length() -> None:
    assert set(drawn("128")) == {128}


def test_a_range_has_both_ends() -> None:
    lengths = drawn("3:7")
    assert set(lengths) == {3, 4, 5, 6, 7}
    assert 4.9 < statistics.fmean(lengths) < 5.1


def test_lognormal_lengths_have_the_median_and_a_long_tail() -> None:
    lengths = drawn("lognormal:100,0.5")
    assert 95 < statistics.median(lengths) < 105
    assert 108 < statistics.fmean(lengths) < 119  # 100 exp(0.5^2 / 2) = 113
    assert min(drawn("lognormal:1,3")) == 1


@pytest.mark.parametrize(
    "text", ["", "many", "0", "7:3", "3:", "1.5", "lognormal:100", "lognormal:0.5,1", "lognormal:9,nan"]
)
def test_what_is_no_distribution_is_refused(text: str) -> None:
    with pytest.raises(BenchmarkError, match="is not a distribution of lengths"):
        Lengths.parse(text)
