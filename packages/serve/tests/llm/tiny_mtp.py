"""The tiny model with a layer for multi-token prediction."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from stack_core import ops
from stack_core.abi.caches import AttentionSpec, KeysValues
from stack_core.abi.models import Outputs

from .tiny_checkpoint import EMBED, HEADS, STATES, TinyCheckpoint, TinyModel, random_params


def mtp_layer(seed: int = 0) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(100 + seed), 2)
    return {
        "project": jax.random.normal(keys[0], (2 * EMBED, EMBED)) * 0.3,
        "mix": jax.random.normal(keys[1], (EMBED, 3 * EMBED)) * 0.5,
    }


def mtp_params(seed: int = 0) -> dict[str, Any]:
    return {**random_params(seed), "mtp": mtp_layer(seed)}


class MtpModel(TinyModel):
    @property
    def mtp_states(self) -> KeysValues:
        return replace(STATES, repeats=1)

    def predict_ahead(self, hidden: Any, tokens: Any, positions: Any, cache: Any = None) -> Outputs:
        weights = self.params["mtp"]
        places = jnp.sin(positions[..., None].astype(jnp.float32) * jnp.arange(1.0, EMBED + 1))
        x = jnp.concatenate([hidden, self.params["embedding"][tokens] + places], axis=-1) @ weights["project"]
        heads = (*x.shape[:2], HEADS, EMBED // HEADS)
        query, key, value = (array.reshape(heads) for array in jnp.split(x @ weights["mix"], 3, axis=-1))
        if cache is None:
            return Outputs(jnp.tanh(x + ops.attention(query, key, value, causal=True).reshape(x.shape)), None)
        layer = jax.tree.map(lambda array: array[0], cache.layers)
        output, layer = cache.attend(layer, query, key, value, AttentionSpec())
        layers = jax.tree.map(lambda array: array[None], layer)
        return Outputs(jnp.tanh(x + output.reshape(x.shape)), cache.advance(layers, tokens.shape[1]))


@dataclass(frozen=True)
class MtpCheckpoint(TinyCheckpoint):
    name: str = "tiny-mtp"
    read: Callable[[], Any] = mtp_params

    def model(self, params: Any) -> MtpModel:
        return MtpModel(params)
