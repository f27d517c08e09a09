import pytest
from hypothesis import given
from hypothesis import strategies as st

from stack_core.abi.generation import GenerationRequest, SamplingParams, TokenLogprob
from stack_serve.llm.output import Ending, Output


class Bytes:
    """One token a byte; 256 and above are special, and no text."""

    vocab_size = 300
    eos_id = bos_id = None

    def encode(self, text, *, add_special_tokens=True):
        return list(text.encode())

    def encode_batch(self, texts):
        return [self.encode(text) for text in texts]

    def decode(self, ids):
        return bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")

    def token_bytes(self, token):
        return bytes([token]) if token < 256 else b""

    def save(self, directory):
        raise NotImplementedError


class Words(Bytes):
    """One token a word of a list."""

    def __init__(self, *words):
        self.words = words

    def decode(self, ids):
        return "".join(self.words[token] for token in ids if token < len(self.words))


END = 256


def output_of(tokenizer=None, *, max_tokens=100, index=0, end_tokens=(END,), **sampling):
    request = GenerationRequest(request_id="a", prompt=(104, 105), sampling=SamplingParams(**sampling))
    ending = Ending(request.sampling, end_tokens=end_tokens, max_tokens=max_tokens)
    return Made(ending, Output(request, index, tokenizer=Bytes() if tokenizer is None else tokenizer))


class Made:
    """An output that is told by which tokens its continuation ends, as engines do."""

    def __init__(self, ending, output):
        self.ending, self.output = ending, output
        self.take, self.end = output.take, output.end

    def push(self, token, logprob=None):
        return self.output.push(token, self.ending.push(token), logprob)


def logprob_of(token):
    return TokenLogprob(token, -float(token), 1)


def pushed(output, tokens):
    """The updates up to the last, and none after it."""
    updates = []
    for token in tokens:
        has_ended = output.push(token, logprob_of(token))
        updates.append(output.take())
        assert has_ended == (updates[-1].finish_reason is not None)
        if has_ended:
            break
    return updates


def whole(updates):
    """Text, tokens, finish reason and stop reason of a continuation."""
    tokens = [token for update in updates for token in update.tokens]
    text = "".join(update.text for update in updates)
    return text, tokens, updates[-1].finish_reason, updates[-1].stop_reason


def test_each_token_is_told_with_its_text():
    updates = pushed(output_of(index=2), b"ab")
    assert [(update.request_id, update.index) for update in updates] == [("a", 2)] * 2
    assert [(update.tokens, update.text) for update in updates] == [((97,), "a"), ((98,), "b")]
    assert all(update.finish_reason is update.logprobs is update.error is None for update in updates)


@pytest.mark.parametrize("stop", [(), ("bc",), ("dx",)])
def test_tokens_that_become_known_together_are_told_together(stop):
    separate, together = (output_of(max_tokens=4, logprobs=0, stop=stop) for _ in range(2))
    tokens = b"abcd"
    expected = pushed(separate, tokens)
    assert [together.push(token, logprob_of(token)) for token in tokens[: len(expected)]][-1]
    update = together.take()
    assert whole([update]) == whole(expected)
    assert update.logprobs == tuple(logprob for each in expected for logprob in each.logprobs)


def test_a_character_comes_whole_after_its_tokens():
    updates = pushed(output_of(), "aé".encode())
    assert [(update.tokens, update.text) for update in updates] == [((97,), "a"), ((0xC3,), ""), ((0xA9,), "é")]


def test_the_text_goes_on_where_the_prompt_ends():
    class LeadingSpace(Bytes):
        def decode(self, ids):
            return super().decode(ids).removeprefix(" ")

    assert whole(pushed(output_of(LeadingSpace()), b" "))[0] == " "


def test_the_last_of_all_tokens_says_so():
    updates = pushed(output_of(max_tokens=3), b"abcd")
    assert whole(updates) == ("abc", [97, 98, 99], "length", None)
    assert [update.finish_reason for update in updates] == [None, None, "length"]


