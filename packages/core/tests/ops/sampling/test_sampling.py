import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from stack_core.abi.generation import SamplingParams
from stack_core.ops.sampling import candidates, logprobs, penalties, sampling
from stack_core.ops.sampling.sampling import MOST_BIASES, MOST_STOP_TOKENS, SamplingSettings, sample

VOCAB = 12
LOGITS = np.log(np.array([30, 20, 14, 10, 7, 5, 4, 3, 3, 2, 1, 1]) / 100).astype(np.float32)
HISTORY, PROMPT_TOKENS, END_TOKENS = (1, 2, 2, 0, 0, 3), 3, (0,)
RICH = {"history": HISTORY, "prompt_tokens": PROMPT_TOKENS, "end_tokens": END_TOKENS}

jitted = jax.jit(sample, static_argnames="candidates")


def probabilities(logits, params, *, history=(), prompt_tokens=0, end_tokens=()):
    """What `SamplingParams` documents, in float64: the distribution of the token after `history`."""
    changed = np.array(logits, np.float64)
    for token, bias in params.logit_bias.items():
        changed[token] += bias
    if len(history) - prompt_tokens < params.min_tokens:
        changed[[*params.stop_tokens, *end_tokens]] = -np.inf
    for token in set(history):
        factor = params.repetition_penalty
        changed[token] = changed[token] / factor if changed[token] > 0 else changed[token] * factor
    for token in history[prompt_tokens:]:
        changed[token] -= params.frequency_penalty
    for token in set(history[prompt_tokens:]):
        changed[token] -= params.presence_penalty
    if params.temperature == 0:
        return (np.arange(len(changed)) == np.argmax(changed)).astype(np.float64)
    weights = np.exp((changed - changed.max()) / params.temperature)
    if params.top_k:
        weights[changed < np.sort(changed)[-min(params.top_k, len(changed))]] = 0
    weights[weights < params.min_p] = 0
    if params.top_p < 1:
        _, group = np.unique(weights, return_inverse=True)
        shares = np.bincount(group, weights / weights.sum())
        likelier = shares[::-1].cumsum()[::-1] - shares
        weights[likelier[group] >= params.top_p] = 0
    return weights / weights.sum()


@functools.partial(jax.jit, static_argnames="rows")
def draw_rows(logits, row, history, length, first, *, rows):
    settings = jax.tree.map(lambda value: jnp.broadcast_to(value, (rows, *value.shape)), row)
    seeds = settings.seed.at[:, 1].add(first + jnp.arange(rows, dtype=jnp.uint32))
    settings = dataclasses.replace(settings, seed=seeds)
    tiled = (jnp.broadcast_to(value, (rows, *value.shape)) for value in (logits, history, length))
    logits, history, length = tiled
    return sample(logits, settings, history, length).tokens


def draws(logits, params, count=4096, *, history=(), prompt_tokens=0, end_tokens=(), rows=4096):
    """Tokens that were drawn after `history`, each with a seed of its own."""
    row = SamplingSettings.row(params, seed=(params.seed or 0, 0), end_tokens=end_tokens, prompt_tokens=prompt_tokens)
    padded = np.zeros(len(history) + 3, np.int32)
    padded[: len(history)] = history
    arrays = jnp.asarray(logits, jnp.float32), row, padded, np.int32(len(history))
    return np.concatenate([draw_rows(*arrays, np.uint32(first), rows=rows) for first in range(0, count, rows)])


def assert_drawn_from(tokens, expected):
    """A chi-squared test with rare tokens taken together; and no token was drawn that has no probability."""
    counts = np.bincount(tokens, minlength=len(expected))
    assert len(counts) == len(expected)
    assert counts[expected == 0].sum() == 0
    order = np.argsort(expected, kind="stable")
    bins = np.floor((np.cumsum(expected[order]) - expected[order]) * len(tokens) / 20).astype(int)
    observed, wanted = np.bincount(bins, counts[order]), np.bincount(bins, expected[order]) * len(tokens)
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    if len(wanted) > 1:
        assert stats.chisquare(observed, wanted * (observed.sum() / wanted.sum())).pvalue > 1e-4


def greedy_rows(count):
    return SamplingSettings.unpacked(jnp.tile(SamplingSettings.greedy_row().packed(), (count, 1)))


def settings_of(*params, prompt_tokens=0, end_tokens=()):
    """One row for each of `params`."""
    rows = [
        SamplingSettings.row(each, seed=(each.seed or 0, 0), end_tokens=end_tokens, prompt_tokens=prompt_tokens)
        for each in params
    ]
    return jax.tree.map(lambda *values: np.stack(values), *rows)


