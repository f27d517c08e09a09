"""CPU seconds that JAX takes to trace and lower the gradient of a decoder, of `ops.*` and of plain `jnp`.

    nox -s bench -- tracing

Both are the same 24 layers of eight calls each. They take turns, a fresh process each time, because a machine's speed
drifts; a layer alone comes first, so that imports and the choosing of implementations for it are left out. Prints the
median ratio of `ops` over `jnp`, and fails when it is over the limit.
"""

import argparse
import statistics
import subprocess
import sys
import time
from typing import Any

LIMIT = 2.0
LAYERS, BATCH, SEQ, EMBED, HEADS, MLP = 24, 2, 64, 64, 4, 128


def _with_ops(weights: Any, x: Any) -> Any:
    from stack_core import ops

    for layer in weights:
        hidden = ops.norm(x, layer["norm"])
        query, key, value = (
            ops.linear(hidden, layer[name]).reshape(BATCH, SEQ, HEADS, -1) for name in ("query", "key", "value")
        )
        attended = ops.attention(query, key, value, causal=True).reshape(BATCH, SEQ, EMBED)
        x = x + ops.linear(attended, layer["output"])
        hidden = ops.norm(x, layer["mlp_norm"])
        x = x + ops.linear(ops.gated_linear_unit(hidden, layer["gate"], layer["up"]), layer["down"])
    return (x**2).mean()


def _with_jnp(weights: Any, x: Any) -> Any:
    import jax
    import jax.numpy as jnp

    def norm(x: Any, scale: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale

    for layer in weights:
        hidden = norm(x, layer["norm"])
        query, key, value = (
            (hidden @ layer[name]).reshape(BATCH, SEQ, HEADS, -1) for name in ("query", "key", "value")
        )
        logits = jnp.einsum("bqhd,bkhd->bhqk", query, key) * query.shape[-1] ** -0.5
        weighted = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((SEQ, SEQ), bool)), logits, -1e30), axis=-1)
        attended = jnp.einsum("bhqk,bkhd->bqhd", weighted, value).reshape(BATCH, SEQ, EMBED)
        x = x + attended @ layer["output"]
        hidden = norm(x, layer["mlp_norm"])
        x = x + (jax.nn.silu(hidden @ layer["gate"]) * (hidden @ layer["up"])) @ layer["down"]
    return (x**2).mean()


CONTENDERS = {"ops": _with_ops, "jnp": _with_jnp}


def _cpu_s(name: str) -> float:
    """Returns the CPU seconds of tracing and lowering the gradient in this process."""
    import jax
    import jax.numpy as jnp

    square = dict.fromkeys(("query", "key", "value", "output"), (EMBED, EMBED))
    wide = dict.fromkeys(("gate", "up"), (EMBED, MLP))
    shapes = {"norm": (EMBED,), "mlp_norm": (EMBED,), "down": (MLP, EMBED), **square, **wide}
    layer = {of_one: jax.ShapeDtypeStruct(shape, jnp.float32) for of_one, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((BATCH, SEQ, EMBED), jnp.float32)
    function = CONTENDERS[name]
    jax.jit(jax.grad(function)).lower([layer], x)
    begun_s = time.process_time()
    jax.jit(jax.grad(function)).lower([layer] * LAYERS, x)
    return time.process_time() - begun_s


def _measured(name: str) -> float:
    found = subprocess.run([sys.executable, __file__, "--contender", name], check=True, capture_output=True, text=True)
    return float(found.stdout.split()[-1])


def main() -> None:
    """Prints the CPU seconds of each contender and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--contender", choices=CONTENDERS, help="measure one alone, in this process")
    arguments = parser.parse_args()
    if arguments.contender:
        print(_cpu_s(arguments.contender))
        return
    rounds = [{name: _measured(name) for name in CONTENDERS} for _ in range(arguments.rounds)]
    for name in CONTENDERS:
        print(f"{name}: {statistics.median(each[name] for each in rounds):.3f} CPU-s, median of {len(rounds)}")
    ratio = statistics.median(each["ops"] / each["jnp"] for each in rounds)
    print(f"ops over jnp: {ratio:.2f}, at most {LIMIT}")
    if ratio > LIMIT:
        sys.exit(1)


if __name__ == "__main__":
    main()
