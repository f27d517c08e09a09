"""Resolution of a run's config: defaults from a starting point, a model family and a resumed run are merged here."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from stack_core.abi.config import parse, to_mapping, with_current_keys
from stack_core.abi.plugins import registries
from stack_core.abi.run_directory import RunDirectory
from stack_train.data.settings import BPE
from stack_train.run.config import RunConfig, saved_config
from stack_train.run.start import Start, open_start
from stack_train.run.transforms import transform_of
from stack_train.storage.remote_run import run_path
from stack_train.transform import Transforms
from stack_train.variables.model_variables import sharding_rules

__all__ = ["ResolvedRun", "parse_run", "resolve", "with_tokenizer"]


@dataclass(frozen=True)
class ResolvedRun:
    """Config of a run with all defaults filled in, and the configs of earlier runs for `checks.check` to compare.

    Attributes:
      config: config of the run, as saved in the run directory.
      directory: run directory.
      data: config that builds the data: `config.data`, with the tokenizer that a resumed run trained.
      transforms: transforms of the model.
      start: run or published checkpoint in `run.init_from`; None for random initial parameters.
      resumed: config of the resumed run, as saved; None for a new run.
    """

    config: RunConfig
    directory: RunDirectory
    data: Any
    transforms: Transforms
    start: Start | None
    resumed: Mapping[str, Any] | None


def parse_run(mapping: Mapping[str, Any]) -> RunConfig:
    """Parses the config of a run. Missing keys of the section `model` come from the model of `run.init_from`.

    Raises:
      ConfigError: a key or a value is not valid, or `run.init_from` is neither a run nor a checkpoint.
      StackError: the run or the checkpoint is not usable.
    """
    mapping = with_current_keys(RunConfig, mapping, warn=True)
    settings, model = mapping.get("run"), mapping.get("model", {})
    source = settings.get("init_from") if isinstance(settings, Mapping) else None
    if isinstance(source, str) and isinstance(model, Mapping):
        saved = to_mapping(open_start(source).model)
        # Keys of another family have other meanings; `checks.check` rejects such a model.
        if model.get("name", saved["name"]) == saved["name"]:
            mapping = {**mapping, "model": {**saved, **model}}
    return parse(RunConfig, mapping)


def resolve(config: RunConfig, *, resume: bool = False) -> ResolvedRun:
    """Merges the sharding rules of the model family, and the tokenizers of the start and the resumed run.

    Raises:
      StackError: the starting point or the resumed run is not usable.
    """
    start = None if config.run.init_from is None else open_start(config.run.init_from)
    directory, data = RunDirectory(run_path(config.output)), config.data
    # "" stands for data without this field, None for a tokenizer that is not set.
    if start is not None and start.tokenizer is not None and getattr(data, "tokenizer", "") is None:
        data = replace(data, tokenizer=str(start.tokenizer))
    rules = sharding_rules(registries.models[config.model.name], config.mesh.rules)
    # The saved config lists all rules, so a later change of a default does not change a resumed run.
    config = replace(config, data=data, mesh=replace(config.mesh, rules=dict(rules.table)))
    # A resumed run keeps the tokenizer that it trained, even if its documents changed.
    if resume and getattr(data, "tokenizer", "") in (None, BPE) and directory.tokenizer.is_dir():
        data = with_tokenizer(data, directory.tokenizer)
    return ResolvedRun(
        config=config,
        directory=directory,
        data=data,
        transforms=transform_of(config),
        start=start,
        resumed=saved_config(directory) if resume else None,
    )


def with_tokenizer(data: Any, tokenizer: Path) -> Any:
    """Sets the tokenizer of a data config to a directory; returns data without a tokenizer unchanged."""
    names = {field.name for field in fields(data)}
    changes = {"tokenizer": str(tokenizer), "vocab_size": None}
    return replace(data, **{name: value for name, value in changes.items() if name in names})
