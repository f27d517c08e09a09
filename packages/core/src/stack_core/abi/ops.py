"""The data types that cross package boundaries in calls of ops, versioned as one ABI.

The major version is part of the entry-point group: a plugin built for another major is found but never imported. The
minor version is `STACK_ABI_MINOR` in the plugin's module: a plugin may require at most the minor that this core offers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import jax

__all__ = [
    "ABI_MAJOR",
    "ABI_MINOR",
    "ENTRY_POINT_GROUP",
    "OWN",
    "LowRankView",
    "OpCall",
    "OpImplementation",
    "QView",
    "TunedChoice",
    "supports_everything",
]

ABI_MAJOR: Final = 1
ABI_MINOR: Final = 0
ENTRY_POINT_GROUP: Final = f"stack.plugins.v{ABI_MAJOR}"

OWN: Final = "own"
"""The name of private residuals, any pytree of arrays, which only the implementation's own backward pass reads."""


@dataclass(frozen=True)
class QView:
    """The canonical view of a quantized array, returned by its method `__stack_qview__()`.

    The logical array is `(value - zero_point) * scale`, where each scale is repeated over the tile it covers and value
    is `codebook[qvalue]`, or `qvalue` itself without a codebook.

    Invariants: `qvalue.shape` is the logical shape; `scale.ndim == qvalue.ndim` and
    `qvalue.shape[i] % scale.shape[i] == 0`; `zero_point` is None or has the shape of `scale`; `codebook` is None, or
    float32[levels] with integers `0 <= qvalue < levels`.

    Attributes:
      abi: (major, minor) that the view was written for.
      qvalue: quantized values, or codes if there is a codebook.
      scale: one scale per tile.
      zero_point: one zero point per tile, or None for symmetric quantization.
      scheme: name for messages, such as "int4/t128".
      codebook: values of the codes if they are not evenly spaced, as in nf4.
    """

    abi: tuple[int, int]
    qvalue: jax.Array
    scale: jax.Array
    zero_point: jax.Array | None
    scheme: str
    codebook: jax.Array | None = None


@dataclass(frozen=True)
class LowRankView:
    """The canonical view of a weight with adapters, returned by its method `__stack_low_rank__()`.

    A row x with adapter a is multiplied by `base + scale[a] * down[a] @ up[a]`, which is never materialized:
    y = x base + scale[a] (x down[a]) up[a].

    Invariants, for a base of logical shape [..., d_in, d_out]: `down.shape == (adapters, ..., d_in, rank)`,
    `up.shape == (adapters, ..., rank, d_out)`, `scale.shape == (adapters,)`. The axes "..." are the groups of
    `ops.ragged_dot`, where each group has its own matrices.

    Attributes:
      abi: (major, minor) that the view was written for.
      base: weight shared by the adapters, an array or a quantized array.
      down: down-projections, in the dtype of the activations.
      up: up-projections, in the dtype of the activations.
      scale: factor of each adapter's product.
      rows: adapter of each row of the activations, -1 for no adapter, as in `ops.low_rank`; None selects adapter 0.
    """

    abi: tuple[int, int]
    base: Any
    down: jax.Array
    up: jax.Array
    scale: jax.Array
    rows: jax.Array | None = None


@dataclass(frozen=True)
class OpCall:
    """One call of an op before it runs: shapes, dtypes and options, without values.

    Shapes are as the implementation receives them. Under `jax.vmap` the mapped axis is folded into the op's own axes.
    On a mesh the shapes are per device if XLA cannot split the implementation.

    Attributes:
      op: name of the op.
      arrays: `jax.ShapeDtypeStruct`, a quantized array of them, or None, by parameter name.
      options: other arguments, by parameter name.
      direction: "forward" or "backward".
      forward: in a backward call, the name of the forward implementation.
      residuals: in a backward call, the names of the residuals that the forward implementation provides.
    """

    op: str
    arrays: Mapping[str, Any]
    options: Mapping[str, Any]
    direction: str = "forward"
    forward: str | None = None
    residuals: tuple[str, ...] = ()


def supports_everything(call: OpCall, chip: Any, config: Any) -> bool | str:
    """Accepts every call; the `supports` of implementations without limits."""
    return True


@dataclass(frozen=True)
class OpImplementation:
    """One implementation of an op.

    Attributes:
      op: name of the op, "attention".
      name: name of the implementation, "reference".
      forward: takes the op's arguments by name except `implementation` and `axes`; `requested`, the names of the
        residuals that the backward pass reads; and `config` if there is a `default`. Returns the result and a mapping
        of those residuals.
      backward: `(arrays, options, outputs, residuals, cotangents, *, requested)`, and `config` if there is a `default`.
        Returns gradients by parameter name, at least for the parameters in `requested`. It may follow any forward pass
        whose residuals its `supports` accepts. None leaves the backward pass to another implementation, in the end to
        the op's reference.
      platforms: supported platforms, among "cpu", "gpu" and "tpu"; None means all.
      supports: returns True or the reason why not, from the call, the target chip and the config only.
      default: returns the config of a call for which no tuned table has a better one; None if there is no config.
      space: returns the configs worth measuring for a call, of the type of the default.
      residuals: names of the residuals that the forward pass can return, among the op's residuals and `OWN`.
      is_opaque: whether XLA cannot split it over devices; it then runs on one device's shards of the arrays.
      exports: whether it can be part of a program that `jax.export` writes.
      priority: the implementation with the highest priority that supports a call is chosen. References have 0; an
        implementation with a negative priority runs only if it is named. Among equal priorities the first installed
        implementation runs, with a warning.
      before: names of implementations that this one precedes if both support a call, regardless of priority.
    """

    op: str
    name: str
    forward: Callable[..., tuple[Any, Mapping[str, Any]]]
    backward: Callable[..., Mapping[str, Any]] | None = None
    platforms: tuple[str, ...] | None = None
    supports: Callable[[OpCall, Any, Any], bool | str] = supports_everything
    default: Callable[[OpCall, Any], Any] | None = None
    space: Callable[[OpCall, Any], Iterable[Any]] = lambda call, chip: ()
    residuals: tuple[str, ...] = ()
    is_opaque: bool = False
    exports: bool = True
    priority: int = 1
    before: tuple[str, ...] = ()


@dataclass(frozen=True)
class TunedChoice:
    """A tuned table's recommendation for one direction of a call.

    Attributes:
      implementation: name of the implementation, "reference".
      config: config of the type of `OpImplementation.default`; None selects the implementation's default.
      reason: the measurement behind the choice, for people: "1.31 ms at batch=8, seq=4096".
    """

    implementation: str
    config: Any
    reason: str
