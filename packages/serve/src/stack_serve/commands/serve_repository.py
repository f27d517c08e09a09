"""`stack serve --repository`: a server of bundles with the Open Inference Protocol."""

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stack_core.abi.config import parse
from stack_serve.commands.collecting import resume_collections
from stack_serve.commands.messages import print_ready, say
from stack_serve.commands.options import check_known, select_options

if TYPE_CHECKING:
    from stack_serve.http.config import ServerConfig

__all__ = ["serve_repository"]

_BODY_BYTES = 2**28  # larger than the default of ServerConfig because requests contain tensors
_OWN = {"access_log", "api_key", "api_key_file", "cors_origin", "json", "repository"}


def serve_repository(repository: Path, config: "ServerConfig", options: Mapping[str, Any], *, json: bool) -> None:
    """Serves a repository until the process receives a signal to terminate.

    Raises:
      ConfigError: an option applies to language models only, or the address is in use.
    """
    # These imports are too slow for `stack --help`.
    from stack_serve.http.server import HttpServer, listen
    from stack_serve.inference.config import InferenceConfig
    from stack_serve.inference.service import Service
    from stack_serve.inference.watching import scan
    from stack_serve.oip.served import InferenceApp

    own = select_options(InferenceConfig, options)
    known = own.keys() | select_options(type(config), options).keys() | _OWN
    check_known(options, known, "for language models only. Leave them out with --repository")
    if "max_body_bytes" not in options:
        config = replace(config, max_body_bytes=_BODY_BYTES)
    inference = parse(InferenceConfig, own)
    scan(repository)  # fail on a bad repository before the server starts
    with listen(config) as listener:
        service = Service(repository, inference)
        app = InferenceApp(service, config)

        def announce(address: str) -> None:
            resume_collections()
            live = [f"{key.model} {key.version}" for key in sorted(service.lanes)]
            if json:
                print_ready(address, grpc_port=app.grpc_port, models=live)
            say(f"{', '.join(live) or 'nothing yet'} is served at {address}/v2")
            for key, version in sorted(service.versions.items()):
                if version.reason:
                    say(f"{key.model} {key.version} is not served: {version.reason}")

        # Limits how long a lane waits for the event loop to release the GIL after the device finishes (default 5 ms).
        sys.setswitchinterval(0.001)
        HttpServer(app, listener, config, announce=announce).run()
        if service.is_busy:
            sys.stdout.flush()
            os._exit(0)  # a running compilation or program cannot be interrupted
