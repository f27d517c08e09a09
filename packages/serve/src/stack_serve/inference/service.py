"""Service of a repository: loads and swaps versions during traffic and routes requests to them."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from stack_core.abi.errors import EngineStopped, StackError, UnknownName, nearest
from stack_serve.bundle.manifest import Manifest
from stack_serve.bundle.opened import load
from stack_serve.inference.config import InferenceConfig
from stack_serve.inference.lane import Lane, LaneRequest, LaneResult, Outcome
from stack_serve.inference.metrics import Metrics
from stack_serve.inference.repository import (
    Key,
    Steps,
    Version,
    changed,
    failed,
    latest,
    loading,
    steps,
    tried_again,
    without_lost,
)
from stack_serve.inference.watching import directory_of, scan

__all__ = ["InferenceResponse", "Service"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class InferenceResponse:
    """The outputs of one request, and the version that computed them."""

    key: Key
    manifest: Manifest
    signature: str
    outputs: Mapping[str, np.ndarray]


class Service:
    """The models of a repository. All methods run on the event loop; loading and computing run on other threads.

    Attributes:
      found: versions in the repository, with fingerprints of their files.
      state: "starting" until the first scan of the repository is complete; "draining" rejects new requests.
    """

    def __init__(self, repository: Path, config: InferenceConfig) -> None:
        self.state: Literal["starting", "ready", "draining"] = "starting"
        self.config = config
        self.versions: Mapping[Key, Version] = {}
        self.lanes: dict[Key, Lane] = {}
        self.metrics = Metrics(lambda: dict(self.lanes))
        self.found: Mapping[Key, str] = {}
        self._repository = repository
        self._unwanted: frozenset[str] = frozenset()
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="loader")
        # Two concurrent refreshes would load the same version twice.
        self._changing = asyncio.Lock()
        self._waiting: set[asyncio.Future[LaneResult]] = set()
        self._ending: set[Lane] = set()
        self._changed = asyncio.Event()
        self._is_cut_short = False
        self._loading: Future[Lane] | None = None

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, np.ndarray],
        *,
        version: int | None = None,
        signature: str | None = None,
        timeout_s: float | None = None,
    ) -> InferenceResponse:
        """Computes one request with one version.

        Args:
          version: None is the newest live one.

        Raises:
          DeadlineExceeded: its time passed while it waited.
          EngineBusy: too many rows wait.
          EngineStopped: the server, or just this version, is being shut down.
          InferenceError: the inputs do not fit the signature.
          UnknownName: no such model, version or signature is live.
        """
        began_s = time.monotonic()
        key, lane = self.lane(model, version)
        lane.manifest.signature(signature)  # raises UnknownName
        name = signature or lane.manifest.default_signature
        timeout_s = timeout_s or self.config.timeout_s
        future: asyncio.Future[LaneResult] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)

        def report(request: LaneRequest, outcome: Outcome) -> None:
            if not future.done():
                future.set_exception(outcome) if isinstance(outcome, Exception) else future.set_result(outcome)

        lane.submit(lane.request(name, inputs, None if timeout_s is None else began_s + timeout_s, report))
        result = await future
        self.metrics.request_s.labels(key.model, str(key.version)).observe(time.monotonic() - began_s)
        outputs = lane.manifest.signatures[name].outputs
        return InferenceResponse(
            key, lane.manifest, name, dict(zip((o.name for o in outputs), result.outputs, strict=True))
        )

    def lane(self, model: str, version: int | None = None) -> tuple[Key, Lane]:
        """Returns the lane of a live version.

        Raises:
          EngineStopped: the server is shutting down, or the model is still being loaded.
          UnknownName: the version does not exist; lists the live versions.
        """
        if self.state == "draining":
            raise EngineStopped("The server is shutting down. Use another one.")
        newest = latest(self.versions, model)
        if newest is None and self.state == "starting":
            raise EngineStopped("The server is still loading its models. /v2/health/ready answers 200 when it has.")
        if newest is None and any(
            key.model == model and each.state == "LOADING" for key, each in self.versions.items()
        ):
            raise EngineStopped(f"{model!r} is being loaded. Ask again.")
        if newest is None:
            raise UnknownName(self._unknown(model))
        key = Key(model, newest if version is None else version)
        if key not in self.lanes:
            live = ", ".join(str(known.version) for known in sorted(self.lanes) if known.model == model)
            computes = self.lanes[Key(model, newest)].manifest.computes
            message = f"{model!r} has no version {version} that is served. Live versions: {live}; {newest} computes"
            raise UnknownName(f"{message} {computes}.")
        return key, self.lanes[key]

    async def start(self) -> None:
        """Loads the versions of the repository one by one."""
        await self.refresh()
        if self.state == "starting":
            self.state = "ready"

    async def watch(self) -> None:
        """Looks at the repository again and again, until it is cancelled."""
        while self.config.poll_s:
            await asyncio.sleep(self.config.poll_s)
            try:
                await self.refresh()
            except Exception:  # Whatever one look meets, the next may succeed.
                _LOG.exception("The repository cannot be read; what is served stays as it is")

    async def refresh(self) -> None:
        """Loads and unloads versions to match the repository."""
        async with self._changing:
            self.found = await asyncio.to_thread(scan, self._repository)
            self.versions = without_lost(self.versions, self.found)
            while (todo := self._steps()) != Steps((), ()):
                for key in todo.unload:
                    self._unload(key)
                for key in todo.load[:1]:  # The best next step may depend on the result of this one.
                    await self._load(key)

    async def load(self, model: str) -> None:
        """Loads an unloaded or new model; continues if the caller is cancelled.

        Raises:
          UnknownName: the repository lacks the model.
          StackError: the model cannot be loaded; states the reason.
        """
        self._unwanted -= {model}
        self.versions = tried_again(self.versions, model)
        await asyncio.shield(self.refresh())
        if not any(key.model == model for key in self.found):
            raise UnknownName(self._unknown(model))
        if latest(self.versions, model) is None:
            reasons = [version.reason for key, version in self.versions.items() if key.model == model]
            raise EngineStopped(f"{model!r} cannot be loaded: {'; '.join(filter(None, reasons))}")

    async def unload(self, model: str) -> None:
        """Rejects new requests of a model and waits for running ones; continues if the caller is cancelled.

        Raises:
          UnknownName: the repository lacks the model.
        """
        if not any(key.model == model for key in (*self.found, *self.versions)):
            raise UnknownName(self._unknown(model))
        self._unwanted |= {model}
        await asyncio.shield(self.refresh())

    def drain(self) -> None:
        """Takes no more requests."""
        self.state = "draining"

    def cut_short(self) -> None:
        """Fails all unanswered requests without waiting for their lanes."""
        problem = "The server was stopped before it had computed this. Send it to another one."
        for future in list(self._waiting):
            if not future.done():
                future.set_exception(EngineStopped(problem))
        self._is_cut_short = True
        self._changed.set()

    async def close(self) -> None:
        """Ends all lanes once they have computed their queues, unless `cut_short` is called before or meanwhile."""
        self.drain()
        for key in list(self.lanes):
            self._unload(key)
        while self._ending and not self._is_cut_short:
            self._changed.clear()
            await self._changed.wait()
        # A compilation cannot be interrupted, and the process ends anyway.
        self._loader.shutdown(wait=False, cancel_futures=True)

    @property
    def is_busy(self) -> bool:
        """Returns whether a thread is compiling or computing, which cannot be interrupted."""
        return bool(self._ending) or (self._loading is not None and self._loading.running())

    def _steps(self) -> Steps:
        return steps(self.found, self.versions, unwanted=self._unwanted, newest=self.config.live_versions)

    async def _load(self, key: Key) -> None:
        known = self.versions.get(key)
        begun = loading(known, self.found[key])
        self.versions = changed(self.versions, key, begun)
        loop = asyncio.get_running_loop()

        def report(outcomes: list[tuple[LaneRequest, Outcome]]) -> None:
            loop.call_soon_threadsafe(_report, outcomes)

        def opened() -> Lane:
            # A private copy of the weights: the repository's files may change while they are served.
            bundle = load(directory_of(self._repository, key), sealed=True)
            lane = Lane(bundle, max_waiting=self.config.max_waiting, report=report)
            lane.warm_up()
            return lane

        try:
            self._loading = self._loader.submit(opened)
            lane = await asyncio.wrap_future(self._loading)
        # Otherwise the version would stay LOADING for ever.
        except asyncio.CancelledError:
            self.versions = changed(self.versions, key, known)
            raise
        except Exception as error:  # A failing bundle must not affect other versions.
            if not isinstance(error, StackError):
                _LOG.exception("%s version %s cannot be loaded", *key)
            self.versions = changed(self.versions, key, failed(begun, str(error)))
            self.metrics.swaps.labels(key.model, "failed").inc()
            return
        lane.start()
        previous = self.lanes.get(key)
        self.lanes[key] = lane
        self.versions = changed(self.versions, key, Version(begun.fingerprint, "READY", live=True))
        self.metrics.swaps.labels(key.model, "ready").inc()
        # Ended last, so requests always find an open lane.
        if previous is not None:
            self._end(previous)

    def _unload(self, key: Key) -> None:
        self.versions = changed(self.versions, key, None)
        self._end(self.lanes.pop(key))

    def _end(self, lane: Lane) -> None:
        """Drains a lane without new requests, on a daemon thread: a stopped server must not wait for it."""
        loop = asyncio.get_running_loop()
        self._ending.add(lane)

        def finish() -> None:
            self._ending.discard(lane)
            self._changed.set()

        def drain() -> None:
            lane.drain()
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(finish)

        threading.Thread(target=drain, name=f"drain {lane.manifest.name}", daemon=True).start()

    def _unknown(self, model: str) -> str:
        models = sorted({key.model for key in self.lanes})
        reasons = [version.reason for key, version in self.versions.items() if key.model == model and version.reason]
        why = f" It cannot be loaded: {reasons[-1]}" if reasons else ""
        known = ", ".join(models) or "none"
        return f"The model {model[:200]!r} is not served.{why}{nearest(model, models)} Models: {known}."


def _report(outcomes: list[tuple[LaneRequest, Outcome]]) -> None:
    for request, outcome in outcomes:
        request.report(request, outcome)