COMBINATIONS = {
    "temperature 1": {},
    "hot": {"temperature": 2.5},
    "cold": {"temperature": 0.4},
    "greedy": {"temperature": 0.0},
    "top_k": {"top_k": 3},
    "top_k with ties": {"top_k": 8},
    "top_k beyond the vocabulary": {"top_k": 400},
    "top_p": {"top_p": 0.6},
    "top_p of one": {"top_p": 0.01},
    "min_p": {"min_p": 0.2},
    "min_p after temperature": {"min_p": 0.2, "temperature": 3.0},
    "top_p after top_k": {"top_k": 4, "top_p": 0.7},
    "top_p after min_p": {"min_p": 0.3, "top_p": 0.75},
    "all three, tempered": {"top_k": 7, "min_p": 0.05, "top_p": 0.9, "temperature": 1.5},
    "repetition": {"repetition_penalty": 1.7},
    "encouraged repetition": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.1},
    "negative penalties": {"presence_penalty": -1.0, "frequency_penalty": -0.7},
    "all penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.6},
    "bias": {"logit_bias": {11: 4.0, 0: -2.0}},
    "bias before repetition": {"logit_bias": {1: 6.0}, "repetition_penalty": 2.0},
    "banned": {"logit_bias": {0: -1e300, 1: -1e300}},
    "min_tokens": {"min_tokens": 4, "stop_tokens": (4, 2)},
    "min_tokens reached": {"min_tokens": 3, "stop_tokens": (4, 2)},
    "min_tokens without eos": {"min_tokens": 4, "ignore_eos": True},
    "everything": {
        "temperature": 0.8,
        "top_k": 9,
        "top_p": 0.95,
        "min_p": 0.01,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.2,
        "logit_bias": {5: 1.0},
        "min_tokens": 9,
    },
}


OF_SIGNS = ("repetition", "encouraged repetition", "all penalties", "bias before repetition", "top_p", "everything")


@pytest.mark.parametrize(
    ("name", "shift"),
    [
        *((name, 3.0) for name in COMBINATIONS),
        *(pytest.param(name, 0.0, marks=() if name in OF_SIGNS else pytest.mark.slow) for name in COMBINATIONS),
    ],
)
def test_draws_follow_what_is_documented(name, shift):
    """The logits have mixed signs where they are shifted, and are negative where they are not."""
    params = SamplingParams(**COMBINATIONS[name])
    assert_drawn_from(draws(LOGITS + shift, params, **RICH), probabilities(LOGITS + shift, params, **RICH))


CUTS = ({}, {"top_p": 0.9}, {"top_k": 40}, {"top_k": 300, "top_p": 0.8}, {"min_p": 0.01})
VOCABS = (1, 100, 1000, 50257, 32000)


def of_vocabularies():
    """(vocab, scale, changes): by default two cuts for each size but the last, on flat or peaked logits."""
    for (place, vocab), (cut, changes), (peaked, scale) in itertools.product(
        enumerate(VOCABS), enumerate(CUTS), enumerate((0.3, 3.0))
    ):
        chosen = vocab != VOCABS[-1] and (place + cut) % len(CUTS) == peaked
        yield pytest.param(vocab, scale, changes, marks=() if chosen else pytest.mark.slow)


@pytest.mark.parametrize(("vocab", "scale", "changes"), list(of_vocabularies()))
def test_draws_follow_what_is_documented_in_vocabularies_of_any_size(vocab, scale, changes):
    logits = np.random.default_rng(vocab).normal(size=vocab).astype(np.float32) * np.float32(scale)
    params = SamplingParams(**changes)
    expected = probabilities(logits, params)
    tokens = draws(logits, params, 2048 if vocab < 10_000 else 512, rows=2048 if vocab < 10_000 else 128)
    assert_drawn_from(tokens, expected)
    by_token = np.cumsum(expected)
    distances = np.abs(np.bincount(tokens, minlength=vocab).cumsum() / len(tokens) - by_token)
    assert distances.max() * np.sqrt(len(tokens)) < 2.0  # Kolmogorov and Smirnov, p = 0.0007


def test_tokens_rarer_than_a_random_number_tells_apart_are_drawn_alike():
    """Of 24 bits: they have 1,374 numbers between them, which reach no more than so many of the 8,191."""
    weights = jnp.full(8192, 1e-8, jnp.float32).at[0].set(1)
    rng = np.random.default_rng(0)
    uniform = np.stack([rng.uniform(1 / 1.00008, 1, 2048), rng.random(2048)], axis=1).astype(np.float32)
    tokens = np.asarray(sampling._draw_weighted(jnp.broadcast_to(weights, (2048, 8192)), jnp.asarray(uniform)))
    assert len(np.unique(tokens[tokens > 0])) > 1700
    assert stats.kstest((tokens[tokens > 0] + rng.random(np.sum(tokens > 0))) / 8192, "uniform").pvalue > 1e-4


