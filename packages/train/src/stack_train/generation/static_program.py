"""The program of the engine `static`: prefills a batch of prompts, then decodes all rows in one loop on the device."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int16

from stack_core.abi.caches import CacheStorage
from stack_core.abi.errors import GenerationError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.models import Outputs
from stack_core.ops.kv_cache import DenseKVCache
from stack_core.ops.sampling.sampling import SamplingSettings, sample
from stack_train.generation.prompt_images import image_tokens_of

__all__ = ["generate_rows"]


def generate_rows(
    checkpoint: GenerativeCheckpoint,
    storage: CacheStorage,
    params: Any,
    rows: dict[str, Any],
    *,
    capacity: int,
    candidates: bool,
    experts: bool,
) -> dict[str, jax.Array]:
    """Generates the continuations of all rows, in one program.

    Args:
      checkpoint: the model, its states and vocabulary.
      storage: storage format of the cache.
      params: parameters of the model.
      rows: a dict with
        prompts: int32[prompts, bucket], padded prompts.
        prompt_lengths: int32[prompts], at least 1.
        prompt_of_row: int32[rows], the prompt that each row continues.
        limits: int32[rows], maximum number of tokens of each row; 0 for padding.
        stops: int32[rows, stops], tokens that end a row, padded by -1.
        settings: packed `SamplingSettings` of each row.
        images: as from `image_inputs`; only if a prompt has images.
      capacity: number of tokens of each row's cache, at least `bucket`.
      candidates, experts: whether to report them.

    Returns:
      A dict with
        count: int32[rows], number of sampled tokens.
        ok: bool[rows], False if NaN or infinite logits prevented sampling at any step.
        history: int32[rows, capacity], the prompts followed by the sampled tokens.
        logprobs, ranks: [rows, capacity], the log-probability and rank of each sampled token (see `sample`).
        candidates: uint8[rows, capacity, ceil(vocab / 8)], bit masks of the candidates of each sampled token; only
          if `candidates` is set.
        experts: int16[rows, capacity, mixtures, active], the experts of the prompts and of all sampled tokens but
          the last; only if `experts` is set.

    Raises:
      GenerationError: `experts` is set, and the model has no mixtures of experts.
    """
    model, (prompts, bucket), count = checkpoint.model(params), rows["prompts"].shape, len(rows["limits"])
    empty: Any = DenseKVCache.empty(checkpoint.states, batch=prompts, capacity=capacity, storage=storage)
    last = (rows["prompt_lengths"] - 1)[:, None]
    # Padding repeats the last position, because dynamic and longrope scaling depend on a row's largest one.
    positions = jnp.minimum(jnp.arange(bucket), last)
    images, prompt_of_row = rows.get("images"), rows["prompt_of_row"]
    given: dict[str, Any] = {} if images is None else {"images": image_tokens_of(model, images)}
    # After images with positions in several directions, positions fall behind places.
    shift = 0 if images is None else images["shift"][prompt_of_row]
    outputs = model(rows["prompts"], positions, cache=empty.expecting(rows["prompt_lengths"]), **given)
    hidden = jnp.take_along_axis(outputs.hidden, last[..., None], axis=1)
    cache: Any = outputs.cache
    rows = {name: each for name, each in rows.items() if name != "images"}
    rows |= {"tokens": rows["prompts"], "lengths": rows["prompt_lengths"]}
    if prompts < count:
        layers = jax.tree.map(lambda leaf: leaf[:, prompt_of_row], cache.layers)
        cache = DenseKVCache(layers, cache.lengths[prompt_of_row])
        hidden = hidden[prompt_of_row]
        rows |= {"tokens": rows["tokens"][prompt_of_row], "lengths": rows["lengths"][prompt_of_row]}
    free = capacity - bucket
    found = {
        "history": jnp.pad(rows["tokens"], ((0, 0), (0, free))),
        "ok": jnp.ones(count, bool),
        "logprobs": jnp.zeros((count, capacity), jnp.float32),
        "ranks": jnp.zeros((count, capacity), jnp.int32),
    }
    if candidates:
        found["candidates"] = jnp.zeros((count, capacity, -(-checkpoint.vocab_size // 8)), jnp.uint8)
    if experts:
        of_prompts = _experts_of(outputs)[prompt_of_row]
        found["experts"] = jnp.pad(of_prompts, ((0, 0), (0, free), (0, 0), (0, 0)))
    choose = partial(_choose, model, rows, SamplingSettings.unpacked(rows["settings"]))
    state = choose(0, hidden, found, rows["limits"] == 0)

    def step(carry: Any) -> Any:
        place, cache, (found, ended, counts) = carry
        # A row that has finished may be at the end of the cache.
        last = jnp.minimum(rows["lengths"] + place, capacity) - 1
        tokens = jnp.take_along_axis(found["history"], last[:, None], axis=1)
        outputs = model(tokens, (cache.lengths - shift)[:, None], cache=cache)
        if experts:
            of_token = _experts_of(outputs)[:, 0]
            found = {**found, "experts": found["experts"].at[jnp.arange(count), last].set(of_token)}
        found, ended, drawn = choose(place, outputs.hidden, found, ended)
        return place + 1, outputs.cache, (found, ended, counts + drawn)

    goes_on = lambda carry: ~jnp.all(carry[2][1])
    # On the device, since a loop on the host would wait for every token.
    _, _, (found, _, counts) = jax.lax.while_loop(goes_on, step, (1, cache, state))
    return {"count": counts, **found}


def _experts_of(outputs: Outputs) -> Int16[Array, "rows seq mixtures active"]:
    """Returns the experts of each token of a call."""
    if "experts" not in outputs.facts:
        raise GenerationError("The model has no mixtures of experts to report. Leave experts out.", parameter="experts")
    return jnp.moveaxis(outputs.facts["experts"], 0, 2).astype(jnp.int16)


def _choose(
    model: Any,
    rows: dict[str, jax.Array],
    settings: SamplingSettings,
    place: Int[Array, ""] | int,
    hidden: Float[Array, "rows 1 embed"],
    found: dict[str, jax.Array],
    finished: jax.Array,
) -> tuple[dict[str, jax.Array], jax.Array, jax.Array]:
    """Samples the token at index `place` of each continuation.

    Returns:
      The updated arrays, a mask of the rows that have finished, and 1 for each row that sampled a token (else 0).
    """
    lengths = rows["lengths"] + place
    kept = "candidates" in found
    drawn = sample(model.logits(hidden[:, 0]), settings, found["history"], lengths, candidates=kept)
    stops = jnp.any(drawn.tokens[:, None] == rows["stops"], axis=1) & (place + 1 > settings.min_tokens)
    values = {"logprobs": drawn.logprobs, "ranks": drawn.ranks}
    values |= {"candidates": jnp.packbits(drawn.candidates, axis=1)} if kept else {}
    own = {
        name: jax.lax.dynamic_update_slice_in_dim(found[name], each[:, None], place, axis=1)
        for name, each in values.items()
    }
    # Rows at the end of the cache, which have finished, write outside of it and are dropped.
    history = found["history"].at[jnp.arange(len(lengths)), lengths].set(drawn.tokens, mode="drop")
    # Logits of a row that has finished do not matter.
    found = {**found, "history": history, "ok": found["ok"] & (drawn.ok | finished), **own}
    return found, finished | stops | (rows["limits"] <= place + 1), (~finished).astype(jnp.int32)
