"""`objective.name: reconstruction`: the training loss of image autoencoders."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from pydantic import NonNegativeFloat

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_core.abi.metrics import Metric, Metrics
from stack_core.abi.objectives import Objective

__all__ = ["ReconstructionConfig"]


@config
class ReconstructionConfig(Objective):
    """Reconstruction error of an autoencoder plus the KL divergence of its latents from a normal distribution.

        loss = mean_b |x_b - decode(z_b)|^p + kl_weight * KL(N(mean_b, variance_b) || N(0, 1)),  z = mean + deviation e

    Both terms are means, over pixels and over latent features. Adversarial and perceptual losses, which sharpen large
    images, are not included.

    Attributes:
      name: selects this objective.
      error: "squared", p = 2, or "absolute", p = 1.
      kl_weight: weight of the KL divergence, which keeps latents from growing; Stable Diffusion uses 1e-6.

    Source: Kingma and Welling, Auto-Encoding Variational Bayes, 2014 (arXiv:1312.6114).
    """

    name: Literal["reconstruction"] = "reconstruction"
    error: Literal["squared", "absolute"] = "squared"
    kl_weight: NonNegativeFloat = 1e-6

    inputs: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"images": "batch *frames height width channels", "weights": "batch"}
    )

    def __call__(
        self, model: Any, batch: Mapping[str, jax.Array], *, key: jax.Array, **auxiliary: Any
    ) -> tuple[jax.Array, Metrics]:
        if not hasattr(model, "encode"):
            raise ConfigError(
                f"objective reconstruction trains autoencoders, not a {type(model).__name__}; take family "
                "autoencoder_kl."
            )
        images, real = batch["images"], batch["weights"]
        again, mean, log_variance = model(images, key=key)
        difference = again - images
        errors = jnp.square(difference) if self.error == "squared" else jnp.abs(difference)
        divergence = 0.5 * (jnp.square(mean) + jnp.exp(log_variance) - 1.0 - log_variance)
        total = jnp.sum(real)

        def weighed(values: jax.Array) -> Metric:
            rows = values.mean(axis=tuple(range(1, values.ndim)))
            # Rows that fill a batch have weight 0, perhaps all rows.
            return Metric.mean(jnp.sum(rows * real) / jnp.maximum(total, 1.0), total)

        reconstruction, kl = weighed(errors), weighed(divergence)
        loss = reconstruction.value + self.kl_weight * kl.value
        return loss, {"loss": Metric.mean(loss, total), "reconstruction": reconstruction, "kl": kl}
