"""The contract suite of `norm`."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from stack_core.testing.cases import OpCase, OpSuite, in_tiles, spoiled

__all__ = ["SUITE"]


def _norm_case(name: str, x: tuple[int, ...], present: tuple[str, ...] = ("scale",), **options: Any) -> OpCase:
    size = x[options.get("axis", -1)]

    def arrays(rng: np.random.Generator) -> Mapping[str, Any]:
        shapes = {"scale": size, "offset": size, "residual": x}
        return {"x": rng.normal(size=x), **{name: rng.normal(size=shapes[name]) for name in present}}

    return OpCase("norm", name, arrays, options)


_CASES = (
    _norm_case("plain", (2, 3, 8)),
    _norm_case("without_scale", (3, 8), present=()),
    _norm_case("odd_sizes", (131, 67), epsilon=1e-3),
    _norm_case("empty_rows", (0, 8)),
    _norm_case("scale_offset", (3, 8), scale_offset=1.0),
    _norm_case("residual", (2, 5, 12), present=("scale", "residual")),
    _norm_case("layer", (3, 12), present=("scale", "offset"), kind="layer"),
    _norm_case("layer_with_residual", (3, 12), present=("residual",), kind="layer"),
    _norm_case("other_axis", (3, 8, 5), present=("scale", "offset"), axis=1),
    spoiled(
        _norm_case("", (2, 5, 12), present=("scale", "residual")),
        "not_a_number",
        x=((0, 1, 3), np.nan),
        residual=((1, 2, 0), np.inf),
        scale=(4, np.nan),
    ),
)

_FOR_ACCELERATORS = in_tiles(
    _norm_case("rms", (64, 256)),
    _norm_case("rms_without_scale", (64, 256), present=()),
    _norm_case("rms_scale_offset", (64, 128), scale_offset=1.0),
    _norm_case("rms_residual", (2, 48, 256), present=("scale", "residual")),
    _norm_case("rms_residual_without_scale", (64, 256), present=("residual",)),
    _norm_case("rms_partial_rows", (131, 128), epsilon=1e-3),
    _norm_case("rms_long_rows", (3, 4096)),
    _norm_case("rms_partial_columns", (17, 320)),
    _norm_case("rms_of_heads", (2, 16, 4, 64)),
    _norm_case("rms_no_rows", (0, 256)),
    _norm_case("layer", (64, 256), present=("scale", "offset"), kind="layer"),
    _norm_case("layer_residual", (33, 256), present=("scale", "offset", "residual"), kind="layer"),
    _norm_case("other_axis", (3, 64, 48), present=("scale", "offset"), axis=1),
)


def _oracle(
    x: Any,
    scale: Any = None,
    *,
    offset: Any = None,
    kind: str = "rms",
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    residual: Any = None,
    axis: int = -1,
) -> Any:
    total = x if residual is None else x + residual
    moved = jnp.moveaxis(total, axis, -1)
    centred = moved - (moved.mean(-1, keepdims=True) if kind == "layer" else 0.0)
    normed = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
    normed = normed * (1.0 if scale is None else scale + scale_offset) + (0.0 if offset is None else offset)
    normed = jnp.moveaxis(normed, -1, axis)
    return normed if residual is None else (normed, total)


SUITE = OpSuite(_CASES, _oracle, _FOR_ACCELERATORS)
