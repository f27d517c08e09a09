"""A small server that speaks OpenAI's interface, and fails as it is told to by the name of the model."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

TOKEN_S = 0.002


class OpenAIServer:
    """Its answer is the numbers from 0, one a token; a word or an id is a token of a prompt, and three the template's.

    Models: "plain"; "busy" answers 429; "cut" breaks its streams off; "broken" has an error in them; "other" an event
    of another shape; "empty" no text; "uncounted" does not count tokens; "endless" never ends.

    Attributes:
      bodies: of the requests that it got.
      keys: their API keys.
      most: how many it had at once.
    """

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.most = 0
        self.connections: set[Any] = set()
        self._running = 0
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/completions", self._complete, methods=["POST"]),
            Route("/v1/chat/completions", self._complete, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "plain", "object": "model"}]})

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("authorization"))
        self.connections.add(request.client)
        if body["model"] == "busy":
            return JSONResponse({"error": {"message": "The queue is full.", "code": 429}}, status_code=429)
        return StreamingResponse(self._events(body), media_type="text/event-stream")

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        self._running += 1
        self.most = max(self.most, self._running)
        try:
            async for event in self._contents(body):
                yield b"data: " + json.dumps(event).encode() + b"\n\n"
            if body["model"] != "cut":
                yield b"data: [DONE]\n\n"
        finally:
            self._running -= 1

    async def _contents(self, body: dict[str, Any]) -> AsyncIterator[Any]:
        chat = "messages" in body
        prompt = body["messages"][-1]["content"] if chat else body["prompt"]
        count = 0
        while body["model"] != "empty" and (count < body.get("max_tokens", 8) or body["model"] == "endless"):
            await asyncio.sleep(TOKEN_S)
            text = f"{count} "
            yield {"choices": [{"index": 0, **({"delta": {"content": text}} if chat else {"text": text})}]}
            count += 1
            if body["model"] == "broken":
                yield {"error": {"message": "out of order"}}
            if body["model"] == "other":
                yield ["an", "array"]
            if body["model"] == "cut":
                return
        if body["model"] != "uncounted":
            tokens = len(prompt.split()) + 3 if isinstance(prompt, str) else len(prompt)
            yield {"choices": [], "usage": {"prompt_tokens": tokens, "completion_tokens": count}}


Server = tuple[OpenAIServer, str]
"""A server that runs, and its address."""


@contextmanager
def running(app: Any) -> Iterator[str]:
    """Serves an application on a free port until the end of the block; yields its address."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            threading.Event().wait(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join()
