"""Sharding of calls whose implementation XLA cannot partition: each device runs the implementation on its shard.

The caller names the logical axes of operands (`axes=`), and the rules of the surrounding `use_mesh` map them to mesh
axes. Results are combined by the axes of the op: partial sums are added, and a gradient is summed over the devices that
contribute to it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from stack_core.abi.errors import ShapeError
from stack_core.abi.mesh import in_mesh
from stack_core.ops.dispatch.manual_axes import varying
from stack_core.ops.dispatch.op import OpAxes, symbols

__all__ = ["LogicalNames", "Split", "free_devices", "like", "split_of"]

LogicalNames = Mapping[str, Sequence[str | None]]
"""Logical axis names of operands, by parameter name; None for an axis that is never sharded."""


@dataclass(frozen=True)
class Split:
    """Assignment of mesh axes to the axes of an op.

    Attributes:
      places: mesh axes by name of the op's axis.
      free: mesh axes that are not manual in a surrounding `jax.shard_map`.
      leading: number of axes that "..." stands for.
      dropped: messages about axes that are not split despite their rule, each with the reason.
    """

    places: Mapping[str, tuple[str, ...]]
    free: frozenset[str]
    leading: int
    dropped: tuple[str, ...] = ()

    def spec(self, axes: str, shape: Sequence[int] | None = None) -> PartitionSpec:
        """Returns the PartitionSpec of an array with these axes; axes of size 1 are broadcast and never split."""
        return PartitionSpec(*(entry or None for entry in self._entries(axes, shape)))

    def part(self, axes: str, struct: Any) -> jax.ShapeDtypeStruct:
        """Returns shape and dtype of one device's shard of an array."""
        mesh, entries = jax.sharding.get_abstract_mesh(), self._entries(axes, struct.shape)
        parts = (math.prod(mesh.shape[name] for name in entry) for entry in entries)
        sizes = tuple(size // of_one for size, of_one in zip(struct.shape, parts, strict=True))
        return jax.ShapeDtypeStruct(sizes, struct.dtype)

    def _entries(self, axes: str, shape: Sequence[int] | None) -> list[tuple[str, ...]]:
        names = symbols(axes, len(axes.split()) - 1 + self.leading if "..." in axes else 0)
        sizes = [0] * len(names) if shape is None else shape
        return [() if size == 1 else self.places.get(name, ()) for name, size in zip(names, sizes, strict=True)]

    def run(
        self, function: Callable[..., Sequence[Any]], arrays: Sequence[Any], axes: Sequence[str], results: Sequence[Any]
    ) -> Sequence[Any]:
        """Runs `function` on each device's shards of the arrays.

        Args:
          axes: axes of each array.
          results: axes of each result, and its global shape if an axis may have size 1.
        """
        specs = tuple(self.spec(of_one, x.shape) for of_one, x in zip(axes, arrays, strict=True))
        outs = tuple(self.spec(of_one, shape) for of_one, shape in results)
        used = [{name for entry in self._entries(*result) for name in entry} for result in results]
        # All mesh axes of the call. A result without one of them is a partial sum over its devices, hence the psum.
        everywhere = {name for entry in self.places.values() for name in entry}

        def local(*arrays: Any) -> tuple[Any, ...]:
            found = []
            for result, own in zip(function(*arrays), used, strict=True):
                missing = tuple(sorted(everywhere - own))
                found.append(lax.psum(result, missing) if missing else result)
            return tuple(found)

        mesh = jax.sharding.get_abstract_mesh()
        # With Explicit axes, shard_map requires the shardings of in_specs; with Auto axes, XLA inserts the transfers.
        if AxisType.Explicit in mesh.axis_types:
            arrays = [jax.sharding.reshard(x, spec) for x, spec in zip(arrays, specs, strict=True)]
        # Variance is checked only inside of another shard_map whose arrays vary over its axes.
        checked = any(map(varying, arrays))
        mapped = jax.shard_map(local, axis_names=set(self.free), in_specs=specs, out_specs=outs, check_vma=checked)
        return mapped(*arrays)


def like(array: Any, other: Any) -> Any:
    """Reshards an array as `other` on a mesh with Explicit axes; otherwise returns it unchanged."""
    if AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
        return array
    return jax.sharding.reshard(array, jax.typeof(other).sharding.spec)


def free_devices() -> int:
    """Returns the number of devices that share a call, not counting the manual axes of a `jax.shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    here = math.prod(mesh.shape[name] for name in _free(mesh))
    return max(here, in_mesh.value[0].size) if in_mesh.value is not None and not mesh.manual_axes else here


def _free(mesh: Any) -> frozenset[str]:
    if mesh.empty:
        return frozenset()
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in types if kind != AxisType.Manual)


def split_of(
    op: str, found: OpAxes, operands: Mapping[str, Any], leaves: Sequence[Any], axes: LogicalNames | None
) -> Split | str:
    """Returns how a call is split over devices, or the reason why it cannot be split.

    Raises:
      ShapeError: `axes` names an unknown parameter, or the wrong number of axes of a parameter.
    """
    if axes is None:
        return "XLA cannot partition it over devices, and the call does not name the axes of its operands: pass axes="
    by_leaf = found.of_leaves(operands)
    if in_mesh.value is None:
        return "XLA cannot partition it over devices, and no surrounding use_mesh has rules to split its operands"
    if None in by_leaf:
        return "XLA cannot partition it over devices, and a quantized operand cannot be split"
    mesh, (_, rules) = jax.sharding.get_abstract_mesh(), in_mesh.value
    free, table = _free(mesh), dict(rules.table)
    sizes, leading = _sizes(by_leaf, leaves)
    places: dict[str, tuple[str, ...]] = {}
    dropped: list[str] = []
    for name, logical in _logical(op, found, operands, axes).items():
        mesh_axes = tuple(axis for axis in table.get(logical, ()) if axis in free and mesh.shape[axis] > 1)
        parts = math.prod(mesh.shape[axis] for axis in mesh_axes)
        if name in found.whole or not mesh_axes:
            continue
        if sizes[name] % parts:
            dropped.append(f"{logical!r} is not split: {sizes[name]} is not a multiple of {parts}")
        # One mesh axis splits one axis of the op, unless the op requires both to be split alike.
        elif any(
            set(mesh_axes) & set(others) for other, others in places.items() if not _may_share(found, name, other)
        ):
            dropped.append(f"{logical!r} is not split: another axis is split over {' and '.join(mesh_axes)}")
        else:
            places[name] = mesh_axes
    # Axes such as the heads of query and key are split alike or not at all.
    for one, other in found.together:
        if places.get(one) != places.get(other):
            dropped += [
                f"{name!r} is not split: {one} and {other} can only be split together"
                for name in (one, other)
                if name in places
            ]
            places = {name: at for name, at in places.items() if name not in (one, other)}
    return Split(places, free, leading, tuple(dropped))


def _sizes(axes: Sequence[str | None], leaves: Sequence[Any]) -> tuple[dict[str, int], int]:
    """Returns the size of each axis, and the number of axes that "..." stands for."""
    sizes: dict[str, int] = {}
    leading = 0
    for of_one, leaf in zip(axes, leaves, strict=True):
        names = symbols(of_one or "", len(leaf.shape))
        leading = max(leading, sum(name.startswith("...") for name in names))
        for name, size in zip(names, leaf.shape, strict=True):
            sizes[name] = max(size, sizes.get(name, 1))
    return sizes, leading


def _may_share(found: OpAxes, name: str, other: str) -> bool:
    return any({name, other} == set(pair) for pair in found.together)


def _logical(op: str, found: OpAxes, operands: Mapping[str, Any], axes: LogicalNames) -> dict[str, str]:
    """Returns the logical names of the op's axes; the first operand that names an axis wins."""
    logical: dict[str, str] = {}
    for parameter, names in axes.items():
        array = operands.get(parameter)
        of_one = found.operands.get(parameter)
        if array is None and of_one is not None:
            continue
        if array is None or not isinstance(of_one, str) or len(names) != len(array.shape):
            arrays = ", ".join(name for name, x in found.operands.items() if isinstance(x, str))
            raise ShapeError(
                f"{op}: axes names {tuple(names)} for {parameter!r}; expected one name or None for each axis of a "
                f"parameter that is an array: {arrays}."
            )
        for symbol, name in zip(symbols(of_one, len(array.shape)), names, strict=True):
            if name is not None:
                logical.setdefault(symbol, name)
    return logical
