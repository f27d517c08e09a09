"""QK-clip in a training step: the factors against NumPy, bounded logits, and models that it cannot bound."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from stack_core.abi.errors import ConfigError, TrainingError
from stack_core.abi.mesh import MeshConfig
from stack_core.chips.device_mesh import make_mesh
from stack_train.models import deepseek_v32, gemma3, llama, qwen3
from stack_train.objectives import CausalLMConfig
from stack_train.optim import AdamWConfig, GroupConfig, MuonConfig, OuterConfig, ScheduleFreeConfig, SgdConfig
from stack_train.optim.weight_factors import scale_weights
from stack_train.step.program import Program
from stack_train.step.step import make_step
from stack_train.trainer import Trainer

SIZES = {"vocab_size": 61, "layers": 1, "embed": 16, "mlp": 24, "max_positions": 32, "dtype": "float32"}
MODEL = llama.LlamaConfig(**SIZES, heads=4, kv_heads=2, initializer_std=0.3)
TAU = 4.0


def make_batch(seed=0, rows=4, seq=12):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, MODEL.vocab_size, (rows, seq + 1), dtype=np.int32)
    segments = np.repeat([[1] * 5 + [2] * (seq - 6) + [0]], rows, axis=0).astype(np.int32)
    positions = np.repeat([[*range(5), *range(seq - 6), 0]], rows, axis=0).astype(np.int32)
    targets = np.where(segments > 0, tokens[:, 1:], -100)
    return {"tokens": tokens[:, :-1], "targets": targets, "positions": positions, "segment_ids": segments}


def make_program(optimizer, model=MODEL, **changes):
    step = make_step(model, CausalLMConfig(), optimizer, steps=40, **changes)
    return Program(step, make_mesh(MeshConfig(), devices=jax.devices()[:1]))


def rotated(x, positions, theta=10_000.0):
    half = x.shape[-1] // 2
    angles = positions[..., None, None] * theta ** (-np.arange(half) / half)
    low, high = x[..., :half], x[..., half:]
    return np.concatenate(
        [low * np.cos(angles) - high * np.sin(angles), high * np.cos(angles) + low * np.sin(angles)], axis=-1
    )


def largest_logits(params, batch, kv_heads):
    """S of each head of a Llama with one layer, in float64."""
    block = jax.tree.map(lambda x: np.asarray(x[0], np.float64), params["blocks"][0][0])
    x = np.asarray(params["embedding"], np.float64)[batch["tokens"]]
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + MODEL.norm_epsilon) * block["attention_norm"]
    query, key = (
        rotated((x @ block["attention"][name]["kernel"]).reshape(*x.shape[:2], heads, 4), batch["positions"])
        for name, heads in (("query", 4), ("key", kv_heads))
    )
    logits = np.einsum("bqhd,bkhd->bhqk", query, np.repeat(key, 4 // kv_heads, axis=2)) / 2
    segments, places = batch["segment_ids"], np.arange(x.shape[1])
    visible = (segments[:, :, None] == segments[:, None, :]) & (segments > 0)[:, None] & (places[:, None] >= places)
    return np.where(visible[:, None], logits, -np.inf).max((0, 2, 3))


@pytest.mark.parametrize(
    ("kv_heads", "optimizer", "parts"),
    [(2, MuonConfig(learning_rate=0.05), 2), (4, AdamWConfig(learning_rate=0.05, ema_decay=0.5), 1)],
    ids=["muon, shared keys", "adamw, own keys"],
)
def test_an_update_is_that_of_the_optimizer_and_then_of_the_clip(kv_heads, optimizer, parts):
    model = dataclasses.replace(MODEL, kv_heads=kv_heads)
    plain, clipped = (
        make_program(each, model, accumulation_steps=parts)
        for each in (optimizer, dataclasses.replace(optimizer, qk_clip=TAU))
    )
    batch, state = make_batch(), plain.init(key=jax.random.key(0))
    largest = largest_logits(state.params, batch, kv_heads)
    gamma = np.minimum(1, TAU / largest)
    assert largest.min() < TAU < largest.max(), "some heads are clipped and others are not"
    assert jax.tree.structure(clipped.abstract_state) == jax.tree.structure(plain.abstract_state)
    (expected, _), (found, metrics) = (
        each.compile(batch)(each.init(key=jax.random.key(0)), batch) for each in (plain, clipped)
    )
    np.testing.assert_allclose(float(metrics["max_logit"]), largest.max(), rtol=1e-5)
    assert float(metrics["clipped_heads"]) == np.sum(largest > TAU)
    factors = {"query": gamma} if kv_heads == 2 else {"query": np.sqrt(gamma), "key": np.sqrt(gamma)}

    def check(path, ours, theirs):
        ours, theirs = np.asarray(ours), np.asarray(theirs)
        factor = np.ones(1) if path[-1].key != "kernel" else factors.get(path[-2].key, np.ones(1))
        factor = np.repeat(factor, theirs.shape[-1] // factor.size).astype(np.float32)
        # Of two programs, whose float32 sums of entries of up to 0.7 round differently.
        np.testing.assert_allclose(ours, theirs * factor, rtol=1e-5, atol=1e-6)

    jax.tree.map_with_path(check, found.params, expected.params)
    if optimizer.ema_decay is not None:  # the average is taken of the scaled weights
        key = found.params["blocks"][0][0]["attention"]["key"]["kernel"]
        average = clipped.step.evaluation_variables(found)["blocks"][0][0]["attention"]["key"]["kernel"]
        first = state.params["blocks"][0][0]["attention"]["key"]["kernel"]
        np.testing.assert_allclose(average, first + (1 - 2 / 11) * (key - first), rtol=1e-5, atol=1e-7)


def test_a_factor_of_one_keeps_the_update_bit_for_bit():
    params, gradients = ({"kernel": np.random.default_rng(seed).normal(size=(5, 2)).astype("f4")} for seed in (0, 1))
    plain = optax.sgd(0.1)
    expected, _ = plain.update(gradients, plain.init(params), params)
    factors = {("kernel",): jnp.array([1.0, 0.25], jnp.float32)}
    found, _ = scale_weights(plain).update(gradients, plain.init(params), params, weight_factors=factors)
    np.testing.assert_array_equal(found["kernel"][:, 0], expected["kernel"][:, 0])
    scaled = 0.25 * (params["kernel"] + expected["kernel"])[:, 1]
    np.testing.assert_allclose(params["kernel"][:, 1] + found["kernel"][:, 1], scaled, rtol=1e-6)


def test_logits_that_explode_stay_bounded():
    optimizer, batch, found = AdamWConfig(learning_rate=0.3, weight_decay=0.0, clip_norm=None), make_batch(), {}
    for tau in (1e9, 10.0):  # the first one only records
        program = make_program(dataclasses.replace(optimizer, qk_clip=tau))
        step, state = program.compile(batch), program.init(key=jax.random.key(0))
        logits = []
        for _ in range(25):
            state, metrics = step(state, batch)
            logits.append(float(metrics["max_logit"]))
        found[tau] = max(logits)
    assert found[1e9] > 500
    # Each update may exceed the threshold once more, before it is clipped.
    assert 10 < found[10.0] < 30


def test_a_resumed_run_is_the_same(tmp_path):
    batches = [make_batch(seed) for seed in range(4)]
    make = lambda output: Trainer(
        MODEL,
        batches,
        loss=CausalLMConfig(),
        optimizer=MuonConfig(learning_rate=0.05, qk_clip=TAU),
        steps=4,
        output=output,
    )
    whole = make(None)
    whole.train()
    make(tmp_path).train(2)
    resumed = make(tmp_path)
    resumed.train()
    assert [line["max_logit"] for line in whole.history[2:]] == [line["max_logit"] for line in resumed.history]
    jax.tree.map(np.testing.assert_array_equal, whole.state.params, resumed.state.params)


QWEN3 = qwen3.Qwen3Config(**SIZES, heads=4, kv_heads=2, head_dim=4)
GEMMA3 = gemma3.Gemma3Config(**SIZES, heads=4, kv_heads=2, head_dim=4, window=4)
INDEXED = deepseek_v32.DeepseekV32Config(
    **SIZES, heads=2, query_rank=8, kv_rank=8, nope_dim=4, rope_dim=4, index_dim=8, index_count=4
)


@pytest.mark.parametrize(
    ("model", "optimizer", "message"),
    [
        (QWEN3, SgdConfig(qk_clip=3), r"qk_clip is 3, but it has no effect on 'blocks/0/0/attention': .*\(QK-norm\)"),
        (GEMMA3, SgdConfig(qk_clip=3), r"QK-norm"),
        (INDEXED, SgdConfig(qk_clip=3), r"its indexer selects the keys"),
        (
            MODEL,
            SgdConfig(qk_clip=3, groups={".*query/.*": GroupConfig(frozen=True)}),
            r"it scales blocks/0/0/attention/query/kernel, which the run does not train",
        ),
        (MODEL, SgdConfig(qk_clip=3, outer=OuterConfig(every_steps=2, replicas=2)), "outer has several replicas"),
    ],
    ids=["qk-norm", "gemma", "indexer", "frozen", "replicas"],
)
def test_models_that_it_cannot_bound_are_refused(model, optimizer, message):
    with pytest.raises(ConfigError, match=message):
        make_step(model, CausalLMConfig(), optimizer, steps=4)


def test_other_refusals():
    with pytest.raises(ConfigError, match="qk_clip is 3: schedule_free evaluates an average"):
        ScheduleFreeConfig(qk_clip=3)
    transformation = SgdConfig(qk_clip=3).build(4, {"matrix": ("embed", "mlp")})
    params = {"matrix": np.ones((2, 2), np.float32)}
    with pytest.raises(TrainingError, match=r"qk_clip reads the logits .*train by make_step"):
        transformation.update(params, transformation.init(params), params)
