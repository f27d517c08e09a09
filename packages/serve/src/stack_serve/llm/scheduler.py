"""Scheduler of the engine. A plan depends only on host state, not on the model, the clock or random numbers.

A step computes one token of each decoding sequence and chunks of prompts, up to `step_tokens` tokens in total. If all
running sequences decode without a constraint and no waiting one can start, a launch may repeat the step with the tokens
that it samples. A step is planned while the previous one runs, so the newest tokens of a sequence may exist only on the
devices. A step may also verify drafts: guesses of the next tokens of decoding sequences, which it computes at once. The
caller plans it without a step in flight, and takes back the rejected drafts with `reject` before it plans another.

Guarantees for any workload in which each sequence fits into an otherwise empty cache:

  - A running sequence decodes in every step; long prompts do not delay it. When the cache is full, the running sequence
    with the latest turn is preempted: it releases its pages and waits to be recomputed.
  - Waiting sequences start in the order of their turns. A turn is the arrival number, shifted by `PRIORITY_ARRIVALS`
    per level of priority. At most `2 priorities PRIORITY_ARRIVALS` later arrivals can therefore overtake a sequence.
    Smaller sequences do not overtake the first one in the queue. The only exceptions are a continuation that waits for
    the first continuation of its request to compute the prompt, and a sequence that waits for a running one to compute
    the next page of their common prefix.
  - A running sequence keeps the slot of its adapter. Waiting for an adapter slot blocks the queue in the same way as
    waiting for pages.
  - A waiting sequence never preempts a running one, whatever its priority.
  - The running sequence with the earliest turn is never preempted while others run. Every sequence therefore starts and
    finishes under any load.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from stack_core.abi.generation import EngineStats
from stack_serve.llm.adapter_slots import AdapterSlots
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.images import images_between
from stack_serve.llm.pages import PagePool, extend_digests
from stack_serve.llm.sequence import Sequence

__all__ = [
    "PRIORITY_ARRIVALS",
    "Plan",
    "Row",
    "SchedulerState",
    "finish",
    "forget_prefixes",
    "recompute",
    "record",
    "reject",
    "schedule",
]

PRIORITY_ARRIVALS = 64
"""Number of earlier arrivals that a sequence can overtake per level of priority."""


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


def schedule(
    state: SchedulerState,
    arrivals: Iterable[Sequence],
    *,
    repeats: int = 1,
    drafts: Mapping[int, tuple[int, ...]] | None = None,
) -> Plan:
    """Plans the next step; the plan is empty if there is nothing to compute.

    Args:
      state: state of the scheduler, which is updated.
      arrivals: new sequences. Each must fit into an otherwise empty cache, with `max_total_tokens` above its length.
      repeats: maximum number of repeats. It is used if no sequence can start in the next step and enough pages are
        available.
      drafts: drafted tokens by sequence id, used if all sequences decode and none can start. They are cut to the limits
        of their sequences and the step, and never preempt a sequence.
    """
    for sequence in arrivals:
        level = max(-state.priorities, min(state.priorities, sequence.priority))
        sequence.turn = sequence.arrival + level * PRIORITY_ARRIVALS
        insort(state.waiting, sequence, key=_order)
    ready = [sequence for sequence in state.running if sequence.total_tokens < sequence.max_total_tokens]
    drafts = _fitting_drafts(state, ready, drafts) if drafts else {}
    repeats = 1 if drafts else _repeats(state, ready, repeats)
    decodes, chunks, preempted, admitted = list[Row](), list[Row](), list[Sequence](), list[Sequence]()
    # Decoding sequences come first; prompts get the rest of the step. Decoding sequences compute no tokens of images,
    # because the last token of a prompt is text.
    room = _Room(state.step_tokens - sum(_is_decode(sequence) for sequence in ready), state.image_rows)
    for sequence in ready:
        if sequence.slot is None:
            break  # this sequence and all later ones were preempted
        missing = sequence.total_tokens - sequence.computed_tokens
        # Without images, at most one running sequence has an incomplete prompt: the next is admitted once its last
        # chunk is planned.
        if missing == 1:
            tokens = min(repeats, _left(sequence)) + len(drafts.get(sequence.id, ()))
        else:
            tokens = room.chunk(sequence, sequence.computed_tokens)
            if not tokens:
                continue
        # Making room may preempt this sequence itself.
        if not _make_room(state, sequence, tokens, preempted):
            continue
        if missing == 1:
            decodes.append(_advance(sequence, tokens, samples=tokens))
        else:
            room.take(sequence, tokens)
            chunks.append(_advance_prompt(sequence, tokens))
    # After a preemption the cache is full, and an admitted sequence could be preempted at once.
    while not preempted and room.tokens and (sequence := _admit(state, room)) is not None:
        admitted.append(sequence)
        tokens = room.chunk(sequence, sequence.computed_tokens)
        _make_room(state, sequence, tokens, preempted)
        room.take(sequence, tokens)
        chunks.append(_advance_prompt(sequence, tokens))
    rows = (*decodes, *chunks)
    for row in rows:  # after all admissions, because rows must not share pages that the same step computes
        _register(state, row.sequence)
    state.steps += bool(rows)
    loading, state.loading = tuple(state.loading), list[Sequence]()
    of_rows = tuple(drafts.get(row.sequence.id, ()) for row in rows) if drafts else ()
    return Plan(rows, repeats, tuple(admitted), tuple(preempted), loading, of_rows if any(of_rows) else ())


def record(state: SchedulerState, sequence: Sequence, token: int) -> None:
    """Appends the next token of a sequence that was in flight, in the order of its rows.

    The token is dropped if the sequence has ended. Once a sequence has all of its tokens, the caller must `finish` it.
    """
    sequence.in_flight -= 1
    if sequence.ended:
        return
    sequence.tokens.append(token)
    state.generated_tokens += 1
    _register(state, sequence)


def reject(state: SchedulerState, row: Row, *, accepted: int) -> None:
    """Takes back the rejected drafts of a row: their tokens in flight, their keys and the pages only they needed.

    Args:
      state: state of the scheduler, which is updated.
      row: row of a plan with drafts. Its step is read, but its tokens are not recorded yet.
      accepted: number of its drafts that equal the sampled tokens; one more token was sampled after them.
    """
    sequence = row.sequence
    state.drafts += row.samples > 1
    state.drafted_tokens += row.samples - 1
    state.accepted_tokens += accepted
    sequence.in_flight -= row.samples - 1 - accepted
    if sequence.slot is None:  # it ended or was preempted, which released its pages
        return
    sequence.computed_tokens = row.start + accepted + 1
    needed = -(-sequence.computed_tokens // state.page_tokens)
    state.pool.release(sequence.pages[needed:])
    del sequence.pages[needed:]


def finish(state: SchedulerState, sequence: Sequence) -> None:
    """Ends a waiting or running sequence and releases its slot and pages.

    They can be reused immediately, even by the next step, because devices execute steps in order.
    """
    if sequence.ended:
        return
    sequence.ended = True
    if sequence.slot is None:
        state.waiting.remove(sequence)
    else:
        _release(state, sequence)


def forget_prefixes(state: SchedulerState) -> None:
    """Clears the prefix cache after a change of weights; running sequences keep their keys and values."""
    state.weights_version += 1
    state.pool.forget()


def recompute(state: SchedulerState) -> None:
    """Preempts all running sequences to recompute their keys; each waits until its tokens in flight are read."""
    for sequence in list(reversed(state.running)):
        _preempt(state, sequence)


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.turn, sequence.arrival


def _is_decode(sequence: Sequence) -> bool:
    return sequence.total_tokens - sequence.computed_tokens == 1


def _left(sequence: Sequence) -> int:
    """Returns the number of tokens that the sequence can still generate."""
    return sequence.max_total_tokens - sequence.total_tokens


def _repeats(state: SchedulerState, ready: list[Sequence], repeats: int) -> int:
    """Limits the repeats of a step.

    It is repeated only if no sequence is constrained, no sequence can start, and the pages suffice for all.
    """
    if repeats == 1 or not all(map(_is_decode, ready)) or _next_to_begin(state) is not None:
        return 1
    # Its host would have to read each token before it can compute the mask of the next one.
    if any(sequence.is_constrained for sequence in ready):
        return 1
    # No sequence needs more; rows that end earlier sample fewer tokens.
    repeats = min(repeats, max(map(_left, ready), default=1))
    tokens = ((sequence, sequence.computed_tokens + min(repeats, _left(sequence))) for sequence in ready)
    # A launch cannot allocate pages midway, so those of all its steps are needed now.
    pages = sum(-(-count // state.page_tokens) - len(sequence.pages) for sequence, count in tokens)
    return repeats if pages <= state.pool.available else 1


def _fitting_drafts(
    state: SchedulerState, ready: list[Sequence], drafts: Mapping[int, tuple[int, ...]]
) -> dict[int, tuple[int, ...]]:
    """Cuts drafts to the limits of their sequences, the tokens of a step and the available pages."""
    if not all(map(_is_decode, ready)) or _next_to_begin(state) is not None:
        return {}
    pages = {sequence.id: -(-(sequence.computed_tokens + 1) // state.page_tokens) for sequence in ready}
    free_pages = state.pool.available - sum(pages[sequence.id] - len(sequence.pages) for sequence in ready)
    free_tokens = state.step_tokens - len(ready)
    found = {}
    for sequence in ready:
        first = sequence.computed_tokens + 1
        room = (pages[sequence.id] + max(free_pages, 0)) * state.page_tokens - first
        # The token sampled after the last draft must fit, too.
        drafted = drafts.get(sequence.id, ())[: max(min(_left(sequence) - 1, free_tokens, room), 0)]
        free_tokens -= len(drafted)
        free_pages -= -(-(first + len(drafted)) // state.page_tokens) - pages[sequence.id]
        if drafted:
            found[sequence.id] = drafted
    return found


def _advance_prompt(sequence: Sequence, tokens: int) -> Row:
    return _advance(sequence, tokens, samples=int(sequence.computed_tokens + tokens == sequence.total_tokens))


def _advance(sequence: Sequence, tokens: int, *, samples: int) -> Row:
    start = sequence.computed_tokens
    sequence.computed_tokens = start + tokens
    sequence.in_flight += samples
    assert sequence.slot is not None
    shift = sequence.position_shift(start) if sequence.images else 0
    return Row(sequence, sequence.slot, start, tokens, samples, sequence.adapter_slot, shift)


def _make_room(state: SchedulerState, sequence: Sequence, tokens: int, preempted: list[Sequence]) -> bool:
    """Allocates pages for the next tokens, preempting later sequences; returns False if it preempts this one."""
    pages = -(-(sequence.computed_tokens + tokens) // state.page_tokens)
    while pages - len(sequence.pages) > state.pool.available:
        # `running` is in the order of turns, so this sequence has the latest.
        last = state.running[-1]
        _preempt(state, last)
        state.preemptions += 1
        preempted.append(last)
        if last is sequence:
            return False
    while len(sequence.pages) < pages:
        page = state.pool.take()
        # Entries after the sequence's last page are left over from earlier sequences. Kernels do not read them,
        # because they stop at the number of keys of the sequence.
        state.block_tables[sequence.slot, len(sequence.pages)] = page
        sequence.pages.append(page)
    return True


def _preempt(state: SchedulerState, sequence: Sequence) -> None:
    _release(state, sequence)
    sequence.preemptions += 1
    insort(state.waiting, sequence, key=_order)


def _release(state: SchedulerState, sequence: Sequence) -> None:
    """Releases the slot, adapter slot and pages of a running sequence."""
    assert sequence.slot is not None
    state.running.remove(sequence)
    state.free_slots.append(sequence.slot)
    state.pool.release(sequence.pages)
    if sequence.adapter is not None:
        state.adapters.release(sequence.adapter)
    sequence.slot, sequence.adapter_slot = None, -1
    sequence.pages = []
    sequence.computed_tokens = 0


@dataclass(slots=True)
class _Room:
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


def _admit(state: SchedulerState, room: _Room) -> Sequence | None:
    """Moves the next waiting sequence to the running ones, with the cached pages of its prefix, if it can start.

    It waits for another step if an image comes next for which this one has no room.
    """
    found = _next_to_begin(state)
    if found is None:
        return None
    sequence, pages = found
    start = len(pages) * state.page_tokens
    if not room.chunk(sequence, start):
        return None
    state.waiting.remove(sequence)
    insort(state.running, sequence, key=_order)
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


def _next_to_begin(state: SchedulerState) -> tuple[Sequence, list[int]] | None:
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
    _extend_digests(state, sequence, pages)
    found = state.pool.find(sequence.digests)
    # The rest of an image is computed together with its first tokens.
    return found[: sequence.image_boundary(len(found) * state.page_tokens) // state.page_tokens]


def _extend_digests(state: SchedulerState, sequence: Sequence, pages: int) -> None:
    digests, tokens = sequence.digests, sequence.tokens
    options = {"page_tokens": state.page_tokens, "pages": pages}
    extend_digests(digests, tokens, **options, adapter=sequence.adapter, images=sequence.images)


def _count_prompt(state: SchedulerState, sequence: Sequence) -> None:
    sequence.cached_tokens = sequence.computed_tokens
    state.prompt_tokens += sequence.prompt_tokens
    if state.prefix_caching and sequence.cacheable:
        state.prefix_queries_tokens += sequence.prompt_tokens
        state.prefix_hits_tokens += sequence.cached_tokens


def _register(state: SchedulerState, sequence: Sequence) -> None:
    """Registers full pages in the prefix cache if the host knows their tokens and planned steps compute them."""
    sequence.prompt_planned |= sequence.computed_tokens >= sequence.prompt_tokens
    # A digest needs the tokens on the host, and a page is usable once a planned step computes it.
    pages = min(len(sequence.tokens), sequence.computed_tokens) // state.page_tokens
    if pages <= sequence.registered_pages or not state.prefix_caching:
        return
    # Pages with keys of old weights must not be found by later sequences.
    if sequence.weights_version != state.weights_version:
        return
    _extend_digests(state, sequence, pages)
    for page in range(sequence.registered_pages, pages):
        state.pool.register(sequence.pages[page], sequence.digests[page])
    sequence.registered_pages = pages
