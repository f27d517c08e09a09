"""Execution of stacked layers: loops, unrolling and rematerialization."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from flax import nnx

from stack_core import ops
from stack_core.chips import target_platform
from stack_train.nn.pipeline import boundary

__all__ = ["RematPolicy", "scan_layers"]

RematPolicy = Literal["none", "full", "dots", "dots_no_batch"]

# Ops are single equations, so the policies for dots see their products only through `seen_into`.
_SAVED = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": ops.seen_into(jax.checkpoint_policies.dots_saveable),
    "dots_no_batch": ops.seen_into(jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
}

_MAX_UNROLLED = 32


def scan_layers(
    body: Callable[[Any, Any, Any, Any], tuple[Any, Any]],
    period: Sequence[nnx.Module],
    carry: Any,
    inputs: Sequence[Any],
    *,
    per_row: Any,
    remat: RematPolicy,
    unroll: bool | None,
    moves: bool,
) -> tuple[Any, list[Any]]:
    """Scans over the repetitions of a period of layers, which are traced once.

    Inside `run_stages`, the layers are the layers of one piece, and `carry` is the output of the previous piece.

    Args:
      body: function (layer, carry, per_row, slice of the layer's inputs) -> (carry, output).
      period: modules with stacked parameters [repeats, ...].
      carry: initial carry.
      inputs: for each module, a pytree of arrays [repeats, ...], or None.
      per_row: arrays [batch, ...] that are the same for all layers.
      remat: values of each layer that are saved for the backward pass. "none": all residuals, without
        `jax.checkpoint`; "dots": matrix products; "dots_no_batch": matrix products without batch axes, which excludes
        attention; "full": only the layer's input. Remaining values are recomputed.
      unroll: compile every layer separately. A loop has to copy each layer's saved values into and out of stacked
        arrays. None unrolls up to 32 layers on a single GPU, where these copies cost more than the compilation.
      moves: keep the updates of variables with the metadata `trained=False`.

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
        run = jax.checkpoint(run, policy=_SAVED[remat], prevent_cse=unroll, static_argnums=0)

    def step(carry: Any, per_layer: Any) -> tuple[Any, list[Any]]:
        outputs = []
        for place, (layer_state, layer_input) in enumerate(zip(*per_layer, strict=True)):
            carry, output = run(place, carry, per_row, (layer_state, layer_input))
            outputs.append(output)
        return carry, outputs

    around = boundary()
    carry = carry if around is None else around.enter(carry)
    carry, results = jax.lax.scan(step, carry, (list(states), list(inputs)), unroll=unroll)
    carry = carry if around is None else around.leave(carry, results)
    # The scan returned new values, so variables that layers updated are written back to the caller's modules.
    for layer, (_, moved) in zip(period, results, strict=True):
        if moved:
            nnx.update(layer, moved)
    return carry, [output for output, _ in results]


def _unrolls(layers: int) -> bool:
    devices = math.prod(jax.sharding.get_abstract_mesh().shape.values())
    return target_platform() == "gpu" and devices == 1 and layers <= _MAX_UNROLLED


def _is_mutable(path: Any, variable: Any) -> bool:
    return isinstance(variable, nnx.Variable) and not variable.get_metadata().get("trained", True)
