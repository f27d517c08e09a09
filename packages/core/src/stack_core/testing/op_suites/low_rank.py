"""The contract suite of `low_rank`."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from stack_core.testing.cases import OpCase, OpSuite, in_tiles, integers

__all__ = ["SUITE"]


def _low_rank_case(name: str, x: tuple[int, ...], sizes: tuple[int, int, int], rows: Any = None) -> OpCase:
    """Builds a case; `sizes` are (adapters, rank, d_out)."""
    adapters, rank, d_out = sizes

    def arrays(rng: np.random.Generator) -> Mapping[str, Any]:
        return {
            "x": rng.normal(size=x),
            "down": rng.normal(size=(adapters, x[-1], rank)),
            "up": rng.normal(size=(adapters, rank, d_out)),
            "scale": rng.uniform(0.5, 2, size=adapters),
            **({} if rows is None else {"rows": rng.permutation(rows)}),
        }

    return OpCase("low_rank", name, arrays)


_CASES = (
    _low_rank_case("one_adapter", (2, 5, 12), (1, 3, 10)),
    _low_rank_case("first_of_several", (7, 12), (3, 3, 10)),
    _low_rank_case("rows", (9, 12), (4, 3, 10), integers(0, 2, 2, -1, 3, 0, -1, 2, 0)),
    _low_rank_case("row_of_each_token", (2, 3, 12), (3, 1, 5), integers([0, -1, 2], [2, 2, 1])),
    _low_rank_case("row_of_each_sequence", (3, 5, 12), (2, 4, 6), integers(1, -1, 0)),
    _low_rank_case("no_row_has_an_adapter", (4, 8), (2, 2, 6), integers(-1, -1, -1, -1)),
    _low_rank_case("more_adapters_than_rows", (2, 8), (11, 2, 6), integers(10, 4)),
    _low_rank_case("odd_sizes", (131, 37), (3, 8, 19), np.arange(131, dtype=np.int32) % 4 - 1),
    _low_rank_case("empty_rows", (0, 8), (2, 2, 6), np.zeros(0, np.int32)),
)

_FOR_ACCELERATORS = in_tiles(
    _low_rank_case("one_adapter", (2, 64, 128), (1, 16, 256)),
    _low_rank_case("rows", (131, 128), (4, 16, 128), np.arange(131, dtype=np.int32) % 5 - 1),
    _low_rank_case("row_of_each_sequence", (3, 64, 128), (2, 8, 64), integers(1, -1, 0)),
    _low_rank_case("no_row_has_an_adapter", (64, 128), (2, 16, 64), np.full(64, -1, np.int32)),
)


def _oracle(x: Any, down: Any, up: Any, scale: Any, *, rows: Any = None) -> Any:
    """Computes the definition, with a full matrix for each adapter."""
    batch = x.shape[:-1]
    rows = np.zeros(batch, int) if rows is None else np.asarray(rows)
    adapter = np.broadcast_to(rows.reshape(*rows.shape, *[1] * (len(batch) - rows.ndim)), batch)
    matrices = jnp.einsum("air,aro,a->aio", down, up, scale)[np.maximum(adapter, 0)]
    return jnp.einsum("...i,...io->...o", x, matrices) * (adapter >= 0)[..., None]


SUITE = OpSuite(_CASES, _oracle, _FOR_ACCELERATORS)
