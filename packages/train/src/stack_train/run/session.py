"""Training from a config in any form: a file, a mapping or a `RunConfig`, on this process or on several hosts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stack_core.abi.config import load_yaml, to_mapping
from stack_train.run.cluster import train_on_cluster
from stack_train.run.config import RunConfig
from stack_train.run.loop import RunSummary
from stack_train.run.resolve import parse_run
from stack_train.run.train import train as train_here

__all__ = ["train"]


def train(
    config: RunConfig | Mapping[str, Any] | str | Path,
    /,
    *,
    resume: bool = False,
    allow: Sequence[str] = (),
    terminal: bool = False,
    **changes: Any,
) -> RunSummary:
    """Trains a model, as `stack train` does: `train("run.yaml", run={"steps": 300}, output="runs/mine")`.

    Args:
      config: path of a YAML file, a mapping with the same keys, or a `RunConfig`.
      resume: resume from the newest complete checkpoint, or from step 0 if the killed run had none.
      allow: config keys that may differ from the resumed run, or from the start, `run.init_from`.
      terminal: show progress bars.
      changes: top-level keys that override the config; the keys of a section are overridden one by one.

    Raises:
      StackError: the config, the data, the directory or a checkpoint is not usable, or training cannot continue.
    """
    if isinstance(config, str | Path):
        config = load_yaml(config)
    if changes:
        config = _merged(to_mapping(config), changes)
    wanted = config if isinstance(config, RunConfig) else parse_run(config)
    run = train_here if wanted.cluster.hosts is None else train_on_cluster
    return run(wanted, resume=resume, allow=allow, terminal=terminal)


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `base` with changed keys; mappings are merged, unless they select another name."""
    result = dict(base)
    for key, value in changes.items():
        before = result.get(key)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        is_renamed = both and value.get("name", before.get("name")) != before.get("name")
        result[key] = _merged(before, value) if both and not is_renamed else value
    return result
