"""A client process that keeps many connections busy for some seconds, one request at a time on each.

Usage: python load.py PORT, then lines of JSON on standard input. For each it warms up, says so in a line, waits for a
line, counts from then on, and prints what it counted.

Standard library only. It writes requests whole and looks at no more of an answer than its head, so that it costs the
machine little beside the server that it measures.
"""

import asyncio
import base64
import json
import math
import sys
import time
from dataclasses import dataclass
from typing import Any

__all__: list[str] = []

_HEAD_END = b"\r\n\r\n"
_LENGTH = b"content-length:"


@dataclass
class _Window:
    """When answers count; nobody asks again after its end."""

    begin_s: float = math.inf
    end_s: float = math.inf


class _Connection(asyncio.Protocol):
    """Asks again as soon as it is answered; notes the seconds of each answer that comes within a window."""

    def __init__(self, request: bytes, window: _Window) -> None:
        self.seconds: list[float] = []
        self.failed: list[str] = []
        self.body = b""
        self.done = asyncio.get_running_loop().create_future()
        self._request, self._window = request, window
        self._answer = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._ask()

    def data_received(self, data: bytes) -> None:
        self._answer += data
        head, found, body = self._answer.partition(_HEAD_END)
        if not found or len(body) < _length_of(head):
            return
        now_s = time.perf_counter()
        if b" 200 " not in head[:13]:
            self.failed.append(self._answer[:500].decode(errors="replace"))
        elif now_s >= self._window.begin_s:
            self.seconds.append(now_s - self._asked_s)
        self._answer, self.body = b"", body
        if now_s < self._window.end_s and not self.failed:
            self._ask()
        else:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer or exc is not None:
            self.failed.append(f"the connection was lost: {exc}")
        if not self.done.done():
            self.done.set_result(None)

    def _ask(self) -> None:
        self._asked_s = time.perf_counter()
        self._transport.write(self._request)


def _length_of(head: bytes) -> int:
    at = head.lower().find(_LENGTH)
    return int(head[at + len(_LENGTH) :].split(b"\r\n", 1)[0])


async def _load(port: int, asked: dict[str, Any]) -> dict[str, Any]:
    content = base64.b64decode(asked["content"])
    headers = {"host": "127.0.0.1", "content-length": str(len(content)), **asked["headers"]}
    head = "".join([f"POST {asked['path']} HTTP/1.1\r\n", *(f"{name}: {value}\r\n" for name, value in headers.items())])
    window = _Window()
    loop = asyncio.get_running_loop()
    made = [
        await loop.create_connection(lambda: _Connection(head.encode() + b"\r\n" + content, window), "127.0.0.1", port)
        for _ in range(asked["clients"])
    ]
    await asyncio.sleep(asked["warm_up_s"])
    print(json.dumps({"warm": True}), flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)
    cpu_s, window.begin_s = time.process_time(), time.perf_counter()
    window.end_s = window.begin_s + asked["seconds"]
    await asyncio.gather(*(connection.done for _, connection in made))
    seconds = sorted(second for _, connection in made for second in connection.seconds)
    return {
        "requests": len(seconds),
        "wall_s": time.perf_counter() - window.begin_s,
        "client_cpu_s": time.process_time() - cpu_s,
        "p50_s": seconds[len(seconds) // 2] if seconds else None,
        "p99_s": seconds[len(seconds) * 99 // 100] if seconds else None,
        "failed": [message for _, connection in made for message in connection.failed],
        "body": base64.b64encode(made[0][1].body).decode(),
    }


def main() -> None:
    port = int(sys.argv[1])
    while line := sys.stdin.readline():
        print(json.dumps(asyncio.run(_load(port, json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
