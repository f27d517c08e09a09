"""The model of a run opened for generation, for batches that are sampled from the policy."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax.nnx.traversals import flatten_mapping

from stack_core.runtime.gathering import gathered
from stack_train.generation.generative import ModuleCheckpoint, generative_checkpoint
from stack_train.run.run import Run
from stack_train.variables.model_variables import Tree

__all__ = ["policy_of"]


def policy_of(run: Run, variables: Tree) -> ModuleCheckpoint:
    """Opens the run's model for generation, for `PolicyBatches.take_policy`.

    Args:
      variables: current variables of the run. `load_params` makes a copy, so the next step may donate the originals.
        With several processes, it is a collective, which gathers the variables in each of them.

    Raises:
      GenerationError: the run's model is not a language model, or its tokenizer belongs to another model.
    """

    def read(shardings: Any) -> Iterator[tuple[Any, jax.Array]]:
        # Copied leaf by leaf: jnp.copy of a quantized array would dequantize it to float.
        whole = gathered(variables)
        return ((path, jax.tree.map(jnp.copy, value)) for path, value in flatten_mapping(whole).items())

    return generative_checkpoint(
        run.program.step.model.abstract,
        run.config.model,
        name=run.directory.path.name,
        tokenizer=run.directory.tokenizer,
        origin=run.directory.path / "huggingface" if run.start is None else run.start.configs,
        read=read,
    )
