"""Conversions between diffusers directories and run directories of models of images."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from stack_core.abi.config import to_yaml
from stack_core.abi.errors import ConversionError
from stack_core.abi.formats import Conversion, Progress
from stack_core.abi.run_directory import RunDirectory
from stack_core.runtime.atomic_directory import atomic_directory
from stack_train.checkpoint import CheckpointStore
from stack_train.data.image_batches import ImageSettings
from stack_train.data.kinds.captioned import CaptionedData, EncoderIdentity
from stack_train.data.kinds.images import ImagesData
from stack_train.data.kinds.videos import VideosData
from stack_train.diffusion import (
    autoencoder_kl,
    autoencoder_kl_ltx,
    autoencoder_kl_wan,
    controlnet,
    dit,
    flux,
    ltx,
    sd3,
    unet,
    wan,
)
from stack_train.diffusion.components import Component, load_component, save_component
from stack_train.diffusion.denoiser import VideosConfig
from stack_train.diffusion.objectives import EpsilonConfig, FlowMatchingConfig, VConfig, denoising_of, sampler_of
from stack_train.diffusion.pipeline import INDEX, Pipeline, open_encoders, open_pipeline, save_pipeline
from stack_train.diffusion.reconstruction import ReconstructionConfig
from stack_train.diffusion.two_denoisers import TwoDenoisers
from stack_train.run.config import RunConfig
from stack_train.variables.model_variables import values_of
from stack_train.variables.weights import read_model, read_params

__all__ = ["component_in", "component_of", "export_images", "import_images"]

_AUTOENCODERS = (autoencoder_kl, autoencoder_kl_wan, autoencoder_kl_ltx)
_MODULES = (dit, flux, sd3, unet, wan, ltx, *_AUTOENCODERS)
_COMPONENTS = {module.COMPONENT.family.name: module.COMPONENT for module in _MODULES}
_SOURCE, _VIDEOS = "images/**/*", "videos/*"


def component_of(family: str) -> Component | None:
    """Returns the diffusers component of a family, or None."""
    return _COMPONENTS.get(family)


def component_in(directory: Path) -> bool:
    """Checks whether a directory has diffusers' format: a pipeline, or one component."""
    try:
        return (directory / INDEX).is_file() or "_class_name" in json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError):
        return False


def import_images(
    directory: Path, run: Path, *, denoiser: str | None = None, progress: Progress | None = None
) -> Conversion:
    """Makes a run of a diffusers directory: a denoiser with its encoders, or a single DiT or autoencoder.

    The run's data names a folder `images` or `videos`, which is to be changed before the run trains on.

    Args:
      denoiser: see `open_pipeline`.

    Raises:
      ConversionError: the directory cannot be read, or `run` exists.
    """
    config, model = _opened(directory, run, denoiser)
    leaves = {"/".join(map(str, path)): np.asarray(value) for path, value in values_of(model).items()}
    total_bytes = sum(leaf.nbytes for leaf in leaves.values())

    def reported() -> Iterator[tuple[str, np.ndarray]]:
        done_bytes = 0
        for name, leaf in leaves.items():
            yield name, leaf
            done_bytes += leaf.nbytes
            if progress is not None:
                progress(name, done_bytes, total_bytes)

    with atomic_directory(run) as partial:
        paths = RunDirectory(partial)
        with CheckpointStore(paths.checkpoints) as store:
            store.save_weights(reported(), to_yaml(config), total_bytes=total_bytes)
        paths.config.write_text(to_yaml(config), encoding="utf-8")
        if isinstance(config.data, ImageSettings) and config.data.encoders is not None:
            model_config = config.model
            encoders = open_encoders(directory, text_tokens=model_config.text_tokens, text_dim=model_config.text_dim)
            EncoderIdentity.of(encoders, config.model.text_tokens).write(partial)
    parameters = sum(leaf.size for leaf in leaves.values())
    return Conversion(run, parameters, total_bytes, config.model.param_dtype, ())


