"""Replay of the sampler's experts in the forward passes of a trained mixture of experts."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from stack_core.abi.errors import ConfigError
from stack_core.abi.plugins import registries
from stack_core.ops.kv_cache import DenseKVCache

__all__ = ["check_routing_replay", "mixture_sizes", "replayed_experts"]


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


def check_routing_replay(model: Any, data: Any) -> None:
    """Raises a ConfigError if the model has no experts or the engine does not report them."""
    if mixture_sizes(model) is None:
        raise ConfigError(
            f"data.routing_replay is true, but the model {model.name!r} has no mixtures of experts. Leave "
            "data.routing_replay out, or choose a family with experts."
        )
    if not getattr(registries.engines[data.engine], "reports_experts", False):
        raise ConfigError(
            f"data.routing_replay is true, but the engine {data.engine!r} does not report the experts of tokens. Set "
            "data.engine: static, or leave data.routing_replay out."
        )


def replayed_experts(batch: Mapping[str, jax.Array]) -> dict[str, Any]:
    """Returns the keyword arguments of a model that replay the experts of a batch, empty for a batch without them."""
    return {"experts": batch["experts"]} if "experts" in batch else {}
