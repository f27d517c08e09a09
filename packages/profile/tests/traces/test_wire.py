"""Messages are read alike one by one and all at once, and never beyond their end."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stack_profile.traces.wire import PADDING, Spans, WireError, fields, partition, read_fields, signed, varints

INTEGERS = st.integers(0, 2**64 - 1)
MESSAGES = st.lists(
    st.tuples(st.sampled_from([1, 2, 3, 7, 40]), INTEGERS | st.floats(allow_nan=False) | st.binary(max_size=300)),
    max_size=6,
)


def spans_of(messages):
    """The messages one after the other, with padding, and where they lie."""
    ends = np.cumsum([len(each) for each in messages], dtype=np.int64)
    starts = ends - np.array([len(each) for each in messages], np.int64)
    data = b"".join(messages) + bytes(PADDING)
    return data, np.frombuffer(data, np.uint8), Spans(starts, ends)


@given(parts=MESSAGES)
def test_fields_come_back_as_they_were_written(build, parts):
    data = build.message(*parts)
    found = [(number, value if isinstance(value, int) else data[slice(*value)]) for number, value in fields(data)]
    assert found == [
        (number, struct.pack("<d", value) if isinstance(value, float) else value) for number, value in parts
    ]


@given(messages=st.lists(MESSAGES, max_size=8))
def test_many_messages_at_once_are_read_as_one_by_one(build, messages):
    data, array, spans = spans_of([build.message(*parts) for parts in messages])
    columns, inner, owners = read_fields(array, spans, (1, 2), nested=3)
    for row, parts in enumerate(messages):
        for number in (1, 2):
            written = [value for found, value in parts if found == number]
            if written and isinstance(written[-1], int):
                assert int(columns[number][row]) == written[-1]
            elif written and isinstance(written[-1], float):
                assert columns[number][row].view(np.float64) == written[-1]
            elif not written:
                assert columns[number][row] == 0
        of_row = sorted(np.flatnonzero(owners == row), key=lambda each: inner.starts[each])
        found = [data[inner.starts[each] : inner.ends[each]] for each in of_row]
        assert found == [value for number, value in parts if number == 3 and isinstance(value, bytes)]


@given(parts=MESSAGES.filter(bool), cut=st.integers(1, 400))
def test_a_message_that_is_cut_off_is_refused_or_ends_between_fields(build, parts, cut):
    data = build.message(*parts)
    short = data[: max(0, len(data) - cut)]
    ends = [len(build.message(*parts[:count])) for count in range(len(parts) + 1)]
    if len(short) in ends:
        assert len(list(fields(short))) == ends.index(len(short))
    else:
        with pytest.raises(WireError, match=r"byte \d+"):
            list(fields(short))


def test_a_run_of_messages_ends_where_the_data_do(build):
    whole = build.message((4, b"first"), (2, "name"), (4, b"second"), (9, 7))
    spans, others, problem = partition(whole + bytes(PADDING), 4, 0, len(whole))
    assert [whole[a:b] for a, b in zip(spans.starts, spans.ends, strict=True)] == [b"first", b"second"]
    assert [number for number, _ in others] == [2, 9] and not problem

    short = whole[: whole.index(b"second") + 3]
    spans, _, problem = partition(short + bytes(PADDING), 4, 0, len(short))
    assert len(spans) == 1 and "cut off" in problem
    spans, _, _ = partition(short + bytes(PADDING), 4, 0, len(short), cut=True)
    assert short[spans.starts[1] : spans.ends[1]] == b"sec"


@pytest.mark.parametrize("data", [b"\x0b", b"\x0a\x05ab", b"\x08" + b"\xff" * 10, b"\x09\x00"])
def test_damage_is_named_by_its_place(data):
    with pytest.raises(WireError, match=r"byte \d+"):
        list(fields(data))
    with pytest.raises(WireError, match=r"byte \d+"):
        _, array, spans = spans_of([data])
        read_fields(array, spans, (1,))


def test_integers():
    assert [signed(value) for value in (5, 2**64 - 1, 2**63)] == [5, -1, -(2**63)]
    assert varints(b"\x01\xac\x02", (0, 3)) == [1, 300]
    assert varints(b"", 7) == [7]
