"""The run or published checkpoint in `run.init_from`: its model, its tokenizer and its config."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stack_core.abi.config import differences, is_under, to_mapping
from stack_core.abi.errors import ConfigError
from stack_core.abi.formats import ImportsRuns, StartingPoint, StartsRuns
from stack_core.abi.local_paths import hub_advice, local_address
from stack_core.abi.plugins import registries
from stack_core.abi.run_directory import RunDirectory
from stack_train.data.tokenizer import HuggingFaceTokenizer
from stack_train.run.config import RunConfig, run_config
from stack_train.storage.address import is_storage
from stack_train.storage.remote_run import local_copy

__all__ = ["Start", "model_differences", "open_start"]

# Dtypes, rematerialization, unrolling and initialization may differ in a new run; the function of the model may not.
_FREE = (
    "model.dtype",
    "model.param_dtype",
    "model.remat",
    "model.unroll",
    "model.bias_rate",
    "model.index_training",
    "model.initializer_std",
    "model.initializer_factor",
)


@dataclass(frozen=True)
class Start:
    """The run or published checkpoint in `run.init_from`.

    Attributes:
      source: "run:" or "FORMAT:", followed by the absolute path, as recorded in checkpoints.
      model: config of its model.
      tokenizer: directory of its tokenizer, or None.
      configs: directory of the original `config.json` and `generation_config.json` of its model.
      run: config of the run; None for a published checkpoint.
      published: the published checkpoint; None for a run.
    """

    source: str
    model: Any
    tokenizer: Path | None
    configs: Path
    run: RunConfig | None = None
    published: StartingPoint | None = None

    def copy_tokenizer(self, directory: Path) -> None:
        """Copies the tokenizer to a run directory that has none."""
        destination = RunDirectory(directory).tokenizer
        if self.tokenizer is None or destination.exists():
            return
        partial = destination.with_name("tokenizer.partial")
        if self.published is None:
            shutil.copytree(self.tokenizer, partial, dirs_exist_ok=True)
        else:  # A published checkpoint has its weights in the same directory, so only the tokenizer is copied.
            HuggingFaceTokenizer.load(self.tokenizer).save(partial)
        partial.replace(destination)


def open_start(source: str) -> Start:
    """Opens the directory of a run, or a published checkpoint FORMAT:DIR, without reading its values.

    Raises:
      ConfigError: `source` is neither, or runs cannot start from its format.
      StackError: the run or the checkpoint is not usable.
    """
    if is_storage(source):
        source = str(local_copy(source))
    source = local_address(source).removeprefix("run:")
    scheme, separator, path = source.partition(":")
    # The path of a run may contain a colon.
    if separator and "/" not in scheme and not Path(source).exists():
        published = _format(scheme, source).open_start(Path(path))
        # Not the path given, which may be a name of the hub.
        address = f"{scheme}:{published.configs.absolute()}"
        return Start(address, published.config, published.tokenizer, published.configs, published=published)
    directory = RunDirectory(Path(source))
    if not directory.path.exists():
        raise ConfigError(f"run.init_from is {source!r}, which is not a directory of a run.{hub_advice(source)}")
    run = run_config(directory.path)
    tokenizer = directory.tokenizer if directory.tokenizer.is_dir() else None
    return Start(f"run:{directory.path.absolute()}", run.model, tokenizer, directory.path / "huggingface", run=run)


def _format(scheme: str, source: str) -> StartsRuns:
    formats = dict(registries.model_formats.items())
    if isinstance(found := formats.get(scheme), StartsRuns):
        return found
    able = ", ".join(f"{name}:DIR" for name, each in formats.items() if isinstance(each, StartsRuns))
    first = f" Convert first: stack convert {source} RUN." if isinstance(found, ImportsRuns) else ""
    raise ConfigError(f"run.init_from is {source!r}; runs start from the directory of a run, or {able}.{first}")


def model_differences(config: Any, saved: Any) -> list[str]:
    """Lists the config keys in which two models differ as functions."""
    lines = differences({"model": to_mapping(config)}, {"model": to_mapping(saved)})
    return [line for line in lines if not is_under(line, _FREE)]
