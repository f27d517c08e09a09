"""`stack profile open`: serves the reports of a run's captures to the browser of this machine."""

import contextlib
import json as json_format
import os
import sys
import tempfile
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stack_profile.commands.printing import PageEvents, PageLimit, PrintJson

__all__ = ["open_page"]


def open_page(
    run: Annotated[Path, Parameter(help="directory of a run or of captures, or a file *.xplane.pb.")],
    /,
    *,
    port: int = 0,
    browser: bool = True,
    limit: PageLimit = 200,
    json: PrintJson = False,
    events: PageEvents = 1_000_000,
) -> None:
    """Serve the reports of a run's captures on this machine, until Ctrl-C.

    The address is printed and opened in the browser. If there are several captures, its page lists them, newest first.
    It is reachable from this machine only.

    Args:
      port: port to listen on, 0 for any free one.
      browser: open the address in the browser, if the machine has a display.
    """
    from stack_profile.report.served import ReportServer

    server = ReportServer(run, port=port, limit=limit, events=events)
    captures = [{"name": path.name, "address": server.address + place} for place, path in server.captures().items()]
    if json:
        print(json_format.dumps({"address": server.address, "captures": captures}, indent=2), flush=True)
    else:
        print(server.address, flush=True)
        number = "1 capture" if len(captures) == 1 else f"{len(captures)} captures"
        print(f"stack: serves {number} of {str(run)!r}; Ctrl-C ends it.", file=sys.stderr)
    with contextlib.ExitStack() as stack:
        stack.callback(server.close)
        stack.enter_context(contextlib.suppress(KeyboardInterrupt))  # the usual end
        if browser and _has_display():
            webbrowser.open(stack.enter_context(_redirection(server.address)))
        server.serve()


@contextlib.contextmanager
def _redirection(address: str) -> Iterator[str]:
    """Yields the address of a temporary file that redirects a browser, and that only the user can read.

    Other users of the machine can read the browser's arguments, which must not contain the token.
    """
    with tempfile.NamedTemporaryFile("w", prefix="stack-profile-", suffix=".html", encoding="utf-8") as file:
        file.write(f'<!doctype html>\n<meta charset="utf-8">\n<meta http-equiv="refresh" content="0; url={address}">\n')
        file.write(f'<title>Profile</title>\n<a href="{address}">Profile</a>\n')
        file.flush()
        yield Path(file.name).as_uri()


def _has_display() -> bool:
    # Without a display, Python would start a text browser in this terminal.
    return sys.platform != "linux" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")))
