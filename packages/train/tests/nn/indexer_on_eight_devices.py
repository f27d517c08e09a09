"""Indexers learn on meshes as on one device; `test_on_eight_devices.py` runs this in a process that has eight.

The argument `all` adds further meshes and attention to all keys.
"""

import dataclasses
import math
import sys

import jax
import numpy as np

from stack_core.abi.mesh import MeshConfig
from stack_core.chips.device_mesh import make_mesh
from stack_core.ops import selection
from stack_train.models import deepseek_v32
from stack_train.objectives import CausalLMConfig
from stack_train.optim import SgdConfig
from stack_train.step.program import Program
from stack_train.step.step import make_step

SIZES = {"vocab_size": 64, "embed": 32, "max_positions": 32, "dtype": "float32", "initializer_std": 0.2}
SIZES |= {"layers": 2, "heads": 4, "mlp": 32, "query_rank": 16, "kv_rank": 16, "nope_dim": 8, "rope_dim": 4}
SPARSE = deepseek_v32.DeepseekV32Config(
    **SIZES, value_dim=8, index_heads=3, index_dim=8, index_count=5, dense_layers=2, index_training="sparse"
)
DENSE = dataclasses.replace(SPARSE, index_training="dense")
FEW = ((SPARSE, {"fsdp": 2, "tensor": 2}),)
ALL = (*FEW, (SPARSE, {"data": 2, "tensor": 4}), (DENSE, {"fsdp": 2, "tensor": 2}), (DENSE, {"data": 8}))
ROWS, SEQ = 8, 24


def batch():
    """Rows of two documents and padding, a different number of tokens in each."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 64, (ROWS, SEQ + 1), dtype=np.int32)
    places, borders = np.arange(SEQ), rng.integers(3, 9, (ROWS, 1))
    ends = rng.integers(14, SEQ, (ROWS, 1))
    segments = np.where(places < borders, 1, np.where(places < ends, 2, 0)).astype(np.int32)
    positions = np.where(places < borders, places, places - borders).astype(np.int32)
    targets = np.where(segments == 0, -100, tokens[:, 1:])
    return {"tokens": tokens[:, :-1], "targets": targets, "positions": positions, "segment_ids": segments}


def gradients(config, sizes, start=None):
    mesh = make_mesh(MeshConfig(**{"fsdp": 1, **sizes}), jax.devices()[: math.prod(sizes.values())])
    step = make_step((deepseek_v32.FAMILY, config), CausalLMConfig(index_loss=0.7), SgdConfig())
    program = Program(step, mesh)
    state = program.init(key=jax.random.key(0)) if start is None else jax.device_put(start, program.state_shardings)
    placed = jax.device_put(batch(), program.batch_shardings(batch()))
    found, metrics, _ = jax.jit(program.on_mesh(program.step.gradients))(state, placed)
    return jax.device_get(found), float(metrics["index_loss"].value), state


def indexers_learn_alike(chosen):
    alone = {}
    for config, sizes in chosen:
        if config not in alone:
            alone[config] = gradients(config, {"data": 1})
        expected, loss, state = alone[config]
        found, of_mesh, _ = gradients(config, sizes, state)
        where = f"{config.index_training}, {sizes}"
        np.testing.assert_allclose(of_mesh, loss, rtol=1e-5, err_msg=where)
        for (path, one), several in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(found), strict=True):
            assert np.abs(one).max() > 1e-6, path
            np.testing.assert_allclose(several, one, rtol=0, atol=1e-5 * np.abs(one).max(), err_msg=where)


if __name__ == "__main__":
    before = selection._BLOCK_BYTES
    selection._BLOCK_BYTES = 4 * ROWS * SEQ * 10  # two blocks or more of queries
    indexers_learn_alike(ALL if "all" in sys.argv else FEW)
    selection._BLOCK_BYTES = before
