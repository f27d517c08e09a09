"""Device meshes with named axes, and the rules that map logical axes of arrays to mesh axes.

Arrays carry *logical* axis names, which describe the meaning of an axis ("embed", "mlp"). A `ShardingRules` maps each
to mesh axes. An axis of a parameter or activation is split only if a rule maps it; a rule that cannot be satisfied is
an error.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from pydantic import AfterValidator, Field

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError, ShardingError, nearest

__all__ = [
    "AXES",
    "DEFAULT_RULES",
    "AnyMesh",
    "LogicalAxes",
    "MeshAxes",
    "MeshConfig",
    "ShardingRules",
    "axes_of",
    "check_shardings",
    "constrain",
    "divisors",
    "in_mesh",
    "map_parts",
    "nearest_values",
    "parts_of",
    "use_mesh",
]

AXES: Final = ("data", "fsdp", "tensor", "expert", "context", "stage")
"""The axes of every mesh: data parallelism, FSDP, tensor, expert, context and pipeline parallelism."""

LogicalAxes: TypeAlias = Sequence[str | None]
"""One name per axis of an array; an axis named None is never split."""

AnyMesh: TypeAlias = Mesh | AbstractMesh

MeshAxes: TypeAlias = str | tuple[str, ...] | None
"""The mesh axes that split a logical axis: one, several (major first), or None for no split."""


def _as_tuple(axes: str | Sequence[str] | None) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def _entry(mesh_axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    return mesh_axes if len(mesh_axes) > 1 else next(iter(mesh_axes), None)


@dataclass(frozen=True, init=False)
class ShardingRules:
    """Mapping from each logical axis name to one mesh axis, several mesh axes (major first), or None for no split.

    Invariant: within one array every mesh axis is used at most once, and the size of an axis is a multiple of the
    product of the mesh axes that split it.

    Attributes:
      table: the rules, sorted by logical name.
    """

    table: tuple[tuple[str, tuple[str, ...]], ...]

    def __init__(self, rules: Mapping[str, str | Sequence[str] | None]) -> None:
        table = tuple(sorted((name, _as_tuple(axes)) for name, axes in rules.items()))
        object.__setattr__(self, "table", table)

    def updated(self, rules: Mapping[str, str | Sequence[str] | None]) -> "ShardingRules":
        """Returns these rules with some added or replaced."""
        return ShardingRules({**dict(self.table), **rules})

    def mesh_axes(self, logical_axis: str | None, *, name: str = "array") -> tuple[str, ...]:
        """Returns the mesh axes that split a logical axis.

        Args:
          name: name of the array, for messages.

        Raises:
          ShardingError: the axis has no rule; suggests similar names.
        """
        rules = dict(self.table)
        if logical_axis is None:
            return ()
        if logical_axis not in rules:
            hint = f"{nearest(logical_axis, rules)} Known: {', '.join(rules)}."
            remedy = f"Add mesh.rules.{logical_axis}, or `rules` to the model's family."
            raise ShardingError(f"{name}: no rule for the logical axis {logical_axis!r}.{hint} {remedy}")
        return rules[logical_axis]

    def spec(self, logical_axes: LogicalAxes, mesh: AnyMesh, *, name: str = "array") -> PartitionSpec:
        """Returns the partition spec of an array, one entry per axis; mesh axes of size 1 are included.

        The result does not depend on the sizes of the mesh, which exposes mistakes on a single device too.

        Args:
          name: name of the array, for messages.

        Raises:
          ShardingError: two logical axes map to one mesh axis, a name has no rule, or the mesh lacks a rule's axis.
        """
        entries = [self.mesh_axes(logical_axis, name=name) for logical_axis in logical_axes]
        taken: dict[str, str | None] = {}
        for logical_axis, mesh_axes in zip(logical_axes, entries, strict=True):
            for mesh_axis in mesh_axes:
                if mesh_axis in taken:
                    raise ShardingError(self._collision(name, logical_axes, mesh_axis, taken[mesh_axis], logical_axis))
                if mesh_axis not in mesh.axis_names:
                    raise ShardingError(
                        f"{name}: {logical_axis!r} goes to the mesh axis {mesh_axis!r}; this mesh has "
                        f"{', '.join(mesh.axis_names)}.{nearest(mesh_axis, mesh.axis_names)} Change the rule or mesh."
                    )
                taken[mesh_axis] = logical_axis
        return PartitionSpec(*(_entry(mesh_axes) for mesh_axes in entries))

    def sharding(
        self, mesh: AnyMesh, logical_axes: LogicalAxes, shape: Sequence[int], *, name: str = "array"
    ) -> NamedSharding:
        """Returns the sharding of an array of `shape`.

        Args:
          name: name of the array, for messages.

        Raises:
          ShardingError: as `spec`, or the number of logical axes differs from the rank of `shape`, or a size is not
            divisible. The message names the array, the axis, both sizes and the nearest sizes that fit.
        """
        if len(logical_axes) != len(shape):
            raise ShardingError(
                f"{name}: {len(logical_axes)} logical axes {tuple(logical_axes)} for an array of {len(shape)} axes, "
                f"{tuple(shape)}. Name every axis, or use None for an axis that is never split."
            )
        spec = self.spec(logical_axes, mesh, name=name)
        for index, (logical_axis, size) in enumerate(zip(logical_axes, shape, strict=True)):
            mesh_axes = self.mesh_axes(logical_axis)
            if size % math.prod(mesh.shape[axis] for axis in mesh_axes):
                raise ShardingError(
                    f"{name} {tuple(shape)}: axis {index}, {logical_axis!r}, has size {size}, "
                    f"{_indivisible(size, mesh, mesh_axes)}; mesh.rules.{logical_axis}=null, which does not split it.",
                    logical_axes=[logical_axis],
                )
        return NamedSharding(mesh, spec)

    def tree_shardings(self, mesh: AnyMesh, values: Any, logical_axes: Any) -> Any:
        """Returns the sharding of every leaf of a pytree.

        Args:
          values: pytree of objects with a shape; messages name leaves by their paths.
          logical_axes: pytree of the same structure whose leaves are tuples of logical axes.

        Raises:
          ShardingError: `sharding` fails for some leaves; the message lists all of them.
        """
        problems: list[ShardingError] = []

        def sharding(path: Any, value: Any, axes: LogicalAxes) -> NamedSharding | None:
            try:
                return self.sharding(mesh, axes, value.shape, name=_name(path))
            except ShardingError as error:
                problems.append(error)
                return None

        shardings = jax.tree.map_with_path(sharding, values, logical_axes)
        if problems:
            axes = dict.fromkeys(axis for problem in problems for axis in problem.logical_axes)
            raise ShardingError("\n".join(map(str, problems)), logical_axes=axes)
        return shardings

    def _collision(self, name: str, logical_axes: LogicalAxes, mesh_axis: str, *colliding: str | None) -> str:
        first, second = (f"{axis!r} -> {_entry(self.mesh_axes(axis))!r}" for axis in colliding)
        keys = " or ".join(f"mesh.rules.{axis}" for axis in dict.fromkeys(colliding))
        return (
            f"{name} with the logical axes {tuple(logical_axes)}: {first} and {second} both use the mesh axis "
            f"{mesh_axis!r}, which can split only one axis of an array. Change {keys}; null does not split an axis."
        )


DEFAULT_RULES: Final = ShardingRules(
    {
        # Parameters: `tensor` splits the axis inside a block, `fsdp` the axis of the residual stream.
        "vocab": "tensor",
        "embed": "fsdp",
        "heads": "tensor",
        "kv_heads": "tensor",
        "head_dim": None,
        "mlp": "tensor",
        "experts": "expert",
        # The residual axis of experts. It has another name, because "embed" may also be split over `expert`.
        "expert_embed": "fsdp",
        # The latent axis of an up-projection; the down-projection names "embed", and its latent axis None.
        "latent": "fsdp",
        "layers": "stage",
        "norm": None,
        # Activations: `fsdp` splits the batch as `data` does, and parameters are gathered layer by layer. `expert`
        # splits it too: its devices hold different experts and different tokens.
        "batch": ("data", "fsdp", "expert"),
        "seq": "context",
        # The sequence between blocks (norms, residual sums); ("context", "tensor") is Megatron's sequence parallelism.
        "norm_seq": "context",
        # The batch of an embedding lookup. The rows are split as `embed` is, over `fsdp`, hence without that axis. With
        # "embed": ("fsdp", "expert") it is "data".
        "lookup_batch": ("data", "expert"),
        "act_embed": None,
        "act_heads": "tensor",
        "act_kv_heads": "tensor",
        "act_mlp": "tensor",
        "act_vocab": "tensor",
    }
)
"""Fully sharded data parallelism (ZeRO stage 3) with Megatron's tensor parallelism, for decoder models."""


