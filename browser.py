"""A real browser without a window, driven through a pipe; `conftest.py` has the fixture of the tests."""

import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe",
    "--disable-features=IsolateSandboxedIframes",
)  # fmt: skip
PATIENCE_S = 180.0


class Browser:
    """One tab, by the DevTools protocol: https://chromedevtools.github.io/devtools-protocol.

    Attributes:
      requested: the addresses of all that it loaded.
      complaints: exceptions of scripts, and what the page's policy or the browser had to say.
      traced: events of the last call of `trace`.
    """

    def __init__(self, commands, answers):
        self._commands, self._answers, self._buffer, self._last = commands, answers, b"", 0
        self._session = {}
        self.requested, self.complaints, self.traced = [], [], []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Network", "Runtime", "Log", "Page"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        number = self.send(method, **parameters)
        while (answer := self._read()).get("id") != number:
            self._note(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def send(self, method, **parameters):
        """Sends a request without waiting for its answer, which the next call skips."""
        self._last += 1
        request = {"id": self._last, "method": method, "params": parameters, **self._session}
        os.write(self._commands, json.dumps(request).encode() + b"\0")
        return self._last

    def open(self, path, address="", *, width=1280):
        """Loads a page from the start, also if only the part of its address after "#" is another."""
        self.call("Page.navigate", url="about:blank")
        self.requested.clear(), self.complaints.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=f"{path.as_uri()}{address}")
        self.wait_for("document.readyState === 'complete' && document.querySelector('#instrument')?.dataset.ready")
        self.drawn()

    def drawn(self):
        """Waits for two frames: in the first, the page draws what has changed."""
        frames = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"
        assert self.call("Runtime.evaluate", expression=frames, awaitPromise=True)["result"]["value"]

    def wait_for(self, condition):
        """Waits until an expression is true."""
        end = time.monotonic() + PATIENCE_S / 3
        while not self.evaluate(f"Boolean({condition})"):
            assert time.monotonic() < end, f"not in time: {condition}"
            time.sleep(0.02)

    def press(self, *keys):
        for key in keys:
            text = {"text": key} if len(key) == 1 else {}
            self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def mouse(self, kind, x, y, **more):
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def drag(self, start, end):
        pressed = {"button": "left", "buttons": 1, "clickCount": 1}
        self.mouse("mousePressed", *start, **pressed)
        for part in (0.5, 1.0):
            self.mouse("mouseMoved", *(a + (b - a) * part for a, b in zip(start, end, strict=True)), **pressed)
        self.mouse("mouseReleased", *end, **pressed)

    def evaluate(self, expression):
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def values(self, selector, expression):
        """Returns the value of a JavaScript expression for `each` element of a selector."""
        found = f"[...document.querySelectorAll({json.dumps(selector)})].map(each => {expression})"
        return json.loads(self.evaluate(f"JSON.stringify({found})"))

    def rows(self):
        """Returns the rows of the table in the report's panel, by the titles of the columns; numbers are exact."""
        heads = self.values(".panel .sums th", "each.textContent")
        number = "cell.dataset.value === undefined ? null : Number(cell.dataset.value)"
        cells = f"[...each.cells].map(cell => cell.className === 'number' ? ({number}) : cell.textContent)"
        return [dict(zip(heads, row, strict=True)) for row in self.values(".panel .sums tbody tr", cells)]

    def changed(self, action):
        """Calls `action`, waits until the part of the address after "#" changes, and returns it."""
        before = self.evaluate("location.hash")
        action()
        self.wait_for(f"location.hash !== {json.dumps(before)}")
        self.drawn()
        return unquote(self.evaluate("location.hash"))

    @contextlib.contextmanager
    def thread_time(self):
        """Yields a list that receives the processor seconds of the page's main thread in the block.

        Unlike wall time, they do not grow with the load of the machine.
        """
        found = []
        self.call("Performance.enable", timeDomain="threadTicks")
        started_s = self._task_s()
        yield found
        found.append(self._task_s() - started_s)
        self.call("Performance.disable")

    def _task_s(self):
        metrics = self.call("Performance.getMetrics")["metrics"]
        return next(each["value"] for each in metrics if each["name"] == "TaskDuration")

    @contextlib.contextmanager
    def trace(self, *categories):
        """Records the browser's own events of some categories in the block, into `traced`."""
        self.traced.clear()
        self.call("Tracing.start", traceConfig={"includedCategories": list(categories)})
        yield
        self._complete = False
        self.call("Tracing.end")
        while not self._complete:
            self._note(self._read())

    def _read(self):
        while b"\0" not in self._buffer:
            assert select.select([self._answers], [], [], PATIENCE_S)[0], "the browser does not answer"
            self._buffer += os.read(self._answers, 1 << 16)
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def _note(self, event):
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.requested.append(event["params"]["request"]["url"])
            case "Runtime.exceptionThrown" | "Log.entryAdded" | "Runtime.consoleAPICalled":
                self.complaints.append(event["params"])
            case "Tracing.dataCollected":
                self.traced += event["params"]["value"]
            case "Tracing.tracingComplete":
                self._complete = True


@contextlib.contextmanager
def open_browser(profile: Path) -> Iterator[Browser]:
    """Starts Chromium with an empty directory as its profile."""
    assert CHROMIUM is not None, "needs a browser: apt-get install chromium"
    pipes = [*os.pipe(), *os.pipe()]
    ends = to_read, commands, answers, to_write = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in pipes]
    for end in pipes:
        os.close(end)
    shell = f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}'  # the numbers at which it looks for its pipes
    process = subprocess.Popen(
        ["bash", "-c", shell, CHROMIUM, *FLAGS, f"--user-data-dir={profile}"],
        pass_fds=(to_read, to_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(profile)},
    )
    try:
        yield Browser(commands, answers)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()
        for end in ends:
            os.close(end)
