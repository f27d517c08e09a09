import random

import pytest

from stack_core.abi.generation import PromptImage
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.images import images_of_rows
from stack_serve.llm.scheduler import PRIORITY_ARRIVALS, finish, forget_prefixes, recompute, record, reject, schedule
from stack_serve.llm.scheduler_state import SchedulerState
from stack_serve.llm.sequence import Sequence


def state_of(*, pages=64, max_tokens=64, image_rows=0, **fields):
    config = {"max_sequences": 4, "step_tokens": 16, "page_tokens": 4, "priorities": 9, **fields}
    return SchedulerState.of(EngineConfig(**config), max_tokens=max_tokens, pages=pages, image_rows=image_rows)


def sequence_of(arrival, prompt, *, new=4, index=0, priority=0, **fields):
    tokens = list(prompt) if not isinstance(prompt, int) else [100 * arrival + place for place in range(prompt)]
    return Sequence(
        id=arrival,
        request_id=str(arrival),
        index=index,
        tokens=tokens,
        prompt_tokens=len(tokens),
        max_total_tokens=len(tokens) + new,
        priority=priority,
        arrival=arrival,
        **fields,
    )


def planned(plan):
    """(arrival, start, tokens, samples) of each row."""
    return [(row.sequence.arrival, row.start, row.tokens, row.samples) for row in plan.rows]


def step(state, *arrivals, token=7, repeats=1):
    """Plans a step and makes its tokens known at once, ending what has all of its own."""
    plan = schedule(state, arrivals, repeats=repeats)
    for row in plan.rows:
        for _ in range(row.samples):
            record(state, row.sequence, token)
            if len(row.sequence.tokens) == row.sequence.max_total_tokens:
                finish(state, row.sequence)
    return plan


def step_until_preemption(state):
    return next(plan for plan in (step(state) for _ in range(30)) if plan.preempted)


def arrivals_of(sequences):
    return [sequence.arrival for sequence in sequences]


def test_a_prompt_then_a_token_a_step():
    state, sequence = state_of(), sequence_of(0, 6, new=3)
    assert planned(step(state, sequence)) == [(0, 0, 6, True)]
    assert planned(step(state)) == [(0, 6, 1, True)]
    assert planned(step(state)) == [(0, 7, 1, True)]
    assert sequence.ended
    assert planned(step(state)) == []
    assert (state.running, state.waiting, state.pool.available) == ([], [], 64)


def test_steps_are_planned_ahead_of_their_tokens():
    state, sequence = state_of(), sequence_of(0, 2, new=3)
    plans = [planned(schedule(state, [sequence])), *(planned(schedule(state, [])) for _ in range(4))]
    assert plans == [[(0, 0, 2, True)], [(0, 2, 1, True)], [(0, 3, 1, True)], [], []]
    assert (sequence.in_flight, sequence.tokens) == (3, [0, 1])
    record(state, sequence, 7)
    assert (sequence.in_flight, sequence.tokens) == (2, [0, 1, 7])


def test_a_step_of_single_tokens_is_repeated_up_to_the_last_of_each():
    state, short, long = state_of(), sequence_of(0, 6, new=3), sequence_of(1, 6, new=6)
    assert step(state, short, long, repeats=4).repeats == 1
    plan = step(state, repeats=4)
    assert (plan.repeats, planned(plan)) == (4, [(0, 6, 2, 2), (1, 6, 4, 4)])
    assert short.ended
    plan = step(state, repeats=4)
    assert (plan.repeats, planned(plan)) == (1, [(1, 10, 1, 1)])
    assert long.ended and (state.pool.available, state.generated_tokens) == (64, 9)


def test_a_step_with_a_constrained_sequence_is_not_repeated_until_it_ends():
    state, plain, constrained = state_of(), sequence_of(0, 6, new=9), sequence_of(1, 6, new=2, is_constrained=True)
    step(state, plain, constrained)
    plan = step(state, repeats=4)
    assert (plan.repeats, planned(plan)) == (1, [(0, 6, 1, 1), (1, 6, 1, 1)])
    assert constrained.ended and step(state, repeats=4).repeats == 4


