"""Selection of the most likely tokens of each row without sorting, which can take a CPU longer than the model.

Logits in this module are `padded`: the vocabulary is a multiple of `GROUPS`, and padding tokens have -inf.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

__all__ = ["GROUPS", "at_token", "greedy_tokens", "kth_largest", "largest", "padded"]

GROUPS = 128
_GROUP_TOKENS = 16
_LARGEST = 64  # maximum k for which `kth_largest` selects instead of bisecting


def padded(logits: Float[Array, "rows vocab"]) -> Float[Array, "rows padded"]:
    """Converts logits to float32 and pads the vocabulary with -inf to a multiple of `GROUPS`."""
    return jnp.pad(logits.astype(jnp.float32), ((0, 0), (0, -logits.shape[1] % GROUPS)), constant_values=-jnp.inf)


def at_token(array: Float[Array, "rows vocab"], tokens: Int[Array, " rows"]) -> Float[Array, " rows"]:
    """Returns each row's value at its token."""
    return jnp.take_along_axis(array, tokens[:, None], axis=1)[:, 0]


def greedy_tokens(logits: Float[Array, "rows vocab"]) -> Int[Array, " rows"]:
    """Returns the argmax of each row: the first of equal maxima, or the first NaN."""
    groups = logits.reshape(len(logits), -1, GROUPS)
    group = jnp.argmax(jnp.max(groups, axis=2), axis=1)
    place = jnp.argmax(jnp.take_along_axis(groups, group[:, None, None], axis=1)[:, 0], axis=1)
    return (group * GROUPS + place).astype(jnp.int32)


def largest(logits: Float[Array, "rows vocab"], count: int) -> tuple[Float[Array, "rows n"], Int[Array, "rows n"]]:
    """Returns the `count` largest values of each row and their tokens, in descending order, then by token.

    Only the `count` groups of adjacent tokens with the largest maxima need to be searched.
    """
    groups = logits.reshape(len(logits), -1, _GROUP_TOKENS)
    _, chosen = lax.top_k(jnp.max(groups, axis=2), min(count, groups.shape[1]))
    # In the order of tokens, because `top_k` takes the first of equal values.
    chosen = jnp.sort(chosen, axis=1)
    found = jnp.take_along_axis(groups, chosen[:, :, None], axis=1).reshape(len(logits), -1)
    values, places = lax.top_k(found, min(count, found.shape[1]))
    tokens = jnp.take_along_axis(chosen, places // _GROUP_TOKENS, axis=1) * _GROUP_TOKENS + places % _GROUP_TOKENS
    return values, tokens.astype(jnp.int32)


def kth_largest(logits: Float[Array, "rows vocab"], k: Int[Array, " rows"]) -> Float[Array, " rows"]:
    """Returns a threshold t of each row: logits >= t are the k largest and any ties with the k-th; -inf if k is 0."""
    count = min(_LARGEST, logits.shape[1])

    def among_largest() -> jax.Array:
        values, _ = largest(logits, count)
        return at_token(values, jnp.clip(k - 1, 0, count - 1))

    found = lax.cond(jnp.any(k > count), lambda: _bisected(logits, k), among_largest)
    return jnp.where(k > 0, found, -jnp.inf)


def _bisected(logits: Float[Array, "rows vocab"], k: Int[Array, " rows"]) -> Float[Array, " rows"]:
    """Finds the threshold for any k bit by bit of a float; stops early once exactly k logits of each row reach it."""
    target = k.astype(jnp.float32)  # float32 counts up to the vocabulary exactly and sums faster than int32

    def unfinished(state: tuple[jax.Array, jax.Array, jax.Array]) -> Bool[Array, ""]:
        bit, _, reached = state
        return (bit > 0) & jnp.any(reached != target)

    def refine(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        bit, ordinal, reached = state
        raised = ordinal | bit
        count = jnp.sum((logits >= _float_of(raised)[:, None]).astype(jnp.float32), axis=1)
        enough = (count >= target) & (reached != target)
        return bit >> jnp.uint32(1), jnp.where(enough, raised, ordinal), jnp.where(enough, count, reached)

    start = jnp.zeros(len(k), jnp.uint32), jnp.full(len(k), logits.shape[1], jnp.float32)
    _, ordinal, _ = lax.while_loop(unfinished, refine, (jnp.uint32(1 << 31), *start))
    # `_float_of(0)` is NaN; every logit reaches a threshold without any bit.
    return jnp.where(ordinal == 0, -jnp.inf, _float_of(ordinal))


def _float_of(ordinal: jax.Array) -> jax.Array:
    """Maps an order-preserving uint32 to its float32: all bits of negative numbers are inverted, else the sign bit."""
    bits = jnp.where(ordinal >> jnp.uint32(31) != 0, ordinal ^ jnp.uint32(1 << 31), ~ordinal)
    return lax.bitcast_convert_type(bits, jnp.float32)