def test_what_is_no_whole_character_at_the_end_is_told_as_such():
    assert whole(pushed(output_of(max_tokens=2), "a€".encode())) == ("a�", [97, 0xE2], "length", None)


def test_an_end_token_ends_without_a_reason_and_is_no_text():
    assert whole(pushed(output_of(), [97, END, 98])) == ("a", [97, END], "stop", None)


def test_an_end_token_can_be_ignored():
    assert whole(pushed(output_of(ignore_eos=True, max_tokens=3), [97, END, 98])) == (
        "ab",
        [97, END, 98],
        "length",
        None,
    )


def test_a_stop_token_is_the_reason_and_its_text_is_left_out():
    assert whole(pushed(output_of(stop_tokens=(98,)), b"abc")) == ("a", [97, 98], "stop", 98)


def test_the_text_of_a_stop_token_can_be_included():
    assert whole(pushed(output_of(stop_tokens=(98,), include_stop=True), b"abc")) == ("ab", [97, 98], "stop", 98)


def test_an_end_token_that_is_ignored_can_be_a_stop_token():
    assert whole(pushed(output_of(ignore_eos=True, stop_tokens=(END,)), [END])) == ("", [END], "stop", END)
    assert whole(pushed(output_of(stop_tokens=(END,)), [END])) == ("", [END], "stop", None)


def test_a_token_that_stops_at_the_limit_stops():
    assert whole(pushed(output_of(stop_tokens=(98,), max_tokens=2), b"ab"))[2:] == ("stop", 98)
    assert whole(pushed(output_of(stop=("b",), max_tokens=2), b"ab")) == ("a", [97], "stop", "b")
    included = output_of(stop=("b",), max_tokens=2, include_stop=True)
    assert whole(pushed(included, b"ab")) == ("ab", [97, 98], "stop", "b")


@pytest.mark.parametrize(("min_tokens", "length"), [(0, 1), (1, 2), (3, 4)])
def test_nothing_stops_before_there_are_enough_tokens(min_tokens, length):
    for ending in ({"stop_tokens": (97,)}, {"end_tokens": (97,)}, {"stop": ("a",), "include_stop": True}):
        _, tokens, reason, _ = whole(pushed(output_of(min_tokens=min_tokens, **ending), b"aaaaaaaa"))
        assert (len(tokens), reason) == (length, "stop")


def test_a_stop_text_may_begin_before_there_are_enough_tokens():
    assert whole(pushed(output_of(stop=("bc",), min_tokens=2), b"abcd")) == ("a", [97], "stop", "bc")


def test_a_stop_text_ends_the_text_before_it():
    assert whole(pushed(output_of(stop=("cd", "x")), b"abcde")) == ("ab", [97, 98], "stop", "cd")


def test_a_stop_text_can_be_included():
    assert whole(pushed(output_of(stop=("cd",), include_stop=True), b"abcde")) == ("abcd", list(b"abcd"), "stop", "cd")


def test_text_and_tokens_are_held_back_while_a_stop_text_may_come():
    updates = pushed(output_of(stop=("bcd",), max_tokens=6), b"abcxbc")
    assert [update.text for update in updates] == ["a", "", "", "bcx", "", "bc"]
    assert [len(update.tokens) for update in updates] == [1, 0, 0, 3, 0, 2]
    assert updates[-1].finish_reason == "length"


def test_nothing_is_held_back_without_stop_texts():
    updates = pushed(output_of(), "€".encode())
    assert [len(update.tokens) for update in updates] == [1, 1, 1]


def test_a_token_that_begins_before_the_stop_text_is_told():
    words = Words("one EN", "D", " two")
    assert whole(pushed(output_of(words, stop=("END",)), [0, 1, 2])) == ("one ", [0], "stop", "END")
    assert whole(pushed(output_of(Words("one END two"), stop=("END",)), [0])) == ("one ", [0], "stop", "END")


@pytest.mark.parametrize(("include_stop", "dropped"), [(False, 2), (True, 0)])
def test_tokens_of_a_stop_text_are_counted(include_stop, dropped):
    *others, last = pushed(output_of(stop=("cd",), include_stop=include_stop), b"abcde")
    assert [update.dropped_tokens for update in others] == [0] * 3 and last.dropped_tokens == dropped
    assert sum(len(update.tokens) for update in (*others, last)) + dropped == 4


