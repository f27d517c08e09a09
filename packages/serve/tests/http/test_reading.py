"""The reader of requests, which sees the same requests however the data is split."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stack_serve.http.reading import MAX_HEAD_BYTES, RequestReader

BODY = b"x" * (2 * MAX_HEAD_BYTES)
WITH_BODY = b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)
CHUNKED = b"POST /b HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
WITHOUT_BODY = b"GET /c HTTP/1.1\r\nhost: x\r\n\r\n"


def parts_of(data: bytes, places: list[int]) -> list[bytes]:
    cuts = sorted({0, len(data), *(place % len(data) for place in places)})
    return [data[start:end] for start, end in itertools.pairwise(cuts)]


@given(
    st.lists(st.sampled_from([WITH_BODY, CHUNKED, WITHOUT_BODY]), min_size=1, max_size=4),
    st.lists(st.integers(0, 2**20), max_size=6),
)
def test_requests_are_counted_and_bodies_are_no_heads(requests: list[bytes], places: list[int]) -> None:
    reader = RequestReader()
    for part in parts_of(b"".join(requests), places):
        reader.feed(part)
        assert not reader.is_too_long
    assert (reader.heads, reader.complete) == (len(requests), len(requests))
    assert not reader.in_head and not reader.in_body
    # A large body and the beginning of the next head may arrive together.
    reader.feed(WITH_BODY + b"GET /")
    assert reader.in_head and not reader.in_body and not reader.is_too_long
    assert (reader.heads, reader.complete) == (len(requests) + 2, len(requests) + 1)


@given(st.lists(st.integers(0, 2**20), max_size=6))
def test_a_long_head_is_noticed_however_it_is_split(places: list[int]) -> None:
    reader = RequestReader()
    for part in parts_of(b"GET / HTTP/1.1\r\nname: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n", places):
        reader.feed(part)
    assert reader.is_too_long


@pytest.mark.parametrize("endless", [b"name: value\r\n", b"x"])
def test_a_head_without_end_is_noticed_before_its_end(endless: bytes) -> None:
    reader, size_bytes = RequestReader(), 0
    reader.feed(WITHOUT_BODY + b"GET / HTTP/1.1\r\na: ")
    while not reader.is_too_long:
        reader.feed(1000 * endless)
        size_bytes += 1000 * len(endless)
        assert size_bytes < 2 * MAX_HEAD_BYTES