def _opened(directory: Path, run: Path, denoiser: str | None) -> tuple[RunConfig, Any]:
    """Returns the run config for the model in a directory, and the model."""
    output = str(run)
    if (directory / INDEX).is_file():
        pipeline = open_pipeline(directory, denoiser=denoiser)
        if isinstance(pipeline.model, TwoDenoisers):
            raise ConversionError(
                f"{directory} has two denoisers, and a run has one. Sample from the directory: stack sample "
                f"hf:{directory}."
            )
        absolute = str(directory.absolute())
        is_video = pipeline.encoders.pipeline.video_size is not None
        data = (
            VideosData(source=_VIDEOS, pipeline=absolute)
            if is_video
            else CaptionedData(source=_SOURCE, pipeline=absolute)
        )
        config = RunConfig(output=output, model=pipeline.config, data=data, objective=pipeline.objective)
        return config, pipeline.model
    name = json.loads((directory / "config.json").read_bytes())["_class_name"]
    if denoiser is not None:
        raise ConversionError(f"--denoiser is for whole directories of FLUX; {directory} holds a {name} alone.")
    # Denoisers of texts need their encoders, so they are read with their directories only.
    alone = (dit.COMPONENT, *(module.COMPONENT for module in _AUTOENCODERS))
    known = {name: each for each in alone for name in (each.class_name, *each.former_names)}
    if name not in known:
        raise ConversionError(
            f"{directory} holds a {name} alone; convert the whole directory around it, or one of {', '.join(known)}."
        )
    config, model = load_component(known[name], directory)
    objective = FlowMatchingConfig() if known[name] is dit.COMPONENT else ReconstructionConfig()
    is_video = isinstance(config, VideosConfig)
    data = VideosData(source=_VIDEOS) if is_video else ImagesData(source=_SOURCE)
    return RunConfig(output=output, model=config, data=data, objective=objective), model


def export_images(run: Path, directory: Path, saved: RunConfig) -> Conversion:
    """Converts a run's newest checkpoint to a diffusers directory, with averages if any and merged adapters.

    A denoiser with text conditions is exported with the encoders of its training; a run that trains a ControlNet
    exports the ControlNet. An autoencoder is exported with a measured scale, which normalizes the latents of the run's
    held-out images to unit standard deviation, or those of videos channel by channel.

    Raises:
      ConversionError: the encoders are missing or have changed, or `directory` exists.
    """
    if "controlnet" in saved.sections:
        return _export_controlnet(run, directory, saved)
    component = _COMPONENTS[saved.model.name]
    graph = nnx.split(nnx.eval_shape(lambda: component.family.build(saved.model, key=jax.random.key(0))))[0]
    model, config = nnx.merge(graph, nnx.State(read_params(run, saved.model)[0])), saved.model
    if getattr(saved.data, "encoders", None) is not None:
        identity = EncoderIdentity.read(run)
        encoders = open_encoders(
            Path(identity.directory), text_tokens=identity.text_tokens, text_dim=saved.model.text_dim
        )
        identity.check(encoders)
        objective = denoising_of(saved.objective)
        expected = (FlowMatchingConfig,) if encoders.pipeline.flows else (EpsilonConfig, VConfig)
        if not isinstance(objective, expected):
            names = " or ".join(each.name for each in expected)
            raise ConversionError(
                f"{run} trains by {objective.name}; a {encoders.pipeline.name} samples models of {names}."
            )
        sampler = sampler_of(saved.objective, encoders.pipeline.sampler)
        save_pipeline(directory, Pipeline(config, model, encoders, objective, sampler))
    else:
        if component in [module.COMPONENT for module in _AUTOENCODERS]:
            config = _normalized(model, config, saved)
        save_component(component, directory, config, model)
    return _conversion(directory, model, config)


def _export_controlnet(run: Path, directory: Path, saved: RunConfig) -> Conversion:
    control = read_model(run, saved)[0].control
    save_component(controlnet.COMPONENT, directory, control.config, control)
    return _conversion(directory, control, control.config)


def _conversion(directory: Path, model: Any, config: Any) -> Conversion:
    leaves = jax.tree.leaves(nnx.state(model))
    parameters = sum(leaf.size for leaf in leaves)
    return Conversion(directory, parameters, sum(leaf.nbytes for leaf in leaves), config.param_dtype, ())


def _normalized(model: Any, config: Any, saved: RunConfig) -> Any:
    """Returns an autoencoder's config that normalizes the latents of held-out images or videos.

    Statistics that are variables of the model are set there.
    """
    batches = saved.data.build(seed=saved.run.seed, model=saved.model)
    # A run without held-out images measures on training images.
    batch: Mapping[str, np.ndarray] = next(iter(batches.validation_batches()), None) or next(batches.train_iterator())
    # Rows of padding would change the standard deviation.
    images = batch["images"][batch["weights"] > 0]
    graph, state = nnx.split(model)
    mean, _ = jax.jit(lambda state, images: nnx.merge(graph, state).encode(images))(state, jnp.asarray(images))
    if not isinstance(saved.model, VideosConfig):
        return replace(config, scaling_factor=float(1.0 / jnp.std(mean)), shift_factor=0.0)
    every = tuple(range(mean.ndim - 1))
    means, stds = mean.mean(every), mean.std(every)
    if isinstance(model, autoencoder_kl_ltx.AutoencoderKlLtx):
        model.set_statistics(means, stds)
        return replace(config, scaling_factor=1.0)
    return replace(config, latents_mean=tuple(means.tolist()), latents_std=tuple(stds.tolist()))
