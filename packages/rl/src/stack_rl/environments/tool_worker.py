"""A process that executes tools for the environment `tools`: python -m stack_rl.environments.tool_worker FD.

Messages are JSON after their length as 4 bytes, on the socket FD. The first message is a list of [name, address,
is_method]; the answer is null, or an error. Then each message is [episode, name, arguments], and the answer is [true,
result] or [false, error]. Instances of classes belong to an episode: a message of another episode replaces them, and
one with the name null only ends the episode.
"""

import asyncio
import contextlib
import ctypes
import importlib
import inspect
import json
import os
import signal
import socket
import sys
from typing import Any

from stack_rl.environments.tool_results import ToolResult, as_content


def main() -> None:
    """Serves calls until the trainer closes the socket."""
    # PR_SET_PDEATHSIG: a tool that hangs ends with the trainer.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the trainer, which ends this process
    os.dup2(2, 1)  # a tool's printed text goes to the trainer's standard error
    with socket.socket(fileno=int(sys.argv[1])) as channel, asyncio.Runner() as runner:
        _serve(channel, runner)


def _serve(channel: socket.socket, runner: asyncio.Runner) -> None:
    tools = dict[str, tuple[Any, bool]]()
    try:
        for name, address, is_method in _receive(channel):
            module, _, path = address.partition(":")
            found: Any = importlib.import_module(module)
            for part in path.split("."):
                found = getattr(found, part)
            tools[name] = found, is_method
    except Exception as error:  # importing a user's module may raise any exception
        _send(channel, f"{type(error).__name__}: {error}")
        return
    _send(channel, None)
    current, instances = None, dict[Any, Any]()
    while (message := _receive(channel)) is not None:
        episode, name, arguments = message
        try:
            if episode != current:
                for each in instances.values():
                    if hasattr(each, "close"):
                        _value(each.close(), runner)
                current, instances = episode, dict[Any, Any]()
            result = "" if name is None else _call(tools[name], name, arguments, instances, runner)
        except Exception as error:  # tools are user code and may raise any exception
            _send(channel, [False, f"{type(error).__name__}: {error}"])
        else:
            _send(channel, [True, result])


def _call(
    tool: tuple[Any, bool], name: str, arguments: dict[str, Any], instances: dict[Any, Any], runner: asyncio.Runner
) -> ToolResult:
    target, is_method = tool
    if is_method:
        if target not in instances:
            instances[target] = target()
        target = getattr(instances[target], name)
    return as_content(_value(target(**arguments), runner))


def _value(found: Any, runner: asyncio.Runner) -> Any:
    """Returns a value, or the result of a coroutine."""

    async def wait() -> Any:
        return await found

    return runner.run(wait()) if inspect.isawaitable(found) else found


def _receive(channel: socket.socket) -> Any:
    """Returns a message; None at the end of the stream."""
    head = _read(channel, 4)
    return json.loads(_read(channel, int.from_bytes(head))) if head else None


def _read(channel: socket.socket, size_bytes: int) -> bytes:
    parts = []
    while size_bytes:
        part = channel.recv(min(size_bytes, 1 << 20))
        if not part:
            return b""
        parts.append(part)
        size_bytes -= len(part)
    return b"".join(parts)


def _send(channel: socket.socket, message: Any) -> None:
    content = json.dumps(message).encode()
    channel.sendall(len(content).to_bytes(4) + content)


if __name__ == "__main__":
    main()