@pytest.mark.covering
@pytest.mark.parametrize("margin", [-1e-5, 1e-5])
@pytest.mark.parametrize("count", [1, 2, 5, 11])
def test_the_token_that_first_reaches_top_p_is_the_last_candidate(count, margin):
    shares = np.array([30, 20, 14, 10, 7, 5, 4, 3.5, 2.5, 2, 1.1, 0.9]) / 100
    params = SamplingParams(top_p=shares[:count].sum() + margin)
    assert set(draws(np.log(shares), params)) == set(range(count + (margin > 0)))


def test_tokens_as_likely_as_the_last_candidate_are_candidates():
    logits = np.log([0.4, 0.2, 0.2, 0.1, 0.1])
    assert set(draws(logits, SamplingParams(top_k=2))) == {0, 1, 2}
    assert set(draws(logits, SamplingParams(top_p=0.5))) == {0, 1, 2}


def test_top_k_of_one_is_greedy_however_hot():
    logits = np.full(200, 5.0, np.float32)
    logits[77] = np.nextafter(np.float32(5), np.float32(6))
    assert set(draws(logits, SamplingParams(top_k=1, temperature=1000.0))) == {77}


@pytest.mark.parametrize(
    "logits",
    [[-np.inf, 0, -np.inf, 0.5], [3e38, 2.9e38, 1e38, 3e38], [-3e38, -np.inf, -3e38, -3.1e38], [1e-40, 0, -1e-40, 0]],
    ids=["-inf", "large", "very negative", "denormal"],
)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 1e-30},
        {"temperature": 1e300},
        {"top_k": 2},
        {"top_p": 0.99},
        {"top_p": 1e-300},
        {"min_p": 1.0},
    ],
)
def test_extreme_logits_and_temperatures_are_drawn_from(logits, changes):
    logits = np.array(logits, np.float32)
    params = SamplingParams(**changes)
    expected = probabilities(np.where(np.abs(logits) < 1e-30, 0, logits), params)
    if changes.get("temperature") != 1e300:
        assert_drawn_from(draws(logits, params), expected)
    else:
        assert set(draws(logits, params)) == set(np.flatnonzero(logits > -np.inf))


@given(
    weights=st.lists(st.sampled_from([0.0, 1e-30, 1e-8, 3e-7, 0.1, 1.0, 7.0]), min_size=1, max_size=300).filter(any),
    uniform=st.one_of(st.floats(0, 1, exclude_max=True, width=32), st.just(1 - 2.0**-24)),
)
def test_what_has_no_weight_is_never_drawn(weights, uniform):
    padded = np.zeros(300, np.float32)
    padded[: len(weights)] = weights
    place = int(sampling._inverse_cdf(jnp.asarray(padded)[None], jnp.full(1, uniform, jnp.float32))[0])
    before, total = padded[:place].sum(dtype=np.float64), padded.sum(dtype=np.float64)
    assert padded[place] > 0
    if np.float32(uniform) * np.float32(total) < np.float32(total):
        assert before <= uniform * total + 1e-5 * total
        assert uniform * total <= before + padded[place] + 1e-5 * total


def test_sums_that_are_rounded_never_draw_what_has_no_weight():
    """Sums of a prefix are made in another order than those of a longer one, and may rise where nothing was added."""
    rng = np.random.default_rng(0)
    weights = (rng.random((4000, 300)) * (rng.random((4000, 300)) < 0.3)).astype(np.float32)
    sums = np.asarray(jnp.cumsum(jnp.asarray(weights), axis=1))
    rows, places = np.nonzero((weights[:, 1:] == 0) & (np.diff(sums, axis=1) > 0))
    assert len(rows) > 10
    between = (sums[rows, places].astype(np.float64) + sums[rows, places + 1]) / 2 / sums[rows, -1]
    for uniform in (between.astype(np.float32), np.full(len(rows), 1 - 2.0**-24, np.float32)):
        drawn = np.asarray(sampling._inverse_cdf(jnp.asarray(weights[rows]), jnp.asarray(uniform)))
        assert (weights[rows, drawn] > 0).all()


