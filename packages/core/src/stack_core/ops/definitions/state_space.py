"""The selective state space recurrence of Mamba-2."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from stack_core.abi.errors import ShapeError
from stack_core.abi.ops import OpCall
from stack_core.ops.dispatch.contract import accurate_dtype
from stack_core.ops.dispatch.dispatch import dispatch
from stack_core.ops.dispatch.manual_axes import vary_alike
from stack_core.ops.dispatch.op import Op, OpAxes
from stack_core.ops.dispatch.request import Implementation
from stack_core.ops.dispatch.splitting import LogicalNames
from stack_core.ops.dispatch.symbolic import is_symbolic
from stack_core.ops.references.decays import decays_between
from stack_core.ops.references.recurrent_operands import check_operands, fill_operands

__all__ = ["OP", "REFERENCE", "state_space"]

_CHUNK_TOKENS = 64

# By default, a TPU rounds fp32 operands to bf16: the state would lose precision at every chunk.
_product = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def state_space(
    query: Float[Array, "batch seq groups key_dim"],
    key: Float[Array, "batch seq groups key_dim"],
    value: Float[Array, "batch seq heads value_dim"],
    *,
    decay: Float[Array, "batch seq heads"] | None,
    beta: Float[Array, "batch seq heads"] | None,
    initial_state: Float[Array, "batch heads key_dim value_dim"] | None = None,
    implementation: Implementation = None,
    axes: LogicalNames | None = None,
) -> tuple[Float[Array, "batch seq heads value_dim"], Float[Array, "batch heads key_dim value_dim"]]:
    """Computes the selective state space recurrence of Mamba-2, a decaying state that sums values by key.

        S_t = exp(g_t) S_(t-1) + b_t k_t v_t^T
        o_t = S_t^T q_t

    g is `decay`, b is `beta`, S_0 is `initial_state`. In Mamba-2's notation, q is C, k is B, v is x, b is the step
    size dt and g is dt A. With as many groups as heads, a fixed g per head and b = 1, it is lightning attention (Qin et
    al., 2024, arXiv:2401.04658). The state and all arithmetic are in fp32. Unlike in `linear_attention`, a token does
    not overwrite the value that is stored at its key.

    Args:
      query: q, [batch, seq, groups, key_dim]; each group is shared by heads / groups adjacent heads.
      key: k, like `query`.
      value: v, [batch, seq, heads, value_dim], of the dtype of `query`.
      decay: g, [batch, seq, heads], natural logarithm of the decay factor, at most 0. 0 keeps the state, -inf clears it
        before the token. None means 0 for all tokens.
      beta: b, [batch, seq, heads], factor of the values. None means 1 for all tokens. `decay` and `beta` may have any
        floating dtype.
      initial_state: S_0, fp32[batch, heads, key_dim, value_dim]; None means 0.
      implementation: implementation name, or several in order of preference; None lets core choose.
      axes: logical axis names of the arrays, as in `linear`; used to shard implementations that XLA cannot partition.

    Returns:
      (o, S_seq): [batch, seq, heads, value_dim] of the dtype of `value`, and the fp32 state after the last token, to
      be passed as `initial_state` with the next tokens. NaN and infinity in a key, value or beta may also reach the
      outputs of a few dozen tokens before it.

    Raises:
      ShapeError: mismatched sizes; the message names the argument and the axis.
      ArgumentError: an array that is not floating, operands of different dtypes, or a state that is not fp32.
      UnsupportedOp: no implementation supports the call, or no requested implementation does.

    Source: Dao and Gu, Transformers are SSMs, 2024 (arXiv:2405.21060), equations 1 and 16, with the state transposed.
    """
    operands = {
        "query": query,
        "key": key,
        "value": value,
        "decay": decay,
        "beta": beta,
        "initial_state": initial_state,
    }
    sizes = check_operands("state_space", operands, key_heads="groups")
    if sizes["heads"] % sizes["groups"]:
        raise ShapeError(
            f"state_space: value has {sizes['heads']} heads; expected a multiple of the {sizes['groups']} groups of "
            "query and key."
        )
    return dispatch(OP, fill_operands(operands), {}, implementation, axes)


def _reference(
    query: Any, key: Any, value: Any, *, decay: Any, beta: Any, initial_state: Any, requested: Any
) -> tuple[Any, dict[str, Any]]:
    """Scans over chunks of tokens. The gradient stores one state per chunk.

    In a chunk that begins with the state S, with D_ti = exp(g_(i+1) + ... + g_t) and d_t = exp(g_1 + ... + g_t),

        O = (D * Q K^T) b V + d Q S
        S' = d_C S + (D_C * K)^T b V
    """
    (batch, seq, heads, value_dim), groups = value.shape, query.shape[2]
    accurate = accurate_dtype(value.dtype)
    if initial_state is None:
        initial_state = jnp.zeros((batch, heads, query.shape[-1], value_dim), accurate)
    size = 1 if is_symbolic(seq) else max(min(_CHUNK_TOKENS, seq), 1)

    # Inside a `shard_map`, the carry of a scan must vary over the same axes before and after a step.
    state, *tokens = vary_alike(initial_state, query, key, value, decay, beta)
    state = state.reshape(batch, groups, heads // groups, *state.shape[2:])
    query, key, *of_heads = (_split(x, size) for x in tokens)
    of_heads = (x.reshape(*x.shape[:3], groups, heads // groups, *x.shape[4:]) for x in of_heads)
    state, output = lax.scan(jax.checkpoint(_read_chunk), state, (query, key, *of_heads))
    output = jnp.moveaxis(output, 0, 1).reshape(batch, output.shape[0] * size, heads, value_dim)
    return (output[:, :seq], state.reshape(batch, heads, *state.shape[3:])), {}


def _read_chunk(state: Any, chunk: Any) -> Any:
    """Computes the next state, [batch, groups, heads, key_dim, value_dim], and the outputs of a chunk.

    Query and key of the chunk are [batch, tokens, groups, key_dim], the others [batch, tokens, groups, heads, ...].
    """
    dtype = chunk[2].dtype
    query, key, value, decay, beta = (x.astype(state.dtype) for x in chunk)
    within = decays_between(jnp.moveaxis(decay, 1, -1))
    since_start = jnp.exp(jnp.cumsum(decay, axis=1))
    value = beta[..., None] * value
    scores = within * _product("btgk,bigk->bgti", query, key)[:, :, None]
    output = _product("bghti,bighv->btghv", scores, value)
    output = output + since_start[..., None] * _product("btgk,bghkv->btghv", query, state)
    until_end = jnp.moveaxis(within[..., -1, :], -1, 1)
    added = _product("bigk,bighv->bghkv", key, until_end[..., None] * value)
    return since_start[:, -1, ..., None, None] * state + added, output.astype(dtype)


def _split(array: Any, size: int) -> Any:
    """[batch, seq, ...] -> [chunks, batch, tokens, ...]; zero padding does not change the state."""
    padding = [(0, 0)] * array.ndim
    padding[1] = (0, -array.shape[1] % size)
    padded = jnp.pad(array, padding)
    chunked = padded.reshape(array.shape[0], padded.shape[1] // size, size, *array.shape[2:])
    return jnp.moveaxis(chunked, 1, 0)


def _axes(call: OpCall) -> OpAxes:
    operands = {
        **dict.fromkeys(("query", "key"), "batch seq groups key_dim"),
        "value": "batch seq heads value_dim",
        **dict.fromkeys(("decay", "beta"), "batch seq heads"),
        "initial_state": "batch heads key_dim value_dim",
    }
    outputs = ("batch seq heads value_dim", "batch heads key_dim value_dim")
    # Each group must be on the devices of its heads.
    together = (("heads", "groups"),)
    return OpAxes(operands, outputs, whole=frozenset({"seq", "key_dim"}), together=together)


OP = Op("state_space", _reference, _axes, folds="batch", keeps=True)
REFERENCE = OP.implementation()
