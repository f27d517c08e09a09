"""Execution of tool calls with a time limit, on threads or in processes that can be killed."""

import asyncio
import contextlib
import functools
import inspect
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, runtime_checkable

from stack_core.abi.errors import EnvironmentFailed
from stack_rl.environments.tool_functions import Tool
from stack_rl.environments.tool_results import ToolResult, as_content
from stack_rl.threads import Threads

__all__ = ["EpisodeTools", "ProcessExecution", "ThreadExecution", "ToolExecution", "ToolFailed", "ToolTimedOut"]

_START_S: Final = 120.0  # imports of a user's modules may take long on a busy machine


_EPISODES = itertools.count()  # numbers that tell a process which episode's state a call uses


class ToolFailed(Exception):
    """Raised with the text of a tool's error for the policy."""


class ToolTimedOut(ToolFailed):
    """Raised if a tool exceeds its time limit."""


@runtime_checkable
class EpisodeTools(Protocol):
    """The tools of one episode, with their state."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Returns the result of a call as the content of a message.

        Raises:
          ToolFailed: the tool raised, ended its process or exceeded its time limit, after which its state is lost.
        """
        ...

    async def close(self) -> None: ...


@runtime_checkable
class ToolExecution(Protocol):
    """Executes the tools of all episodes."""

    def episode(self) -> EpisodeTools: ...


def _timed_out(name: str, limit_s: float, *, loses_state: bool) -> ToolTimedOut:
    lost = ". The tools start again and have lost their state" if loses_state else ""
    return ToolTimedOut(f"{name!r} did not return within {limit_s:g} s{lost}.")


def _caught(function: Callable[..., Any], arguments: Mapping[str, Any]) -> ToolResult | Exception:
    """Returns a result as the content of a message, or the exception, which may be a TimeoutError of the tool's own."""
    try:
        return as_content(function(**arguments))
    except Exception as error:  # tools are user code and may raise any exception
        return error


async def _caught_async(function: Callable[..., Any], arguments: Mapping[str, Any]) -> ToolResult | Exception:
    try:
        return as_content(await function(**arguments))
    except Exception as error:  # tools are user code and may raise any exception
        return error


@dataclass
class ThreadExecution:
    """Runs tools in this process: functions on threads, async functions on the event loop of the episodes.

    Attributes:
      tools: tools by name.
      limit_s: time limit of a call, from its start.
      threads: threads of the functions. The thread of a call that exceeds its limit cannot be stopped.
    """

    tools: Mapping[str, Tool]
    limit_s: float
    threads: Threads

    def episode(self) -> EpisodeTools:
        return _ThreadEpisode(self)


@dataclass
class _ThreadEpisode:
    execution: ThreadExecution
    _instances: dict[type, Any] = field(default_factory=dict)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        tool, limit_s = self.execution.tools[name], self.execution.limit_s
        try:
            function = tool.function if tool.owner is None else getattr(self._instance(tool.owner), name)
            if inspect.iscoroutinefunction(function):
                async with asyncio.timeout(limit_s):
                    found = await _caught_async(function, arguments)
            else:
                call = functools.partial(_caught, function, arguments)
                found = await self.execution.threads.run(call, timeout_s=limit_s)
        except TimeoutError as error:
            # The call may still use its instance, so the episode continues with another one.
            self._instances.clear()
            raise _timed_out(name, limit_s, loses_state=tool.owner is not None) from error
        except Exception as error:  # the constructor of a user's class may raise any exception
            found = error
        if isinstance(found, Exception):
            raise ToolFailed(f"{type(found).__name__}: {found}") from found
        return found

    def _instance(self, owner: type) -> Any:
        if owner not in self._instances:
            self._instances[owner] = owner()
        return self._instances[owner]

    async def close(self) -> None:
        for each in self._instances.values():
            if hasattr(each, "close"):
                found = each.close()
                if inspect.isawaitable(found):
                    await found


