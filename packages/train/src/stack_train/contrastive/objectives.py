"""Contrastive objectives: each image of a batch is compared with each text of the batch, on any mesh.

Rows of a batch are split over devices, and the losses equal the losses on one device. For the softmax loss, every
device gathers the feature vectors of all texts and computes the logits of its own images. The sigmoid loss is a sum
over pairs: texts are passed around the devices, and no array has all of them.

Sources: Radford et al., Learning Transferable Visual Models From Natural Language Supervision, 2021 (arXiv:2103.00020),
section 2.3; Zhai et al., Sigmoid Loss for Language Image Pre-Training, 2023 (arXiv:2303.15343), section 3.3.
"""

from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int
from pydantic import PositiveFloat

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_core.abi.mesh import axes_of, constrain, map_parts, parts_of
from stack_core.abi.metrics import Metric, Metrics
from stack_core.abi.objectives import Objective
from stack_core.ops.dispatch.manual_axes import vary_alike
from stack_train.contrastive.dual_encoder import DualEncoder

__all__ = ["SigmoidContrastiveConfig", "SoftmaxContrastiveConfig"]

Features = Float[Array, "batch features"]
Rows = Float[Array, " batch"]

_HIDDEN = -1e30  # logit of a row that fills the batch; -inf would give NaN gradients


class _Contrastive(Objective):
    """The mean loss of the pairs of a batch, and how many images and texts are matched correctly.

    A text with the tokens of the image's own text is a correct match, too.
    """

    # `make_step` refuses microbatches and replicas, which would compare parts of a batch.
    compares_rows: ClassVar[bool] = True
    inputs: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"pixels": "batch height width channels", "tokens": "batch seq", "weights": "batch", "present": "batch"}
    )
    shown_metrics: ClassVar[tuple[str, ...]] = ("image_recall", "text_recall")

    def __call__(
        self, model: DualEncoder, batch: Mapping[str, jax.Array], *, key: jax.Array, **auxiliary: Any
    ) -> tuple[jax.Array, Metrics]:
        del key  # nothing is sampled
        if not isinstance(model, DualEncoder):
            raise ConfigError(
                "The objective compares images with texts, and this model has no towers for both. Set model.name to "
                "siglip or clip, or choose another objective.name."
            )
        images, texts = model.image_features(batch["pixels"]), model.text_features(batch["tokens"])
        weights, tokens = batch["weights"], batch["tokens"]
        scale, bias = model.scale_and_bias()
        losses, nearest_text, nearest_image = self.compare(images, texts, batch["present"], scale, bias)
        total = jnp.sum(weights)

        def mean(values: jax.Array) -> Metric:
            return Metric.mean(jnp.sum(weights * values) / jnp.where(total == 0, 1, total), total)

        def recall(nearest: jax.Array) -> Metric:
            return mean(jnp.all(tokens[nearest] == tokens, axis=-1).astype(jnp.float32))

        loss = mean(losses)
        found = {"image_recall": recall(nearest_text), "text_recall": recall(nearest_image)}
        return loss.value, {"loss": loss, **found, "logit_scale": Metric.mean(scale, total)}

    @abstractmethod
    def compare(
        self, images: Features, texts: Features, present: Rows, scale: jax.Array, bias: jax.Array
    ) -> tuple[Rows, Int[Array, " batch"], Int[Array, " batch"]]:
        """Returns the loss of each pair, the most similar text of each image, and the most similar image of each text.

        Args:
          present: 1 for pairs, 0 for rows that fill the batch.
          scale, bias: factor of the logits, and term added to them.
        """


@config
class SoftmaxContrastiveConfig(_Contrastive):
    """CLIP's loss, InfoNCE in both directions: the cross-entropy of choosing a row's text among all, and its image.

        logits = min(exp(logit_scale), max_scale) images . texts + logit_bias
        loss_i = (logsumexp_j logits[i, j] + logsumexp_j logits[j, i]) / 2 - logits[i, i]

    Attributes:
      name: selects this objective.
      max_scale: upper bound of the factor of the logits, which keeps training stable; 100 in the paper.
    """

    name: Literal["softmax_contrastive"] = "softmax_contrastive"
    max_scale: PositiveFloat = 100.0

    def compare(
        self, images: Features, texts: Features, present: Rows, scale: jax.Array, bias: jax.Array
    ) -> tuple[Rows, Int[Array, " batch"], Int[Array, " batch"]]:
        scale = jnp.minimum(scale, self.max_scale)
        everywhere = constrain(texts, None, None, name="features of all texts")
        logits = scale * jnp.matmul(images, everywhere.T, precision="highest") + bias
        logits = constrain(logits, "batch", None, name="logits")
        own = scale * jnp.sum(images * texts, axis=-1) + bias
        by_image, by_text = (jnp.where(each > 0, logits, _HIDDEN) for each in (present[None], present[:, None]))
        losses = (jax.nn.logsumexp(by_image, axis=1) + jax.nn.logsumexp(by_text, axis=0)) / 2 - own
        # The index of a maximum by comparisons: XLA would gather all logits for `argmax` along the split axis.
        fixed = lax.stop_gradient(by_text)
        rows = jnp.arange(len(images), dtype=jnp.int32)[:, None]
        nearest_image = jnp.min(jnp.where(fixed == jnp.max(fixed, axis=0), rows, len(images) - 1), axis=0)
        return losses, jnp.argmax(lax.stop_gradient(by_image), axis=1).astype(jnp.int32), nearest_image


