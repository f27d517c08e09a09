"""`stack serve --repository`: bundles behind the Open Inference Protocol."""

import json as json_format
import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stack_core.abi.config import parse
from stack_core.abi.errors import ConfigError

if TYPE_CHECKING:
    from stack_serve.http.config import ServerConfig

__all__ = ["check_known", "serve_repository"]

_BODY_BYTES = 2**28  # tensors are larger than prompts
_OWN = {"access_log", "api_key", "api_key_file", "cors_origin", "json", "repository"}


def serve_repository(repository: Path, config: "ServerConfig", options: Mapping[str, Any], *, json: bool) -> None:
    """Serves a repository until the process is told to end.

    Raises:
      ConfigError: an option is given that bundles do not have, or the address is taken.
    """
    from stack_serve.http.server import HttpServer, listen  # imports what `stack --help` should not wait for
    from stack_serve.inference.config import InferenceConfig
    from stack_serve.inference.service import Service
    from stack_serve.inference.watching import scan
    from stack_serve.oip.served import InferenceApp

    own = {field.name for field in fields(InferenceConfig)}
    known = own | {field.name for field in fields(type(config))} | _OWN
    check_known(options, known, "for language models only. Leave them out with --repository")
    if "max_body_bytes" not in options:
        config = replace(config, max_body_bytes=_BODY_BYTES)
    inference = parse(InferenceConfig, {name: value for name, value in options.items() if name in own})
    scan(repository)  # raises before anything starts
    with listen(config) as listener:
        service = Service(repository, inference)
        app = InferenceApp(service, config)

        def announce(address: str) -> None:
            live = [f"{key.model} {key.version}" for key in sorted(service.lanes)]
            if json:
                ready = {"address": address, "grpc_port": app.grpc_port, "models": live, "process": os.getpid()}
                print(json_format.dumps(ready), flush=True)
            _say(f"{', '.join(live) or 'nothing yet'} is served at {address}/v2")
            for key, version in sorted(service.versions.items()):
                if version.reason:
                    _say(f"{key.model} {key.version} is not served: {version.reason}")

        # So long a lane waits for the event loop, once the device is done; 5 ms by default.
        sys.setswitchinterval(0.001)
        HttpServer(app, listener, config, announce=announce).run()
        if service.is_busy:
            sys.stdout.flush()
            os._exit(0)  # nothing interrupts a compilation or a program that is running


def check_known(options: Collection[str], known: Collection[str], problem: str) -> None:
    """Raises ConfigError if an option is given that would do nothing."""
    if foreign := sorted(set(options).difference(known)):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in foreign)
        raise ConfigError(f"{names}: {problem}.")


def _say(message: str) -> None:
    print(f"stack: {message}", file=sys.stderr, flush=True)
