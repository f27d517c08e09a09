import asyncio
import socket
from collections.abc import Callable
from contextlib import closing
from typing import Any

import orjson
import pytest

from stack_serve.client.endpoint import Endpoint, RequestFailed

from ..openai_server import Server


def ignore(data: bytes, arrived_s: float) -> None:
    pass


def used(endpoint: Endpoint, use: Callable[[Endpoint], Any]) -> Any:
    async def run() -> Any:
        async with endpoint:
            return await use(endpoint)

    return asyncio.run(run())


def streamed(endpoint: Endpoint, **body: Any) -> list[Any]:
    events: list[Any] = []
    body = {"model": "plain", "prompt": "a b", "max_tokens": 3, **body}
    used(endpoint, lambda it: it.stream("/completions", body, lambda data, _: events.append(orjson.loads(data))))
    return events


def test_each_event_of_a_stream_is_handed_on(openai_server: Server) -> None:
    *pieces, usage = streamed(Endpoint(openai_server[1]))
    assert [piece["choices"][0]["text"] for piece in pieces] == ["0 ", "1 ", "2 "]
    assert usage["usage"] == {"prompt_tokens": 5, "completion_tokens": 3}


def test_events_have_the_times_at_which_they_arrived(openai_server: Server) -> None:
    times_s: list[float] = []
    body = {"model": "plain", "prompt": "a", "max_tokens": 5}
    used(
        Endpoint(openai_server[1]),
        lambda it: it.stream("/completions", body, lambda data, arrived_s: times_s.append(arrived_s)),
    )
    assert times_s == sorted(times_s)
    assert times_s[4] - times_s[0] >= 0.004  # four waits of 2 ms, of which a clock may cut something


def test_models_and_the_api_key(openai_server: Server) -> None:
    server, address = openai_server
    assert used(Endpoint(f"{address}/v1/"), Endpoint.models) == ["plain"]
    streamed(Endpoint(address.removeprefix("http://"), api_key="secret"))
    assert server.keys == ["Bearer secret"]


def test_one_connection_serves_requests_one_after_the_other(openai_server: Server) -> None:
    server, address = openai_server

    async def three(endpoint: Endpoint) -> None:
        for _ in range(3):
            await endpoint.stream("/completions", {"model": "plain", "prompt": "a"}, ignore)

    used(Endpoint(address), three)
    assert len(server.connections) == 1


@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [("busy", "http 429", r"answers 429: The queue is full\."), ("cut", "stream", "the stream has no end")],
)
def test_failures_have_a_kind(openai_server: Server, model: str, kind: str, message: str) -> None:
    with pytest.raises(RequestFailed, match=message) as failure:
        streamed(Endpoint(openai_server[1]), model=model)
    assert failure.value.kind == kind


def test_what_takes_too_long_is_given_up(openai_server: Server) -> None:
    with pytest.raises(RequestFailed, match=r"no answer within 0\.05 s") as failure:
        streamed(Endpoint(openai_server[1], timeout_s=0.05), model="endless")
    assert failure.value.kind == "timeout"


def test_an_error_of_the_receiver_is_raised(openai_server: Server) -> None:
    def refuse(data: bytes, arrived_s: float) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        used(
            Endpoint(openai_server[1]),
            lambda it: it.stream("/completions", {"model": "plain", "prompt": "a"}, refuse),
        )


def test_nobody_there_and_no_address() -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        port = taken.getsockname()[1]
        with pytest.raises(RequestFailed, match=r"cannot be reached: .* Is the server running there") as failure:
            used(Endpoint(f"http://127.0.0.1:{port}"), Endpoint.models)
        assert failure.value.kind == "connection"
    for wrong in ("ftp://host/v1", "http://", "http://host:port"):
        with pytest.raises(RequestFailed, match="is not the address of a server"):
            Endpoint(wrong)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"", "connection"),
        (b"SSH-2.0-server\r\n", "connection"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\ndata: {}\n\n", "stream"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nno events\n", "stream"),
    ],
)
def test_answers_that_are_none(answer: bytes, kind: str) -> None:
    with pytest.raises(RequestFailed) as failure:
        against(answer, lambda endpoint: endpoint.stream("/completions", {}, ignore))
    assert failure.value.kind == kind


def test_an_answer_may_end_with_its_connection() -> None:
    events: list[bytes] = []
    answer = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\ndata: {}\n\ndata: [DONE]\n\n"
    against(answer, lambda endpoint: endpoint.stream("/", {}, lambda data, arrived_s: events.append(data)))
    assert events == [b"{}"]


def test_a_kept_connection_that_the_server_closed_is_replaced() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\ndata: [DONE]\r\n      "

    async def twice(endpoint: Endpoint) -> None:
        for _ in range(2):  # the server closes after each, and does not say so
            await endpoint.stream("/", {}, ignore)

    assert against(answer, twice) == 2


def against(answer: bytes, use: Callable[[Endpoint], Any]) -> int:
    """Uses an endpoint whose server says just that, and hangs up; returns how many connections it had."""
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, Endpoint(f"http://127.0.0.1:{port}") as endpoint:
            await use(endpoint)

    asyncio.run(run())
    return connections
