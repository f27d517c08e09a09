"""Places of image tokens in sequences of token ids."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from stack_core.abi.models import ImageTokens

__all__ = ["count_later", "place_features", "select_image_tokens"]


def place_features(
    features: Float[Array, "batch images image_tokens embed"], tokens: Int[Array, "batch seq"], image_token: int
) -> ImageTokens:
    """Assigns the features of each row's images, in order, to the row's runs of image tokens.

    A run at the end of a row may be shorter than an image. Tokens of further runs keep their embeddings.

    Args:
      features: features of each row's images.
      tokens: token ids.
      image_token: id of the image token; runs of it are separated by other tokens.
    """
    batch, images, image_tokens, embed = features.shape
    places = jnp.arange(tokens.shape[1])
    is_image = tokens == image_token
    starts = is_image & ~jnp.pad(is_image, ((0, 0), (1, 0)))[:, :-1]
    number = jnp.cumsum(starts, axis=1) - 1
    offset = places - lax.cummax(jnp.where(starts, places, 0), axis=1)
    is_known = is_image & (number < images) & (offset < image_tokens)
    return ImageTokens(
        features.reshape(batch, images * image_tokens, embed),
        jnp.where(is_known, number * image_tokens + offset, -1).astype(jnp.int32),
        count_later(is_image),
    )


def count_later(is_image: Bool[Array, "batch seq"]) -> Int[Array, "batch seq"]:
    """Returns the number of later tokens in the run of each image token, 0 for text; see `ImageTokens.ahead`."""
    seq = is_image.shape[1]
    places = jnp.arange(seq)
    # The first later place that is not in the image.
    ends = lax.cummin(jnp.where(is_image, seq, places), axis=1, reverse=True)
    return jnp.where(is_image, ends - 1 - places, 0).astype(jnp.int32)


def select_image_tokens(
    tokens: Int[Array, "batch seq"], image_mask: Bool[Array, "batch seq"] | None
) -> Int[Array, "batch seq"]:
    """Replaces tokens outside of `image_mask` by -1, because sampled image tokens have no features."""
    return tokens if image_mask is None else jnp.where(image_mask, tokens, -1)
