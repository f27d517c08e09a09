"""Mixtures of experts with top-k routing and expert parallelism."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from stack_core import ops
from stack_core.abi.mesh import LogicalAxes, axes_of
from stack_core.ops.building import ACTIVATIONS, gate_product
from stack_train.nn.build import Build
from stack_train.nn.feed_forward import Activation, Facts, Gated, Plain
from stack_train.nn.linear import FloatName
from stack_train.nn.parts import map_parts
from stack_train.nn.quantized import read_weight
from stack_train.nn.residual import Hidden, Rows

__all__ = ["Experts", "Mixture", "Router", "Routing", "route"]

_NORMALIZER_EPSILON = 1e-20  # as in DeepSeek-V3: sigmoid scores may all be 0
_LOAD_ROUNDING = 1e-6  # times the share of an expert; one choice of 2**20 tokens among 128 experts is above 1e-5

_SCORES: Final[Mapping[str, Callable[[jax.Array], jax.Array]]] = {
    "softmax": partial(jax.nn.softmax, axis=-1),
    "sigmoid": jax.nn.sigmoid,
    "sqrt_softplus": lambda logits: jnp.sqrt(jax.nn.softplus(logits)),
}


@dataclass(frozen=True, kw_only=True)
class Router:
    """Settings of the choice and the weights of a token's experts.

    Attributes:
      experts: number of experts.
      active: number of experts per token.
      score: function from logits to scores.
      normalized: divides the weights of a token's experts by their sum.
      scale: factor of the weights.
      groups: number of groups that the experts are divided into.
      kept_groups: number of groups from which a token's experts are chosen.
      group_best: number of a group's best experts whose scores add up to the group's score.
      dtype: dtype of the router's matrix; None uses the model's parameter dtype.
      bias_rate: step of the selection biases, which affect the choice of experts but not the weights. The forward pass
        raises the bias of an expert whose load is below the mean, and lowers the bias of one whose load is above it
        (Wang et al., 2024, arXiv:2408.15664). None uses no bias.
      expert_scales: multiplies the weight of each expert by a learned scale.
      hashed_tokens: size of the vocabulary if a fixed table of tokens chooses the experts, which scores still weigh
        (Roller et al., Hash Layers, 2021, arXiv:2106.04426). None chooses by scores.
    """

    experts: int
    active: int
    score: Literal["softmax", "sigmoid", "sqrt_softplus"] = "softmax"
    normalized: bool = True
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    group_best: int = 2
    dtype: FloatName | None = None
    bias_rate: float | None = None
    expert_scales: bool = False
    hashed_tokens: int | None = None


class Routing(NamedTuple):
    """The experts of each token.

    Attributes:
      weights: weights of the token's experts.
      experts: indices of the token's experts.
      own_experts: the router's own choice, equal to `experts` unless they are replayed.
      scores: scores of all experts.
    """

    weights: Float[Array, "tokens active"]
    experts: Int[Array, "tokens active"]
    own_experts: Int[Array, "tokens active"]
    scores: Float[Array, "tokens experts"]


def route(
    logits: Float[Array, "tokens experts"],
    bias: Float[Array, " experts"] | None,
    router: Router,
    replayed: Int[Array, "tokens active"] | None = None,
    hashed: Int[Array, "tokens active"] | None = None,
) -> Routing:
    """Chooses and weighs the experts of each token. Experts of a table, `hashed`, replace the choice by scores.

    Replayed experts replace the router's choice, but their weights are computed from the router's scores as usual, so
    the router gets gradients. Tokens whose first entry is negative keep the router's choice.

    Source: Ma et al., Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers, 2025
    (arXiv:2510.11370).
    """
    scores = _SCORES[router.score](logits)
    choice = scores if bias is None else scores + bias
    if router.groups > 1:
        grouped = choice.reshape(len(choice), router.groups, -1)
        best = jnp.sum(lax.top_k(grouped, router.group_best)[0], axis=-1)
        kept = jax.nn.one_hot(lax.top_k(best, router.kept_groups)[1], router.groups, dtype=bool).any(axis=1)
        # -inf instead of 0, because a selection bias can make the scores of chosen groups negative.
        choice = jnp.where(kept[:, :, None], grouped, -math.inf).reshape(choice.shape)
    own = lax.top_k(choice, router.active)[1] if hashed is None else hashed
    chosen = own if replayed is None else jnp.where(replayed[:, :1] >= 0, replayed.astype(own.dtype), own)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if router.normalized:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + _NORMALIZER_EPSILON)
    return Routing(weights * router.scale, chosen, own, scores)


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Mixture of experts, y = sum over a token's experts of weight * expert(x); an expert is a `Gated` or a `Plain`.

    Attributes:
      router: choice of experts.
      width: hidden width of each expert.
      gated: uses gated layers as experts and shared expert; otherwise plain layers.
      activation: activation of the gate, or of the plain layer.
      bias: adds biases to the router and to the products of each expert.
      limit, up_offset: options of the gated product; see `ops.gated_linear_unit`.
      shared: hidden width of the shared expert, a layer for every token; 0 omits the shared expert.
      shared_gate: multiplies the shared expert's output by sigmoid(x w).
      scaled_inputs: multiplies the inputs of a token's experts by their weights, instead of their outputs.
      buffer: capacity of a device's receive buffer in expert parallelism, as a multiple of the rows it sends. Excess
        rows are dropped and reported as the fact "dropped". None has room for the rows of all devices.
    """

    router: Router
    width: int
    gated: bool = True
    activation: Activation = "silu"
    bias: bool = False
    limit: float | None = None
    up_offset: float = 0.0
    shared: int = 0
    shared_gate: bool = False
    scaled_inputs: bool = False
    buffer: float | None = None

    def build(self, build: Build) -> "Mixture":
        return Mixture(self, build)


