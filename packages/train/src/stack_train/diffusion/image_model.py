"""Image models that servers run step by step, in batches of images with different steps and settings."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import UInt8

from stack_core.abi.errors import ConfigError, GenerationError
from stack_core.text.image_models import ImageModel, ImageRequest, ImageState
from stack_train.data.image_batches import as_pixels
from stack_train.diffusion.samplers import FIXED_COLUMNS, SamplerConfig, Table, guided, image_coefficients
from stack_train.diffusion.sampling import ImageSampler

__all__ = ["DiffusionModel"]

# Clients choose sizes freely, and each size has its own programs.
_MAX_SIZES = 16


@dataclass(frozen=True)
class _Group:
    """Properties that images of one batch share: each group has its own programs."""

    sides: tuple[int, int]
    columns: int
    adds_noise: bool
    is_guided: bool
    conditions: tuple[str, ...]


@dataclass(frozen=True)
class _Value:
    """State of one image.

    Attributes:
      arrays: "x", the noisy image; "history", earlier rows' h_0; "estimate" of the image; "condition"; "key".
    """

    table: Table
    guidance: float
    arrays: Any


class DiffusionModel(ImageModel):
    """An `ImageSampler` behind the interface of servers.

    Image i of a request equals image i of `ImageSampler.images_of` or `ImageSampler.images` with the same seed, except
    for rounding.

    Raises:
      GenerationError: the model makes videos, or reads a mask or a control image, which requests do not have.
    """

    def __init__(self, sampler: ImageSampler, name: str) -> None:
        if sampler.makes_videos:
            raise GenerationError(f"{name} makes videos, and the server images. Use `stack sample --frames`.")
        if getattr(sampler.config, "extra_channels", 0):
            raise GenerationError(
                f"{name} fills the masked part of an image, and requests have none. Use `stack sample --mask`."
            )
        if getattr(sampler.model, "control", None) is not None:
            raise GenerationError(
                f"{name} has a ControlNet, whose control image requests do not have. Use `stack sample --control`."
            )
        self.name = name
        self._sampler = sampler
        height, width = sampler.sides
        self._size = (height * self._downsampling, width * self._downsampling)
        self._graph, self._state = nnx.split(sampler.model)
        self._tables = lru_cache(256)(self._table)
        self._programs = lru_cache(_MAX_SIZES)(self._program)
        self._decoders = lru_cache(_MAX_SIZES)(self._decoder)

    def warm_up(self) -> None:
        needs_label = self._sampler.encoders is None and self._sampler.config.classes
        request = self.resolve(ImageRequest(prompt="0" if needs_label else ""))
        self.pixels(self.advance(self.begin(request, 1))[0])

    def resolve(self, request: ImageRequest) -> ImageRequest:
        defaults = self._sampler.sampler
        size = request.size or self._size
        resolved = replace(
            request,
            size=size,
            steps=defaults.steps if request.steps is None else request.steps,
            guidance=defaults.guidance if request.guidance is None else request.guidance,
        )
        with _request_error("size"):
            sampler = self._sampler.resized(size)
        with _request_error("steps"):
            self._tables(sampler.sides, resolved.steps)
        with _request_error("guidance"):
            settings = self._settings(resolved)
        self._check_prompt(resolved, settings)
        return resolved

    def begin(self, request: ImageRequest, images: int) -> list[ImageState]:
        sampler, settings = self._sampler.resized(request.size or self._size), self._settings(request)
        condition = self._condition(sampler, request, settings)
        table = self._tables(sampler.sides, settings.steps)
        columns, shape = table.rows.shape[1], (*sampler.sides, sampler.config.channels)
        is_guided = settings.guidance != 1.0 and bool(condition)
        adds_noise = bool(table.rows[:, FIXED_COLUMNS - 1].any())
        group = _Group(sampler.sides, columns, adds_noise, is_guided, tuple(sorted(condition)))
        states = []
        for number in range(images):
            key = jax.random.fold_in(jax.random.key(request.seed), number)
            x = table.start * jax.random.normal(key, shape)
            history = jnp.zeros((columns - FIXED_COLUMNS - 1, *shape))
            arrays = {"x": x, "history": history, "estimate": x, "condition": condition, "key": key}
            states.append(ImageState(group, 0, len(table.rows), _Value(table, settings.guidance, arrays)))
        return states

    def advance(self, states: Sequence[ImageState]) -> list[ImageState]:
        group: Any = states[0].group
        # A program exists for each power of two. The last image fills the batch, and its copies are dropped.
        count = 1 << (len(states) - 1).bit_length()
        padded = [*states, *[states[-1]] * (count - len(states))]
        coefficients = np.stack([self._row(state) for state in padded]).astype(np.float32)
        numbers = np.array([state.step for state in padded], np.int32)
        images = [state.value.arrays for state in padded]
        advanced = self._programs(group)(self._state, images, coefficients, numbers)
        return [
            replace(state, step=state.step + 1, value=replace(state.value, arrays=arrays))
            for state, arrays in zip(states, advanced, strict=False)
        ]

    def pixels(self, state: ImageState) -> UInt8[np.ndarray, "height width channels"]:
        arrays = state.value.arrays
        latents = arrays["x"] if state.step == state.steps else arrays["estimate"]
        return as_pixels(self._decoders(latents.shape)(latents[None]))[0]

    @property
    def _downsampling(self) -> int:
        encoders = self._sampler.encoders
        return 1 if encoders is None else encoders.autoencoder.config.downsampling

    def _settings(self, request: ImageRequest) -> SamplerConfig:
        return self._sampler.sampler.changed({"steps": request.steps, "guidance": request.guidance})

    def _check_prompt(self, request: ImageRequest, settings: SamplerConfig) -> None:
        config = self._sampler.config
        if self._sampler.encoders is not None:
            if request.negative_prompt is not None and settings.guidance == 1.0:
                raise GenerationError(
                    "Negative prompts act through guidance, which is 1. Set guidance above 1.",
                    parameter="negative_prompt",
                )
            if request.embedded_guidance is not None and getattr(config, "guidance", None) is None:
                raise GenerationError("The model takes no guidance as an input.", parameter="embedded_guidance")
            return
        for name in ("negative_prompt", "embedded_guidance"):
            if getattr(request, name) is not None:
                raise GenerationError(f"The model takes no {name}. Leave it out.", parameter=name)
        if config.classes:
            if not request.prompt.strip().isdecimal() or not int(request.prompt) < config.classes:
                raise GenerationError(
                    f"The prompt is {request.prompt[:40]!r}; this model takes the number of a label, 0 to "
                    f"{config.classes - 1}.",
                    parameter="prompt",
                )
        elif request.prompt:
            raise GenerationError("The model takes no prompts; send an empty one.", parameter="prompt")
        elif settings.guidance != 1.0:
            raise GenerationError(
                f"guidance is {settings.guidance}, and the model has no labels to be guided by. Set it to 1.",
                parameter="guidance",
            )

    def _condition(self, sampler: ImageSampler, request: ImageRequest, settings: SamplerConfig) -> dict[str, jax.Array]:
        """Returns the condition of one image."""
        if sampler.encoders is None:
            return {"labels": jnp.asarray(int(request.prompt), jnp.int32)} if sampler.config.classes else {}
        negative = None if request.negative_prompt is None else [request.negative_prompt]
        condition = sampler.condition(
            [request.prompt], settings, negative=negative, embedded_guidance=request.embedded_guidance
        )
        return {name: array[0] for name, array in condition.items()}

    def _table(self, sides: tuple[int, int], steps: int) -> Table:
        return replace(self._sampler, size=sides).table(self._sampler.sampler.changed({"steps": steps}))

    def _row(self, state: ImageState) -> np.ndarray:
        """Returns the coefficients of an image's next step: guidance, p and q of its estimate, and the table's row."""
        table, step = state.value.table, state.step
        estimate = image_coefficients(self._sampler.objective.prediction, table.alphas[step], table.sigmas[step])
        return np.array([state.value.guidance, *estimate, *table.rows[step]])

    def _program(self, group: _Group) -> Callable[..., list[Any]]:
        channels, rescale = self._sampler.config.channels, self._sampler.sampler.guidance_rescale

        @jax.jit
        def advance(state: Any, images: Sequence[Any], coefficients: jax.Array, numbers: jax.Array) -> list[Any]:
            batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), *images)
            columns = coefficients.T[..., None, None, None]
            guidance, estimate_p, estimate_q, _, p, q, a, n, *b = columns
            predict = guided(
                nnx.merge(self._graph, state),
                batch["condition"],
                images=len(images),
                guidance=guidance if group.is_guided else 1.0,
                rescale=rescale,
            )
            x = batch["x"]
            prediction = predict(x, coefficients[:, 3])[..., :channels]
            history = [p * x + q * prediction, *jnp.moveaxis(batch["history"], 1, 0)]
            following = a * x + sum(weight * each for weight, each in zip(b, history, strict=True))
            if group.adds_noise:
                keys = jax.vmap(jax.random.fold_in)(batch["key"], numbers)
                following += n * jax.vmap(lambda key: jax.random.normal(key, x.shape[1:]))(keys)
            batch |= {
                "x": following,
                "history": jnp.stack(history[:-1], axis=1) if history[:-1] else batch["history"],
                "estimate": estimate_p * x + estimate_q * prediction,
            }
            return [jax.tree.map(lambda leaf: leaf[place], batch) for place in range(len(images))]  # noqa: B023

        return advance

    def _decoder(self, shape: tuple[int, ...]) -> Callable[[jax.Array], jax.Array]:
        """Returns the decoder of latents of a shape, which only selects the compiled program."""
        encoders = self._sampler.encoders
        if encoders is None:
            return lambda images: images
        graph, state = nnx.split(encoders.autoencoder)
        decode = jax.jit(lambda state, latents: nnx.merge(graph, state).images_of(latents))
        return partial(decode, state)


@contextlib.contextmanager
def _request_error(parameter: str) -> Iterator[None]:
    """Converts a ConfigError about a parameter of a request to a GenerationError."""
    try:
        yield
    except ConfigError as error:
        raise GenerationError(str(error), parameter=parameter) from None
