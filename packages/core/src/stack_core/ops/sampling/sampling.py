"""Draws the next token of each row from the logits of a model."""

import hashlib
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Bool, Float, Int

from stack_core.abi.generation import SamplingParams
from stack_core.ops.sampling.candidates import GROUPS, at_token, kth_largest, most_likely, padded
from stack_core.ops.sampling.logprobs import MOST_LOGPROBS, TokenLogprobs, token_logprobs
from stack_core.ops.sampling.penalties import add_at, penalize

__all__ = ["MOST_BIASES", "MOST_STOP_TOKENS", "Sampled", "SamplingSettings", "sample"]

MOST_BIASES = 300
"""How many tokens' logits a request may change."""

MOST_STOP_TOKENS = 32
"""How many tokens may end a continuation, the model's own end tokens among them."""

_LARGEST_FLOAT = float(np.finfo(np.float32).max)
_LARGEST_INT = np.iinfo(np.int32).max


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingSettings:
    """How the next token of each row is sampled; the fields are those of `SamplingParams`, where not said otherwise.

    Each has a leading axis of rows or slots, but those of `row`.

    Attributes:
      temperature, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty: float32[rows].
      top_k, min_tokens: int32[rows].
      logprobs: int32[rows], -1 for none.
      processed: int32[rows], 1 if log-probabilities are those of the distribution that is drawn from.
      seed: uint32[rows, 2].
      prompt_tokens: int32[rows], where the continuation begins.
      bias_tokens: int32[rows, MOST_BIASES], -1 for none.
      bias_values: float32[rows, MOST_BIASES].
      stop_tokens: int32[rows, MOST_STOP_TOKENS], what is not sampled among the first `min_tokens`; -1 for none.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    presence_penalty: Any
    frequency_penalty: Any
    repetition_penalty: Any
    min_tokens: Any
    logprobs: Any
    processed: Any
    seed: Any
    prompt_tokens: Any
    bias_tokens: Any
    bias_values: Any
    stop_tokens: Any

    @classmethod
    def greedy_row(cls) -> "SamplingSettings":
        """A temperature of 0 and nothing else, which costs nothing."""
        return cls.row(SamplingParams(temperature=0.0), seed=(0, 0), end_tokens=(), prompt_tokens=0)

    @classmethod
    def row(
        cls, params: SamplingParams, *, seed: tuple[int, int], end_tokens: Collection[int], prompt_tokens: int
    ) -> "SamplingSettings":
        """The settings of one continuation, in NumPy.

        Numbers that float32 and int32 do not hold become the nearest that they do.

        Args:
          seed: the request's and the continuation's index.
          end_tokens: of the model.
          prompt_tokens: before the continuation.
        """
        ends = tuple(end_tokens) if params.min_tokens or not params.ignore_eos else ()
        return cls(
            temperature=_float32(params.temperature),
            top_k=_int32(params.top_k),
            top_p=_float32(params.top_p),
            min_p=_float32(params.min_p),
            presence_penalty=_float32(params.presence_penalty),
            frequency_penalty=_float32(params.frequency_penalty),
            repetition_penalty=np.maximum(_float32(params.repetition_penalty), np.finfo(np.float32).tiny),
            min_tokens=_int32(params.min_tokens),
            logprobs=_int32(-1 if params.logprobs is None else params.logprobs),
            processed=_int32(params.logprobs is not None and params.logprobs_of == "processed"),
            seed=_seed_words(seed),
            prompt_tokens=_int32(prompt_tokens),
            bias_tokens=_filled(tuple(params.logit_bias), MOST_BIASES, _int32(-1)),
            bias_values=_filled(tuple(params.logit_bias.values()), MOST_BIASES, _float32(0.0)),
            stop_tokens=_filled((*ends, *params.stop_tokens), MOST_STOP_TOKENS, _int32(-1)),
        )

    @classmethod
    def packed_rows(
        cls,
        params: Sequence[SamplingParams],
        *,
        seeds: Sequence[tuple[int, int]],
        end_tokens: Collection[int],
        prompt_tokens: Sequence[int],
    ) -> Int[np.ndarray, "rows words"]:
        """The settings of many continuations, each `packed`; what parameters share but for the seed is made once.

        Args:
          seeds, prompt_tokens: of each continuation, as `row` has them.
          end_tokens: of the model.
        """
        none = cls.greedy_row()
        sizes = np.cumsum([0, *(value.size for value in vars(none).values())])
        places = dict(zip(vars(none), itertools.pairwise(sizes.tolist()), strict=True))
        made: dict[Any, np.ndarray] = {}
        rows = np.empty((len(params), sizes[-1]), np.int32)
        for row, each, seed, tokens in zip(rows, params, seeds, prompt_tokens, strict=True):
            same = (*(value for name, value in vars(each).items() if name not in ("seed", "logit_bias")),)
            key = (same, tuple(each.logit_bias.items()))
            if key not in made:
                made[key] = cls.row(each, seed=seed, end_tokens=end_tokens, prompt_tokens=tokens).packed()
            row[:] = made[key]
            row[slice(*places["seed"])] = _seed_words(seed).view(np.int32)
            row[slice(*places["prompt_tokens"])] = _int32(tokens)
        return rows

    def packed(self) -> Int[np.ndarray, " words"]:
        """The bits of one row, in one array, for every array that a program takes costs the host time."""
        return np.concatenate([np.asarray(value).reshape(-1).view(np.int32) for value in vars(self).values()])

    @classmethod
    def unpacked(cls, words: Int[Array, "rows words"]) -> "SamplingSettings":
        """The settings of which rows are `packed`."""
        fields: dict[str, jax.Array] = {}
        start = 0
        for name, value in vars(cls.greedy_row()).items():
            bits = words[:, start : start + value.size].reshape(len(words), *value.shape)
            fields[name] = lax.bitcast_convert_type(bits, value.dtype)
            start += value.size
        return cls(**fields)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampled(TokenLogprobs):
    """A token for each row, and its log-probability where it was asked for.

    Attributes:
      ok: bool[rows]; where it is False the logits were NaN, infinite or all -inf, and the token means nothing.
      candidates: bool[rows, vocab], the tokens that each was drawn from; None if they were not asked for.
    """

    ok: Any
    candidates: Any = None


def sample(
    logits: Float[Array, "rows vocab"],
    settings: SamplingSettings,
    history: Int[Array, "rows max_tokens"],
    lengths: Int[Array, " rows"],
    *,
    candidates: bool = False,
) -> Sampled:
    """Draws a token for each row, as `SamplingParams` describes.

    What no row asks for costs nothing. Settings are arrays, so that changing them compiles nothing. A token depends on
    its own row alone: on its logits, the seed, and how many tokens its continuation has.

    Args:
      settings: of each row.
      history: tokens of each row's prompt and continuation.
      lengths: how many there are, all before the one that is drawn.
      candidates: also find the tokens that each was drawn from.
    """
    vocab, logits = logits.shape[1], padded(logits)
    generated = lengths - settings.prompt_tokens
    stopping = jnp.where(generated[:, None] < settings.min_tokens[:, None], settings.stop_tokens, -1)

    def changed() -> jax.Array:
        tokens = jnp.concatenate([settings.bias_tokens, stopping], axis=1)
        values = jnp.concatenate([settings.bias_values, jnp.full(stopping.shape, -jnp.inf, jnp.float32)], axis=1)
        return penalize(
            add_at(logits, tokens, values),
            history,
            prompt_tokens=settings.prompt_tokens,
            lengths=lengths,
            repetition=settings.repetition_penalty,
            frequency=settings.frequency_penalty,
            presence=settings.presence_penalty,
        )

    changes = (
        jnp.any(settings.bias_tokens >= 0)
        | jnp.any(stopping >= 0)
        | jnp.any(settings.repetition_penalty != 1)
        | jnp.any(settings.frequency_penalty != 0)
        | jnp.any(settings.presence_penalty != 0)
    )
    drawing = jnp.any(settings.temperature > 0) | jnp.any(settings.processed > 0)

    def chosen() -> tuple[jax.Array, jax.Array, TokenLogprobs, jax.Array | None]:
        # Less the peak in either branch, for one that gave the logits as they are would copy them.
        best, ok, lower = lax.cond(changes, lambda: _less_peak(changed()), lambda: _less_peak(logits))
        tokens, processed, kept = lax.cond(
            drawing,
            lambda: _drawn(lower, best, settings, generated, candidates=candidates),
            lambda: (best, _no_logprobs(best), alone(best)),
        )
        return tokens, ok, processed, kept

    def greedy() -> tuple[jax.Array, jax.Array, TokenLogprobs, jax.Array | None]:
        best = most_likely(logits)
        return best, jnp.isfinite(at_token(logits, best)), _no_logprobs(best), alone(best)

    def alone(tokens: jax.Array) -> jax.Array | None:
        return _is_token(tokens, logits.shape[1]) if candidates else None

    tokens, ok, processed, kept = lax.cond(changes | drawing, chosen, greedy)
    of_model = lax.cond(
        jnp.any((settings.logprobs >= 0) & (settings.processed == 0)),
        lambda: token_logprobs(logits, tokens),
        lambda: _no_logprobs(tokens),
    )
    figures = jax.tree.map(partial(_either, settings.processed > 0), processed, of_model)
    return Sampled(**vars(figures), ok=ok, candidates=None if kept is None else kept[:, :vocab])


def _is_token(tokens: jax.Array, vocab: int) -> Bool[Array, "rows vocab"]:
    return jnp.arange(vocab) == tokens[:, None]


def _either(condition: jax.Array, one: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.where(condition.reshape(-1, *[1] * (one.ndim - 1)), one, other)


def _less_peak(logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The most likely token of each row, whether the logits allow one, and the logits less its own."""
    best = most_likely(logits)
    peak = at_token(logits, best)
    return best, jnp.isfinite(peak), logits - peak[:, None]