class Mixture(nnx.Module):
    """Module of an `Experts`."""

    def __init__(self, spec: Experts, build: Build) -> None:
        router, embed, width = spec.router, build.embed, spec.width
        self.spec = spec
        self.router = build.linear((embed, router.experts), ("embed", None), bias=spec.bias, dtype=router.dtype)
        wide, axes = (router.experts, embed, width), ("experts", "expert_embed", "mlp")
        self.expert_gate = build.normal(wide, axes) if spec.gated else None
        self.expert_up = build.normal(wide, axes)
        self.expert_down = build.normal(
            (router.experts, width, embed), ("experts", "mlp", "expert_embed"), residual=True
        )
        # `build.full` makes vectors, and these biases have an axis for the experts.
        zeros = partial(build.normal, std=0.0)
        self.expert_gate_bias = zeros((router.experts, width), ("experts", "mlp")) if spec.bias and spec.gated else None
        self.expert_up_bias = zeros((router.experts, width), ("experts", "mlp")) if spec.bias else None
        self.expert_down_bias = zeros((router.experts, embed), ("experts", "expert_embed")) if spec.bias else None
        # float32, because a step of `bias_rate` is small against the bias and would round to nothing in bfloat16.
        bias = build.full(router.experts, None, 0.0, dtype="float32", trained=False)
        self.selection_bias = None if router.bias_rate is None else bias
        # `build.scale` would be sharded like a norm over the residual stream.
        self.expert_scales = build.full(router.experts, None, 1.0) if router.expert_scales else None
        self.table = None if router.hashed_tokens is None else _hash_table(router, build.repeats)
        gated = Gated(width=spec.shared, activation=spec.activation, limit=spec.limit)
        layer = gated if spec.gated else Plain(width=spec.shared, activation=spec.activation, bias=False)
        self.shared = layer.build(build.child()) if spec.shared else None
        self.shared_gate = build.linear((embed, 1), ("embed", None)) if spec.shared_gate else None

    def __call__(self, x: Hidden, rows: Rows) -> tuple[Hidden, Facts]:
        return self.mixed(x, rows)

    def mixed(self, x: Hidden, rows: Rows, routed: Hidden | None = None) -> tuple[Hidden, Facts]:
        """Returns the outputs and facts; `routed` is the router's input if it differs from `x`."""
        counted = jnp.ones(x.shape[:2], bool) if rows.segment_ids is None else rows.segment_ids != 0
        hashed = None if self.table is None or rows.tokens is None else self.table[...].at[rows.tokens].get(mode="clip")
        optional = {"routed": routed, "replayed": rows.experts, "hashed": hashed}
        arrays = self._parameters(x.dtype) | {name: each for name, each in optional.items() if each is not None}
        y, facts = _mixed(self.spec, x, counted, arrays)
        if self.selection_bias is not None and (rate := self.spec.router.bias_rate) is not None:
            excess = lax.stop_gradient(facts["expert_load"]) * self.spec.router.experts - 1
            # Only the sign is used (Wang et al., 2024), so a step moves every bias by the same amount. An expert with
            # exactly its share keeps its bias; programs for other meshes may round its load to either side.
            excess = jnp.where(jnp.abs(excess) < _LOAD_ROUNDING, 0.0, excess)
            self.selection_bias[...] = self.selection_bias[...] - rate * jnp.sign(excess)
        if self.shared is not None:
            shared, _ = self.shared(x, rows)
            y = y + (shared if self.shared_gate is None else shared * jax.nn.sigmoid(self.shared_gate(x)))
        return y, facts

    def _parameters(self, dtype: Any) -> dict[str, Any]:
        """Returns parameters by the names of `_AXES`; float matrices of experts are cast to `dtype`."""
        found = {"router": self.router.kernel[...]}
        names = ("gate", "up", "down") if self.spec.gated else ("up", "down")
        found |= {name: read_weight(getattr(self, f"expert_{name}"), dtype) for name in names}
        if self.router.bias is not None:
            found["router_bias"] = self.router.bias[...]
            found |= {f"{name}_bias": getattr(self, f"expert_{name}_bias")[...] for name in names}
        if self.selection_bias is not None:
            found["selection_bias"] = self.selection_bias[...]
        if self.expert_scales is not None:
            found["expert_scales"] = self.expert_scales[...]
        return found


