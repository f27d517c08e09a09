"""What clients of the two interfaces do not see: how the repository is watched and loaded."""

import asyncio
import os
import shutil
import sys
from pathlib import Path

import pytest

from stack_serve.inference import service as module
from stack_serve.inference.config import InferenceConfig
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