def test_a_small_top_p_of_many_tokens_is_found_in_a_few_draws(monkeypatch):
    attempts = []
    draw = sampling._draw_weighted
    monkeypatch.setattr(sampling, "_draw_weighted", lambda *args: attempts.append(1) or draw(*args))
    logits = jnp.asarray(np.linspace(0, 1, 512)[None], jnp.float32)
    settings = jax.tree.map(jnp.asarray, settings_of(SamplingParams(top_p=0.002)))
    for length in range(4):
        with jax.disable_jit():
            sample(logits, settings, jnp.zeros((1, 8), jnp.int32), jnp.full(1, length, jnp.int32))
    assert 4 < len(attempts) < 4 * 30


# What a seed means.


def streams(params, *, positions, batch=1, place=0, others=None):
    """The tokens at some positions of a continuation in a batch, at a place in it."""
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(batch, 777)).astype(np.float32)
    logits[place] = np.random.default_rng(6).normal(size=777)
    history = rng.integers(0, 777, size=(batch, 64)).astype(np.int32)
    history[place] = np.arange(64)
    rows = [settings_of(params if row == place else others, prompt_tokens=4) for row in range(batch)]
    settings = jax.tree.map(lambda *values: np.concatenate(values), *rows)
    at_place = np.arange(batch, dtype=np.int32) == place
    return [jitted(logits, settings, history, 4 + position * at_place) for position in range(positions)]


ALONE = ({"top_k": 20, "top_p": 0.9}, {}, {"top_p": 0.3}, {"top_k": 200}, {"repetition_penalty": 1.5}, {"logprobs": 4})


@pytest.mark.parametrize(
    ("batch", "place", "changes"),
    [
        pytest.param(*where, changes, marks=() if where == (8, 3) else pytest.mark.slow)
        for where in ((2, 1), (8, 3), (32, 0), (32, 31))
        for changes in ALONE
    ],
)
def test_a_row_draws_alone_what_it_draws_among_others(changes, batch, place):
    params = SamplingParams(seed=11, **changes)
    busy = SamplingParams(top_k=100, top_p=0.4, frequency_penalty=1.0, logprobs=20, logit_bias={3: 2.0}, min_tokens=2)
    alone = streams(params, positions=16)
    among = streams(params, positions=16, batch=batch, place=place, others=busy)
    assert [int(step.tokens[0]) for step in alone] == [int(step.tokens[place]) for step in among]
    if "logprobs" in changes:
        for one, other in zip(alone, among, strict=True):
            np.testing.assert_allclose(one.logprobs[0], other.logprobs[place], atol=1e-5)
            np.testing.assert_array_equal(one.top_tokens[0], other.top_tokens[place])


def drawn_words(seeds, positions):
    """[seeds, positions, 2] random numbers."""
    rows = jnp.concatenate([settings_of(SamplingParams(seed=seed)).seed for seed in seeds])
    return np.stack([sampling._uniform(rows, jnp.full(len(rows), place), jnp.int32(0)) for place in positions], axis=1)


def test_draws_of_positions_seeds_and_attempts_are_independent():
    words = drawn_words(range(64), range(64))
    assert stats.kstest(words.ravel(), "uniform").pvalue > 1e-4
    assert len(np.unique(words)) > 0.999 * words.size
    pairs = {
        "positions": (words[:, :-1], words[:, 1:]),
        "seeds": (words[:-1], words[1:]),
        "the two of a draw": (words[..., 0], words[..., 1]),
    }
    for name, (one, other) in pairs.items():
        table = np.histogram2d(one.ravel(), other.ravel(), bins=6)[0]
        assert stats.chi2_contingency(table).pvalue > 1e-4, name
    seed = jnp.asarray(settings_of(SamplingParams(seed=0)).seed)
    attempts = [np.asarray(sampling._uniform(seed, jnp.zeros(1, jnp.int32), jnp.int32(n))) for n in range(50)]
    assert len(np.unique(attempts)) == 100
    assert not set(np.ravel(attempts[1:])) & set(words[0].ravel())


def test_seeds_are_any_integers_and_each_continuation_has_its_own():
    seeds = [0, 1, -1, 2**31, 2**32, 2**64, -(2**70)]
    rows = [
        SamplingSettings.row(SamplingParams(), seed=(seed, index), end_tokens=(), prompt_tokens=0)
        for seed in seeds
        for index in range(3)
    ]
    assert len({row.seed.tobytes() for row in rows}) == len(rows)


