"""Keys and bodies of requests; the servers test them over sockets."""

import asyncio

import pytest

from stack_core.runtime.http import KeyCheck, Keys, read_body, send_response


class Refused(Exception):
    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


def read(messages, *, headers=None, **limits):
    left = iter(messages)

    async def receive():
        for message in left:
            return message
        return await asyncio.Future()

    return asyncio.run(read_body(headers or {}, receive, error=Refused, **{"max_bytes": 4, **limits}))


def part(body, *, more):
    return {"type": "http.request", "body": body, "more_body": more}


def test_a_body_is_joined_from_its_parts():
    assert read([part(b"ab", more=True), part(b"cd", more=False)]) == b"abcd"


@pytest.mark.parametrize(
    ("messages", "headers", "status", "message"),
    [
        ([], {b"content-length": b"5"}, 413, "has 5 bytes; the server takes 4 bytes"),
        ([part(b"abc", more=True), part(b"de", more=False)], {}, 413, "more bytes than"),
        ([part(b"ab", more=True), {"type": "http.disconnect"}], {}, 400, "closed before"),
        ([part(b"ab", more=True)], {}, 408, "within 0.01 s"),
    ],
)
def test_incomplete_and_large_bodies_are_errors(messages, headers, status, message):
    with pytest.raises(Refused, match=message) as error:
        read(messages, headers=headers, timeout_s=0.01)
    assert error.value.status == status


@pytest.mark.parametrize(
    ("headers", "is_valid"),
    [
        ({b"authorization": b"Bearer second"}, True),
        ({b"authorization": b"bearer  first "}, True),
        ({b"x-api-key": b"first"}, True),
        ({b"authorization": b"Bearer wrong", b"x-api-key": b"second"}, True),
        ({b"authorization": b"Basic first"}, False),
        ({b"authorization": b"Bearer firs"}, False),
        ({}, False),
    ],
)
def test_a_key_is_a_bearer_token_or_a_header_of_its_own(headers, is_valid):
    assert KeyCheck(("first", "second"))(headers) is is_valid


def test_requests_without_a_key_reach_open_paths_only():
    reached = []

    def app(name):
        async def answer(scope, receive, send):
            reached.append(name)

        return answer

    keys = Keys(app("app"), ("key",), open_paths=frozenset({"/health"}), refusal=app("refusal"))
    requests = [("GET", "/health", b""), ("GET", "/v1", b""), ("OPTIONS", "/v1", b""), ("GET", "/v1", b"Bearer key")]
    for method, path, given in requests:
        scope = {"type": "http", "method": method, "path": path, "headers": [(b"authorization", given)]}
        asyncio.run(keys(scope, None, None))
    assert reached == ["app", "refusal", "app", "app"]


def test_a_large_response_is_sent_in_parts():
    sent = []

    async def send(message):
        sent.append(message)

    body = bytes(2**19 + 3)
    asyncio.run(send_response(send, 200, body, [(b"content-type", b"text/plain")]))
    start, *parts = sent
    assert start["headers"] == [(b"content-type", b"text/plain"), (b"content-length", b"%d" % len(body))]
    assert b"".join(each["body"] for each in parts) == body and len(parts) == 3
    assert [each.get("more_body", False) for each in parts] == [True, True, False]
