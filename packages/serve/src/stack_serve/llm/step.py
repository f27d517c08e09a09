"""Device programs of an engine step: the forward pass over tokens of several sequences, and sampling."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.models import ImageTokens
from stack_core.ops.sampling.logprobs import TokenLogprobs, token_logprobs
from stack_core.ops.sampling.row_processors import LogitsProcessors
from stack_core.ops.sampling.sampling import Sampled, SamplingSettings, sample
from stack_serve.llm.adapters import Weights, with_rows
from stack_serve.llm.cache import LayoutPreferences, PagedKVCache, Rows
from stack_serve.llm.config import ANY_LAYOUT, EngineConfig, PageLayout
from stack_serve.llm.logits_processors import SETTINGS_WORDS, idle_words, open_processors
from stack_serve.llm.unstacking import layer_by_layer

__all__ = ["ROW_FIELDS", "SlotState", "Step", "admit"]

ROW_FIELDS = ("slot", "start", "tokens", "samples", "adapter", "shift")
"""The first fields of a row: slot of the sequence, place of the first computed token, number of computed tokens,
number of sampled tokens, slot of the adapter (-1 for the base model), and difference between the places of the row's
tokens and their positions, after images with positions in two directions. The page numbers of the sequence follow."""

# Limits the memory of the logits, [rows, vocab_size].
_PROMPT_LOGPROB_ROWS = 32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotState:
    """Device state of the sequence in each slot. The last slot is reserved for padding rows.

    Attributes:
      tokens: int32[slots, max_tokens], tokens of each sequence. A step reads its inputs here and appends the sampled
        token.
      settings: int32[slots, words], packed `SamplingSettings`, then the words of the `LogitsProcessors`.
    """

    tokens: Any
    settings: Any


def admit(slots: SlotState, slot: jax.Array, tokens: jax.Array, settings: jax.Array) -> SlotState:
    """Initializes a slot with the tokens [max_tokens] and settings [words] of a sequence."""
    return SlotState(slots.tokens.at[slot].set(tokens), slots.settings.at[slot].set(settings))


@dataclass(frozen=True)
class Step:
    """Forward pass and sampling of one model as pure functions, which are compiled for each bucket of shapes.

    Attributes:
      checkpoint: model to run.
      config: settings of the engine.
      pages: number of cache pages.
      layout: axis order of the page pools.
    """

    checkpoint: GenerativeCheckpoint
    config: EngineConfig
    pages: int
    layout: PageLayout = ANY_LAYOUT

    @property
    def processors(self) -> LogitsProcessors:
        """Logits processors that rows may select."""
        return open_processors(self.config.logits_processors)

    @jax.named_scope("forward")
    def forward(
        self,
        weights: Weights,
        layers: Any,
        known: Int[Array, "slots max_tokens"],
        rows: Int[Array, "rows fields"],
        *,
        padded_rows: int,
    ) -> tuple[Any, Float[Array, "padded_rows 1 embed"], Float[Array, "padded_rows embed"]]:
        """Runs a decoding step without sampling, which waits for the masks of constrained rows."""
        layers, hidden, last = self(weights, layers, known, rows, tokens=len(rows), single=True)
        return layers, _padded(hidden, padded_rows), _padded(last, padded_rows)

    @jax.named_scope("prefill")
    def prefill(
        self,
        weights: Weights,
        layers: Any,
        known: Int[Array, "slots max_tokens"],
        rows: Int[Array, "rows fields"],
        *,
        tokens: int,
        padded_tokens: int,
        images: ImageTokens | None = None,
    ) -> tuple[Any, Float[Array, "padded_tokens 1 embed"], Float[Array, "rows embed"]]:
        """Runs a step with prompt chunks. Padded hidden states reduce the shapes of later programs."""
        layers, hidden, last = self(weights, layers, known, rows, tokens=tokens, images=images)
        return layers, _padded(hidden, padded_tokens), last

    @jax.named_scope("encode")
    def encode(
        self,
        weights: Weights,
        features: Float[Array, "rows embed"],
        rows: Int[Array, " tokens"],
        pixels: UInt8[Array, "..."],
        grid: Int[Array, "2"] | None = None,
    ) -> Float[Array, "rows embed"]:
        """Writes the features of an image to its rows of the feature pool; padding has a row behind the end."""
        model: Any = self.checkpoint.model(weights.params)
        grids = () if grid is None else (grid[None, None],)
        found = model.image_features(pixels[None], *grids)[0].astype(features.dtype)
        return features.at[rows].set(found, mode="drop")

    def __call__(
        self,
        weights: Weights,
        layers: Any,
        known: Int[Array, "slots max_tokens"],
        rows: Int[Array, "rows fields"],
        *,
        tokens: int,
        single: bool = False,
        preferences: LayoutPreferences | None = None,
        images: ImageTokens | None = None,
    ) -> tuple[Any, Float[Array, "tokens 1 embed"], Float[Array, "rows embed"]]:
        """Runs the forward pass over the tokens of all rows.

        Args:
          weights: parameters and adapters.
          layers: `PagedLayer`s and `SlotStates` in the structure of the model's states.
          known: tokens of each slot.
          rows: packed rows: `ROW_FIELDS`, then page numbers.
          tokens: size of the token axis, at least the number of tokens in all rows.
          single: True if every row has at most one token.
          preferences: collects the preferred page layout of each attention call.
          images: image tokens of the step; None without any.

        Returns:
          The updated layers, the hidden states of all tokens, and the hidden state of each row's last token.
        """
        places, token_ids, positions, adapters = self._places(known, rows, tokens)
        cache: Any = PagedKVCache(layers, places, self.layout, single, preferences)
        model = self.checkpoint.model(with_rows(weights, adapters))
        given: dict[str, Any] = {} if images is None else {"images": images}
        outputs = model(token_ids[:, None], positions[:, None], cache=cache, **given)
        after: Any = outputs.cache
        hidden = outputs.hidden
        # Rows without tokens get an arbitrary hidden state, which is never read; the clamp avoids the index -1.
        return after.layers, hidden, hidden[jnp.maximum(places.query_starts[1:] - 1, 0), 0]

    @jax.named_scope("decode")
    def decode(
        self,
        weights: Weights,
        layers: Any,
        known: Int[Array, "slots max_tokens"],
        settings: Int[Array, "slots words"],
        rows: Int[Array, "rows fields"],
        *,
        repeats: int,
        padded_rows: int,
        candidates: bool = False,
    ) -> tuple[Any, Float[Array, "padded_rows 1 embed"], Int[Array, "slots max_tokens"], Sampled]:
        """Runs several decoding steps with sampling in one program, to save host overhead per token.

        Args:
          weights, layers: as in `__call__`; their arrays may be `Layers`.
          known: tokens of each slot.
          settings: packed sampling settings of each slot.
          rows: packed rows; each is active for as many steps as it has tokens.
          repeats: maximum number of steps; the actual number is the maximum number of tokens in a row.
          padded_rows: maximum number of rows of any step, to which the hidden states are padded.
          candidates: True if the sampled tokens include their candidates, as in `sample`.

        Returns:
          The updated layers, the padded hidden states of the last step, the updated tokens of each slot, and the
          sampled tokens [repeats, rows].
        """

        @layer_by_layer
        def once(weights: Weights, layers: Any, known: jax.Array, settings: jax.Array, rows: jax.Array) -> Any:
            layers, hidden, last = self(weights, layers, known, rows, tokens=len(rows), single=True)
            known, sampled = self.sample(weights, known, settings, last, rows, candidates=candidates)
            return layers, hidden, known, sampled

        def turn(number: Any, state: tuple[Any, ...]) -> tuple[Any, ...]:
            layers, _, known, found = state
            layers, hidden, known, sampled = once(weights, layers, known, settings, _of_turn(rows, number))
            return layers, hidden, known, jax.tree.map(lambda rest, new: rest.at[number].set(new[0]), found, sampled)

        _, hidden, _, sampled = jax.eval_shape(once, weights, layers, known, settings, rows)
        found = jax.tree.map(lambda each: jnp.zeros((repeats, *each.shape[1:]), each.dtype), sampled)
        state = (layers, jnp.zeros(hidden.shape, hidden.dtype), known, found)
        # The bound is traced, so one program serves every number of repeats.
        layers, hidden, known, found = jax.lax.fori_loop(0, jnp.max(rows[:, 2]), turn, state)
        return layers, _padded(hidden, padded_rows), known, found

    @jax.named_scope("sample")
    def sample(
        self,
        weights: Weights,
        known: Int[Array, "slots max_tokens"],
        settings: Int[Array, "slots words"],
        hidden: Float[Array, "rows embed"],
        rows: Int[Array, "rows fields"],
        mask: Int[Array, "rows mask_words"] | None = None,
        *,
        candidates: bool = False,
    ) -> tuple[Int[Array, "slots max_tokens"], Sampled]:
        """Samples the next token of each row of a step.

        Args:
          weights: parameters and adapters.
          known: tokens of each slot.
          settings: packed sampling settings of each slot.
          hidden: hidden state of the last token of each row.
          rows: packed rows.
          mask: tokens allowed by the constraint of each row; None if no row has one.
          candidates: True if the sampled tokens include the bits of their candidates, uint8[1, rows, bytes]; see
            `candidate_tokens`.

        Returns:
          The updated tokens of each slot, and the sampled tokens [1, rows]; tokens of rows that do not sample are
          undefined.
        """
        slot, start, count, samples = (rows[:, field] for field in range(4))
        lengths = start + count
        # Rows that do not sample get greedy settings, which never trigger the costly parts of `sample`.
        row_settings = jnp.where((samples > 0)[:, None], settings[slot], idle_words(self.processors))
        of_rows = SamplingSettings.unpacked(row_settings)
        processors = self.processors.of_rows(row_settings[:, SETTINGS_WORDS:])
        logits = self.checkpoint.model(weights.params).logits(hidden)
        options: Any = {"mask": mask, "processors": processors, "candidates": candidates}
        sampled = sample(logits, of_rows, known[slot], lengths, **options)
        if candidates:  # an eighth of the bytes to copy to the host
            sampled = replace(sampled, candidates=jnp.packbits(sampled.candidates, axis=1))
        # Rows that do not sample get an index behind the end, which is dropped.
        target = jnp.where(samples > 0, slot, len(known))
        known = known.at[target, lengths].set(sampled.tokens, mode="drop")
        return known, jax.tree.map(lambda array: array[None], sampled)

    @jax.named_scope("verify")
    def verify(
        self,
        weights: Weights,
        layers: Any,
        known: Int[Array, "slots max_tokens"],
        settings: Int[Array, "slots words"],
        rows: Int[Array, "rows fields"],
        drafted: Int[Array, " tokens"],
        mask: Int[Array, "tokens mask_words"],
        *,
        candidates: bool = False,
    ) -> tuple[Any, Float[Array, "tokens 1 embed"], Int[Array, "slots max_tokens"], Sampled]:
        """Runs the forward pass over the newest token and the drafts of each row, and samples after each of them.

        Each token is sampled with the random numbers of its position. If it equals the draft, the draft is accepted,
        and the token sampled after it is the next one without speculation. Outputs are therefore equal, not only their
        distribution. Acceptance has the probability p(draft), as in rejection sampling of a draft that is a point mass
        (Leviathan et al., Fast Inference from Transformers via Speculative Decoding, 2023, arXiv:2211.17192).

        Args:
          weights, layers: as in `__call__`.
          known: tokens of each slot. After a row's accepted tokens, entries of its slot are undefined.
          settings: packed sampling settings of each slot.
          rows: packed rows.
          drafted: token at each position of the step; values after the last row are padding.
          mask: tokens allowed by a constraint at each position.
          candidates: as in `sample`.

        Returns:
          The updated layers, the hidden states, the updated tokens of each slot, and the tokens sampled at each
          position, [1, tokens].
        """
        slot, position, real = self._positions(rows, len(drafted))
        # Padding gets an index behind the end, which is dropped.
        known = known.at[jnp.where(real, slot, len(known)), position].set(drafted, mode="drop")
        layers, hidden, _ = self(weights, layers, known, rows, tokens=len(drafted))
        single = jnp.stack([slot, position, jnp.ones_like(slot), real.astype(slot.dtype)], axis=1)
        known, sampled = self.sample(weights, known, settings, hidden[:, 0], single, mask, candidates=candidates)
        return layers, hidden, known, sampled

    def sample_some(
        self,
        weights: Weights,
        known: Int[Array, "slots max_tokens"],
        settings: Int[Array, "slots words"],
        hidden: Float[Array, "rows embed"],
        rows: Int[Array, "rows fields"],
        chosen: Int[Array, " samples"],
        mask: Int[Array, "samples mask_words"],
        *,
        candidates: bool = False,
    ) -> tuple[Int[Array, "slots max_tokens"], Sampled]:
        """Samples the next token of selected rows of a step; the tokens of the other rows are zeros.

        Steps with prompt chunks use this separate program because XLA takes about as long to compile sampling as eight
        layers of a model. A combined program would be compiled for every bucket of prompt tokens. Steps with
        constrained rows use it because their masks depend on tokens that are read while the forward pass runs.

        Args:
          weights, known, settings, hidden, rows: as in `sample`.
          chosen: indices of the selected rows; `len(rows)` is padding.
          mask: tokens allowed by the constraint of each selected row.
          candidates: as in `sample`.
        """
        hidden, chosen_rows = (jnp.take(array, chosen, axis=0, mode="fill", fill_value=0) for array in (hidden, rows))
        known, sampled = self.sample(weights, known, settings, hidden, chosen_rows, mask, candidates=candidates)

        def scatter(figures: jax.Array) -> jax.Array:
            empty = jnp.zeros((1, len(rows), *figures.shape[2:]), figures.dtype)
            return empty.at[:, chosen].set(figures, mode="drop")

        return known, jax.tree.map(scatter, sampled)

    @jax.named_scope("prompt_logprobs")
    def prompt_logprobs(
        self,
        weights: Weights,
        hidden: Float[Array, "tokens 1 embed"],
        targets: Int[Array, " tokens"],
        count: Int[Array, ""],
    ) -> TokenLogprobs:
        """Computes the log-probability of the token after each token of a step, with logits of 32 tokens at a time.

        Args:
          weights: parameters and adapters.
          hidden: hidden states of the step.
          targets: token that follows each token.
          count: number of valid tokens; results after them are undefined.
        """
        model = self.checkpoint.model(weights.params)
        # Buckets are multiples of `rows`, so clamping never shifts the last block.
        rows = min(_PROMPT_LOGPROB_ROWS, len(targets))

        def block(number: Any) -> TokenLogprobs:
            some, following = (jax.lax.dynamic_slice_in_dim(array, number * rows, rows) for array in (hidden, targets))
            return token_logprobs(model.logits(some[:, 0]), following)

        def add_block(number: Any, found: TokenLogprobs) -> TokenLogprobs:
            place = (number * rows,)
            return jax.tree.map(
                lambda rest, new: jax.lax.dynamic_update_slice(rest, new, (*place, *[0] * (new.ndim - 1))),
                found,
                block(number),
            )

        empty = jax.tree.map(
            lambda array: jnp.zeros((len(targets), *array.shape[1:]), array.dtype), jax.eval_shape(block, 0)
        )
        return jax.lax.fori_loop(0, -(-count // rows), add_block, empty)

    def _positions(self, rows: jax.Array, tokens: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the slot and the position of each token of a step, and whether it is one."""
        ends = jnp.cumsum(rows[:, 2], dtype=jnp.int32)
        token = jnp.arange(tokens, dtype=jnp.int32)
        row = _rows_of(token, ends)
        real = token < ends[-1]
        slot, start, count = (rows[row, field] for field in range(3))
        return slot, jnp.where(real, start + token - (ends[row] - count), 0), real

    def _places(
        self, known: jax.Array, rows: jax.Array, tokens: int, *, ahead: int = 0
    ) -> tuple[Rows, jax.Array, jax.Array, jax.Array]:
        """Computes the cache addresses, token ids, positions and adapter slots of the tokens of a step.

        The positions are those of a model, which fall behind the places of tokens by `shift`. The token ids are those
        `ahead` places further on.
        """
        slot, start, count = (rows[:, field] for field in range(3))
        tables = rows[:, len(ROW_FIELDS) :]
        ends = jnp.cumsum(count, dtype=jnp.int32)
        query_starts = jnp.pad(ends, (1, 0))
        token = jnp.arange(tokens, dtype=jnp.int32)
        row = _rows_of(token, ends)
        real = token < ends[-1]
        position = jnp.where(real, start[row] + token - query_starts[row], 0)
        page_tokens = self.config.page_tokens
        # Padding gets a page out of range, whose writes the cache drops.
        page = jnp.where(real, tables[row, position // page_tokens], self.pages)
        places = Rows(tables, start + count, query_starts, page, position % page_tokens, slot)
        adapters = jnp.where(real, rows[row, ROW_FIELDS.index("adapter")], -1)
        shift = rows[row, ROW_FIELDS.index("shift")]
        token_ids = jnp.where(real, known[slot[row], position + ahead], 0)
        return places, token_ids, jnp.where(real, position - shift, 0), adapters


def _rows_of(token: jax.Array, ends: jax.Array) -> jax.Array:
    """Returns the row of each token; `ends` are the ends of the rows, ascending. Padding gets the last row."""
    return jnp.minimum(jnp.sum(token[:, None] >= ends, axis=1, dtype=jnp.int32), len(ends) - 1)


def _padded(hidden: Float[Array, "tokens ..."], size: int) -> Float[Array, "size ..."]:
    return jnp.pad(hidden, ((0, size - len(hidden)), *[(0, 0)] * (hidden.ndim - 1)))


def _of_turn(rows: jax.Array, number: Any) -> jax.Array:
    """Returns the single-token rows of step `number` of a decode program; finished rows get zero tokens."""
    goes_on = (number < rows[:, 2]).astype(rows.dtype)
    fields = [rows[:, 0], rows[:, 1] + number, goes_on, rows[:, 3] * goes_on, rows[:, 4], rows[:, 5]]
    turn = jnp.stack(fields, axis=1)
    return jnp.concatenate([turn, rows[:, len(ROW_FIELDS) :]], axis=1)