def test_a_continuation_draws_by_its_own_tokens_and_not_by_those_of_its_prompt():
    logits = np.zeros((2, 500), np.float32)
    one, other = settings_of(SamplingParams(), prompt_tokens=3), settings_of(SamplingParams(), prompt_tokens=9)
    settings = jax.tree.map(lambda *values: np.concatenate(values), one, other)
    history = np.zeros((2, 30), np.int32)
    tokens = [jitted(logits, settings, history, np.int32([3 + n, 9 + n])).tokens.tolist() for n in range(8)]
    assert all(one == other for one, other in tokens)
    assert len({one for one, _ in tokens}) > 5


# Every field that is a matter of the device changes what is drawn.

ON_THE_HOST = {
    "max_tokens", "stop", "include_stop", "ignore_eos", "skip_special_tokens", "n", "prompt_logprobs", "constraint",
}  # fmt: skip
EFFECTS = {
    "min_tokens": {"min_tokens": 4},
    "temperature": {"temperature": 0.2},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.5},
    "min_p": {"min_p": 0.5},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "repetition_penalty": {"repetition_penalty": 2.0},
    "logit_bias": {"logit_bias": {11: 5.0}},
}
AMONG_OTHERS = {
    "stop_tokens": {"min_tokens": 4, "stop_tokens": (1, 2)},
}


def test_every_field_is_the_hosts_or_its_effect_is_known():
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    others = {"seed", "logprobs", "logprobs_of", "candidates", "experts", "logits_processors"}  # tested apart
    assert fields == ON_THE_HOST | EFFECTS.keys() | AMONG_OTHERS.keys() | others


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.0}, *EFFECTS.values(), {"top_k": 6, "top_p": 0.7}])
def test_candidates_are_what_has_a_probability(changes):
    params = SamplingParams(**changes)
    settings = settings_of(params, prompt_tokens=PROMPT_TOKENS, end_tokens=END_TOKENS)
    arrays = LOGITS[None], settings, np.asarray([HISTORY], np.int32), np.int32([len(HISTORY)])
    drawn = jitted(*arrays, candidates=True)
    assert drawn.candidates.tolist() == [(probabilities(LOGITS, params, **RICH) > 0).tolist()]
    assert drawn.candidates[0, drawn.tokens[0]]
    assert drawn.tokens.tolist() == jitted(*arrays).tokens.tolist()
    assert jitted(*arrays).candidates is None


def test_the_seed_changes_what_is_sampled():
    one, other = (draws(LOGITS, SamplingParams(seed=seed), **RICH) for seed in (1, 2))
    assert np.mean(one != other) > 0.5


def test_log_probabilities_are_given_where_they_are_asked_for():
    silent, asked, top = (
        jitted(LOGITS[None], settings_of(SamplingParams(logprobs=wanted)), np.zeros((1, 4), np.int32), np.int32([0]))
        for wanted in (None, 0, 3)
    )
    assert silent.logprobs[0] == 0 != asked.logprobs[0]
    assert silent.ranks[0] == 0 < asked.ranks[0]
    assert top.top_tokens[0, :3].tolist() == [0, 1, 2]


@pytest.mark.parametrize(("name", "changes"), [*EFFECTS.items(), *AMONG_OTHERS.items()])
def test_a_field_changes_what_is_sampled(name, changes):
    base = SamplingParams(**{field: value for field, value in changes.items() if field != name})
    one, other = (
        np.bincount(draws(LOGITS, params, **RICH), minlength=VOCAB) / 4096
        for params in (base, SamplingParams(**changes))
    )
    assert np.abs(one - other).sum() / 2 > 0.1


# What no row asks for is not computed.


def executed(monkeypatch, *params):
    """Names of the parts that run for some rows."""
    seen = set()
    parts = {
        sampling: ["add_at", "penalize", "kth_largest", "token_logprobs", "_draw", "_beyond_top_p", "_top_p_bound"],
        candidates: ["_bisected", "largest"],
        logprobs: ["largest"],
        penalties: ["_counts"],
    }
    for module, names in parts.items():
        for name in names:
            part = getattr(module, name)

            def watched(*args, part=part, name=name, **kwargs):
                seen.add(name)
                return part(*args, **kwargs)

            monkeypatch.setattr(module, name, watched)
    settings = jax.tree.map(jnp.asarray, settings_of(*params, end_tokens=(2,)))
    rows = len(params)
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(rows, 256)).astype(np.float32))
    with jax.disable_jit():
        sample(logits, settings, jnp.zeros((rows, 8), jnp.int32), jnp.full(rows, 5, jnp.int32))
    return seen


