"""When speculation pays, for given durations of steps."""

import itertools

import pytest

from stack_serve.llm.buckets import Buckets
from stack_serve.llm.config import SpeculationConfig
from stack_serve.llm.drafts import Acceptance, Drafts
from stack_serve.llm.proposer import ModelDrafts
from stack_serve.llm.sequence import Sequence
from stack_serve.llm.speculation import Speculation

BUCKETS = Buckets(max_rows=8, max_tokens=64, max_drafts=7)


def rows_of(*accepted):
    """One row for each entry, whose last drafts of 7 tokens were accepted up to it."""
    rows = []
    for count in accepted:
        drafts = Drafts(SpeculationConfig(), [1], 1000)
        for _ in range(20):
            drafts.extend([0] * (count + 1), drafted=7)
        rows.append(drafts)
    return rows


def speculation_of(verification, decoding=0.010, rows=1):
    """Durations in seconds, by tokens of the verification."""
    speculation = Speculation(BUCKETS, 7)
    for _ in range(9):
        speculation.record_decoding(rows, decoding, is_ahead=True)
        for tokens, took_s in verification.items():
            speculation.record_verification(tokens, took_s)
    return speculation


def test_drafts_pay_if_the_accepted_tokens_outweigh_the_longer_step():
    assert speculation_of({8: 0.015}).choose(rows_of(3), [7]) == [7]
    assert speculation_of({8: 0.045}).choose(rows_of(3), [7]) == [0]
    assert speculation_of({8: 0.011}).choose(rows_of(0), [7]) == [0]
    assert speculation_of({8: 0.015}).choose(rows_of(3), [0]) == [0]


def test_it_begins_only_with_a_margin():
    speculation = speculation_of({8: 0.038})
    barely = rows_of(4)
    ratio = (1 + barely[0].expected_tokens(7)) / 3.8
    assert 1.0 < ratio < 1.15
    assert speculation.pays(barely)
    assert not speculation.pays(rows_of(0))
    assert not speculation.pays(barely)
    assert speculation.pays(rows_of(7))
    assert speculation.pays(barely)


def test_rows_that_are_accepted_most_get_the_cheap_tokens_first():
    rows = rows_of(0, 7, 1)
    assert speculation_of({8: 0.012, 32: 0.100}, rows=3).choose(rows, [7, 7, 7]) == [0, 5, 0]
    assert speculation_of({8: 0.012, 32: 0.012}, rows=3).choose(rows, [7, 7, 7]) == [7, 7, 7]
    assert speculation_of({8: 0.012, 32: 0.012}, rows=3).choose(rows, [0, 0, 2]) == [0, 0, 2]


def test_more_rows_than_a_bucket_holds_are_not_speculated_in_it():
    assert speculation_of({8: 0.001, 32: 1.0}, rows=8).choose(rows_of(*[7] * 8), [7] * 8) == [0] * 8


def test_one_slow_moment_disables_a_size_for_a_while_only():
    speculation = speculation_of({8: 0.012})
    for _ in range(20):
        speculation.record_verification(8, 10.0)
    assert not speculation.pays(rows_of(3))
    for _ in range(256):
        speculation.record_decoding(1, 0.010, is_ahead=True)
    assert speculation.pays(rows_of(3))


def test_a_decoding_step_that_was_measured_too_slow_does_not_keep_speculation_on():
    speculation = speculation_of({8: 0.030}, decoding=0.200)
    assert speculation.pays(rows_of(1))
    # No draft was found, so a step was planned after the previous one was read, and decoded.
    speculation.record_decoding(1, 0.012, is_ahead=False)
    assert not speculation.pays(rows_of(1))


def test_drafts_that_are_never_accepted_do_not_pay_at_any_measured_durations():
    """The load of a machine may rise between the two measurements."""
    assert not speculation_of({8: 0.010}, decoding=0.040).pays(rows_of(0))


def test_a_slow_step_that_was_not_planned_ahead_does_not_count():
    speculation = speculation_of({8: 0.030})
    assert not speculation.pays(rows_of(1))
    for _ in range(9):
        speculation.record_decoding(1, 0.200, is_ahead=False)
    assert not speculation.pays(rows_of(1))


def test_the_first_run_of_a_program_is_not_measured():
    speculation = Speculation(BUCKETS, 7)
    speculation.record_decoding(1, 0.010, is_ahead=True)
    speculation.record_verification(8, 100.0)
    speculation.record_decoding(1, 0.010, is_ahead=True)
    assert speculation.pays(rows_of(3))


