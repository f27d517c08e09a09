"""Placement of an engine's arrays on one device, or sharded over several by the heads and features of each layer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from stack_core.abi.caches import KeysValues
from stack_core.abi.errors import ConfigError, HardwareError, ShardingError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.mesh import DEFAULT_RULES, MeshConfig, use_mesh
from stack_core.chips.device_mesh import make_mesh
from stack_core.chips.machine import free_zeros
from stack_core.runtime.gathering import place_copies
from stack_core.runtime.huge_pages import in_one_block
from stack_serve.llm.cache import SlotStates
from stack_serve.llm.config import PageLayout
from stack_serve.llm.new_weights import leaves_by_path
from stack_serve.llm.unstacking import Layers, split_layers

__all__ = ["AbstractPlacement", "Placement"]


class Placement:
    """Places arrays on `tensor` x `expert` devices; axes that cannot be sharded are replicated.

    Args:
      states: state specification of each layer, from which the key-value head counts are read.
      tensor: number of devices over which heads and features are sharded.
      devices: available devices, which may be those of several processes; None means all devices of this process.
      expert: number of devices over which the experts of mixtures are divided. Tokens and pages are replicated over
        them.

    Raises:
      HardwareError: fewer devices are available.
    """

    def __init__(
        self, states: Any, tensor: int, devices: Sequence[jax.Device] | None = None, *, expert: int = 1
    ) -> None:
        devices = jax.local_devices() if devices is None else devices
        if tensor * expert > len(devices):
            axes = f"tensor={tensor}" if expert == 1 else f"tensor={tensor} x expert={expert}"
            raise HardwareError(
                f"The engine is sharded over {axes} devices, but only {len(devices)} are available: "
                f"{', '.join(map(str, devices[:8]))}. Lower tensor, or start the engine on a machine with more devices."
            )
        heads = (state.kv_heads for state in jax.tree.leaves(states) if isinstance(state, KeysValues))
        self._split_heads = all(count % tensor == 0 for count in heads)
        # A step has few tokens, and any number of them.
        self._rules = DEFAULT_RULES.updated({"batch": ("data", "fsdp"), "lookup_batch": "data"})
        self._expert, self._mesh = expert, None
        if tensor * expert > 1:
            self._mesh = make_mesh(MeshConfig(fsdp=1, tensor=tensor, expert=expert), devices[: tensor * expert])

    @property
    def readable(self) -> NamedSharding | None:
        """Sharding of results that the host reads, replicated over all processes; None if all devices are local."""
        if self._mesh is None or all(each.process_index == jax.process_index() for each in self._mesh.devices.flat):
            return None
        return NamedSharding(self._mesh, PartitionSpec())

    def traced(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function that traces model programs; activation axes that do not divide evenly are replicated."""
        if self._mesh is None:
            return function(*args)
        while True:
            try:
                with use_mesh(self._mesh, self._rules):
                    return function(*args)
            # Each retry replicates more axes, so the loop ends.
            except ShardingError as error:
                if not error.logical_axes:
                    raise
                self._rules = self._rules.updated(dict.fromkeys(error.logical_axes))

    def load(self, checkpoint: GenerativeCheckpoint, chosen: Any) -> Any:
        """Loads the parameters of a checkpoint; arrays with True in `chosen` are split into `Layers`."""
        leaves, structure = jax.tree.flatten(checkpoint.load_params(self._shardings(checkpoint)))
        leaves.reverse()  # `_pop_leaves` pops from the end and frees each leaf after it is placed
        specs = self._target_specs(checkpoint, chosen)
        arrays = self._place_leaves(_pop_leaves(leaves), list(specs.values()), is_owned=True)
        return jax.tree.unflatten(structure, arrays)

    def params(self, checkpoint: GenerativeCheckpoint, params: Any, chosen: Any, *, donate: bool) -> Mapping[str, Any]:
        """Places new parameters, all or a subset, and returns them by path.

        Peak memory is the new parameters, their copies and one temporary array.

        Args:
          checkpoint: checkpoint with the shapes and shardings of the parameters.
          params: new parameters.
          chosen: pytree of booleans that selects the parameters to split into `Layers`.
          donate: True if each array is deleted after it is placed.
        """
        new_leaves, specs = leaves_by_path(params), self._target_specs(checkpoint, chosen)
        leaves = _donated(list(new_leaves.values())) if donate else iter(new_leaves.values())
        arrays = self._place_leaves(leaves, [specs[path] for path in new_leaves], is_owned=False)
        return dict(zip(new_leaves, arrays, strict=True))

    def _target_specs(self, checkpoint: GenerativeCheckpoint, chosen: Any) -> dict[str, tuple[Any, bool, Any]]:
        """Returns (shape and dtype, whether it is split into layers, sharding) for each parameter path."""
        parameters, shardings = leaves_by_path(checkpoint.parameters), self._shardings(checkpoint)
        places = [None] * len(parameters) if shardings is None else jax.tree.leaves(shardings)
        each = zip(parameters.values(), jax.tree.leaves(chosen), places, strict=True)
        return dict(zip(parameters, each, strict=True))

    def _place_leaves(
        self, leaves: Iterator[Any], specs: Sequence[tuple[Any, bool, Any]], *, is_owned: bool
    ) -> list[Any]:
        # One block of large pages: arrays of a few MB have 4 KiB pages otherwise, which made bfloat16 products of one
        # row a half slower (58 instead of 39 us for 512 x 1408).
        if self._mesh is None and jax.default_backend() == "cpu":
            avals = [each for aval, is_split, _ in specs for each in _parts(aval, is_split)]
            parts = (
                part for leaf, (_, is_split, _) in zip(leaves, specs, strict=True) for part in _slices(leaf, is_split)
            )
            arrays = iter(in_one_block(parts, avals))
            counts = [aval.shape[0] if is_split else None for aval, is_split, _ in specs]
            return [next(arrays) if count is None else Layers(tuple(islice(arrays, count))) for count in counts]
        return [
            _copied(leaf, aval.dtype, place, is_split=is_split, is_owned=is_owned)
            for leaf, (aval, is_split, place) in zip(leaves, specs, strict=True)
        ]

    def _shardings(self, checkpoint: GenerativeCheckpoint) -> Any:
        if self._mesh is None:
            return None
        # Compiled programs of JAX 0.10 refuse 4-bit arrays that are committed to CPUs, as sharded arrays are.
        is_cpu = self._mesh.devices.flat[0].platform == "cpu"
        if is_cpu and any(leaf.dtype in (jnp.int4, jnp.uint4) for leaf in jax.tree.leaves(checkpoint.parameters)):
            raise ConfigError(
                f"Model {checkpoint.name!r} has weights of 4 bits, which cannot be divided over several CPU devices. "
                "Use tensor=1 and expert=1, or int8 weights."
            )
        found = checkpoint.shardings(self._mesh)
        if self._expert > 1 and not any("expert" in _mesh_axes(each.spec) for each in jax.tree.leaves(found)):
            raise ConfigError(
                f"expert={self._expert}: no parameter of model {checkpoint.name!r} is divided by experts: it has none, "
                f"or their number is not a multiple of {self._expert}. Use tensor={self._expert} (--tensor), or "
                "another number."
            )
        return found

    def pools(self, shapes: Any, layout: PageLayout) -> Any:
        """Creates page pools sharded over their heads, with or without a layer axis, and replicated states.

        On CPUs, their zeros take no memory until they are written.

        Args:
          shapes: shapes and dtypes of the pools.
        """
        on_cpu = jax.default_backend() == "cpu"

        def zeros(pool: Any, *, split: bool) -> jax.Array:
            array = jnp.zeros(pool.shape, pool.dtype, device=self._of_pool(pool, layout, split=split))
            # Free each pool before creating the next: the peak is then a single pool.
            for shard in array.addressable_shards if on_cpu else ():
                free_zeros(shard.data.block_until_ready().unsafe_buffer_pointer(), shard.data.nbytes)
            return array

        def place(layer: Any) -> Any:
            return jax.tree.map(partial(zeros, split=not isinstance(layer, SlotStates)), layer)

        return jax.tree.map(place, shapes, is_leaf=_is_states)

    def _of_pool(self, pool: Any, layout: PageLayout, *, split: bool) -> NamedSharding | None:
        if self._mesh is None:
            return None
        if not split:
            return NamedSharding(self._mesh, PartitionSpec())
        # Latents are stored as keys of one head, which cannot be split.
        divides = self._split_heads and pool.shape[pool.ndim - len(layout) + layout.index("h")] > 1
        spec = [("tensor" if axis == "h" and divides else None) for axis in layout]
        return NamedSharding(self._mesh, PartitionSpec(*[None] * (pool.ndim - len(spec)), *spec))

    def replicated(self, tree: Any) -> Any:
        """Replicates arrays on every device."""
        return place_copies(tree, None if self._mesh is None else NamedSharding(self._mesh, PartitionSpec()))


