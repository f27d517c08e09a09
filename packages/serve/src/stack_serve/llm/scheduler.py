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

from bisect import insort
from collections.abc import Iterable, Mapping

from stack_serve.llm.admission import Room, admit, digest_pages, next_to_begin, order
from stack_serve.llm.scheduler_state import Plan, Row, SchedulerState
from stack_serve.llm.sequence import Sequence

__all__ = ["PRIORITY_ARRIVALS", "finish", "forget_prefixes", "recompute", "record", "reject", "schedule"]

PRIORITY_ARRIVALS = 64
"""Number of earlier arrivals that a sequence can overtake per level of priority."""


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
        insort(state.waiting, sequence, key=order)
    ready = [sequence for sequence in state.running if sequence.total_tokens < sequence.max_total_tokens]
    drafts = _fitting_drafts(state, ready, drafts) if drafts else {}
    repeats = 1 if drafts else _repeats(state, ready, repeats)
    decodes, chunks, preempted, admitted = list[Row](), list[Row](), list[Sequence](), list[Sequence]()
    # Decoding sequences come first; prompts get the rest of the step. Decoding sequences compute no tokens of images,
    # because the last token of a prompt is text.
    room = Room(state.step_tokens - sum(_is_decode(sequence) for sequence in ready), state.image_rows)
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
    while not preempted and room.tokens and (sequence := admit(state, room)) is not None:
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


def _is_decode(sequence: Sequence) -> bool:
    return sequence.total_tokens - sequence.computed_tokens == 1


def _left(sequence: Sequence) -> int:
    """Returns the number of tokens that the sequence can still generate."""
    return sequence.max_total_tokens - sequence.total_tokens


def _repeats(state: SchedulerState, ready: list[Sequence], repeats: int) -> int:
    """Limits the repeats of a step.

    It is repeated only if no sequence is constrained, no sequence can start, and the pages suffice for all.
    """
    if repeats == 1 or not all(map(_is_decode, ready)) or next_to_begin(state) is not None:
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
    if not all(map(_is_decode, ready)) or next_to_begin(state) is not None:
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
    insort(state.waiting, sequence, key=order)


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
    digest_pages(state, sequence, pages)
    for page in range(sequence.registered_pages, pages):
        state.pool.register(sequence.pages[page], sequence.digests[page])
    sequence.registered_pages = pages
