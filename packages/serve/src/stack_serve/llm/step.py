"""One step of an engine on its devices: tokens of several sequences run, and a next one sampled for each."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.ops.sampling.logprobs import TokenLogprobs, token_logprobs
from stack_core.ops.sampling.sampling import Sampled, SamplingSettings, sample
from stack_serve.llm.adapters import Weights, with_rows
from stack_serve.llm.cache import PagedKVCache, Rows, WantedLayouts
from stack_serve.llm.config import ANY_LAYOUT, EngineConfig, PageLayout
from stack_serve.llm.unstacking import layer_by_layer

__all__ = ["ROW_FIELDS", "SlotState", "Step", "admit"]

ROW_FIELDS = ("slot", "start", "tokens", "samples", "adapter")
"""What a row of a step begins with: the sequence's slot, the position of the first token that is computed, how many
are, how many are sampled, and the slot of its adapter, -1 for none. The numbers of the sequence's pages follow."""

_PROMPT_LOGPROB_ROWS = 32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotState:
    """What the devices know of the sequence in each slot; the last slot is no sequence's, but that of padding.

    Attributes:
      tokens: int32[slots, max_tokens]; a step reads those that it computes, and the one that is sampled is added.
      settings: int32[slots, words], how it is sampled: `SamplingSettings`, packed.
    """

    tokens: Any
    settings: Any


def admit(slots: SlotState, slot: jax.Array, tokens: jax.Array, settings: jax.Array) -> SlotState:
    """Gives a slot to a sequence with tokens[max_tokens] and settings[words]."""
    return SlotState(slots.tokens.at[slot].set(tokens), slots.settings.at[slot].set(settings))


