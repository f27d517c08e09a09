"""Engine that computes the images of many requests step by step, in batches that change between steps."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from stack_core.abi.errors import EngineBusy, EngineStopped
from stack_core.chips.machine import give_memory_back
from stack_core.text.image_models import ImageModel, ImageRequest, ImageState

__all__ = ["ImageEngine", "ImageJob", "ImageStats", "ImageUpdate"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class ImageUpdate:
    """Progress of one image.

    Attributes:
      index: number of the image in its request.
      preview: number of the preview; None for the finished image.
      pixels: uint8[height, width, channels].
      error: why the image failed, or None.
    """

    index: int
    step: int
    steps: int
    preview: int | None
    pixels: np.ndarray | None
    error: str | None = None


@dataclass(eq=False)
class ImageJob:
    """The images of one request.

    Attributes:
      previews: number of estimates to send of each image before it is finished.
      receive: callback that gets each update on the engine's thread, and must not block.
    """

    request: ImageRequest
    images: int
    previews: int
    receive: Callable[[ImageUpdate], None]
    cancelled: bool = False
    states: list[ImageState] = field(default_factory=list)


@dataclass(eq=False)
class _Image:
    job: ImageJob
    index: int
    state: ImageState | None = None


@dataclass(frozen=True)
class ImageStats:
    """Counts of an engine.

    Attributes:
      running, waiting: images that are being computed, and that wait.
      images: finished images.
      batches: computed batches, each one step.
      image_steps: computed steps of images.
    """

    running: int
    waiting: int
    images: int
    batches: int
    image_steps: int


class ImageEngine:
    """Computes images on a thread.

    A batch consists of all running images of one group of the model, such as those of equal size; groups take turns.
    Waiting images start in the order of arrival, between two steps.

    Args:
      max_images: maximum number of images that are computed concurrently.
      max_waiting: maximum number of waiting images.
    """

    def __init__(self, model: ImageModel, *, max_images: int, max_waiting: int) -> None:
        self._model = model
        self._max_images, self._max_waiting = max_images, max_waiting
        self._waiting: deque[_Image] = deque()
        self._running: list[_Image] = []
        self._images = self._batches = self._image_steps = 0
        self._changed = threading.Condition()
        self._stopped: str | None = None
        self._thread = threading.Thread(target=self._run, name="images", daemon=True)

    def prepare(self) -> None:
        """Compiles the programs of one image of the default size. Others are compiled when they are first needed."""
        self._model.warm_up()
        give_memory_back()

    def start(self) -> None:
        """Starts computing."""
        self._thread.start()

    def close(self) -> None:
        """Stops after the current step and drops the remaining images."""
        with self._changed:
            self._stopped = self._stopped or "The server was stopped."
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, job: ImageJob) -> None:
        """Queues the images of a resolved request.

        Raises:
          EngineBusy: too many images wait.
          EngineStopped: the engine was closed or failed.
        """
        with self._changed:
            self._check()
            if self._waiting and len(self._waiting) + job.images > self._max_waiting:
                message = f"{len(self._waiting)} images wait; the maximum is {self._max_waiting}."
                raise EngineBusy(message, retry_after_s=1.0)
            self._waiting.extend(_Image(job, index) for index in range(job.images))
            self._changed.notify()

    def cancel(self, job: ImageJob) -> None:
        """Drops the images of a request before the next step; has no effect on finished images."""
        with self._changed:
            job.cancelled = True
            self._waiting = deque(image for image in self._waiting if image.job is not job)

    def stats(self) -> ImageStats:
        """Returns the current counts; raises EngineStopped if the engine has failed."""
        with self._changed:
            self._check()
            running = sum(not image.job.cancelled for image in self._running)
            return ImageStats(running, len(self._waiting), self._images, self._batches, self._image_steps)

    def _check(self) -> None:
        if self._stopped is not None:
            raise EngineStopped(self._stopped)

    def _run(self) -> None:
        try:
            while self._admit():
                self._step()
        except BaseException:  # A fault of the engine: `stats` reports it, and requests get an error.
            _LOG.exception("The engine of images failed")
            with self._changed:
                self._stopped = "The engine failed; the server's log has the reason."
                images = [*self._running, *self._waiting]
            for image in images:
                self._fail(image, "The engine failed.")

    def _admit(self) -> bool:
        """Drops cancelled images and starts waiting ones; returns False once the engine is closed."""
        with self._changed:
            while True:
                if self._stopped is not None:
                    return False
                self._running = [image for image in self._running if not image.job.cancelled]
                if self._running or self._waiting:
                    break
                self._changed.wait()
            while self._waiting and len(self._running) < self._max_images:
                self._running.append(self._waiting.popleft())
        for image in [image for image in self._running if image.state is None]:
            job = image.job
            try:
                if not job.states:
                    job.states = self._model.begin(job.request, job.images)
                image.state = job.states[image.index]
            except Exception:  # It fails this image only.
                _LOG.exception("An image cannot be started")
                self._running.remove(image)
                self._fail(image, "The image failed; the server's log has the reason.")
        return True

    def _step(self) -> None:
        """Advances the group that has waited longest."""
        states = [(image, image.state) for image in self._running if image.state is not None]
        if not states:  # none could be started
            return
        group = states[0][1].group
        batch = [image for image, state in states if state.group == group]
        others = [image for image in self._running if image not in batch]
        try:
            advanced = self._model.advance([state for _, state in states if state.group == group])
            for image, state in zip(batch, advanced, strict=True):
                image.state = state
            self._batches += 1
            self._image_steps += len(batch)
            finished = [image for image in batch if self._report(image)]
        except Exception:  # For example, the batch does not fit in the memory. Other images continue.
            _LOG.exception("A step of %d images failed", len(batch))
            for image in batch:
                self._fail(image, "The image failed; the server's log has the reason.")
            finished = batch
        self._running = [*others, *(image for image in batch if image not in finished)]

    def _report(self, image: _Image) -> bool:
        """Sends a preview or the finished image; returns whether it is finished."""
        job, state = image.job, image.state
        assert state is not None
        is_finished = state.step == state.steps
        preview = None if is_finished else _preview(state, job.previews)
        if (is_finished or preview is not None) and not job.cancelled:
            pixels = self._model.pixels(state)
            job.receive(ImageUpdate(image.index, state.step, state.steps, preview, pixels))
        self._images += is_finished
        return is_finished

    def _fail(self, image: _Image, error: str) -> None:
        if not image.job.cancelled:
            image.job.receive(ImageUpdate(image.index, 0, 0, None, None, error))


def _preview(state: ImageState, previews: int) -> int | None:
    """Returns the number of the preview that is due after a step: previews are equally spaced."""
    due = {max(1, state.steps * (number + 1) // (previews + 1)): number for number in range(previews)}
    return due.get(state.step)