def test_a_step_is_repeated_while_one_waits_that_could_not_begin_for_want_of_a_slot_or_of_pages():
    for full in ({"max_sequences": 1}, {"pages": 5}):
        state = state_of(**full)
        step(state, sequence_of(0, 6, new=9), repeats=4)
        plan = step(state, sequence_of(1, 14, new=1), repeats=4)
        assert (plan.repeats, planned(plan), arrivals_of(state.waiting)) == (4, [(0, 6, 4, 4)], [1])
        step(state, repeats=4)
        assert step(state, repeats=4).admitted[0].arrival == 1


def test_a_step_is_not_repeated_where_one_can_begin_or_the_cache_has_no_room():
    state = state_of(step_tokens=4)
    step(state, sequence_of(0, 3, new=9), repeats=4)
    plan = step(state, sequence_of(1, 6), repeats=4)
    assert (plan.repeats, arrivals_of(plan.admitted)) == (1, [1])
    state = state_of(pages=3)
    step(state, sequence_of(0, 4, new=9), repeats=8)
    others = state.pool.take()
    assert planned(step(state, repeats=8)) == [(0, 4, 1, 1)]
    state.pool.release([others])
    assert planned(step(state, repeats=8)) == [(0, 5, 7, 7)]


def test_a_long_prompt_is_cut_into_chunks_and_samples_after_the_last():
    state = state_of()
    assert planned(step(state, sequence_of(0, 40))) == [(0, 0, 16, False)]
    assert planned(step(state)) == [(0, 16, 16, False)]
    assert planned(step(state)) == [(0, 32, 8, True)]


def test_chunks_take_what_decoding_leaves_and_come_behind_it():
    state = state_of()
    step(state, sequence_of(0, 3), sequence_of(1, 3))
    assert planned(step(state, sequence_of(2, 30, priority=-1))) == [
        (0, 3, 1, True),
        (1, 3, 1, True),
        (2, 0, 14, False),
    ]
    assert planned(step(state)) == [(0, 4, 1, True), (1, 4, 1, True), (2, 14, 14, False)]


def test_what_a_prompt_leaves_of_a_step_is_the_next_ones():
    state = state_of()
    plan = step(state, sequence_of(0, 10), sequence_of(1, 10), sequence_of(2, 10))
    assert planned(plan) == [(0, 0, 10, True), (1, 0, 6, False)]
    assert arrivals_of(plan.admitted) == [0, 1]
    assert planned(step(state)) == [(0, 10, 1, True), (1, 6, 4, True), (2, 0, 10, True)]


def test_no_more_run_than_there_are_slots():
    state = state_of(max_sequences=2)
    plan = step(state, *(sequence_of(arrival, 2, new=2) for arrival in range(3)))
    assert sorted(row.slot for row in plan.rows) == [0, 1]
    assert arrivals_of(step(state).admitted) == []
    assert arrivals_of(step(state).admitted) == [2]


def test_the_lower_priority_goes_first_and_equals_as_they_came():
    state = state_of(max_sequences=1)
    given = [(0, 1), (1, 0), (2, -1), (3, 0)]
    plans = [step(state, *(sequence_of(n, 2, new=1, priority=p) for n, p in given)), *(step(state) for _ in range(3))]
    assert [arrivals_of(plan.admitted) for plan in plans] == [[2], [1], [3], [0]]


def test_priorities_are_bounded_and_each_level_is_worth_so_many_arrivals():
    for given, later, first in [(-1, PRIORITY_ARRIVALS - 1, 1), (-1, PRIORITY_ARRIVALS, 0), (-(10**9), 9 * 64 + 1, 0)]:
        state = state_of(max_sequences=1)
        early, late = sequence_of(0, 2, new=1), sequence_of(later, 2, new=1, priority=given)
        (begun,) = step(state, early, late).admitted
        assert begun is (early, late)[first]
    state = state_of(max_sequences=1, priorities=0)
    assert arrivals_of(step(state, sequence_of(0, 2), sequence_of(1, 2, priority=-5)).admitted) == [0]


