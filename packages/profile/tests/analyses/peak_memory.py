"""Writes, for programs with known buffers, what is predicted to be added to the memory of a process, and what was.

Run as a process of its own, whose allocator gives memory back at once.
"""

import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from stack_profile.analyses.memory import memory_of
from stack_profile.traces.hlo import program_of

SHAPE = (2048, 2048)


def temporaries(x):
    """Two sorted arrays are alive at once, and neither is an output."""
    return jnp.sum(jnp.sort(x, axis=1)[:, ::-1] * jnp.sort(-x, axis=0))


def carried(x):
    return jax.lax.scan(lambda carry, _: (jnp.sort(carry, axis=1) + jnp.flip(carry, 0), None), x, None, length=2)[0]


def kept_for_the_backward_pass(x):
    return jax.grad(lambda x: jnp.sum(jax.lax.scan(lambda carry, _: (jnp.sin(carry), None), x, None, length=4)[0]))(x)


CASES = {
    "output": (lambda x: x * 2 + 1, ()),
    "temporaries": (temporaries, ()),
    "carried": (carried, ()),
    "carried, donated": (carried, (0,)),
    "kept": (kept_for_the_backward_pass, ()),
}


def resident_bytes(name: str) -> int:
    """`VmRSS`, what is resident now, or `VmHWM`, the most since it was reset."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def measured(compiled: jax.stages.Compiled) -> int:
    """By how much memory grew at most during an execution, its argument left aside."""
    x = jnp.ones(SHAPE).block_until_ready()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, see proc(5)
    before = resident_bytes("VmRSS")
    compiled(x).block_until_ready()
    return resident_bytes("VmHWM") - before


def main() -> None:
    found = {}
    for name, (function, donated) in CASES.items():
        shape = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
        compiled = jax.jit(function, donate_argnums=donated).lower(shape).compile()
        facts = memory_of(program_of(compiled)).facts
        found[name] = [facts["total_bytes"] - facts["argument_bytes"], measured(compiled)]
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