def _checked_rules(rules: Mapping[str, MeshAxes]) -> dict[str, MeshAxes]:
    """Normalizes single mesh axes to strings and rejects unknown mesh axes."""
    for logical_axis, mesh_axes in rules.items():
        for axis in _as_tuple(mesh_axes):
            if axis not in AXES:
                raise ConfigError(
                    f"mesh.rules.{logical_axis} names the mesh axis {axis!r}.{nearest(axis, AXES)} "
                    f"A mesh has: {', '.join(AXES)}; null does not split the axis."
                )
    return {name: _entry(_as_tuple(mesh_axes)) for name, mesh_axes in rules.items()}


@config
class MeshConfig:
    """The number of devices along each mesh axis, and the sharding rules.

    At most one axis may be -1: it takes all remaining devices.

    Attributes:
      data: size of the data-parallel axis, whose devices hold copies of the model.
      fsdp: size of the axis that splits the batch, and parameters as well (ZeRO stage 3); -1 takes the remaining
        devices.
      tensor: size of the axis of tensor parallelism.
      expert: size of the axis of expert parallelism.
      context: size of the axis that splits the sequence.
      stage: size of the axis of pipeline stages, which splits the layers.
      dcn_data: number of slices that the axis `data` spans, a divisor of its size. Slices communicate over the data
        center's network (DCN). If none of the three is set, TPU slices are spread over `data`, `stage` and `fsdp`,
        in this order, and other devices are one slice.
      dcn_fsdp: number of slices that the axis `fsdp` spans.
      dcn_stage: number of slices that the axis `stage` spans.
      rules: logical axis -> mesh axis, several mesh axes (major first), or None for no split. They override the rules
        of the model's family, which override `DEFAULT_RULES`.
    """

    data: int = 1
    fsdp: int = -1
    tensor: int = 1
    expert: int = 1
    context: int = 1
    stage: int = 1
    dcn_data: Annotated[int, Field(ge=1)] | None = None
    dcn_fsdp: Annotated[int, Field(ge=1)] | None = None
    dcn_stage: Annotated[int, Field(ge=1)] | None = None
    rules: Annotated[Mapping[str, MeshAxes], AfterValidator(_checked_rules)] = Field(default_factory=dict)

    def __post_init__(self) -> None:
        for axis, size in self.sizes.items():
            if size < 1 and size != -1:
                raise ConfigError(f"mesh.{axis} is {size}; expected a number of devices, or -1 for all that are left.")
        rest = [axis for axis, size in self.sizes.items() if size == -1]
        if len(rest) > 1:
            raise ConfigError(f"mesh.{' and mesh.'.join(rest)} are -1; only one axis can take the remaining devices.")

    @property
    def sizes(self) -> dict[str, int]:
        """The configured size of every axis, with -1 unresolved."""
        return {axis: getattr(self, axis) for axis in AXES}


