"""Captures on demand: an authenticated HTTP server on the loopback interface of the profiled process."""

import contextlib
import json
import os
import secrets
import socketserver
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field

from stack_core.abi.config import config, parse
from stack_core.abi.errors import ConfigError
from stack_core.runtime.http import KeyCheck
from stack_profile.captures.addresses import Address, forget, publish
from stack_profile.captures.capture import Capture
from stack_profile.captures.recording import backend_started
from stack_profile.captures.stacks import HIGHEST_HZ, STACKS_HZ
from stack_profile.errors import CaptureError

__all__ = ["LOOPBACK", "CaptureRequest", "Listener", "listen"]

LOOPBACK: Final = "127.0.0.1"
# Requests are small; a larger one is cut off instead of filling the memory.
_LARGEST_BYTES: Final = 1 << 16
_CLOSED_S: Final = 1.0  # interval at which the closing thread checks for a closed listener


@config
class CaptureRequest:
    """Request that `stack profile attach` sends.

    Attributes:
      out: directory of the capture, an absolute path.
      name: name of the capture; processes captured together share it.
      duration_s: seconds to capture, at most a day; fewer if the process ends earlier.
      host_tracer_level, stacks_hz: see `stack_profile.capture`.
    """

    out: str
    name: Annotated[str, Field(pattern=r"^[\w.-]+$")]
    duration_s: Annotated[float, Field(gt=0, le=86_400)]
    host_tracer_level: Annotated[int, Field(ge=1, le=3)] = 2
    stacks_hz: Annotated[float, Field(ge=0, le=HIGHEST_HZ)] = STACKS_HZ


def listen(*, port: int = 0, run: Path | None = None) -> "Listener":
    """Lets `stack profile attach` capture this process from now on, until it ends or `close` is called.

    The server listens only on the loopback interface. Requests need a random token from a file that only this user can
    read.

    Args:
      port: port to listen on, 0 for any free one.
      run: directory of the run that this process computes, by which `stack profile attach` finds it.

    Raises:
      CaptureError: the port is in use, or the address of this process cannot be published.
    """
    return Listener(port, run)


class Listener:
    """Server that captures this process on demand.

    Attributes:
      address: published address.
      path: file with the address, removed when the listener closes or the process ends.
    """

    def __init__(self, port: int, run: Path | None = None) -> None:
        self._closing = threading.Event()
        try:
            self._server = _Server((LOOPBACK, port), _Handler)
        except (OSError, OverflowError) as error:
            raise CaptureError(
                f"Cannot listen on port {port} of {LOOPBACK}: {str(error).rstrip('.')}. Name another port, or 0 for "
                "any free one."
            ) from error
        self._server.listener = self
        place = os.getpid(), self._server.server_address[1]
        self.address = Address(*place, secrets.token_hex(32), tuple(sys.argv), str(run.resolve()) if run else "")
        try:
            self.path = publish(self.address)
        except CaptureError:
            self._server.server_close()
            raise
        self._serving = threading.Thread(target=self._server.serve_forever, name="capture-listen", daemon=True)
        self._serving.start()
        # This thread is not a daemon: it outlives the main thread and writes a capture that is running when the program
        # ends.
        threading.Thread(target=self._close_at_end, name="capture-listen-end").start()

    def close(self) -> None:
        """Stops listening; a running capture is cut short and written. Later calls do nothing."""
        if self._closing.is_set():
            return
        # Ends a running capture: `server_close` waits for its answer.
        self._closing.set()
        forget(self.path)
        self._server.shutdown()
        self._server.server_close()  # waits for open requests

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def capture(self, request: CaptureRequest) -> dict[str, Any]:
        """Captures this process, and blocks until the trace is written.

        Raises:
          CaptureError: a capture is running, JAX has not started a device, or the trace cannot be written.
        """
        # The capture would otherwise start the devices, which the program may still configure.
        if not backend_started():
            raise CaptureError("The process has used no device of JAX yet. Attach once it has.")
        # The process ID separates processes of one host, which may be different programs.
        captured = Capture(
            Path(request.out),
            name=request.name,
            process=os.getpid(),
            host_tracer_level=request.host_tracer_level,
            stacks_hz=request.stacks_hz,
        )
        captured.start()
        started_s = time.monotonic()
        partial = None
        if self._closing.wait(request.duration_s):
            partial = f"the process ended {time.monotonic() - started_s:.3g} s into {request.duration_s:g} s"
        # Waiting for arrays would only lengthen the capture, since the program keeps computing.
        captured.stop(settle=False, about={"partial": partial} if partial else {})
        return {"path": str(captured.wait()), "partial": partial}

    def _close_at_end(self) -> None:
        main = threading.main_thread()
        while main.is_alive() and not self._closing.is_set():
            main.join(_CLOSED_S)
        self.close()


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    listener: Listener


class _Handler(BaseHTTPRequestHandler):
    """Handler that checks the token of every request and answers in JSON."""

    timeout = 5  # seconds; an idle connection would otherwise keep the process from ending

    def do_GET(self) -> None:
        if self._is_allowed():
            self._answer(HTTPStatus.OK, {"pid": os.getpid()})

    def do_POST(self) -> None:
        if not self._is_allowed():
            return
        try:
            size = int(self.headers.get("Content-Length", ""))
            request = parse(CaptureRequest, json.loads(self.rfile.read(min(max(size, 0), _LARGEST_BYTES))))
            self._answer(HTTPStatus.OK, self._listener.capture(request))
        except (ValueError, ConfigError) as error:
            self._answer(HTTPStatus.BAD_REQUEST, {"error": str(error)})
        except CaptureError as error:
            self._answer(HTTPStatus.CONFLICT, {"error": str(error)})

    @property
    def _listener(self) -> Listener:
        assert isinstance(self.server, _Server), "only a listener's server has this handler"
        return self.server.listener

    def _is_allowed(self) -> bool:
        allowed = KeyCheck((self._listener.address.token,))(
            {b"authorization": self.headers.get("Authorization", "").encode()}
        )
        if not allowed:
            self._answer(HTTPStatus.UNAUTHORIZED, {"error": "The token is not that of this process."})
        return allowed

    def _answer(self, status: HTTPStatus, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        with contextlib.suppress(ConnectionError):  # the client has gone
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002, the base class calls it so
        """Logs nothing, since standard error belongs to the profiled program."""
