"""Model and tokenizer of the checkpoint that a run starts from, and checks that they match the run's."""

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stack_core.abi.config import differences, is_under, to_mapping, with_current_keys
from stack_core.abi.errors import ConfigError
from stack_core.abi.formats import ImportsRuns, StartingPoint, StartsRuns
from stack_core.abi.local_paths import hub_advice, local_address
from stack_core.abi.plugins import registries
from stack_core.abi.run_directory import RunDirectory
from stack_train.data.settings import BPE
from stack_train.data.tokenizer import HuggingFaceTokenizer
from stack_train.run.config import RunConfig, saved_config

__all__ = [
    "check_same_start",
    "copy_tokenizer_of_start",
    "data_of_resumed",
    "model_differences",
    "open_published",
    "published_format",
    "start_configs",
    "with_model_of_start",
    "with_tokenizer",
    "with_tokenizer_of_start",
]

# Dtypes, rematerialization, unrolling and initialization may differ in a new run; the function of the model may not.
_FREE = ("model.dtype", "model.param_dtype", "model.remat", "model.unroll", "model.initializer_std")


def with_model_of_start(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Fills missing keys of the section `model` from the model of `run.init_from`.

    Raises:
      StackError: `run.init_from` is neither a run nor a checkpoint.
    """
    mapping = with_current_keys(RunConfig, mapping, warn=True)
    settings = mapping.get("run")
    source = settings.get("init_from") if isinstance(settings, Mapping) else None
    model = mapping.get("model", {})
    if not isinstance(source, str) or not isinstance(model, Mapping):
        return mapping
    source = local_address(source).removeprefix("run:")
    if (published := open_published(source)) is not None:
        saved = to_mapping(published.config)
    else:
        directory = RunDirectory(Path(source))
        if not directory.path.exists():
            raise ConfigError(f"run.init_from is {source!r}, which is no directory of a run.{hub_advice(source)}")
        saved = saved_config(directory)["model"]
    if model.get("name", saved["name"]) != saved["name"]:
        return mapping  # another family's keys have other meanings; `check_same_start` rejects it later
    return {**mapping, "model": {**saved, **model}}


def open_published(source: str) -> StartingPoint | None:
    """Opens the checkpoint that `run.init_from` names as FORMAT:DIR; returns None for a run directory.

    Raises:
      ConfigError: the format does not exist, or runs cannot start from it.
      StackError: the checkpoint is not usable.
    """
    format_ = published_format(source)
    return None if format_ is None else format_.open_start(Path(source.partition(":")[2]))


def published_format(source: str) -> StartsRuns | None:
    """Returns the format of the address FORMAT:DIR; None for a run directory.

    Raises:
      ConfigError: the format does not exist, or runs cannot start from it.
    """
    scheme, separator, _ = source.partition(":")
    if not separator or "/" in scheme or Path(source).exists():
        return None
    formats = dict(registries.model_formats.items())
    if isinstance(found := formats.get(scheme), StartsRuns):
        return found
    able = ", ".join(f"{name}:DIR" for name, each in formats.items() if isinstance(each, StartsRuns))
    first = f" Convert first: stack convert {source} RUN." if isinstance(found, ImportsRuns) else ""
    raise ConfigError(f"run.init_from is {source!r}; runs start from the directory of a run, or {able}.{first}")


def with_tokenizer_of_start(config: RunConfig) -> RunConfig:
    """Sets the data's tokenizer to the tokenizer of `run.init_from` if the config names none."""
    source = config.run.init_from
    if source is None or getattr(config.data, "tokenizer", "") is not None:
        return config
    if (tokenizer := _tokenizer_of(source)) is None:
        return config
    return dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=str(tokenizer)))


def with_tokenizer(data: Any, tokenizer: Path) -> Any:
    """Sets the tokenizer of a data config to a directory; returns data without a tokenizer unchanged."""
    names = {field.name for field in dataclasses.fields(data)}
    changes = {"tokenizer": str(tokenizer), "vocab_size": None}
    return dataclasses.replace(data, **{name: value for name, value in changes.items() if name in names})


def data_of_resumed(config: RunConfig) -> Any:
    """Returns the data config of a resumed run with the tokenizer that it trained, even if its documents changed."""
    tokenizer = RunDirectory(Path(config.output)).tokenizer
    is_trained = getattr(config.data, "tokenizer", "") in (None, BPE)
    return with_tokenizer(config.data, tokenizer) if is_trained and tokenizer.is_dir() else config.data


def copy_tokenizer_of_start(config: RunConfig, directory: Path) -> None:
    """Copies the tokenizer of `run.init_from` to a run directory that has none."""
    destination = RunDirectory(directory).tokenizer
    if config.run.init_from is None or destination.exists():
        return
    if (source := _tokenizer_of(config.run.init_from)) is None:
        return
    partial = destination.with_name("tokenizer.partial")
    if published_format(config.run.init_from) is None:
        shutil.copytree(source, partial, dirs_exist_ok=True)
    else:  # A published checkpoint has its weights in the same directory, so only the tokenizer is copied.
        HuggingFaceTokenizer.load(source).save(partial)
    partial.replace(destination)


def start_configs(config: RunConfig) -> Path:
    """Returns the directory with the original `config.json` and `generation_config.json` of a run's model."""
    source = config.run.init_from
    if source is not None and (published := open_published(source)) is not None:
        return published.configs
    return Path(config.output if source is None else source) / "huggingface"


def _tokenizer_of(source: str) -> Path | None:
    if (published := open_published(source)) is not None:
        return published.tokenizer
    tokenizer = RunDirectory(Path(source)).tokenizer
    return tokenizer if tokenizer.is_dir() else None


def model_differences(config: Any, saved: Any) -> list[str]:
    """Lists the config keys in which two models differ as functions."""
    lines = differences({"model": to_mapping(config)}, {"model": to_mapping(saved)})
    return [line for line in lines if not is_under(line, _FREE)]


def check_same_start(config: RunConfig, model: Any, allow: tuple[str, ...] = ()) -> None:
    """Raises a ConfigError if a run's model or tokenizer differs from the source in `run.init_from`.

    Args:
      config: config of the run.
      model: model config of the source.
      allow: config keys that may differ.
    """
    lines = [*model_differences(config.model, model), *_tokenizer_difference(config)]
    if changed := [line for line in lines if not is_under(line, allow)]:
        listing = "\n  ".join(changed)
        raise ConfigError(
            f"The model or its tokenizer is not that of {config.run.init_from}, whose weights it starts from:\n"
            f"  {listing}\n"
            "Leave these keys out to take the source's, or name those that are meant to differ: "
            f"--allow {changed[0].partition(':')[0]}."
        )


def _tokenizer_difference(config: RunConfig) -> list[str]:
    """Returns a line if `data.tokenizer` differs from the tokenizer of `run.init_from`."""
    given = getattr(config.data, "tokenizer", None)
    source = _tokenizer_of(str(config.run.init_from))
    if given is None or source is None or given == str(source):
        return []
    if given != BPE and HuggingFaceTokenizer.load(given).digest == HuggingFaceTokenizer.load(source).digest:
        return []
    return [f"data.tokenizer: {given!r}, not {str(source)!r}"]