class AbstractPlacement(Placement):
    """A placement of shapes and shardings without arrays, to compile for devices that are not available."""

    def __init__(self, states: Any, tensor: int, devices: Sequence[jax.Device], *, expert: int = 1) -> None:
        super().__init__(states, tensor, devices, expert=expert)
        self._one = SingleDeviceSharding(devices[0])

    def load(self, checkpoint: GenerativeCheckpoint, chosen: Any) -> Any:
        def place(aval: Any, sharding: Any, is_split: bool) -> Any:
            if not is_split:
                return _struct(aval.shape, aval.dtype, sharding)
            if isinstance(sharding, NamedSharding):
                # Arrays of one layer lack the first axis.
                sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
            return Layers(tuple(_struct(aval.shape[1:], aval.dtype, sharding) for _ in range(aval.shape[0])))

        leaves, structure = jax.tree.flatten(checkpoint.parameters)
        shardings = self._shardings(checkpoint)
        places = [self._one] * len(leaves) if shardings is None else jax.tree.leaves(shardings)
        return jax.tree.unflatten(structure, map(place, leaves, places, jax.tree.leaves(chosen)))

    def pools(self, shapes: Any, layout: PageLayout) -> Any:
        def place(layer: Any) -> Any:
            split = not isinstance(layer, SlotStates)

            def struct(pool: Any) -> jax.ShapeDtypeStruct:
                return _struct(pool.shape, pool.dtype, self._of_pool(pool, layout, split=split) or self._one)

            return jax.tree.map(struct, layer)

        return jax.tree.map(place, shapes, is_leaf=_is_states)

    def replicated(self, tree: Any) -> Any:
        sharding = self._one if self._mesh is None else NamedSharding(self._mesh, PartitionSpec())
        return jax.tree.map(lambda leaf: _struct(leaf.shape, leaf.dtype, sharding), tree)


