"""Choosing the next token from a model's logits."""

from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from stack_core.config import config

__all__ = ["SamplingConfig", "sample"]


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
