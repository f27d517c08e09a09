"""Where an engine's arrays lie: on one device, or with each layer's heads and features split over several."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from stack_core.errors import HardwareError, ShardingError
from stack_core.huge_pages import in_one_block
from stack_core.mesh import DEFAULT_RULES, MeshConfig, make_mesh, use_mesh
from stack_core.protocols import GenerativeCheckpoint, KVCacheShape
from stack_serve.llm.config import PageLayout
from stack_serve.llm.unstacking import split_layers

__all__ = ["Placement"]


class Placement:
    """Puts arrays on `tensor` devices; what cannot be split lies whole on each.

    Raises:
      HardwareError: there are not so many devices.
    """

    def __init__(self, shape: KVCacheShape, tensor: int) -> None:
        devices = jax.devices()
        if tensor > len(devices):
            raise HardwareError(
                f"The engine is to be split over tensor={tensor} devices, but there are {len(devices)}: "
                f"{', '.join(map(str, devices[:8]))}. Lower tensor, or start it where there are more."
            )
        self._split_heads = shape.kv_heads % tensor == 0
        self._rules = DEFAULT_RULES
        self._mesh = None if tensor == 1 else make_mesh(MeshConfig(fsdp=1, tensor=tensor), devices[:tensor])

    def traced(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)`, which traces programs of the model; activations that do not divide are not split."""
        if self._mesh is None:
            return function(*args)
        while True:
            try:
                with use_mesh(self._mesh, self._rules):
                    return function(*args)
            except ShardingError as error:
                if not error.logical_axes:
                    raise
                self._rules = self._rules.updated(dict.fromkeys(error.logical_axes))

    def load(self, checkpoint: GenerativeCheckpoint, chosen: Any) -> Any:
        """The checkpoint's parameters, with those that are `chosen` split into their layers."""
        return self._in_place(split_layers(checkpoint.load_params(self._shardings(checkpoint)), chosen))

    def params(self, checkpoint: GenerativeCheckpoint, params: Any, chosen: Any) -> Any:
        """The same of other parameters like them."""
        return self._in_place(split_layers(jax.device_put(params, self._shardings(checkpoint)), chosen))

    def _in_place(self, params: Any) -> Any:
        return in_one_block(params) if self._mesh is None and jax.default_backend() == "cpu" else params

    def _shardings(self, checkpoint: GenerativeCheckpoint) -> Any:
        return None if self._mesh is None else checkpoint.shardings(self._mesh)

    def pools(self, layers: Any, layout: PageLayout) -> Any:
        """Pools of pages, split by their heads; of one layer each, or of all in the first axis."""
        if self._mesh is None:
            return layers
        spec = [("tensor" if axis == "h" and self._split_heads else None) for axis in layout]

        def place(pool: jax.Array) -> jax.Array:
            leading = [None] * (pool.ndim - len(spec))
            return jax.device_put(pool, NamedSharding(self._mesh, PartitionSpec(*leading, *spec)))

        return jax.tree.map(place, layers)

    def replicated(self, tree: Any) -> Any:
        """The same on every device."""
        return tree if self._mesh is None else jax.device_put(tree, NamedSharding(self._mesh, PartitionSpec()))
