"""What clients of the two interfaces do not see: how the repository is watched and loaded."""

import asyncio
import contextlib
import os
import shutil
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from stack_serve.inference import service as module
from stack_serve.inference.config import InferenceConfig
from stack_serve.inference.repository import Key
from stack_serve.inference.service import Service
from stack_serve.inference.watching import scan


@pytest.mark.skipif(sys.platform != "linux", reason="other systems' file names are Unicode")
def test_files_may_have_names_that_are_not_utf_8(digits: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "digits"
    shutil.copytree(digits, bundle)
    before = scan(tmp_path)
    (bundle / os.fsdecode(b"caf\xe9")).touch()
    after = scan(tmp_path)
    assert before.keys() == after.keys() and before != after


def test_watching_goes_on_whatever_one_look_meets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def broken(repository: Path) -> None:
        nonlocal looks
        looks += 1
        raise ValueError("a name that cannot be")

    async def run() -> None:
        watching = asyncio.create_task(Service(tmp_path, InferenceConfig(poll_s=0.001)).watch())
        async with asyncio.timeout(20):
            while looks < 2 and not watching.done():
                await asyncio.sleep(0.001)
        assert watching.cancel()

    monkeypatch.setattr(module, "scan", broken)
    asyncio.run(run())
    assert looks >= 2


@pytest.mark.parametrize(
    ("begin", "states"),
    [
        pytest.param(lambda service: service.refresh(), [None, "READY"], id="ended"),
        pytest.param(lambda service: service.load("digits"), ["LOADING", "READY"], id="goes on"),
    ],
)
def test_a_load_whose_caller_is_cancelled(
    begin: Callable[[Service], Coroutine[Any, Any, None]],
    states: list[str | None],
    digits: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(digits, tmp_path / "digits")
    began, free = threading.Event(), threading.Event()
    load = module.load

    def slow(*arguments: Any, **options: Any) -> Any:
        began.set()
        assert free.wait(20)
        return load(*arguments, **options)

    monkeypatch.setattr(module, "load", slow)
    found: list[str | None] = []

    async def run() -> None:
        service = Service(tmp_path, InferenceConfig(poll_s=0))

        def look() -> None:
            version = service.versions.get(Key("digits", 1))
            found.append(version and version.state)

        loading = asyncio.create_task(begin(service))
        assert await asyncio.to_thread(began.wait, 20)
        loading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await loading
        look()
        free.set()
        await service.refresh()
        look()
        await service.close()

    asyncio.run(run())
    assert found == states
