"""Service of one image model, and its application: `POST /v1/images/generations` and the standard routes."""

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route

from stack_core.text.image_models import ImageModel, ImageRequest
from stack_serve.images.config import ImageServerConfig
from stack_serve.images.encoding import pillow
from stack_serve.images.engine import ImageEngine, ImageStats
from stack_serve.images.metrics import ImageMetrics
from stack_serve.images.response import ImageResponse
from stack_serve.images.schemas import ImageBody
from stack_serve.openai.application import ModelService, make_application, read_body
from stack_serve.openai.errors import bad_request
from stack_serve.openai.lifecycle import ModelApp
from stack_serve.openai.openapi import openapi_json
from stack_serve.page import image_page

__all__ = ["ImageApp", "ImageService"]


class ImageService(ModelService[ImageServerConfig, ImageMetrics]):
    """A served image model; used on one event loop.

    Raises:
      ConfigError: Pillow is not installed.
    """

    def __init__(self, model: ImageModel, config: ImageServerConfig) -> None:
        super().__init__(config.model_names or (model.name,), config)
        pillow()
        self.metrics = ImageMetrics(self.names[0], self.stats)
        self._model = model
        self._engine: ImageEngine | None = None
        self._running: set[ImageResponse] = set()

    def serve(self, engine: ImageEngine) -> None:
        """Takes requests from now on; called on the event loop."""
        self._engine = engine
        self.state = "ready"

    def stats(self) -> ImageStats | None:
        return None if self._engine is None else self._engine.stats()

    def openapi(self) -> bytes:
        return openapi_json(has_keys=bool(self.config.api_keys), images=True)

    def cut_short(self) -> None:
        """Cancels running requests; clients receive an error."""
        for response in list(self._running):
            response.cut_short()

    async def generate(self, request: Request) -> ImageResponse:
        """Returns the response to a request for images."""
        body = await read_body(request, self, ImageBody)
        assert self._engine is not None, "a ready service has an engine"
        self.check_model(body.model)
        self._check_limits(body)
        width, height = (None, None) if body.size == "auto" else map(int, body.size.split("x"))
        asked = ImageRequest(
            prompt=body.prompt,
            negative_prompt=body.negative_prompt,
            size=None if height is None or width is None else (height, width),
            steps=body.steps,
            guidance=body.guidance,
            embedded_guidance=body.embedded_guidance,
            seed=secrets.randbits(32) if body.seed is None else body.seed,
        )
        # In a thread, because the coefficients of many steps take a while.
        resolved = await asyncio.to_thread(self._model.resolve, asked)
        return ImageResponse(body, resolved, self._engine, self._running, self.metrics, self.config.timeout_s)

    def _check_limits(self, body: ImageBody) -> None:
        config = self.config
        pixels = 0
        if body.size != "auto":
            width, height = map(int, body.size.split("x"))
            pixels = width * height
        for name, value, limit, shown in (
            ("n", body.n, config.max_choices, "images"),
            ("steps", body.steps or 0, config.max_steps, "steps"),
            ("size", pixels, config.max_pixels, "pixels"),
        ):
            if value > limit:
                raise bad_request(f"{name} asks for {value} {shown}; this server allows {limit}.", param=name)
        if body.partial_images and not body.stream:
            raise bad_request("partial_images needs stream: true beside it.", param="partial_images")
        if body.output_compression is not None and body.output_format == "png":
            message = "output_compression is for jpeg and webp; png is lossless. Leave it out."
            raise bad_request(message, param="output_compression")


class ImageApp(ModelApp):
    """Application of an image model."""

    def __init__(self, service: ImageService, make_engine: Callable[[], Any]) -> None:
        super().__init__(make_image_app(service), service, make_engine)


def make_image_app(service: ImageService) -> Starlette:
    """Returns the ASGI application of an image model."""
    routes = [
        Route("/v1/images/generations", service.generate, methods=["POST"]),
        Route("/", image_page, methods=["GET"]),
    ]
    return make_application(service, routes)
