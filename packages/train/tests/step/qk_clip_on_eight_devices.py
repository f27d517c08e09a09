"""QK-clip on meshes; `test_on_eight_devices.py` runs this in a process that has eight devices.

The argument `all` adds further meshes.
"""

import math
import sys

import jax
import numpy as np
import pytest

from stack_core.abi.errors import ShardingError
from stack_core.abi.mesh import MeshConfig
from stack_core.chips.device_mesh import make_mesh
from stack_train.models import deepseek_v3, llama
from stack_train.nn import max_logits
from stack_train.objectives import CausalLMConfig
from stack_train.optim import MuonConfig, SgdConfig
from stack_train.step.program import Program
from stack_train.step.step import make_step

SIZES = {"vocab_size": 64, "layers": 2, "embed": 32, "mlp": 32, "max_positions": 16, "dtype": "float32"}
SHARED = llama.LlamaConfig(**SIZES, heads=8, kv_heads=4, initializer_std=0.3)
LATENT = deepseek_v3.DeepseekV3Config(
    **SIZES, heads=4, kv_rank=16, nope_dim=8, rope_dim=4, dense_layers=2, initializer_std=0.3
)
MESHES = {"few": ({"data": 2, "tensor": 2},), "all": ({"data": 2, "tensor": 2}, {"fsdp": 8}, {"fsdp": 2, "tensor": 4})}
ROWS, SEQ = 16, 16


def make_batch():
    tokens = np.random.default_rng(0).integers(0, 64, (ROWS, SEQ + 1), dtype=np.int32)
    segments = np.repeat([[1] * 6 + [2] * (SEQ - 6)], ROWS, axis=0).astype(np.int32)
    positions = np.repeat([[*range(6), *range(SEQ - 6)]], ROWS, axis=0).astype(np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "positions": positions, "segment_ids": segments}


def trained(model, sizes, optimizer, steps=3):
    mesh = make_mesh(MeshConfig(**{"fsdp": 1, **sizes}), jax.devices()[: math.prod(sizes.values())])
    program = Program(make_step(model, CausalLMConfig(), optimizer, steps=steps, accumulation_steps=2), mesh)
    step, state, metrics = program.compile(make_batch()), program.init(key=jax.random.key(0)), []
    for _ in range(steps):
        state, found = step(state, make_batch())
        metrics.append({name: float(metric.value) for name, metric in found.items()})
    return jax.device_get(state.params), metrics


def check(model, threshold, meshes):
    optimizer = MuonConfig(learning_rate=0.02, qk_clip=threshold)
    expected, metrics = trained(model, {"data": 1}, optimizer)
    heads = model.layers * model.heads
    assert 0 < metrics[0]["clipped_heads"] < heads, f"{metrics[0]}: some heads are clipped and others are not"
    for sizes in meshes:
        params, found = trained(model, sizes, optimizer)
        for ours, theirs in zip(found, metrics, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4), sizes
        jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=2e-4), params, expected)


def main(checks):
    max_logits._BLOCK_TOKENS = 8
    check(SHARED, 10.0, MESHES[checks])
    if checks == "all":
        check(LATENT, 6.0, MESHES[checks])
    with pytest.raises(ShardingError, match=r"optimizer\.qk_clip reads its sequence in order.*mesh\.context=1"):
        trained(SHARED, {"context": 2}, SgdConfig(qk_clip=10))


if __name__ == "__main__":
    main(sys.argv[1])
