"""The parameters that the logits of a model read.

The host needs about 1.5 us per launch and argument of a program, whether the program reads it or not: 1.1 ms for the
693 arrays of SmolLM2 in Q4_1 (AMD EPYC, jax 0.10.2). Programs that only compute logits therefore take no others.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.programs.jaxprs import equations_of
from stack_serve.llm.unstacking import layer_by_layer

__all__ = ["HeadWeights"]


class HeadWeights:
    """Selects the parameters that `logits` reads, and restores the structure of all parameters.

    Args:
      checkpoint: the model.
      params: its parameters, of which some may be `Layers`.
      hidden: [rows, embed], hidden states or their shape and dtype.
    """

    def __init__(self, checkpoint: GenerativeCheckpoint, params: Any, hidden: Any) -> None:
        logits = layer_by_layer(lambda params, hidden: checkpoint.model(params).logits(hidden))
        jaxpr = equations_of(jax.make_jaxpr(logits)(params, hidden))
        operands = [operand for equation in jaxpr.eqns for operand in equation.invars] + jaxpr.outvars
        read = {operand for operand in operands if not isinstance(operand, Literal)}
        leaves, self._structure = jax.tree.flatten(params)
        self._is_read = [variable in read for variable in jaxpr.invars[: len(leaves)]]
        self._shapes = [(leaf.shape, leaf.dtype) for leaf in leaves]

    def of(self, params: Any) -> tuple[Any, ...]:
        """Returns the arrays that the logits read."""
        return tuple(leaf for leaf, wanted in zip(jax.tree.leaves(params), self._is_read, strict=True) if wanted)

    def restored(self, arrays: tuple[Any, ...]) -> Any:
        """Returns all parameters, with zeros for the arrays that are not read. Called while tracing."""
        rest = iter(arrays)
        leaves = [
            next(rest) if wanted else jnp.zeros(*shape)
            for wanted, shape in zip(self._is_read, self._shapes, strict=True)
        ]
        return jax.tree.unflatten(self._structure, leaves)