_AXES: Final[dict[str, tuple[str | None, ...]]] = {
    "router": (None, None),
    "router_bias": (None,),
    "selection_bias": (None,),
    "expert_scales": (None,),
    "routed": ("batch", "seq", "act_embed"),
    "replayed": ("batch", "seq", None),
    "hashed": ("batch", "seq", None),
    "gate": ("experts", "expert_embed", "mlp"),
    "up": ("experts", "expert_embed", "mlp"),
    "down": ("experts", "mlp", "expert_embed"),
    "gate_bias": ("experts", "mlp"),
    "up_bias": ("experts", "mlp"),
    "down_bias": ("experts", None),
}
"""Logical axes of a mixture's parameters within a layer, of a separate input of its router, and of replayed experts."""


def _hash_table(router: Router, repeats: int) -> nnx.Param[jax.Array]:
    """Returns the experts of each token, [repeats, hashed_tokens, active]: adjacent tokens take turns."""
    assert router.hashed_tokens is not None
    turns = jnp.arange(router.hashed_tokens * router.active, dtype=jnp.int32) % router.experts
    table = jnp.broadcast_to(turns.reshape(-1, router.active), (repeats, router.hashed_tokens, router.active))
    return nnx.Param(table, logical_axes=("layers", None, None), trained=False)


def _mixed(spec: Experts, x: Hidden, counted: jax.Array, arrays: Mapping[str, Any]) -> tuple[Hidden, Facts]:
    """Computes the outputs and facts of a mixture; each device processes its own tokens."""
    tokens: LogicalAxes = ("batch", "seq", "act_embed")
    arguments = [(x, tokens), (counted, tokens[:2]), *((array, _AXES[name]) for name, array in arrays.items())]
    scalars = ["balance_loss", "router_z"]
    scalars += ["dropped"] if axes_of("experts") else []
    scalars += ["routing_mismatch"] if "replayed" in arrays else []
    out_axes = (tokens, {"experts": _AXES["replayed"], "expert_load": (None,), **dict.fromkeys(scalars, ())})
    part = partial(_mixed_part, spec, tuple(arrays))
    return map_parts(part, arguments, out_axes, name="a mixture of experts")


