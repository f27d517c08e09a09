"""Replay of the sampler's experts in the forward passes of a trained mixture of experts."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from stack_core.abi.plugins import registries
from stack_core.ops.kv_cache import DenseKVCache

__all__ = ["mixture_sizes", "replayed_experts"]


@cache
def mixture_sizes(config: Any) -> tuple[int, int] | None:
    """Returns the number of mixtures of a model and of active experts in each; None for a model without experts.

    Args:
      config: config of a language model, which is traced but not computed.
    """

    def experts(key: jax.Array) -> jax.Array | None:
        model = registries.models[config.name].build(config, key=key)
        # Only calls with a cache report experts.
        token, kv_cache = jnp.zeros((1, 1), jnp.int32), DenseKVCache.empty(model.states, batch=1, capacity=1)
        return model(token, token, cache=kv_cache).facts.get("experts")

    found = jax.eval_shape(experts, jax.random.key(0))
    return None if found is None else (found.shape[0], found.shape[-1])


def replayed_experts(batch: Mapping[str, jax.Array]) -> dict[str, Any]:
    """Returns the keyword arguments of a model that replay the experts of a batch, empty for a batch without them."""
    return {"experts": batch["experts"]} if "experts" in batch else {}
