"""`POST /sleep` and `/wake_up`."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from stack_core.abi.errors import GenerationError
from stack_serve.openai.sleep import Sleeper

from .conftest import Served
from .fake_engine import FakeEngine, letters


def test_requests_wait_for_the_engine_to_wake_up(serve: Callable[..., Served]) -> None:
    server = serve(sleep_mode=True)
    assert server.client.get("/is_sleeping").json() == {"is_sleeping": False}
    assert server.client.post("/sleep").status_code == 200
    assert server.client.get("/is_sleeping").json() == {"is_sleeping": True}
    assert server.client.post("/sleep?level=2").status_code == 200, "it sleeps already"
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/embeddings", {"input": "a"})):
        assert server.refused(path, 503, **body)["code"] == "sleeping"
    assert server.client.get("/health").status_code == 200 and server.client.get("/ready").status_code == 503
    assert server.client.post("/wake_up").status_code == server.client.post("/wake_up").status_code == 200
    server.complete()
    assert server.client.post("/sleep?level=2").status_code == 200
    assert server.engine.slept == [1, 0, 2]


def test_an_engine_that_is_busy_or_cannot_sleep_goes_on(serve: Callable[..., Served]) -> None:
    server = serve(FakeEngine(letters, step_s=0.02), sleep_mode=True)
    thread = threading.Thread(target=lambda: server.complete(max_tokens=100))
    thread.start()
    server.wait_until(lambda: bool(server.engine.submitted))
    answer = server.client.post("/sleep")
    assert answer.status_code == 409 and answer.json()["error"]["code"] == "engine_busy"
    thread.join()
    server.complete()

    class Restless(FakeEngine):
        def sleep(self, level: Any = 1) -> None:
            raise GenerationError("This engine cannot sleep.")

    restless = serve(Restless(), sleep_mode=True)
    assert restless.refused("/sleep")["message"] == "This engine cannot sleep."
    assert "level is '3'" in restless.refused("/sleep?level=3")["message"]
    restless.complete()


def test_a_request_that_is_cancelled_while_the_engine_falls_asleep_leaves_it_asleep(
    serve: Callable[..., Served],
) -> None:
    began, may_sleep = threading.Event(), threading.Event()

    class Slow(FakeEngine):
        def sleep(self, level: Any = 1) -> None:
            began.set()
            assert may_sleep.wait(60)
            super().sleep(level)

    server = serve(Slow(), sleep_mode=True)

    async def cancel() -> None:
        sleeping = asyncio.ensure_future(Sleeper(server.service).sleep("1"))
        await asyncio.to_thread(began.wait, 60)
        sleeping.cancel()
        await asyncio.wait([sleeping])
        may_sleep.set()

    asyncio.run(cancel())
    assert server.client.get("/is_sleeping").json() == {"is_sleeping": True}


def test_sleep_is_off_unless_it_is_allowed(serve: Callable[..., Served]) -> None:
    server = serve()
    for path in ("/sleep", "/wake_up"):
        assert "--sleep-mode" in server.refused(path, 403)["message"]