def test_who_runs_is_not_preempted_by_who_waits():
    state = state_of(pages=4)
    step(state, sequence_of(0, 10, priority=9))
    plan = step(state, sequence_of(1, 6, priority=0))
    assert (arrivals_of(plan.admitted), plan.preempted) == ([], ())
    assert planned(plan) == [(0, 10, 1, True)]


def test_a_small_one_does_not_overtake_a_large_one_that_waits_for_pages():
    state = state_of(pages=8)
    step(state, sequence_of(0, 15))
    plan = step(state, sequence_of(1, 20), sequence_of(2, 1))
    assert plan.admitted == ()


def test_one_begins_only_with_room_for_its_tokens_and_the_growth_of_all():
    # The one that runs holds 2 pages and may grow by one.
    for prompt, begins in [(11, True), (12, False)]:
        state = state_of(pages=6)
        step(state, sequence_of(0, 6))
        assert bool(step(state, sequence_of(1, prompt)).admitted) == begins


def test_alone_a_sequence_may_fill_the_cache():
    state, sequence = state_of(pages=3), sequence_of(0, 11, new=1)
    assert planned(step(state, sequence)) == [(0, 0, 11, True)]
    assert sequence.ended


def test_when_pages_run_out_the_last_is_preempted_and_begins_again_with_all_of_its_tokens():
    state = state_of(pages=4, prefix_caching=False)
    first, second = sequence_of(0, 3, new=9), sequence_of(1, 3, new=9)
    step(state, first, second)
    plan = step_until_preemption(state)
    assert plan.preempted == (second,)
    assert planned(plan) == [(0, 8, 1, True)]
    assert (second.slot, second.pages, second.computed_tokens, second.preemptions) == (None, [], 0, 1)
    plans = [step(state) for _ in range(4)]
    assert first.ended
    assert [row for plan in plans for row in planned(plan) if row[0] == 1] == [(1, 0, 9, True), (1, 9, 1, True)]
    assert state.stats(compilations=0).preemptions == 1


def test_a_sequence_that_was_preempted_waits_for_its_tokens():
    state = state_of(pages=4, max_sequences=2)
    first, second = sequence_of(0, 4, new=5), sequence_of(1, 7, new=5)
    schedule(state, [first, second])
    plan = next(plan for plan in (schedule(state, []) for _ in range(30)) if plan.preempted)
    assert plan.preempted == (second,)
    assert second.in_flight == 2
    finish(state, first)
    assert schedule(state, []).admitted == ()
    record(state, second, 7)
    assert schedule(state, []).admitted == ()
    record(state, second, 8)
    assert planned(schedule(state, [])) == [(1, 4, 5, True)]
    assert second.tokens[7:] == [7, 8]


def test_one_that_was_preempted_comes_before_later_ones_of_its_priority():
    state = state_of(pages=4, max_sequences=2, prefix_caching=False)
    first, second, third = sequence_of(0, 3, new=9), sequence_of(1, 3, new=9), sequence_of(2, 1)
    step(state, first, second)
    step_until_preemption(state)
    assert step(state, third).admitted == ()
    assert arrivals_of(state.waiting) == [1, 2]


def test_of_those_that_run_the_first_by_priority_keeps_its_pages():
    state = state_of(pages=4, prefix_caching=False)
    step(state, sequence_of(0, 3, new=9, priority=1), sequence_of(1, 3, new=9, priority=0))
    assert arrivals_of(step_until_preemption(state).preempted) == [0]


def test_a_prompt_that_was_kept_is_not_computed_again():
    state = state_of()
    step(state, sequence_of(0, range(10), new=1))
    second = sequence_of(1, [*range(9), 99, 98])
    assert planned(step(state, second)) == [(1, 8, 3, True)]
    assert second.cached_tokens == 8
    stats = state.stats(compilations=0)
    assert (stats.prompt_tokens, stats.prefix_queries_tokens, stats.prefix_hits_tokens) == (21, 21, 8)


