"""Whether `stack profile diff` names what changed, and nothing else: real captures of one small program.

Identical programs are captured in pairs, of which at most one in twenty may have any operation named; then the same
program with one layer a tenth larger, whose products must be named first. Everything runs in turns in one process, and
on one core, where other processes disturb it least.

    nox -s bench -- profile_diff
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # before XLA makes its threads

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

import stack_profile  # noqa: E402
from stack_profile.comparisons.diff import diff  # noqa: E402
from stack_profile.traces.trace import Trace  # noqa: E402

LAYERS, BATCH, WIDTH, INNER = 8, 64, 128, 320
CHANGED = 3  # the layer that is made a tenth larger
ALLOWED = 1 / 20


def program(inner: dict[int, int]) -> tuple[Callable[..., Any], list[tuple[jax.Array, jax.Array]]]:
    """A compiled network whose layers have the inner widths of `inner`, or `INNER`; and its weights."""
    keys = jax.random.split(jax.random.key(0), 2 * LAYERS)
    widths = [inner.get(layer, INNER) for layer in range(LAYERS)]
    weights = [
        (
            jax.random.normal(keys[2 * layer], (WIDTH, width)) / WIDTH**0.5,
            jax.random.normal(keys[2 * layer + 1], (width, WIDTH)) / width**0.5,
        )
        for layer, width in enumerate(widths)
    ]

    def step(x: jax.Array, weights: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
        for layer, (up, down) in enumerate(weights):
            with jax.named_scope(f"layer_{layer}"):
                x = x + jnp.tanh(x @ up) @ down
                x = x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True))
        return x

    x = jnp.ones((BATCH, WIDTH))
    return jax.jit(step).lower(x, weights).compile(), weights


def captured(step: Callable[..., Any], weights: Any, *, steps: int) -> Trace:
    x = jax.block_until_ready(step(jnp.ones((BATCH, WIDTH)), weights))
    with tempfile.TemporaryDirectory() as folder:
        with stack_profile.capture(folder) as capture:
            for _ in range(steps):
                x = step(x, weights)
        return stack_profile.load_trace(capture.wait())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--captures", type=int, default=1, help="captures of a side")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    base, larger = program({}), program({CHANGED: INNER + INNER // 10})
    captured(*base, steps=options.steps)  # the first one has pages and caches to fill
    flagged = first = named = 0
    for pair in range(options.pairs):
        sides: tuple[list[Trace], ...] = ([], [], [])
        for _ in range(options.captures):
            for side, each in zip(sides, (base, base, larger), strict=True):
                side.append(captured(*each, steps=options.steps))
        before, same, slower = sides
        changed = [row.name for row in diff(before, same).rows if row.verdict in ("slower", "faster")]
        row = diff(before, slower, by="layer").rows[0]
        flagged += bool(changed)
        first += row.name == f"layer_{CHANGED}"
        named += row.name == f"layer_{CHANGED}" and row.verdict == "slower"
        change = row.change_before_share
        print(f"{pair + 1}: identical: {changed or 'nothing named'}; larger: {row.name} {change:+.1%} {row.verdict}")
    print(f"{flagged} of {options.pairs} identical pairs were flagged, at most {ALLOWED:.0%} may be")
    print(f"the larger layer was first in {first} and named slower in {named} of {options.pairs}")
    sys.exit(flagged > max(1, ALLOWED * options.pairs))


if __name__ == "__main__":
    main()
