"""Sequences that devices share; `test_on_eight_devices.py` runs this in a process that has eight.

The argument `all` adds further meshes.
"""

import dataclasses
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.errors import ShardingError
from stack_core.abi.mesh import MeshConfig, use_mesh
from stack_core.chips.device_mesh import make_mesh
from stack_core.ops.definitions import linear_cross_entropy
from stack_core.ops.dual_chunk import DualChunk
from stack_core.ops.references import attention_tiles
from stack_core.programs.hlo import parse_hlo
from stack_core.programs.hlo_costs import executed_flops
from stack_train.models import (
    bamba,
    deepseek_v3,
    deepseek_v4,
    deepseek_v32,
    gemma3,
    gpt_oss,
    llama,
    llama4,
    minimax,
    qwen2,
    qwen3_next,
)
from stack_train.nn.context import from_zigzag, to_zigzag
from stack_train.objectives import CausalLMConfig
from stack_train.optim import SgdConfig
from stack_train.step.program import Program
from stack_train.step.step import make_step

SIZES = {"vocab_size": 64, "embed": 32, "max_positions": 32, "dtype": "float32", "initializer_std": 0.2}
# Attention in a window and over everything; to one latent; grouped.
WINDOWED = gemma3.Gemma3Config(**SIZES, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48, window=5, period=2)
LATENT = deepseek_v3.DeepseekV3Config(
    **SIZES, layers=2, heads=2, mlp=32, experts=4, active_experts=2, expert_mlp=16, kv_rank=16, nope_dim=8, rope_dim=4
)
# The indexer of sequences of 32 tokens selects all keys, so it does not need them in order.
INDEXED = deepseek_v32.DeepseekV32Config(
    **SIZES, layers=1, heads=2, mlp=32, query_rank=16, kv_rank=16, nope_dim=8, rope_dim=4, index_dim=8, index_count=32
)
COMPRESSED = deepseek_v4.DeepseekV4Config(
    **SIZES, layers=1, heads=2, mlp=16, experts=2, kinds=("heavy",), heavy_rate=3, rope_dim=4, output_groups=1
)
GROUPED = llama.LlamaConfig(**SIZES, layers=2, heads=4, kv_heads=2, mlp=64, context_keys="gathered")
CHUNKED = llama4.Llama4Config(
    **SIZES, layers=2, heads=4, kv_heads=2, mlp=64, sparse_step=3, nope_interval=2, chunk=6, temperature_tokens=5
)
GATHERED = dataclasses.replace(WINDOWED, context_keys="gathered")
ULYSSES = dataclasses.replace(WINDOWED, context_keys="ulysses")
SINKS = gpt_oss.GptOssConfig(
    **SIZES, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=16, experts=4, active_experts=2, window=5
)
# Recurrent states, with and without a convolution, whose transitions are matrices or factors; and a layer that predicts
# later tokens.
SPARSE = {"heads": 4, "kv_heads": 2, "experts": 4, "active_experts": 2, "layers": 2}
DELTA = qwen3_next.Qwen3NextConfig(
    **SIZES,
    **SPARSE,
    period=2,
    head_dim=8,
    key_heads=2,
    value_heads=4,
    key_dim=8,
    value_dim=12,
    expert_mlp=8,
    mtp_layers=1,
)
MAMBA = bamba.BambaConfig(**SIZES, layers=2, heads=4, kv_heads=2, mlp=32, attention_layers=(1,))
LIGHTNING = minimax.MiniMaxConfig(**SIZES, **SPARSE, mlp=8)
AHEAD = dataclasses.replace(LATENT, mtp_layers=2)
FEW = (
    (qwen3_next.FAMILY, DELTA, {"context": 4}),
    (gemma3.FAMILY, WINDOWED, {"context": 2, "tensor": 2}),
    (gemma3.FAMILY, ULYSSES, {"context": 4}),  # two key heads for four devices
)
ALL = (
    *FEW,
    (gemma3.FAMILY, WINDOWED, {"context": 2, "tensor": 2, "data": 2}),
    (gemma3.FAMILY, GATHERED, {"context": 4}),
    (gemma3.FAMILY, WINDOWED, {"context": 4}),
    (llama.FAMILY, GROUPED, {"context": 2, "fsdp": 2}),
    (gemma3.FAMILY, WINDOWED, {"context": 8}),
    (gemma3.FAMILY, WINDOWED, {"context": 4, "data": 2}),
    (llama.FAMILY, GROUPED, {"context": 4, "tensor": 2}),
    (llama4.FAMILY, CHUNKED, {"context": 4}),
    (llama4.FAMILY, dataclasses.replace(CHUNKED, context_keys="gathered"), {"context": 2}),
    (deepseek_v3.FAMILY, LATENT, {"context": 2, "expert": 2}),
    (deepseek_v32.FAMILY, INDEXED, {"context": 2}),
    (deepseek_v3.FAMILY, dataclasses.replace(LATENT, context_keys="gathered"), {"context": 2}),
    (deepseek_v3.FAMILY, dataclasses.replace(LATENT, context_keys="ulysses"), {"context": 2, "expert": 2}),
    (llama.FAMILY, dataclasses.replace(GROUPED, context_keys="ulysses"), {"context": 2, "fsdp": 2, "tensor": 2}),
    (llama4.FAMILY, dataclasses.replace(CHUNKED, context_keys="ulysses"), {"context": 2}),
    (qwen3_next.FAMILY, DELTA, {"context": 2, "tensor": 2, "data": 2}),
    (bamba.FAMILY, MAMBA, {"context": 4, "tensor": 2}),
    (bamba.FAMILY, MAMBA, {"context": 2, "fsdp": 2}),
    (minimax.FAMILY, LIGHTNING, {"context": 2}),
    (deepseek_v3.FAMILY, AHEAD, {"context": 2, "expert": 2}),
    (gpt_oss.FAMILY, SINKS, {"context": 4}),
    (gpt_oss.FAMILY, dataclasses.replace(SINKS, context_keys="ulysses"), {"context": 2}),
)
ROWS, SEQ = 4, 32
MOST_WORK = 1.25  # of a device's even share of the FLOPs: of a conditional both branches are counted
RECURRENT_WORK = 1.75  # recurrences run twice


