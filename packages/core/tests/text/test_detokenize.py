import itertools
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stack_core.text.detokenize import IncrementalDetokenizer, StopTexts, prompt_text


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


class ByteFallback(Bytes):
    """Decodes adjoining bytes together; if they are no text, each of them is U+FFFD."""

    def decode(self, ids):
        runs = [list(run) for _, run in itertools.groupby(ids, key=lambda token: token < 0x80)]
        return "".join(self._run(bytes(run)) for run in runs)

    @staticmethod
    def _run(run):
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)


def streamed(tokenizer, prompt, tokens):
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


@given(st.binary(max_size=40), st.binary(max_size=16))
def test_pieces_add_up_to_the_whole(prompt, content):
    whole = prompt.decode(errors="ignore").encode()
    assert "".join(streamed(Bytes(), list(whole), list(content))) == Bytes().decode(list(content))


@pytest.mark.parametrize("tokenizer", [Bytes(), ByteFallback()])
@given(st.text("aé\u4e2d😀", max_size=8), st.text("aé\u4e2d😀", max_size=8), st.integers(0, 3))
@example("😀😀\u4e2d", "é", 0)
@example("é", "", 2)
def test_a_character_that_the_prompt_begins_belongs_to_the_continuation(tokenizer, before, after, cut):
    content, begin = f"{before}😀{after}".encode(), len(before.encode()) + cut
    prompt, rest = list(content[:begin]), list(content[begin:])
    assert prompt_text(tokenizer, prompt) == before
    assert "".join(streamed(tokenizer, prompt, rest)) == f"😀{after}"
    assert prompt_text(tokenizer, list(f"{before}\ufffd".encode())) == f"{before}\ufffd"


def test_a_token_can_end_within_a_character():
    class Pairs(Bytes):
        def token_bytes(self, token):
            return {300: b"a\xf0", 301: b"\x9f\x98"}.get(token, bytes([token % 256]))

        def decode(self, ids):
            return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    assert [prompt_text(Pairs(), prompt) for prompt in ([98, 300], [98, 300, 301])] == ["ba", "ba"]
    assert streamed(Pairs(), [98, 300], [301, 0x80]) == ["", "😀", ""]


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


def test_special_tokens_are_shown_by_their_names():
    class Special(Bytes):
        """0 is a special token, which is no part of the text; 255 is no token."""

        def decode(self, ids):
            return super().decode([token for token in ids if token not in (0, 255)])

        def token_bytes(self, token):
            return {0: b"<s>", 255: b""}.get(token, bytes([token]))

    detokenizer = IncrementalDetokenizer(Special(), [], skip_special_tokens=False)
    pieces = [*map(detokenizer.push, [0, 0x61, 255, 0xE2, 0x82, 0, 0x62]), detokenizer.flush()]
    assert pieces == ["<s>", "a", "", "", "", "\ufffd<s>", "b", ""]


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