def test_what_follows_an_included_stop_text_in_its_token_is_left_out():
    words = Words("one E", "ND two", "three")
    assert whole(pushed(output_of(words, stop=("END",), include_stop=True), [0, 1, 2])) == (
        "one END",
        [0, 1],
        "stop",
        "END",
    )


def test_the_tokens_of_a_character_are_held_back_together():
    updates = pushed(output_of(stop=("é",)), "aé".encode())
    assert whole(updates) == ("a", [97], "stop", "é")


def test_a_stop_text_may_be_the_whole_text():
    assert whole(pushed(output_of(stop=("ab",)), b"abc")) == ("", [], "stop", "ab")


def test_an_end_token_lets_held_text_go():
    assert whole(pushed(output_of(stop=("abc",)), [97, 98, END])) == ("ab", [97, 98, END], "stop", None)


def test_bytes_without_a_character_can_be_a_stop_text_at_the_end():
    assert whole(pushed(output_of(stop=("�",)), [97, 0xE2, END])) == ("a", [97], "stop", "�")


def test_log_probabilities_come_with_their_tokens():
    updates = pushed(output_of(stop=("cd",), logprobs=0), b"abcxcd")
    assert [tuple(found.token for found in update.logprobs) for update in updates] == [u.tokens for u in updates]
    assert [update.tokens for update in updates] == [(97,), (98,), (), (99, 120), (), ()]
    assert updates[0].logprobs == (logprob_of(97),)


@pytest.mark.parametrize("reason", ["abort", "deadline", "error"])
def test_what_was_held_back_is_told_when_it_ends_for_another_reason(reason):
    output = output_of(stop=("abc",), logprobs=0)
    pushed(output, b"ab")
    update = output.end(reason, error="why")
    assert (update.text, update.tokens, update.finish_reason, update.error) == ("ab", (97, 98), reason, "why")
    assert update.logprobs == (logprob_of(97), logprob_of(98))
    assert update.stop_reason is None


def test_it_may_end_before_it_began():
    update = output_of().end("abort")
    assert (update.text, update.tokens, update.finish_reason, update.error) == ("", (), "abort", None)


def test_without_a_tokenizer_there_are_only_tokens():
    request = GenerationRequest(request_id="a", prompt=(1,), sampling=SamplingParams(stop_tokens=(5,)))
    ending = Ending(request.sampling, end_tokens=(), max_tokens=9)
    output = Made(ending, Output(request, 0, tokenizer=None))
    updates = pushed(output, (4, 5))
    assert whole(updates) == ("", [4, 5], "stop", 5)
    assert [update.tokens for update in updates] == [(4,), (5,)]


@given(
    st.lists(st.sampled_from([*b"abc", 0xC3, 0xA9, END]), max_size=14),
    st.lists(st.text("abcé", min_size=1, max_size=3), max_size=2),
    st.booleans(),
    st.integers(0, 4),
)
def test_the_text_is_that_of_the_tokens_up_to_the_first_stop_text(tokens, stop, include_stop, min_tokens):
    output = output_of(
        stop=tuple(stop), include_stop=include_stop, min_tokens=min_tokens, ignore_eos=True, max_tokens=len(tokens) + 1
    )
    updates = pushed(output, tokens)
    if not updates or updates[-1].finish_reason is None:
        updates.append(output.end("abort"))
    text, told, reason, stop_reason = whole(updates)
    decoded = Bytes().decode(tokens)
    assert decoded.startswith(text)
    assert told == tokens[: len(told)]
    if reason == "stop":
        assert stop_reason in stop
        assert (text if include_stop else text + stop_reason).endswith(stop_reason)
        assert decoded.startswith(text if include_stop else text + stop_reason)
    else:
        assert (text, told) == (decoded, tokens)
        assert not any(found in Bytes().decode(tokens[min_tokens:]) for found in stop)
