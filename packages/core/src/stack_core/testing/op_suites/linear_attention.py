"""The contract suite of `linear_attention`."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stack_core.testing.cases import OpCase, OpSuite, in_tiles, spoiled

__all__ = ["SUITE"]


def _case(
    name: str,
    *,
    sizes: tuple[int, int, int, int, int] = (2, 7, 3, 8, 5),
    absent: tuple[str, ...] = (),
    forgets: float = 0.0,
) -> OpCase:
    """Builds a case; `sizes` are (batch, seq, heads, key_dim, value_dim).

    Args:
      absent: names of the optional arrays to leave out.
      forgets: share of the tokens whose decay is -inf.
    """
    batch, seq, heads, key_dim, value_dim = sizes

    def arrays(rng: np.random.Generator) -> Mapping[str, Any]:
        query, key = (_unit(rng.normal(size=(batch, seq, heads, key_dim))) for _ in range(2))
        decay = -rng.uniform(0, 0.7, size=(batch, seq, heads))
        drawn = {
            "query": query,
            "key": key,
            "value": rng.normal(size=(batch, seq, heads, value_dim)),
            "decay": np.where(rng.random(decay.shape) < forgets, -np.inf, decay),
            "beta": rng.uniform(0, 1, size=(batch, seq, heads)),
            "initial_state": rng.normal(size=(batch, heads, key_dim, value_dim)).astype(np.float32),
        }
        return {name: x for name, x in drawn.items() if name not in absent}

    return OpCase("linear_attention", name, arrays, dict.fromkeys(absent))


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


_CASES = (
    _case("plain", absent=("initial_state",)),
    _case("initial_state"),
    _case("one_token", sizes=(3, 1, 2, 8, 8)),
    _case("no_tokens", sizes=(2, 0, 2, 4, 3)),
    _case("empty_rows", sizes=(0, 3, 2, 4, 3)),
    _case("odd_sizes", sizes=(1, 67, 1, 19, 33)),
    _case("many_tokens", sizes=(1, 300, 2, 16, 8), absent=("initial_state",)),
    _case("wide_values", sizes=(1, 16, 2, 4, 24)),
    _case("forgets_everything", sizes=(2, 11, 3, 8, 5), forgets=0.3),
    _case("without_decay", absent=("decay",)),
    _case("without_beta", absent=("beta", "initial_state")),
    _case("without_gates", absent=("decay", "beta")),
    spoiled(
        _case(""), "not_a_number", query=((0, 2, 1), np.nan), key=((1, 0, 2), np.nan), value=((0, 0, 0, 3), np.nan)
    ),
)

_FOR_ACCELERATORS = in_tiles(
    _case("full", sizes=(1, 128, 2, 64, 64), absent=("initial_state",)),
    _case("partial_chunks", sizes=(2, 67, 1, 128, 64)),
    _case("forgets", sizes=(1, 96, 2, 64, 128), forgets=0.1),
    _case("without_gates", sizes=(1, 64, 2, 64, 64), absent=("decay", "beta")),
)


def _oracle(query: Any, key: Any, value: Any, *, decay: Any, beta: Any, initial_state: Any = None) -> Any:
    """Computes the paper's equation 10 per token: the state times alpha (I - beta k k^T), plus beta v k^T."""
    batch, _, heads, key_dim = query.shape
    alpha = jnp.ones(query.shape[:3]) if decay is None else jnp.exp(decay)
    beta = jnp.ones(query.shape[:3]) if beta is None else beta
    first = jnp.zeros((batch, heads, key_dim, value.shape[-1])) if initial_state is None else initial_state

    def read(state: Any, token: Any) -> Any:
        query, key, value, alpha, beta = token
        write = (beta[..., None] * key)[..., None, :]
        transition = alpha[..., None, None] * (jnp.eye(key_dim) - key[..., :, None] * write)
        state = state @ transition + value[..., :, None] * write
        return state, jnp.squeeze(state @ query[..., None], -1)

    tokens = [jnp.moveaxis(x, 1, 0) for x in (query, key, value, alpha, beta)]
    state, output = jax.lax.scan(read, jnp.swapaxes(first, -1, -2), tokens)
    return jnp.moveaxis(output, 0, 1), jnp.swapaxes(state, -1, -2)


SUITE = OpSuite(_CASES, _oracle, _FOR_ACCELERATORS)
