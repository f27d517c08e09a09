"""Choosing the next token from a model's logits."""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from stack_core.config import config

__all__ = ["Drawn", "SamplingConfig", "draw", "sample"]


@config
class SamplingConfig:
    """How a continuation is chosen and where it ends.

    Attributes:
      max_tokens: tokens to generate, at most.
      temperature: what logits are divided by; 0 takes the most likely token each time.
      top_k: how many of the most likely tokens are candidates; 0 is all.
      top_p: the most likely tokens whose probabilities first reach this sum are candidates.
      seed: of the draws; the same seed gives the same text.
      stop: texts that end the continuation; they are not part of it.
    """

    max_tokens: PositiveInt = 128
    temperature: NonNegativeFloat = 1.0
    top_k: NonNegativeInt = 0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    seed: NonNegativeInt = 0
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()


def sample(
    logits: Float[Array, "batch vocab"],
    *,
    temperature: Float[Array, ""],
    top_k: Int[Array, ""],
    top_p: Float[Array, ""],
    key: Key[Array, ""],
) -> Int[Array, " batch"]:
    """Draws a token for each row from softmax(logits / temperature), restricted to the candidates.

    Candidates are the `top_k` most likely tokens, and of them the most likely whose probabilities, renormalized, first
    reach `top_p`; the most likely token always is one. All settings are arrays, so that changing them compiles nothing.

    Returns:
      int32[batch]; with temperature 0 the first of the most likely tokens.
    """

    def draw() -> jax.Array:
        order = jnp.argsort(logits, axis=-1, descending=True)
        ranked = jnp.take_along_axis(logits, order, axis=-1) / jnp.maximum(temperature, 1e-6)
        ranks = jnp.arange(logits.shape[-1])
        ranked = jnp.where((top_k == 0) | (ranks < top_k), ranked, -jnp.inf)
        probabilities = jax.nn.softmax(ranked, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        ranked = jnp.where((before < top_p) | (top_p >= 1) | (ranks == 0), ranked, -jnp.inf)
        chosen = jax.random.categorical(key, ranked, axis=-1)
        return jnp.take_along_axis(order, chosen[:, None], axis=-1)[:, 0].astype(jnp.int32)

    def most_likely() -> jax.Array:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    return jax.lax.cond(temperature == 0, most_likely, draw)


class Drawn(NamedTuple):
    """A token of each row.

    Attributes:
      logprobs: float32, by softmax(logits).
      processed: float32, by the distribution that the token was drawn from.
      ranks: 1 for the most likely token.
    """

    tokens: Int[Array, " batch"]
    logprobs: Float[Array, " batch"]
    processed: Float[Array, " batch"]
    ranks: Int[Array, " batch"]


def draw(
    logits: Float[Array, "batch vocab"],
    *,
    temperature: Float[Array, " batch"],
    top_k: Int[Array, " batch"],
    top_p: Float[Array, " batch"],
    min_p: Float[Array, " batch"],
    keys: Key[Array, " batch"],
) -> Drawn:
    """Draws a token for each row by settings and a key of its own, in the order that `SamplingParams` names.

    Where settings leave all tokens as candidates, nothing is sorted.
    """
    scaled = logits / jnp.maximum(temperature, 1e-6)[:, None]
    narrows = jnp.any((top_k > 0) | (top_p < 1) | (min_p > 0))
    kept = jax.lax.cond(narrows, lambda: _candidates(scaled, top_k, top_p, min_p), lambda: scaled)
    chosen = jax.vmap(jax.random.categorical)(keys, kept)
    tokens = jnp.where(temperature == 0, jnp.argmax(logits, axis=-1), chosen).astype(jnp.int32)

    def of_tokens(values: jax.Array) -> jax.Array:
        return jnp.take_along_axis(values, tokens[:, None], axis=-1)[:, 0]

    return Drawn(
        tokens,
        of_tokens(jax.nn.log_softmax(logits, axis=-1)),
        jnp.where(temperature == 0, 0.0, of_tokens(jax.nn.log_softmax(kept, axis=-1))),
        1 + jnp.sum(logits > of_tokens(logits)[:, None], axis=-1, dtype=jnp.int32),
    )


def _candidates(scaled: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """The scaled logits, -inf where a token is no candidate; tokens as likely as the last candidate are candidates."""
    ranked = jnp.sort(scaled, axis=-1, descending=True)
    last = jnp.where(top_k > 0, jnp.minimum(top_k, scaled.shape[-1]), scaled.shape[-1]) - 1
    least = jnp.take_along_axis(ranked, last[:, None], axis=-1)
    least = jnp.maximum(least, ranked[:, :1] + jnp.log(min_p)[:, None])
    probabilities = jax.nn.softmax(jnp.where(ranked >= least, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    inside = (ranked >= least) & ((before < top_p[:, None]) | (top_p[:, None] >= 1))
    least = jnp.min(jnp.where(inside, ranked, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(scaled >= least, scaled, -jnp.inf)
