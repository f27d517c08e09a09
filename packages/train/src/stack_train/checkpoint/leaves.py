"""Named leaves of a state, their specs, and their stored form."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stack_core.abi.errors import CheckpointError
from stack_train.checkpoint.narrow import is_packed, packed

__all__ = ["LeafSpec", "differences", "named_leaves", "spec_of", "stored_array"]


@dataclass(frozen=True)
class LeafSpec:
    """Shape and dtype of a leaf.

    Attributes:
      shape: shape of the leaf; for a typed PRNG key, shape of the array of keys.
      dtype: name of the dtype; for a typed PRNG key, the dtype of its key data.
      key_impl: name of the PRNG of typed keys; None for any other array.
    """

    shape: tuple[int, ...]
    dtype: str
    key_impl: str | None = None

    def __str__(self) -> str:
        kind = f"key<{self.key_impl}>" if self.key_impl else self.dtype
        return f"{kind}[{', '.join(map(str, self.shape))}]"


def named_leaves(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a pytree by their paths, such as "params/layers/attention/query/kernel".

    Paths omit the final `value` attribute of a Flax variable. A leaf thus has the same name in an `nnx.State` and in
    plain dicts.

    Raises:
      CheckpointError: two leaves have the same path.
    """
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        steps = path[:-1] if path and path[-1] == jax.tree_util.GetAttrKey("value") else path
        name = jax.tree_util.keystr(steps, simple=True, separator="/")
        if name in named:
            raise CheckpointError(f"Two leaves of the state have the path {name!r}; paths must be unique.")
        named[name] = leaf
    return named


def spec_of(leaf: Any) -> LeafSpec:
    """Describes a leaf: an array, a `jax.ShapeDtypeStruct`, or a Python number."""
    if not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return _key_spec(leaf)
    return LeafSpec(tuple(leaf.shape), np.dtype(leaf.dtype).name)


def stored_array(leaf: Any) -> Any:
    """Returns the array that stands for a leaf on disk: a typed key's data, a number as an array, `narrow` bytes."""
    if not hasattr(leaf, "dtype"):
        return np.asarray(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    return packed(jnp.asarray(leaf)) if is_packed(leaf.dtype) else leaf


def differences(stored: Mapping[str, LeafSpec], requested: Mapping[str, LeafSpec]) -> list[str]:
    """Lists the leaves whose specs differ between a checkpoint and the request, one line per leaf."""
    return [
        f"  {name}: {stored.get(name, 'absent')} in the checkpoint, {requested.get(name, 'absent')} in this run"
        for name in dict.fromkeys([*requested, *stored])
        if stored.get(name) != requested.get(name)
    ]


def _key_spec(leaf: Any) -> LeafSpec:
    impls: list[str] = []

    def data(key: jax.Array) -> jax.Array:
        impls.append(str(jax.random.key_impl(key)))
        return jax.random.key_data(key)

    # Traced, because `key_impl` takes no `ShapeDtypeStruct`.
    stored = jax.eval_shape(data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return LeafSpec(tuple(leaf.shape), stored.dtype.name, impls[0])
