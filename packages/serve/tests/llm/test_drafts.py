import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stack_core.abi.errors import ConfigError
from stack_serve.llm.config import SpeculationConfig
from stack_serve.llm.drafts import Drafts, find_continuation


def found(tokens, count=4, min_match=2, max_match=3):
    array = np.array(tokens, np.int32)
    return find_continuation(array, min_match=min_match, max_match=max_match, count=count)


def test_the_continuation_of_the_longest_then_latest_match_is_found():
    assert found([1, 2, 3, 4, 9, 2, 3, 5, 9, 1, 2, 3]) == (4, 9, 2, 3)  # matches 1 2 3, not the later 2 3
    assert found([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3]) == (5, 1, 2, 3)
    assert found([7, 8, 7, 8]) == (7, 8, 7, 8)  # a period of 2
    assert found([1, 2, 3, 4, 2]) == () == found([1, 2]) == found([5])
    assert found([1, 2, 3, 4, 2], min_match=1) == (3, 4, 2, 3)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(1, 3), st.integers(0, 3), st.integers(1, 5))
def test_no_earlier_occurrence_matches_more(tokens, min_match, more, count):
    max_match = min_match + more
    matches = {}
    for end in range(len(tokens) - 1):
        length = 0
        while length <= end and length < max_match and tokens[end - length] == tokens[-1 - length]:
            length += 1
        matches[end] = length
    longest = max(matches.values(), default=0)
    expected = ()
    if longest >= min_match:
        text = list(tokens)
        end = max(end for end, length in matches.items() if length == longest)
        for place in range(end + 1, end + 1 + count):
            text.append(text[place])
        expected = tuple(text[len(tokens) :])
    assert found(tokens, count, min_match, max_match) == expected


def drafts_of(prompt, tokens=3):
    return Drafts(SpeculationConfig(tokens=tokens), prompt, 100)


def test_tokens_that_were_not_drafted_are_compared_with_the_draft_they_had():
    drafts = drafts_of([1, 2, 3, 4, 5, 1, 2])
    assert drafts.draft() == (3, 4, 5)
    before = drafts.rate
    drafts.extend([3])
    assert drafts.rate == before, "the draft is not settled yet"
    drafts.extend([4, 5, 1, 2, 3])
    assert drafts.rate > before
    risen = drafts.rate
    assert drafts.draft() == (4, 5, 1)
    drafts.extend([9])
    assert drafts.rate < risen and drafts.draft() == ()


def test_three_rejections_revoke_the_prior_and_one_accepted_draft_restores_it():
    drafts = drafts_of([1, 2, 3, 4, 5, 6, 7, 8, 1, 2], tokens=7)
    expected = [drafts.expected_tokens(7)]
    for _ in range(3):
        drafts.extend([20], drafted=7)
        expected.append(drafts.expected_tokens(7))
    assert expected[0] > 0.9 and expected[-1] < 0.2
    drafts.extend([1, 2, 3, 4, 5], drafted=7)
    assert drafts.expected_tokens(7) > 0.9


def test_a_text_that_does_not_repeat_itself_expects_nothing():
    drafts = drafts_of(range(10))
    for token in range(10, 20):
        assert drafts.draft() == ()
        drafts.extend([token])
    assert drafts.expected_tokens(3) < 0.05


def test_expected_tokens_are_the_sum_of_the_chances_of_each():
    drafts = drafts_of([1])
    rate = drafts.rate
    assert drafts.expected_tokens(3) == pytest.approx(rate + rate**2 + rate**3)
    assert drafts.expected_tokens(0) == 0


def test_a_match_has_a_minimum_not_above_its_maximum():
    with pytest.raises(ConfigError, match="min_match=4 is more than max_match=3"):
        SpeculationConfig(min_match=4, max_match=3)
