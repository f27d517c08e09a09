"""The contract suite of `state_space`."""

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
    sizes: tuple[int, int, int, int, int, int] = (2, 7, 2, 6, 8, 5),
    absent: tuple[str, ...] = (),
    forgets: float = 0.0,
) -> OpCase:
    """Builds a case; `sizes` are (batch, seq, groups, heads, key_dim, value_dim).

    Args:
      absent: names of the optional arrays to leave out.
      forgets: share of the tokens whose decay is -inf.
    """
    batch, seq, groups, heads, key_dim, value_dim = sizes

    def arrays(rng: np.random.Generator) -> Mapping[str, Any]:
        query, key = (rng.normal(size=(batch, seq, groups, key_dim)) / key_dim**0.5 for _ in range(2))
        decay = -rng.uniform(0, 0.7, size=(batch, seq, heads))
        found = {
            "query": query,
            "key": key,
            "value": rng.normal(size=(batch, seq, heads, value_dim)),
            "decay": np.where(rng.random(decay.shape) < forgets, -np.inf, decay),
            "beta": rng.uniform(0, 1, size=(batch, seq, heads)),
            "initial_state": rng.normal(size=(batch, heads, key_dim, value_dim)).astype(np.float32),
        }
        return {name: x for name, x in found.items() if name not in absent}

    return OpCase("state_space", name, arrays, dict.fromkeys(absent))


_CASES = (
    _case("plain", absent=("initial_state",)),
    _case("initial_state"),
    _case("one_token", sizes=(3, 1, 1, 2, 8, 8)),
    _case("no_tokens", sizes=(2, 0, 1, 2, 4, 3)),
    _case("empty_rows", sizes=(0, 3, 1, 2, 4, 3)),
    _case("odd_sizes", sizes=(1, 131, 1, 3, 19, 33)),
    _case("forgets_everything", sizes=(2, 11, 1, 3, 8, 5), forgets=0.3),
    _case("without_gates", absent=("decay", "beta", "initial_state")),
    spoiled(
        _case(""), "not_a_number", query=((0, 2, 1), np.nan), key=((1, 0, 1), np.nan), value=((0, 0, 0, 3), np.nan)
    ),
)

_FOR_ACCELERATORS = in_tiles(
    _case("full", sizes=(1, 128, 1, 2, 64, 64), absent=("initial_state",)),
    _case("partial_chunks", sizes=(2, 67, 1, 2, 128, 64)),
    _case("forgets", sizes=(1, 96, 2, 2, 64, 128), forgets=0.1),
    _case("without_gates", sizes=(1, 64, 1, 2, 64, 64), absent=("decay", "beta")),
)


def _oracle(query: Any, key: Any, value: Any, *, decay: Any, beta: Any, initial_state: Any = None) -> Any:
    """Computes the recurrence token by token, with query and key repeated for the heads of their group."""
    batch, _, heads, value_dim = value.shape
    query, key = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (query, key))
    factor = jnp.ones(value.shape[:3]) if decay is None else jnp.exp(decay)
    beta = jnp.ones(value.shape[:3]) if beta is None else beta
    first = jnp.zeros((batch, heads, key.shape[-1], value_dim)) if initial_state is None else initial_state

    def read(state: Any, token: Any) -> Any:
        query, key, value, factor, beta = token
        state = factor[..., None, None] * state + (beta[..., None] * key)[..., :, None] * value[..., None, :]
        return state, jnp.sum(state * query[..., :, None], axis=-2)

    tokens = [jnp.moveaxis(x, 1, 0) for x in (query, key, value, factor, beta)]
    state, output = jax.lax.scan(read, first, tokens)
    return jnp.moveaxis(output, 0, 1), state


SUITE = OpSuite(_CASES, _oracle, _FOR_ACCELERATORS)