def _drawn(
    lower: jax.Array, best: jax.Array, settings: SamplingSettings, generated: jax.Array, *, candidates: bool
) -> tuple[jax.Array, TokenLogprobs, jax.Array | None]:
    """A token of each row, what is to be reported of the distribution that it was drawn from, and its candidates.

    Args:
      lower: logits, the largest of which are 0.
      best: the first of these.
    """
    is_drawn = settings.temperature > 0
    scaled = lower / jnp.where(is_drawn, settings.temperature, 1)[:, None]
    weights = jnp.exp(scaled)
    kept = (lower >= _top_k_bound(lower, settings.top_k)[:, None]) & (weights >= settings.min_p[:, None])
    weights = jnp.where(kept, weights, 0)
    tokens = jnp.where(is_drawn, _draw(weights, settings, generated), best)

    def sampled() -> jax.Array:
        bound = lax.cond(
            jnp.any(settings.top_p < 1),
            lambda: _top_p_bound(weights, settings.top_p),
            lambda: jnp.zeros(len(weights), jnp.float32),
        )
        bound = jnp.maximum(bound, jnp.finfo(jnp.float32).tiny)
        return jnp.where(is_drawn[:, None], weights >= bound[:, None], _is_token(best, lower.shape[1]))

    kept = sampled() if candidates else None

    def figures() -> TokenLogprobs:
        return token_logprobs(jnp.where(sampled() if kept is None else kept, scaled, -jnp.inf), tokens)

    return tokens, lax.cond(jnp.any(settings.processed > 0), figures, lambda: _no_logprobs(tokens)), kept


