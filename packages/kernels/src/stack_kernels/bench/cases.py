"""Calls measured by `stack bench ops`: shapes of two Llama models, which users recognize."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stack_core.abi.ops import QView
from stack_kernels.tuning.operands import normal

__all__ = ["CASES", "BenchCase", "make_arrays", "shapes_of"]

Draw = Callable[[np.random.Generator], Mapping[str, Any]]


@dataclass(frozen=True)
class BenchCase:
    """One call of an op.

    Attributes:
      op: name of the op.
      model: model size that the call belongs to, "66m" or "8b".
      name: role of the call in the model: "prefill".
      arrays: samples the array arguments by parameter name; float32 arrays are cast to the measured dtype.
      options: the other arguments. An `axis_name` refers to the axis of a one-device mesh that splits the sequences.
      gradient: True to measure the gradient too.
    """

    op: str
    model: str
    name: str
    arrays: Draw
    options: Mapping[str, Any] = field(default_factory=dict)
    gradient: bool = True


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8:
    """A quantized array with a scale per row of activations or per column of weights."""

    values: Any
    scales: Any

    def __stack_qview__(self) -> QView:
        return QView((1, 0), self.values, self.scales, None, "int8")


@dataclass(frozen=True)
class _Llama:
    name: str
    embed: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    batch: int
    seq: int
    long_seq: int

    @property
    def tokens(self) -> int:
        return self.batch * self.seq


_MODELS = (
    _Llama("66m", 512, 2048, 8, 8, 64, 32000, batch=4, seq=512, long_seq=4096),
    _Llama("8b", 4096, 14336, 32, 8, 128, 128256, batch=1, seq=4096, long_seq=16384),
)
_DECODED_ROWS = 8
_CACHED_KEYS = 2048


def _normal(**shapes: tuple[int, ...]) -> Draw:
    """Samples arrays of unit variance; matrices are scaled for products of unit variance."""

    def arrays(rng: np.random.Generator) -> dict[str, np.ndarray]:
        values = {name: normal(rng, shape) for name, shape in shapes.items()}
        return {
            name: x * np.float32(x.shape[-2] ** -0.5) if name in ("weight", "w_gate", "w_up", "rhs") else x
            for name, x in values.items()
        }

    return arrays


def _attention_cases(of: _Llama) -> list[BenchCase]:
    def sizes(batch: int, q_seq: int, kv_seq: int) -> Draw:
        keys = (batch, kv_seq, of.kv_heads, of.head_dim)
        return _normal(query=(batch, q_seq, of.heads, of.head_dim), key=keys, value=keys)

    on_a_ring = {"axis_name": "context", "causal": True}
    return [
        BenchCase("attention", of.name, "causal", sizes(of.batch, of.seq, of.seq), {"causal": True}),
        BenchCase("attention", of.name, "causal, long", sizes(1, of.long_seq, of.long_seq), {"causal": True}),
        BenchCase("attention", of.name, "decode", sizes(_DECODED_ROWS, 1, _CACHED_KEYS), gradient=False),
        BenchCase("ring_attention", of.name, "causal", sizes(of.batch, of.seq, of.seq), on_a_ring),
        BenchCase("paged_attention", of.name, "decode", _paged(of, queries=1), gradient=False),
        BenchCase("paged_attention", of.name, "prefill", _paged(of, queries=256), gradient=False),
    ]


def _paged(of: _Llama, *, queries: int) -> Draw:
    """Pages of 128 keys, for sequences that use an eighth of their table entries."""
    slots, used, places = 128, 2, 16
    pages = _DECODED_ROWS * used

    def arrays(rng: np.random.Generator) -> Mapping[str, Any]:
        pool = (pages, of.kv_heads, slots, of.head_dim)
        values = _normal(query=(_DECODED_ROWS * queries, of.heads, of.head_dim), key_pages=pool, value_pages=pool)(rng)
        tables = np.zeros((_DECODED_ROWS, places), np.int32)
        tables[:, :used] = rng.permutation(pages).reshape(_DECODED_ROWS, used)
        return {
            **values,
            "block_tables": tables,
            "kv_lengths": np.full(_DECODED_ROWS, slots * used, np.int32),
            "query_starts": np.arange(_DECODED_ROWS + 1, dtype=np.int32) * queries,
        }

    return arrays


def _product_cases(of: _Llama) -> list[BenchCase]:
    up, hidden, decoded = (of.embed, of.mlp), (of.tokens, of.embed), (_DECODED_ROWS, of.embed)
    return [
        BenchCase("linear", of.name, "mlp", _normal(x=hidden, weight=up)),
        BenchCase("linear", of.name, "decode", _normal(x=decoded, weight=up), gradient=False),
        BenchCase("linear", of.name, "decode w8", _quantized(decoded, up, "weight"), gradient=False),
        BenchCase("linear", of.name, "mlp w8a8", _quantized(hidden, up, "x", "weight"), gradient=False),
        BenchCase("gated_linear_unit", of.name, "mlp", _normal(x=hidden, w_gate=up, w_up=up)),
        BenchCase("ragged_dot", of.name, "8 experts", _experts(of)),
        BenchCase("low_rank", of.name, "one adapter", _adapters(of, hidden, adapters=1)),
        BenchCase("low_rank", of.name, "decode, 8 adapters", _adapters(of, decoded, adapters=8), gradient=False),
    ]


def _adapters(of: _Llama, x: tuple[int, int], *, adapters: int) -> Draw:
    """Rank-16 adapters on the MLP's first matrix; with several adapters, rows use them in turn."""
    rank = 16

    def arrays(rng: np.random.Generator) -> Mapping[str, Any]:
        values = _normal(x=x, down=(adapters, of.embed, rank), up=(adapters, rank, of.mlp))(rng)
        rows = {"rows": np.arange(x[0], dtype=np.int32) % adapters} if adapters > 1 else {}
        return {**values, "scale": np.ones(adapters, np.float32), **rows}

    return arrays