def _mixed_part(
    spec: Experts, names: Sequence[str], x: jax.Array, counted: jax.Array, *arrays: Any
) -> tuple[jax.Array, Facts]:
    parameters = dict(zip(names, arrays, strict=True))
    rows = x.reshape(-1, x.shape[-1])
    # float32, because rounded logits can change which experts a token gets.
    routed = parameters.get("routed", x).reshape(rows.shape)
    logits = ops.linear(routed.astype(jnp.float32), parameters["router"].astype(jnp.float32))
    if "router_bias" in parameters:
        logits = logits + parameters["router_bias"].astype(jnp.float32)
    given = {name: parameters[name].reshape(-1, spec.router.active) for name in ("replayed", "hashed") if name in names}
    replayed = given.get("replayed")
    routing = route(logits, parameters.get("selection_bias"), spec.router, **given)
    facts = _statistics(spec.router, logits, routing, counted.reshape(-1), replayed)
    facts["experts"] = routing.experts.reshape(*x.shape[:2], -1)
    # Gathered before the grouped products, which read complete rows of each kernel (fully sharded data parallelism).
    embed_axes = {"gate": 1, "up": 1, "down": 2}
    parameters |= {name: _gathered(parameters[name], axis) for name, axis in embed_axes.items() if name in parameters}
    weights, ones = routing.weights, jnp.ones(routing.weights.shape, x.dtype)
    if "expert_scales" in parameters:
        weights = weights * parameters["expert_scales"].astype(jnp.float32)[routing.experts]
    weights = weights.astype(x.dtype)
    before, after = (weights, ones) if spec.scaled_inputs else (None, weights)
    outputs, dropped = _outputs_of_experts(spec, rows, routing.experts, before, parameters)
    y = jnp.einsum("tkd,tk->td", outputs, after, preferred_element_type=jnp.float32).astype(x.dtype)
    # Devices that split every expert have partial sums, and devices with all tokens have those of their own experts.
    axes = (*axes_of("mlp"), *_axes_with_all_tokens())
    y = lax.psum(y, axes) if axes else y
    return y.reshape(x.shape), facts if dropped is None else {**facts, "dropped": dropped}


