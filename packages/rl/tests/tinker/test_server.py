"""The routes of the Tinker API refuse requests without a key, and large or incomplete bodies."""

import asyncio
import json

import pytest

from stack_rl.tinker import server
from stack_rl.tinker.local import LocalClient
from stack_rl.tinker.server import TinkerApp

CLIENT = object.__new__(LocalClient)  # no request here reaches the model


async def other(scope, receive, send):
    await send({"type": "http.response.start", "status": 204, "headers": []})


def answer(path, *messages, headers=(), api_keys=("tml-key",)):
    """Returns the status and the body of the response."""
    pytest.importorskip("google.protobuf")
    left, sent = iter(messages or ({"type": "http.request", "body": b""},)), []

    async def receive():
        return next(left)

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "path": path, "method": "POST", "headers": list(headers)}
    asyncio.run(TinkerApp(CLIENT, other, api_keys=api_keys)(scope, receive, send))
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


KEY = (b"x-api-key", b"tml-key")
HEALTH = "/api/v1/healthz"


def test_a_key_is_needed_for_all_paths():
    assert answer(HEALTH)[0] == answer("/v1/models", headers=[(b"x-api-key", b"tml-kez")])[0] == 401
    assert answer(HEALTH, headers=[KEY]) == (200, b'{"status": "ok"}')
    assert answer("/v1/models", headers=[(b"authorization", b"Bearer tml-key")])[0] == 204
    assert answer(HEALTH, api_keys=())[0] == 200


@pytest.mark.parametrize(
    ("messages", "status", "message"),
    [
        ([{"type": "http.request", "body": b"12345"}], 413, "the server takes: 4 bytes"),
        ([{"type": "http.request", "body": b"{}", "more_body": True}, {"type": "http.disconnect"}], 400, "closed"),
        ([{"type": "http.request", "body": b"[]"}], 400, "not a JSON object"),
    ],
)
def test_bodies_that_are_large_or_incomplete_are_refused(monkeypatch, messages, status, message):
    monkeypatch.setattr(server, "_LARGEST_BODY", 4)
    found, body = answer(HEALTH, *messages, headers=[KEY])
    assert found == status and message in json.loads(body)["error"]
