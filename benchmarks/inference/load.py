"""A client process that keeps many connections busy for some seconds, one request at a time on each.

Usage: python load.py PORT, then lines of JSON on standard input.

Standard library only. It writes requests whole and looks at no more of an answer than its head, so that it costs the
machine little beside the server that it measures.
"""

import asyncio
import base64
import json
import sys
import time
from typing import Any

__all__: list[str] = []

_HEAD_END = b"\r\n\r\n"
_LENGTH = b"content-length:"


class _Connection(asyncio.Protocol):
    """Asks again as soon as it is answered; notes the seconds of each answer that comes after `begin_s`."""

    def __init__(self, request: bytes, end_s: float, begin_s: float) -> None:
        self.seconds: list[float] = []
        self.failed: list[str] = []
        self.body = b""
        self.done = asyncio.get_running_loop().create_future()
        self._request, self._begin_s, self._end_s = request, begin_s, end_s
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
        elif now_s >= self._begin_s:
            self.seconds.append(now_s - self._asked_s)
        self._answer, self.body = b"", body
        if now_s < self._end_s and not self.failed:
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
    begin_s = time.perf_counter() + asked["warm_up_s"]
    end_s = begin_s + asked["seconds"]
    loop = asyncio.get_running_loop()
    made = [
        await loop.create_connection(
            lambda: _Connection(head.encode() + b"\r\n" + content, end_s, begin_s), "127.0.0.1", port
        )
        for _ in range(asked["clients"])
    ]
    await asyncio.sleep(begin_s - time.perf_counter())
    print(json.dumps({"begun": True}), flush=True)
    cpu_s = time.process_time()
    await asyncio.gather(*(connection.done for _, connection in made))
    seconds = sorted(second for _, connection in made for second in connection.seconds)
    return {
        "requests": len(seconds),
        "wall_s": time.perf_counter() - begin_s,
        "client_cpu_s": time.process_time() - cpu_s,
        "p50_s": seconds[len(seconds) // 2] if seconds else None,
        "p99_s": seconds[len(seconds) * 99 // 100] if seconds else None,
        "failed": [message for _, connection in made for message in connection.failed],
        "body": base64.b64encode(made[0][1].body).decode(),
    }


def main() -> None:
    port = int(sys.argv[1])
    for line in sys.stdin:
        print(json.dumps(asyncio.run(_load(port, json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
