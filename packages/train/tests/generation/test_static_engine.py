"""The static engine against the model itself: tokens, log-probabilities, weights, refusals."""

import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, models

from stack_core.abi.engines import Engine
from stack_core.abi.errors import ConversionError, EngineStopped, GenerationError
from stack_core.abi.generation import Constraint, GenerationRequest, SamplingParams
from stack_core.abi.plugins import registries
from stack_core.ops.kv_cache import DenseKVCache
from stack_train.generation.generate import TokenGenerator
from stack_train.generation.generative import generative_checkpoint
from stack_train.generation.sampling import SamplingConfig
from stack_train.generation.static_engine import StaticEngine, StaticEngineConfig
from stack_train.models.llama import FAMILY, LlamaConfig
from stack_train.models.qwen3_moe import Qwen3MoeConfig

from ..random_models import draw_model

CONFIG = LlamaConfig(vocab_size=24, embed=16, layers=1, heads=2, mlp=24, max_positions=40, dtype="float32")
PROMPTS = [(3, 5, 7), (1,), (2, 4, 6, 8, 10)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    letters = Tokenizer(models.WordLevel({"<s>": 0} | {chr(97 + token): token for token in range(1, 24)}, "<s>"))
    letters.add_special_tokens(["<s>"])
    letters.save(str(directory / "tokenizer.json"))
    model = draw_model(lambda: FAMILY.build(CONFIG, key=jax.random.key(0)), scale=0.3)
    return generative_checkpoint(model, CONFIG, name="tiny", tokenizer=directory, origin=Path("nowhere"))


@pytest.fixture(scope="module")
def engine(checkpoint):
    engine = StaticEngine(checkpoint, StaticEngineConfig(rows=4))
    engine.start()
    yield engine
    engine.close()


def request(name, prompt, **sampling):
    settings = SamplingParams(**{"max_tokens": 6, "seed": 7, "logprobs": 0, **sampling})
    return GenerationRequest(request_id=str(name), prompt=prompt, sampling=settings)


def ask(engine, *requests):
    for each in requests:
        engine.submit(each)
    return [list(engine.stream(each.request_id)) for each in requests]


@pytest.fixture(scope="module")
def model_logprobs(checkpoint):
    """log p of every token after each prefix of a sequence, by the model itself."""
    params, positions = checkpoint.load_params(), jnp.arange(16)[None]

    @jax.jit
    def logprobs(tokens):
        model = checkpoint.model(params)
        return jax.nn.log_softmax(model.logits(model(tokens, positions).hidden)[0], axis=-1)

    def of(tokens):
        return np.asarray(logprobs(jnp.asarray([[*tokens, *[0] * (16 - len(tokens))]])))[: len(tokens)]

    return of


def test_greedy_tokens_are_those_of_one_prompt_at_a_time(checkpoint, engine):
    assert isinstance(engine, Engine)
    generator = TokenGenerator(checkpoint)
    found = ask(engine, *(request(place, prompt, temperature=0.0) for place, prompt in enumerate(PROMPTS)))
    for prompt, (update,) in zip(PROMPTS, found, strict=True):
        assert update.tokens == tuple(generator.stream(prompt, SamplingConfig(temperature=0, max_tokens=6)))
        assert (update.finish_reason, {each.logprob for each in update.logprobs}) != ("stop", {0.0})


def test_log_probabilities_are_those_of_the_model_and_of_the_processed_distribution(model_logprobs, engine):
    for of in ("model", "processed"):
        ((update,),) = ask(engine, request(of, PROMPTS[0], temperature=0.5, top_k=5, logprobs_of=of))
        whole = (*PROMPTS[0], *update.tokens)
        logits = model_logprobs(whole)[len(PROMPTS[0]) - 1 : -1]
        if of == "processed":
            least = np.sort(logits, axis=-1)[:, -5:-4]
            kept = np.where(logits >= least, logits / 0.5, -np.inf)
            logits = kept - np.log(np.exp(kept).sum(-1, keepdims=True))
        expected = np.take_along_axis(logits, np.asarray(update.tokens)[:, None], axis=-1)[:, 0]
        np.testing.assert_allclose([each.logprob for each in update.logprobs], expected, atol=1e-5)
        assert all(each.rank <= 5 for each in update.logprobs)


def test_candidates_are_the_tokens_that_each_was_drawn_from(model_logprobs, engine):
    asked = {"temperature": 0.5, "top_k": 9, "top_p": 0.8, "candidates": True}
    found = ask(engine, request("narrow", PROMPTS[0], **asked), request("plain", PROMPTS[1]))
    ((narrow,), (plain,)) = found
    assert plain.candidates is None
    whole = (*PROMPTS[0], *narrow.tokens)
    logits = model_logprobs(whole)[len(PROMPTS[0]) - 1 : -1] / 0.5
    for row, token, candidates in zip(logits, narrow.tokens, narrow.candidates, strict=True):
        order = np.argsort(-row)[:9]
        shares = np.exp(row[order]) / np.exp(row[order]).sum()
        kept = order[np.cumsum(shares) - shares < 0.8]
        assert candidates == tuple(sorted(kept)) and token in candidates
    assert len(set(map(len, narrow.candidates))) > 1
    ((greedy,),) = ask(engine, request("greedy", PROMPTS[0], temperature=0.0, candidates=True))
    assert greedy.candidates == tuple((token,) for token in greedy.tokens)


def test_experts_are_those_of_the_prompt_and_of_all_tokens_but_the_last(engine, tmp_path):
    sizes = {"layers": 3, "expert_mlp": 8, "experts": 5, "active_experts": 2, "dense_layers": (0,)}
    config = Qwen3MoeConfig(vocab_size=24, embed=16, heads=2, mlp=8, max_positions=40, dtype="float32", **sizes)
    model = draw_model(lambda: registries.models["qwen3_moe"].build(config, key=jax.random.key(0)))
    checkpoint = generative_checkpoint(model, config, name="sparse", tokenizer=tmp_path, origin=Path("nowhere"))
    sparse = StaticEngine(checkpoint, StaticEngineConfig(rows=4))
    sparse.start()
    long = tuple(np.random.default_rng(0).integers(24, size=33).tolist())  # a prompt that is prefilled once
    settings = {"experts": True, "ignore_eos": True, "max_tokens": 4}
    (*several,), (other,) = ask(
        sparse, request("long", long, n=2, **settings), request("other", long[:5], max_tokens=6)
    )
    assert other.experts is None and sparse.stats().compilations == 1
    assert several[0].tokens != several[1].tokens

    @jax.jit
    def experts_of(tokens):
        cache = DenseKVCache.empty(checkpoint.states, batch=1, capacity=40)
        return jnp.moveaxis(model(tokens, jnp.arange(tokens.shape[1])[None], cache=cache).facts["experts"], 0, 2)[0]

    for update in several:
        assert update.experts.shape == (36, 2, 2) and update.experts.dtype == np.int16
        expected = np.asarray(experts_of(jnp.asarray([[*long, *update.tokens[:-1]]])))
        np.testing.assert_array_equal(np.sort(update.experts), np.sort(expected))
    ((refused,),) = ask(engine, request("dense", PROMPTS[0], experts=True))
    assert refused.finish_reason == "error" and "no mixtures of experts to report" in refused.error


def test_draws_depend_on_seed_and_index_and_not_on_the_rest_of_the_batch(engine):
    ((alone,),) = ask(engine, request("alone", PROMPTS[0]))
    many = ask(engine, *(request(seed, PROMPTS[0], seed=seed) for seed in (9, 7, 11)), request("n", PROMPTS[0], n=6))
    assert [each[0].tokens == alone.tokens for each in many[:3]] == [False, True, False]
    continuations = {each.index: each.tokens for each in many[3]}
    assert sorted(continuations) == [0, 1, 2, 3, 4, 5] and continuations[0] == alone.tokens
    assert len(set(continuations.values())) > 1


def test_drawn_shares_are_the_probabilities(model_logprobs, engine):
    probabilities = np.exp(model_logprobs(PROMPTS[0])[-1])
    ((*updates,),) = ask(engine, request("shares", PROMPTS[0], n=400, max_tokens=1))
    counts = np.bincount([each.tokens[0] for each in updates], minlength=24)
    chi_squared = np.sum((counts - 400 * probabilities) ** 2 / (400 * probabilities))
    assert chi_squared < 49.7  # the 0.999 quantile with 23 degrees of freedom


def test_a_stop_token_ends_a_continuation_and_belongs_to_it(engine):
    ((free,),) = ask(engine, request("free", PROMPTS[0]))
    stop = free.tokens[2]
    ((update,),) = ask(engine, request("stopped", PROMPTS[0], stop_tokens=(stop,)))
    assert update.tokens == free.tokens[: free.tokens.index(stop) + 1]
    assert (update.finish_reason, update.stop_reason) == ("stop", stop)


def test_the_engine_owns_the_weights_that_it_is_given(checkpoint, engine):
    ((before,),) = ask(engine, request("before", PROMPTS[0]))
    params = jax.tree.map(lambda leaf: leaf * 2, checkpoint.load_params())
    engine.update_weights(params, version=5)
    jax.tree.map(lambda leaf: leaf.delete(), params)
    ((after,),) = ask(engine, request("after", PROMPTS[0]))
    assert (before.weights_versions, after.weights_versions) == ((0,) * 6, (5,) * 6)
    assert engine.stats().weights_version == 5
    assert [each.logprob for each in before.logprobs] != [each.logprob for each in after.logprobs]
    with pytest.raises(ConversionError, match=r"embedding.*not \(24, 16\)"):
        engine.update_weights(jax.tree.map(lambda leaf: leaf[..., :1], checkpoint.load_params()))
    engine.update_weights(checkpoint.load_params(), version=0)
    ((again,),) = ask(engine, request("again", PROMPTS[0]))
    assert (again.tokens, again.logprobs) == (before.tokens, before.logprobs)


def test_receivers_are_served_and_every_request_ends_once(checkpoint):
    engine = StaticEngine(checkpoint, StaticEngineConfig(rows=4))  # whose programs another test has compiled
    ended, found = threading.Event(), []

    def receive(update):
        found.append(update)
        if len(found) == 6:
            ended.set()

    engine.submit(request("kept", PROMPTS[0], n=6), receive)
    engine.submit(request("aborted", PROMPTS[1]))
    engine.abort("aborted")
    assert engine.stats().waiting == 6
    engine.start()
    assert ended.wait(60)
    assert sorted(each.index for each in found) == [0, 1, 2, 3, 4, 5] and all(len(each.tokens) == 6 for each in found)
    assert [each.finish_reason for each in engine.stream("aborted")] == ["abort"]
    assert (engine.stats().generated_tokens, engine.stats().prompt_tokens) == (36, 18)
    engine.close()
    with pytest.raises(EngineStopped, match="closed"):
        engine.submit(request("late", PROMPTS[0]))


def test_an_engine_that_expects_few_continuations_has_few_rows_and_one_program(checkpoint, monkeypatch):
    engine, rows = StaticEngine(checkpoint), []
    engine.expect(5)
    engine.start()
    generate = engine._generate
    monkeypatch.setattr(
        engine,
        "_generate",
        lambda params, given, **sizes: rows.append(len(given["limits"])) or generate(params, given, **sizes),
    )
    found = ask(engine, *(request(place, PROMPTS[0], seed=place) for place in range(11)))
    ((alone,),) = ask(engine, request("alone", PROMPTS[0], seed=10))
    assert rows == [8, 8, 8] and engine.stats().compilations == 1
    assert alone.tokens == found[10][0].tokens
    engine.close()


@pytest.mark.parametrize("kv_cache", [pytest.param("model", marks=pytest.mark.slow), "int8"])
def test_a_long_prompt_of_several_continuations_is_prefilled_once(checkpoint, monkeypatch, kv_cache):
    engine, prefilled = StaticEngine(checkpoint, StaticEngineConfig(rows=8, kv_cache=kv_cache)), []
    engine.start()
    generate = engine._generate
    monkeypatch.setattr(
        engine,
        "_generate",
        lambda params, given, **sizes: prefilled.append(len(given["prompts"])) or generate(params, given, **sizes),
    )
    long, short = tuple(range(1, 24)) + tuple(range(1, 11)), (3, 5, 7)
    given = [(short, {}), (long, {}), (long, {"repetition_penalty": 2.0}), (short, {}), (long, {"temperature": 0.0})]

    def results():
        asked = [request(place, prompt, seed=place, **more) for place, (prompt, more) in enumerate(given)]
        updates = [update for (update,) in ask(engine, *asked)]
        return [each.tokens for each in updates], [[part.logprob for part in each.logprobs] for each in updates]

    shared_tokens, shared_logprobs = results()
    monkeypatch.setattr(engine, "_prompt_counts", lambda bucket: [8])
    tokens, logprobs = results()
    assert shared_tokens == tokens and len({*tokens}) == 5
    # A product of 2 rows may round in another way than one of 8.
    np.testing.assert_allclose(shared_logprobs, logprobs, atol=1e-5, rtol=0)
    assert prefilled == [2, 8] and engine.stats().prompt_tokens == 2 * (3 * len(long) + 2 * len(short))
    engine.close()


def test_what_the_device_raises_is_logged_and_ends_its_requests_and_no_others(engine, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_generate", lambda *args, **options: 1 / 0)
        ((update,),) = ask(engine, request("failing", PROMPTS[0]))
    assert update.finish_reason == "error" and update.error == "ZeroDivisionError: division by zero"
    assert "A batch of 1 sequences failed" in caplog.text and "lambda *args, **options: 1 / 0" in caplog.text
    assert ask(engine, request("next", PROMPTS[0]))[0][0].finish_reason == "length"


@pytest.mark.parametrize(
    ("change", "parameter"),
    [
        ({"stop": ("x",)}, "stop"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"constraint": Constraint(regex="a")}, "constraint"),
        ({"logits_processors": {"top_sigma": 1.0}}, "logits_processors"),
        ({"logprobs": 3}, "logprobs"),
        ({"stop_tokens": tuple(range(24)) + tuple(range(100, 109))}, "stop_tokens"),
        ({"logit_bias": {24: 1.0}}, "logit_bias"),
    ],
)
def test_what_it_cannot_do_is_refused(engine, change, parameter):
    with pytest.raises(GenerationError, match=r"static engine does not support|32 at most|tokens 0 to 23") as caught:
        engine.submit(request("refused", PROMPTS[0], **change))
    assert caught.value.parameter == parameter


@pytest.mark.parametrize("prompt", [(), tuple(range(40)), (24,)])
def test_prompts_that_do_not_fit_are_refused(engine, prompt):
    with pytest.raises(GenerationError, match=r"max_positions is 40|outside of the vocabulary"):
        engine.submit(request("unfit", prompt))


@pytest.mark.parametrize(("settings", "expected"), [({"logit_bias": {5: 99.0}}, [5] * 4), ({"stop_tokens": (5,)}, [5])])
def test_biases_and_minimal_lengths_change_what_is_drawn(engine, settings, expected):
    settings = {"logit_bias": {5: 99.0}, "max_tokens": 4, "temperature": 0.0, **settings}
    ((update,),) = ask(engine, request("biased", PROMPTS[0], **settings))
    assert list(update.tokens) == expected
    ((longer,),) = ask(engine, request("longer", PROMPTS[0], **settings, min_tokens=4))
    assert len(longer.tokens) == 4 and (longer.tokens[0] == 5) == (expected == [5] * 4)


def test_special_tokens_are_text_only_if_they_are_not_skipped(engine):
    special = {"logit_bias": {0: 99.0}, "max_tokens": 2, "temperature": 0.0}
    skipping, naming = (
        ask(engine, request(skip, PROMPTS[0], **special, skip_special_tokens=skip))[0][0] for skip in (True, False)
    )
    assert skipping.tokens == naming.tokens == (0, 0)
    assert (skipping.text, naming.text) == ("", "<s><s>")


def test_penalties_see_prompt_and_continuation(engine):
    strong = {"temperature": 0.0, "max_tokens": 12, "logit_bias": {3: 20.0}}  # a token of the prompt
    ((free,),) = ask(engine, request("free", PROMPTS[0], **strong))
    ((once,),) = ask(engine, request("once", PROMPTS[0], **strong, repetition_penalty=1e6, presence_penalty=2.0))
    assert free.tokens == (3,) * 12
    assert once.tokens.count(3) == 0 and len(set(once.tokens)) == 12


def test_logits_that_are_not_finite_end_their_request(checkpoint, engine):
    engine.update_weights(jax.tree.map(lambda leaf: leaf * jnp.nan, checkpoint.load_params()))
    ((update,),) = ask(engine, request("nan", PROMPTS[0]))
    engine.update_weights(checkpoint.load_params(), version=0)
    assert update.finish_reason == "error" and "NaN" in update.error