def make_program(family, config, sizes):
    mesh = make_mesh(MeshConfig(**{"fsdp": 1, **sizes}), jax.devices()[: math.prod(sizes.values())])
    return Program(make_step((family, config), CausalLMConfig(), SgdConfig()), mesh)


def packed_batch():
    """Rows with documents that end in different places, and padding."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, SIZES["vocab_size"], (ROWS, SEQ + 1), dtype=np.int32)
    lengths = ((6, 20, 6), (32,), (3, 3, 17, 5), (11, 21))
    segments, positions = np.zeros((ROWS, SEQ), np.int32), np.zeros((ROWS, SEQ), np.int32)
    for row, documents in enumerate(lengths):
        ends = np.cumsum(documents)
        for number, (end, length) in enumerate(zip(ends, documents, strict=True), 1):
            segments[row, end - length : end], positions[row, end - length : end] = number, np.arange(length)
    targets = np.where(segments == 0, -100, tokens[:, 1:])
    targets[0, :5] = -100
    return {"tokens": tokens[:, :-1], "targets": targets, "positions": positions, "segment_ids": segments}


def gradients(program, batch, start=None):
    state = program.init(key=jax.random.key(0)) if start is None else jax.device_put(start, program.state_shardings)
    placed = jax.device_put(batch, program.batch_shardings(batch))
    compiled = jax.jit(program.on_mesh(program.step.gradients)).lower(state, placed).compile()
    found, metrics, _ = compiled(state, placed)
    return jax.device_get(found), float(metrics["loss"].value), compiled, state


def shared_sequences_train_as_whole_ones_do(chosen):
    """Returns the results of one device by their model."""
    batch = packed_batch()
    whole = {}
    for family, config, sizes in chosen:
        model = dataclasses.replace(config, context_keys="ring")  # of which one device has no use
        if model not in whole:
            whole[model] = gradients(make_program(family, model, {"data": 1}), batch)
        expected, loss, of_one, state = whole[model]
        found, of_mesh, compiled, _ = gradients(make_program(family, config, sizes), batch, state)
        where = f"{family.name}, {config.context_keys}, {sizes}"
        np.testing.assert_allclose(of_mesh, loss, rtol=1e-5, err_msg=where)
        for one, several in zip(*map(jax.tree.leaves, (expected, found)), strict=True):
            np.testing.assert_allclose(several, one, rtol=0, atol=1e-5 * np.abs(one).max(), err_msg=where)
        share = flops(compiled) / (flops(of_one) / math.prod(sizes.values()))
        assert share <= (RECURRENT_WORK if model in (DELTA, MAMBA, LIGHTNING) else MOST_WORK), (where, share)
    return whole


def gathered_keys_give_the_same_loss(whole):
    """Without gradients, which the argument `all` adds."""
    _, loss, _, state = whole[WINDOWED]
    program, batch = make_program(gemma3.FAMILY, GATHERED, {"context": 4}), packed_batch()
    shardings = program.variable_shardings, program.batch_shardings(batch)
    found = jax.jit(program.on_mesh(program.step.evaluate))(*jax.device_put((state.params, batch), shardings))
    np.testing.assert_allclose(float(found["loss"]), loss, rtol=1e-5)


def flops(compiled):
    return executed_flops(parse_hlo(compiled.as_text())).total


def zigzag_order_is_undone_where_it_is():
    """Each device moves its two blocks, and gathers nothing."""
    tokens = jnp.arange(2 * SEQ).reshape(2, SEQ)

    def there_and_back(tokens):
        with use_mesh(make_mesh(MeshConfig(fsdp=2, context=4))):
            return from_zigzag(to_zigzag(tokens)[..., None].astype(jnp.float32))[..., 0]

    compiled = jax.jit(there_and_back).lower(tokens).compile()
    np.testing.assert_array_equal(compiled(tokens), tokens)
    assert "all-gather(" not in compiled.as_text().split("ENTRY")[1].split("collective-permute")[0]


def layers_that_need_the_sequence_in_order_are_refused_by_name():
    small = {**SIZES, "layers": 1, "heads": 2, "mlp": 8}
    chosen = (
        (deepseek_v32.FAMILY, dataclasses.replace(INDEXED, index_count=31), "An indexer"),
        (qwen2.FAMILY, qwen2.Qwen2Config(**small, dual_chunk=DualChunk(chunk=8, local=2)), "Dual chunk attention"),
        (deepseek_v4.FAMILY, COMPRESSED, "Attention to compressed tokens"),
        (deepseek_v32.FAMILY, dataclasses.replace(INDEXED, index_training="dense"), "An indexer"),
    )
    for family, config, name in chosen:
        program = make_program(family, config, {"context": 2})
        with pytest.raises(ShardingError, match=f"{name} reads its sequence in order"):
            jax.eval_shape(program.on_mesh(program.step.gradients), program.abstract_state, packed_batch())


def blocks_shorter_than_a_convolution_are_refused():
    program = make_program(bamba.FAMILY, dataclasses.replace(MAMBA, mamba_kernel=6), {"context": 4})
    with pytest.raises(ShardingError, match=r"in blocks of 4 tokens, and a convolution reads 5 tokens"):
        jax.eval_shape(program.on_mesh(program.step.gradients), program.abstract_state, packed_batch())


if __name__ == "__main__":
    attention_tiles._TILE_BYTES = 1
    attention_tiles._FEWEST_ROWS = attention_tiles._FEWEST_KEYS = 8
    linear_cross_entropy._FEWEST_ROWS = linear_cross_entropy._CHUNK_BYTES = 1
    linear_cross_entropy._MOST_CHUNKS = 2
    zigzag_order_is_undone_where_it_is()
    layers_that_need_the_sequence_in_order_are_refused_by_name()
    blocks_shorter_than_a_convolution_are_refused()
    gathered_keys_give_the_same_loss(shared_sequences_train_as_whole_ones_do(ALL if "all" in sys.argv else FEW))
