"""From rules to the adapters of a traced program, and their factors."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from stack_quant.errors import QuantError
from stack_quant.lora.rules import AdapterRule, plan_adapters
from stack_quant.transform.adapted import Adapter
from stack_quant.transform.interpreter import Treatment
from stack_quant.transform.program import Program

__all__ = ["adapted_treatment", "factors_of"]


def adapted_treatment(
    rules: Sequence[AdapterRule],
    program: Program,
    arrays: Mapping[str, Any],
    treatment: Treatment,
    may_adapt: Callable[[str], bool],
) -> Treatment:
    """A treatment with adapters by rules.

    Args:
      arrays: of the parameters, by path; some may be quantized.
      may_adapt: whether the array at a path is a parameter at all.

    Raises:
      QuantError: it has adapters already.
      RuleError: a rule matches nothing.
    """
    if treatment.adapters:
        raise QuantError("The model has adapters already. Merge them, or begin with the model that it came from.")
    shapes = {
        path: tuple(array.shape)
        for path, array in arrays.items()
        if may_adapt(path) and jnp.issubdtype(array.dtype, jnp.floating)
    }
    return replace(treatment, adapters=plan_adapters(rules, shapes, program.survey(arrays, treatment).uses))


def factors_of(
    adapters: Mapping[str, Adapter], arrays: Mapping[str, Any], key: jax.Array, dtype: Any
) -> dict[str, dict[str, Any]]:
    """Factors that change nothing, by path; shapes, where the arrays are shapes."""
    found = {}
    for path, adapter in adapters.items():
        # By its name, so that another parameter more or less changes no other's factors.
        own = jax.random.fold_in(key, zlib.crc32(path.encode()))
        is_abstract = isinstance(jax.tree.leaves(arrays[path])[0], jax.ShapeDtypeStruct)

        def initial(base: Any, adapter: Adapter = adapter, own: jax.Array = own) -> dict[str, jax.Array]:
            return adapter.initial(base, own, dtype)

        found[path] = jax.eval_shape(initial, arrays[path]) if is_abstract else initial(arrays[path])
    return found
