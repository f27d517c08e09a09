"""Execution of stacked layers: loops, unrolling and rematerialization."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, get_args

import jax
from flax import nnx
from jax.ad_checkpoint import Offloadable, checkpoint_name

from stack_core import ops
from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_core.chips import target_platform
from stack_train.nn.boundary import auxiliary_name, boundary

__all__ = ["NamedRemat", "RematPolicy", "ValueName", "check_names", "named", "scan_layers"]

RematPolicy = Literal["none", "full", "dots", "dots_no_batch"]
ValueName = Literal["layer_input", "query", "key", "value", "attention", "attention_output", "hidden"]
"""Values of a decoder layer, in the order of their computation.

    layer_input        the residual stream before the layer
    query, key, value  operands of attention, after norms and rotation
    attention          the result of attention, with what its backward pass needs of the forward pass
    attention_output   the output of the layer that mixes tokens
    hidden             the hidden activations of a feed-forward layer, with what the backward pass needs of them
"""

_OPS: Mapping[ValueName, tuple[str, ...]] = {
    "attention": ("attention", "ring_attention"),
    "hidden": ("gated_linear_unit",),
}
"""Ops whose results are these values. If only the values were kept, the backward pass would repeat the op for its
residuals."""


@config
class NamedRemat:
    """Names of the values of each layer that the backward pass reads; it recomputes everything else.

    Attributes:
      save: values that stay in the device's memory.
      offload: values that are copied to the host's memory in the forward pass and back in the backward pass.
    """

    save: tuple[ValueName, ...] = ()
    offload: tuple[ValueName, ...] = ()

    def __post_init__(self) -> None:
        if not (self.save or self.offload):
            raise ConfigError(
                f"remat keeps no value. Name some in save or offload ({', '.join(get_args(ValueName))}), or set "
                "model.remat to full."
            )
        if both := set(self.save) & set(self.offload):
            raise ConfigError(f"remat has {', '.join(sorted(both))} in save and in offload. Remove it from one.")

    @property
    def names(self) -> tuple[str, ...]:
        """All kept values."""
        return self.save + self.offload


_seen: ContextVar[set[str] | None] = ContextVar("seen", default=None)


def named(x: jax.Array, name: ValueName, *, by_op: bool = False) -> jax.Array:
    """Names a value for `NamedRemat`. Outside of `check_names` it does nothing.

    Args:
      by_op: the value is the result of the op in `_OPS`, and kept with the op's residuals.
    """
    if (seen := _seen.get()) is None:
        return x
    seen.add(name)
    return x if by_op else checkpoint_name(x, name)


@contextmanager
def check_names(remat: RematPolicy | NamedRemat) -> Iterator[None]:
    """Raises a ConfigError at the end if a layer that was traced inside has none of the values that `remat` names."""
    if isinstance(remat, str):
        yield
        return
    seen = set[str]()
    token = _seen.set(seen)
    try:
        yield
    finally:
        _seen.reset(token)
    if missing := [name for name in remat.names if name not in seen]:
        raise ConfigError(
            f"model.remat names {', '.join(missing)}, which no layer of this model has. It has: "
            f"{', '.join(name for name in get_args(ValueName) if name in seen)}."
        )


# Ops are single equations, so the policies for dots see their products only through `seen_into`.
_SAVED = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": ops.seen_into(jax.checkpoint_policies.dots_saveable),
    "dots_no_batch": ops.seen_into(jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
}

_MAX_UNROLLED = 32


def scan_layers(  # noqa: PLR0913  each is an option of the loop
    body: Callable[[Any, Any, Any, Any], tuple[Any, Any]],
    period: Sequence[nnx.Module],
    carry: Any,
    inputs: Sequence[Any],
    *,
    per_row: Any,
    remat: RematPolicy | NamedRemat,
    unroll: bool | None,
    moves: bool,
    staged: bool = True,
) -> tuple[Any, list[Any]]:
    """Scans over the repetitions of a period of layers, which are traced once.

    Inside `run_stages`, the layers are the layers of one piece, and `carry` is the output of the previous piece.
    The outputs belong to all layers.

    Args:
      body: function (layer, carry, per_row, slice of the layer's inputs) -> (carry, output).
      period: modules with stacked parameters [repeats, ...].
      carry: initial carry.
      inputs: for each module, a pytree of arrays [repeats, ...], or None.
      per_row: arrays [batch, ...] that are the same for all layers.
      remat: values of each layer that are saved for the backward pass. "none": all residuals, without
        `jax.checkpoint`; "dots": matrix products; "dots_no_batch": matrix products without batch axes, which excludes
        attention; "full": only the layer's input; a `NamedRemat`: values by name. Remaining values are recomputed.
      unroll: compile every layer separately. A loop has to copy each layer's saved values into and out of stacked
        arrays. None unrolls up to 32 layers on a single GPU, where these copies cost more than the compilation.
      moves: keep the updates of variables with the metadata `trained=False`.
      staged: pipeline stages divide these layers; otherwise every stage computes all of them.

    Returns:
      The last carry, and each module's outputs stacked [repeats, ...].
    """
    if unroll is None:
        unroll = _unrolls(jax.tree.leaves(nnx.state(period[0]))[0].shape[0] * len(period))
    # A scan carries arrays, not modules: the graph is static, and the state is split off and merged per layer.
    graphs, states = zip(*(nnx.split(layer) for layer in period), strict=True)

    def run(place: int, carry: Any, per_row: Any, per_layer: Any) -> tuple[Any, Any]:
        layer_state, layer_input = per_layer
        layer = nnx.merge(graphs[place], layer_state)
        carry, output = body(layer, carry, per_row, layer_input)
        return carry, (output, nnx.state(layer, _is_mutable) if moves else None)

    if remat != "none":
        # Without a loop, XLA's common subexpression elimination would merge the recomputation with the forward pass.
        run = jax.checkpoint(run, policy=_policy(remat), prevent_cse=unroll, static_argnums=0)

    def step(carry: Any, per_layer: Any) -> tuple[Any, list[Any]]:
        outputs = []
        for place, (layer_state, layer_input) in enumerate(zip(*per_layer, strict=True)):
            carry, output = run(place, carry, per_row, (layer_state, layer_input))
            outputs.append(output)
        return carry, outputs

    around = boundary() if staged else None
    model = "" if around is None else auxiliary_name(period[0])
    carry = carry if around is None else around.enter(model, carry, (list(inputs), per_row))
    carry, results = jax.lax.scan(step, carry, (list(states), list(inputs)), unroll=unroll)
    outputs = [output for output, _ in results]
    carry, outputs = (carry, outputs) if around is None else around.leave(model, carry, outputs)
    # The scan returned new values, so variables that layers updated are written back to the caller's modules.
    for layer, (_, moved) in zip(period, results, strict=True):
        if moved:
            nnx.update(layer, moved)
    return carry, outputs


def _policy(remat: RematPolicy | NamedRemat) -> Callable[..., Any]:
    if isinstance(remat, str):
        return _SAVED[remat]
    names = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(remat.save),
        names_which_can_be_offloaded=list(remat.offload),
        offload_src="device",
        offload_dst="pinned_host",
    )
    offloaded = Offloadable(src="device", dst="pinned_host")
    kept = [name for name in _OPS if name in remat.names]
    decisions = {op: True if name in remat.save else offloaded for name in kept for op in _OPS[name]}
    return ops.decided_by_op(decisions, names)


def _unrolls(layers: int) -> bool:
    devices = math.prod(jax.sharding.get_abstract_mesh().shape.values())
    return target_platform() == "gpu" and devices == 1 and layers <= _MAX_UNROLLED


def _is_mutable(path: Any, variable: Any) -> bool:
    return isinstance(variable, nnx.Variable) and not variable.get_metadata().get("trained", True)
