"""Blocking calls: their time limit, and that one that hangs neither keeps its place nor the process."""

import asyncio
import subprocess
import sys
import time

import pytest

from stack_rl.threads import Threads


def test_a_time_limit_counts_from_the_start_of_a_call():
    """All of 40 calls of 0.1 s end in a limit of 1 s, though the last waits 2 s for its place."""
    threads = Threads(2)

    async def calls():
        return await asyncio.gather(*(threads.run(lambda: time.sleep(0.1), timeout_s=1.0) for _ in range(40)))

    assert asyncio.run(calls()) == [None] * 40
    assert asyncio.run(calls()) == [None] * 40  # on another event loop


def test_a_call_that_exceeds_its_time_gives_up_its_place():
    threads = Threads(1)

    async def calls():
        with pytest.raises(TimeoutError):
            await threads.run(lambda: time.sleep(3), timeout_s=0.1)
        return await threads.run(lambda: "next", timeout_s=1.0)

    begun_s = time.monotonic()
    assert asyncio.run(calls()) == "next" and time.monotonic() - begun_s < 2.5


HANGS = """
import asyncio, threading
from stack_rl.environments.tool_execution import ThreadExecution, ToolTimedOut
from stack_rl.environments.tool_functions import Tool
from stack_rl.episodes import EventLoop
from stack_rl.threads import Threads

def hang():
    threading.Event().wait()

async def hang_elsewhere():
    await asyncio.to_thread(hang)

async def call(name):
    tools = {each.__name__: Tool(each.__name__, each) for each in (hang, hang_elsewhere)}
    try:
        await ThreadExecution(tools, 0.1, Threads(1)).episode().call(name, {})
    except ToolTimedOut as error:
        print(error)

loop = EventLoop()
loop.run([call("hang"), call("hang_elsewhere")])
loop.close()
print("ends")
"""


def test_a_tool_that_hangs_does_not_keep_the_process():
    ended = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    said = [f"{name!r} did not return within 0.1 s." for name in ("hang", "hang_elsewhere")]
    assert sorted(ended.stdout.splitlines()) == sorted(["ends", *said])