def test_the_last_token_of_a_prompt_is_computed_even_if_all_of_it_is_kept():
    state = state_of()
    step(state, sequence_of(0, range(8), new=1))
    assert planned(step(state, sequence_of(1, range(8), new=1))) == [(1, 4, 4, True)]
    assert planned(step(state, sequence_of(2, range(9), new=1))) == [(2, 8, 1, True)]


def test_a_prompt_may_begin_with_what_another_generated():
    state = state_of()
    step(state, sequence_of(0, range(6), new=4), token=50)
    for token in (51, 52, 53):
        step(state, token=token)
    assert planned(step(state, sequence_of(1, [*range(6), 50, 51, 52, 53]))) == [(1, 8, 2, True)]


def test_tokens_that_only_the_devices_know_are_not_shared():
    state = state_of(page_tokens=2)
    first = sequence_of(0, range(3), new=8)
    for arrivals in ([first], [], [], []):
        schedule(state, arrivals)
    assert (first.computed_tokens, first.in_flight) == (6, 4)
    assert planned(schedule(state, [sequence_of(1, [0, 1, 2, 50, 51, 52, 9])]))[-1] == (1, 2, 5, True)


def test_tokens_are_shared_when_they_become_known_even_if_they_are_the_last():
    state = state_of(page_tokens=2)
    first = sequence_of(0, range(3), new=4)
    for arrivals in ([first], [], [], []):
        schedule(state, arrivals)
    for token in (50, 51, 52, 53):
        record(state, first, token)
    finish(state, first)
    assert planned(schedule(state, [sequence_of(1, [0, 1, 2, 50, 51, 52, 53])])) == [(1, 6, 1, True)]


def test_pages_of_a_prompt_are_shared_once_an_earlier_step_computed_them():
    state = state_of(step_tokens=8)
    step(state, sequence_of(0, range(20)))
    plans = [step(state, sequence_of(1, range(20), priority=-1)), step(state)]
    assert [planned(plan) for plan in plans] == [[(0, 8, 8, False)], [(0, 16, 4, True), (1, 16, 4, True)]]


def test_rows_of_one_step_do_not_share_so_the_second_waits_for_the_next_one():
    state = state_of()
    assert planned(step(state, sequence_of(0, range(8)), sequence_of(1, range(8)))) == [(0, 0, 8, True)]
    assert planned(step(state)) == [(0, 8, 1, True), (1, 4, 4, True)]


def test_pages_held_by_several_are_freed_by_the_last():
    state = state_of(pages=16)
    first, second = sequence_of(0, range(9), new=8), sequence_of(1, range(9), new=8)
    step(state, first)
    step(state, second)
    assert first.pages[:2] == second.pages[:2]
    assert first.pages[2] != second.pages[2]
    assert state.stats(compilations=0).used_pages == 4
    finish(state, first)
    assert state.stats(compilations=0).used_pages == 3
    finish(state, second)
    assert state.stats(compilations=0).used_pages == 0


@pytest.mark.parametrize("fields", [{"cacheable": False}, {}])
def test_a_prompt_of_which_every_token_matters_is_computed_whole_but_kept_for_others(fields):
    state = state_of(prefix_caching=True)
    step(state, sequence_of(0, range(9), new=1, **fields))
    assert planned(step(state, sequence_of(1, range(9), new=1, cacheable=False))) == [(1, 0, 9, True)]
    assert state.prefix_hits_tokens == 0
    assert planned(step(state, sequence_of(2, range(9), new=1))) == [(2, 8, 1, True)]


def test_without_prefix_caching_nothing_is_kept():
    state, first = state_of(prefix_caching=False), sequence_of(0, range(9), new=1)
    step(state, first)
    assert first.digests == []
    assert planned(step(state, sequence_of(1, range(9), new=1))) == [(1, 0, 9, True)]
    assert state.prefix_queries_tokens == 0