@config
class SigmoidContrastiveConfig(_Contrastive):
    """SigLIP's loss: each pair of an image and a text is classified as belonging together or not.

        logits = exp(logit_scale) images . texts + logit_bias
        loss_i = sum_j softplus(logits[i, j]) - logits[i, i]

    It is the sum of -log sigmoid(z logits) with z = 1 for the pair of a row and z = -1 for other pairs. Each of n
    devices computes the logits of its batch / n images and batch / n texts in each of n steps, and passes the texts on.
    The backward pass computes the logits again.

    Attributes:
      name: selects this objective.
    """

    name: Literal["sigmoid_contrastive"] = "sigmoid_contrastive"

    def compare(
        self, images: Features, texts: Features, present: Rows, scale: jax.Array, bias: jax.Array
    ) -> tuple[Rows, Int[Array, " batch"], Int[Array, " batch"]]:
        rows, vectors = ("batch",), ("batch", None)
        losses, nearest_text, nearest_image = map_parts(
            _ring,
            [(images, vectors), (texts, vectors), (present, rows), (scale, ()), (bias, ())],
            (rows, rows, rows),
            name="pairs of a batch",
        )
        return losses - (scale * jnp.sum(images * texts, axis=-1) + bias), nearest_text, nearest_image


def _ring(images: Any, texts: Any, present: Any, scale: Any, bias: Any) -> tuple[Any, Any, Any]:
    """Sums softplus(logits) of each local image over the texts of all devices.

    Returns the sums, and the rows of the nearest text of each local image and of the nearest image of each local text.
    """
    axes, devices, count = axes_of("batch"), parts_of("batch"), len(images)
    place = lax.axis_index(axes) if axes else jnp.int32(0)
    pairs = [(device, (device + 1) % devices) for device in range(devices)]
    own_rows = place * count + jnp.arange(count, dtype=jnp.int32)

    @jax.checkpoint
    def softplus_sums(images: Any, texts: Any, there: Any, scale: Any, bias: Any) -> tuple[Any, Any]:
        logits = scale * jnp.matmul(images, texts.T, precision="highest") + bias
        return jnp.sum(jnp.where(there > 0, jax.nn.softplus(logits), 0), axis=1), lax.stop_gradient(logits)

    def step(carry: Any, number: Any) -> tuple[Any, None]:
        sums, of_images, (texts, there, of_texts) = carry
        found, logits = softplus_sums(images, texts, there, scale, bias)
        # Before this step, the texts moved on `number` times.
        first = (place - number) % devices * count
        by_image = jnp.where(there > 0, logits, _HIDDEN)
        of_images = _nearer(of_images, by_image.max(1), first + jnp.argmax(by_image, 1).astype(jnp.int32))
        by_text = jnp.where(present[:, None] > 0, logits, _HIDDEN)
        of_texts = _nearer(of_texts, by_text.max(0), own_rows[jnp.argmax(by_text, 0)])
        moving = (texts, there, of_texts)
        moving = jax.tree.map(lambda x: lax.ppermute(x, axes, pairs), moving) if devices > 1 else moving
        return (sums + found, of_images, moving), None

    nothing = jnp.full(count, -jnp.inf), jnp.zeros(count, jnp.int32)
    start = vary_alike((jnp.zeros(count), nothing, (texts, present, nothing)), images, place)[0]
    (sums, (_, nearest_text), (_, _, (_, nearest_image))), _ = lax.scan(step, start, jnp.arange(devices))
    return sums, nearest_text, nearest_image


def _nearer(best: tuple[Any, Any], values: Any, rows: Any) -> tuple[Any, Any]:
    """Replaces the largest values so far, and their rows, by larger ones."""
    larger = values > best[0]
    return jnp.where(larger, values, best[0]), jnp.where(larger, rows, best[1])
