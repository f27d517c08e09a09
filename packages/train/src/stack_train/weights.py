"""A model's parameters, from the newest intact checkpoint of a run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from stack_core.config import parse, parse_yaml
from stack_core.plugins import registries
from stack_train.checkpoint import CheckpointStore
from stack_train.config import RunConfig
from stack_train.run_directory import RunDirectory

__all__ = ["abstract_params", "load_params", "run_config"]


def run_config(run: Path) -> RunConfig:
    """Reads the resolved config of the run in a directory.

    Raises:
      RunDirectoryError: there is no run.
      ConfigError: its config does not fit what is installed.
    """
    directory = RunDirectory(run)
    return parse(RunConfig, parse_yaml(directory.config_yaml(), str(directory.config)))


def load_params(run: Path, config: Any, shardings: Any = None) -> Any:
    """Reads parameters, each to its place, and casts those that `config` holds in another dtype than the run.

    Args:
      config: of the model; its `param_dtype` may differ from the run's.
      shardings: tree of shardings in the structure of the parameters; None puts all on the default device.

    Returns:
      The parameters as nested dicts.

    Raises:
      RunDirectoryError: there is no run.
      CheckpointError: no checkpoint can be used, or its model is another; names each parameter that differs.
    """
    stored = abstract_params(replace(config, param_dtype=run_config(run).model.param_dtype))
    if shardings is not None:
        stored = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), stored, shardings
        )
    with CheckpointStore(RunDirectory(run).checkpoints) as store:
        params = store.restore_params(stored).state
    return jax.tree.map(lambda leaf, wanted: leaf.astype(wanted.dtype), params, abstract_params(config))


def abstract_params(config: Any) -> Any:
    """Shapes and dtypes of a model's parameters as nested dicts; nothing is allocated."""
    family = registries.models[config.family]
    return nnx.to_pure_dict(nnx.state(jax.eval_shape(lambda key: family.build(config, key=key), jax.random.key(0))))