GREEDY = SamplingParams(temperature=0.0)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"temperature": 0.0}, set()),
        ({"temperature": 0.0, "min_tokens": 5}, set()),
        ({"temperature": 0.0, "top_p": 0.5, "top_k": 3}, set()),
        ({}, {"_draw"}),
        ({"top_p": 0.5}, {"_draw", "_beyond_top_p"}),
        ({"top_k": 4}, {"_draw", "kth_largest", "largest"}),
        ({"top_k": 100}, {"_draw", "kth_largest", "_bisected"}),
        ({"temperature": 0.0, "logit_bias": {1: 1.0}}, {"add_at", "penalize"}),
        ({"temperature": 0.0, "min_tokens": 6}, {"add_at", "penalize"}),
        ({"temperature": 0.0, "presence_penalty": 1.0}, {"add_at", "penalize", "_counts"}),
        ({"temperature": 0.0, "repetition_penalty": 1.1}, {"add_at", "penalize", "_counts"}),
        ({"temperature": 0.0, "logprobs": 0}, {"token_logprobs", "largest"}),
        ({"logprobs_of": "processed"}, {"_draw"}),
    ],
)
def test_what_no_row_asks_for_is_skipped(changes, parts, monkeypatch):
    assert executed(monkeypatch, GREEDY, SamplingParams(**changes)) == parts


def reached_always(program):
    """The instructions of a compiled program that no conditional guards."""
    computations = dict(re.findall(r"^(?:ENTRY )?%?([\w.-]+) \(.*?\{\n(.*?)^\}", program, re.MULTILINE | re.DOTALL))
    pending = re.findall(r"^ENTRY %?([\w.-]+)", program, re.MULTILINE)
    text = ""
    while pending:
        body = computations.pop(pending.pop(), "")
        text += body
        unguarded = re.sub(r"(branch_computations=\{[^}]*\}|(true|false)_computation=%?[\w.-]+)", "", body)
        pending += re.findall(r"(?:calls|to_apply|body|condition)=%?([\w.-]+)", unguarded)
    return text


def test_what_may_be_skipped_is_guarded_in_the_compiled_program():
    costly = r"(exponential|while|scatter|sort|rng|top_?k)[\w.-]*\("
    settings = settings_of(*[GREEDY] * 4)
    arrays = np.zeros((4, 1280), np.float32), settings, np.zeros((4, 64), np.int32), np.zeros(4, np.int32)
    program = jitted.lower(*arrays).compile().as_text()
    assert "conditional(" in reached_always(program)
    assert re.search(costly, program, re.IGNORECASE)
    assert not re.search(costly, reached_always(program), re.IGNORECASE)


# Rows that cannot be sampled, and settings.


def test_logits_that_are_not_finite_fail_alone():
    logits = np.random.default_rng(0).normal(size=(7, 300)).astype(np.float32)
    logits[1, 200] = np.nan
    logits[2, 7] = np.inf
    logits[3] = -np.inf
    logits[4] = np.nan
    rows = [SamplingParams(top_p=0.9, top_k=100, logprobs=2)] * 6
    sampled = jitted(logits, settings_of(*rows, SamplingParams()), np.zeros((7, 4), np.int32), np.zeros(7, np.int32))
    assert sampled.ok.tolist() == [True, False, False, False, False, True, True]
    assert all(0 <= token < 300 for token in sampled.tokens.tolist())
    assert np.isfinite(sampled.logprobs[np.asarray(sampled.ok)]).all()


@pytest.mark.parametrize("penalty", [5e-324, 1e300])
def test_extreme_repetition_penalties_leave_logits_finite(penalty):
    params = [SamplingParams(repetition_penalty=penalty, temperature=0.0)] * 2
    logits, history = np.full((2, VOCAB), -np.inf, np.float32), np.zeros((2, 8), np.int32)
    logits[:, :2], history[:, 1] = [[9.0, 8.0], [-9.0, -8.0]], 1
    sampled = jitted(logits, settings_of(*params), history, np.full(2, 2, np.int32))
    assert np.asarray(sampled.ok).tolist() == [True, True] and np.asarray(sampled.tokens).tolist() == [0, 1]


def test_a_row_that_may_sample_no_token_is_not_ok():
    params = SamplingParams(stop_tokens=tuple(range(VOCAB)), min_tokens=1)
    sampled = jitted(LOGITS[None], settings_of(params), np.zeros((1, 4), np.int32), np.zeros(1, np.int32))
    assert sampled.ok.tolist() == [False]
    assert sampled.tokens[0] < VOCAB


def test_ties_of_greedy_rows_go_to_the_lowest_token():
    logits = np.zeros((2, 1000), np.float32)
    logits[0, [400, 130, 999]] = 3
    sampled = jitted(logits, greedy_rows(2), np.zeros((2, 2), np.int32), np.zeros(2, np.int32))
    assert sampled.tokens.tolist() == [130, 0]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.slow)])