def _quantized(x: tuple[int, int], weight: tuple[int, int], *names: str) -> Draw:
    scales = {"x": (x[0], 1), "weight": (1, weight[1])}

    def arrays(rng: np.random.Generator) -> Mapping[str, Any]:
        values = {"x": normal(rng, x), "weight": normal(rng, weight)}
        codes = {
            name: Int8((values[name] * 32).clip(-127, 127).astype(np.int8), np.full(scales[name], 1 / 32, np.float32))
            for name in names
        }
        return {**values, **codes}

    return arrays


def _experts(of: _Llama) -> Draw:
    """Groups from an eighth of an expert's fair share to twice the share."""

    def arrays(rng: np.random.Generator) -> Mapping[str, Any]:
        shares = np.array([2, 1.75, 1.5, 1, 0.75, 0.5, 0.375, 0.125]) / 8
        values = _normal(lhs=(of.tokens, of.embed), rhs=(len(shares), of.embed, of.mlp // 4))(rng)
        return {**values, "group_sizes": (shares * of.tokens).astype(np.int32)}

    return arrays


def _other_cases(of: _Llama) -> list[BenchCase]:
    hidden, scale = (of.batch, of.seq, of.embed), (of.embed,)
    heads = (of.batch, of.seq, of.heads, of.head_dim)

    def positions(rng: np.random.Generator) -> Mapping[str, Any]:
        places = np.broadcast_to(np.arange(of.seq, dtype=np.int32), (of.batch, of.seq))
        return {**_normal(x=heads)(rng), "positions": np.ascontiguousarray(places)}

    def labelled(rng: np.random.Generator) -> Mapping[str, Any]:
        values = _normal(hidden=(of.tokens, of.embed), weight=(of.embed, of.vocab))(rng)
        return {**values, "labels": rng.integers(0, of.vocab, of.tokens).astype(np.int32)}

    def gated(rng: np.random.Generator) -> Mapping[str, Any]:
        values = dict(_normal(query=heads, key=heads, value=heads)(rng))
        values["key"] = values["key"] / np.linalg.norm(values["key"], axis=-1, keepdims=True)
        gates = {"decay": -rng.random(heads[:3], np.float32), "beta": rng.random(heads[:3], np.float32)}
        return {**values, **gates}

    def state_space(rng: np.random.Generator) -> Mapping[str, Any]:
        values = dict(gated(rng))
        return {**values, "query": values["query"][:, :, :1], "key": values["key"][:, :, :1]}

    return [
        BenchCase("norm", of.name, "rms", _normal(x=hidden, scale=scale)),
        BenchCase("norm", of.name, "rms, residual", _normal(x=hidden, scale=scale, residual=hidden)),
        BenchCase("rope", of.name, "queries", positions),
        BenchCase("linear_cross_entropy", of.name, "loss", labelled),
        BenchCase("linear_attention", of.name, "delta rule", gated),
        BenchCase("state_space", of.name, "mamba-2", state_space),
    ]


CASES: tuple[BenchCase, ...] = tuple(
    case for of in _MODELS for case in (*_attention_cases(of), *_product_cases(of), *_other_cases(of))
)


def make_arrays(case: BenchCase, dtype: str) -> dict[str, Any]:
    """Returns the arrays of a case on the device; the same for each call."""

    def to_device(x: Any) -> Any:
        if isinstance(x, Int8):
            return jax.tree.map(jnp.asarray, x)
        return jnp.asarray(x, dtype if x.dtype == np.float32 else x.dtype)

    return {name: to_device(x) for name, x in case.arrays(np.random.default_rng(0)).items()}


class _Ones(np.random.Generator):
    """Samples the constant 1.0, which takes no time, instead of normal numbers."""

    def standard_normal(self, size: Any = None, dtype: Any = np.float64, out: Any = None) -> Any:
        return np.broadcast_to(np.ones((), dtype), size)


def shapes_of(case: BenchCase, dtype: str) -> dict[str, Any]:
    """Returns the shapes and dtypes of `make_arrays` without touching a device."""

    def shape(x: Any) -> Any:
        if isinstance(x, Int8):
            return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), x)
        return jax.ShapeDtypeStruct(x.shape, dtype if x.dtype == np.float32 else x.dtype)

    return {name: shape(x) for name, x in case.arrays(_Ones(np.random.PCG64(0))).items()}
