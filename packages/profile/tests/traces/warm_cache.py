"""Captures functions that JAX's compile cache may hold: python warm_cache.py CACHE OUT FRESH

Writes each module that ran, with the Python functions that its operations are joined with, and the problems of the
trace. FRESH programs are compiled first, so that what the cache holds has other numbers in this process.
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

import stack_profile
from stack_profile.traces.trace import load_trace


def first(x):
    return jnp.sin(x @ x)


def second(x):
    return jnp.sort(x, axis=1)


def third(x):
    return jnp.cumsum(x @ x.T, axis=0)


def bucket(x):
    return jnp.tanh(x) * 2


def doubled():
    def scaled(x):
        return x * 2

    return scaled


def tripled():
    def scaled(x):
        return x * 3  # an operation of the same name in another line

    return scaled


def main(cache: str, out: str, fresh: int) -> None:
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    x, row = jnp.ones((64, 64)), jnp.ones((1, 64))
    jax.config.update("jax_enable_compilation_cache", False)
    for number in range(fresh):
        jax.jit(lambda x, number=number: x * number)(x)
    jax.config.update("jax_enable_compilation_cache", True)
    calls = [(jax.jit(each), x) for each in (first, second, third, doubled(), tripled(), bucket)]
    calls.append((calls[-1][0], row))  # another program of one function
    jax.block_until_ready([function(argument) for function, argument in calls])
    with stack_profile.capture(out) as captured:
        jax.block_until_ready([function(argument) for function, argument in calls])
    trace = load_trace(captured.wait())
    joined = {}
    for operation in (operation for ops in trace.devices for operation in ops.operations):
        frames = operation.instruction.frames if operation.instruction else ()
        functions = {frame.function for frame in frames if Path(frame.file) == Path(__file__)}
        joined.setdefault(operation.module, set()).update(functions - {"main", "main.<locals>.<listcomp>", "<module>"})
    numbers = {program.key for program in trace.programs}
    own = all(operation.program_key in numbers for operation in trace.devices[0].operations)
    joined = {module: sorted(functions) for module, functions in joined.items()}
    sys.stdout.write(json.dumps({"joined": joined, "own_numbers": own, "problems": trace.problems}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
