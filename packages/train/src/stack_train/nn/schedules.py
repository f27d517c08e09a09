"""Schedules of pipelines as tables: what each stage does in each tick, and where what arrives is kept.

Layers are cut into stages x chunks equal pieces; piece g is chunk g // stages of stage g % stages. In a tick a stage
may run one piece forward for one microbatch, and one backward for another; what it makes reaches its neighbour at the
end of the tick. Everything here is NumPy, made before anything is traced.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

import numpy as np
from jaxtyping import Int32

from stack_core.abi.errors import ConfigError

__all__ = ["COLUMNS", "Phase", "Schedule", "ScheduleName", "schedule"]

ScheduleName = Literal["1f1b", "gpipe", "interleaved"]

_NEVER = 2**30

COLUMNS = (
    "forward",  # the microbatch that runs forward
    "forward_chunk",
    "forward_slot",  # where its input was kept
    "backward",  # the microbatch that runs backward
    "backward_chunk",
    "backward_slot",  # where its input is kept still
    "gradient_slot",  # where the gradient of its output was kept
    "arriving_slot",  # where the neighbour's output goes at the end of the tick
    "arriving_gradient_slot",  # where the other neighbour's gradient goes
)
"""Of a table: int32[ticks, stages] each, -1 where there is nothing."""


@dataclass(frozen=True)
class Phase:
    """Ticks from `start` to `end` in which some stage runs forward, some backward, or both."""

    start: int
    end: int
    forward: bool
    backward: bool


@dataclass(frozen=True, eq=False)
class Schedule:
    """What every stage does in every tick.

    Attributes:
      table: by the names of `COLUMNS`.
      slots: inputs that a stage keeps at most, from when they arrive until their gradient is formed.
      gradient_slots: gradients that a stage keeps at most, until it runs backward.
    """

    stages: int
    chunks: int
    microbatches: int
    table: Mapping[str, Int32[np.ndarray, "ticks stages"]]
    slots: int
    gradient_slots: int

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """Runs of ticks that do the same: the program has a loop for each, in which every stage does as much."""
        kinds = [
            (bool((forward >= 0).any()), bool((backward >= 0).any()))
            for forward, backward in zip(self.table["forward"], self.table["backward"], strict=True)
        ]
        starts = [tick for tick, kind in enumerate(kinds) if tick == 0 or kind != kinds[tick - 1]]
        return tuple(Phase(*ends, *kinds[ends[0]]) for ends in zip(starts, [*starts[1:], len(kinds)], strict=True))

    @property
    def work(self) -> float:
        """Time as a multiple of what one device takes for all layers.

        That of 1F1B and GPipe is (microbatches + stages - 1) / (microbatches x stages).
        """
        forward, backward = (
            sum(phase.end - phase.start for phase in self.phases if getattr(phase, kind))
            for kind in ("forward", "backward")
        )
        return (forward + backward) / (2 * self.microbatches * self.stages * self.chunks)


@cache
def schedule(name: ScheduleName, *, stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """The table of a schedule.

        gpipe:        all microbatches forward, then all backward
        1f1b:         a microbatch runs backward as soon as the last stage has it
        interleaved:  1f1b where each stage has `chunks` pieces of the layers that do not follow each other, so that
                      the pipeline fills and drains in 1 / chunks of the time

    Raises:
      ConfigError: chunks for a schedule that has one, or fewer than two for "interleaved".

    Source: Huang et al., GPipe, 2018 (arXiv:1811.06965); Narayanan et al., PipeDream-Flush and the interleaved
    schedule, 2021 (arXiv:2104.04473), section 2.2.
    """
    if (name == "interleaved") != (chunks > 1):
        raise ConfigError(
            f"run.pipeline.chunks is {chunks} with schedule {name!r}; expected 2 or more for interleaved, 1 for others."
        )
    return _Simulation(name, stages, microbatches, chunks).run()


class _Simulation:
    """Lets every stage do the next thing that it can, tick by tick."""

    def __init__(self, name: str, stages: int, microbatches: int, chunks: int) -> None:
        self.name, self.stages, self.microbatches, self.chunks = name, stages, microbatches, chunks
        self.pieces = stages * chunks
        self.ran = np.full((2, microbatches, self.pieces), _NEVER)  # forward and backward: the tick
        self.slots: dict[tuple[str, int, int], int] = {}
        self.taken: dict[tuple[str, int], set[int]] = {}
        self.rows: list[dict[str, list[int]]] = []

    def run(self) -> Schedule:
        forward = [list(self._order(reverse=False)) for _ in range(self.stages)]
        backward = [list(self._order(reverse=True)) for _ in range(self.stages)]
        while any(backward):
            self._tick(len(self.rows), forward, backward)
        table = {name: np.array([row[name] for row in self.rows], np.int32) for name in COLUMNS}
        most = {
            kind: 1 + max((slot for (which, *_), slot in self.slots.items() if which == kind), default=0)
            for kind in ("input", "gradient")
        }
        counts = (self.stages, self.chunks, self.microbatches)
        return Schedule(*counts, table, slots=most["input"], gradient_slots=most["gradient"])

    def _order(self, *, reverse: bool) -> Iterator[tuple[int, int]]:
        """(microbatch, chunk) in the order of every stage: all chunks of as many microbatches as there are stages."""
        for first in range(0, self.microbatches, self.stages):
            for chunk in sorted(range(self.chunks), reverse=reverse):
                for microbatch in range(first, min(first + self.stages, self.microbatches)):
                    yield microbatch, chunk

    def _tick(self, tick: int, forward: list[list[tuple[int, int]]], backward: list[list[tuple[int, int]]]) -> None:
        row = {name: [-1] * self.stages for name in COLUMNS}
        self.rows.append(row)
        drained = not any(forward)
        ready = [
            stage
            for stage in range(self.stages)
            if forward[stage] and self._has_input(tick, forward[stage][0][0], self._piece(stage, forward[stage][0][1]))
        ]
        for stage in ready:
            microbatch, chunk = forward[stage].pop(0)
            piece = self._piece(stage, chunk)
            self.ran[0, microbatch, piece] = tick
            row["forward"][stage], row["forward_chunk"][stage] = microbatch, chunk
            row["forward_slot"][stage] = self.slots.get(("input", microbatch, piece), -1)
        going = [
            stage
            for stage in range(self.stages)
            if backward[stage] and (drained or self.name != "gpipe") and self._has_gradient(tick, stage, backward)
        ]
        for stage in going:
            microbatch, chunk = backward[stage].pop(0)
            piece = self._piece(stage, chunk)
            self.ran[1, microbatch, piece] = tick
            row["backward"][stage], row["backward_chunk"][stage] = microbatch, chunk
            row["backward_slot"][stage] = self._free("input", microbatch, piece)
            row["gradient_slot"][stage] = self._free("gradient", microbatch, piece)
        self._arrive(tick, row)

    def _has_input(self, tick: int, microbatch: int, piece: int) -> bool:
        return piece == 0 or bool(self.ran[0, microbatch, piece - 1] < tick)

    def _has_gradient(self, tick: int, stage: int, backward: list[list[tuple[int, int]]]) -> bool:
        microbatch, chunk = backward[stage][0]
        piece = self._piece(stage, chunk)
        if self.ran[0, microbatch, piece] > tick:
            return False
        return piece == self.pieces - 1 or bool(self.ran[1, microbatch, piece + 1] < tick)

    def _arrive(self, tick: int, row: dict[str, list[int]]) -> None:
        """Gives what the stages made in this tick a place on the neighbour that it goes to."""
        for microbatch, piece in np.argwhere(self.ran[0] == tick).tolist():
            if piece + 1 < self.pieces:
                row["arriving_slot"][(piece + 1) % self.stages] = self._take("input", microbatch, piece + 1)
        for microbatch, piece in np.argwhere(self.ran[1] == tick).tolist():
            if piece > 0:
                slot = self._take("gradient", microbatch, piece - 1)
                row["arriving_gradient_slot"][(piece - 1) % self.stages] = slot

    def _take(self, kind: str, microbatch: int, piece: int) -> int:
        taken = self.taken.setdefault((kind, piece % self.stages), set())
        slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
        taken.add(slot)
        self.slots[kind, microbatch, piece] = slot
        return slot

    def _free(self, kind: str, microbatch: int, piece: int) -> int:
        slot = self.slots.get((kind, microbatch, piece), -1)
        self.taken.get((kind, piece % self.stages), set()).discard(slot)
        return slot

    def _piece(self, stage: int, chunk: int) -> int:
        return chunk * self.stages + stage
