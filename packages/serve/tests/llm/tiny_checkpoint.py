"""A language model of two layers in plain JAX, as a checkpoint."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stack_core import ops
from stack_core.abi.caches import AttentionSpec, KeysValues
from stack_core.abi.models import Outputs
from stack_core.ops import Head
from stack_serve.llm.engine import LLMEngine

VOCAB, EMBED, HEADS, LAYERS, POSITIONS = 31, 16, 2, 2, 48
STATES = KeysValues(repeats=LAYERS, kv_heads=HEADS, key_dim=EMBED // HEADS, value_dim=EMBED // HEADS, dtype="float32")


def random_params(seed: int = 0, vocab: int = VOCAB) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(seed), 3)
    return {
        "embedding": jax.random.normal(keys[0], (vocab, EMBED)),
        "layers": {"mix": jax.random.normal(keys[1], (LAYERS, EMBED, 3 * EMBED)) * 0.5},
        "head": jax.random.normal(keys[2], (EMBED, vocab)),
    }


@dataclass(frozen=True)
class TinyModel:
    params: Mapping[str, Any]

    def __call__(self, tokens: Any, positions: Any, segment_ids: Any = None, cache: Any = None) -> Any:
        x = self.params["embedding"][tokens] + jnp.sin(
            positions[..., None].astype(jnp.float32) * jnp.arange(1.0, EMBED + 1)
        )

        def layer(x: Any, inputs: Any) -> Any:
            weights, layer_cache = inputs
            query, key, value = jnp.split(x @ weights["mix"], 3, axis=-1)
            heads = (*x.shape[:2], HEADS, EMBED // HEADS)
            query, key, value = (array.reshape(heads) for array in (query, key, value))
            if cache is None:
                output = ops.attention(query, key, value, causal=True, segment_ids=segment_ids)
            else:
                output, layer_cache = cache.attend(layer_cache, query, key, value, AttentionSpec())
            return jnp.tanh(x + output.reshape(x.shape)), layer_cache

        x, layers = jax.lax.scan(layer, x, (self.params["layers"], None if cache is None else cache.layers))
        return Outputs(x, None if cache is None else cache.advance(layers, tokens.shape[1]))

    def logits(self, hidden: Any) -> Any:
        return hidden @ self.params["head"]

    def head(self) -> Head:
        return Head(self.params["head"])


def hidden_states(tokens: Sequence[int], seed: int = 0) -> np.ndarray:
    """Computes the hidden states [tokens, embed] of one prompt; the padding behind it changes none of them."""
    padded = np.zeros((1, POSITIONS), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(_hidden_states(random_params(seed), padded))[: len(tokens)]


@jax.jit
def _hidden_states(params: Any, tokens: jax.Array) -> jax.Array:
    return TinyModel(params)(tokens, jnp.arange(POSITIONS)[None]).hidden[0]


@dataclass(frozen=True)
class TinyCheckpoint:
    name: str = "tiny"
    read: Callable[[], Any] = random_params
    states: KeysValues = STATES
    vocab_size: int = VOCAB
    max_positions: int = POSITIONS
    tokenizer: Any = None
    end_tokens: frozenset[int] = frozenset()
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def parameters(self) -> Any:
        return jax.eval_shape(self.read)

    def load_params(self, shardings: Any = None) -> Any:
        return self.read()

    def model(self, params: Any) -> TinyModel:
        return TinyModel(params)

    def shardings(self, mesh: Any) -> Any:
        raise NotImplementedError("one device is enough here")


def share_programs(source: LLMEngine, *engines: LLMEngine) -> None:
    """Gives engines the compiled programs of another one, whose model and settings have the same shapes."""
    for engine in engines:
        engine._programs._compiled.programs |= source._programs._compiled.programs
