"""Compiled programs of an engine, some of which compile in the background while steps run."""

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from stack_core.chips.machine import give_memory_back
from stack_serve.llm.compiler_options import compile_threads, compiler_options

__all__ = ["CompiledPrograms", "Key", "Progress"]

Key = tuple[str, *tuple[int, ...]]
"""Kind and sizes of a program."""

Progress = Callable[[str, int, int], None]


class CompiledPrograms:
    """Programs by key, compiled before the first request, in the background, or on first use.

    Attributes:
      programs: compiled programs.

    Args:
      lower: function that lowers the program of a key; background threads call it, too.
    """

    def __init__(self, lower: Callable[[Key], Any]) -> None:
        self._lower = lower
        self.programs: dict[Key, Any] = {}
        # Programs queued for the background threads, programs being compiled, and those that no step has needed yet.
        self._waiting, self._in_progress, self._unneeded = list[Key](), set[Key](), set[Key]()
        self._lock = threading.Condition()
        self._threads: list[threading.Thread] = []

    def __getitem__(self, key: Key) -> Any:
        """Returns a program, after its compilation in the background or here."""
        if key not in self.programs:
            with self._lock:
                self._unneeded.discard(key)
                if key in self._waiting:
                    self._waiting.remove(key)
                while key in self._in_progress:
                    self._lock.wait()
            if key not in self.programs:  # nor by the background
                self.programs[key] = self._compile(key)
        return self.programs[key]

    def compile_all(self, keys: Sequence[Key], progress: Progress | None) -> None:
        """Compiles programs before it returns.

        Args:
          progress: callback, on any thread, that receives the name of a compiled program, the number of compiled
            programs and the total number of programs.
        """
        self._compile_now(keys, _reporting(progress, len(keys)))

    def compile_first(
        self,
        first: Sequence[Key],
        soon: Sequence[Key],
        progress: Progress | None,
        *,
        threads: int,
        if_needed: Sequence[Key] = (),
    ) -> None:
        """Compiles the first programs before it returns, and others on threads in the background.

        Args:
          first: programs to compile now.
          soon: programs to compile in the background, in this order.
          progress: as in `compile_all`, for `first` and `soon`.
          threads: number of threads in the background.
          if_needed: programs to compile in the background once a step asks for their size.
        """
        report = _reporting(progress, len(first) + len(soon))
        self._compile_now(first, report)
        self._waiting, self._unneeded = list(soon), set(if_needed)
        self._threads = [
            threading.Thread(target=self._compile_waiting, args=[report], name="stack-compile", daemon=True)
            for _ in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def to_compile(self) -> int:
        """Number of programs that wait or compile in the background, without those that no step needs."""
        with self._lock:
            return len(self._waiting) + len(self._in_progress)

    def stop(self) -> None:
        """Ends the compilation in the background, after the current programs."""
        with self._lock:
            self._waiting.clear()
            self._unneeded.clear()
            self._lock.notify_all()
        for thread in self._threads:
            thread.join()

    def is_ready(self, kind: str, size: int) -> bool:
        """Returns whether a program is compiled, or will be compiled on its first use.

        Otherwise the background compiles it; a program that only a step's need compiles joins its queue now.
        """
        if (key := (kind, size)) in self.programs:
            return True
        with self._lock:
            if key in self._unneeded:
                self._unneeded.remove(key)
                self._waiting.append(key)
                self._lock.notify_all()
            return not (self._waiting or self._in_progress)

    def ready_size(self, kind: str, size: int, sizes: Sequence[int]) -> int:
        """Returns the smallest size, from `size` on, of a compiled program while others compile; otherwise `size`."""
        if self.is_ready(kind, size):
            return size
        return next((each for each in sizes if each >= size and (kind, each) in self.programs), size)

    def _compile(self, key: Key) -> Any:
        return self._lower(key).compile(compiler_options(key[0]))

    def _compile_now(self, keys: Sequence[Key], report: Callable[[Key], None]) -> None:
        # XLA releases the GIL, which lets compilation overlap with tracing of the next program.
        with ThreadPoolExecutor(max_workers=compile_threads()) as threads:
            compiling = {}
            for key in keys:
                compiling[key] = threads.submit(self._lower(key).compile, compiler_options(key[0]))
                compiling[key].add_done_callback(lambda _, key=key: report(key))
            self.programs |= {key: program.result() for key, program in compiling.items()}

    def _compile_waiting(self, report: Callable[[Key], None]) -> None:
        while (key := self._next_waiting()) is not None:
            try:
                self.programs[key] = self._compile(key)
            finally:
                with self._lock:
                    self._in_progress.discard(key)
                    self._lock.notify_all()
            report(key)
            if not self._waiting:
                give_memory_back()  # about 100 MB that the compiler has freed

    def _next_waiting(self) -> Key | None:
        """Returns the next program of the background, or None after the last one; waits for programs to be needed."""
        with self._lock:
            while not self._waiting and self._unneeded:
                self._lock.wait()
            if not self._waiting:
                return None
            key = self._waiting.pop(0)
            self._in_progress.add(key)
            return key


def _reporting(progress: Progress | None, total: int) -> Callable[[Key], None]:
    """Returns a function that reports a compiled program by its key."""
    compiled = itertools.count(1)

    def report(key: Key) -> None:
        if progress is not None and (number := next(compiled)) <= total:
            progress(" ".join(map(str, key)), number, total)

    return report
