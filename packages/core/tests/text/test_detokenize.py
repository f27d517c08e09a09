import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stack_core.text.detokenize import IncrementalDetokenizer, StopTexts


class Bytes:
    """One token a byte, decoded as byte-level tokenizers do."""

    vocab_size = 256
    eos_id = bos_id = None

    def encode(self, text, *, add_special_tokens=True):
        return list(text.encode())

    def encode_batch(self, texts):
        return [self.encode(text) for text in texts]

    def decode(self, ids):
        return bytes(ids).decode("utf-8", errors="replace")

    def token_bytes(self, token):
        return bytes([token])

    def save(self, directory):
        raise NotImplementedError


class LeadingSpace(Bytes):
    """Drops the first space of a text, as SentencePiece does."""

    def decode(self, ids):
        return super().decode(ids).removeprefix(" ")


def streamed(tokenizer, prompt, tokens):
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


@given(st.binary(max_size=40), st.binary(max_size=16))
def test_pieces_add_up_to_the_whole(prompt, content):
    prompt = prompt.decode(errors="ignore").encode()
    assert "".join(streamed(Bytes(), list(prompt), list(content))) == Bytes().decode(list(content))


def test_a_character_comes_whole():
    assert streamed(Bytes(), [], list("aé€😀".encode())) == ["a", "", "é", "", "", "€", "", "", "", "😀", ""]


def test_bytes_that_become_no_character_are_shown_at_the_end():
    assert streamed(Bytes(), [], [0x61, 0xE2, 0x82]) == ["a", "", "", "\ufffd"]


class AtMost(Bytes):
    """Counts the tokens that it decodes at once; 0 is a special token."""

    most = 0

    def decode(self, ids):
        self.most = max(self.most, len(ids))
        return super().decode([token for token in ids if token])


@pytest.mark.parametrize(("token", "text"), [(0, ""), (0xE2, "\ufffd" * 200)])
def test_a_long_run_without_text_is_not_decoded_again_and_again(token, text):
    tokenizer = AtMost()
    assert "".join(streamed(tokenizer, [], [*b"ab", *[token] * 200, *b"c"])) == f"ab{text}c"
    assert tokenizer.most <= 40


def test_a_space_after_the_prompt_is_kept():
    assert "".join(streamed(LeadingSpace(), list(b"ab"), list(b" c d"))) == " c d"


@pytest.mark.parametrize(
    ("stop", "pieces", "expected", "found"),
    [
        (["END"], ["a E", "N", "D b"], "a ", "END"),
        (["END"], ["a E", "N", "d b"], "a ENd b", None),
        (["END"], ["a EN"], "a EN", None),
        (["aab"], ["aaab"], "a", "aab"),
        (["aab"], ["a", "a", "a", "b"], "a", "aab"),
        (["xy", "y"], ["a", "x", "y"], "a", "xy"),
        (["\n\n", "!"], ["one\n", "two!\n\n"], "one\ntwo", "!"),
        ([], ["a", "b"], "ab", None),
    ],
)
def test_stop_texts(stop, pieces, expected, found):
    stopper = StopTexts(stop)
    assert "".join([*map(stopper.push, pieces), stopper.flush()]) == expected
    assert stopper.found == found


def test_stop_texts_pass_while_they_may_not_stop():
    stopper = StopTexts(["ab", "bc"])
    assert stopper.push("xab", may_stop=False) == "xa"
    assert stopper.push("", may_stop=False) == ""
    assert (stopper.push("cab"), stopper.found) == ("", "bc")


@given(st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.lists(st.text("ab", max_size=3), max_size=12))
def test_text_is_cut_where_a_stop_text_first_ends_being_passed_over(stop, pieces):
    stopper = StopTexts(stop)
    passed = "".join([*map(stopper.push, pieces), stopper.flush()])
    assert "".join(pieces).startswith(passed)
    assert not any(text in passed for text in stop)
    assert (stopper.found is None) == (passed == "".join(pieces) and not any(text in passed for text in stop))


def test_a_character_costs_the_same_however_long_the_stop_texts_are():
    def cost_s(length):
        stopper = StopTexts([("a" * length)[:-1] + chr(ord("b") + place) for place in range(16)])
        began_s = time.process_time()
        for _ in range(2000):
            stopper.push("a")
        return time.process_time() - began_s

    assert cost_s(256) < 8 * min(cost_s(4) for _ in range(3))
