"""The plain data that crosses package borders, versioned as one ABI.

The major version is part of the entry-point group, so that a plugin built for another major is found but never
imported. The minor version is `STACK_ABI_MINOR` in the plugin's module: a plugin may ask for at most the minor that
this core offers.
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
"""The name of the residuals that an implementation keeps for its own backward pass alone, any pytree of arrays."""


@dataclass(frozen=True)
class QView:
    """What any quantized array shows of itself, through `__stack_qview__()`.

    The logical array is `(value - zero_point) * scale`, each scale repeated over the tile it covers, where value is
    `codebook[qvalue]`, or `qvalue` itself without a codebook.

    Invariants: `qvalue.shape` is the logical shape; `scale.ndim == qvalue.ndim` and
    `qvalue.shape[i] % scale.shape[i] == 0`; `zero_point` is None or has the shape of `scale`; `codebook` is None, or
    float32[levels] and `qvalue` integers, `0 <= qvalue < levels`.

    Attributes:
      abi: (major, minor) that the view was written for.
      scheme: a name for messages, such as "int4/t128".
      codebook: the values that codes stand for where they are not evenly spaced, as in nf4.
    """

    abi: tuple[int, int]
    qvalue: jax.Array
    scale: jax.Array
    zero_point: jax.Array | None
    scheme: str
    codebook: jax.Array | None = None


@dataclass(frozen=True)
class LowRankView:
    """What any weight with adapters shows of itself, through `__stack_low_rank__()`.

    A row x whose adapter is a meets `base + scale[a] * down[a] @ up[a]`, which is never formed:
    y = x base + scale[a] (x down[a]) up[a].

    Invariants, for a base of logical shape [..., d_in, d_out]: `down.shape == (adapters, ..., d_in, rank)`,
    `up.shape == (adapters, ..., rank, d_out)`, `scale.shape == (adapters,)`. The axes "..." are the groups of
    `ops.ragged_dot`, where each group has its own matrices.

    Attributes:
      abi: (major, minor) that the view was written for.
      base: the weight that the adapters share, an array or a quantized array.
      down: of the dtype of the activations, like `up`.
      rows: as `ops.low_rank` takes them: the adapter of each row of the activations, -1 for none; None for adapter 0.
    """

    abi: tuple[int, int]
    base: Any
    down: jax.Array
    up: jax.Array
    scale: jax.Array
    rows: jax.Array | None = None


@dataclass(frozen=True)
class OpCall:
    """One call of an op, as implementations see it before it runs: shapes, dtypes and options, no values.

    Shapes are the ones an implementation receives: under `jax.vmap` with the mapped axis folded into the op's own,
    and on a mesh those of one device, if XLA cannot split the implementation.

    Attributes:
      arrays: `jax.ShapeDtypeStruct`, a quantized array of them, or None, by parameter name.
      options: the other arguments, by parameter name.
      direction: "forward" or "backward".
      forward: of a backward pass, the name of the implementation that ran forward.
      residuals: of a backward pass, the names of what it gets from that.
    """

    op: str
    arrays: Mapping[str, Any]
    options: Mapping[str, Any]
    direction: str = "forward"
    forward: str | None = None
    residuals: tuple[str, ...] = ()


def supports_everything(call: OpCall, chip: Any, config: Any) -> bool | str:
    """The `supports` of an implementation without limits."""
    return True


def _no_space(call: OpCall, chip: Any) -> Iterable[Any]:
    return ()


@dataclass(frozen=True)
class OpImplementation:
    """One way to compute an op.

    Attributes:
      op: the op's name, "attention".
      name: the implementation's name, "reference".
      forward: takes the op's arguments by name except `implementation` and `axes`, `wants`, the names of the residuals
        that the backward pass reads, and `config` if there is a `default`. Returns the result and a mapping of those
        residuals.
      backward: `(arrays, options, outputs, residuals, cotangents, *, wants)`, and `config` if there is a `default`,
        returns gradients by parameter name, at least of the parameters in `wants`. It may follow any forward pass whose
        residuals its `supports` accepts. None leaves the backward pass to others, in the end the op's reference.
      platforms: where it runs, among "cpu", "gpu" and "tpu"; None is everywhere.
      supports: answers True or the reason why not, from the call, the target chip and the config alone.
      default: the config to run a call with, where no tuned table knows a better one; None if it takes no config.
      space: the configs that are worth measuring for a call, of the type of the default.
      residuals: the names of what its forward pass can return: of the op's residuals, and `OWN`.
      is_opaque: XLA cannot split it over devices: it runs on one device's part of the arrays.
      exports: it can be a part of a program that `jax.export` writes.
      priority: among those that support a call the highest wins. The references have 0, so that a negative one runs
        only where it is named. Of equal ones the one that was installed first runs, and a warning names the others.
      before: names of implementations that this one precedes wherever both support a call, whatever their priorities.
    """

    op: str
    name: str
    forward: Callable[..., tuple[Any, Mapping[str, Any]]]
    backward: Callable[..., Mapping[str, Any]] | None = None
    platforms: tuple[str, ...] | None = None
    supports: Callable[[OpCall, Any, Any], bool | str] = supports_everything
    default: Callable[[OpCall, Any], Any] | None = None
    space: Callable[[OpCall, Any], Iterable[Any]] = _no_space
    residuals: tuple[str, ...] = ()
    is_opaque: bool = False
    exports: bool = True
    priority: int = 1
    before: tuple[str, ...] = ()


@dataclass(frozen=True)
class TunedChoice:
    """What a tuned table advises for one direction of a call.

    Attributes:
      implementation: its name, "reference".
      config: of the type of `OpImplementation.default`; None leaves the implementation its default.
      reason: for people: what was measured, and where, "1.31 ms at batch=8, seq=4096".
    """

    implementation: str
    config: Any
    reason: str
