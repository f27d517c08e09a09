"""The engine gives what models of stack-train, and what stack-quant makes of them, give without any cache."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.generation import SamplingParams
from stack_quant.model import quantize_model
from stack_quant.rules import Rule
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.engine import LLMEngine
from stack_train.generation.generative import generative_checkpoint
from stack_train.models.llama import FAMILY, LlamaConfig

from .generation import Reference, complete, greedy

CONFIG = LlamaConfig(
    vocab_size=97,
    embed=32,
    layers=2,
    heads=4,
    kv_heads=2,
    mlp=52,
    max_positions=64,
    initializer_std=0.3,  # wide enough that logits are far from equal, and greedy choice has no ties
    dtype="float32",
)
# Prompts come in pieces of 16 tokens; 20 pages are a third of what 4 sequences may need.
SIZES = EngineConfig(max_sequences=4, step_tokens=16, page_tokens=4, pages=20)
END = 3


def model_of(config=CONFIG, seed=0):
    return jax.jit(lambda: FAMILY.build(config, key=jax.random.key(seed)))()


def opened(model):
    nowhere = Path("nowhere")
    checkpoint = generative_checkpoint(model, model.config, name="tiny", tokenizer=nowhere, origin=nowhere)
    return dataclasses.replace(checkpoint, end_tokens=frozenset({END}))


def prompts_of(*lengths, seed=0):
    random = np.random.default_rng(seed)
    return [random.integers(0, CONFIG.vocab_size, length).tolist() for length in lengths]


@pytest.fixture(scope="module")
def checkpoint():
    return opened(model_of())


@pytest.fixture(scope="module")
def reference(checkpoint):
    return Reference(checkpoint)


@pytest.fixture(scope="module")
def engine(checkpoint):
    engine = LLMEngine(checkpoint, SIZES)
    engine.warm_up()
    with engine:
        yield engine


@pytest.mark.parametrize("length", [1, 4, 5, 16, 17, 50])
def test_alone(engine, reference, length):
    (prompt,) = prompts_of(length, seed=length)
    ((continuation,),) = complete(engine, [prompt], greedy(12))
    assert len(continuation.tokens) == 12
    assert continuation.last.finish_reason == "length"
    reference.assert_most_likely(prompt, continuation.tokens)


def test_all_in_a_crowd_that_has_too_few_pages(engine, reference):
    before = engine.stats()
    random = np.random.default_rng(1)
    prompts = prompts_of(*random.integers(1, 40, 32))
    counts = random.integers(16, 25, 32).tolist()
    found = complete(engine, prompts, [greedy(count) for count in counts], in_one_turn=True)
    for prompt, count, (continuation,) in zip(prompts, counts, found, strict=True):
        assert len(continuation.tokens) == count
        reference.assert_most_likely(prompt, continuation.tokens)
    after = engine.stats()
    assert after.preemptions > before.preemptions
    assert after.running == after.waiting == after.used_pages == after.compilations == 0


def test_a_prompt_that_begins_like_an_earlier_one(engine, reference):
    (first, other) = prompts_of(22, 5, seed=2)
    complete(engine, [first], greedy(3))
    for prompt, cached in ((first, 20), ([*first[:10], *other], 8), (first[:21], 20), (first[:20], 16)):
        ((continuation,),) = complete(engine, [prompt], greedy(10))
        assert continuation.last.cached_tokens == cached
        reference.assert_most_likely(prompt, continuation.tokens)


def test_log_probabilities_are_the_models_own(engine, reference):
    prompts = prompts_of(30, 7, 1, seed=3)
    sampling = SamplingParams(
        max_tokens=8, temperature=0.7, top_k=20, presence_penalty=1.0, seed=0, logprobs=4, prompt_logprobs=2
    )
    for prompt, (continuation,) in zip(prompts, complete(engine, prompts, sampling), strict=True):
        expected = reference.logprobs([*prompt, *continuation.tokens])
        first = continuation.updates[0]
        assert first.prompt_logprobs[0] is None
        figures = [*first.prompt_logprobs[1:], *continuation.logprobs]
        assert len(figures) == len(expected) - (continuation.last.finish_reason == "length")
        for place, (figure, row) in enumerate(zip(figures, expected, strict=False)):
            assert figure.logprob == pytest.approx(row[figure.token], abs=1e-4)
            assert figure.rank == 1 + np.sum(row > row[figure.token])
            tops = [token for token, _ in figure.top]
            assert tops == np.argsort(-row)[: 2 if place < len(prompt) - 1 else 4].tolist()
            np.testing.assert_allclose([logprob for _, logprob in figure.top], row[tops], atol=1e-4)


def test_a_request_gets_the_same_alone_and_in_a_crowd(engine):
    prompts = prompts_of(9, 21, 33, seed=4)
    settings = [
        SamplingParams(max_tokens=15, seed=7, logprobs=0, ignore_eos=True, **more)
        for more in ({}, {"temperature": 2.0, "top_p": 0.9}, {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.3})
    ]
    alone = [complete(engine, [prompt], sampling)[0][0] for prompt, sampling in zip(prompts, settings, strict=True)]
    others = prompts_of(*range(1, 40, 2), seed=5)
    crowd = [SamplingParams(max_tokens=20, seed=index) for index in range(len(others))]
    found = complete(engine, [*prompts, *others], [*settings, *crowd])[:3]
    for before, (after,) in zip(alone, found, strict=True):
        assert before.tokens == after.tokens
        np.testing.assert_allclose(
            [figure.logprob for figure in before.logprobs], [figure.logprob for figure in after.logprobs], atol=1e-4
        )


def test_a_seed_decides_the_draws_and_each_continuation_has_its_own(engine):
    (prompt,) = prompts_of(10, seed=6)

    def drawn(seed):
        ((first, second),) = complete(engine, [prompt], SamplingParams(max_tokens=12, n=2, seed=seed))
        return first.tokens, second.tokens

    assert drawn(1) == drawn(1) != drawn(2)
    assert drawn(1)[0] != drawn(1)[1]


def test_an_end_token_ends(engine, reference):
    (prompt,) = prompts_of(6, seed=7)
    ended = greedy(10, ignore_eos=False, logit_bias={END: 100.0})
    ((first,), (least,), (ignoring,)) = complete(
        engine,
        [prompt] * 3,
        [ended, dataclasses.replace(ended, min_tokens=4), dataclasses.replace(ended, ignore_eos=True)],
    )
    assert (first.tokens, first.last.finish_reason) == ([END], "stop")
    assert least.tokens[-1] == END and END not in least.tokens[:-1] and len(least.tokens) == 5
    reference.assert_most_likely(prompt, least.tokens[:4])
    assert (ignoring.tokens, ignoring.last.finish_reason) == ([END] * 10, "length")


def test_new_weights_take_effect_and_what_was_kept_of_old_ones_is_forgotten(engine, checkpoint, reference):
    (prompt,) = prompts_of(20, seed=8)
    new = opened(model_of(seed=1)).load_params()
    ((before,),) = complete(engine, [prompt], greedy(8))
    try:
        engine.update_weights(new)
        ((after,),) = complete(engine, [prompt], greedy(8))
    finally:
        engine.update_weights(checkpoint.load_params())
    ((again,),) = complete(engine, [prompt], greedy(8))
    assert after.last.cached_tokens == again.last.cached_tokens == 0
    assert before.tokens == again.tokens != after.tokens
    reference.assert_most_likely(prompt, after.tokens, params=new)


# Both sequences run in every step, so that there are steps of two shapes only: every engine compiles its own.
PAIR = EngineConfig(max_sequences=2, step_tokens=16, page_tokens=8)


def pair_of_continuations(checkpoint, config):
    """(prompt, continuation) of two that end in the same step; the longer prompt comes in three pieces."""
    prompts = prompts_of(3, 30, seed=9)
    settings = [greedy(12, logprobs=0), greedy(10, logprobs=0)]
    with LLMEngine(checkpoint, config) as engine:
        found = complete(engine, prompts, settings)
    return [(prompt, continuation) for prompt, (continuation,) in zip(prompts, found, strict=True)]


def assert_equals_its_reference(checkpoint, config=PAIR, *, tolerance=0.0):
    reference = Reference(checkpoint)
    for prompt, continuation in pair_of_continuations(checkpoint, config):
        reference.assert_most_likely(prompt, continuation.tokens, tolerance=tolerance)


SAMPLE = {name: jnp.zeros((1, 8), jnp.int32) for name in ("tokens", "positions")}
W4 = [Rule(path="embedding|lm_head", weights="int8"), Rule(path=".*", weights="int4", tile_size=4)]


@pytest.mark.parametrize(
    ("variant", "layout", "page_tokens", "rules"),
    [
        pytest.param(
            {"kv_heads": 4, "tie_embeddings": True}, "phsd", 1, None, id="heads alike, tied", marks=pytest.mark.slow
        ),
        pytest.param(
            {"kv_heads": 1, "attention_bias": True, "mlp_bias": True}, "hpsd", 16, W4, id="one head of keys, biases, w4"
        ),
    ],
)
def test_models_and_layouts_of_pages(variant, layout, page_tokens, rules):
    model = model_of(dataclasses.replace(CONFIG, layers=1, **variant))
    checkpoint = opened(model if rules is None else quantize_model(model, rules, SAMPLE))
    assert_equals_its_reference(checkpoint, dataclasses.replace(PAIR, page_layout=layout, page_tokens=page_tokens))


def test_bfloat16():
    assert_equals_its_reference(
        opened(model_of(dataclasses.replace(CONFIG, layers=1, dtype="bfloat16"))), tolerance=0.1
    )


@pytest.mark.slow  # stack-serve's own tests have an engine with a cache of codes
@pytest.mark.parametrize(("cache_dtype", "tolerance"), [("int8", 0.04), ("fp8_e4m3", 0.2)])
def test_a_cache_of_codes_is_close(checkpoint, reference, cache_dtype, tolerance):
    config = dataclasses.replace(PAIR, cache_dtype=cache_dtype)
    for prompt, continuation in pair_of_continuations(checkpoint, config):
        expected = reference.logprobs([*prompt, *continuation.tokens])[len(prompt) - 1 : -1]
        own = [figure.logprob for figure in continuation.logprobs]
        difference = np.abs(own - expected[np.arange(len(own)), continuation.tokens])
        assert 1e-5 < difference.mean() < tolerance


@pytest.mark.slow  # by default of another family, and in four bits above
def test_a_model_whose_activations_are_quantized():
    """Where sums in another order take an activation to its next code, a token may be less likely by that much."""
    rules = [Rule(path=".*", weights="int8", activations="int8")]
    assert_equals_its_reference(opened(quantize_model(model_of(), rules, SAMPLE)), tolerance=0.1)


@pytest.mark.parametrize("engines", ["few", pytest.param("all", marks=pytest.mark.slow)])
def test_eight_devices(engines):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    command = [sys.executable, "-W", "error", Path(__file__).with_name("serving_on_eight_devices.py"), engines]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
