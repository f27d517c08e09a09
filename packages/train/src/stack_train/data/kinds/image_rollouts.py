"""`data.name: image_rollouts`: images that the trained flow itself samples, with their rewards."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Int64
from pydantic import Field, PositiveFloat, PositiveInt

from stack_core.abi.config import changed_fields, config
from stack_core.abi.data import Batch, Shapes
from stack_core.abi.errors import ConfigError, DataError
from stack_core.abi.policy import PolicyBatches
from stack_train.data.image_prompts import Prompts, encoded_prompts, label_prompts, pixel_decoder, read_prompts
from stack_train.data.kinds.captioned import EncoderIdentity, TextConditioned
from stack_train.data.rows import filled, saved_position
from stack_train.diffusion.denoiser import ImagesConfig, VideosConfig, image_tokens
from stack_train.diffusion.flow_sde import sample_steps, step_coefficients
from stack_train.diffusion.image_rewards import check_image_reward, open_image_reward, score_images
from stack_train.diffusion.levels import Levels
from stack_train.diffusion.pipeline import Encoders, open_encoders
from stack_train.diffusion.samplers import SamplerConfig, levels_of

__all__ = ["ImageRolloutBatches", "ImageRolloutsData", "LearnsFromImages"]

_TRAINING, _HELD_OUT = 0, 1  # first numbers of seeds


@runtime_checkable
class LearnsFromImages(Protocol):
    """An objective of sampled images and their rewards, such as `flow_grpo`.

    Attributes:
      denoising: denoising objective of the flow; its schedule gives the noise levels of the steps.
      minibatches: number of updates per batch of images.
    """

    denoising: Any
    minibatches: int

    def advantages(self, rewards: np.ndarray) -> np.ndarray:
        """Computes the advantages of images from their rewards, both float64[groups, size]."""
        ...


@config
class ImageRolloutsData:
    """Images of the current weights and their rewards, in groups of one prompt.

    A flow is sampled by the SDE of `stack_train.diffusion.flow_sde`. A row of a batch is one step of one image: the
    image before and after ("images", "next_images"), the velocity that led from one to the other ("velocities"), the
    "timesteps" and "coefficients" of the step, the "advantages" and "rewards" of the image, "weights", and the
    condition of the prompt. The objective computes the advantages of a batch and divides its images into updates.

    A batch is a function of the seed, its number and the weights. A run that resumes after a part of a batch samples a
    new batch. Guidance is not used, so rewards also replace the effect of guidance.

    Evaluation samples images of held-out prompts by the steps of the flow, without noise, from the same initial noise
    each time.

    Attributes:
      reward: "module:function", a function (images, prompts) that returns a number for each image; or "run:DIRECTORY"
        or "hf:DIRECTORY" of an image-text model such as CLIP, whose similarity of image and prompt is the reward.
      name: selects this kind of data.
      prompts: glob of text files with one prompt per line; None for models with labels, whose prompts are all labels.
      held_out: glob of text files with prompts for evaluation; None evaluates on the prompts of the training.
      pipeline: diffusers directory with the encoders of the denoiser's training; None for denoisers of pixels.
      groups: number of prompts per batch.
      group_size: number of images per prompt.
      steps: number of sampling steps; few are enough to compare images. All but the last are trained.
      noise_level: a in g = a sqrt(sigma / (1 - sigma)), the rate of the SDE's noise.
      evaluation_steps: number of sampling steps in evaluation.
      evaluation_images: number of images in evaluation; 0 disables evaluation.
      encoded_at_once: batch size of the encoders and the decoder.
    """

    reward: str
    name: Literal["image_rollouts"] = "image_rollouts"
    prompts: str | None = None
    held_out: str | None = None
    pipeline: str | None = None
    groups: PositiveInt = 8
    group_size: Annotated[int, Field(ge=2)] = 8
    steps: Annotated[int, Field(ge=2)] = 10
    noise_level: PositiveFloat = 0.7
    evaluation_steps: PositiveInt = 40
    evaluation_images: Annotated[int, Field(ge=0)] = 64
    encoded_at_once: PositiveInt = 16

    @property
    def encoders(self) -> str | None:
        return self.pipeline

    @property
    def batch_images(self) -> int:
        """Number of images per batch."""
        return self.groups * self.group_size

    def for_objective(self, objective: Any) -> "PolicyImages":
        """Returns the config of batches for an objective.

        Raises:
          ConfigError: the objective does not learn from images and rewards, or its updates do not divide the images.
        """
        if not isinstance(objective, LearnsFromImages):
            raise ConfigError(
                f"objective.name is {getattr(objective, 'name', objective)!r}, which does not learn from the rewards "
                "of images. Set objective.name: flow_grpo, or choose another data.name."
            )
        if self.batch_images % objective.minibatches:
            raise ConfigError(
                f"A batch has {self.batch_images} images (data.groups * data.group_size), which objective.minibatches="
                f"{objective.minibatches} does not divide. Change one of them."
            )
        return PolicyImages(self, objective)


@dataclass(frozen=True)
class PolicyImages:
    """A `DataConfig`: sampled images that an objective learns from.

    Attributes:
      data: the images to sample.
      objective: the objective.
    """

    data: ImageRolloutsData
    objective: LearnsFromImages

    @property
    def name(self) -> str:
        return self.data.name

    @property
    def update_images(self) -> int:
        """Number of images per update."""
        return self.data.batch_images // self.objective.minibatches

    def spec(self, model: Any) -> Shapes:
        rows = self.update_images * (self.data.steps - 1)
        image = jax.ShapeDtypeStruct((rows, model.image_size, model.image_size, model.channels), np.float32)
        number = jax.ShapeDtypeStruct((rows,), np.float32)
        shapes = dict.fromkeys(("images", "next_images", "velocities"), image)
        shapes |= dict.fromkeys(("timesteps", "advantages", "rewards", "weights"), number)
        shapes["coefficients"] = jax.ShapeDtypeStruct((rows, 3), np.float32)
        if self.data.pipeline is not None:
            sizes = {"text": (model.text_tokens, model.text_dim), "pooled": (model.pooled_dim,)}
            dtype = jnp.dtype(model.dtype)
            shapes |= {name: jax.ShapeDtypeStruct((rows, *size), dtype) for name, size in sizes.items() if all(size)}
        elif model.classes:
            shapes["labels"] = jax.ShapeDtypeStruct((rows,), np.int32)
        return shapes

    def work(self) -> tuple[str, int]:
        return "images", self.update_images

    def check(self, model: Any) -> None:
        data, family = self.data, model.name
        if not isinstance(model, ImagesConfig) or isinstance(model, VideosConfig) or family == "unet":
            raise ConfigError(
                f"Data of kind image_rollouts are images of flows, and family {family!r} makes none; use dit, flux "
                "or sd3."
            )
        _check_prompts(data, model)
        if not data.evaluation_images and (unused := changed_fields(data, ("held_out", "evaluation_steps"))):
            raise ConfigError(
                f"data.evaluation_images is 0, so data.{' and data.'.join(unused)} would have no effect. Leave it out."
            )
        check_image_reward(data.reward)

    def build(self, *, seed: int, model: Any) -> "ImageRolloutBatches":
        """Opens the reward and encodes the prompts.

        Raises:
          DataError: a file of prompts cannot be read, or holds none.
          ConversionError: `pipeline` lacks an encoder, or an encoder does not fit the model.
          StackError: the reward cannot be opened.
        """
        return ImageRolloutBatches(self, seed=seed, model=model)


def _check_prompts(data: ImageRolloutsData, model: Any) -> None:
    """Raises a ConfigError if the prompts do not fit the model."""
    texts = isinstance(model, TextConditioned)
    needed = {"pipeline": data.pipeline, "prompts": data.prompts}
    if texts and (missing := [name for name, value in needed.items() if value is None]):
        raise ConfigError(
            f"Family {model.name!r} reads latents and texts, so data.{' and data.'.join(missing)} must be set: the "
            "directory of the encoders, and files with one prompt per line."
        )
    unused = [name for name, value in {**needed, "held_out": data.held_out}.items() if value is not None]
    unused += changed_fields(data, ("encoded_at_once",))
    if not texts and unused:
        raise ConfigError(
            f"Family {model.name!r} reads no texts, so data.{' and data.'.join(unused)} would have no effect. Leave it "
            "out: the prompts are all labels of the model."
        )


@dataclass(frozen=True)
class _Schedule:
    """Noise levels and coefficients of the steps of sampling."""

    levels: Levels
    coefficients: np.ndarray


class ImageRolloutBatches(PolicyBatches):
    """Batches of the steps of sampled images; see `ImageRolloutsData`."""

    def __init__(self, settings: PolicyImages, *, seed: int, model: Any) -> None:
        data = self._data = settings.data
        self._settings, self._seed, self._model = settings, seed, model
        self._spec = settings.spec(model)
        self._reward = open_image_reward(data.reward)
        encoders = self._identity = None
        if data.pipeline is not None:
            directory = Path(data.pipeline.removeprefix("hf:")).expanduser()
            encoders = open_encoders(directory, text_tokens=model.text_tokens, text_dim=model.text_dim)
            encoders.check(model)
            self._identity = EncoderIdentity.of(encoders, model.text_tokens)
        self._prompts = self._read_prompts(data.prompts, "data.prompts", encoders)
        held_out = data.held_out
        self._held_out = self._prompts if held_out is None else self._read_prompts(held_out, "data.held_out", encoders)
        self._pixels = pixel_decoder(encoders, at_once=data.encoded_at_once)
        tokens = image_tokens(SimpleNamespace(config=model), model.image_size, model.image_size)
        schedule = settings.objective.denoising.schedule(tokens)

        def steps(count: int, noise_level: float) -> _Schedule:
            levels = levels_of(schedule, SamplerConfig(steps=count))
            return _Schedule(levels, step_coefficients(levels, noise_level=noise_level))

        self._rollout, self._evaluation = steps(data.steps, data.noise_level), steps(data.evaluation_steps, 0.0)
        self._predict: Callable[[Mapping[str, np.ndarray]], np.ndarray] | None = None
        self._batches, self._update = 0, 0
        self._current: dict[str, np.ndarray] = {}
        self.reward_std = 0.0

    def update_weights(self, params: Any, version: int, score: Callable[[Any, Batch], Mapping[str, Any]]) -> None:
        def predict(batch: Mapping[str, np.ndarray]) -> np.ndarray:
            return np.asarray(score(params, batch)["predictions"], np.float32)

        self._predict = predict

    def train_iterator(self) -> "ImageRolloutIterator":
        data = self._data
        fingerprint = {"seed": self._seed, "data.groups": data.groups, "data.group_size": data.group_size}
        fingerprint |= {"data.prompts": list(self._prompts.texts)}
        return ImageRolloutIterator(self, fingerprint)

    def validation_batches(self) -> Iterator[Batch]:
        """Yields batches whose rows have the rewards of images sampled without noise.

        A row is the final image with the noise of one of the rollouts' steps, for which the objective also reports the
        divergence from the reference.
        """
        total, rows = self._data.evaluation_images, self._settings.update_images * (self._data.steps - 1)
        at_once = self._data.batch_images
        rng = np.random.default_rng([_HELD_OUT, self._seed])
        found: list[dict[str, np.ndarray]] = []
        for first in range(0, total, at_once):
            # A fixed number of images compiles once; the surplus is dropped.
            places = np.arange(first, first + at_once) % len(self._held_out)
            images, rewards = self._evaluate(places, self._noise(at_once, rng), rng)
            found.append(self._evaluation_rows(images, rewards, places, rng))
        whole = {name: np.concatenate([each[name] for each in found])[:total] for name in found[0]} if found else {}
        for first in range(0, total, rows):
            part = {name: array[first : first + rows] for name, array in whole.items()}
            yield {name: filled(array, rows, name) for name, array in part.items()}

    def next_update(self) -> Batch:
        """Returns the rows of the next update, from new images if the current ones are used up."""
        minibatches = self._settings.objective.minibatches
        if self._update == 0 or not self._current:
            self._current = self._sampled(self._batches)
            self._batches, self._update = self._batches + 1, 0
        images = self._settings.update_images
        order = np.random.default_rng([_TRAINING, self._seed, self._batches, 1]).permutation(self._data.batch_images)
        part = order[self._update * images :][:images]
        self._update = (self._update + 1) % minibatches
        return {name: array[part].reshape(-1, *array.shape[2:]) for name, array in self._current.items()}

    def position(self) -> int:
        """Returns the number of batches that were sampled."""
        return self._batches

    def restore(self, batches: int) -> None:
        """Continues with the batch after the first `batches`."""
        self._batches, self._update = batches, 0
        self._current.clear()

    def write(self, directory: Path) -> None:
        if self._identity is not None:
            self._identity.write(directory)

    def _sampled(self, number: int) -> dict[str, np.ndarray]:
        """Samples the images of a batch and returns the arrays of its rows, [images, steps, ...]."""
        data = self._data
        rng = np.random.default_rng([_TRAINING, self._seed, number])
        chosen = rng.choice(len(self._prompts), data.groups, replace=data.groups > len(self._prompts))
        places = np.repeat(chosen, data.group_size)
        condition = self._prompts.condition(places)
        noise = self._noise(data.batch_images, rng)
        levels, coefficients = self._rollout.levels, self._rollout.coefficients
        steps = list(sample_steps(self._predictor(condition), levels, coefficients, noise, rng=rng))
        images = steps[-1][2]
        rewards = self._rewards(images, self._prompts, places).reshape(data.groups, data.group_size)
        self.reward_std = float(rewards.std(axis=1).mean())
        advantages = self._settings.objective.advantages(rewards)
        # The last step adds no noise, so it has no distribution to learn.
        before, velocities, after = (np.stack(each, axis=1) for each in zip(*steps[:-1], strict=True))
        count = data.steps - 1
        numbers = {"advantages": advantages, "rewards": rewards, "weights": np.ones_like(rewards)}
        rows = {name: np.repeat(each.reshape(-1, 1), count, axis=1) for name, each in numbers.items()}
        rows |= {"timesteps": np.broadcast_to(levels.timesteps[:-1], (len(images), count))}
        rows |= {"coefficients": np.broadcast_to(coefficients[:-1], (len(images), count, 3))}
        rows |= {"images": before, "next_images": after, "velocities": velocities}
        rows |= {name: np.repeat(array[:, None], count, axis=1) for name, array in condition.items()}
        return self._cast(rows)

    def _evaluate(
        self, places: Int64[np.ndarray, " images"], noise: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Samples images of held-out prompts without noise; returns them and their rewards."""
        predict = self._predictor(self._held_out.condition(places))
        schedule, images = self._evaluation, noise
        for _, _, after in sample_steps(predict, schedule.levels, schedule.coefficients, noise, rng=rng):
            images = after
        return images, self._rewards(images, self._held_out, places)

    def _evaluation_rows(
        self, images: np.ndarray, rewards: np.ndarray, places: Int64[np.ndarray, " images"], rng: np.random.Generator
    ) -> dict[str, np.ndarray]:
        levels, step = self._rollout.levels, np.arange(len(images)) % (self._data.steps - 1)
        sigmas = levels.sigmas[step].reshape(-1, 1, 1, 1)
        noisy = (1.0 - sigmas) * images + sigmas * self._noise(len(images), rng)
        rows = {"images": noisy, "next_images": noisy, "velocities": np.zeros_like(images)}
        rows |= {"timesteps": levels.timesteps[step], "coefficients": self._rollout.coefficients[step]}
        rows |= {"advantages": np.zeros(len(images)), "rewards": rewards, "weights": np.ones(len(images))}
        return self._cast(rows | self._held_out.condition(places))

    def _predictor(self, condition: Mapping[str, np.ndarray]) -> Callable[[np.ndarray, float], np.ndarray]:
        """Returns the denoiser's prediction for images of a condition."""
        predict, channels = self._predict, self._model.channels
        if predict is None:
            raise DataError("No weights were given yet to sample with: call update_weights first.")

        def velocity(images: np.ndarray, timestep: float) -> np.ndarray:
            timesteps = np.full(len(images), timestep, np.float32)
            return predict({"images": images, "timesteps": timesteps, **condition})[..., :channels]

        return velocity

    def _rewards(self, images: np.ndarray, prompts: Prompts, places: Int64[np.ndarray, " images"]) -> np.ndarray:
        texts = [prompts.texts[place] for place in places]
        return score_images(self._reward, self._pixels(images), texts, name=self._data.reward)

    def _noise(self, images: int, rng: np.random.Generator) -> Float32[np.ndarray, "images height width channels"]:
        side = self._model.image_size
        return rng.standard_normal((images, side, side, self._model.channels), np.float32)

    def _cast(self, rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: np.asarray(rows[name], each.dtype) for name, each in self._spec.items()}

    def _read_prompts(self, pattern: str | None, field: str, encoders: Encoders | None) -> Prompts:
        if encoders is None or pattern is None:
            return label_prompts(self._model.classes)
        at_once = self._data.encoded_at_once
        return encoded_prompts(read_prompts(pattern, field), encoders, self._model, at_once=at_once)


class ImageRolloutIterator:
    """Iterator over the updates of rollouts. Its state is the number of sampled batches."""

    def __init__(self, batches: ImageRolloutBatches, fingerprint: Mapping[str, Any]) -> None:
        self._batches, self._fingerprint = batches, dict(fingerprint)

    def __iter__(self) -> "ImageRolloutIterator":
        return self

    def __next__(self) -> Batch:
        return self._batches.next_update()

    def data_metrics(self) -> Mapping[str, float]:
        return {"reward_std": self._batches.reward_std}

    def get_state(self) -> dict[str, Any]:
        return {"fingerprint": dict(self._fingerprint), "batches": self._batches.position()}

    def set_state(self, state: Any) -> None:
        """Continues after the batches of a saved state.

        Raises:
          DataError: the state belongs to other rollouts.
        """
        self._batches.restore(saved_position(state, self._fingerprint))
