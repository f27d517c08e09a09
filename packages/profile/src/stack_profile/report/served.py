"""HTTP server of reports on the loopback interface, for the browser of this machine.

    /TOKEN/                  list of the captures, or the report of the only one
    /TOKEN/captures/NAME     report of a capture, built when it is requested

Other users of the machine can connect to the loopback interface, so the address contains a random token.
"""

import contextlib
import secrets
import threading
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit

from stack_core.abi.errors import StackError
from stack_core.report.document import document
from stack_core.report.fields import number
from stack_core.report.markup import Markup, element
from stack_profile.captures.processes import about_of
from stack_profile.errors import ProfileError, TraceError
from stack_profile.report.events import EVENTS
from stack_profile.report.page import page, sections
from stack_profile.traces.trace import capture_folders, load_trace, trace_files

__all__ = ["ReportServer"]

_LOOPBACK: Final = "127.0.0.1"
_CAPTURES: Final = "captures/"


class ReportServer:
    """Server of the reports of all captures under a directory. Captures that appear later are listed too.

    Attributes:
      address: address of the list of captures.
    """

    def __init__(self, path: Path, *, port: int = 0, limit: int = 200, events: int = EVENTS) -> None:
        """Starts to listen; `serve` answers.

        Args:
          path: directory of a run or of captures, or the file of a trace.
          port: port to listen on, 0 for any free one.
          limit, events: see `stack_profile.report.page.page`.

        Raises:
          TraceError: the path does not exist, or is a directory without captures.
          ProfileError: the port is in use.
        """
        self._path, self._limit, self._events = path.resolve(), limit, events
        trace_files(path)
        self._building = threading.Lock()
        self._built: tuple[Path, int, bytes] | None = None  # the last report, with the time of its trace
        self._token = secrets.token_urlsafe(16)
        try:
            self._server = _Server((_LOOPBACK, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ProfileError(
                f"Cannot listen on port {port} of {_LOOPBACK}: {str(error).rstrip('.')}. Name another port, or 0 for "
                "any free one."
            ) from error
        self._server.reports = self
        self.address = f"http://{_LOOPBACK}:{self._server.server_address[1]}/{self._token}/"

    def serve(self) -> None:
        """Answers requests until `close`, or until an exception such as KeyboardInterrupt."""
        self._server.serve_forever(poll_interval=0.1)

    def close(self) -> None:
        """Closes the port."""
        self._server.server_close()

    def captures(self) -> Mapping[str, Path]:
        """Returns the captures by their addresses relative to `address`, the newest first."""
        if self._path.is_file():
            return {f"{_CAPTURES}{quote(self._path.name)}": self._path}
        folders = capture_folders(self._path)
        return {f"{_CAPTURES}{quote(str(folder.relative_to(self._path.parent)))}": folder for folder in folders}

    def answer(self, address: str) -> tuple[HTTPStatus, str]:
        """Returns the status and the page of a requested path, or the target of a redirection."""
        place = urlsplit(address).path.removeprefix("/")
        token, _, name = place.partition("/")
        if not secrets.compare_digest(unquote(token).encode(), self._token.encode()):
            return HTTPStatus.NOT_FOUND, _message("Not found", "The address is not complete: copy all of it.")
        try:
            captures = self.captures()
            if not name and len(captures) == 1:
                return HTTPStatus.FOUND, next(iter(captures))
            if name and name not in captures:
                return HTTPStatus.NOT_FOUND, _message("Not found", f"There is no capture {unquote(name)!r} any more.")
            return HTTPStatus.OK, self._report(captures[name]) if name else _listing(self._path, captures)
        except (StackError, OSError) as error:
            return HTTPStatus.INTERNAL_SERVER_ERROR, _message("The trace cannot be shown", str(error))

    def _report(self, capture: Path) -> str:
        try:
            changed_ns = max(file.stat().st_mtime_ns for file in trace_files(capture))
        except (TraceError, FileNotFoundError) as error:  # a ring deletes its captures
            raise TraceError(
                f"{str(capture)!r} was deleted while it was read. Open the list of captures again."
            ) from error
        with self._building:
            if self._built is None or self._built[:2] != (capture, changed_ns):
                trace = load_trace(capture)
                found = page(trace, list(sections(trace)), limit=self._limit, events=self._events)
                self._built = capture, changed_ns, found.encode()
            return self._built[2].decode()


class _Server(ThreadingHTTPServer):
    daemon_threads = True  # a report that is being built does not delay the end
    reports: ReportServer


class _Handler(BaseHTTPRequestHandler):
    timeout = 10  # seconds

    def do_GET(self) -> None:
        assert isinstance(self.server, _Server), "only a server of reports has this handler"
        status, content = self.server.reports.answer(self.path)
        with contextlib.suppress(ConnectionError):  # the browser has gone
            self.send_response(status)
            if status is HTTPStatus.FOUND:
                self.send_header("Location", content)
                content = ""
            body = content.encode()
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("Referrer-Policy", "no-referrer")
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002, the base class calls it so
        """Logs nothing; the terminal shows only the address."""


def _message(heading: str, text: str) -> str:
    return document(heading, element("main", element("h1", heading), element("p", text, role="alert")))


def _listing(path: Path, captures: Mapping[str, Path]) -> str:
    titles = {"capture": None, "started, UTC": None, "size": "number"}
    heads = element("tr", *(element("th", text, class_=kind, scope="col") for text, kind in titles.items()))
    rows = []
    for address, folder in captures.items():
        with contextlib.suppress(TraceError, FileNotFoundError):  # a ring deleted it meanwhile
            rows.append(_row(address, folder))
    table = element("table", element("thead", heads), element("tbody", *rows))
    heading = element("header", element("h1", "Captures"), element("p", str(path), class_="source"))
    return document(f"Captures of {path}", heading, element("main", element("div", table, class_="wide")))


def _row(address: str, folder: Path) -> Markup:
    files = trace_files(folder)
    started = str(about_of(files[0]).get("started_at", "")).partition(".")[0].replace("T", " ")
    size = number("_bytes", sum(file.stat().st_size for file in files))
    return element(
        "tr",
        element("td", element("a", folder.name, href=address)),
        element("td", started or "-"),
        element("td", size, class_="number"),
    )
