"""What a run takes from the run that it starts from: the model, the tokenizer, and a check that they are the same."""

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stack_core.config import differences, parse_yaml, to_mapping
from stack_core.errors import ConfigError
from stack_core.runs.directory import RunDirectory
from stack_train.run.config import RunConfig

__all__ = [
    "check_same_model",
    "copy_tokenizer_of_start",
    "model_differences",
    "with_model_of_start",
    "with_tokenizer_of_start",
]

# How a model is computed, held or drawn at first may change with a new run; what it computes may not.
_FREE = ("model.dtype", "model.param_dtype", "model.remat", "model.unroll", "model.initializer_std")


def with_model_of_start(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """A run's config file in which `model` takes what it does not say from the model of `run.init_from`.

    Raises:
      RunDirectoryError: there is no run to start from.
    """
    settings = mapping.get("run")
    source = settings.get("init_from") if isinstance(settings, Mapping) else None
    model = mapping.get("model", {})
    if not isinstance(source, str) or source.startswith("hf:") or not isinstance(model, Mapping):
        return dict(mapping)
    directory = RunDirectory(Path(source))
    saved = parse_yaml(directory.config_yaml(), str(directory.config))["model"]
    if model.get("family", saved["family"]) != saved["family"]:
        return dict(mapping)  # another family's keys mean other things; `check_same_model` refuses it
    return {**mapping, "model": {**saved, **model}}


def with_tokenizer_of_start(config: RunConfig) -> RunConfig:
    """Data that names no tokenizer takes that of the run which the weights come from."""
    source = config.run.init_from
    if source is None or getattr(config.data, "tokenizer", "") is not None:
        return config
    tokenizer = RunDirectory(Path(source)).tokenizer
    if not tokenizer.is_dir():
        return config
    return dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=str(tokenizer)))


def copy_tokenizer_of_start(config: RunConfig, directory: Path) -> None:
    """Copies the tokenizer of the run that a run starts from into its directory, where none is yet."""
    destination = RunDirectory(directory).tokenizer
    if config.run.init_from is None or destination.exists():
        return
    source = RunDirectory(Path(config.run.init_from)).tokenizer
    if source.is_dir():
        partial = destination.with_name("tokenizer.partial")
        shutil.copytree(source, partial, dirs_exist_ok=True)
        partial.replace(destination)


def model_differences(config: Any, saved: Any) -> list[str]:
    """In what a model computes something else than another, by the keys of their configs."""
    lines = differences({"model": to_mapping(config)}, {"model": to_mapping(saved)})
    return [line for line in lines if not line.startswith(_FREE)]


def check_same_model(config: RunConfig, saved: RunConfig, allow: tuple[str, ...] = ()) -> None:
    """Raises a ConfigError where the model of a run computes something else than the one it starts from.

    Args:
      saved: of the run that it starts from.
      allow: keys that may differ.
    """
    lines = model_differences(config.model, saved.model)
    if changed := [line for line in lines if not line.startswith(allow)] if allow else lines:
        listing = "\n  ".join(changed)
        raise ConfigError(
            f"The model is not that of {config.run.init_from}, whose weights it starts from:\n  {listing}\n"
            "Leave these keys out to take the source's, or name those that are meant to differ: "
            f"--allow {changed[0].partition(':')[0]}."
        )
