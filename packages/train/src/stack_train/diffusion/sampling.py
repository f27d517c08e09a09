"""Images from the model of a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import UInt8

from stack_core.errors import GenerationError
from stack_train.data.image_batches import as_pixels
from stack_train.diffusion.denoiser import Denoiser, ImagesConfig
from stack_train.diffusion.objectives import Denoises
from stack_train.diffusion.samplers import SamplerConfig, guided, levels_of, sample, table_of
from stack_train.run.config import run_config
from stack_train.weights import load_model

__all__ = ["ImageSampler", "open_run"]


@dataclass(frozen=True)
class ImageSampler:
    """A denoiser that makes images of labels.

    Attributes:
      config: the model's.
      objective: by which it was trained.
      step: training steps done.
    """

    model: Denoiser
    config: ImagesConfig
    objective: Denoises
    step: int

    def images(
        self, labels: Sequence[int], sampler: SamplerConfig, *, seed: int = 0
    ) -> UInt8[np.ndarray, "images height width channels"]:
        """Samples an image of every label; a model without labels makes as many.

        Args:
          seed: image i of a seed starts from the same noise, however many there are.

        Raises:
          GenerationError: the model does not know a label; says which it knows.
          ConfigError: the sampler takes more steps than the schedule has.
        """
        self._check(labels)
        levels = levels_of(self.objective.schedule, sampler.steps, sampler.spacing)
        table = table_of(sampler, levels, self.objective.prediction)
        graph, state = nnx.split(self.model)

        @jax.jit
        def run(state: Any, condition: dict[str, jax.Array], key: jax.Array) -> jax.Array:
            config = self.config
            denoise = guided(
                nnx.merge(graph, state),
                condition,
                images=len(labels),
                guidance=sampler.guidance,
                rescale=sampler.guidance_rescale,
            )
            shape = (config.image_size, config.image_size, config.channels)
            keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(len(labels)))
            noise = jax.vmap(lambda each: jax.random.normal(each, shape))(keys)
            return sample(lambda x, t: denoise(x, t)[..., : config.channels], table, noise, key=key)

        condition = {"labels": jnp.asarray(labels, jnp.int32)} if self.config.classes else {}
        return as_pixels(run(state, condition, jax.random.key(seed)))

    def _check(self, labels: Sequence[int]) -> None:
        classes = self.config.classes
        if classes and (wrong := sorted({label for label in labels if not 0 <= label < classes})):
            raise GenerationError(
                f"The model knows the labels 0 to {classes - 1}, not {', '.join(map(str, wrong))}.", parameter="label"
            )


def open_run(directory: Path) -> ImageSampler:
    """Opens the newest intact checkpoint of a run: the average of the weights, where the run keeps one.

    Raises:
      RunDirectoryError: there is no run.
      GenerationError: it trains no denoiser.
      CheckpointError: it has no checkpoint that can be used.
    """
    config = run_config(directory)
    if not isinstance(config.objective, Denoises) or not isinstance(config.model, ImagesConfig):
        raise GenerationError(
            f"{directory} trains family {config.model.family!r} by objective {config.objective.name!r}, which makes no "
            "images. Use `stack generate` for text."
        )
    model, step = load_model(directory, config)
    model.eval()
    return ImageSampler(model, config.model, config.objective, step)
