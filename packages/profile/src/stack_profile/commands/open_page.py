"""`stack profile open`: serves the reports of a run's captures to the browser of this machine."""

import json as json_format
import os
import sys
import webbrowser
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stack_profile.commands.printing import PrintJson

__all__ = ["open_page"]


def open_page(
    run: Annotated[Path, Parameter(help="directory of a run or of captures, or a file *.xplane.pb.")],
    /,
    *,
    port: int = 0,
    browser: bool = True,
    limit: Annotated[int, Parameter(help="rows of a table, 0 for all.")] = 200,
    json: PrintJson = False,
    events: Annotated[int, Parameter(help="events of the timeline; the shortest beyond are left out.")] = 1_000_000,
) -> None:
    """Serve the reports of a run's captures on this machine, until Ctrl-C.

    The address is printed and opened in the browser. With several captures it lists them, the newest first. It is
    reachable from this machine only.

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
        print(f"stack: serves {len(captures)} captures of {str(run)!r}; Ctrl-C ends it.", file=sys.stderr)
    try:
        if browser and _has_display():
            webbrowser.open(server.address)
        server.serve()
    except KeyboardInterrupt:
        pass  # the usual end
    finally:
        server.close()


def _has_display() -> bool:
    # Without a display, Python would start a text browser in this terminal.
    return sys.platform != "linux" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")))