@dataclass(frozen=True)
class Step:
    """The step of one model, and what is made of its hidden states: pure functions, compiled for each of their shapes.

    Attributes:
      pages: of the cache.
      layout: of a page.
    """

    checkpoint: GenerativeCheckpoint
    config: EngineConfig
    pages: int
    layout: PageLayout = ANY_LAYOUT

    @jax.named_scope("prefill")
    def prefill(
        self,
        weights: Weights,
        layers: Any,
        known: Int[Array, "slots max_tokens"],
        rows: Int[Array, "rows fields"],
        *,
        tokens: int,
        most_tokens: int,
    ) -> tuple[Any, Float[Array, "most_tokens 1 embed"], Float[Array, "rows embed"]]:
        """A step with parts of prompts; the hidden states are padded, so that programs that read them are few."""
        layers, hidden, last = self(weights, layers, known, rows, tokens=tokens)
        return layers, _padded(hidden, most_tokens), last

    def __call__(
        self,
        weights: Weights,
        layers: Any,
        known: Int[Array, "slots max_tokens"],
        rows: Int[Array, "rows fields"],
        *,
        tokens: int,
        single: bool = False,
        wanted: WantedLayouts | None = None,
    ) -> tuple[Any, Float[Array, "tokens 1 embed"], Float[Array, "rows embed"]]:
        """Computes at most `tokens` tokens, which the rows have in all.

        Args:
          layers: `PagedLayer`s and `SlotStates` in the structure of the model's states.
          known: the tokens of each slot.
          single: no row has more than one.
          wanted: notes which layouts of pages suit the calls of attention.

        Returns:
          The pools of pages after it, the hidden states of all tokens, and those of each row's last.
        """
        places, token_ids, positions, adapters = self._places(known, rows, tokens)
        cache: Any = PagedKVCache(layers, places, self.layout, single, wanted)
        model = self.checkpoint.model(with_rows(weights, adapters))
        outputs = model(token_ids[:, None], positions[:, None], cache=cache)
        after: Any = outputs.cache
        hidden = outputs.hidden
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
        most_rows: int,
    ) -> tuple[Any, Float[Array, "most_rows 1 embed"], Int[Array, "slots max_tokens"], Sampled]:
        """Steps with a token a row, and what `sample` makes of each, in one program, which costs the host less.

        Args:
          repeats: steps, at most; there are as many as the largest of the rows' tokens.
          most_rows: that any step has.

        Returns:
          The pools of pages after them, the hidden states of the last, padded, the tokens of each slot, and what was
          sampled, [repeats, rows]. The weights and pools may be `Layers`.
        """

        @layer_by_layer
        def once(weights: Weights, layers: Any, known: jax.Array, settings: jax.Array, rows: jax.Array) -> Any:
            layers, hidden, last = self(weights, layers, known, rows, tokens=len(rows), single=True)
            known, sampled = self.sample(weights, known, settings, last, rows)
            return layers, hidden, known, sampled

        def turn(number: Any, state: tuple[Any, ...]) -> tuple[Any, ...]:
            layers, _, known, found = state
            layers, hidden, known, sampled = once(weights, layers, known, settings, _of_turn(rows, number))
            return layers, hidden, known, jax.tree.map(lambda rest, new: rest.at[number].set(new[0]), found, sampled)

        _, hidden, _, sampled = jax.eval_shape(once, weights, layers, known, settings, rows)
        found = jax.tree.map(lambda each: jnp.zeros((repeats, *each.shape[1:]), each.dtype), sampled)
        state = (layers, jnp.zeros(hidden.shape, hidden.dtype), known, found)
        layers, hidden, known, found = jax.lax.fori_loop(0, jnp.max(rows[:, 2]), turn, state)
        return layers, _padded(hidden, most_rows), known, found

    @jax.named_scope("sample")
    def sample(
        self,
        weights: Weights,
        known: Int[Array, "slots max_tokens"],
        settings: Int[Array, "slots words"],
        hidden: Float[Array, "rows embed"],
        rows: Int[Array, "rows fields"],
    ) -> tuple[Int[Array, "slots max_tokens"], Sampled]:
        """Samples the token after the last of each row of a step.

        Args:
          settings: of each slot.

        Returns:
          The tokens of each slot with it, and tokens [1, rows], which mean nothing where none was to be sampled.
        """
        slot, start, count, samples = (rows[:, field] for field in range(4))
        lengths = start + count
        # What a row that does not sample wants is no work.
        wanted = jnp.where((samples > 0)[:, None], settings[slot], SamplingSettings.greedy_row().packed())
        of_rows = SamplingSettings.unpacked(wanted)
        sampled = sample(self.checkpoint.model(weights.params).logits(hidden), of_rows, known[slot], lengths)
        target = jnp.where(samples > 0, slot, len(known))
        known = known.at[target, lengths].set(sampled.tokens, mode="drop")
        return known, jax.tree.map(lambda array: array[None], sampled)

    def sample_some(
        self,
        weights: Weights,
        known: Int[Array, "slots max_tokens"],
        settings: Int[Array, "slots words"],
        hidden: Float[Array, "rows embed"],
        rows: Int[Array, "rows fields"],
        chosen: Int[Array, " samples"],
    ) -> tuple[Int[Array, "slots max_tokens"], Sampled]:
        """What `sample` makes of some of a step's rows; the tokens of the others are zeros.

        After parts of prompts it is a program of its own because such steps have fewer numbers of rows than shapes, and
        because it takes XLA about as long to compile as eight layers of a model.

        Args:
          chosen: their places among the rows; `len(rows)` for none.
        """
        taken = (jnp.take(array, chosen, axis=0, mode="fill", fill_value=0) for array in (hidden, rows))
        known, sampled = self.sample(weights, known, settings, *taken)

        def placed(figures: jax.Array) -> jax.Array:
            empty = jnp.zeros((1, len(rows), *figures.shape[2:]), figures.dtype)
            return empty.at[:, chosen].set(figures, mode="drop")

        return known, jax.tree.map(placed, sampled)

    @jax.named_scope("prompt_logprobs")
    def prompt_logprobs(
        self,
        weights: Weights,
        hidden: Float[Array, "tokens 1 embed"],
        targets: Int[Array, " tokens"],
        count: Int[Array, ""],
    ) -> TokenLogprobs:
        """The log-probabilities of the tokens that follow those of a step, a few rows of logits at a time.

        Args:
          count: of the tokens; what is given for those behind them means nothing.
        """
        model = self.checkpoint.model(weights.params)
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

    def _places(self, known: jax.Array, rows: jax.Array, tokens: int) -> tuple[Rows, jax.Array, jax.Array, jax.Array]:
        """Where the tokens of a step lie, which they are, at which positions they stand, and their adapters' slots."""
        slot, start, count = (rows[:, field] for field in range(3))
        tables = rows[:, len(ROW_FIELDS) :]
        ends = jnp.cumsum(count, dtype=jnp.int32)
        query_starts = jnp.pad(ends, (1, 0))
        token = jnp.arange(tokens, dtype=jnp.int32)
        row = jnp.minimum(jnp.sum(token[:, None] >= ends, axis=1, dtype=jnp.int32), len(rows) - 1)
        real = token < ends[-1]
        position = jnp.where(real, start[row] + token - query_starts[row], 0)
        page_tokens = self.config.page_tokens
        page = jnp.where(real, tables[row, position // page_tokens], self.pages)
        places = Rows(tables, start + count, query_starts, page, position % page_tokens, slot)
        adapters = jnp.where(real, rows[row, ROW_FIELDS.index("adapter")], -1)
        return places, jnp.where(real, known[slot[row], position], 0), position, adapters


def _padded(hidden: Float[Array, "tokens 1 embed"], size: int) -> Float[Array, "size 1 embed"]:
    return jnp.pad(hidden, ((0, size - len(hidden)), (0, 0), (0, 0)))


def _of_turn(rows: jax.Array, number: Any) -> jax.Array:
    """The rows of single tokens after so many steps; one that has had all of its tokens computes none."""
    goes_on = (number < rows[:, 2]).astype(rows.dtype)
    turn = jnp.stack([rows[:, 0], rows[:, 1] + number, goes_on, rows[:, 3] * goes_on, rows[:, 4]], axis=1)
    return jnp.concatenate([turn, rows[:, len(ROW_FIELDS) :]], axis=1)
