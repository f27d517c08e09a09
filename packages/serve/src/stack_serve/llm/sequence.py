"""One continuation of a prompt, as the host knows it."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Sequence"]


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """A prompt and what has been generated of one continuation; the scheduler alone writes to it.

    Invariants:
      computed_tokens <= total_tokens = len(tokens) + in_flight <= max_total_tokens
      len(pages) * page_tokens >= computed_tokens
      slot is None if and only if it is not running; then pages is empty and computed_tokens is 0

    Attributes:
      index: which of the request's continuations.
      tokens: prompt and generated ones, as far as the host knows them.
      max_total_tokens: of prompt and continuation together.
      priority: the lower number goes first, within the scheduler's bounds.
      arrival: number of its arrival; no two are the same.
      turn: who has the lower one goes first, of equal ones the earlier arrival.
      adapter: the number of its adapter; None is none.
      cacheable: its prompt may come from kept pages; no, if something is wanted of each token of the prompt.
      leader: the request's first continuation, whose prompt this one waits for in order to share its pages.
      computed_tokens: tokens whose keys and values are in its pages once the steps that are planned have run.
      in_flight: tokens that steps sample which are planned, but which the host has not seen.
      slot: its place among the running.
      adapter_slot: where its adapter lies while it is running; -1 if it has none.
      pages: numbers of its pages in the order of its tokens; those that others hold too are only read.
      cached_tokens: tokens of its prompt that lay in kept pages when it first began.
      preemptions: how often it lost its pages.
      prompt_planned: steps before the one being planned compute all of its prompt, or did once.
      ended: it is to have no more tokens.
      digests: of its full pages, as far as they were needed.
      registered_pages: those of its pages that were offered to others.
      weights_version: of the weights that all of its pages are from.
    """

    id: int
    request_id: str
    index: int
    tokens: list[int]
    prompt_tokens: int
    max_total_tokens: int
    priority: int
    arrival: int
    turn: int = 0
    adapter: int | None = None
    cacheable: bool = True
    leader: Sequence | None = None
    computed_tokens: int = 0
    in_flight: int = 0
    slot: int | None = None
    adapter_slot: int = -1
    pages: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    preemptions: int = 0
    prompt_planned: bool = False
    ended: bool = False
    digests: list[bytes] = field(default_factory=list)
    registered_pages: int = 0
    weights_version: int = 0

    @property
    def total_tokens(self) -> int:
        """Tokens that are known, or will be when the planned steps have run."""
        return len(self.tokens) + self.in_flight
