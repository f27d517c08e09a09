"""Access control of a server: cross-origin requests and API keys."""

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from stack_core.runtime.http import Keys
from stack_serve.http.config import ServerConfig

__all__ = ["guards"]


def guards(config: ServerConfig, *, open_paths: frozenset[str], refusal: ASGIApp) -> list[Middleware]:
    """Returns the middleware that a config asks for, the outermost first; see `Keys`."""
    found = []
    # CORS comes first, because browsers send preflight requests without a key.
    if config.cors_origins:
        found.append(
            Middleware(CORSMiddleware, allow_origins=config.cors_origins, allow_methods=["*"], allow_headers=["*"])
        )
    if config.api_keys:
        found.append(Middleware(Keys, keys=config.api_keys, open_paths=open_paths, refusal=refusal))
    return found