def _mesh_axes(spec: PartitionSpec) -> set[str]:
    """Returns the mesh axes that a spec names."""
    return {axis for entry in spec if entry for axis in ((entry,) if isinstance(entry, str) else entry)}


def _is_states(layer: Any) -> bool:
    return isinstance(layer, SlotStates)


def _struct(shape: tuple[int, ...], dtype: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _pop_leaves(leaves: list[Any]) -> Iterator[Any]:
    """Yields leaves from the end of the list, without keeping references to them."""
    while leaves:
        yield leaves.pop()


def _donated(leaves: list[Any]) -> Iterator[Any]:
    for leaf in leaves:
        # The generator continues when the next leaf is requested, after this one was placed.
        yield leaf
        if isinstance(leaf, jax.Array):
            leaf.delete()


def _parts(aval: Any, is_split: bool) -> list[jax.ShapeDtypeStruct]:
    count, shape = (aval.shape[0], aval.shape[1:]) if is_split else (1, aval.shape)
    return [jax.ShapeDtypeStruct(shape, aval.dtype)] * count


def _slices(leaf: Any, is_split: bool) -> Iterator[Any]:
    # Slices in NumPy, because compiled programs reject 4-bit arrays that JAX committed to a CPU (JAX 0.10.2).
    array = np.asarray(leaf)
    return iter(array) if is_split else iter((array,))


def _copied(leaf: Any, dtype: Any, sharding: Any, *, is_split: bool, is_owned: bool) -> Any:
    """Copies a leaf to its sharding and dtype, as `Layers` if split; an owned leaf may be reused without a copy."""
    placed = place_copies(leaf, sharding)
    if placed.dtype != dtype:
        placed = placed.astype(dtype)
    elif not (is_owned or is_split):
        # `device_put` may return the caller's own array, which the caller may delete or donate later.
        placed = jnp.copy(placed)
    return split_layers(placed, True) if is_split else placed