# Part of the key of JAX's caches. Creating a user context invalidates everything that JAX traced before. If a step
# created it while being traced, the step would be traced and compiled twice; hence it is created at import.
in_mesh: Any = jax.make_user_context(None)
"""(mesh, rules) of the surrounding `use_mesh`, or None."""


@contextlib.contextmanager
def use_mesh(mesh: Mesh, rules: ShardingRules = DEFAULT_RULES) -> Iterator[None]:
    """Makes `constrain` act on code traced in this context; it nests, and may be entered inside `jax.jit`.

    A function that `jax.jit` traced under another mesh, other rules, or none, is traced again.
    """
    with in_mesh((mesh, rules)), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        yield


def constrain(x: jax.Array, *logical_axes: str | None, name: str = "constrain") -> jax.Array:
    """Constrains the sharding of `x` by the rules of the surrounding `use_mesh`.

    Returns `x` unchanged outside of `use_mesh` or on one device.

    Args:
      logical_axes: one name, or None, per axis of `x`.
      name: name of the array, for messages.

    Raises:
      ShardingError: as `ShardingRules.sharding`, on one device too.
    """
    if in_mesh.value is None:
        return x
    mesh, rules = in_mesh.value
    # Checked on one device, too: a shape that a mesh could not split fails on the laptop, not on the cluster.
    sharding = rules.sharding(mesh, logical_axes, x.shape, name=name)
    if mesh.size == 1:
        return x
    inside = jax.sharding.get_abstract_mesh()
    if inside.manual_axes:  # axes that a surrounding `jax.shard_map` has split already
        sharding = NamedSharding(inside, _without(sharding.spec, inside.manual_axes))
    return jax.lax.with_sharding_constraint(x, sharding)


def parts_of(logical_axis: str) -> int:
    """Returns the number of shards of a logical axis in the surrounding `use_mesh`; 1 outside, or without a rule."""
    return 1 if in_mesh.value is None else math.prod(in_mesh.value[0].shape[axis] for axis in axes_of(logical_axis))


