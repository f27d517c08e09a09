"""The sizes of a 66M, a 1B and an 8B Llama's MLP; rows of a training step, of a prompt and of decoding."""

from functools import partial
from typing import Any

import jax
import numpy as np

from op_cases import Case, forward_and_gradient, normal
from stack_core import ops

SIZES = {"2048 x 512 x 2048": (2048, 512, 2048), "512 x 2048 x 5632": (512, 2048, 5632)}
DECODING = {"1 x 4096 x 14336": (1, 4096, 14336), "8 x 2048 x 5632": (8, 2048, 5632)}


def _jnp(x: Any, w_gate: Any, w_up: Any) -> Any:
    return jax.nn.silu(x @ w_gate) * (x @ w_up)


def _tokamax(x: Any, w_gate: Any, w_up: Any) -> Any:
    import tokamax

    return tokamax.gated_linear_unit(x, (w_gate, w_up), activation=jax.nn.silu)


def _case(sizes: str, dtype: str) -> Case:
    rows, d_in, d_out = (SIZES | DECODING)[sizes]

    def operands(rng: np.random.Generator) -> tuple[Any, ...]:
        weights = [normal(rng, (d_in, d_out), dtype, d_in**-0.5) for _ in range(2)]
        return normal(rng, (rows, d_in), dtype), *weights

    contenders = {
        "stack": ops.gated_linear_unit,
        "core": partial(ops.gated_linear_unit, implementation="reference"),
        "jnp": _jnp,
        "tokamax": _tokamax,
    }
    return Case(name=f"{sizes}, {dtype}", operands=operands, contenders=contenders)


CASES = (
    *(
        case
        for sizes in SIZES
        for dtype in ("float32", "bfloat16")
        for case in forward_and_gradient(_case(sizes, dtype), moving=(0, 1, 2))
    ),
    *(_case(sizes, dtype) for sizes in DECODING for dtype in ("float32", "bfloat16")),
)
