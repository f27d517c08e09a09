"""Random calls of every op on the CPU: nothing crashes, and nothing comes out that the reference would not give.

    python random_calls.py SIGNATURES DRAWS [OP ...]

`test_random_calls.py` runs this in a process of its own, which a kernel that leaves its buffers ends. A signature is
shapes, dtype and options; it is compiled once for each implementation that takes it, and called with each draw. Sizes
are odd or 0, floats hold NaN and infinity, indices point anywhere.
"""

import faulthandler
import functools
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stack_core import ops
from stack_core.abi.plugins import registries
from stack_core.ops.building import answer, bounded_places
from stack_core.testing import Quantized, first_call

ANYWHERE = np.array([np.iinfo(np.int32).min, -7, -1, 0, 1, 2, 3, 5, 8, 100, np.iinfo(np.int32).max])
SIZES = (1, 2, 3, 5, 8, 13, 16, 17, 31, 33)
TOLERANCES = {"float32": 2e-4, "bfloat16": 6e-2}
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclass(frozen=True)
class Signature:
    """A call without the values of its arrays.

    Attributes:
      floats: shapes by parameter name.
      others: draws each of the other arrays.
    """

    floats: Mapping[str, tuple[int, ...]]
    others: Mapping[str, Callable[[np.random.Generator], Any]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def draw(self, rng: np.random.Generator, dtype: str) -> dict[str, Any]:
        arrays = {name: jnp.asarray(_floats(rng, shape), dtype) for name, shape in self.floats.items()}
        return arrays | {name: jax.tree.map(jnp.asarray, draw(rng)) for name, draw in self.others.items()}


def _floats(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers of size 1; in every other array some of them NaN or infinite."""
    found = rng.normal(size=shape)
    if found.size and rng.random() < 0.5:
        places = rng.integers(found.size, size=rng.integers(1, 3))
        found.reshape(-1)[places] = rng.choice([np.nan, np.inf, -np.inf], size=len(places))
    return found


def _anywhere(*shape: int) -> Callable[[np.random.Generator], Any]:
    return lambda rng: rng.choice(ANYWHERE, size=shape).astype(np.int32)


def _indices(most: int, *shape: int) -> Callable[[np.random.Generator], Any]:
    """Mostly in range 0 .. most - 1."""

    def draw(rng: np.random.Generator) -> Any:
        right, wrong = rng.integers(0, max(most, 1), size=shape), rng.choice(ANYWHERE, size=shape)
        return np.where(rng.random(shape) < 0.8, right, wrong).astype(np.int32)

    return draw


def _maybe(rng: np.random.Generator, **values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if rng.random() < 0.4}


def _weight(rng: np.random.Generator, d_in: int, d_out: int) -> Callable[[np.random.Generator], Any]:
    levels = int(rng.choice([8, 128]))

    def draw(rng: np.random.Generator) -> Any:
        codes = rng.integers(-levels, levels, size=(d_in, d_out)).astype(np.int8)
        return Quantized(codes, _floats(rng, (1, d_out)).astype(np.float32))

    return draw


def attention(rng: np.random.Generator) -> Signature:
    batch, queries, keys, kv_heads, group, key_dim, value_dim = rng.choice(SIZES[:6], size=7)
    heads, value_dim = kv_heads * group, value_dim if rng.random() < 0.5 else key_dim
    shapes = {"query": (batch, queries, heads, key_dim), "key": (batch, keys, kv_heads, key_dim)}
    shapes["value"] = (batch, keys, kv_heads, value_dim)
    shapes |= _maybe(rng, sinks=(heads,), bias=(1, heads, queries, keys))
    others = _maybe(rng, kv_lengths=_anywhere(batch), query_offset=_anywhere(batch))
    window = (int(rng.integers(0, 5)), None) if rng.random() < 0.5 else (2, 1)
    return Signature(shapes, others, _maybe(rng, causal=True, window=window, softcap=3.0, return_lse=True))


def paged_attention(rng: np.random.Generator) -> Signature:
    batch, pages, places, slots, kv_heads, group, dim = rng.choice(SIZES[:5], size=7)
    queries = int(rng.choice([batch, 2 * batch + 1]))
    layout = str(rng.choice(["phsd", "pshd", "psh2d"]))
    if layout == "psh2d" and rng.random() < 0.5:  # what the kernel of TPUs takes
        kv_heads, dim = int(rng.choice([1, 2, 4, 8])), 128
    sizes = {"p": pages, "h": kv_heads, "s": slots, "2": 2, "d": dim}
    pool = tuple(int(sizes[axis]) for axis in layout)
    shapes = {"query": (queries, kv_heads * group, dim), "key_pages": pool}
    shapes |= {} if layout == "psh2d" else {"value_pages": pool}
    shapes |= _maybe(rng, sinks=(kv_heads * group,))

    def starts(rng: np.random.Generator) -> Any:
        right = np.minimum(np.arange(batch + 1) * (queries // batch), queries).astype(np.int32)
        return right if rng.random() < 0.7 else _anywhere(batch + 1)(rng)

    others = {
        "block_tables": _indices(pages, batch, places),
        "kv_lengths": _indices(slots * places + 1, batch),
        "query_starts": starts,
    }
    if layout == "psh2d":
        others["value_pages"] = lambda rng: None
    return Signature(shapes, others, _maybe(rng, window=(3, None), softcap=2.0) | {"layout": layout})


def linear(rng: np.random.Generator) -> Signature:
    rows, d_in, d_out = rng.choice((0, *SIZES, 64), size=3)
    bias = _maybe(rng, bias=(d_out,))
    if rng.random() < 0.4 and d_in and d_out:
        return Signature({"x": (rows, d_in), **bias}, {"weight": _weight(rng, d_in, d_out)})
    return Signature({"x": (rows, d_in), "weight": (d_in, d_out), **bias})


def gated_linear_unit(rng: np.random.Generator) -> Signature:
    rows, d_in, d_out = rng.choice((0, *SIZES, 64), size=3)
    bias = _maybe(rng, bias_gate=(d_out,), bias_up=(d_out,))
    activation = str(rng.choice(["silu", "gelu_tanh", "relu", "relu_squared"]))
    shapes = {"x": (rows, d_in), "w_gate": (d_in, d_out), "w_up": (d_in, d_out), **bias}
    return Signature(shapes, {}, {"activation": activation, **_maybe(rng, limit=1.5)})


def ragged_dot(rng: np.random.Generator) -> Signature:
    rows, groups, d_in, d_out = (int(size) for size in rng.choice(SIZES, size=4))
    shapes = {"lhs": (rows, d_in), "rhs": (groups, d_in, d_out), **_maybe(rng, bias=(groups, d_out))}
    return Signature(shapes, {"group_sizes": _indices(2 * rows // groups + 2, groups)})


def low_rank(rng: np.random.Generator) -> Signature:
    rows, adapters, d_in, rank, d_out = (int(size) for size in rng.choice(SIZES, size=5))
    shapes = {"x": (rows, d_in), "down": (adapters, d_in, rank), "up": (adapters, rank, d_out), "scale": (adapters,)}
    return Signature(shapes, {"rows": _indices(adapters, rows)})


def norm(rng: np.random.Generator) -> Signature:
    rows, size = rng.choice((0, *SIZES), size=2)
    # What machine code takes has many numbers.
    shape = (int(rng.choice([131, 257])), 256) if rng.random() < 0.4 else (rows, max(size, 1))
    given = _maybe(rng, scale=(shape[-1],), residual=shape)
    return Signature({"x": shape, **given}, {}, _maybe(rng, scale_offset=1.0, epsilon=1e-3))


def rope(rng: np.random.Generator) -> Signature:
    batch, seq, heads, half = rng.choice(SIZES[:6], size=4)
    shape = (2, 67, 8, 32) if rng.random() < 0.4 else (batch, seq, heads, 2 * half)
    return Signature({"x": shape}, {"positions": _anywhere(*shape[:2])}, _maybe(rng, interleaved=True, theta=100.0))


def linear_cross_entropy(rng: np.random.Generator) -> Signature:
    rows, d_in, vocab = (int(size) for size in rng.choice(SIZES, size=3))
    shapes = {"hidden": (rows, d_in), "weight": (d_in, vocab), **_maybe(rng, bias=(vocab,))}
    options = _maybe(rng, softcap=5.0, z_loss=1e-2, label_smoothing=0.1) | {
        "reduction": str(rng.choice(["none", "sum"]))
    }
    return Signature(shapes, {"labels": _indices(vocab, rows)}, options)


def linear_attention(rng: np.random.Generator) -> Signature:
    batch, seq, heads, key_dim, value_dim = rng.choice(SIZES[:6], size=5)
    seq = int(rng.choice([seq, 65]))
    keys, gate = (batch, seq, heads, key_dim), (batch, seq, heads)
    shapes = {"query": keys, "key": keys, "value": (batch, seq, heads, value_dim)}
    return Signature(
        shapes, {"decay": lambda rng: -rng.random(gate, np.float32), "beta": lambda rng: rng.random(gate, np.float32)}
    )


OPS = {
    op.__name__: op
    for op in (
        attention,
        paged_attention,
        linear,
        gated_linear_unit,
        ragged_dot,
        low_rank,
        norm,
        rope,
        linear_cross_entropy,
        linear_attention,
    )
}


def candidates(op: str, call: Any) -> list[str]:
    """The reference first, then what takes the call on this CPU."""
    found = sorted(name.partition("/")[2] for name in registries.ops.names() if name.startswith(f"{op}/"))
    others = [name for name in found if name != "reference" and answer(registries.ops[f"{op}/{name}"], call) is True]
    return ["reference", *others]


def check(actual: Any, expected: Any, dtype: str) -> str | None:
    """What differs: finite numbers in other places than the reference's, or other numbers."""
    for place, pair in enumerate(zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)):
        found, wanted = (np.asarray(x, np.float32) for x in pair)
        finite = np.isfinite(wanted)
        if (np.isfinite(found) != finite).any():
            return f"result {place}: finite in other places, {np.sum(np.isfinite(found) != finite)} of {found.size}"
        if finite.any():
            off = np.abs(found[finite] - wanted[finite]).max()
            allowed = TOLERANCES[dtype] * max(np.abs(wanted[finite]).max(), 1.0)
            if off > allowed:
                return f"result {place}: off by {off:.3g}, {allowed:.3g} allowed"
    return None


def seen_alone(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Gives each query of `paged_attention` pages of its own, which hold 0 for the keys that it does not see.

    An unseen key weighs 0, and 0 times an infinite value is NaN. Which unseen keys a kernel or the reference visits
    depends on how it divides the keys; this call has nothing there to find.
    """
    pool, layout = arrays["key_pages"], options["layout"]
    tokens, slots = arrays["query"].shape[0], pool.shape[layout.index("s")]
    tables, lengths, starts = bounded_places(
        *(arrays[name] for name in ("block_tables", "kv_lengths", "query_starts")),
        pages=pool.shape[layout.index("p")],
        slots=slots,
        tokens=tokens,
    )
    token = np.arange(tokens)
    sequence = np.minimum(np.searchsorted(starts[1:], token, side="right"), len(lengths) - 1)
    is_padding = (token < starts[0]) | (token >= starts[-1])
    ends = np.where(is_padding, 0, lengths[sequence] - starts[sequence + 1] + token + 1)
    place = np.arange(tables.shape[1] * slots)
    left = (options.get("window") or (None, None))[0]
    seen = place < ends[:, None]
    if left is not None:
        seen &= place >= ends[:, None] - 1 - left
    seen = seen.reshape(-1, slots)

    def own(pages: Any) -> Any:
        taken = jnp.take(pages, tables[sequence].reshape(-1), axis=layout.index("p"))
        kept = [taken.shape[at] if axis in "ps" else 1 for at, axis in enumerate(layout)]
        ordered = seen if layout.index("p") < layout.index("s") else seen.T
        return jnp.where(ordered.reshape(kept), taken, 0)

    places = {
        "block_tables": jnp.arange(tokens * tables.shape[1]).reshape(tokens, -1),
        "kv_lengths": jnp.maximum(ends, 0),
        "query_starts": jnp.arange(tokens + 1),
    }
    pools = {name: arrays[name] for name in ("key_pages", "value_pages")}
    return {**arrays, **places, **jax.tree.map(own, pools)}


def attended_alone(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Moves each query of `attention` to a batch row of its own and zeroes the keys and values that it does not see."""
    query, key, value = (arrays[name] for name in ("query", "key", "value"))
    (batch, queries), keys = query.shape[:2], key.shape[1]
    row, number = np.repeat(np.arange(batch), queries), np.tile(np.arange(queries), batch)
    offset = np.asarray(arrays.get("query_offset", np.full(batch, keys - queries)), np.int64)
    position, place = (offset[row] + number)[:, None], np.arange(keys)
    left, right = options.get("window") or (None, None)
    seen = place < np.asarray(arrays.get("kv_lengths", np.full(batch, keys)))[row][:, None]
    seen &= (place <= position) | (not options.get("causal", False))
    seen &= place >= position - (np.inf if left is None else left)
    seen &= place <= position + (np.inf if right is None else right)
    found = {
        "query": query.reshape(batch * queries, 1, *query.shape[2:]),
        "key": jnp.where(seen[..., None, None], key[row], 0),
        "value": jnp.where(seen[..., None, None], value[row], 0),
        "query_offset": jnp.asarray(np.clip(position[:, 0], -2 * queries - 8, keys + 8), jnp.int32),
    }
    if "bias" in arrays:
        found["bias"] = jnp.moveaxis(arrays["bias"], 2, 0)[number].reshape(batch * queries, -1, 1, keys)
    if "kv_lengths" in arrays:
        found["kv_lengths"] = arrays["kv_lengths"][row]
    return found | {name: arrays[name] for name in ("sinks",) if name in arrays}


ALONE = {"paged_attention": seen_alone, "attention": attended_alone}


def try_op(op: str, signatures: int, draws: int) -> tuple[int, list[str]]:
    """How many calls of implementations were compared, and what was wrong."""
    compared, wrong = 0, []
    for number in range(signatures):
        rng = np.random.default_rng([zlib.crc32(op.encode()), number])
        signature, dtype = OPS[op](rng), ("float32", "bfloat16")[number % 2]
        function = functools.partial(getattr(ops, op), **signature.options)
        names = candidates(op, first_call(lambda arrays, f=function: f(**arrays), signature.draw(rng, dtype)))
        programs = {
            name: jax.jit(
                lambda arrays, f=function, name=name: f(**arrays, implementation=name), compiler_options=QUICK
            )
            for name in names
        }
        for draw in range(draws):
            arrays = signature.draw(rng, dtype)
            found = {name: jax.block_until_ready(program(arrays)) for name, program in programs.items()}
            for name in names[1:]:
                compared += 1
                problem = check(found[name], found["reference"], dtype)
                if problem and op in ALONE:
                    exact = function(**ALONE[op](arrays, signature.options), implementation="reference")
                    problem = check(found[name], jax.tree.map(_either, found[name], exact, found["reference"]), dtype)
                if problem:
                    shapes = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", arrays)
                    wrong.append(
                        f"{op}/{name}, signature {number}, draw {draw}: {problem}: {shapes} {signature.options}"
                    )
                    break
        jax.clear_caches()
    return compared, wrong


def _either(found: Any, exact: Any, reference: Any) -> Any:
    """The exact result where both it and what was found are finite, else the reference's."""
    exact = exact.reshape(reference.shape)
    return jnp.where(jnp.isfinite(found) & jnp.isfinite(exact), exact, reference)


def main(signatures: int, draws: int, *names: str) -> None:
    faulthandler.enable()
    problems: list[str] = []
    for op in names or OPS:
        compared, wrong = try_op(op, signatures, draws)
        sys.stdout.write(f"{op}: {signatures} signatures, {compared} results compared, {len(wrong)} wrong\n")
        sys.stdout.flush()
        problems += wrong
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
