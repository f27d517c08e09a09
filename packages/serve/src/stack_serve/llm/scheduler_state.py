"""State of the scheduler and its plans of steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from stack_core.abi.generation import EngineStats
from stack_serve.llm.adapter_slots import AdapterSlots
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.pages import PagePool
from stack_serve.llm.sequence import Sequence

__all__ = ["Plan", "Row", "SchedulerState"]


class Row(NamedTuple):
    """The tokens `start` to `start + tokens` of one sequence, computed in a step.

    Attributes:
      sequence: sequence that the tokens belong to.
      slot: slot of the sequence.
      start: position of the first token.
      tokens: number of tokens.
      samples: number of sampled tokens: `tokens` when decoding, including rejected ones; 1 for the last chunk of a
        prompt, 0 for other chunks.
      adapter: slot of the sequence's adapter; -1 for the base model.
      shift: see `ROW_FIELDS`.
    """

    sequence: Sequence
    slot: int
    start: int
    tokens: int
    samples: int
    adapter: int = -1
    shift: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Number of the row's tokens that belong to the prompt."""
        return max(0, min(self.tokens, self.sequence.prompt_tokens - self.start))


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of one step.

    Attributes:
      rows: decoding rows, then prompt chunks; at most one row per sequence.
      repeats: number of decoding steps in the launch, each of which computes the tokens sampled by the previous one.
        Rows with fewer tokens finish earlier. Values above 1 require that all rows decode.
      admitted: sequences that got a slot in this step. Each has a row, and the host knows all of its tokens.
      preempted: sequences that lost their slot in this step and therefore have no row.
      loading: admitted sequences whose adapters must be loaded into their adapter slots before the step.
      drafts: drafted tokens of each row, which its first token precedes; empty if no row has any.
    """

    rows: tuple[Row, ...]
    repeats: int
    admitted: tuple[Sequence, ...]
    preempted: tuple[Sequence, ...]
    loading: tuple[Sequence, ...] = ()
    drafts: tuple[tuple[int, ...], ...] = ()


@dataclass(slots=True)
class SchedulerState:
    """Waiting and running sequences, and the resources they hold.

    Attributes:
      page_tokens: number of tokens per page.
      step_tokens: maximum number of tokens per step.
      prefix_caching: True if sequences can reuse pages of earlier ones with the same prefix.
      priorities: bound to which priorities are clipped, [-priorities, priorities].
      image_rows: number of rows of the feature pool, at least the tokens of the largest image. The distinct images of
        which a step computes tokens have at most as many tokens.
      pool: allocator of the pages.
      free_slots: slots without a running sequence.
      block_tables: int32[max_sequences, pages_per_sequence], page numbers of the sequence in each slot; entries after
        its last page are stale.
      adapters: allocator of the adapter slots.
      loading: sequences admitted to the current plan whose adapters must be loaded.
      waiting, running: sequences in the order of their turns.
      weights_version: number of calls of `forget_prefixes`.
      steps, prompt_tokens, generated_tokens, prefix_queries_tokens, prefix_hits_tokens, preemptions, drafts,
        drafted_tokens, accepted_tokens: counters of `EngineStats`; a prompt is counted once per continuation.
    """

    page_tokens: int
    step_tokens: int
    prefix_caching: bool
    priorities: int
    pool: PagePool
    free_slots: list[int]
    block_tables: np.ndarray
    image_rows: int = 0
    adapters: AdapterSlots = field(default_factory=lambda: AdapterSlots(0))
    loading: list[Sequence] = field(default_factory=list)
    waiting: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)
    weights_version: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    preemptions: int = 0
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        *,
        max_tokens: int,
        pages: int,
        prefix_caching: bool = True,
        image_rows: int = 0,
    ) -> SchedulerState:
        """Creates the state without sequences.

        Args:
          config: settings of the engine.
          max_tokens: maximum total length of a prompt and its continuation.
          pages: number of cache pages.
          prefix_caching: True if the states of the model support prefix caching.
          image_rows: number of rows of the feature pool.
        """
        return cls(
            page_tokens=config.page_tokens,
            step_tokens=config.step_tokens,
            prefix_caching=prefix_caching and config.prefix_caching is not False,
            priorities=config.priorities,
            pool=PagePool(pages),
            # `pop` takes from the end, so slot 0 is the first in use.
            free_slots=list(reversed(range(config.max_sequences))),
            block_tables=np.zeros((config.max_sequences, -(-max_tokens // config.page_tokens)), np.int32),
            image_rows=image_rows,
            adapters=AdapterSlots(config.max_adapters),
        )

    def stats(self, *, compilations: int) -> EngineStats:
        """Returns the statistics; `compilations` comes from the caller."""
        return EngineStats(
            running=len(self.running),
            waiting=len(self.waiting),
            used_pages=self.pool.pages - self.pool.available,
            pages=self.pool.pages,
            steps=self.steps,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            prefix_queries_tokens=self.prefix_queries_tokens,
            prefix_hits_tokens=self.prefix_hits_tokens,
            preemptions=self.preemptions,
            compilations=compilations,
            drafts=self.drafts,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
        )