@pytest.mark.parametrize("drafts", [1, 7, 63])
def test_buckets_of_verification_hold_every_step(drafts):
    buckets = Buckets(max_rows=5, max_tokens=100, max_drafts=drafts)
    sizes = buckets.verification
    assert sizes == sorted(set(sizes)) and sizes[0] == 8
    assert sizes[-1] >= min(5 * (1 + drafts), 100)
    assert [buckets.of_verification(tokens) for tokens in (2, 8)] == [8, 8]
    assert Buckets(max_rows=5, max_tokens=100).verification == []


def drafting(draft_s, *, rows=1):
    """Steps of 10 ms, verifications of 12 ms, and a draft model with steps of `draft_s`."""
    speculation = Speculation(BUCKETS, 7, draft_cost=0.5)
    for _ in range(9):
        speculation.record_decoding(rows, 0.010, is_ahead=True)
        speculation.record_verification(8, 0.012)
        speculation.record_drafting(rows, 4, 4 * draft_s)
    return speculation


def model_drafts(pair, accepted, tries=20):
    sequence = Sequence(
        id=0, request_id="", index=0, tokens=[1], prompt_tokens=1, max_total_tokens=1000, priority=0, arrival=0
    )
    drafts = ModelDrafts(sequence, pair)
    for _ in range(tries):
        drafts.extend([0] * (accepted + 1), drafted=7)
    return drafts


def test_the_length_of_a_draft_follows_from_the_time_that_each_of_its_tokens_takes():
    often, seldom = model_drafts(Acceptance(0.8), 7), model_drafts(Acceptance(0.8), 1)
    assert drafting(0.0001).choose([often], [7]) == [7]
    assert drafting(0.0001).choose([seldom], [7]) == [7]
    assert drafting(0.001).choose([seldom], [7]) == [3]
    assert drafting(0.001).choose([often], [2]) == [2]
    assert drafting(0.010).choose([seldom], [7]) == [0]
    # Until it is measured, its duration is estimated from its size.
    assert Speculation(BUCKETS, 7, draft_cost=0.01).choose([seldom], [7]) == [7]
    assert Speculation(BUCKETS, 7, draft_cost=0.9).choose([seldom], [7]) == [0]


def test_a_draft_model_that_does_not_pay_is_tried_again_less_and_less_often():
    speculation, pair = drafting(0.003), Acceptance(0.8)
    rows, tries = [model_drafts(pair, 0, tries=0)], []
    for turn in range(1000):
        if speculation.pays(rows):
            tries.append(turn)
            rows[0].extend([0], drafted=7)
    assert tries[0] == 0 and 3 <= len(tries) < 30
    pauses = [after - before for before, after in itertools.pairwise(tries) if after > before + 1]
    assert pauses[0] >= 64 and pauses[1] >= 2 * 64 and pauses[2] >= 4 * 64
    # The acceptance is that of the pair, so a new sequence does not try again.
    assert not speculation.pays([model_drafts(pair, 0, tries=0)])


def test_drafts_wait_until_decoding_is_measured():
    """An engine that verifies from its first step on would never learn what a step costs without drafts."""
    speculation = Speculation(BUCKETS, 7)
    speculation.record_verification(8, 0.050)
    speculation.record_verification(8, 0.050)
    assert not speculation.pays(rows_of(3))
    for _ in range(2):
        speculation.record_decoding(1, 0.010, is_ahead=True)
    assert not speculation.pays(rows_of(3)) and not speculation.is_on
    fast = speculation_of({8: 0.012})
    for _ in range(200):
        fast.record_verification(8, 0.012)
        assert fast.pays(rows_of(3))
    for _ in range(56):
        fast.record_verification(8, 0.012)
    assert not fast.pays(rows_of(3))  # decoding is measured again


def test_steps_that_are_never_planned_ahead_are_bounded_instead():
    """Constrained rows wait for the mask of their newest token."""
    speculation = Speculation(BUCKETS, 7)
    for number in range(4):
        assert not speculation.pays(rows_of(7)), number
        speculation.record_decoding(1, 0.010, is_ahead=False)
    assert speculation.pays(rows_of(7))


def test_missing_keys_must_be_repaid_by_the_tokens_to_come():
    speculation, often = drafting(0.001), Acceptance(0.8)
    assert speculation.repaid_keys(1, often) == float("inf")  # until it is measured
    for _ in range(9):
        # 100 keys took 0.5 s, and 8 drafting steps 8 ms.
        speculation.record_filling(100, 1, 8, 0.508)
    gain = (1 + often.expected_tokens(7)) / (1.2 + 8 * 0.1)
    assert speculation.repaid_keys(1, often) == pytest.approx(10 / 5 * (1 - 1 / gain))
    assert speculation.repaid_keys(1, Acceptance(0.0)) == 0
