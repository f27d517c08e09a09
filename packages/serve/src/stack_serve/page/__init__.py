"""Pages at `/` of `stack serve`: each is one file of HTML, style and script that sends requests only to this server."""

import base64
import functools
import hashlib
import re
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

__all__ = ["chat_page", "image_page"]


async def chat_page(request: Request) -> Response:
    """Returns the page of a language model."""
    return _response("chat.html")


async def image_page(request: Request) -> Response:
    """Returns the page of an image model."""
    return _response("images.html")


def _response(name: str) -> Response:
    """Returns a page. Its policy allows its own script and style, and requests to this server."""
    content, policy = _page(name)
    headers = {
        "Content-Security-Policy": policy,
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }
    return Response(content, headers=headers, media_type="text/html; charset=utf-8")


@functools.cache
def _page(name: str) -> tuple[bytes, str]:
    content = files(__name__).joinpath(name).read_bytes()
    script, style = (_digest(content, tag) for tag in (b"script", b"style"))
    return content, (
        f"default-src 'none'; script-src '{script}'; style-src '{style}'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _digest(page: bytes, tag: bytes) -> str:
    """Returns the digest of the page's only element of a kind, as a source of a content security policy."""
    found = re.search(rb"<%s>(.*?)</%s>" % (tag, tag), page, re.DOTALL)
    assert found is not None, "the page has one"
    return f"sha256-{base64.b64encode(hashlib.sha256(found[1]).digest()).decode()}"