def test_logits_of_other_types_are_sampled_in_float32(dtype):
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(7, 300)), dtype)
    settings = settings_of(*[SamplingParams(top_p=0.9, logprobs=1)] * 7)
    places = np.zeros((7, 4), np.int32), np.zeros(7, np.int32)
    one, other = jitted(logits, settings, *places), jitted(logits.astype(jnp.float32), settings, *places)
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_log_probabilities_are_the_models_before_any_change():
    params = SamplingParams(temperature=3.0, top_k=2, logit_bias={5: 100.0}, presence_penalty=2.0, logprobs=0)
    sampled = jitted(LOGITS[None], settings_of(params), np.zeros((1, 4), np.int32), np.int32([2]))
    assert sampled.tokens.tolist() == [5]
    np.testing.assert_allclose(sampled.logprobs[0], LOGITS[5], atol=1e-6)
    assert sampled.ranks.tolist() == [6]


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.6},
        {"temperature": 2.0, "top_k": 5, "min_p": 0.2, "logit_bias": {5: 1.5}},
        {"top_p": 0.9, "top_k": 4, "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"top_p": 1e-6},
    ],
)
def test_log_probabilities_can_be_those_of_the_distribution_that_is_drawn_from(changes):
    processed = SamplingParams(**changes, logprobs=12, logprobs_of="processed")
    of_model = SamplingParams(**changes, logprobs=12)
    history = np.tile(np.int32([*HISTORY, 0, 0]), (2, 1))
    settings = settings_of(processed, of_model, end_tokens=END_TOKENS, prompt_tokens=PROMPT_TOKENS)
    sampled = jitted(np.stack([LOGITS] * 2), settings, history, np.full(2, len(HISTORY), np.int32))
    with np.errstate(divide="ignore"):
        expected = np.log(probabilities(LOGITS, processed, **RICH))
    token = sampled.tokens[0]
    np.testing.assert_allclose(sampled.logprobs[0], expected[token], atol=1e-5)
    np.testing.assert_allclose(sampled.top_logprobs[0, :VOCAB], expected[sampled.top_tokens[0, :VOCAB]], atol=1e-5)
    np.testing.assert_allclose(sampled.logprobs[1], LOGITS[sampled.tokens[1]], atol=1e-5)


def mask_of(*rows, words=1):
    """Masks that allow the tokens of each row; None allows all tokens."""
    bits = np.zeros((len(rows), 32 * words), bool)
    for row, tokens in zip(bits, rows, strict=True):
        row[slice(None) if tokens is None else list(tokens)] = True
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


MASKED = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "filtered": {"top_k": 2, "top_p": 0.9, "temperature": 1.5},
    "changed": {"logit_bias": {0: 90.0, 5: 1.0}, "repetition_penalty": 1.5, "presence_penalty": 0.5},
}


@pytest.mark.parametrize("changes", MASKED.values(), ids=MASKED)
def test_a_mask_restricts_the_distribution_before_all_other_settings(changes):
    allowed, rows = (2, 4, 5, 9), 4096
    params = SamplingParams(**changes, logprobs=5, logprobs_of="processed")
    shifted = LOGITS + np.float32(3)
    expected = probabilities(np.where(np.isin(np.arange(VOCAB), allowed), shifted, -np.inf), params, **RICH)
    row = SamplingSettings.row(params, seed=(0, 0), end_tokens=END_TOKENS, prompt_tokens=PROMPT_TOKENS)
    settings = jax.tree.map(lambda value: np.broadcast_to(value, (rows, *value.shape)), row)
    settings = dataclasses.replace(
        settings, seed=settings.seed + np.stack([np.zeros(rows), np.arange(rows)], axis=1).astype(np.uint32)
    )
    arrays = [np.broadcast_to(value, (rows, *np.shape(value))) for value in (shifted, np.array(HISTORY, np.int32))]
    lengths = np.full(rows, len(HISTORY), np.int32)
    sampled = jitted(arrays[0], settings, arrays[1], lengths, mask=mask_of(*[allowed] * rows), candidates=True)
    assert_drawn_from(np.asarray(sampled.tokens), expected)
    np.testing.assert_array_equal(np.asarray(sampled.candidates[0]), expected > 0)
    if params.temperature:
        np.testing.assert_allclose(np.exp(sampled.logprobs), expected[np.asarray(sampled.tokens)], rtol=1e-4)


