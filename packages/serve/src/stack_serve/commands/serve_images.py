"""`stack serve` of an image model: a server with OpenAI's `/v1/images/generations`."""

import json as json_format
import sys
from typing import TYPE_CHECKING

from stack_core.runtime.compile_cache import keep_compiled
from stack_serve.commands.collecting import resume_collections
from stack_serve.commands.messages import print_ready, say

if TYPE_CHECKING:
    from stack_serve.images.config import ImageServerConfig

__all__ = ["serve_images"]


def serve_images(address: str, config: "ImageServerConfig", *, json: bool) -> None:
    """Serves an image model until the process receives a signal to terminate.

    Raises:
      ConfigError: the address is in use, or Pillow is not installed.
      StackError: the model cannot be opened.
    """
    # These imports are too slow for `stack --help`.
    from stack_core.text.image_models import open_image_model
    from stack_serve.http.server import HttpServer, listen
    from stack_serve.images.engine import ImageEngine
    from stack_serve.images.service import ImageApp, ImageService

    with listen(config) as listener:  # fail on a used address before loading a large model
        keep_compiled()
        say(f"loading {address}")
        model = open_image_model(address)
        service = ImageService(model, config)

        def engine() -> ImageEngine:
            service.progress = "compiling"
            say("compiling the first programs; requests get status 503 until it is done")
            return ImageEngine(model, max_images=config.max_images, max_waiting=config.max_waiting)

        def announce(at: str) -> None:
            resume_collections()
            name = service.names[0]
            if json:
                print_ready(at, model=name)
            say(f"{name} is served at {at}/v1")
            if sys.stderr.isatty():
                body = json_format.dumps({"model": name, "prompt": "a red circle"})
                curl = f"curl {at}/v1/images/generations -H 'Content-Type: application/json' -d '{body}'"
                print(f"  in a browser:  {at}/\n  from a script: {curl}", file=sys.stderr, flush=True)

        HttpServer(ImageApp(service, engine), listener, config, announce=announce).run()
