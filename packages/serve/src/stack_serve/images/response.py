"""Response to a request for images: one JSON object, or a stream of server-sent events."""

import asyncio
import time
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from stack_core.text.image_models import ImageRequest
from stack_serve.images.encoding import encode_base64
from stack_serve.images.engine import ImageEngine, ImageJob, ImageUpdate
from stack_serve.images.metrics import ImageMetrics
from stack_serve.images.schemas import ImageBody
from stack_serve.openai.errors import ApiError, error_object
from stack_serve.openai.response import EVENTS, JSON, ResponseBody

__all__ = ["ImageResponse"]

# OpenAI's clients require these counts, although a denoiser computes no tokens.
_USAGE = {
    "input_tokens": 0,
    "output_tokens": 0,
    "total_tokens": 0,
    "input_tokens_details": {"image_tokens": 0, "text_tokens": 0},
}
_CUT_SHORT = ApiError(503, "The server ended the request before it was done. Send it again.")


class ImageResponse:
    """An ASGI application that answers one request.

    The images are cancelled when the client disconnects. The status is sent with the first event.

    Args:
      request: resolved settings of the images.
      running: responses that the service can cut short.
    """

    def __init__(
        self,
        body: ImageBody,
        request: ImageRequest,
        engine: ImageEngine,
        running: "set[ImageResponse]",
        metrics: ImageMetrics,
        timeout_s: float | None,
    ) -> None:
        self._body, self._request, self._engine = body, request, engine
        self._running, self._metrics, self._timeout_s = running, metrics, timeout_s
        self._updates: asyncio.Queue[ImageUpdate | ApiError | None] = asyncio.Queue()
        self._created = int(time.time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers.

        Raises:
          ApiError: the request failed before anything was sent.
          EngineBusy, EngineStopped: see `ImageEngine.submit`.
        """
        began_s, loop = time.monotonic(), asyncio.get_running_loop()

        def forward(update: ImageUpdate) -> None:
            if not loop.is_closed():  # the engine may deliver after the server has ended
                loop.call_soon_threadsafe(self._updates.put_nowait, update)

        body = self._body
        job = ImageJob(self._request, body.n, body.partial_images, forward)
        self._engine.submit(job)
        self._running.add(self)
        watcher = asyncio.create_task(self._watch(receive))
        content = ResponseBody(send, EVENTS if body.stream else JSON)
        try:
            async with asyncio.timeout(self._timeout_s):
                await (self._stream(content) if body.stream else self._send(content))
            self._metrics.request_s.observe(time.monotonic() - began_s)
        except TimeoutError:
            error = ApiError(
                504, f"The images were not done within {self._timeout_s} s. Ask for fewer or smaller ones."
            )
            await self._fail(content, error)
        except ApiError as error:
            await self._fail(content, error)
        finally:
            self._running.discard(self)
            self._engine.cancel(job)
            watcher.cancel()

    def cut_short(self) -> None:
        """Ends the response with an error."""
        self._updates.put_nowait(_CUT_SHORT)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._updates.put_nowait(None)

    async def _next(self) -> tuple[ImageUpdate, str] | None:
        """Returns the next update and its image in base64, or None if the client has left."""
        update = await self._updates.get()
        if update is None:
            return None
        if isinstance(update, ApiError):
            raise update
        if update.error is not None or update.pixels is None:
            raise ApiError(500, update.error or "The image failed.")
        body = self._body
        return update, await asyncio.to_thread(
            encode_base64, update.pixels, body.output_format, body.output_compression
        )

    async def _send(self, content: ResponseBody) -> None:
        images: dict[int, str] = {}
        while len(images) < self._body.n:
            if (found := await self._next()) is None:
                return
            images[found[0].index] = found[1]
        data = [{"b64_json": images[index]} for index in sorted(images)]
        answer = {"created": self._created, "data": data, **self._settings(), "usage": _USAGE}
        await content.add([orjson.dumps(answer)])
        await content.end()

    async def _stream(self, content: ResponseBody) -> None:
        finished = 0
        while finished < self._body.n:
            if (found := await self._next()) is None:
                return
            update, image = found
            event: dict[str, Any] = {
                "type": "image_generation.completed" if update.preview is None else "image_generation.partial_image",
                "b64_json": image,
                "created_at": self._created,
                "quality": "auto",
                **self._settings(),
                # Of n images, which OpenAI's events do not distinguish.
                "index": update.index,
                "step": update.step,
                "steps": update.steps,
            }
            if update.preview is None:
                finished += 1
                event["usage"] = _USAGE
            else:
                event["partial_image_index"] = update.preview
            await content.add([_event(event["type"], event)])
            await content.flush()
        await content.end()

    def _settings(self) -> dict[str, Any]:
        """Returns the members that describe the images."""
        height, width = self._request.size or (0, 0)
        return {
            "background": "opaque",
            "output_format": self._body.output_format,
            "size": f"{width}x{height}",
            "seed": self._request.seed,
        }

    async def _fail(self, content: ResponseBody, error: ApiError) -> None:
        """Ends a stream with an error event; raises the error if nothing was sent."""
        if not content.started:
            raise error
        await content.add([_event("error", {"type": "error", **error_object(error)})])
        await content.end()


def _event(name: str, value: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(value))