def test_rows_without_a_constraint_sample_beside_masked_rows_what_they_sample_alone():
    params = [SamplingParams(seed=7, logprobs=3), SamplingParams(seed=8, logprobs=3), SamplingParams(temperature=0.0)]
    settings, lengths = settings_of(*params), np.zeros(3, np.int32)
    logits, history = np.stack([LOGITS, LOGITS[::-1], LOGITS]), np.zeros((3, 4), np.int32)
    alone, masked = jitted(logits, settings, history, lengths), mask_of(None, {0}, None)
    beside = jitted(logits, settings, history, lengths, mask=masked)
    for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(beside), strict=True):
        np.testing.assert_array_equal(np.asarray(one)[[0, 2]], np.asarray(other)[[0, 2]])
    assert beside.tokens[1] == 0 and np.all(beside.ok)
    # The log-probability under the model is finite although the mask made the token certain.
    assert beside.logprobs[1] == pytest.approx(LOGITS[-1], abs=1e-5)


def test_a_mask_may_end_before_or_behind_the_vocabulary_and_an_empty_one_is_not_ok():
    logits = np.linspace(0, 1, 70, dtype=np.float32)[None].repeat(3, axis=0)
    given = (logits, greedy_rows(3), np.zeros((3, 4), np.int32), np.zeros(3, np.int32))
    short = jitted(*given, mask=mask_of({31}, {3, 63}, set(), words=2))
    long = jitted(*given, mask=mask_of({69, 95}, {64}, {80}, words=3))
    assert np.asarray(short.tokens[:2]).tolist() == [31, 63] and np.asarray(long.tokens[:2]).tolist() == [69, 64]
    assert np.asarray(short.ok).tolist() == np.asarray(long.ok).tolist() == [True, True, False]


def test_settings_have_the_same_types_however_they_are_made():
    row = SamplingSettings.row(
        SamplingParams(
            temperature=1e-60,
            top_k=2**40,
            repetition_penalty=1e-300,
            logit_bias=dict.fromkeys(range(MOST_BIASES), -1e300),
            stop_tokens=tuple(range(MOST_STOP_TOKENS - 2)),
        ),
        seed=(-5, 3),
        end_tokens={7, 9},
        prompt_tokens=3,
    )
    for name, value in vars(greedy_rows(2)).items():
        assert getattr(row, name).dtype == value.dtype, name
        assert (2, *getattr(row, name).shape) == value.shape, name
        assert np.isfinite(getattr(row, name)).all(), name
    assert row.repetition_penalty > 0
    assert {7, 9} < set(row.stop_tokens.tolist())


def test_packed_settings_are_unpacked_bit_by_bit():
    params = SamplingParams(temperature=0.7, top_k=3, top_p=0.9, logit_bias={5: -1.5}, presence_penalty=1e-45, seed=3)
    rows = [
        SamplingSettings.row(params, seed=(2**63, 1), end_tokens={7}, prompt_tokens=3),
        SamplingSettings.greedy_row(),
    ]
    unpacked = jax.jit(SamplingSettings.unpacked)(np.stack([row.packed() for row in rows]))
    for name, value in vars(unpacked).items():
        expected = np.stack([getattr(row, name) for row in rows])
        assert (value.dtype, value.shape) == (expected.dtype, expected.shape), name
        assert np.asarray(value).tobytes() == expected.tobytes(), name


def test_rows_that_are_packed_together_are_those_that_are_packed_alone():
    shared = {"temperature": 0.7, "top_k": 3, "logit_bias": {5: -1.5}, "stop_tokens": (4,)}
    params = [SamplingParams(**shared, seed=seed, **other) for seed, other in ((1, {}), (2, {}), (1, {"min_p": 0.1}))]
    params.append(SamplingParams(**{**shared, "logit_bias": {6: -1.5}}))
    seeds, prompt_tokens = [(1, 0), (2, 0), (2**63, 1), (-5, 0)], [3, 4, 5, 2**40]
    rows = SamplingSettings.packed_rows(params, seeds=seeds, end_tokens={7}, prompt_tokens=prompt_tokens)
    for row, each, seed, tokens in zip(rows, params, seeds, prompt_tokens, strict=True):
        alone = SamplingSettings.row(each, seed=seed, end_tokens={7}, prompt_tokens=tokens)
        np.testing.assert_array_equal(row, alone.packed())


def test_changing_settings_compiles_nothing():
    logits, history, lengths = np.zeros((1, 300), np.float32), np.zeros((1, 4), np.int32), np.int32([3])
    compiled = jitted.lower(logits, greedy_rows(1), history, lengths).compile()
    for changes in COMBINATIONS.values():
        assert compiled(logits, settings_of(SamplingParams(**changes)), history, lengths).ok.all()
