"""The plain data that crosses package borders, versioned as one ABI.

The major version is part of the entry-point group, so that a plugin built for another major is found but never
imported. The minor version is `STACK_ABI_MINOR` in the plugin's module: a plugin may ask for at most the minor that
this core offers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import jax

__all__ = [
    "ABI_MAJOR",
    "ABI_MINOR",
    "AUTODIFF",
    "ENTRY_POINT_GROUP",
    "OpCall",
    "OpImplementation",
    "QView",
    "TunedChoice",
    "supports_everything",
]

ABI_MAJOR: Final = 1
ABI_MINOR: Final = 0
ENTRY_POINT_GROUP: Final = f"stack.plugins.v{ABI_MAJOR}"

AUTODIFF: Final = "autodiff"
"""`OpImplementation.vjp` of a function that JAX differentiates by itself, its own `custom_vjp` included."""


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
class OpCall:
    """One call of an op, as `OpImplementation.supports` sees it: shapes, dtypes and options, no values.

    Attributes:
      arrays: `jax.ShapeDtypeStruct`, a quantized array of them, or None, by parameter name.
      options: the other arguments, by parameter name.
      direction: "forward" or "backward".
    """

    op: str
    arrays: Mapping[str, Any]
    options: Mapping[str, Any]
    direction: str = "forward"


def supports_everything(call: OpCall, chip: Any) -> bool | str:
    """The `supports` of an implementation without limits."""
    return True


@dataclass(frozen=True)
class OpImplementation:
    """One way to compute an op.

    Attributes:
      op: the op's name, "attention".
      name: the implementation's name, "reference".
      function: takes the op's arguments except `implementation`, and `config` when `configs` is not empty.
      supports: answers True or the reason why not, from the call and the target chip alone.
      vjp: None leaves the backward pass to others, in the end the op's reference; `AUTODIFF` lets JAX differentiate
        `function`; a callable `(arrays, options, output, cotangent) -> gradients by parameter name`, which takes
        `config` too when `configs` is not empty, can be chosen apart from any forward.
      configs: tunable configurations of one type, best default first; a tuned table may know better ones of that type.
      priority: among those that support a call the highest wins; a tie is an error. The references have 0, so that a
        negative one runs only where it is named.
    """

    op: str
    name: str
    function: Callable[..., Any]
    supports: Callable[[OpCall, Any], bool | str] = supports_everything
    vjp: Callable[..., Mapping[str, Any]] | str | None = None
    configs: tuple[Any, ...] = field(default=())
    priority: int = 1


@dataclass(frozen=True)
class TunedChoice:
    """What a tuned table advises for one direction of a call.

    Attributes:
      implementation: its name, "reference".
      config: of the type of `OpImplementation.configs`; None leaves the implementation its default.
      reason: for people: what was measured, and where, "1.31 ms at batch=8, seq=4096".
    """

    implementation: str
    config: Any
    reason: str