def test_a_preempted_sequence_finds_its_own_pages_and_does_not_count_them_as_cached():
    state = state_of(pages=4)
    first, second = sequence_of(0, 3, new=9), sequence_of(1, 5, new=9)
    step(state, first, second)
    step_until_preemption(state)
    finish(state, first)
    assert planned(step(state))[0][:2] == (1, 8)
    assert second.cached_tokens == 0
    assert (state.prompt_tokens, state.prefix_queries_tokens, state.prefix_hits_tokens) == (8, 8, 0)


def test_continuations_share_the_prompt_that_the_first_computes():
    state = state_of()
    leader = sequence_of(0, range(20), new=8)
    others = [sequence_of(n, range(20), new=8, index=n, leader=leader) for n in (1, 2)]
    assert planned(step(state, leader, *others)) == [(0, 0, 16, False)]
    assert planned(step(state)) == [(0, 16, 4, True)]
    assert planned(step(state)) == [(0, 20, 1, True), (1, 16, 4, True), (2, 16, 4, True)]
    assert others[0].pages[:4] == others[1].pages[:4] == leader.pages[:4]


def test_requests_that_arrive_together_share_the_prompt_that_the_first_computes():
    """As the samples of a group do, which are requests of their own."""
    state = state_of(step_tokens=64, max_sequences=8)
    group = [sequence_of(n, range(18), new=8) for n in range(4)]
    other = sequence_of(4, 18)
    assert planned(step(state, *group, other)) == [(0, 0, 18, True), (4, 0, 18, True)]
    computed = step(state)
    assert planned(computed) == [(0, 18, 1, True), (4, 18, 1, True), *((n, 16, 2, True) for n in (1, 2, 3))]
    assert len({tuple(each.pages[:4]) for each in group}) == 1
    assert state.stats(compilations=0).prefix_hits_tokens == 3 * 16


@pytest.mark.parametrize("ends", [False, True])
def test_requests_wait_only_for_pages_that_are_coming(ends):
    state = state_of(step_tokens=8)
    first, second = sequence_of(0, range(20)), sequence_of(1, range(20))
    step(state, first, second)
    assert arrivals_of(state.waiting) == [1]
    if ends:
        finish(state, first)
        assert planned(step(state)) == [(1, 8, 8, False)]
    else:
        forget_prefixes(state)  # its pages have keys of old weights
        step(state)
        assert planned(step(state)) == [(0, 16, 4, True), (1, 0, 4, False)]


def test_while_continuations_wait_for_the_first_others_go_on():
    state = state_of()
    leader = sequence_of(0, range(18))
    step(state, leader, sequence_of(1, range(18), leader=leader), sequence_of(2, 30))
    plan = step(state)
    assert planned(plan) == [(0, 16, 2, True), (2, 0, 14, False)]
    assert arrivals_of(state.waiting) == [1]


@pytest.mark.parametrize(
    ("prompt", "fields", "caching"), [(4, {}, True), (9, {"cacheable": False}, True), (9, {}, False)]
)
def test_continuations_that_have_nothing_to_share_do_not_wait(prompt, fields, caching):
    state = state_of(prefix_caching=caching, step_tokens=32)
    leader = sequence_of(0, range(prompt))
    plan = step(state, leader, sequence_of(1, range(prompt), leader=leader, **fields))
    assert planned(plan) == [(0, 0, prompt, True), (1, 0, prompt, True)]


def test_a_first_continuation_that_is_preempted_is_not_waited_for_again():
    state = state_of(pages=4, step_tokens=4, max_sequences=2)
    first, leader = sequence_of(0, 3, new=9), sequence_of(1, 5, new=9)
    step(state, first, leader)
    step_until_preemption(state)
    forget_prefixes(state)
    finish(state, first)
    assert planned(step(state)) == [(1, 0, 4, False)]
    assert leader.prompt_planned


def test_continuations_go_on_if_the_first_ends_early():
    state = state_of(step_tokens=8)
    leader = sequence_of(0, range(20))
    other = sequence_of(1, range(20), leader=leader)
    step(state, leader, other)
    finish(state, leader)
    assert planned(step(state)) == [(1, 8, 8, False)]