def axes_of(logical_axis: str) -> tuple[str, ...]:
    """Returns the mesh axes of size > 1 that split a logical axis in the surrounding `use_mesh`."""
    if in_mesh.value is None:
        return ()
    mesh, rules = in_mesh.value
    return tuple(axis for axis in dict(rules.table).get(logical_axis, ()) if mesh.shape[axis] > 1)


def map_parts(
    function: Callable[..., Any], arguments: Sequence[tuple[Any, LogicalAxes]], out_axes: Any, *, name: str
) -> Any:
    """Calls a function on each device of the surrounding `use_mesh` with the device's shards of the arrays.

    Inside, collectives take the axes of `axes_of`. Outside of a mesh, or on one device, the function gets the full
    arrays.

    Args:
      arguments: arrays, quantized or not, with the logical axes by which they are split.
      out_axes: logical axes of each returned array, in the structure of the result.
      name: name of the function, for messages.

    Raises:
      ShardingError: the mesh does not divide an argument.
    """
    if in_mesh.value is None or in_mesh.value[0].size == 1:
        return function(*(array for array, _ in arguments))
    mesh, rules = in_mesh.value
    for array, axes in arguments:
        rules.sharding(mesh, axes, array.shape, name=name)  # raises if the mesh does not divide it
    in_specs = tuple(_split_axes(axes) for _, axes in arguments)
    out_specs = jax.tree.map(_split_axes, out_axes, is_leaf=_is_axes)
    # Inside of another shard_map, only the remaining axes become manual and the mesh comes from the context.
    manual = jax.sharding.get_abstract_mesh().manual_axes
    around: dict[str, Any] = {"axis_names": set(mesh.axis_names) - set(manual)} if manual else {"mesh": mesh}
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, **around)(*(array for array, _ in arguments))


def _without(spec: PartitionSpec, axes: Sequence[str]) -> PartitionSpec:
    return PartitionSpec(*(_entry(tuple(axis for axis in _as_tuple(entry) if axis not in axes)) for entry in spec))


def _split_axes(axes: LogicalAxes) -> PartitionSpec:
    """Returns a spec without axes of size 1: naming one would make the array vary over it."""
    return PartitionSpec(*(axes_of(axis) or None if axis else None for axis in axes))


def _is_axes(node: Any) -> bool:
    return isinstance(node, tuple) and all(axis is None or isinstance(axis, str) for axis in node)


def check_shardings(values: Any, expected: Any) -> None:
    """Checks that every leaf of a pytree has the expected sharding.

    Args:
      values: pytree of arrays.
      expected: pytree of shardings with the same structure.

    Raises:
      ShardingError: some leaves have another sharding; names each with both shardings.
    """
    problems = []

    def check(path: Any, value: jax.Array, expected_sharding: jax.sharding.Sharding) -> None:
        if not value.sharding.is_equivalent_to(expected_sharding, value.ndim):
            problems.append(
                f"{_name(path)} {value.shape} should lie as {expected_sharding}, but lies as {value.sharding}."
            )

    jax.tree.map_with_path(check, values, expected)
    if problems:
        raise ShardingError("\n".join([*problems, "Place each with jax.device_put, or jax.jit's out_shardings."]))


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _indivisible(size: int, mesh: AnyMesh, mesh_axes: Sequence[str]) -> str:
    """Explains why the mesh does not divide a size, with the nearest sizes and mesh sizes that fit."""
    mesh_axes = [axis for axis in mesh_axes if mesh.shape[axis] > 1]
    parts = math.prod(mesh.shape[axis] for axis in mesh_axes)
    product = " x ".join(f"mesh.{axis}={mesh.shape[axis]}" for axis in mesh_axes)
    # The nearest legal sizes: of the array, then of each mesh axis with the others unchanged.
    below = size - size % parts
    remedies = [f"size {' or '.join(str(legal) for legal in (below, below + parts) if legal)}"]
    for axis in mesh_axes:
        others = parts // mesh.shape[axis]
        if size % others == 0:
            legal = divisors(math.gcd(size, mesh.size) // others)
            remedies.append(f"mesh.{axis}={' or '.join(map(str, nearest_values(legal, mesh.shape[axis])))}")
    return f"which is not a multiple of {parts} ({product}). These would fit: {'; '.join(remedies)}"


def divisors(number: int) -> list[int]:
    """Returns all divisors of a positive number in increasing order."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def nearest_values(legal: Sequence[int], target: int) -> list[int]:
    """Returns the nearest legal values below and above."""
    index = int(np.searchsorted(legal, target))
    return list(legal[max(index - 1, 0) : index + 1])
