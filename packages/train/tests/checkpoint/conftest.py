from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.events import Event
from stack_train.checkpoint import CheckpointConfig, CheckpointStore

CONFIG_YAML = "trainer:\n  steps: 30\n"


def make_state(seed: int = 0, *, width: int = 32) -> dict[str, Any]:
    """A small training state with a leaf of every kind."""
    key = jax.random.key(seed)
    kernel = jax.random.normal(key, (8, width))
    return {
        "params": {"kernel": kernel, "bias": kernel[0].astype(jnp.bfloat16), "scale": kernel[1].astype(jnp.float16)},
        "opt_state": (kernel * 2, jnp.arange(-4, 4, dtype=jnp.int8), jnp.uint32(2**32 - 1 - seed)),
        "key": key,
        "step": jnp.int32(seed),
        "on_host": np.arange(3) + seed * 2**40,
        "number": 5 + seed,
    }


def abstract(state: Any) -> Any:
    return jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            if isinstance(leaf, jax.Array)
            else leaf
        ),
        state,
    )


def bits(state: Any) -> list[tuple[str, bytes]]:
    """The dtype and the bytes of every leaf."""

    def leaf_bits(leaf: Any) -> tuple[str, bytes]:
        is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return str(getattr(leaf, "dtype", type(leaf))), np.asarray(
            jax.random.key_data(leaf) if is_key else leaf
        ).tobytes()

    return [leaf_bits(leaf) for leaf in jax.tree.leaves(state)]


@pytest.fixture
def emitted() -> list[Event]:
    return []


@pytest.fixture
def make_store(tmp_path: Path, emitted: list[Event]) -> Any:
    """Opens stores on one directory; all are closed at the end."""
    stores: list[CheckpointStore] = []

    def make(**config: Any) -> CheckpointStore:
        stores.append(CheckpointStore(tmp_path / "checkpoints", CheckpointConfig(**config), emit=emitted.append))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.fixture
def store(make_store: Callable[..., CheckpointStore]) -> CheckpointStore:
    return make_store(keep=2)
