"""`stack sample`: sampling of images and videos from a diffusion or flow model."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

from cyclopts import Parameter
from cyclopts.validators import Number

from stack_core.abi.config import parse
from stack_core.abi.errors import ConfigError, DataError, GenerationError
from stack_core.abi.local_paths import local_address
from stack_core.abi.run_directory import RunDirectory
from stack_core.runtime.compile_cache import keep_compiled
from stack_train.diffusion.sampler_names import SamplerName, Spacing
from stack_train.panels.run_report import write_report

__all__ = ["sample"]

T = TypeVar("T")


def sample(  # noqa: PLR0913, each parameter is an option of the command
    model: str,
    /,
    *,
    prompt: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    negative_prompt: str | None = None,
    label: Annotated[tuple[int, ...], Parameter(negative=())] = (),
    image: Path | None = None,
    mask: Path | None = None,
    strength: float | None = None,
    lora: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    denoiser: str | None = None,
    controlnet: Path | None = None,
    control: Path | None = None,
    control_scale: float = 1.0,
    control_start: float = 0.0,
    control_end: float = 1.0,
    grid: str | None = None,
    images: Annotated[int | None, Parameter(negative=(), validator=Number(gte=1))] = None,
    out: Path | None = None,
    sampler: SamplerName | None = None,
    steps: int | None = None,
    spacing: Spacing | None = None,
    eta: float = 0.0,
    guidance: float | None = None,
    low_noise_guidance: float | None = None,
    guidance_rescale: float = 0.0,
    embedded_guidance: float | None = None,
    size: str | None = None,
    tile_pixels: int | None = None,
    frames: int | None = None,
    fps: float | None = None,
    seed: Annotated[int, Parameter(negative=(), validator=Number(gte=0, lt=2**63))] = 0,
) -> None:
    """Sample images or videos: stack sample RUN --label 3 --out grid.png, stack sample hf:DIR --prompt "a red cat"

    Args:
      model: directory of a run of a denoiser, by flow_matching, epsilon, v or post-training of them, or hf:DIR, a
        diffusers directory.
      prompt: text prompt of the images; may be repeated, and the columns then alternate between the prompts. More
        prompts than columns fill the grid row by row.
      negative_prompt: prompt for the unwanted contents of the images; acts through guidance.
      label: class label of the images; may be repeated, as prompts. By default all labels.
      image: file of the initial image, or of the first frame of a video, which must have the size of the images unless
        --size resizes both.
      mask: image file, white in the areas to repaint and black in the areas to keep.
      strength: fraction of the steps that the image is put through, 0.8 by default, or 1 with a mask.
      lora: safetensors file of a LoRA in diffusers' or kohya's layout, or FILE=SCALE; may be repeated.
      denoiser: gguf:FILE with the weights of the denoiser of a FLUX directory, in place of the directory's.
      controlnet: directory of a ControlNet of the model, as diffusers writes it; runs that train one have it.
      control: file of the control image of the ControlNet, which is scaled to the size of the images.
      control_scale: factor of the ControlNet's influence.
      control_start: fraction of the steps before the ControlNet acts.
      control_end: fraction of the steps after which the ControlNet does not act.
      grid: rows x columns of images; by default 8x8, or one image per prompt.
      images: number of images to write as single files into the folder --out, in batches of the grid, whose seeds count
        up from --seed.
      out: PNG file to write, or for videos a GIF or WebP file, or the name of PNG files of all frames; by default a
        file in the run's directory that its report displays, or image.png or video.gif.
      sampler: numerical method that integrates from noise to images; by default the directory's scheduler,
        lcm for a run of consistency_distill, or euler.
      steps: number of sampling steps, by default 4 of lcm and 50 of others.
      spacing: spacing of the timesteps in a schedule of betas, by default the directory's, or linspace; for
        flow_matching, linspace ends at the lowest of 1000 times, the default of Stable Diffusion 3.
      eta: fraction of fresh noise in each ddim step.
      guidance: guidance scale; values above 1 follow the label or prompt more closely, with less variety. By default
        7.5 for Stable Diffusion, 5 for Stable Diffusion XL and Wan, 7 for Stable Diffusion 3, 3 for LTX-Video and 1
        for others.
      low_noise_guidance: guidance of the second denoiser of Wan 2.2, by default the same.
      guidance_rescale: fraction, 0 to 1, by which the contrast added by guidance is removed.
      embedded_guidance: guidance scale passed as an input to guidance-distilled models such as FLUX.1 dev.
      size: size in pixels, for latent diffusion models: a number, or WIDTHxHEIGHT.
      tile_pixels: side of overlapping tiles in which larger images are decoded, such as 512; takes less memory.
      frames: number of frames, for models of videos; by default the run's, or for directories 81, or 161 of LTX-Video.
      fps: frames per second of a video, by default 16, or 25 of LTX-Video, which makes videos of this rate.
      seed: seed of the noise; the same seed gives the same images.
    """
    model = local_address(model)
    rows, columns = _sizes(grid or (f"1x{len(prompt)}" if prompt else "8x8"))
    _check_count(prompt or label, rows * columns, "--prompt" if prompt else "--label")
    pixels = None if size is None else _pixels(size)
    influence = control_scale, control_start, control_end
    _check_options(prompt, label, image, mask, control, influence)
    _check_folder(images, out)
    # These import JAX, which is too slow for `stack --help`.
    from stack_train.diffusion.grid import pillow
    from stack_train.diffusion.samplers import SamplerConfig
    from stack_train.diffusion.sampling import open_images
    from stack_train.run.config import saved_config

    given = {"name": sampler, "spacing": spacing, "guidance": guidance, "low_noise_guidance": low_noise_guidance}
    given |= {"steps": steps}
    given = {name: value for name, value in given.items() if value is not None}
    given |= {"eta": eta, "guidance_rescale": guidance_rescale}
    if strength is not None:
        given["strength"] = strength
    # Checked before the model is read; the directory's scheduler may add settings.
    parse(SamplerConfig, {"guidance": 2.0, **given}, path="sampler")
    pillow()  # Raises now rather than after minutes of sampling if Pillow is not installed.
    keep_compiled()
    start = None if image is None else _read_start(image, mask, pixels)
    sides = pixels if start is None else start.image.shape[:2]
    parts: dict[str, Any] = {"loras": _loras(lora), "controlnet": controlnet, "denoiser": denoiser}
    opened = open_images(model, size=sides, frames=frames, **parts)
    opened = opened if tile_pixels is None else opened.with_tiles(tile_pixels)
    _check_folder(images, out, makes_videos=opened.makes_videos)
    path = out or _default_path(model, opened.step, label, ".gif" if opened.makes_videos else ".png")
    if opened.makes_videos:
        _check_video(path, fps)
    elif image is not None:
        given = {"strength": 0.8 if mask is None else 1.0, **given}
    controlled = None if control is None else _read_control(control, opened, *influence)
    config = opened.sampler.changed(given)
    places = range(rows * columns)
    _check_label(label, opened)
    if prompt or opened.encoders is not None:
        prompts = [_in_turn(prompt or ("",), place, columns) for place in places]
        negative = None if negative_prompt is None else [negative_prompt] * len(prompts)
        draw = partial(
            opened.images_of,
            prompts,
            config,
            negative=negative,
            embedded_guidance=embedded_guidance,
            start=start,
            control=controlled,
            frame_rate=fps if hasattr(opened.config, "frame_rate") else None,
        )
    else:
        _check_unprompted(embedded_guidance, negative_prompt, start)
        labels = label or tuple(range(opened.config.classes)) or (0,)
        turns = [_in_turn(labels, place, columns) for place in places]
        draw = partial(opened.images, turns, config)
    if images is not None:
        _write_each(draw, images, path, seed=seed)
        return
    _write(draw(seed=seed), columns, path, fps or getattr(opened.config, "frame_rate", 16.0))
    if out is None and opened.step is not None:
        write_report(Path(model), saved_config(RunDirectory(Path(model))))


def _check_options(
    prompt: tuple[str, ...],
    label: tuple[int, ...],
    image: Path | None,
    mask: Path | None,
    control: Path | None,
    influence: tuple[float, float, float],
) -> None:
    """Raises a ConfigError if an option needs or excludes another one."""
    if prompt and label:
        raise ConfigError("Give --prompt or --label, not both: a model is conditioned on either texts or labels.")
    if control is None and influence != (1.0, 0.0, 1.0):
        raise ConfigError(
            "--control-scale, --control-start and --control-end belong to a control image. Give --control."
        )
    if mask is not None and image is None:
        raise ConfigError("--mask selects the part of an image to repaint. Give --image.")


def _check_folder(images: int | None, out: Path | None, *, makes_videos: bool = False) -> None:
    """Raises a ConfigError if single images cannot be written."""
    if images is not None and (out is None or out.suffix):
        raise ConfigError(f"--images writes single files into a folder, and --out is {out}. Give a folder.")
    if images is not None and makes_videos:
        raise ConfigError("--images writes single images, and the model makes videos. Leave it out.")


def _check_label(label: tuple[int, ...], opened: Any) -> None:
    if label and opened.encoders is not None:
        raise GenerationError("The model takes prompts: give --prompt.", parameter="label")
    if label and not opened.config.classes:
        raise GenerationError("The model takes no labels: leave --label out.", parameter="label")


def _check_unprompted(embedded_guidance: float | None, negative_prompt: str | None, start: Any) -> None:
    """Raises a GenerationError for inputs that only models of prompts take."""
    if embedded_guidance is not None:
        raise GenerationError("The model takes no guidance as an input.", parameter="embedded_guidance")
    if negative_prompt is not None or start is not None:
        name = "image" if negative_prompt is None else "negative_prompt"
        raise GenerationError("The model takes neither prompts nor images to begin with.", parameter=name)


def _default_path(model: str, step: int | None, label: tuple[int, ...], suffix: str) -> Path:
    if step is None:
        return Path("video" if suffix == ".gif" else "image").with_suffix(suffix)
    return Path(model) / "samples" / f"step-{step}{''.join(f'-{one}' for one in label)}{suffix}"


def _check_video(path: Path, fps: float | None) -> None:
    """Raises a ConfigError before minutes of sampling if a video cannot be written."""
    from stack_train.diffusion.grid import VIDEO_SUFFIXES

    if path.suffix not in VIDEO_SUFFIXES:
        raise ConfigError(f"--out is {path}; videos are written as {', '.join(VIDEO_SUFFIXES)} files. Rename it.")
    if fps is not None and not 0.0 < fps <= 100.0:
        raise ConfigError(f"--fps is {fps:g}; animations have up to 100 frames per second. Give such a number.")


def _write(images: Any, columns: int, path: Path, fps: float) -> None:
    """Writes a grid of images, or of videos frame by frame, and prints the path."""
    import numpy as np

    from stack_train.diffusion.grid import tiled, write_png, write_video

    if images.ndim == 4:
        write_png(tiled(images, columns), path)
    else:
        frames = [tiled(images[:, frame], columns) for frame in range(images.shape[1])]
        write_video(np.stack(frames), path, rate=fps)
    print(path)


def _write_each(draw: Callable[..., Any], count: int, folder: Path, *, seed: int) -> None:
    """Writes single images, and prints the folder."""
    from stack_train.diffusion.grid import write_png

    number = 0
    while number < count:
        for pixels in draw(seed=seed)[: count - number]:
            write_png(pixels, folder / f"{number:05}.png")
            number += 1
        seed += 1
    print(folder)


def _in_turn(values: Sequence[T], place: int, columns: int) -> T:
    """Returns the value of a place of the grid: columns alternate, and more values than columns go row by row."""
    return values[(place % columns if len(values) <= columns else place) % len(values)]


def _check_count(values: Sequence[Any], places: int, option: str) -> None:
    if len(values) > places:
        raise ConfigError(f"{option} is given {len(values)} times, but --grid has {places} images. Enlarge the grid.")


def _sizes(grid: str) -> tuple[int, int]:
    rows, separator, columns = grid.partition("x")
    if not (separator and rows.isdecimal() and columns.isdecimal() and int(rows) * int(columns)):
        raise ConfigError(f"--grid is {grid!r}; expected rows x columns, such as 8x8.")
    return int(rows), int(columns)


def _read_start(image: Path, mask: Path | None, size: tuple[int, int] | None) -> Any:
    """Reads the initial image and its mask upright, and resizes both to `size` unless it is None."""
    import numpy as np

    from stack_train.diffusion.starts import Start

    def read(path: Path, mode: str) -> Any:
        converted = _opened(path, mode)
        return np.asarray(converted if size is None else converted.resize(size[::-1]))

    return Start(read(image, "RGB"), None if mask is None else read(mask, "L"))


def _read_control(path: Path, opened: Any, scale: float, start: float, end: float) -> Any:
    """Reads a control image upright, and scales it to the size of the images, as diffusers does."""
    import numpy as np

    from stack_train.diffusion.controlnet import Control
    from stack_train.diffusion.grid import pillow

    if opened.encoders is None:
        raise GenerationError("The model takes no control image.", parameter="control")
    height, width = (side * opened.encoders.autoencoder.config.downsampling for side in opened.sides)
    image = _opened(path, "RGB").resize((width, height), pillow().Resampling.LANCZOS)
    return Control(np.asarray(image), scale, start, end)


def _opened(path: Path, mode: str) -> Any:
    from stack_train.diffusion.grid import pillow, turn_upright

    try:
        with pillow().open(path) as opened:
            return turn_upright(opened).convert(mode)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as an image: {error}") from error


def _loras(arguments: tuple[str, ...]) -> dict[Path, float]:
    found: dict[Path, float] = {}
    for each in arguments:
        file, _, scale = each.partition("=")
        try:
            found[Path(file)] = float(scale or 1.0)
        except ValueError as error:
            raise ConfigError(f"--lora {each}: expected FILE or FILE=SCALE, such as style.safetensors=0.8.") from error
    return found


def _pixels(size: str) -> tuple[int, int]:
    """Returns height and width."""
    width, separator, height = size.partition("x")
    if not width.isdecimal() or (separator and not height.isdecimal()):
        raise ConfigError(f"--size is {size!r}; expected a number of pixels, or WIDTHxHEIGHT such as 768x512.")
    return int(height or width), int(width)
