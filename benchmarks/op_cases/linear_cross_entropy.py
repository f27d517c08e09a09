"""The head of a 66M Llama in training, of a quickstart's model, and a vocabulary of 128k."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from op_cases import Case, forward_and_gradient, normal
from stack_core import ops

SIZES = {
    "2048 x 192 x 4096": (2048, 192, 4096),
    "2048 x 512 x 32000": (2048, 512, 32000),
    "2048 x 512 x 131072": (2048, 512, 131072),
}


def _jnp(hidden: Any, weight: Any, labels: Any) -> Any:
    log_probabilities = jax.nn.log_softmax((hidden @ weight).astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(log_probabilities, labels[:, None], axis=1))


def _tokamax(hidden: Any, weight: Any, labels: Any, *, implementation: str) -> Any:
    import tokamax

    loss = tokamax.linear_softmax_cross_entropy_loss
    return loss(hidden, labels, weight, reduction="mean", implementation=implementation)


def _case(sizes: str, dtype: str) -> Case:
    rows, embed, vocab = SIZES[sizes]

    def operands(rng: np.random.Generator) -> tuple[Any, ...]:
        labels = rng.integers(0, vocab, rows, dtype=np.int32)
        return normal(rng, (rows, embed), dtype), normal(rng, (embed, vocab), dtype, embed**-0.5), labels

    contenders = {
        "stack": ops.linear_cross_entropy,
        "core": partial(ops.linear_cross_entropy, implementation="reference"),
        "jnp": _jnp,
        "tokamax xla": partial(_tokamax, implementation="xla"),
        "tokamax chunked_xla": partial(_tokamax, implementation="chunked_xla"),
    }
    return Case(
        name=f"{sizes}, {dtype}",
        operands=operands,
        contenders=contenders,
        exact_dtype="float32",
        memory=vocab > 2**16,
    )


CASES = tuple(
    case
    for sizes in SIZES
    for dtype in ("float32", "bfloat16")
    for case in forward_and_gradient(_case(sizes, dtype), moving=(0, 1))
)
