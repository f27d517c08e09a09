"""Sampling of the next token of each row from the logits of a model."""

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
from stack_core.ops.sampling.candidates import GROUPS, at_token, greedy_tokens, kth_largest, padded
from stack_core.ops.sampling.logprobs import MOST_LOGPROBS, TokenLogprobs, token_logprobs
from stack_core.ops.sampling.penalties import add_at, allow, penalize
from stack_core.ops.sampling.row_processors import RowProcessors

__all__ = [
    "MOST_BIASES",
    "MOST_STOP_TOKENS",
    "Sampled",
    "SamplingSettings",
    "candidate_tokens",
    "mask_words",
    "sample",
]

MOST_BIASES = 300
"""Maximum number of tokens in the logit bias of a request."""

MOST_STOP_TOKENS = 32
"""Maximum number of stop tokens of a request, including the model's end tokens."""

_LARGEST_FLOAT = float(np.finfo(np.float32).max)
_LARGEST_INT = np.iinfo(np.int32).max


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingSettings:
    """Sampling settings of each row as arrays; fields are defined as in `SamplingParams` unless stated otherwise.

    Every field has a leading axis of rows or slots, except in the result of `row`.

    Attributes:
      temperature, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty: float32[rows].
      top_k, min_tokens: int32[rows].
      logprobs: int32[rows], number of top log-probabilities; -1 disables log-probabilities.
      processed: int32[rows], 1 if log-probabilities refer to the sampled distribution instead of the model's.
      seed: uint32[rows, 2], key of the random numbers.
      prompt_tokens: int32[rows], number of tokens before the continuation.
      bias_tokens: int32[rows, MOST_BIASES], tokens with a logit bias; -1 for unused entries.
      bias_values: float32[rows, MOST_BIASES], their biases.
      stop_tokens: int32[rows, MOST_STOP_TOKENS], tokens excluded from the first `min_tokens`; -1 for unused entries.
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
        """Returns settings for greedy decoding, the cheapest path."""
        return cls.row(SamplingParams(temperature=0.0), seed=(0, 0), end_tokens=(), prompt_tokens=0)

    @classmethod
    def row(
        cls, params: SamplingParams, *, seed: tuple[int, int], end_tokens: Collection[int], prompt_tokens: int
    ) -> "SamplingSettings":
        """Returns the settings of one continuation as NumPy arrays.

        Numbers out of range are clamped to float32 and int32.

        Args:
          params: parameters of the request.
          seed: seed of the request, index of the continuation.
          end_tokens: end tokens of the model.
          prompt_tokens: number of tokens before the continuation.
        """
        ends = tuple(end_tokens) if params.min_tokens or not params.ignore_eos else ()
        return cls(
            temperature=_float32(params.temperature),
            top_k=_int32(params.top_k),
            top_p=_float32(params.top_p),
            min_p=_float32(params.min_p),
            presence_penalty=_float32(params.presence_penalty),
            frequency_penalty=_float32(params.frequency_penalty),
            # Logits divided or multiplied by a more extreme penalty would be infinite.
            repetition_penalty=np.clip(_float32(params.repetition_penalty), np.float32(1e-20), np.float32(1e20)),
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
        """Returns the `packed` settings of many continuations; parameters equal except for the seed are converted once.

        Args:
          params: parameters of each continuation.
          seeds, prompt_tokens: arguments of `row` for each continuation.
          end_tokens: end tokens of the model.
        """
        none = cls.greedy_row()
        sizes = np.cumsum([0, *(value.size for value in vars(none).values())])
        places = dict(zip(vars(none), itertools.pairwise(sizes.tolist()), strict=True))
        made: dict[Any, np.ndarray] = {}
        rows = np.empty((len(params), sizes[-1]), np.int32)
        for row, each, seed, tokens in zip(rows, params, seeds, prompt_tokens, strict=True):
            others = ("seed", "logit_bias", "logits_processors")
            same = (*(value for name, value in vars(each).items() if name not in others),)
            # Biases are a dict, which is not hashable. The settings do not depend on logits processors.
            key = (same, tuple(each.logit_bias.items()))
            if key not in made:
                made[key] = cls.row(each, seed=seed, end_tokens=end_tokens, prompt_tokens=tokens).packed()
            row[:] = made[key]
            row[slice(*places["seed"])] = _seed_words(seed).view(np.int32)
            row[slice(*places["prompt_tokens"])] = _int32(tokens)
        return rows

    def packed(self) -> Int[np.ndarray, " words"]:
        """Packs the bits of one row into one array, since each argument of a program costs host time."""
        return np.concatenate([np.asarray(value).reshape(-1).view(np.int32) for value in vars(self).values()])

    @classmethod
    def unpacked(cls, words: Int[Array, "rows words"]) -> "SamplingSettings":
        """Unpacks settings from rows of `packed` words."""
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
    """Sampled token of each row, with log-probabilities for rows that request them.

    Attributes:
      ok: bool[rows], False if the logits were NaN, infinite or all -inf; the token is then meaningless.
      candidates: bool[rows, vocab], tokens with nonzero probability in the sampled distribution; None if not requested.
    """

    ok: Any
    candidates: Any = None


def candidate_tokens(bits: np.ndarray) -> tuple[tuple[int, ...], ...]:
    """Returns the token ids of each row's candidates in ascending order.

    Args:
      bits: uint8[rows, bytes], `Sampled.candidates` packed by `jnp.packbits`.
    """
    return tuple(tuple(np.flatnonzero(row).tolist()) for row in np.unpackbits(bits, axis=1))


def mask_words(vocab_size: int) -> int:
    """Returns the number of int32 words in a mask of tokens."""
    return -(-vocab_size // 32)


def sample(
    logits: Float[Array, "rows vocab"],
    settings: SamplingSettings,
    history: Int[Array, "rows max_tokens"],
    lengths: Int[Array, " rows"],
    *,
    mask: Int[Array, "rows words"] | None = None,
    processors: RowProcessors | None = None,
    candidates: bool = False,
) -> Sampled:
    """Samples a token for each row according to `SamplingParams`.

    Features that no row uses are skipped at run time. Settings are arrays, so changing them does not recompile. A token
    depends only on its own row: the logits, the settings, the history, and the number of generated tokens.

    Args:
      logits: logits of the next token.
      settings: settings of each row.
      history: tokens of each row's prompt and continuation.
      lengths: number of tokens in each row of `history`, excluding the sampled token.
      mask: tokens that the constraint of each row allows, bit `token % 32` of word `token // 32`, in `mask_words` words
        of int32. All bits of a row without a constraint are set. None means that no row has one.
      processors: logits processors of the rows, after the penalties and before the temperature.
      candidates: whether to return the candidate tokens as well.
    """
    vocab, logits = logits.shape[1], padded(logits)
    generated = lengths - settings.prompt_tokens
    stopping = jnp.where(generated[:, None] < settings.min_tokens[:, None], settings.stop_tokens, -1)
    is_masked = jnp.bool_(False) if mask is None else jnp.any(mask != -1)

    def changed() -> jax.Array:
        # Each row keeps its bits if all tokens are allowed, so a row does not depend on the constraints of others.
        allowed = logits if mask is None else lax.cond(is_masked, lambda: allow(logits, mask), lambda: logits)
        tokens = jnp.concatenate([settings.bias_tokens, stopping], axis=1)
        values = jnp.concatenate([settings.bias_values, jnp.full(stopping.shape, -jnp.inf, jnp.float32)], axis=1)
        penalized = penalize(
            add_at(allowed, tokens, values),
            history,
            prompt_tokens=settings.prompt_tokens,
            lengths=lengths,
            repetition=settings.repetition_penalty,
            frequency=settings.frequency_penalty,
            presence=settings.presence_penalty,
        )
        if processors is None:
            return penalized
        return padded(processors(penalized[:, :vocab], history, lengths, settings.prompt_tokens))

    changes = (
        is_masked
        | jnp.any(settings.bias_tokens >= 0)
        | jnp.any(stopping >= 0)
        | jnp.any(settings.repetition_penalty != 1)
        | jnp.any(settings.frequency_penalty != 0)
        | jnp.any(settings.presence_penalty != 0)
    )
    if processors is not None:
        changes |= processors.is_used
    drawing = jnp.any(settings.temperature > 0) | jnp.any(settings.processed > 0)

    def chosen() -> tuple[jax.Array, jax.Array, TokenLogprobs, jax.Array | None]:
        # Both branches subtract the peak, because a branch that returned its input unchanged would copy it.
        best, ok, lower = lax.cond(changes, lambda: _less_peak(changed()), lambda: _less_peak(logits))
        tokens, processed, kept = lax.cond(
            drawing,
            lambda: _sample_tokens(lower, best, settings, generated, candidates=candidates),
            lambda: (best, _no_logprobs(best), single_candidate(best)),
        )
        return tokens, ok, processed, kept

    def greedy() -> tuple[jax.Array, jax.Array, TokenLogprobs, jax.Array | None]:
        best = greedy_tokens(logits)
        return best, jnp.isfinite(at_token(logits, best)), _no_logprobs(best), single_candidate(best)

    def single_candidate(tokens: jax.Array) -> jax.Array | None:
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
    """Returns the most likely token of each row, whether its logit is finite, and the logits minus that logit."""
    best = greedy_tokens(logits)
    peak = at_token(logits, best)
    return best, jnp.isfinite(peak), logits - peak[:, None]


def _sample_tokens(
    lower: jax.Array, best: jax.Array, settings: SamplingSettings, generated: jax.Array, *, candidates: bool
) -> tuple[jax.Array, TokenLogprobs, jax.Array | None]:
    """Samples a token of each row; also returns log-probabilities of the sampled distribution, and candidates.

    Args:
      lower: logits with a maximum of 0 in each row.
      best: first token with the maximum.
    """
    is_sampled = settings.temperature > 0
    # Greedy rows have the temperature 0.
    scaled = lower / jnp.where(is_sampled, settings.temperature, 1)[:, None]
    weights = jnp.exp(scaled)
    kept = (lower >= _top_k_bound(lower, settings.top_k)[:, None]) & (weights >= settings.min_p[:, None])
    weights = jnp.where(kept, weights, 0)
    tokens = jnp.where(is_sampled, _draw(weights, settings, generated), best)

    def sampled() -> jax.Array:
        bound = lax.cond(
            jnp.any(settings.top_p < 1),
            lambda: _top_p_bound(weights, settings.top_p),
            lambda: jnp.zeros(len(weights), jnp.float32),
        )
        # Excluded tokens have weight 0 and must stay below the bound.
        bound = jnp.maximum(bound, jnp.finfo(jnp.float32).tiny)
        return jnp.where(is_sampled[:, None], weights >= bound[:, None], _is_token(best, lower.shape[1]))

    kept = sampled() if candidates else None

    def figures() -> TokenLogprobs:
        return token_logprobs(jnp.where(sampled() if kept is None else kept, scaled, -jnp.inf), tokens)

    return tokens, lax.cond(jnp.any(settings.processed > 0), figures, lambda: _no_logprobs(tokens)), kept


def _draw(weights: jax.Array, settings: SamplingSettings, generated: jax.Array) -> jax.Array:
    """Samples a token of each row by weight, with rejection sampling for `top_p`.

    A sampled token outside the top-p set is rejected, and the next attempt samples among the more likely tokens only.
    Accepted tokens have the exact probabilities of the top-p distribution, and the set itself is never computed.
    """

    def draw(state: tuple[Any, ...]) -> tuple[Any, ...]:
        attempt, tokens, bound, is_rejected = state
        remaining = jnp.where(weights > bound[:, None], weights, 0)
        drawn = _draw_weighted(remaining, _uniform(settings.seed, generated, attempt))
        tokens = jnp.where(is_rejected, drawn, tokens)
        bound = at_token(weights, tokens)
        is_rejected = lax.cond(
            jnp.any(settings.top_p < 1),
            lambda: _beyond_top_p(weights, bound, settings.top_p),
            lambda: jnp.zeros_like(is_rejected),
        )
        return attempt + 1, tokens, bound, is_rejected

    rows = len(weights)
    first = (jnp.int32(0), jnp.zeros(rows, jnp.int32), jnp.zeros(rows, jnp.float32), jnp.ones(rows, bool))
    return lax.while_loop(lambda state: jnp.any(state[3]), draw, first)[1]


def _beyond_top_p(weights: jax.Array, weight: jax.Array, top_p: jax.Array) -> jax.Array:
    """Returns whether the tokens above this weight already reach `top_p`; never true for the largest weight."""
    above = jnp.sum(jnp.where(weights > weight[:, None], weights, 0), axis=1)
    return (top_p < 1) & (above > 0) & (above >= top_p * jnp.sum(weights, axis=1))


def _top_p_bound(weights: jax.Array, top_p: jax.Array) -> jax.Array:
    """Finds the smallest weight in the top-p set by bisection of float bits; weights are 0 to 1, the maximum is 1."""

    def halve(_: Any, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        beyond = _beyond_top_p(weights, lax.bitcast_convert_type(middle, jnp.float32), top_p)
        return jnp.where(beyond, middle + 1, low), jnp.where(beyond, high, middle)

    # Weights are not negative, so 31 bits remain and have the order of the floats.
    low, high = jnp.zeros(len(weights), jnp.uint32), lax.bitcast_convert_type(jnp.ones(len(weights)), jnp.uint32)
    return lax.bitcast_convert_type(lax.fori_loop(0, 31, halve, (low, high))[1], jnp.float32)


def _top_k_bound(logits: jax.Array, top_k: jax.Array) -> jax.Array:
    return lax.cond(
        jnp.any(top_k > 0), lambda: kth_largest(logits, top_k), lambda: jnp.full(len(logits), -jnp.inf, jnp.float32)
    )


def _uniform(seed: jax.Array, generated: jax.Array, attempt: jax.Array) -> Float[Array, "rows 2"]:
    """Returns random numbers in [0, 1), determined by seed, number of generated tokens and attempt."""
    counts = jnp.stack([generated, jnp.full_like(generated, attempt)], axis=1).astype(jnp.uint32)
    bits = jax.vmap(threefry_2x32)(seed, counts)
    # float32 represents 24 bits exactly, so rounding cannot give 1.
    return (bits >> jnp.uint32(8)).astype(jnp.float32) * 2.0**-24


def _draw_weighted(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Samples a token of each row by weight: first a column of the vocabulary folded to `GROUPS` rows, then its row.

    Each step has its own random number, so 24 bits each are enough for rare tokens of large vocabularies.
    """
    folded = weights.reshape(len(weights), GROUPS, -1)
    column = _inverse_cdf(jnp.sum(folded, axis=1), uniform[:, 0])
    place = _inverse_cdf(jnp.take_along_axis(folded, column[:, None, None], axis=2)[:, :, 0], uniform[:, 1])
    return place * folded.shape[2] + column


