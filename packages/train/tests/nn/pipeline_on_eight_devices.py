"""Layers in stages; `test_on_eight_devices.py` runs this in a process that has eight devices.

The argument `all` adds further meshes and schedules, and up to 128 microbatches.
"""

import dataclasses
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from stack_core.abi.mesh import MeshConfig
from stack_core.abi.metrics import Metric
from stack_core.chips.device_mesh import make_mesh
from stack_core.ops.dual_chunk import DualChunk
from stack_core.programs.hlo import parse_hlo
from stack_core.programs.hlo_costs import executed_flops
from stack_train.models.bamba import BambaConfig
from stack_train.models.deepseek_v3 import DeepseekV3Config
from stack_train.models.gemma3 import Gemma3Config
from stack_train.models.llama import LlamaConfig
from stack_train.models.nemotron_h import NemotronHConfig
from stack_train.models.qwen2 import Qwen2Config
from stack_train.nn.schedules import schedule
from stack_train.nn.stack import NamedRemat
from stack_train.objectives import CausalLMConfig
from stack_train.optim import SgdConfig
from stack_train.optim.groups import GroupConfig
from stack_train.step.precision import Precision
from stack_train.step.program import Program
from stack_train.step.step import make_step

SIZES = {"vocab_size": 48, "layers": 8, "embed": 32, "heads": 4, "kv_heads": 2, "mlp": 64, "max_positions": 16}
SIZES |= {"dtype": "float32", "initializer_std": 0.2}
MODEL = LlamaConfig(**SIZES)
HYBRID = BambaConfig(
    **{**SIZES, "layers": 4, "initializer_std": 0.05},
    attention_layers=(1, 3),
    mamba_heads=4,
    mamba_head_dim=8,
    mamba_state=6,
)
DUAL_CHUNKS = Qwen2Config(**{**SIZES, "layers": 4}, dual_chunk=DualChunk(chunk=6, local=2))
ONE_MIXER = NemotronHConfig(
    **{**SIZES, "layers": 12, "initializer_std": 0.05},
    pattern="M-*",
    mamba_heads=4,
    mamba_head_dim=8,
    mamba_state=6,
)
EXPERTS = {"experts": 8, "active_experts": 3, "expert_mlp": 24}
BALANCED = DeepseekV3Config(
    **SIZES | EXPERTS | {"layers": 5, "kv_heads": None},
    query_rank=16,
    kv_rank=8,
    nope_dim=8,
    rope_dim=4,
    value_dim=8,
    dense_layers=1,
    expert_groups=4,
    kept_groups=3,
    bias_rate=0.01,
    mtp_layers=1,
)
PERIODIC = Gemma3Config(**SIZES | {"layers": 9}, head_dim=8, window=8, period=2)
FROZEN = {"embedding": GroupConfig(frozen=True), "blocks/.*/query_up": GroupConfig(frozen=True)}
BALANCED_OBJECTIVE = CausalLMConfig(balance_loss=0.1, router_z_loss=0.01, mtp_loss=0.3)
KEPT = NamedRemat(save=("attention",), offload=("query", "hidden"))
MICROBATCHES, SEQ = 4, 16
FEW = (
    ("1f1b", 1, {"stage": 2, "fsdp": 2}),
    ("interleaved", 2, {"stage": 2, "tensor": 2}),
)
ALL = (
    *FEW,
    ("1f1b", 1, {"stage": 4, "fsdp": 2}),
    ("interleaved", 2, {"stage": 2, "tensor": 2, "data": 2}),
    ("gpipe", 1, {"stage": 2}),
    ("1f1b", 1, {"stage": 4, "data": 2}),
    ("1f1b", 1, {"stage": 2, "tensor": 2}),
    ("1f1b", 1, {"stage": 8}),
    ("interleaved", 2, {"stage": 4, "fsdp": 2}),
    ("gpipe", 1, {"stage": 4, "fsdp": 2}),
)
MIXED = (
    ("1f1b", 1, {"stage": 2, "expert": 2, "fsdp": 2}),
    ("interleaved", 2, {"stage": 2, "expert": 2}),
    ("gpipe", 1, {"stage": 4, "data": 2}),
    ("1f1b", 1, {"stage": 2, "context": 4}),
    ("1f1b", 1, {"stage": 4, "context": 2}),
)


