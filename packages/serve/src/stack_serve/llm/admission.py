"""Admission of waiting sequences, with the cached pages of their prefixes.

`scheduler` states the order in which sequences start and its exceptions.
"""

from __future__ import annotations

import itertools
from bisect import insort
from dataclasses import dataclass, field

from stack_serve.llm.images import images_between
from stack_serve.llm.pages import extend_digests
from stack_serve.llm.scheduler_state import SchedulerState
from stack_serve.llm.sequence import Sequence

__all__ = ["Room", "admit", "digest_pages", "next_to_begin", "order"]


@dataclass(slots=True)
class Room:
    """Room for prompts in a step.

    Attributes:
      tokens: number of tokens that the step can still compute.
      image_rows: see `SchedulerState`.
      images: tokens of each image of the step, by digest.
    """

    tokens: int
    image_rows: int
    images: dict[bytes, int] = field(default_factory=dict)

    def chunk(self, sequence: Sequence, start: int) -> int:
        """Returns the number of tokens to compute from place `start` on, 0 if an image comes next that does not fit."""
        end = min(sequence.total_tokens, start + self.tokens)
        taken = dict(self.images)
        for image in images_between(sequence.images, start, end):
            taken[image.digest] = image.tokens
            if sum(taken.values()) > self.image_rows:
                end = image.start
                break
        return max(sequence.image_boundary(end) - start, 0)

    def take(self, sequence: Sequence, tokens: int) -> None:
        """Takes the room of the next tokens of a sequence."""
        start = sequence.computed_tokens
        self.tokens -= tokens
        for image in images_between(sequence.images, start, start + tokens):
            self.images[image.digest] = image.tokens


def order(sequence: Sequence) -> tuple[int, int]:
    """Returns the key by which waiting and running sequences are sorted."""
    return sequence.turn, sequence.arrival


def admit(state: SchedulerState, room: Room) -> Sequence | None:
    """Moves the next waiting sequence to the running ones, with the cached pages of its prefix, if it can start.

    It waits for another step if an image comes next for which this one has no room.
    """
    found = next_to_begin(state)
    if found is None:
        return None
    sequence, pages = found
    start = len(pages) * state.page_tokens
    if not room.chunk(sequence, start):
        return None
    state.waiting.remove(sequence)
    insort(state.running, sequence, key=order)
    # Before any allocation, which could otherwise evict these unreferenced cached pages.
    state.pool.share(pages)
    sequence.slot = state.free_slots.pop()
    if sequence.adapter is not None:
        sequence.adapter_slot, is_new = state.adapters.hold(sequence.adapter)
        if is_new:
            state.loading.append(sequence)
    sequence.pages = pages
    sequence.computed_tokens = len(pages) * state.page_tokens
    sequence.registered_pages = len(pages)
    sequence.weights_version = state.weights_version
    state.block_tables[sequence.slot, : len(pages)] = pages
    if not sequence.preemptions:
        _count_prompt(state, sequence)
    return sequence


def next_to_begin(state: SchedulerState) -> tuple[Sequence, list[int]] | None:
    """Returns the next waiting sequence and the cached pages of its prefix, if it can start.

    It can start if a slot and, if needed, an adapter slot are available, and if the pages suffice for all of its tokens
    and the next one, plus one page per running sequence. Without that reserve it might be preempted in the next step.
    Running sequences already have pages for all of their tokens except the next, unless the step is full.
    """
    if not state.free_slots:
        return None
    coming = _coming_pages(state)
    waits = lambda each: _waits_for_leader(state, each) or _waits_for_page(state, each, coming)
    sequence = next(itertools.filterfalse(waits, state.waiting), None)
    # A preempted sequence restarts once the host has read its tokens in flight, which it must recompute.
    if sequence is None or sequence.in_flight or not state.adapters.can_hold(sequence.adapter):
        return None
    pages = _find_prefix(state, sequence)
    # Cached pages without a reference count as available, but using them makes them unavailable.
    needed = sequence.total_tokens // state.page_tokens + 1 - len(pages) + state.pool.count_unreferenced(pages)
    return (sequence, pages) if needed + len(state.running) <= state.pool.available else None


def _waits_for_leader(state: SchedulerState, sequence: Sequence) -> bool:
    leader = sequence.leader
    if leader is None or leader.prompt_planned or leader.ended:
        return False
    # The last prompt token is always computed, so only prompts of more than one page have a full page to share.
    return state.prefix_caching and sequence.cacheable and sequence.prompt_tokens > state.page_tokens


def _coming_pages(state: SchedulerState) -> set[bytes]:
    """Returns the digests of pages that running sequences are about to compute and register."""
    if not state.prefix_caching:
        return set()
    return {
        digest
        for sequence in state.running
        if sequence.weights_version == state.weights_version and sequence.cacheable
        for digest in sequence.digests[sequence.registered_pages :]
    }


def _waits_for_page(state: SchedulerState, sequence: Sequence, coming: set[bytes]) -> bool:
    """Returns whether a running sequence is about to compute the next page of this one's prefix.

    Otherwise the prompts of a group of requests that arrive together, such as samples for one task, would all be
    computed, because rows of a step cannot share pages that the same step computes.
    """
    if not coming or not sequence.cacheable:
        return False
    found = len(_find_prefix(state, sequence))
    return found < len(sequence.digests) and sequence.digests[found] in coming


def _find_prefix(state: SchedulerState, sequence: Sequence) -> list[int]:
    """Finds the cached pages of a sequence's prefix, without its last token, which must be computed."""
    if not (state.prefix_caching and sequence.cacheable):
        return []
    pages = (len(sequence.tokens) - 1) // state.page_tokens
    digest_pages(state, sequence, pages)
    found = state.pool.find(sequence.digests)
    # The rest of an image is computed together with its first tokens.
    return found[: sequence.image_boundary(len(found) * state.page_tokens) // state.page_tokens]


def digest_pages(state: SchedulerState, sequence: Sequence, pages: int) -> None:
    """Extends the digests of a sequence to its first `pages` pages."""
    digests, tokens = sequence.digests, sequence.tokens
    options = {"page_tokens": state.page_tokens, "pages": pages}
    extend_digests(digests, tokens, **options, adapter=sequence.adapter, images=sequence.images)


def _count_prompt(state: SchedulerState, sequence: Sequence) -> None:
    sequence.cached_tokens = sequence.computed_tokens
    state.prompt_tokens += sequence.prompt_tokens
    if state.prefix_caching and sequence.cacheable:
        state.prefix_queries_tokens += sequence.prompt_tokens
        state.prefix_hits_tokens += sequence.cached_tokens
