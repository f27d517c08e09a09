"""Agents as processes of this machine, for trials and for one machine with several devices."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from typing import IO

from stack_core.abi.launchers import Invitation
from stack_core.runtime.agent import invitation_json
from stack_core.runtime.config import ClusterConfig

__all__ = ["ProcessesLauncher"]

_LAST_WORDS_BYTES = 2000


class _TailReader:
    """Reads a pipe to its end in a thread and keeps its last bytes. An unread pipe would block its writer when full."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._tail = bytearray()
        self._thread = threading.Thread(target=self._read, args=(stream,), name="stack-agent-stderr", daemon=True)
        self._thread.start()

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            while data := os.read(stream.fileno(), 2**16):
                self._tail += data
                del self._tail[:-_LAST_WORDS_BYTES]

    def tail(self) -> bytes:
        """Returns the last bytes of the stream, which its writer has closed or closes soon."""
        self._thread.join(1.0)
        return bytes(self._tail)


class ProcessesLauncher:
    """A launcher that starts each agent in its own session, out of reach of Ctrl-C and the driver's end."""

    def __init__(self, config: ClusterConfig) -> None:
        self._agents: dict[int, subprocess.Popen[bytes]] = {}
        self._readers: dict[int, _TailReader] = {}

    def start(self, host: int, invitation: Invitation) -> None:
        self._reap(host)
        command = [sys.executable, "-m", "stack_core.runtime.agent"]
        agent = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._agents[host] = agent
        assert agent.stdin is not None and agent.stderr is not None, "they are pipes"
        self._readers[host] = _TailReader(agent.stderr)
        with contextlib.suppress(BrokenPipeError):  # it has already exited; `problem` reports the cause
            agent.stdin.write(invitation_json(invitation).encode())
            agent.stdin.close()

    def end(self, host: int, pid: int | None) -> None:
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._reap(host, kill=True)

    def problem(self, host: int) -> str | None:
        agent = self._agents.get(host)
        if agent is None or agent.poll() is None:
            return None
        message = self._readers[host].tail().decode(errors="replace").strip()
        return f"its agent exited with status {agent.returncode}: {message or 'without a message'}"

    def close(self) -> None:
        for host in tuple(self._agents):
            self._reap(host)

    def _reap(self, host: int, *, kill: bool = False) -> None:
        agent = self._agents.get(host)
        if agent is None:
            return
        if kill:
            agent.kill()
        # A released agent ends soon; waiting briefly avoids a zombie process.
        elif agent.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(2)
        if kill:
            agent.wait()
        agent.returncode = agent.returncode if agent.returncode is not None else 0  # it may outlive this process
        del self._agents[host]
