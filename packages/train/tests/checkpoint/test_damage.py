"""Any flipped bit in a checkpoint is either harmless or reported."""

import random
from pathlib import Path

import pytest

from stack_core.abi.errors import CheckpointDamaged
from stack_train.checkpoint import CheckpointStore

from .conftest import CONFIG_YAML, abstract, bits, make_state


def flip_and_restore(store: CheckpointStore, file: Path, position: int, bit: int) -> bool:
    """Whether the damage was reported; it must not have changed anything otherwise."""
    intact = file.read_bytes()
    damaged = bytearray(intact)
    damaged[position] ^= 1 << bit
    file.write_bytes(damaged)
    try:
        restored = store.restore(abstract(make_state()), 1)
    except CheckpointDamaged:
        return True
    finally:
        file.write_bytes(intact)
    assert bits(restored.state) == bits(make_state(1)), (file.name, position, bit)
    assert (restored.step, restored.data_state, restored.config_yaml) == (1, {"epoch": 1}, CONFIG_YAML)
    return False


@pytest.mark.parametrize("flips_per_file", [3, pytest.param(150, marks=pytest.mark.slow)])
def test_a_flipped_bit_is_harmless_or_reported(store: CheckpointStore, flips_per_file: int) -> None:
    store.save(1, make_state(1), {"epoch": 1}, CONFIG_YAML)
    store.wait()
    choose = random.Random(0)
    files = [path for path in sorted(store.path(1).rglob("*")) if path.is_file()]
    reported: set[str] = set()
    for file in files:
        size_bytes = file.stat().st_size
        for _ in range(flips_per_file):
            if flip_and_restore(store, file, choose.randrange(size_bytes), choose.randrange(8)):
                reported.add(file.relative_to(store.path(1)).parts[0])
    assert reported == {"arrays", "config.yaml", "data_state.json", "manifest.json"}
