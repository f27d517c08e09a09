"""A tiny DeepSeek-V3 trained with a multi-token prediction layer drafts its own tokens, which changes no answer."""

import dataclasses
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from stack_core.abi.errors import ConfigError
from stack_core.abi.generation import Constraint, GenerationRequest, SamplingParams
from stack_core.abi.plugins import registries
from stack_serve.llm.config import EngineConfig, SpeculationConfig
from stack_serve.llm.engine import LLMEngine
from stack_serve.llm.proposer import Proposer
from stack_serve.llm.speculation import Speculation
from stack_train.data.tokenizer import HuggingFaceTokenizer
from stack_train.generation.generative import generative_checkpoint
from stack_train.objectives import CausalLMConfig

from .generation import complete, greedy
from .served import write_tokenizer

SIZES = {"vocab_size": 311, "embed": 32, "layers": 1, "heads": 2, "mlp": 48, "max_positions": 96, "dtype": "float32"}
SIZES |= {"query_rank": 12, "kv_rank": 12, "nope_dim": 8, "rope_dim": 4, "value_dim": 8, "initializer_std": 0.1}
SIZES |= {"experts": 4, "active_experts": 2, "expert_mlp": 24, "dense_layers": 0}
TEXT = "the quick brown fox jumps over "
STEPS = 60
# Pages for two of the longest sequences, so that four of them preempt one another.
CONFIG = EngineConfig(max_sequences=4, step_tokens=16, page_tokens=4, pages=48, seed=1)
MTP = dataclasses.replace(CONFIG, speculation=SpeculationConfig(method="mtp", tokens=3))


def opened(model, tokenizer=Path("nowhere")):
    return generative_checkpoint(model, model.config, name="tiny", tokenizer=tokenizer, origin=None)


def untrained(family="deepseek_v3", **changes):
    entry = registries.models[family]
    known = {field.name for field in dataclasses.fields(entry.config_class)}
    sizes = {name: value for name, value in {**SIZES, "mtp_layers": 1, **changes}.items() if name in known}
    return jax.jit(lambda: entry.build(entry.config_class(**sizes), key=jax.random.key(0)))()


def batch_of(tokens, random):
    """16 rows of the periodic text, in which every tenth token is replaced by another."""
    places = random.integers(0, len(tokens), (16, 1)) + np.arange(33)
    is_other = random.random(places.shape) < 0.1
    rows = np.where(is_other, random.choice(tokens, places.shape), tokens[places % len(tokens)])
    positions = np.tile(np.arange(32), (16, 1))
    of_rows = {"positions": positions, "segment_ids": np.ones_like(positions)}
    return {"tokens": rows[:, :-1], "targets": rows[:, 1:], **of_rows}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    tokens = np.array(HuggingFaceTokenizer.load(directory).encode(TEXT)[1:])
    model = untrained()
    graph, params, rest = nnx.split(model, lambda path, leaf: leaf.get_metadata().get("trained", True), ...)
    objective, optimizer = CausalLMConfig(mtp_loss=0.3).build(), optax.adam(1e-2)

    @jax.jit
    def update(params, state, batch):
        def loss(params):
            return objective(nnx.merge(graph, params, rest, copy=True), batch, key=jax.random.key(0))[0]

        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    state, random = optimizer.init(params), np.random.default_rng(0)
    for _ in range(STEPS):
        params, state = update(params, state, batch_of(tokens, random))
    return opened(nnx.merge(graph, params, rest), directory)


@pytest.fixture(scope="module")
def plain(checkpoint):
    with LLMEngine(checkpoint, CONFIG) as engine:
        yield engine


@pytest.fixture(scope="module")
def engine(checkpoint):
    """An engine that drafts three tokens in every step without prompts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Speculation, "_cost", lambda *_: 1e-9)
        patch.setattr("stack_serve.llm.speculation._Duration.is_known", True)
        patch.setattr(Speculation, "_drafting_cost", lambda *_: 0.0)
        with LLMEngine(checkpoint, MTP) as engine:
            yield engine


def outcome(continuations):
    """Tokens, end, and log-probabilities of each continuation of a prompt."""
    return [
        (
            each.tokens,
            each.last.finish_reason,
            [(found.token, found.rank) for found in each.logprobs],
            [pytest.approx(found.logprob, abs=1e-4) for found in each.logprobs],
        )
        for each in continuations
    ]


@pytest.fixture(scope="module")
def predict(checkpoint):
    """Returns the most likely tokens after each token of a text, and the layer's drafts of those after them."""

    @jax.jit
    def most_likely(params, tokens):
        model = checkpoint.model(params)
        outputs = model(tokens, jnp.arange(tokens.shape[1])[None])
        return tuple(model.logits(hidden)[0].argmax(axis=-1) for hidden in (outputs.hidden, outputs.further[0]))

    def predict(params, text):
        tokens = np.zeros((1, 96), np.int32)
        tokens[0, : len(text)] = text
        return jax.device_get(most_likely(params, tokens))

    return predict


