"""Run as a script: saves checkpoints without end, until it is killed. Its argument is the directory."""

import itertools
import sys

import jax
import jax.numpy as jnp

from stack_train.checkpoint import CheckpointConfig, CheckpointStore


def state_at(step: int) -> dict[str, jax.Array]:
    return {f"leaf_{index}": jnp.full((64, 1024), step * 10 + index, jnp.float32) for index in range(6)}


def main(directory: str) -> None:
    with CheckpointStore(directory, CheckpointConfig(keep=2)) as store:
        first = store.restore(state_at(0)).step if store.latest() else 0
        for step in itertools.count(first + 1):
            store.save(step, state_at(step), {"step": step}, f"step: {step}\n")
            if step % 3:
                store.wait()
                sys.stdout.write(f"{step}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