def test_a_sequence_that_ended_gives_all_back_and_its_late_tokens_are_dropped():
    state = state_of()
    sequence = sequence_of(0, 6, new=9)
    schedule(state, [sequence])
    schedule(state, [])
    record(state, sequence, 7)
    finish(state, sequence)
    finish(state, sequence)
    record(state, sequence, 8)
    assert (sequence.tokens[6:], sequence.in_flight) == ([7], 0)
    assert (state.pool.available, sorted(state.free_slots), state.running) == (64, [0, 1, 2, 3], [])
    assert state.stats(compilations=0).generated_tokens == 1


def test_a_sequence_that_waits_can_end():
    state = state_of(max_sequences=1)
    second = sequence_of(1, 6)
    step(state, sequence_of(0, 6), second)
    assert state.stats(compilations=0).waiting == 1
    finish(state, second)
    assert (state.waiting, second.ended) == ([], True)


def test_after_new_weights_nothing_of_the_old_is_found():
    state = state_of()
    running = sequence_of(0, range(9), new=9)
    step(state, running)
    step(state, sequence_of(1, range(50, 59), new=1))
    forget_prefixes(state)
    assert planned(step(state, sequence_of(2, range(50, 59), new=1)))[-1] == (2, 0, 9, True)
    for _ in range(9):
        step(state)
    assert running.ended
    # Its later pages depend on the old weights as well, though others may have the first ones anew.
    assert planned(step(state, sequence_of(3, range(9), new=1))) == [(3, 0, 9, True)]
    assert planned(step(state, sequence_of(4, running.tokens, new=1))) == [(4, 8, 10, True)]


def test_a_sequence_preempted_over_new_weights_may_be_shared_again():
    state = state_of(pages=4)
    first, second = sequence_of(0, 3, new=9), sequence_of(1, range(5), new=9)
    step(state, first, second)
    forget_prefixes(state)
    step_until_preemption(state)
    finish(state, first)
    assert planned(step(state)) == [(1, 0, len(second.tokens) - 1, True)]
    finish(state, second)
    assert planned(step(state, sequence_of(2, second.tokens, new=1)))[0][:2] == (2, 8)


