"""Image-text models: two towers whose feature vectors are compared."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, UInt8
from pydantic import PositiveFloat

from stack_core.abi.config import config
from stack_core.abi.errors import ShapeError, ShardingError
from stack_core.abi.mesh import constrain, parts_of
from stack_train.data.image_files import CropRule, ImageScaling
from stack_train.nn.linear import FloatName
from stack_train.nn.stack import RematPolicy
from stack_train.vision.packed_images import Resampling

__all__ = ["DualEncoder", "DualEncoderConfig", "unit_length"]

Features = Float[Array, "batch features"]


@config
class DualEncoderConfig:
    """Settings of all image-text models.

    Attributes:
      resample: filter of Pillow for scaling images to the size of the tower.
      initial_logit_scale: logarithm of the initial factor of the logits.
      initializer_std: standard deviation of the initial weights.
      dtype: dtype of activations.
      param_dtype: dtype of parameters without an optimizer, in inference and exports; `precision.params` is the dtype
        of trained parameters.
      remat: values of each layer that are saved for the backward pass; the others are recomputed. "none" saves all,
        "dots" matrix products, "dots_no_batch" matrix products except attention's, "full" only the layer's input.
    """

    resample: Resampling = "bicubic"
    initial_logit_scale: float = 2.6592
    initializer_std: PositiveFloat = 0.02
    dtype: FloatName = "bfloat16"
    param_dtype: FloatName = "float32"
    remat: RematPolicy = "none"

    crop: ClassVar[CropRule] = "none"

    @property
    def scaling(self) -> ImageScaling:
        """Preprocessing of images, as by the model's publisher."""
        return ImageScaling(self.resample, self.crop)

    @property
    def end_token(self) -> int | None:
        """Token at which the text tower pools, in every text; None if it pools at a fixed place."""
        return None

    @property
    def numerics(self) -> dict[str, Any]:
        """Arguments of both towers."""
        numerics = {"std": self.initializer_std, "dtype": self.dtype, "param_dtype": self.param_dtype}
        return {**numerics, "remat": self.remat}


def unit_length(features: Features) -> Features:
    """Scales vectors to length 1, in float32."""
    features = features.astype(jnp.float32)
    # A vector of zeros would give NaN gradients.
    return features * jax.lax.rsqrt(jnp.maximum(jnp.sum(features**2, axis=-1, keepdims=True), 1e-24))


class DualEncoder(nnx.Module):
    """Images and texts to feature vectors of length 1 in one space.

        logit[i, j] = exp(logit_scale) image[i] . text[j] + logit_bias

    Attributes:
      logit_scale: logarithm of the factor of the logits.
      logit_bias: term added to the logits; None adds nothing.
    """

    config: Any
    logit_scale: nnx.Param[jax.Array]
    logit_bias: nnx.Param[jax.Array] | None

    @abstractmethod
    def encode_images(self, pixels: UInt8[Array, "batch side side channels"]) -> Features:
        """Returns feature vectors of any length."""

    @abstractmethod
    def encode_texts(self, tokens: Int[Array, "batch seq"]) -> Features:
        """Returns feature vectors of any length."""

    def image_features(self, pixels: UInt8[Array, "batch side side channels"]) -> Features:
        """Returns the feature vectors of images, in float32."""
        return constrain(unit_length(self.encode_images(pixels)), "batch", None, name="features of images")

    def text_features(self, tokens: Int[Array, "batch seq"]) -> Features:
        """Returns the feature vectors of texts, in float32.

        Args:
          tokens: texts of `config.text.max_positions` tokens, padded as in training.

        Raises:
          ShapeError: there are more tokens.
          ShardingError: several devices share a text.
        """
        most, seq = self.config.text.max_positions, tokens.shape[1]
        if seq > most:
            raise ShapeError(f"The texts have {seq} tokens; the text tower has max_positions={most}. Shorten them.")
        if parts_of("seq") > 1:
            raise ShardingError("The towers of image-text models are not split over the sequence. Set mesh.context=1.")
        return constrain(unit_length(self.encode_texts(tokens)), "batch", None, name="features of texts")

    def scale_and_bias(self) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Returns the factor of the logits, and the term added to them, in float32."""
        scale = jnp.exp(self.logit_scale[...].astype(jnp.float32)).reshape(())
        bias = jnp.float32(0) if self.logit_bias is None else self.logit_bias[...].astype(jnp.float32).reshape(())
        return scale, bias

    def logits(
        self, images: Float[Array, "images features"], texts: Float[Array, "texts features"]
    ) -> Float[Array, "images texts"]:
        """Computes the logits of all pairs of feature vectors."""
        scale, bias = self.scale_and_bias()
        return scale * jnp.matmul(images, texts.T, precision="highest") + bias

    def on_batch(self, batch: Mapping[str, jax.Array]) -> Float[Array, "images texts"]:
        """Returns the logits of a batch, which use all parameters."""
        return self.logits(self.image_features(batch["pixels"]), self.text_features(batch["tokens"]))
