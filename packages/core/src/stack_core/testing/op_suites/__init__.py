"""One file an op: the calls of its contract suite, and its oracle in float64."""

from collections.abc import Mapping

from stack_core.testing._cases import OpSuite
from stack_core.testing.op_suites import (
    attention,
    collective_matmul,
    exchange,
    gated_linear_unit,
    linear,
    linear_attention,
    linear_cross_entropy,
    low_rank,
    norm,
    paged_attention,
    ragged_dot,
    ring_attention,
    rope,
)

__all__ = ["SUITES"]

SUITES: Mapping[str, OpSuite] = {
    "attention": attention.SUITE,
    "collective_matmul": collective_matmul.SUITE,
    "exchange": exchange.SUITE,
    "gated_linear_unit": gated_linear_unit.SUITE,
    "linear": linear.SUITE,
    "linear_attention": linear_attention.SUITE,
    "linear_cross_entropy": linear_cross_entropy.SUITE,
    "low_rank": low_rank.SUITE,
    "norm": norm.SUITE,
    "paged_attention": paged_attention.SUITE,
    "ragged_dot": ragged_dot.SUITE,
    "ring_attention": ring_attention.SUITE,
    "rope": rope.SUITE,
}
