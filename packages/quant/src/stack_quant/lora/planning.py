"""Planning of the adapters of a traced program, and their initial factors."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from stack_quant.errors import QuantError
from stack_quant.lora.rules import AdapterRule, plan_adapters
from stack_quant.transform.adapted import Adapter
from stack_quant.transform.interpreter import ResolvedRules
from stack_quant.transform.program import Program

__all__ = ["add_adapters", "factors_of"]


def add_adapters(
    rules: Sequence[AdapterRule],
    program: Program,
    arrays: Mapping[str, Any],
    resolved: ResolvedRules,
    may_adapt: Callable[[str], bool],
    *,
    with_images: Program | None = None,
) -> ResolvedRules:
    """Returns `resolved` with the adapters that `rules` describe.

    Args:
      arrays: parameters by path, some of which may be quantized.
      may_adapt: predicate on paths that is False for arrays that are not parameters.
      with_images: the program of a call with images; None without a tower.

    Raises:
      QuantError: the rules have adapters already.
      RuleError: a rule matches nothing.
    """
    if resolved.adapters:
        raise QuantError("The model has adapters already. Merge them, or start from the model without adapters.")
    shapes = {
        path: tuple(array.shape)
        for path, array in arrays.items()
        if may_adapt(path) and jnp.issubdtype(array.dtype, jnp.floating)
    }
    uses = program.survey(arrays, resolved).uses
    of_images = () if with_images is None else with_images.survey(arrays, resolved).uses
    return replace(resolved, adapters=plan_adapters(rules, shapes, uses, of_images))


def factors_of(
    adapters: Mapping[str, Adapter], arrays: Mapping[str, Any], key: jax.Array, dtype: Any
) -> dict[str, dict[str, Any]]:
    """Returns initial factors by path, which change nothing. If the arrays are shapes, the factors are shapes, too."""
    found = {}
    for path, adapter in adapters.items():
        # The key depends on the path alone, so adding a parameter does not change any existing factors.
        factor_key = jax.random.fold_in(key, zlib.crc32(path.encode()))
        is_abstract = isinstance(jax.tree.leaves(arrays[path])[0], jax.ShapeDtypeStruct)

        def initial(base: Any, adapter: Adapter = adapter, factor_key: jax.Array = factor_key) -> dict[str, jax.Array]:
            return adapter.initial(base, factor_key, dtype)

        found[path] = jax.eval_shape(initial, arrays[path]) if is_abstract else initial(arrays[path])
    return found
