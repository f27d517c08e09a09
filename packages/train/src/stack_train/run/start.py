"""What a run takes from the run that it starts from: the model, the tokenizer, and a check that they are the same."""

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stack_core.config import differences, is_under, parse_yaml, to_mapping
from stack_core.errors import ConfigError
from stack_core.local_paths import local_path
from stack_core.runs.directory import RunDirectory
from stack_train.data.settings import BPE
from stack_train.data.tokenizer import HuggingFaceTokenizer
from stack_train.run.config import RunConfig

__all__ = [
    "check_same_start",
    "copy_tokenizer_of_start",
    "data_of_resumed",
    "model_differences",
    "with_model_of_start",
    "with_tokenizer",
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
    directory = RunDirectory(local_path(source))
    saved = parse_yaml(directory.config_yaml(), str(directory.config))["model"]
    if model.get("family", saved["family"]) != saved["family"]:
        return dict(mapping)  # another family's keys mean other things; `check_same_start` refuses it
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


def with_tokenizer(data: Any, tokenizer: Path) -> Any:
    """Data made of text with the tokenizer of a directory; other data as it is."""
    names = {field.name for field in dataclasses.fields(data)}
    changes = {"tokenizer": str(tokenizer), "vocab_size": None}
    return dataclasses.replace(data, **{name: value for name, value in changes.items() if name in names})


def data_of_resumed(config: RunConfig) -> Any:
    """The data of a run that goes on, with the tokenizer that the run trained, whatever its documents are by now."""
    tokenizer = RunDirectory(Path(config.output)).tokenizer
    is_trained = getattr(config.data, "tokenizer", "") in (None, BPE)
    return with_tokenizer(config.data, tokenizer) if is_trained and tokenizer.is_dir() else config.data


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
    return [line for line in lines if not is_under(line, _FREE)]


def check_same_start(config: RunConfig, saved: RunConfig, allow: tuple[str, ...] = ()) -> None:
    """Raises a ConfigError where a run's model or tokenizer is another than that of the run it starts from.

    Args:
      saved: of the run that it starts from.
      allow: keys that may differ.
    """
    lines = [*model_differences(config.model, saved.model), *_tokenizer_difference(config)]
    if changed := [line for line in lines if not is_under(line, allow)]:
        listing = "\n  ".join(changed)
        raise ConfigError(
            f"The model or its tokenizer is not that of {config.run.init_from}, whose weights it starts from:\n"
            f"  {listing}\n"
            "Leave these keys out to take the source's, or name those that are meant to differ: "
            f"--allow {changed[0].partition(':')[0]}."
        )


def _tokenizer_difference(config: RunConfig) -> list[str]:
    """That the data names a tokenizer which gives texts other ids than that of the run it starts from."""
    given = getattr(config.data, "tokenizer", None)
    source = RunDirectory(Path(str(config.run.init_from))).tokenizer
    if given is None or given == str(source) or not source.is_dir():
        return []
    if given != BPE and HuggingFaceTokenizer.load(given).digest == HuggingFaceTokenizer.load(source).digest:
        return []
    return [f"data.tokenizer: {given!r}, not {str(source)!r}"]
