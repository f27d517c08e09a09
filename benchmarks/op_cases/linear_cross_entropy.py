"""Losses of a 66M Llama's training step, and of a vocabulary of 128k, where logits do not fit."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from op_cases import Case, forward_and_gradient, normal
from stack_core import ops

SIZES = ((2048, 512, 32000), (2048, 512, 50257), (2048, 512, 128256))


def _jnp(hidden: Any, weight: Any, labels: Any) -> Any:
    """Logits and softmax, in fp32 at least."""
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    scores = jax.nn.log_softmax(jnp.matmul(hidden, weight, preferred_element_type=wide), axis=-1)
    return -jnp.mean(jnp.take_along_axis(scores, labels[:, None], axis=-1))


def _tokamax(hidden: Any, weight: Any, labels: Any, *, implementation: str) -> Any:
    import tokamax

    return tokamax.linear_softmax_cross_entropy_loss(
        hidden, labels, weight, reduction="mean", implementation=implementation
    )


def _case(rows: int, embed: int, vocab: int, dtype: str) -> Case:
    def operands(rng: np.random.Generator) -> tuple[Any, ...]:
        labels = rng.integers(0, vocab, rows, dtype=np.int32)
        return normal(rng, (rows, embed), dtype), normal(rng, (embed, vocab), dtype, embed**-0.5), labels

    return Case(
        name=f"{rows} x {embed} x {vocab}, {dtype}",
        operands=operands,
        contenders={
            "stack": ops.linear_cross_entropy,
            "core": partial(ops.linear_cross_entropy, implementation="reference"),
            "jnp": _jnp,
            "tokamax xla": partial(_tokamax, implementation="xla"),
            "tokamax chunked_xla": partial(_tokamax, implementation="chunked_xla"),
        },
        memory=vocab > 2**16,
    )


CASES = tuple(
    case
    for sizes in SIZES
    for dtype in ("float32", "bfloat16")
    for case in forward_and_gradient(_case(*sizes, dtype), moving=(0, 1))
)