def _inverse_cdf(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Returns the first index whose cumulative weight exceeds `uniform` times the total; never one with zero weight."""
    sums = jnp.cumsum(weights, axis=1)
    reached = sums > uniform[:, None] * sums[:, -1:]
    return jnp.argmax(jnp.where(weights > 0, 1 + reached.astype(jnp.int32), 0), axis=1).astype(jnp.int32)


def _no_logprobs(tokens: jax.Array) -> TokenLogprobs:
    rows = len(tokens)
    zeros, tops = jnp.zeros(rows, jnp.float32), (rows, MOST_LOGPROBS)
    return TokenLogprobs(tokens, zeros, jnp.zeros(rows, jnp.int32), jnp.zeros(tops, jnp.int32), jnp.zeros(tops))


def _seed_words(seed: tuple[int, int]) -> np.ndarray:
    # The hash makes the random numbers of neighbouring seeds and continuations unrelated.
    return np.frombuffer(hashlib.blake2b(repr(seed).encode(), digest_size=8).digest(), "<u4").astype(np.uint32)


def _float32(value: float) -> np.float32:
    return np.float32(np.clip(value, -_LARGEST_FLOAT, _LARGEST_FLOAT))


def _int32(value: int) -> np.int32:
    return np.int32(min(value, _LARGEST_INT))


def _filled(values: Sequence[float | int], size: int, fill: Any) -> np.ndarray:
    filled = np.full(size, fill)
    filled[: len(values)] = np.clip(values, -_LARGEST_FLOAT, _LARGEST_FLOAT)
    return filled