def make_program(
    sizes, name=None, chunks=1, *, microbatches=MICROBATCHES, model=MODEL, objective=None, groups=None, **changes
):
    stages = sizes.get("stage", 1)
    mesh = make_mesh(MeshConfig(**{"fsdp": 1, **sizes}), jax.devices()[: math.prod(sizes.values())])
    of_stages = schedule(name, stages=stages, microbatches=microbatches, chunks=chunks) if name else None
    optimizer = SgdConfig(groups=groups or {})
    return Program(make_step(model, objective or CausalLMConfig(), optimizer, schedule=of_stages, **changes), mesh)


def batch_of(rows):
    """Packed rows, of which some have many more targets than others."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, MODEL.vocab_size, (rows, SEQ + 1), dtype=np.int32)
    targets = tokens[:, 1:].copy()
    targets[::3, : SEQ // 2] = -100
    segments = np.where(np.arange(SEQ)[None] < rng.integers(1, SEQ, (rows, 1)), 1, 2).astype(np.int32)
    positions = np.tile(np.arange(SEQ, dtype=np.int32), (rows, 1))
    return {"tokens": tokens[:, :-1], "targets": targets, "positions": positions, "segment_ids": segments}


def compiled_gradients(program, batch):
    shapes = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
        for (name, x), s in zip(batch.items(), program.batch_shardings(batch).values(), strict=True)
    }
    return jax.jit(program.on_mesh(program.step.gradients)).lower(program.abstract_state, shapes).compile()


def stages_give_the_gradients_of_one_device(chosen, model=MODEL):
    batch = batch_of(16)
    single = make_program({"data": 1}, model=model)
    start = single.init(key=jax.random.key(0))
    expected, loss = of(single, start, batch)
    for name, chunks, sizes in chosen:
        kept = dataclasses.replace(model, remat=KEPT) if "tensor" in sizes else model
        program = make_program(sizes, name, chunks, model=kept)
        found, of_stages = of(program, start, batch)
        where = f"{name}, {chunks} chunks, {sizes}"
        np.testing.assert_allclose(of_stages, loss, rtol=1e-6, err_msg=where)
        for one, several in zip(*map(jax.tree.leaves, (expected, found)), strict=True):
            np.testing.assert_allclose(several, one, rtol=0, atol=1e-6, err_msg=where)
        if "fsdp" in sizes:
            placed = jax.device_put(start.params, program.variable_shardings)
            evaluate = jax.jit(program.on_mesh(program.step.evaluate))
            again = evaluate(placed, jax.device_put(batch, program.batch_shardings(batch)))
            np.testing.assert_allclose(float(again["loss"]), loss, rtol=1e-6, err_msg=where)


def mixtures_in_stages_equal_one_device(chosen, model=BALANCED):
    """One device accumulates the gradients of the same microbatches, whose updates of biases follow one another."""
    batch = batch_of(16)
    # Padding: a load of exactly 1 / experts, which 64 tokens can have, rounds to either side of it.
    batch["segment_ids"][:MICROBATCHES, -1], batch["targets"][:MICROBATCHES, -1] = 0, -100
    settings = {"model": model, "objective": BALANCED_OBJECTIVE, "groups": FROZEN}
    single = make_program({"data": 1}, accumulation_steps=MICROBATCHES, **settings)
    start = single.init(key=jax.random.key(0))
    assert len(jax.tree.leaves(start.frozen)) == 3
    expected = all_results(single, start, batch)
    for before, after in zip(*map(jax.tree.leaves, (start.mutable, expected[2])), strict=True):
        assert len(np.unique(np.abs(after - before).round(3))) > 1, "the biases have moved by different amounts"
    for name, chunks, sizes in chosen:
        program = make_program(sizes, name, chunks, **settings)
        found = all_results(program, start, batch)
        where = f"{name}, {chunks} chunks, {sizes}"
        assert found[1].pop("dropped", 0) == 0 and found[1].keys() == expected[1].keys(), where
        for one, several in zip(*map(jax.tree.leaves, (expected, found)), strict=True):
            np.testing.assert_allclose(several, one, rtol=1e-5, atol=1e-5, err_msg=where)


class WithModels(CausalLMConfig):
    """The loss of the next token, the distance to a frozen copy of the model, and a trained head."""

    @property
    def auxiliary_models(self):
        return {"copy": "init", "head": lambda model, *, key: nnx.Linear(model.embed, 1, rngs=nnx.Rngs(key))}

    def __call__(self, model, batch, *, key, **auxiliary):
        inputs = batch["tokens"], batch["positions"], batch["segment_ids"]
        hidden, of_copy = model(*inputs).hidden, auxiliary["copy"](*inputs).hidden
        is_real = (batch["targets"] >= 0)[..., None]
        count = jnp.sum(is_real, dtype=jnp.float32)
        per_token = jnp.mean((hidden - of_copy) ** 2, axis=-1, keepdims=True) + auxiliary["head"](hidden) ** 2
        loss = Metric.mean(jnp.sum(jnp.where(is_real, per_token, 0)) / count, count)
        return loss.value, {"loss": loss}


def models_of_an_objective_in_stages_equal_one_device(chosen):
    """The layers of a frozen model run in the same ticks. A model without layers belongs to each stage."""
    batch = batch_of(16)
    single = make_program({"data": 1}, accumulation_steps=MICROBATCHES, objective=WithModels())
    start = single.init(key=jax.random.key(0))
    moved = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), start.params)
    start = dataclasses.replace(start, params=moved)
    expected = all_results(single, start, batch)
    assert all(np.abs(x).max() > 1e-4 for x in jax.tree.leaves({**expected[0], "lm_head": 1}))
    for name, chunks, sizes in chosen:
        found = all_results(make_program(sizes, name, chunks, objective=WithModels()), start, batch)
        for one, several in zip(*map(jax.tree.leaves, (expected, found)), strict=True):
            where = f"{name}, {chunks} chunks, {sizes}"
            np.testing.assert_allclose(several, one, rtol=1e-5, atol=1e-5, err_msg=where)


def all_results(program, start, batch):
    gradients, metrics, mutable = compiled_gradients(program, batch)(*place(program, start, batch))
    return jax.device_get((gradients, {name: float(metric) for name, metric in metrics.items()}, mutable))


def of(program, start, batch):
    gradients, metrics, _ = compiled_gradients(program, batch)(*place(program, start, batch))
    return jax.device_get(gradients), float(metrics["loss"])


def place(program, start, batch):
    return jax.device_put((start, batch), (program.state_shardings, program.batch_shardings(batch)))


def stages_sum_the_gradients_of_bfloat16_parameters_in_float32():
    batch = batch_of(32)
    batch["targets"] = np.maximum(batch["targets"], 0)  # weights of 16, by which products are exact
    precision = {"precision": Precision(params="bfloat16")}
    single = make_program({"data": 1}, **precision)
    start, row = single.init(key=jax.random.key(0)), {name: x[:1] for name, x in batch.items()}
    of_row = compiled_gradients(single, row)
    rows = [of_row(start, {name: x[place : place + 1] for name, x in batch.items()})[0] for place in range(32)]
    expected = jax.tree.map(lambda *parts: np.mean([np.asarray(x, np.float64) for x in parts], axis=0), *rows)
    staged = make_program({"stage": 4}, "1f1b", microbatches=32, **precision)
    compiled = compiled_gradients(staged, batch)
    assert kept_activations(compiled) <= 2 * 4 < 32
    found = compiled(*place(staged, start, batch))[0]
    for one, several in zip(*map(jax.tree.leaves, (expected, jax.device_get(found))), strict=True):
        assert several.dtype == np.float32
        error = np.linalg.norm(several - one) / np.linalg.norm(one)
        assert error < 1e-4, error  # sums in bfloat16 are off by 1e-2
        # The gradient of a row is rounded to bfloat16, in a few entries to the other neighbor by another program.
        rounded = np.mean(np.abs(several - one) > 1e-6 * np.abs(one).max())
        assert rounded < 0.02, rounded


def flops_of_layers(make):
    """Of the layers alone: of two models that differ in their number."""
    found = [
        executed_flops(parse_hlo(compiled_gradients(make(layers), batch_of(8)).as_text())).total for layers in (8, 16)
    ]
    return found[1] - found[0]


def each_stage_does_its_share_of_the_layers(schedules):
    """(M + S - 1) / (M S) of what one device does that forms activations again in its backward pass, as stages do."""

    def model_of(layers, remat="none"):
        return dataclasses.replace(MODEL, layers=layers, remat=remat)

    one = flops_of_layers(lambda layers: make_program({"data": 1}, model=model_of(layers, "full")))
    for name, chunks in schedules:
        share = (8 * chunks + 3) / (8 * chunks * 4)
        of_stage = flops_of_layers(
            lambda layers, named=(name, chunks): make_program(
                {"stage": 4}, *named, microbatches=8, model=model_of(layers)
            )
        )
        assert abs(of_stage / one / share - 1) < 0.1, (name, of_stage / one, share)


def kept_activations(compiled):
    """Inputs that a stage keeps: arrays that the loops of the program carry, as many as leading entries."""
    carried = [
        shape.dims
        for execution in parse_hlo(compiled.as_text()).executions()
        if execution.instruction.opcode == "while"
        for shape in execution.instruction.shapes
    ]
    one = (1, SEQ, MODEL.embed)  # rows of a microbatch
    return max(dims[0] for dims in carried if len(dims) == 4 and dims[1:] == one)


def what_a_stage_keeps_does_not_grow_with_microbatches(schedules, counts):
    """At most two for each stage and chunk, however many microbatches there are; GPipe keeps all."""
    for name, chunks in schedules:
        programs = (make_program({"stage": 4}, name, chunks, microbatches=count) for count in counts)
        kept = [
            kept_activations(compiled_gradients(program, batch_of(count)))
            for program, count in zip(programs, counts, strict=True)
        ]
        if name == "gpipe":
            assert kept == list(counts), kept
        else:
            assert set(kept) == {kept[0]} and kept[0] <= 2 * 4 * chunks < max(counts), kept


if __name__ == "__main__":
    everything = "all" in sys.argv
    stages_give_the_gradients_of_one_device(ALL if everything else FEW)
    stages_give_the_gradients_of_one_device((("1f1b", 1, {"stage": 2, "context": 2}),))
    stages_sum_the_gradients_of_bfloat16_parameters_in_float32()
    models_of_an_objective_in_stages_equal_one_device(FEW[:1])
    if everything:
        models_of_an_objective_in_stages_equal_one_device((FEW[1], ("gpipe", 1, {"stage": 4, "fsdp": 2})))
        mixtures_in_stages_equal_one_device(MIXED)
        schedules = (("1f1b", 1), ("interleaved", 2), ("gpipe", 1))
        for model in (HYBRID, ONE_MIXER, DUAL_CHUNKS, PERIODIC):
            stages_give_the_gradients_of_one_device((("1f1b", 1, {"stage": 2}),), model)
        for keys in ("gathered", "ulysses"):
            split = ("interleaved", 2, {"stage": 2, "context": 2, "fsdp": 2})
            stages_give_the_gradients_of_one_device((split,), dataclasses.replace(MODEL, context_keys=keys))
        for model in (HYBRID, PERIODIC):
            stages_give_the_gradients_of_one_device((("gpipe", 1, {"stage": 2, "context": 2}),), model)
        each_stage_does_its_share_of_the_layers(schedules[:2])
        what_a_stage_keeps_does_not_grow_with_microbatches(schedules, (8, 128))
