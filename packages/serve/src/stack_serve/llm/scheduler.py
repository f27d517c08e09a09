"""What each step computes: a pure function of the host's own records, without model, clock or randomness.

A step takes one token of every running sequence that has its next one, and beside them pieces of prompts, up to
`step_tokens` in all. While nobody can begin, one in which all decode may be repeated: it goes on with the tokens that
it samples. It is planned while the step before it runs, so that a sequence's newest tokens may be known to the devices
only. Guarantees, for any workload of sequences each of which fits into the cache alone:

  - A running sequence decodes in every step; a prompt's length delays no other's decoding. It stops only when the
    cache is full, and then the last of the running is preempted: it gives up its pages and waits to be computed again.
  - Those that wait begin in the order of their turns: a sequence's turn is its number in the order of arrival, and each
    level of priority is worth `PRIORITY_ARRIVALS` numbers. So at most `2 priorities PRIORITY_ARRIVALS` later arrivals
    overtake a sequence, whatever they ask for. The first is not overtaken by ones that would fit, save a continuation
    that waits for its request's first to compute the prompt.
  - Who runs keeps its adapter's slot; who waits for one has all behind it wait, as with pages.
  - Who runs is not preempted by one that waits, whatever its priority.
  - The first of the running is never preempted while others run. So every sequence begins and ends, whatever keeps
    coming.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from stack_core.abi.generation import EngineStats
from stack_serve.llm.adapter_slots import AdapterSlots
from stack_serve.llm.config import EngineConfig
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
    "schedule",
]

PRIORITY_ARRIVALS = 64
"""How many earlier arrivals a sequence overtakes for each level of priority that it is above them."""


class Row(NamedTuple):
    """The part of a step that is one sequence's: tokens `start` to `start + tokens` of those that `slot` holds.

    Attributes:
      samples: how many tokens are sampled: one after the sequence's last, one after each in a step that is repeated,
        or none in a part of a prompt.
      adapter: the slot of the sequence's adapter; -1 is none.
    """

    sequence: Sequence
    slot: int
    start: int
    tokens: int
    samples: int
    adapter: int = -1


@dataclass(frozen=True, slots=True)
class Plan:
    """One step.

    Attributes:
      rows: of single tokens first, then pieces of prompts; a sequence has at most one.
      repeats: how often the step is run, each time with the tokens that the time before sampled: a row with fewer
        tokens is left out of the last times. Above 1 if all rows decode.
      admitted: sequences that got a slot, each of which has a row; their known tokens are all that they have.
      preempted: sequences that lost theirs; none of them has a row.
      loading: those of the admitted whose adapters are to be loaded into their slots before the step.
    """

    rows: tuple[Row, ...]
    repeats: int
    admitted: tuple[Sequence, ...]
    preempted: tuple[Sequence, ...]
    loading: tuple[Sequence, ...] = ()


@dataclass(slots=True)
class SchedulerState:
    """Who waits, who runs, and what they hold.

    Attributes:
      priorities: those of sequences count from `-priorities` to `priorities`.
      waiting, running: in the order of their turns.
      free_slots: numbers below `max_sequences` that no running sequence has.
      block_tables: int32[max_sequences, pages_per_sequence], the pages of the sequence in each slot; what lies behind
        them is left from others.
      adapters: the slots of adapters.
      loading: sequences that were admitted in the plan that is being made, and whose adapters are to be loaded.
      weights_version: goes up when `forget_prefixes` is called.
      steps, prompt_tokens, generated_tokens, prefix_queries_tokens, prefix_hits_tokens, preemptions: as in
        `EngineStats`; a prompt counts once for each of its continuations.
    """

    page_tokens: int
    step_tokens: int
    prefix_caching: bool
    priorities: int
    pool: PagePool
    free_slots: list[int]
    block_tables: np.ndarray
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

    @classmethod
    def of(cls, config: EngineConfig, *, max_tokens: int, pages: int, prefix_caching: bool = True) -> SchedulerState:
        """The state in which nothing waits or runs.

        Args:
          max_tokens: of a prompt and its continuation together.
          pages: of the cache.
          prefix_caching: the model's states allow it.
        """
        return cls(
            page_tokens=config.page_tokens,
            step_tokens=config.step_tokens,
            prefix_caching=prefix_caching and config.prefix_caching is not False,
            priorities=config.priorities,
            pool=PagePool(pages),
            free_slots=list(reversed(range(config.max_sequences))),
            block_tables=np.zeros((config.max_sequences, -(-max_tokens // config.page_tokens)), np.int32),
            adapters=AdapterSlots(config.max_adapters),
        )

    def stats(self, *, compilations: int) -> EngineStats:
        """The counts, with one that the scheduler does not know."""
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
        )


def schedule(state: SchedulerState, arrivals: Iterable[Sequence], *, repeats: int = 1) -> Plan:
    """Plans the next step, which is empty if there is nothing to compute.

    Args:
      arrivals: new ones; each has `max_total_tokens` above its tokens, and fits into the cache alone.
      repeats: how often to run it, if nobody could begin in the next one, and the cache has room.
    """
    for sequence in arrivals:
        level = max(-state.priorities, min(state.priorities, sequence.priority))
        sequence.turn = sequence.arrival + level * PRIORITY_ARRIVALS
        insort(state.waiting, sequence, key=_order)
    ready = [sequence for sequence in state.running if sequence.total_tokens < sequence.max_total_tokens]
    repeats = _repeats(state, ready, repeats)
    decodes, chunks, preempted, admitted = list[Row](), list[Row](), list[Sequence](), list[Sequence]()
    prompt_tokens = state.step_tokens - sum(_is_decode(sequence) for sequence in ready)
    for sequence in ready:
        if sequence.slot is None:
            break  # it and all after it were preempted
        missing = sequence.total_tokens - sequence.computed_tokens
        # At most one lacks more than a token, for none begins before the others have all of theirs.
        tokens = min(repeats, _left(sequence)) if missing == 1 else min(missing, prompt_tokens)
        if not _make_room(state, sequence, tokens, preempted):
            continue
        if missing == 1:
            decodes.append(_advance(sequence, tokens, samples=tokens))
        else:
            chunks.append(_advance_prompt(sequence, tokens))
            prompt_tokens -= tokens
    while not preempted and prompt_tokens and (sequence := _admit(state)) is not None:
        admitted.append(sequence)
        tokens = min(sequence.total_tokens - sequence.computed_tokens, prompt_tokens)
        _make_room(state, sequence, tokens, preempted)
        chunks.append(_advance_prompt(sequence, tokens))
        prompt_tokens -= tokens
    rows = (*decodes, *chunks)
    for row in rows:  # only now, for a step's rows do not read each other's pages
        _register(state, row.sequence)
    state.steps += bool(rows)
    loading, state.loading = tuple(state.loading), list[Sequence]()
    return Plan(rows, repeats, tuple(admitted), tuple(preempted), loading)


def record(state: SchedulerState, sequence: Sequence, token: int) -> None:
    """Makes known the token that the oldest of the sequence's rows whose token was not known sampled.

    It is dropped if the sequence has ended. If it has not and has all of its tokens now, `finish` is to follow.
    """
    sequence.in_flight -= 1
    if sequence.ended:
        return
    sequence.tokens.append(token)
    state.generated_tokens += 1
    _register(state, sequence)


def finish(state: SchedulerState, sequence: Sequence) -> None:
    """Ends a sequence wherever it is; what it held may be given to others at once, as devices work in order."""
    if sequence.ended:
        return
    sequence.ended = True
    if sequence.slot is None:
        state.waiting.remove(sequence)
    else:
        _release(state, sequence)


def forget_prefixes(state: SchedulerState) -> None:
    """Forgets all kept pages, as new weights make other keys and values; those running go on with what they have."""
    state.weights_version += 1
    state.pool.forget()


def recompute(state: SchedulerState) -> None:
    """Has those that run compute all of their keys again; each waits until its tokens are known."""
    for sequence in list(reversed(state.running)):
        _preempt(state, sequence)


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.turn, sequence.arrival


def _is_decode(sequence: Sequence) -> bool:
    return sequence.total_tokens - sequence.computed_tokens == 1


def _left(sequence: Sequence) -> int:
    """Tokens that it can still have."""
    return sequence.max_total_tokens - sequence.total_tokens


def _repeats(state: SchedulerState, ready: list[Sequence], repeats: int) -> int:
    """How often a step can be repeated, at most `repeats` times, so that it keeps nobody from beginning or running."""
    if repeats == 1 or not all(map(_is_decode, ready)) or _next_to_begin(state) is not None:
        return 1
    repeats = min(repeats, max(map(_left, ready), default=1))
    tokens = ((sequence, sequence.computed_tokens + min(repeats, _left(sequence))) for sequence in ready)
    pages = sum(-(-count // state.page_tokens) - len(sequence.pages) for sequence, count in tokens)
    return repeats if pages <= state.pool.available else 1


def _advance_prompt(sequence: Sequence, tokens: int) -> Row:
    return _advance(sequence, tokens, samples=int(sequence.computed_tokens + tokens == sequence.total_tokens))


def _advance(sequence: Sequence, tokens: int, *, samples: int) -> Row:
    start = sequence.computed_tokens
    sequence.computed_tokens = start + tokens
    sequence.in_flight += samples
    assert sequence.slot is not None
    return Row(sequence, sequence.slot, start, tokens, samples, sequence.adapter_slot)


def _make_room(state: SchedulerState, sequence: Sequence, tokens: int, preempted: list[Sequence]) -> bool:
    """Takes pages for the next tokens, from the last of the running if need be; says if it was not itself that one."""
    pages = -(-(sequence.computed_tokens + tokens) // state.page_tokens)
    while pages - len(sequence.pages) > state.pool.available:
        last = state.running[-1]
        _preempt(state, last)
        state.preemptions += 1
        preempted.append(last)
        if last is sequence:
            return False
    while len(sequence.pages) < pages:
        page = state.pool.take()
        state.block_tables[sequence.slot, len(sequence.pages)] = page
        sequence.pages.append(page)
    return True


def _preempt(state: SchedulerState, sequence: Sequence) -> None:
    _release(state, sequence)
    sequence.preemptions += 1
    insort(state.waiting, sequence, key=_order)


def _release(state: SchedulerState, sequence: Sequence) -> None:
    """Takes slot and pages of a running sequence away."""
    assert sequence.slot is not None
    state.running.remove(sequence)
    state.free_slots.append(sequence.slot)
    state.pool.release(sequence.pages)
    if sequence.adapter is not None:
        state.adapters.release(sequence.adapter)
    sequence.slot, sequence.adapter_slot = None, -1
    sequence.pages = []
    sequence.computed_tokens = 0


def _admit(state: SchedulerState) -> Sequence | None:
    """Gives a slot to the first that waits, and the kept pages that it begins with, if it can begin."""
    found = _next_to_begin(state)
    if found is None:
        return None
    sequence, pages = found
    state.waiting.remove(sequence)
    insort(state.running, sequence, key=_order)
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
    """The first that waits, and the kept pages that it begins with, if it can begin.

    It can if its adapter has a slot or can have one, and if there is room for all of its tokens and the next, and for
    one more page for each that runs, lest it be preempted at once. Those that run have pages for all of their tokens
    but the next, or nothing is left of the step.
    """
    if not state.free_slots:
        return None
    sequence = next((sequence for sequence in state.waiting if not _waits_for_leader(state, sequence)), None)
    if sequence is None or sequence.in_flight or not state.adapters.can_hold(sequence.adapter):
        return None
    pages = _find_prefix(state, sequence)
    needed = sequence.total_tokens // state.page_tokens + 1 - len(pages) + state.pool.kept_among(pages)
    return (sequence, pages) if needed + len(state.running) <= state.pool.available else None


def _waits_for_leader(state: SchedulerState, sequence: Sequence) -> bool:
    leader = sequence.leader
    if leader is None or leader.prompt_planned or leader.ended:
        return False
    return state.prefix_caching and sequence.cacheable and sequence.prompt_tokens > state.page_tokens


def _find_prefix(state: SchedulerState, sequence: Sequence) -> list[int]:
    """The kept pages that a sequence begins with; never all of its tokens, the last of which has to be computed."""
    if not (state.prefix_caching and sequence.cacheable):
        return []
    pages = (len(sequence.tokens) - 1) // state.page_tokens
    _extend_digests(state, sequence, pages)
    return state.pool.find(sequence.digests)


def _extend_digests(state: SchedulerState, sequence: Sequence, pages: int) -> None:
    digests, tokens = sequence.digests, sequence.tokens
    extend_digests(digests, tokens, page_tokens=state.page_tokens, pages=pages, adapter=sequence.adapter)


def _count_prompt(state: SchedulerState, sequence: Sequence) -> None:
    sequence.cached_tokens = sequence.computed_tokens
    state.prompt_tokens += sequence.prompt_tokens
    if state.prefix_caching and sequence.cacheable:
        state.prefix_queries_tokens += sequence.prompt_tokens
        state.prefix_hits_tokens += sequence.cached_tokens


def _register(state: SchedulerState, sequence: Sequence) -> None:
    """Lets others find those of its pages that are full of known tokens, once planned steps compute them."""
    sequence.prompt_planned |= sequence.computed_tokens >= sequence.prompt_tokens
    pages = min(len(sequence.tokens), sequence.computed_tokens) // state.page_tokens
    if pages <= sequence.registered_pages or not state.prefix_caching:
        return
    if sequence.weights_version != state.weights_version:
        return
    _extend_digests(state, sequence, pages)
    for page in range(sequence.registered_pages, pages):
        state.pool.register(sequence.pages[page], sequence.digests[page])
    sequence.registered_pages = pages
