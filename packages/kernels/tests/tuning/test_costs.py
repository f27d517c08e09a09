"""The cost model: what it was made of it finds again, and what was measured it does not contradict."""

import pytest

from stack_kernels.tuning.costs import CostModel, estimate_s
from stack_kernels.tuning.shapes import CallShape


def _shape(rows: int, width: int = 64) -> CallShape:
    return CallShape("linear", (), (("rows", rows), ("width", width)), 2 * rows * width**2, 8 * rows * width)


@pytest.mark.parametrize(
    "terms", [(1e-5, 1e-11, 0.0), (0.0, 1e-11, 1e-10), (2e-5, 0.0, 3e-11), (1e-6, 2e-12, 5e-11)], ids=str
)
def test_a_fit_finds_the_terms_again(terms: tuple[float, float, float]) -> None:
    true = CostModel(*terms)
    shapes = [_shape(rows, width) for rows in (16, 256, 4096) for width in (32, 512)]
    fitted = CostModel.fit([(shape, true.seconds(shape)) for shape in shapes])
    other = _shape(1000, 100)
    assert fitted.seconds(other) == pytest.approx(true.seconds(other), rel=0.02)
    assert min(fitted.overhead_s, fitted.s_per_flop, fitted.s_per_byte) >= 0


def test_one_sample_scales_with_the_flops() -> None:
    assert estimate_s([(_shape(100), 1e-3)], _shape(200)) == pytest.approx(2e-3)


def test_what_was_measured_is_the_estimate() -> None:
    samples = [(_shape(rows), seconds) for rows, seconds in ((100, 1e-3), (200, 5e-3), (400, 1e-3))]
    assert [estimate_s(samples, shape) for shape, _ in samples] == [1e-3, 5e-3, 1e-3]


def test_near_a_sample_the_estimate_is_near_it() -> None:
    """The middle one is far off any model; beside it that shows, far from it hardly."""
    samples = [(_shape(100), 1e-3), (_shape(1000), 1e-1), (_shape(10_000), 1e-1)]
    assert estimate_s(samples, _shape(1200)) > 0.06
    assert estimate_s(samples, _shape(9000)) == pytest.approx(0.09, rel=0.2)
