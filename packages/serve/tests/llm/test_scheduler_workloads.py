"""Random workloads on devices that check what they are given: the scheduler's guarantees, whatever comes."""

import copy
import hashlib
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from stack_serve.llm.config import EngineConfig
from stack_serve.llm.scheduler import PRIORITY_ARRIVALS, finish, forget_prefixes, record, reject, schedule
from stack_serve.llm.scheduler_state import SchedulerState
from stack_serve.llm.sequence import Sequence


def next_token(tokens):
    """Stands for a model: depends on all tokens, and takes few values so that texts meet."""
    return hashlib.sha256(bytes(tokens)).digest()[0] % 3


def continued(prompt, new):
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(next_token(tokens))
    return tokens


@dataclass
class Devices:
    """Runs plans in order as a device does; a key is the tokens up to its own, and the version of its weights."""

    state: SchedulerState
    keys: dict = field(default_factory=dict)
    slots: dict = field(default_factory=dict)
    begun_with: dict = field(default_factory=dict)  # the version of the weights that each slot's sequence began with
    weights_version: int = 0

    def run(self, plan):
        """Returns (sequence, token) for each token that is sampled."""
        for sequence in plan.admitted:
            assert sequence.in_flight == sum(row.samples for row in plan.rows if row.sequence is sequence)
            self.slots[sequence.slot] = list(sequence.tokens)
            self.begun_with[sequence.slot] = self.weights_version
        if plan.repeats == 1:
            return self.run_once(plan.rows)
        return [sampled for turn in range(plan.repeats) for sampled in self.run_once(rows_of_turn(plan, turn))]

    def run_once(self, rows):
        tables = [self.state.block_tables[row.slot].tolist() for row in rows]
        for row, table in zip(rows, tables, strict=True):
            self.check_keys(row, table, 0, row.start)
        for row, table in zip(rows, tables, strict=True):
            self.compute(row, table)
        for row, table in zip(rows, tables, strict=True):
            self.check_keys(row, table, row.start, row.start + row.tokens)
        return [(row.sequence, self.sample(row)) for row in rows if row.samples]

    def run_drafts(self, plan):
        """Returns the tokens sampled after each position of each row."""
        for row, drafted in zip(plan.rows, plan.drafts, strict=True):
            assert len(self.slots[row.slot]) == row.start + 1 and row.samples == row.tokens == 1 + len(drafted)
            self.slots[row.slot] += drafted
        tables = [self.state.block_tables[row.slot].tolist() for row in plan.rows]
        for row, table in zip(plan.rows, tables, strict=True):
            self.check_keys(row, table, 0, row.start)
        for row, table in zip(plan.rows, tables, strict=True):
            self.compute(row, table)
        positions = [range(row.start, row.start + row.tokens) for row in plan.rows]
        return [
            [next_token(self.slots[row.slot][: position + 1]) for position in of_row]
            for row, of_row in zip(plan.rows, positions, strict=True)
        ]

    def place(self, table, position):
        page_tokens = self.state.page_tokens
        return table[position // page_tokens], position % page_tokens

    def compute(self, row, table):
        for position in range(row.start, row.start + row.tokens):
            page, place = self.place(table, position)
            assert self.state.pool.references(page) == 1
            self.keys[page, place] = (self.slots[row.slot][: position + 1], self.weights_version)

    def check_keys(self, row, table, begin, end):
        for position in range(begin, end):
            tokens, version = self.keys[self.place(table, position)]
            assert tokens == self.slots[row.slot][: position + 1]
            assert version >= self.begun_with[row.slot]

    def sample(self, row):
        tokens = self.slots[row.slot]
        assert len(tokens) == row.start + row.tokens
        tokens.append(next_token(tokens))
        return tokens[-1]


def rows_of_turn(plan, turn):
    return [row._replace(start=row.start + turn, tokens=1, samples=1) for row in plan.rows if turn < row.tokens]


@dataclass
class Before:
    """What was so before a plan."""

    available: int
    running: dict  # how many pages each held
    decoding: list
    waiting: list
    for_leader: list  # those of them whose leader has its prompt to compute

    @classmethod
    def of(cls, state, arrivals):
        waiting = [*state.waiting, *arrivals]
        unfinished = [s for s in state.running if s.total_tokens < s.max_total_tokens]
        return cls(
            state.pool.available,
            {s: len(s.pages) for s in state.running},
            [s for s in unfinished if s.total_tokens - s.computed_tokens == 1],
            waiting,
            [s for s in waiting if s.leader and not s.leader.prompt_planned and not s.leader.ended],
        )


def order(sequence):
    return sequence.turn, sequence.arrival


def check_rows(state, before, plan):
    assert len({row.sequence for row in plan.rows}) == len({row.slot for row in plan.rows}) == len(plan.rows)
    if plan.repeats == 1:
        assert sum(row.tokens for row in plan.rows) <= state.step_tokens
    else:
        assert plan.repeats == max(row.tokens for row in plan.rows)
        assert not plan.preempted and {row.sequence for row in plan.rows} == set(before.decoding)
    for row in plan.rows:
        assert row.tokens >= 1 and row.slot == row.sequence.slot
        assert row.start + row.tokens == row.sequence.computed_tokens
    decodes = [row.sequence in before.decoding for row in plan.rows]
    assert decodes == sorted(decodes, reverse=True)
    for sequence in before.decoding:
        (samples,) = {row.samples for row in plan.rows if row.sequence is sequence} or {None}
        left = sequence.max_total_tokens - sequence.total_tokens
        assert sequence in plan.preempted if samples is None else samples == min(plan.repeats, left + samples)


def check_who_runs(state, before, plan):
    for sequence in plan.preempted:
        assert sequence in before.running and sequence in state.waiting
        assert all(order(sequence) > order(row.sequence) for row in plan.rows)
    if plan.preempted:
        assert not plan.admitted
        assert sum(-(-s.total_tokens // state.page_tokens) - held for s, held in before.running.items()) > (
            before.available
        )
    for sequence in plan.admitted:
        assert any(row.sequence is sequence for row in plan.rows)
        for other in before.waiting:
            waits = other in before.for_leader or shares_a_page(state, other)
            assert other in plan.admitted or waits or order(other) > order(sequence)
    if not before.running and not any(sequence.in_flight for sequence in before.waiting):
        assert plan.admitted or not before.waiting


def shares_a_page(state, waiting):
    """Whether a running sequence begins with the same page, for which the waiting one may wait."""
    first = waiting.tokens[: state.page_tokens]
    may_share = state.prefix_caching and waiting.cacheable and len(waiting.tokens) > state.page_tokens
    return may_share and any(each.tokens[: state.page_tokens] == first for each in state.running)


def check_holdings(state):
    held = [page for sequence in state.running for page in sequence.pages]
    pages = range(state.pool.pages)
    assert [state.pool.references(page) for page in pages] == [held.count(page) for page in pages]
    assert state.pool.available == len(pages) - len(set(held))
    slots = [sequence.slot for sequence in state.running]
    assert sorted(slots + state.free_slots) == list(range(len(state.block_tables)))
    for sequence in [*state.running, *state.waiting]:
        assert sequence.computed_tokens <= sequence.total_tokens <= sequence.max_total_tokens
        assert len(sequence.pages) == -(-sequence.computed_tokens // state.page_tokens)
    for sequence in state.waiting:
        assert (sequence.slot, sequence.pages, sequence.computed_tokens) == (None, [], 0)


MAX_TOKENS = 22
REQUESTS = st.lists(
    st.fixed_dictionaries(
        {
            "at": st.integers(0, 6),
            "prompt": st.lists(st.integers(0, 2), min_size=1, max_size=10),
            "new": st.integers(1, 12),
            "n": st.integers(1, 3),
            "priority": st.sampled_from([0, 0, -1, 10**9]),
            "cacheable": st.booleans(),
            "aborted_at": st.none() | st.integers(0, 25),
        }
    ),
    min_size=3,
    max_size=8,
)
SIZES = st.fixed_dictionaries(
    {
        "spare_pages": st.integers(0, 6),
        "page_tokens": st.integers(1, 4),
        "max_sequences": st.integers(1, 5),
        "step_tokens": st.integers(5, 20),
        "prefix_caching": st.booleans(),
        "priorities": st.integers(0, 2),
    }
)


def sequences_of(requests):
    """(step of arrival, step of abortion, sequence) of each continuation."""
    found = []
    for request in sorted(requests, key=lambda request: request["at"]):
        leader = None
        for index in range(request["n"]):
            sequence = Sequence(
                id=len(found),
                request_id=f"{len(found) - index}",
                index=index,
                tokens=list(request["prompt"]),
                prompt_tokens=len(request["prompt"]),
                max_total_tokens=len(request["prompt"]) + request["new"],
                priority=request["priority"],
                arrival=len(found),
                cacheable=request["cacheable"] or index > 0,
                leader=leader,
            )
            leader = leader or sequence
            found.append((request["at"], request["aborted_at"], sequence))
    return found


@settings(max_examples=40)
@given(SIZES, REQUESTS, st.integers(0, 2), st.integers(1, 4), st.sets(st.integers(0, 30), max_size=2))
def test_every_workload_ends_with_the_tokens_that_each_has_alone(sizes, requests, ahead, repeats, new_weights_at):
    config = EngineConfig(**{name: size for name, size in sizes.items() if name != "spare_pages"})
    pages = -(-MAX_TOKENS // config.page_tokens) + sizes["spare_pages"]
    state = SchedulerState.of(config, max_tokens=MAX_TOKENS, pages=pages)
    devices, unread, begun = Devices(state), [], []
    everything = sequences_of(requests)
    for step_number in range(1000):
        arrivals = [sequence for at, _, sequence in everything if at == step_number]
        begun += arrivals
        if step_number in new_weights_at:
            forget_prefixes(state)
            devices.weights_version += 1
        before = Before.of(state, arrivals)
        unrepeated = copy.deepcopy((state, arrivals))
        plan = schedule(state, arrivals, repeats=repeats)
        assert plan.repeats == 1 or not schedule(*unrepeated).admitted
        check_rows(state, before, plan)
        check_who_runs(state, before, plan)
        check_holdings(state)
        unread.append(devices.run(plan))
        for sequence, token in unread.pop(0) if len(unread) > ahead else []:
            record(state, sequence, token)
            if len(sequence.tokens) == sequence.max_total_tokens:
                finish(state, sequence)
        for _, aborted_at, sequence in everything:
            if aborted_at == step_number and sequence in begun:
                finish(state, sequence)
        check_holdings(state)
        if len(begun) == len(everything) and all(sequence.ended for sequence in begun):
            break
    assert all(sequence.ended for _, _, sequence in everything)
    for _, aborted_at, sequence in everything:
        expected = continued(sequence.tokens[: sequence.prompt_tokens], 12)
        assert sequence.tokens == expected[: len(sequence.tokens)]
        assert aborted_at is not None or len(sequence.tokens) == sequence.max_total_tokens
    assert (state.running, state.waiting, state.pool.available) == ([], [], pages)


@settings(max_examples=40)
@given(SIZES, REQUESTS, st.randoms(use_true_random=False), st.sets(st.integers(0, 30), max_size=2))
def test_drafts_change_no_token_of_any_workload(sizes, requests, random, new_weights_at):
    config = EngineConfig(**{name: size for name, size in sizes.items() if name != "spare_pages"})
    pages = -(-MAX_TOKENS // config.page_tokens) + sizes["spare_pages"]
    state = SchedulerState.of(config, max_tokens=MAX_TOKENS, pages=pages)
    devices, begun = Devices(state), []
    everything = sequences_of(requests)
    for step_number in range(1000):
        arrivals = [sequence for at, _, sequence in everything if at == step_number]
        begun += arrivals
        if step_number in new_weights_at:
            forget_prefixes(state)
            devices.weights_version += 1
        without = schedule(*copy.deepcopy((state, arrivals)))
        plan = schedule(state, arrivals, drafts={s.id: draft_of(s, random) for s in state.running})
        assert len(plan.preempted) == len(without.preempted) and len(plan.rows) == len(without.rows)
        assert sum(row.tokens for row in plan.rows) <= state.step_tokens
        check_holdings(state)
        sampled = devices.run_drafts(plan) if plan.drafts else devices.run(plan)
        aborted = [s for _, at, s in everything if at == step_number and s in begun]
        for sequence in aborted:  # before its tokens are read
            finish(state, sequence)
        (read_drafts if plan.drafts else read)(state, devices, plan, sampled)
        for sequence in begun:
            if len(sequence.tokens) == sequence.max_total_tokens:
                finish(state, sequence)
        check_holdings(state)
        if len(begun) == len(everything) and all(sequence.ended for sequence in begun):
            break
    for _, aborted_at, sequence in everything:
        assert sequence.ended
        expected = continued(sequence.tokens[: sequence.prompt_tokens], 12)
        assert sequence.tokens == expected[: len(sequence.tokens)]
        assert aborted_at is not None or len(sequence.tokens) == sequence.max_total_tokens
    assert (state.running, state.waiting, state.pool.available) == ([], [], pages)
    assert state.accepted_tokens <= state.drafted_tokens


def draft_of(sequence, random):
    """Tokens that will be accepted, then others that may be; none at times."""
    right = continued(sequence.tokens, random.randrange(4))[len(sequence.tokens) :]
    return (*right, *random.choices(range(3), k=3)) if random.random() < 0.7 else ()


def read(state, devices, plan, sampled):
    for sequence, token in sampled:
        record(state, sequence, token)


def read_drafts(state, devices, plan, sampled):
    assert plan.repeats == 1 and not plan.admitted
    for row, drafted, tokens in zip(plan.rows, plan.drafts, sampled, strict=True):
        accepted = next((i for i, token in enumerate(drafted) if token != tokens[i]), len(drafted))
        devices.slots[row.slot][row.start + 1 :] = tokens[: accepted + 1]
        reject(state, row, accepted=accepted)
        for token in tokens[: accepted + 1]:
            record(state, row.sequence, token)


@settings(max_examples=15)
@given(st.integers(0, 2), st.integers(1, 3), st.randoms(use_true_random=False))
def test_whatever_keeps_coming_a_bounded_number_of_later_arrivals_goes_before_anyone(priorities, slots, random):
    config = EngineConfig(max_sequences=slots, step_tokens=8, page_tokens=4, priorities=priorities)
    state = SchedulerState.of(config, max_tokens=4, pages=4)
    most = 2 * priorities * PRIORITY_ARRIVALS
    begun = []
    for step_number in range(most + 40):
        new = [random.choice([0, 5, -(10**9)]) if step_number else 10**9 for _ in range(2)]
        given_tokens = {"tokens": [1, 2], "prompt_tokens": 2, "max_total_tokens": 3, "request_id": "", "index": 0}
        numbers = range(2 * step_number, 2 * step_number + 2)
        arrivals = [
            Sequence(id=number, arrival=number, priority=priority, **given_tokens)
            for number, priority in zip(numbers, new, strict=True)
        ]
        plan = schedule(state, arrivals)
        begun += [sequence.arrival for sequence in plan.admitted]
        for row in plan.rows:
            record(state, row.sequence, 0)
            finish(state, row.sequence)
    overtaken = [sum(other > arrival for other in begun[:place]) for place, arrival in enumerate(begun)]
    overtaken += [sum(other > sequence.arrival for other in begun) for sequence in state.waiting]
    assert max(overtaken) <= most