def _draw(weights: jax.Array, settings: SamplingSettings, generated: jax.Array) -> jax.Array:
    """A token of each row by its weight among the candidates.

    Whether a token is among those that `top_p` leaves is asked when it is drawn. One that is not is drawn again among
    the likelier ones: those that are left get their probabilities, and which they are need not be found out.
    """

    def draw(state: tuple[Any, ...]) -> tuple[Any, ...]:
        attempt, tokens, bound, wanted = state
        remaining = jnp.where(weights > bound[:, None], weights, 0)
        drawn = _draw_weighted(remaining, _uniform(settings.seed, generated, attempt))
        tokens = jnp.where(wanted, drawn, tokens)
        bound = at_token(weights, tokens)
        wanted = lax.cond(
            jnp.any(settings.top_p < 1),
            lambda: _beyond_top_p(weights, bound, settings.top_p),
            lambda: jnp.zeros_like(wanted),
        )
        return attempt + 1, tokens, bound, wanted

    rows = len(weights)
    first = (jnp.int32(0), jnp.zeros(rows, jnp.int32), jnp.zeros(rows, jnp.float32), jnp.ones(rows, bool))
    return lax.while_loop(lambda state: jnp.any(state[3]), draw, first)[1]


def _beyond_top_p(weights: jax.Array, weight: jax.Array, top_p: jax.Array) -> jax.Array:
    """Whether the tokens of more weight reach `top_p` without a row's; the largest weight has none above it."""
    above = jnp.sum(jnp.where(weights > weight[:, None], weights, 0), axis=1)
    return (top_p < 1) & (above > 0) & (above >= top_p * jnp.sum(weights, axis=1))