def _outputs_of_experts(
    spec: Experts,
    rows: jax.Array,
    chosen: jax.Array,
    weights: jax.Array | None,
    parameters: Mapping[str, Any],
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the outputs of each token's experts, [tokens, active, embed], and the fraction of dropped rows.

    Args:
      weights: factors of the inputs, [tokens, active], or None.
    """
    axis, active = axes_of("experts"), chosen.shape[-1]
    if _axes_with_all_tokens():
        return _local_expert_outputs(spec, rows, chosen, weights, parameters), jnp.zeros(())
    # Rows are sorted by expert for the grouped products, exchanged if experts are split, and put back in order.
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    # Entry i of the flattened choices belongs to token i // active.
    sent = rows[order // active]
    if weights is not None:
        sent = sent * weights.reshape(-1, 1)[order]
    sizes = jnp.bincount(chosen.reshape(-1), length=spec.router.experts)
    if not axis:
        outputs, dropped = _apply_experts(spec, sent, parameters, sizes), None
    else:
        devices = lax.axis_size(axis)
        # No device receives more than the rows of all devices, so a larger buffer would stay empty.
        room = math.ceil(len(sent) * (devices if spec.buffer is None else min(spec.buffer, devices)))
        received = ops.exchange(sent, sizes, axis_name=axis, out_rows=room)
        own_sizes, cut = ops.received_sizes(sizes, axis_name=axis, out_rows=room)
        outputs = _apply_experts(spec, received, parameters, own_sizes)
        outputs = ops.exchange(outputs, sizes, axis_name=axis, out_rows=len(sent), kind="return")
        dropped = _mean_of_devices(cut.astype(jnp.float32)) / len(sent)
    # A scatter inverts the permutation without a second sort.
    places = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)))
    return outputs[places].reshape(*chosen.shape, -1), dropped


def _axes_with_all_tokens() -> tuple[str, ...]:
    """Returns the mesh axes that split the experts but not the tokens, as when an engine serves a mixture."""
    return () if set(axes_of("experts")) & set(axes_of("batch")) else axes_of("experts")


def _local_expert_outputs(
    spec: Experts, rows: jax.Array, chosen: jax.Array, weights: jax.Array | None, parameters: Mapping[str, Any]
) -> jax.Array:
    """Returns the outputs of this device's experts, [tokens, active, embed]; the outputs of other experts are zeros.

    A step of an engine has few tokens. Every device has them, so the sum over the devices is the only communication.
    """
    count, active = parameters["down"].shape[0], chosen.shape[-1]
    own = chosen.reshape(-1) - lax.axis_index(axes_of("experts")) * count
    # Rows of other experts come after all groups, where products are zeros.
    groups = jnp.where((own >= 0) & (own < count), own, count)
    order = jnp.argsort(groups, stable=True)
    sent = rows[order // active]
    if weights is not None:
        sent = sent * weights.reshape(-1, 1)[order]
    outputs = _apply_experts(spec, sent, parameters, jnp.bincount(groups, length=count + 1)[:count])
    places = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)))
    return outputs[places].reshape(*chosen.shape, -1)


def _apply_experts(spec: Experts, x: jax.Array, parameters: Mapping[str, Any], sizes: jax.Array) -> jax.Array:
    """Applies each expert to its group of rows."""

    def product(x: jax.Array, name: str, share: jax.Array | None = None) -> jax.Array:
        bias = parameters.get(f"{name}_bias")
        if bias is None:
            return ops.ragged_dot(x, parameters[name], sizes)
        return ops.ragged_dot(
            x, parameters[name], sizes, bias=bias if share is None else bias * share.astype(bias.dtype)
        )

    if spec.gated:
        hidden = gate_product(
            product(x, "gate").astype(jnp.float32),
            product(x, "up").astype(jnp.float32),
            activation=spec.activation,
            limit=spec.limit,
            up_offset=spec.up_offset,
        )
    else:
        hidden = ACTIVATIONS[spec.activation](product(x, "up").astype(jnp.float32))
    axes = axes_of("mlp")  # the products are summed over these devices, so only the first one adds the bias
    first = (lax.axis_index(axes) == 0).astype(jnp.float32) if axes else None
    return product(hidden.astype(x.dtype), "down", first)


def _statistics(
    router: Router, logits: jax.Array, routing: Routing, counted: jax.Array, replayed: jax.Array | None
) -> Facts:
    """Computes statistics over the tokens of all devices, excluding padding.

    expert_load: fraction of the tokens' choices for each expert. balance_loss: experts * sum of load * mean share of
    the scores, which is 1 if tokens are spread evenly (Fedus et al., Switch Transformers, 2021, arXiv:2101.03961,
    equation 4). router_z: mean of logsumexp(logits)^2 (Zoph et al., ST-MoE, 2022, arXiv:2202.08906, equation 5).
    routing_mismatch: with replayed experts, fraction of these tokens for which the router would choose other ones.
    """
    weight, scores, chosen = counted.astype(jnp.float32), routing.scores, routing.experts
    # The sum of a token's sigmoid scores is not 1.
    shares = scores / jnp.sum(scores, axis=-1, keepdims=True)
    sums = {
        "tokens": jnp.sum(weight),
        "chosen": jnp.zeros(router.experts).at[chosen].add(jnp.broadcast_to(weight[:, None], chosen.shape)),
        "shares": weight @ shares,
        "z": weight @ jnp.square(jax.nn.logsumexp(logits, axis=-1)),
    }
    if replayed is not None:
        is_replayed = jnp.where(replayed[:, 0] >= 0, weight, 0.0)
        differs = jnp.any(jnp.sort(chosen, axis=-1) != jnp.sort(routing.own_experts, axis=-1), axis=-1)
        sums |= {"replayed": jnp.sum(is_replayed), "differing": is_replayed @ differs.astype(jnp.float32)}
    axes = (*axes_of("batch"), *axes_of("seq"))
    sums = lax.psum(sums, axes) if axes else sums
    # A batch of padding counts 0 tokens.
    tokens = jnp.maximum(sums["tokens"], 1)
    load = sums["chosen"] / (tokens * router.active)
    balance = router.experts * jnp.sum(load * sums["shares"]) / tokens
    facts = {"expert_load": load, "balance_loss": balance, "router_z": sums["z"] / tokens}
    if replayed is not None:
        facts["routing_mismatch"] = sums["differing"] / jnp.maximum(sums["replayed"], 1)
    return facts


def _gathered(kernel: Any, axis: int) -> Any:
    """Gathers a kernel's residual axis, which is split over "expert_embed"; its gradient is scattered again."""
    axes = axes_of("expert_embed")
    return lax.all_gather(kernel, axes, axis=axis, tiled=True) if axes else kernel


def _mean_of_devices(x: jax.Array) -> jax.Array:
    axes = (*axes_of("batch"), *axes_of("seq"))
    return lax.pmean(x, axes)
