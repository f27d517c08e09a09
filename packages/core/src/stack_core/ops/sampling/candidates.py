"""The most likely tokens of each row, without sorting a vocabulary, for which a CPU needs longer than for a model.

The rows of logits here are `padded`: their vocabulary is a multiple of `GROUPS`, the tokens beyond it have -inf.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

__all__ = ["GROUPS", "at_token", "kth_largest", "largest", "most_likely", "padded"]

GROUPS = 128
_GROUP_TOKENS = 16
_LARGEST = 64


def padded(logits: Float[Array, "rows vocab"]) -> Float[Array, "rows padded"]:
    """In float32, with tokens of -inf until there is a multiple of `GROUPS`."""
    return jnp.pad(logits.astype(jnp.float32), ((0, 0), (0, -logits.shape[1] % GROUPS)), constant_values=-jnp.inf)


def at_token(array: Float[Array, "rows vocab"], tokens: Int[Array, " rows"]) -> Float[Array, " rows"]:
    """What each row has for its token."""
    return jnp.take_along_axis(array, tokens[:, None], axis=1)[:, 0]


def most_likely(logits: Float[Array, "rows vocab"]) -> Int[Array, " rows"]:
    """The first of the largest of each row, or of those that are NaN."""
    groups = logits.reshape(len(logits), -1, GROUPS)
    group = jnp.argmax(jnp.max(groups, axis=2), axis=1)
    place = jnp.argmax(jnp.take_along_axis(groups, group[:, None, None], axis=1)[:, 0], axis=1)
    return (group * GROUPS + place).astype(jnp.int32)


def largest(logits: Float[Array, "rows vocab"], count: int) -> tuple[Float[Array, "rows n"], Int[Array, "rows n"]]:
    """The `count` largest of each row and their tokens, the largest first, of equal ones the lowest token first.

    They lie in the `count` groups of neighbours whose largest are the largest.
    """
    groups = logits.reshape(len(logits), -1, _GROUP_TOKENS)
    _, chosen = lax.top_k(jnp.max(groups, axis=2), min(count, groups.shape[1]))
    chosen = jnp.sort(chosen, axis=1)
    found = jnp.take_along_axis(groups, chosen[:, :, None], axis=1).reshape(len(logits), -1)
    values, places = lax.top_k(found, min(count, found.shape[1]))
    tokens = jnp.take_along_axis(chosen, places // _GROUP_TOKENS, axis=1) * _GROUP_TOKENS + places % _GROUP_TOKENS
    return values, tokens.astype(jnp.int32)


def kth_largest(logits: Float[Array, "rows vocab"], k: Int[Array, " rows"]) -> Float[Array, " rows"]:
    """A number that the k largest of each row reach, and no others but those equal to the last; -inf where k is 0."""
    count = min(_LARGEST, logits.shape[1])

    def among_largest() -> jax.Array:
        values, _ = largest(logits, count)
        return at_token(values, jnp.clip(k - 1, 0, count - 1))

    found = lax.cond(jnp.any(k > count), lambda: _bisected(logits, k), among_largest)
    return jnp.where(k > 0, found, -jnp.inf)


def _bisected(logits: Float[Array, "rows vocab"], k: Int[Array, " rows"]) -> Float[Array, " rows"]:
    """The same for any k, bit by bit of a float, until all rows have a number that exactly k reach."""
    wanted = k.astype(jnp.float32)  # counts of a vocabulary are exact in float32, which sums faster than int32

    def unfinished(state: tuple[jax.Array, jax.Array, jax.Array]) -> Bool[Array, ""]:
        bit, _, reached = state
        return (bit > 0) & jnp.any(reached != wanted)

    def narrow(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        bit, ordinal, reached = state
        raised = ordinal | bit
        count = jnp.sum((logits >= _float_of(raised)[:, None]).astype(jnp.float32), axis=1)
        enough = (count >= wanted) & (reached != wanted)
        return bit >> jnp.uint32(1), jnp.where(enough, raised, ordinal), jnp.where(enough, count, reached)

    start = jnp.zeros(len(k), jnp.uint32), jnp.full(len(k), logits.shape[1], jnp.float32)
    _, ordinal, _ = lax.while_loop(unfinished, narrow, (jnp.uint32(1 << 31), *start))
    return jnp.where(ordinal == 0, -jnp.inf, _float_of(ordinal))


def _float_of(ordinal: jax.Array) -> jax.Array:
    """The float32 at a place in the order of all: negative ones have their bits inverted, positive ones their sign."""
    bits = jnp.where(ordinal >> jnp.uint32(31) != 0, ordinal ^ jnp.uint32(1 << 31), ~ordinal)
    return lax.bitcast_convert_type(bits, jnp.float32)
