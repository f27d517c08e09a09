"""The calls that each op's contract suite makes: small, and chosen to break kernels.

Sizes do not divide a tile; rows are empty; every option is given at least once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from stack_core import ops
from stack_core.abi import QView

__all__ = ["CASES", "OpCase", "TiledInt8"]


@dataclass(frozen=True)
class OpCase:
    """One call of an op.

    Attributes:
      arrays: draws the array arguments by parameter name; float64 arrays are rounded to the dtype under test.
      options: the other arguments.
      fixed: names of float arrays that no gradient is asked of.
    """

    op: str
    name: str
    arrays: Callable[[np.random.Generator], Mapping[str, Any]]
    options: Mapping[str, Any] = field(default_factory=dict)
    fixed: tuple[str, ...] = ()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TiledInt8:
    """A quantized array that core knows nothing of but its `__stack_qview__`."""

    values: Any
    scales: Any
    zeros: Any = None

    def __stack_qview__(self) -> QView:
        return QView((1, 0), self.values, self.scales, self.zeros, "int8/tiled")


def _attention_case(
    name: str,
    *,
    sizes: tuple[int, int, int, int, int, int] = (2, 5, 7, 4, 2, 8),
    extra: Callable[[np.random.Generator], Mapping[str, Any]] = lambda rng: {},
    **options: Any,
) -> OpCase:
    """`sizes` are batch, q_seq, kv_seq, heads, kv_heads, head_dim."""
    batch, q_seq, kv_seq, heads, kv_heads, head_dim = sizes

    def arrays(rng: np.random.Generator) -> Mapping[str, Any]:
        return {
            "query": rng.normal(size=(batch, q_seq, heads, head_dim)),
            "key": rng.normal(size=(batch, kv_seq, kv_heads, head_dim)),
            "value": rng.normal(size=(batch, kv_seq, kv_heads, head_dim)),
            **extra(rng),
        }

    return OpCase("attention", name, arrays, options)


def _integers(*values: Any) -> np.ndarray:
    return np.array(values, np.int32)


_SEGMENTS = _integers([1, 1, 2, 2, 2, 0, 0], [1, 2, 2, 3, 3, 3, 0])

_ATTENTION = (
    _attention_case("plain"),
    _attention_case("causal", causal=True),
    _attention_case("one_query", sizes=(3, 1, 9, 6, 3, 8), causal=True),
    _attention_case("odd_sizes", sizes=(1, 131, 67, 3, 1, 20), causal=True, query_offset=3),
    _attention_case("more_queries_than_keys", sizes=(2, 7, 3, 2, 2, 8), causal=True, return_lse=True),
    _attention_case("offset_per_row", causal=True, extra=lambda rng: {"query_offset": _integers(0, -3)}),
    _attention_case("window", window=(2, 1), query_offset=1),
    _attention_case("left_window", window=(2, None), causal=True, return_lse=True),
    _attention_case("bias", extra=lambda rng: {"bias": rng.normal(size=(2, 4, 5, 7))}),
    _attention_case("broadcast_bias", extra=lambda rng: {"bias": rng.normal(size=(1, 4, 1, 7))}, causal=True),
    _attention_case(
        "mask",
        extra=lambda rng: {"mask": rng.random((2, 1, 5, 7)) < 0.5 * (np.arange(5) > 0)[:, None]},
        return_lse=True,
    ),
    _attention_case("mask_per_head", extra=lambda rng: {"mask": rng.random((1, 4, 5, 7)) < 0.4}),
    _attention_case("segments", sizes=(2, 7, 7, 4, 4, 8), causal=True, extra=lambda rng: {"segment_ids": _SEGMENTS}),
    _attention_case(
        "segment_pair", extra=lambda rng: {"segment_ids": (_SEGMENTS[:, 1:6] + 1, _SEGMENTS)}, return_lse=True
    ),
    _attention_case("kv_lengths", extra=lambda rng: {"kv_lengths": _integers(4, 0)}, return_lse=True),
    _attention_case("softcap", softcap=1.5, causal=True),
    _attention_case("sinks", extra=lambda rng: {"sinks": rng.normal(size=4)}, causal=True, return_lse=True),
    _attention_case(
        "sinks_and_empty_rows", extra=lambda rng: {"sinks": rng.normal(size=4), "kv_lengths": _integers(0, 3)}
    ),
    _attention_case("scale", scale=0.7),
    _attention_case(
        "everything",
        sizes=(2, 7, 7, 4, 2, 8),
        extra=lambda rng: {
            "bias": rng.normal(size=(2, 1, 7, 7)),
            "mask": rng.random((1, 1, 7, 7)) < 0.8,
            "segment_ids": _SEGMENTS,
            "kv_lengths": _integers(5, 6),
            "sinks": rng.normal(size=4),
            "query_offset": _integers(1, 0),
        },
        causal=True,
        window=(3, None),
        softcap=2.0,
        scale=0.5,
        return_lse=True,
    ),
)


def _linear_case(name: str, x: tuple[int, ...], out: int, bias: bool = False, **options: Any) -> OpCase:
    def arrays(rng: np.random.Generator) -> Mapping[str, Any]:
        drawn = {"x": rng.normal(size=x), "weight": rng.normal(size=(x[-1], out))}
        return drawn | ({"bias": rng.normal(size=out)} if bias else {})

    return OpCase("linear", name, arrays, options)


def _quantized_case(name: str, scales: tuple[int, int], zeros: bool) -> OpCase:
    def arrays(rng: np.random.Generator) -> Mapping[str, Any]:
        offsets = rng.integers(-4, 5, size=scales).astype(np.int8) if zeros else None
        values = rng.integers(-100, 101, size=(12, 10)).astype(np.int8)
        weight = TiledInt8(values, rng.uniform(0.01, 0.02, size=scales).astype(np.float32), offsets)
        return {"x": rng.normal(size=(3, 12)), "weight": weight}

    return OpCase("linear", name, arrays, fixed=("weight",))


_LINEAR = (
    _linear_case("plain", (3, 5, 12), 10),
    _linear_case("bias", (4, 12), 9, bias=True),
    _linear_case("vector", (7,), 5),
    _linear_case("odd_sizes", (131, 67), 33),
    _linear_case("empty_rows", (0, 8), 4),
    _linear_case("fp32_result", (5, 130), 3, preferred_dtype="float32"),
    _quantized_case("quantized_by_channel", (1, 10), zeros=False),
    _quantized_case("quantized_by_tile", (3, 5), zeros=True),
)


def _gated_case(name: str, x: tuple[int, ...], out: int, **options: Any) -> OpCase:
    def arrays(rng: np.random.Generator) -> Mapping[str, Any]:
        return {"x": rng.normal(size=x), "w_gate": rng.normal(size=(x[-1], out)), "w_up": rng.normal(size=(x[-1], out))}

    return OpCase("gated_linear_unit", name, arrays, options)


_GATED_LINEAR_UNIT = (
    _gated_case("odd_sizes", (2, 37, 19), 33),
    _gated_case("empty_rows", (2, 0, 8), 4),
    *(
        _gated_case(activation, (3, 12), 10, activation=activation)
        for activation in ("silu", "gelu", "gelu_tanh", "relu", "relu_squared", "sigmoid")
    ),
)


def _norm_case(name: str, x: tuple[int, ...], given: tuple[str, ...] = ("scale",), **options: Any) -> OpCase:
    size = x[options.get("axis", -1)]

    def arrays(rng: np.random.Generator) -> Mapping[str, Any]:
        shapes = {"scale": size, "offset": size, "residual": x}
        return {"x": rng.normal(size=x), **{name: rng.normal(size=shapes[name]) for name in given}}

    return OpCase("norm", name, arrays, options)


_NORM = (
    _norm_case("plain", (2, 3, 8)),
    _norm_case("without_scale", (3, 8), given=()),
    _norm_case("odd_sizes", (131, 67), epsilon=1e-3),
    _norm_case("empty_rows", (0, 8)),
    _norm_case("scale_offset", (3, 8), scale_offset=1.0),
    _norm_case("residual", (2, 5, 12), given=("scale", "residual")),
    _norm_case("layer", (3, 12), given=("scale", "offset"), kind="layer"),
    _norm_case("layer_with_residual", (3, 12), given=("residual",), kind="layer"),
    _norm_case("other_axis", (3, 8, 5), given=("scale", "offset"), axis=1),
)


def _rope_case(name: str, x: tuple[int, ...] = (2, 9, 3, 16), start: int = 0, **options: Any) -> OpCase:
    def arrays(rng: np.random.Generator) -> Mapping[str, Any]:
        return {"x": rng.normal(size=x), "positions": rng.integers(start, start + 64, size=x[:-2]).astype(np.int32)}

    return OpCase("rope", name, arrays, options)


_ROPE = (
    _rope_case("plain"),
    _rope_case("interleaved", interleaved=True),
    _rope_case("partial", rotary_dim=6),
    _rope_case("partial_interleaved", rotary_dim=6, interleaved=True, theta=500.0),
    _rope_case("one_token", x=(1, 1, 1, 2)),
    _rope_case("empty_rows", x=(2, 0, 3, 8)),
    _rope_case("later_positions", start=300, theta=500_000.0),
    _rope_case("linear_scaling", scaling=ops.LinearScaling(factor=4.0)),
    _rope_case("dynamic_scaling", scaling=ops.DynamicScaling(factor=2.0, max_position_embeddings=16)),
)


def _cross_entropy_case(
    name: str, rows: tuple[int, ...] = (2, 7), embed: int = 12, vocab: int = 37, ignored: float = 0.0, **options: Any
) -> OpCase:
    ignore_index = options.get("ignore_index", -100)

    def arrays(rng: np.random.Generator) -> Mapping[str, Any]:
        labels = rng.integers(0, vocab, size=rows).astype(np.int32)
        return {
            "hidden": rng.normal(size=(*rows, embed)),
            "weight": rng.normal(size=(embed, vocab)) / 2,
            "labels": np.where(rng.random(rows) < ignored, np.int32(ignore_index), labels),
        }

    return OpCase("linear_cross_entropy", name, arrays, options)


_LINEAR_CROSS_ENTROPY = (
    _cross_entropy_case("plain"),
    _cross_entropy_case("sum", reduction="sum"),
    _cross_entropy_case("none", reduction="none", ignored=0.3),
    _cross_entropy_case("ignored", ignored=0.5),
    _cross_entropy_case("all_ignored", ignored=1.1),
    _cross_entropy_case("all_ignored_none", ignored=1.1, reduction="none"),
    _cross_entropy_case("other_ignore_index", ignored=0.5, ignore_index=3),
    _cross_entropy_case("odd_sizes", rows=(131,), embed=19, vocab=1000),
    _cross_entropy_case("large_vocabulary", rows=(3,), embed=8, vocab=50257, ignored=0.3),
    _cross_entropy_case("empty_rows", rows=(0,)),
    _cross_entropy_case("z_loss", z_loss=0.1, ignored=0.2),
    _cross_entropy_case("label_smoothing", label_smoothing=0.1, ignored=0.2),
    _cross_entropy_case("everything", z_loss=0.01, label_smoothing=0.2, ignored=0.3, reduction="none"),
)

CASES: Mapping[str, tuple[OpCase, ...]] = {
    "attention": _ATTENTION,
    "gated_linear_unit": _GATED_LINEAR_UNIT,
    "linear": _LINEAR,
    "linear_cross_entropy": _LINEAR_CROSS_ENTROPY,
    "norm": _NORM,
    "rope": _ROPE,
}
