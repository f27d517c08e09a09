"""Traces of a server and its access control: cross-origin requests and API keys."""

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from stack_core.runtime.http import Keys
from stack_serve.http.config import ServerConfig
from stack_serve.http.traces import Traces, request_tracer

__all__ = ["guards"]


def guards(config: ServerConfig, *, open_paths: frozenset[str], refusal: ASGIApp) -> list[Middleware]:
    """Returns the middleware that a config asks for, the outermost first; see `Keys`."""
    found = [Middleware(Traces, tracer=request_tracer())] if config.traces else []
    # CORS comes first, because browsers send preflight requests without a key.
    if config.cors_origins:
        found.append(
            Middleware(CORSMiddleware, allow_origins=config.cors_origins, allow_methods=["*"], allow_headers=["*"])
        )
    if config.api_keys:
        found.append(Middleware(Keys, keys=config.api_keys, open_paths=open_paths, refusal=refusal))
    return found
