"""`linear_attention` on CPUs: the gradient processes chunks of tokens in parallel and carries only the state.

In a chunk that begins with the state S, with D_ti = exp(g_(i+1) + ... + g_t) for i <= t and d_t = exp(g_1 + ... + g_t),
token t writes u_t = b_t (v_t - P_t^T k_t), and

    (I + L) U = b (V - d K S)       L_ti = b_t D_ti k_t . k_i for i < t
    O = d Q S + (D * Q K^T) U
    S' = d_C S + (D_C * K)^T U

(I + L)^-1 b [V, d K] does not depend on S and is computed for all chunks together.

Source: Yang et al., Parallelizing Linear Transformers with the Delta Rule, 2024 (arXiv:2406.06484), with the decay of
Gated Delta Networks (arXiv:2412.06464). One departure: each exponent of D is summed separately, not as a difference of
cumulative sums, which is undefined if a token forgets everything and loses digits after every strong decay.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from stack_core.abi.ops import OWN, OpImplementation
from stack_core.ops.building import accurate_dtype, decays_between, differentiated, vary_alike

__all__ = ["XLA_CPU", "Chunks"]


@dataclass(frozen=True)
class Chunks:
    """Number of tokens per chunk."""

    tokens: int = 64


def _cpu(
    query: Any, key: Any, value: Any, *, decay: Any, beta: Any, initial_state: Any, config: Chunks, requested: Any
) -> tuple[Any, dict[str, Any]]:
    batch, _, heads, key_dim = query.shape
    accurate = accurate_dtype(value.dtype)
    if initial_state is None:
        initial_state = jnp.zeros((batch, heads, key_dim, value.shape[-1]), accurate)
    tokens = [x.astype(accurate) for x in (query, key, value, decay, beta)]
    state, *tokens = vary_alike(initial_state, *tokens)
    output, state = _read(config.tokens, state, *tokens)
    return (output.astype(value.dtype), state), {}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _read(size: int, state: Any, *tokens: Any) -> Any:
    """Computes o [batch, seq, heads, value_dim] and the last state.

    Without a gradient it runs token by token, which takes a fifth to a half of the CPU time of chunks, because the
    state stays in a cache. With its gradient, token by token would take 1.3 to 2.7 times as long as chunks.
    """
    state, output = lax.scan(_read_token, state, tuple(jnp.moveaxis(x, 1, 0) for x in tokens))
    return jnp.moveaxis(output, 0, 1), state


def _read_forward(size: int, state: Any, *tokens: Any) -> Any:
    return jax.vjp(functools.partial(_read_chunks, size), state, *tokens)


def _read_backward(size: int, chunks_vjp: Any, cotangent: Any) -> Any:
    return chunks_vjp(cotangent)


_read.defvjp(_read_forward, _read_backward)


def _read_chunks(size: int, state: Any, *tokens: Any) -> Any:
    batch, seq, heads, _ = tokens[0].shape
    size = max(min(size, seq), 1)
    output, state = _chunks(state, *(_split(x, size) for x in tokens))
    output = jnp.moveaxis(output, (0, 3), (1, 2))
    return output.reshape(batch, output.shape[1] * size, heads, output.shape[-1])[:, :seq], state


def _read_token(state: Any, token: Any) -> Any:
    """Returns the next state and o [batch, heads, value_dim]."""
    query, key, value, decay, beta = token
    state = jnp.exp(decay)[..., None, None] * state
    stored = jnp.einsum("bhkv,bhk->bhv", state, key)
    state = state + jnp.einsum("bhk,bhv->bhkv", key, beta[..., None] * (value - stored))
    return state, jnp.einsum("bhkv,bhk->bhv", state, query)


def _chunks(state: Any, query: Any, key: Any, value: Any, decay: Any, beta: Any) -> Any:
    """Computes o [chunks, batch, heads, tokens, value_dim] and the last state.

    The tokens are [chunks, batch, heads, tokens, ...].
    """
    within = decays_between(decay)
    since_start = jnp.exp(jnp.cumsum(decay, axis=-1))[..., None]
    strictly = jnp.tril(jnp.ones(within.shape[-2:], bool), -1)
    by_key = jnp.einsum("nbhtk,nbhik->nbhti", key, key)
    system = jnp.where(strictly, beta[..., None] * within * by_key, 0)
    known = beta[..., None] * jnp.concatenate([value, since_start * key], axis=-1)
    # U = written - of_state S, for the state S at the start of the chunk.
    written, of_state = jnp.split(_inverse(system) @ known, [value.shape[-1]], axis=-1)
    # D_C * K: the decayed contribution of each token's update at the end of the chunk.
    until_end = within[..., -1, :, None] * key

    def next_chunk(state: Any, chunk: Any) -> Any:
        written, of_state, until_end, left = chunk
        written = written - jnp.einsum("bhtk,bhkv->bhtv", of_state, state)
        following = left[..., None] * state + jnp.einsum("bhtk,bhtv->bhkv", until_end, written)
        return following, (written, state)

    chunks = (written, of_state, until_end, since_start[..., -1, :])
    state, (written, states) = lax.scan(next_chunk, state, chunks)
    output = jnp.einsum("nbhtk,nbhkv->nbhtv", since_start * query, states)
    scores = within * jnp.einsum("nbhtk,nbhik->nbhti", query, key)
    return output + jnp.einsum("nbhti,nbhiv->nbhtv", scores, written), state


@jax.custom_vjp
def _inverse(lower: Any) -> Any:
    """Computes (I + L)^-1 for strictly lower triangular matrices [..., t, i].

    Diagonal blocks are inverted in pairs, [[A, 0], [B, C]]^-1 = [[A^-1, 0], [-C^-1 B A^-1, C^-1]], from single entries
    up to the full matrix. No power of L is formed, because it could be large. LAPACK's batched solver was 50 times
    slower.
    """
    token = jnp.arange(lower.shape[-1])
    inverse = jnp.broadcast_to(jnp.eye(token.size, dtype=lower.dtype), lower.shape)
    block = 1
    while block < token.size:
        of_pair, of_block = (token // size for size in (2 * block, block))
        is_off_diagonal = (of_pair[:, None] == of_pair) & (of_block[:, None] != of_block)
        inverse = inverse - inverse @ jnp.where(is_off_diagonal, lower, 0) @ inverse
        block *= 2
    return vary_alike(inverse, lower)[0]  # with one token it is 1, independent of L


def _inverse_forward(lower: Any) -> Any:
    inverse = _inverse(lower)
    return inverse, inverse


def _inverse_backward(inverse: Any, cotangent: Any) -> Any:
    transposed = jnp.swapaxes(inverse, -1, -2)
    # L is strictly lower triangular, and so is its gradient.
    return (jnp.tril(-transposed @ cotangent @ transposed, -1),)


_inverse.defvjp(_inverse_forward, _inverse_backward)


def _split(array: Any, size: int) -> Any:
    """Converts [batch, seq, heads, ...] to [chunks, batch, heads, tokens, ...].

    Appended zeros do not change the state.
    """
    padding = [(0, 0)] * array.ndim
    padding[1] = (0, -array.shape[1] % size)
    padded = jnp.pad(array, padding)
    chunked = padded.reshape(array.shape[0], padded.shape[1] // size, size, *array.shape[2:])
    return jnp.moveaxis(chunked, (1, 3), (0, 2))


_forward, _backward = differentiated(_cpu)

XLA_CPU = OpImplementation(
    op="linear_attention",
    name="xla_cpu",
    forward=_forward,
    backward=_backward,
    platforms=("cpu",),
    default=lambda call, chip: Chunks(),
    space=lambda call, chip: (Chunks(), Chunks(32), Chunks(128)),
    residuals=(OWN,),
)
