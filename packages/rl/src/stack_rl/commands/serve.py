"""`stack rl serve`: trains and samples adapters of a model for clients of the Tinker API."""

import asyncio
import contextlib
import json as json_format
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from stack_core.abi.plugins import registries

__all__ = ["serve"]

_SERVER = "openai"


def serve(
    model: str,
    /,
    *,
    output: Path = Path("tinker"),
    port: Annotated[int, Parameter(validator=Number(gte=0, lte=65535))] = 8000,
    max_rank: Annotated[int, Parameter(validator=Number(gte=1))] = 32,
    api_key: tuple[str, ...] = (),
    model_name: str | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Train and sample adapters of a model with the Tinker SDK: stack rl serve runs/chat --port 8000

    Clients of the Tinker API, such as the package tinker, create adapters, sample from the adapters, and train them in
    their own loop. Each client has its adapters, and all share the model's parameters. The server listens on 127.0.0.1
    and also serves the base model through OpenAI's API.

    Args:
      model: the base model: a run, or another address that `stack generate` takes.
      output: directory of the weights that clients save; a restarted server finds them there.
      port: port to listen on; 0 picks a free port.
      max_rank: maximum rank of adapters.
      api_key: key that clients must send (TINKER_API_KEY), which the SDK requires to begin with "tml-"; may be
        repeated. Without it, all keys are accepted.
      model_name: model name for clients (the name of the checkpoint).
      json: when ready, print the address, model and process id to standard output as JSON.
    """
    from stack_core.runtime.compile_cache import keep_compiled

    # These imports are too slow for `stack --help`.
    from stack_rl.tinker.local import LocalClient
    from stack_rl.tinker.server import TinkerApp

    if _SERVER not in registries.chat_servers:
        raise registries.chat_servers.unknown(_SERVER)
    keep_compiled()
    print(f"stack: loading {model}", file=sys.stderr)
    with LocalClient(model, max_rank=max_rank, directory=output, model_name=model_name) as client:
        make_server = registries.chat_servers[_SERVER]
        wrap = lambda other: TinkerApp(client, other, api_keys=api_key)
        server = make_server(
            client.checkpoint, client.engine, max_tokens=client.checkpoint.max_positions, middleware=wrap
        )
        asyncio.run(_serve(server, port, client.base_model, json=json))


async def _serve(server: Any, port: int, model: str, *, json: bool) -> None:
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    address = (await server.start(port)).removesuffix("/v1")
    # uvicorn installs handlers of its own when it starts.
    for each in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(each, stopped.set)
    if json:
        print(json_format.dumps({"address": address, "model": model, "process": os.getpid()}), flush=True)
    print(
        f"stack: adapters of {model} are trained and sampled at {address}\n"
        f'  TINKER_BASE_URL={address} TINKER_API_KEY=tml-local python -c "import tinker; '
        f"print(tinker.ServiceClient().create_lora_training_client('{model}').result().get_info())\"",
        file=sys.stderr,
        flush=True,
    )
    await stopped.wait()
    await server.close()
