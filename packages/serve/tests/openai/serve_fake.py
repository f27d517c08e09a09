"""A server of the fake engine in a process of its own: `python serve_fake.py DRAIN_S [slow|broken|stuck]`."""

import sys
import time
from collections.abc import Iterator

from fake_engine import FakeEngine, checkpoint, letters

from stack_core.abi.errors import ConfigError
from stack_core.abi.generation import GenerationRequest
from stack_serve.http.server import HttpServer, listen
from stack_serve.openai.config import OpenAIConfig
from stack_serve.openai.lifecycle import OpenAIApp
from stack_serve.openai.service import Service


class Starting(FakeEngine):
    def warm_up(self) -> None:
        if "slow" in sys.argv:
            time.sleep(60)
        if "broken" in sys.argv:
            raise ConfigError("The engine cannot start.")


def stuck(request: GenerationRequest, index: int) -> Iterator[int]:
    yield 97
    time.sleep(60)


config = OpenAIConfig(port=0, drain_s=float(sys.argv[1]))
listener = listen(config)
sys.stdout.write(f"{listener.getsockname()[1]}\n")
sys.stdout.flush()
engine = Starting(stuck if "stuck" in sys.argv else letters, step_s=0.02, most=10_000)
server = HttpServer(
    OpenAIApp(Service(checkpoint(), config), lambda: engine),
    listener,
    config,
    announce=lambda address: (sys.stdout.write(f"{address}\n"), sys.stdout.flush()),
)
try:
    server.run()
except ConfigError as error:
    sys.exit(f"refused: {error}")
