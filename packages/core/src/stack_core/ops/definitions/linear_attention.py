"""Linear attention with the gated delta rule."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from stack_core.abi.ops import OpCall
from stack_core.ops.dispatch.contract import accurate_dtype
from stack_core.ops.dispatch.dispatch import dispatch
from stack_core.ops.dispatch.manual_axes import vary_alike
from stack_core.ops.dispatch.op import Op, OpAxes
from stack_core.ops.dispatch.request import Implementation
from stack_core.ops.dispatch.splitting import LogicalNames
from stack_core.ops.dispatch.symbolic import Size, is_symbolic
from stack_core.ops.references.recurrent_operands import check_operands, fill_operands

__all__ = ["OP", "REFERENCE", "linear_attention"]

# By default, a TPU rounds fp32 operands to bf16: the state would lose precision at every token.
_product = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def linear_attention(
    query: Float[Array, "batch seq heads key_dim"],
    key: Float[Array, "batch seq heads key_dim"],
    value: Float[Array, "batch seq heads value_dim"],
    *,
    decay: Float[Array, "batch seq heads"] | None,
    beta: Float[Array, "batch seq heads"] | None,
    initial_state: Float[Array, "batch heads key_dim value_dim"] | None = None,
    implementation: Implementation = None,
    axes: LogicalNames | None = None,
) -> tuple[Float[Array, "batch seq heads value_dim"], Float[Array, "batch heads key_dim value_dim"]]:
    """Computes linear attention with the gated delta rule: a decaying state in which tokens overwrite values by key.

        P_t = exp(g_t) S_(t-1)                                  decay of the state
        S_t = P_t + b_t k_t (v_t - P_t^T k_t)^T                 moves the value stored at k_t towards v_t
        o_t = S_t^T q_t

    g is `decay`, b is `beta`, S_0 is `initial_state`. The state and all arithmetic are in fp32.

    Inputs are not scaled or normalized here. Gated DeltaNet and Qwen3-Next pass unit vectors for key and query, and
    divide the query by sqrt(key_dim); models with more value heads than key heads repeat the key heads.

    Args:
      query: q, [batch, seq, heads, key_dim].
      key: k, like `query`. Its norm should be at most 1: the rule diverges if b_t |k_t|^2 exceeds 2.
      value: v, [batch, seq, heads, value_dim], of the dtype of `query`.
      decay: g, [batch, seq, heads], natural logarithm of the decay factor, at most 0. 0 keeps the state, -inf clears it
        before the token. None means 0 for all tokens, the delta rule without a gate.
      beta: b, [batch, seq, heads], replaced fraction of the stored value, from 0 to 1 (up to 2 for negative
        eigenvalues). None means 1 for all tokens. `decay` and `beta` may have any floating dtype.
      initial_state: S_0, fp32[batch, heads, key_dim, value_dim]; None means 0.
      implementation: implementation name, or several in order of preference; None lets core choose.
      axes: logical axis names of the arrays, as in `linear`; used to shard implementations that XLA cannot partition.

    Returns:
      (o, S_seq): [batch, seq, heads, value_dim] of the dtype of `value`, and the fp32 state after the last token, to
      be passed as `initial_state` with the next tokens.

    Raises:
      ShapeError: mismatched sizes; the message names the argument and the axis.
      ArgumentError: an array that is not floating, operands of different dtypes, or a state that is not fp32.
      UnsupportedOp: no implementation supports the call, or no requested implementation does.

    Source: Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024 (arXiv:2412.06464), equation 10, with the state
    transposed and its decay in log space, as in flash-linear-attention.
    """
    operands = {
        "query": query,
        "key": key,
        "value": value,
        "decay": decay,
        "beta": beta,
        "initial_state": initial_state,
    }
    check_operands("linear_attention", operands, key_heads="heads")
    return dispatch(OP, fill_operands(operands), {}, implementation, axes)


def _reference(
    query: Any, key: Any, value: Any, *, decay: Any, beta: Any, initial_state: Any, requested: Any
) -> tuple[Any, dict[str, Any]]:
    """Scans over tokens. The gradient stores one state per chunk and recomputes the states of a chunk at a time."""
    batch, seq, heads, key_dim = query.shape
    if initial_state is None:
        initial_state = jnp.zeros((batch, heads, key_dim, value.shape[-1]), accurate_dtype(value.dtype))
    # About sqrt(seq) chunks balance the stored states against the states of the chunk that is recomputed.
    chunks = _chunks(seq)

    @jax.checkpoint
    def read_chunk(state: Any, tokens: Any) -> Any:
        return lax.scan(_read_token, state, tokens)

    # Inside a `shard_map`, the carry of a scan must vary over the same axes before and after a step.
    state, *tokens = vary_alike(initial_state, query, key, value, decay, beta)
    state, output = lax.scan(read_chunk, state, [_split(x, chunks) for x in tokens])
    output = output.reshape(output.shape[0] * output.shape[1], *output.shape[2:])
    return (jnp.moveaxis(output[:seq], 0, 1), state), {}


def _read_token(state: Any, token: Any) -> Any:
    """Applies the equation to one token: (S [batch, heads, key_dim, value_dim], o [batch, heads, value_dim])."""
    query, key, value, decay, beta = (x.astype(state.dtype) for x in token)
    state = jnp.exp(decay)[..., None, None] * state
    stored = _product("bhkv,bhk->bhv", state, key)
    state = state + _product("bhk,bhv->bhkv", key, beta[..., None] * (value - stored))
    return state, _product("bhkv,bhk->bhv", state, query).astype(token[2].dtype)


def _chunks(seq: Size) -> int:
    """Returns a number of chunks near sqrt(seq), preferably a divisor of `seq`."""
    if is_symbolic(seq):
        return 1
    target = max(math.isqrt(seq), 1)
    return next((count for count in range(target, 2 * target) if seq % count == 0), target)


def _split(array: Any, chunks: int) -> Any:
    """[batch, seq, ...] -> [chunks, tokens, batch, ...]; zero padding does not change the state."""
    padding = [(0, 0)] * array.ndim
    padding[1] = (0, -array.shape[1] % chunks)
    by_token = jnp.moveaxis(jnp.pad(array, padding), 1, 0)
    return by_token.reshape(chunks, by_token.shape[0] // chunks, *by_token.shape[1:])


def _axes(call: OpCall) -> OpAxes:
    operands = {
        **dict.fromkeys(("query", "key"), "batch seq heads key_dim"),
        "value": "batch seq heads value_dim",
        **dict.fromkeys(("decay", "beta"), "batch seq heads"),
        "initial_state": "batch heads key_dim value_dim",
    }
    outputs = ("batch seq heads value_dim", "batch heads key_dim value_dim")
    return OpAxes(operands, outputs, whole=frozenset({"seq", "key_dim"}))


OP = Op("linear_attention", _reference, _axes, folds="batch", keeps=True)
REFERENCE = OP.implementation()
