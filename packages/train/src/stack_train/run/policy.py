"""The model of a run as something to generate from, for data that the policy makes."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax.nnx.traversals import flatten_mapping

from stack_core.abi.errors import ConfigError
from stack_train.generative import ModuleCheckpoint, generative_checkpoint
from stack_train.run.run import Run
from stack_train.run.start import start_configs
from stack_train.variables import Tree

__all__ = ["policy_of"]


def policy_of(run: Run, variables: Tree) -> ModuleCheckpoint:
    """Opens the run's model for generation, for `PolicyBatches.take_policy`.

    Args:
      variables: those that the run has now, which `load_params` copies; they need not outlive the next step.

    Raises:
      ConfigError: the run has several processes, none of which holds all variables.
      GenerationError: the run's model is no language model, or its tokenizer is another's.
    """
    if run.processes.count > 1:
        raise ConfigError(
            f"data.kind {run.config.data.kind!r} generates with the run's model, which one process must hold; the "
            f"run has {run.processes.count} processes. Start one, with all devices."
        )

    def read(shardings: Any) -> Iterator[tuple[Any, jax.Array]]:
        # Mapped, because a copy of a quantized array as such would be one in float.
        return ((path, jax.tree.map(jnp.copy, value)) for path, value in flatten_mapping(variables).items())

    return generative_checkpoint(
        run.trainer.abstract_model,
        run.config.model,
        name=run.directory.path.name,
        tokenizer=run.directory.tokenizer,
        origin=start_configs(run.config),
        read=read,
    )