def drafted_and_accepted(engine, prompts, sampling):
    """Returns the continuations, and the numbers of drafted and accepted tokens."""
    before = engine.stats()
    found = complete(engine, prompts, sampling, in_one_turn=True)
    deadline_s = time.monotonic() + 60
    while (after := engine.stats()).running or after.waiting or after.used_pages:
        assert time.monotonic() < deadline_s, after
        time.sleep(0.002)
    drafted, accepted = after.drafted_tokens - before.drafted_tokens, after.accepted_tokens - before.accepted_tokens
    return found, drafted, accepted


def test_drafts_of_a_trained_layer_are_accepted_and_change_no_answer(checkpoint, engine, predict):
    prompt = checkpoint.tokenizer.encode(TEXT[:9])
    ((continuation,),), drafted, accepted = drafted_and_accepted(engine, [prompt], greedy(60))
    next_tokens, _ = predict(checkpoint.load_params(), [*prompt, *continuation.tokens])
    assert continuation.tokens == next_tokens[len(prompt) - 1 :][:60].tolist()
    assert drafted >= accepted > drafted / 3 > 0


@pytest.mark.slow  # another engine, and programs of constraints
def test_answers_are_the_same_with_drafts_of_the_models_own_layer(checkpoint, plain, engine):
    encode = checkpoint.tokenizer.encode
    settings = [
        {"temperature": 0.0, "max_tokens": 60},
        {"temperature": 0.7, "n": 2, "logprobs": 2, "logprobs_of": "processed", "max_tokens": 50},
        {"temperature": 1.2, "top_p": 0.9, "frequency_penalty": 0.3, "max_tokens": 40},
        {"temperature": 0.0, "constraint": Constraint(regex="( brown| quick| fox)+"), "max_tokens": 40},
        {"temperature": 1.0, "constraint": Constraint(choice=("brown fox jumps", "brown bread")), "max_tokens": 40},
        {"temperature": 0.0, "logprobs": 1, "max_tokens": 60},
    ]
    sampling = [SamplingParams(seed=number, **each) for number, each in enumerate(settings)]
    prompts = [encode(TEXT[: 4 + 5 * number]) for number in range(len(settings))]
    found, drafted, accepted = drafted_and_accepted(engine, prompts, sampling)
    assert list(map(outcome, found)) == list(map(outcome, complete(plain, prompts, sampling, in_one_turn=True)))
    assert drafted > accepted > drafted / 3
    assert engine.stats().preemptions > 0


def test_first_drafts_are_the_predictions_of_the_model_without_a_cache_and_end_when_they_do_not_pay(
    checkpoint, engine, predict, monkeypatch
):
    """A missing or wrong key of the layer would change a draft, and lower the acceptance."""
    found, propose = list[tuple[int, int]](), Proposer.propose

    def record(proposer, tables, rows):
        drafts = propose(proposer, tables, rows)
        found.extend((row.start, drafted[0]) for (row, _), drafted in zip(rows, drafts, strict=True) if drafted)
        return drafts

    monkeypatch.setattr(Proposer, "propose", record)
    # A random model, whose drafts depend on all keys; a trained one predicts the text from its last tokens.
    params = opened(untrained(initializer_std=0.3)).load_params()
    noise = np.random.default_rng(3).integers(0, 300, 14).tolist()
    engine.update_weights(params)
    try:
        for prompt in (noise, [*noise[:11], *noise[:5]]):  # the second one shares two pages
            found.clear()
            hits = engine.stats().prefix_hits_tokens
            (((continuation,),), *_) = drafted_and_accepted(engine, [prompt], greedy(25))
            next_tokens, predicted = predict(params, [*prompt, *continuation.tokens])
            assert continuation.tokens == next_tokens[len(prompt) - 1 :][:25].tolist()
            assert [drafted for _, drafted in found] == [predicted[start - 1] for start, _ in found]
            assert len({drafted for _, drafted in found}) > 5
        assert engine.stats().prefix_hits_tokens - hits == 8
        monkeypatch.setattr(Speculation, "_cost", lambda *_: 5.0)
        _, drafted, _ = drafted_and_accepted(engine, [noise], greedy(25))
        assert drafted == 0
    finally:
        engine.update_weights(checkpoint.load_params())


def test_models_without_the_layer_are_refused_by_name():
    for model in (untrained(mtp_layers=0), untrained("llama")):
        with pytest.raises(ConfigError, match=r"'tiny' has no layer for multi-token prediction.*model\.mtp_layers=1"):
            LLMEngine(opened(model), MTP)


@pytest.mark.slow  # another engine
def test_aborted_requests_return_their_pages(checkpoint, plain, engine):
    prompt = checkpoint.tokenizer.encode(TEXT[:9])
    request = GenerationRequest(request_id="left", prompt=tuple(prompt), sampling=SamplingParams(max_tokens=70, n=3))
    engine.submit(request)
    updates = engine.stream("left")
    for _ in range(5):
        next(updates)
    updates.close()
    found, _, accepted = drafted_and_accepted(engine, [prompt], greedy(40))
    assert list(map(outcome, found)) == list(map(outcome, complete(plain, [prompt], greedy(40)))) and accepted > 10
