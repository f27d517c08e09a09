"""Continuous mode of any process: its time is watched by a thread, and a server's steps by their spans."""

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from stack_profile.captures.recording import backend_started
from stack_profile.captures.ring import ContinuousConfig
from stack_profile.captures.slow_steps import AnomalyConfig
from stack_profile.captures.watch import Watch

__all__ = ["Continuous"]

_TICK_S: Final = 0.1


class Continuous:
    """Keeps a ring of captures of this process, from its first use of a device on.

        with stack_profile.Continuous("out"):
            serve()

    Slow steps of a server are captured as well: an engine step is compared with steps of about as many sequences and
    prompt tokens. For loops with steps of their own there is `Watch(out, continuous=ContinuousConfig())`.
    """

    def __init__(
        self,
        out: str | Path,
        settings: ContinuousConfig | None = None,
        anomaly: AnomalyConfig | None = None,
    ) -> None:
        """Starts the mode.

        Args:
          out: directory of the ring.
          settings: size of the ring and limit of the cost, by default `ContinuousConfig()`.
          anomaly: definition of slow steps, by default `AnomalyConfig()`.

        Raises:
          CaptureError: the directory cannot be written, or another process writes its ring.
        """
        self._watch = Watch(out, anomaly, continuous=settings or ContinuousConfig(), timed=True)
        self._steps = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="capture-continuous", daemon=True)
        self._thread.start()

    @property
    def cost_s(self) -> float:
        """Processor time that the mode has taken so far."""
        return self._watch.cost_s

    def close(self) -> None:
        """Ends the mode, and waits until captures are written. Later calls do nothing."""
        self._closing.set()
        self._thread.join()
        self._watch.close()

    def __enter__(self) -> "Continuous":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _run(self) -> None:
        # The program may still configure the devices, which a recording would start.
        while not backend_started():
            if self._closing.wait(_TICK_S):
                return
        from stack_core.runtime.spans import listen_to_spans

        with listen_to_spans(self._record_step):
            before_s = time.monotonic()
            while not self._closing.wait(_TICK_S):
                now_s = time.monotonic()
                self._watch.tick(now_s - before_s)
                before_s = now_s

    def _record_step(self, name: str, duration_s: float, fields: Mapping[str, Any]) -> None:
        if name != "engine_step":
            return
        self._steps += 1
        rows = fields["rows"]
        # A prompt takes longer than a token: steps are comparable up to a factor of two in both numbers.
        kind = len(rows).bit_length(), sum(prompt for _, _, prompt, _ in rows).bit_length()
        self._watch.finished(self._steps, duration_s, kind=kind)