def test_the_block_table_of_a_slot_has_its_pages():
    state = state_of()
    step(state, sequence_of(0, range(9), new=9))
    step(state, sequence_of(1, range(9), new=9))
    for _ in range(5):
        for row in step(state).rows:
            pages = row.sequence.pages
            assert len(pages) == -(-row.sequence.computed_tokens // 4)
            assert state.block_tables[row.slot, : len(pages)].tolist() == pages


def test_the_block_tables_have_room_for_the_longest_sequence():
    assert state_of(max_tokens=13, max_sequences=3).block_tables.shape == (3, 4)


def test_stats_count_what_was_done():
    state = state_of(max_sequences=1)
    for _ in range(2):
        step(state, *([] if state.waiting or state.running else [sequence_of(0, 6), sequence_of(1, 5)]))
    stats = state.stats(compilations=3)
    assert (stats.running, stats.waiting, stats.used_pages, stats.pages) == (1, 1, 2, 64)
    assert (stats.steps, stats.prompt_tokens, stats.generated_tokens, stats.compilations) == (2, 6, 2, 3)
    assert state_of().stats(compilations=0).steps == 0


def test_a_plan_of_nothing_is_no_step():
    state = state_of()
    assert schedule(state, []).rows == ()
    assert state.steps == 0


def test_who_waits_for_an_adapters_slot_begins_when_one_is_free():
    state = state_of(max_adapters=1)
    first, other = sequence_of(0, 3, new=2, adapter=5), sequence_of(1, 3, new=2, adapter=6)
    behind, same = sequence_of(2, 3, new=2), sequence_of(3, 3, new=2, adapter=5)
    plan = step(state, first, same, other, behind)
    assert arrivals_of(plan.admitted) == [0] and plan.loading == (first,)
    assert [(row.sequence.arrival, row.adapter) for row in plan.rows] == [(0, 0)]
    assert step(state).loading == () and first.ended
    plan = step(state)
    assert arrivals_of(plan.admitted) == [1, 2] and plan.loading == (other,)
    assert [row.adapter for row in plan.rows] == [0, -1]
    while not same.ended:
        plan = step(state)
    assert (state.running, state.waiting) == ([], [])


def test_pages_are_shared_only_where_the_adapter_is_the_same():
    state, prompt = state_of(max_adapters=4), list(range(9))
    for arrival, adapter in enumerate((None, 1, 2)):
        sequence = sequence_of(arrival, prompt, new=1, adapter=adapter)
        step(state, sequence)
        assert sequence.cached_tokens == 0
    for arrival, adapter in enumerate((None, 1, 2)):
        sequence = sequence_of(3 + arrival, prompt, new=1, adapter=adapter)
        step(state, sequence)
        assert sequence.cached_tokens == 8


def verify(state, drafts, *, accepted=0, token=7):
    """Plans a step with drafts and makes its tokens known: the accepted drafts of each row, then one more."""
    plan = schedule(state, [], drafts=drafts)
    for row, drafted in zip(plan.rows, plan.drafts, strict=True):
        reject(state, row, accepted=min(accepted, len(drafted)))
        for each in (*drafted[:accepted], token):
            record(state, row.sequence, each)
    return plan


def test_a_step_computes_the_drafts_and_keeps_the_accepted_ones():
    state, sequence = state_of(), sequence_of(0, 6, new=12)
    step(state, sequence)
    plan = verify(state, {0: (1, 2, 3, 4)}, accepted=2)
    assert planned(plan) == [(0, 6, 5, 5)] and plan.drafts == ((1, 2, 3, 4),)
    assert (sequence.tokens[6:], sequence.computed_tokens, sequence.in_flight) == ([7, 1, 2, 7], 9, 0)
    assert len(sequence.pages) == 3
    assert planned(step(state)) == [(0, 9, 1, 1)]
    assert (state.drafts, state.drafted_tokens, state.accepted_tokens, state.generated_tokens) == (1, 4, 2, 5)


def test_pages_of_rejected_drafts_are_free_again():
    state, sequence = state_of(pages=16), sequence_of(0, 6, new=12)
    step(state, sequence)
    plan = schedule(state, [], drafts={0: tuple(range(8))})
    assert len(sequence.pages) == 4 and state.pool.available == 12
    reject(state, plan.rows[0], accepted=0)
    assert len(sequence.pages) == 2 and state.pool.available == 14


def test_drafts_are_cut_to_what_a_sequence_may_generate():
    state, sequence = state_of(), sequence_of(0, 6, new=4)
    step(state, sequence)
    plan = verify(state, {0: (1, 2, 3, 4)}, accepted=4)
    assert plan.drafts == ((1, 2),)
    assert len(sequence.tokens) == sequence.max_total_tokens == 10
    state, sequence = state_of(), sequence_of(0, 6, new=2)
    step(state, sequence)
    plan = schedule(state, [], drafts={0: (1, 2)})
    assert (planned(plan), plan.drafts) == ([(0, 6, 1, 1)], ())


def test_drafts_are_cut_to_the_tokens_of_a_step():
    state = state_of(step_tokens=6)
    for arrival in range(2):
        step(state, sequence_of(arrival, 1, new=12))
    assert schedule(state, [], drafts={0: (1, 2, 3), 1: (4, 5, 6)}).drafts == ((1, 2, 3), (4,))


def test_drafts_take_no_pages_from_others():
    state = state_of(pages=6, max_tokens=16)
    first, second = sequence_of(0, 7, new=9), sequence_of(1, 7, new=9)
    step(state, first, second)
    assert state.pool.available == 2
    for token in (7, 7):  # each needs a third page now
        step(state, token=token)
    assert state.pool.available == 0
    plan = schedule(state, [], drafts={0: (1, 2, 3, 4, 5), 1: (1,)})
    assert plan.drafts == ((1, 2), (1,)) and not plan.preempted


def test_drafts_wait_while_prompts_are_computed_or_could_start():
    state, long = state_of(), sequence_of(1, 20, new=9)
    step(state, sequence_of(0, 6, new=12))
    assert schedule(state, [long], drafts={0: (1, 2)}).drafts == ()
    plan = schedule(state, [], drafts={0: (1, 2)})
    assert plan.drafts == () and [row.sequence.arrival for row in plan.rows] == [0, 1]


def test_drafts_of_a_preempted_or_ended_sequence_leave_nothing():
    for end in (finish, lambda state, _: recompute(state)):
        state, sequence = state_of(), sequence_of(0, 6, new=12)
        step(state, sequence)
        plan = schedule(state, [], drafts={0: (1, 2, 3)})
        end(state, sequence)
        reject(state, plan.rows[0], accepted=1)
        for token in (1, 7):
            record(state, sequence, token)
        assert (sequence.in_flight, sequence.computed_tokens, sequence.pages) == (0, 0, [])
        assert state.pool.available == 64


def image_of(name, start, tokens):
    return PromptImage(start, tokens, None, name.encode(), "axes", (1, tokens))


def test_images_that_do_not_fit_in_the_pool_together_wait_for_another_step():
    """Each image has more tokens than a step, so a step may compute the end of one and the beginning of another."""
    state = state_of(image_rows=20)
    arrivals = [sequence_of(number, 20, images=(image_of(f"{number}", 1, 18),)) for number in range(2)]
    arrivals += [sequence_of(2, 20, images=(image_of("2", 0, 18),)), sequence_of(3, 2)]
    assert planned(step(state, *arrivals)) == [(0, 0, 16, 0)]
    assert planned(step(state)) == [(0, 16, 4, 1), (1, 0, 1, 0)]  # the text before the second image
    assert planned(step(state)) == [(0, 20, 1, 1), (1, 1, 15, 0)]
    # The third begins with an image: it waits, and the text behind it does not overtake.
    assert planned(step(state)) == [(0, 21, 1, 1), (1, 16, 4, 1)]
    assert planned(step(state)) == [(0, 22, 1, 1), (1, 20, 1, 1), (2, 0, 14, 0)]


def test_an_image_takes_room_in_the_pool_once():
    state, images = state_of(image_rows=20), (image_of("a", 1, 3), image_of("b", 5, 12), image_of("a", 18, 3))
    first, second = (sequence_of(number, 22, images=images) for number in range(2))
    # Of two images of one prompt, and of equal images of two.
    assert planned(step(state, first, second)) == [(0, 0, 16, 0)]
    assert planned(step(state)) == [(0, 16, 6, 1), (1, 0, 10, 0)]
    state = state_of(image_rows=14)
    assert planned(step(state, sequence_of(2, 22, images=images))) == [(2, 0, 5, 0)]


def test_any_images_are_computed_within_the_pool():
    preempted = 0
    for seed in range(20):
        choose = random.Random(seed)

        def arrival(number, choose=choose):
            images, place = [], choose.randrange(3)
            while (tokens := choose.randrange(1, 24)) + place < 40:
                images.append(image_of(choose.choice("abcdefgh") + f"{tokens}", place, tokens))
                place += tokens + choose.randrange(1, 4)
            images = images[: choose.randrange(len(images) + 1)]
            return sequence_of(number, place + 1, new=choose.randrange(1, 20), images=tuple(images))

        # Few pages, so that sequences preempt one another.
        state = state_of(pages=16, image_rows=24, step_tokens=12)
        waiting = [arrival(number) for number in range(12)]
        for _ in range(1000):
            plan = step(state, *(waiting.pop(0) for _ in range(min(len(waiting), choose.randrange(3)))))
            preempted += len(plan.preempted)
            assert sum({each.digest: each.tokens for each in images_of_rows(plan.rows)}.values()) <= 24
            assert sum(row.tokens for row in plan.rows) <= 12
            if not (plan.rows or waiting or state.running or state.waiting):
                break
        else:
            pytest.fail("not all sequences ended")
    assert preempted