class ProcessExecution:
    """Runs tools in processes, which are killed with their children if a call exceeds its time limit.

    Functions share at most `at_once` processes. An episode with tools that have state has a process of its own from its
    first call to its end. Processes without an episode are used again.

    Args:
      tools: tools by name, all of which can be imported by their address.
      limit_s: time limit of a call, from its start in a process that is ready.
      at_once: maximum number of calls at a time.
    """

    def __init__(self, tools: Mapping[str, Tool], *, limit_s: float, at_once: int) -> None:
        self.limit_s, self.has_state = limit_s, any(each.owner is not None for each in tools.values())
        self._order = [[name, each.address, each.owner is not None] for name, each in tools.items()]
        self._at_once = at_once
        # By event loop, because sockets and semaphores belong to one.
        self._idle: weakref.WeakKeyDictionary[Any, list[_Process]] = weakref.WeakKeyDictionary()
        self._places: weakref.WeakKeyDictionary[Any, asyncio.Semaphore] = weakref.WeakKeyDictionary()

    def episode(self) -> EpisodeTools:
        return _ProcessEpisode(self)

    @property
    def place(self) -> asyncio.Semaphore:
        """Semaphore of the calls of the running event loop."""
        return self._places.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._at_once))

    async def process(self) -> "_Process":
        """Returns an idle process, or a new one with imported tools.

        Raises:
          EnvironmentFailed: the process cannot import the tools.
        """
        idle = self._idle.setdefault(asyncio.get_running_loop(), [])
        while idle:
            if (found := idle.pop()).is_alive:
                return found
        process = _Process()
        try:
            async with asyncio.timeout(_START_S):
                failure = await process.ask(self._order)
        except (OSError, TimeoutError, EOFError) as error:
            process.kill()
            raise EnvironmentFailed(f"the process of the tools did not start: {type(error).__name__}") from error
        if failure is not None:
            process.kill()
            raise EnvironmentFailed(f"the process of the tools cannot import them: {failure}")
        return process

    def put_back(self, process: "_Process") -> None:
        self._idle.setdefault(asyncio.get_running_loop(), []).append(process)


class _Process:
    """A process of `tool_worker` and its socket. The process is killed with this object."""

    def __init__(self) -> None:
        self._socket, other = socket.socketpair()
        self._socket.setblocking(False)
        command = [sys.executable, "-m", "stack_rl.environments.tool_worker", str(other.fileno())]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with other:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[other.fileno()], env=environment, start_new_session=True
            )
        self.kill = weakref.finalize(self, _kill, self._process, self._socket)

    @property
    def is_alive(self) -> bool:
        return self.kill.alive and self._process.poll() is None

    async def ask(self, message: Any) -> Any:
        """Sends a message and returns the answer.

        Raises:
          EOFError, OSError: the process has ended.
        """
        loop, content = asyncio.get_running_loop(), json.dumps(message).encode()
        await loop.sock_sendall(self._socket, len(content).to_bytes(4) + content)
        size_bytes = int.from_bytes(await self._read(4))
        return json.loads(await self._read(size_bytes))

    async def _read(self, size_bytes: int) -> bytes:
        parts = []
        while size_bytes:
            part = await asyncio.get_running_loop().sock_recv(self._socket, min(size_bytes, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            size_bytes -= len(part)
        return b"".join(parts)


def _kill(process: "subprocess.Popen[bytes]", channel: socket.socket) -> None:
    channel.close()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the process leads a session, with the children of its tools
    process.wait()


class _ProcessEpisode:
    def __init__(self, execution: ProcessExecution) -> None:
        self._execution, self._number = execution, next(_EPISODES)
        self._process: _Process | None = None

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        execution = self._execution
        async with execution.place:
            process = self._process or await execution.process()
            self._process = process
            message = [self._number, name, arguments]
            try:
                async with asyncio.timeout(execution.limit_s):
                    is_result, text = await process.ask(message)
            except TimeoutError as error:
                self._drop(process)
                raise _timed_out(name, execution.limit_s, loses_state=execution.has_state) from error
            except (OSError, EOFError) as error:
                self._drop(process)
                raise ToolFailed(f"{name!r} ended its process.") from error
            except asyncio.CancelledError:
                self._drop(process)  # its answer would be read as the answer to the next call
                raise
        if not execution.has_state:
            self._process = None
            execution.put_back(process)
        if not is_result:
            raise ToolFailed(text)
        return text

    def _drop(self, process: _Process) -> None:
        process.kill()
        self._process = None

    async def close(self) -> None:
        """Ends the state, and puts the process back for another episode."""
        process = self._process
        if process is None:
            return
        try:
            async with asyncio.timeout(self._execution.limit_s):
                await process.ask([None, None, {}])
        except (OSError, EOFError, TimeoutError):
            self._drop(process)
            return
        self._process = None
        self._execution.put_back(process)
