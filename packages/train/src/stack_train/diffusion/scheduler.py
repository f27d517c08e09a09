"""`scheduler_config.json` of a diffusers directory: the schedule that a flow was trained by, and nothing unread."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stack_core.abi.config import parse
from stack_core.abi.errors import ConfigError, ConversionError
from stack_train.diffusion.denoiser import TIMESTEPS
from stack_train.diffusion.noise import DynamicShift
from stack_train.diffusion.objectives import FlowMatchingConfig
from stack_train.models.reader import Reader, Setting

__all__ = ["SCHEDULER_CLASS", "read_scheduler", "write_scheduler"]

SCHEDULER_CLASS = "FlowMatchEulerDiscreteScheduler"
_FILE = "scheduler_config.json"
_DYNAMIC = (
    Setting("base_shift", ("base_shift",), 0.5),
    Setting("max_shift", ("max_shift",), 1.15),
    Setting("base_tokens", ("base_image_seq_len",), 256),
    Setting("max_tokens", ("max_image_seq_len",), 4096),
    Setting("curve", ("time_shift_type",), "exponential"),
)


def read_scheduler(directory: Path) -> FlowMatchingConfig:
    """Returns the objective that has the noise schedule of a pipeline.

    Raises:
      ConversionError: it is another scheduler, or has a setting that samplers here do not follow; names each.
    """
    path = directory / _FILE
    try:
        mapping = json.loads(path.read_bytes())
        name = mapping.get("_class_name")
    except (OSError, ValueError, AttributeError) as error:
        raise ConversionError(f"{path} cannot be read: {error}. It has the noise schedule of the denoiser.") from error
    if name != SCHEDULER_CLASS:
        raise ConversionError(f"{path} is a {name}; {SCHEDULER_CLASS} is read, by which Flux was trained.")
    reader = Reader(mapping)
    reader.expect("num_train_timesteps", int(TIMESTEPS))
    shift = reader.get("shift", default=1.0)
    dynamic = {setting.ours: reader.get(*setting.names, default=setting.default) for setting in _DYNAMIC}
    if reader.get("use_dynamic_shifting"):  # in this mode diffusers ignores `shift`, and otherwise the remaining keys
        shift = dynamic
    if wrong := [*reader.problems, *reader.unread()]:
        raise ConversionError(
            f"{path} has settings that the samplers here do not follow: {'; '.join(wrong)}. The images would be others "
            "than those of diffusers; sample there, or set these keys to false or null if that is what you want."
        )
    try:
        return parse(FlowMatchingConfig, {"shift": shift})
    except ConfigError as error:
        raise ConversionError(f"{path} has no valid schedule: {error}") from error


def write_scheduler(directory: Path, shift: float | DynamicShift) -> None:
    """Writes the scheduler of a model that was trained with this shift."""
    settings: dict[str, Any] = {"_class_name": SCHEDULER_CLASS, "num_train_timesteps": int(TIMESTEPS)}
    settings |= _settings_of(shift)
    directory.mkdir()
    (directory / _FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _settings_of(shift: float | DynamicShift) -> Mapping[str, Any]:
    if not isinstance(shift, DynamicShift):
        return {"shift": shift, "use_dynamic_shifting": False}
    return {"use_dynamic_shifting": True, **{each.names[0]: getattr(shift, each.ours) for each in _DYNAMIC}}