def _top_p_bound(weights: jax.Array, top_p: jax.Array) -> jax.Array:
    """The least weight of a token that `top_p` leaves, bit by bit of a float; weights are 0 to 1, the largest is 1."""

    def halve(_: Any, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        beyond = _beyond_top_p(weights, lax.bitcast_convert_type(middle, jnp.float32), top_p)
        return jnp.where(beyond, middle + 1, low), jnp.where(beyond, high, middle)

    low, high = jnp.zeros(len(weights), jnp.uint32), lax.bitcast_convert_type(jnp.ones(len(weights)), jnp.uint32)
    return lax.bitcast_convert_type(lax.fori_loop(0, 31, halve, (low, high))[1], jnp.float32)


def _top_k_bound(logits: jax.Array, top_k: jax.Array) -> jax.Array:
    return lax.cond(
        jnp.any(top_k > 0), lambda: kth_largest(logits, top_k), lambda: jnp.full(len(logits), -jnp.inf, jnp.float32)
    )


def _uniform(seed: jax.Array, generated: jax.Array, attempt: jax.Array) -> Float[Array, "rows 2"]:
    """Random numbers in [0, 1), the same for the same place in a continuation of the same seed."""
    counts = jnp.stack([generated, jnp.full_like(generated, attempt)], axis=1).astype(jnp.uint32)
    bits = jax.vmap(threefry_2x32)(seed, counts)
    return (bits >> jnp.uint32(8)).astype(jnp.float32) * 2.0**-24


def _draw_weighted(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """A token of each row by its weight: first a column of the vocabulary, folded to `GROUPS` rows, then one in it.

    Each has a random number of its own, so that 24 bits are enough for rare tokens of large vocabularies.
    """
    folded = weights.reshape(len(weights), GROUPS, -1)
    column = _inverse_cdf(jnp.sum(folded, axis=1), uniform[:, 0])
    place = _inverse_cdf(jnp.take_along_axis(folded, column[:, None, None], axis=2)[:, :, 0], uniform[:, 1])
    return place * folded.shape[2] + column


def _inverse_cdf(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """The first place where the sum of weights so far exceeds `uniform` of all; never one without weight."""
    sums = jnp.cumsum(weights, axis=1)
    reached = sums > uniform[:, None] * sums[:, -1:]
    return jnp.argmax(jnp.where(weights > 0, 1 + reached.astype(jnp.int32), 0), axis=1).astype(jnp.int32)


def _no_logprobs(tokens: jax.Array) -> TokenLogprobs:
    rows = len(tokens)
    zeros, tops = jnp.zeros(rows, jnp.float32), (rows, MOST_LOGPROBS)
    return TokenLogprobs(tokens, zeros, jnp.zeros(rows, jnp.int32), jnp.zeros(tops, jnp.int32), jnp.zeros(tops))


def _seed_words(seed: tuple[int, int]) -> np.ndarray:
    return np.frombuffer(hashlib.blake2b(repr(seed).encode(), digest_size=8).digest(), "<u4").astype(np.uint32)


def _float32(value: float) -> np.float32:
    return np.float32(np.clip(value, -_LARGEST_FLOAT, _LARGEST_FLOAT))


def _int32(value: int) -> np.int32:
    return np.int32(min(value, _LARGEST_INT))


def _filled(values: Sequence[float | int], size: int, fill: Any) -> np.ndarray:
    filled = np.full(size, fill)
    filled[: len(values)] = np.clip(values, -_LARGEST_FLOAT, _LARGEST_FLOAT)
    return filled
