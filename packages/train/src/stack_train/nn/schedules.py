"""Pipeline schedules as tables of each stage's work and buffers in each tick.

Layers are divided into stages x chunks equal pieces; piece g is chunk g // stages of stage g % stages. In a tick, a
stage may run one piece forward for one microbatch, and one piece backward for another. Results reach the neighbouring
stage at the end of the tick. Schedules are computed in NumPy before tracing.
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

# Later than any tick, so a step that has not run never counts as finished.
_NEVER = 2**30

COLUMNS = (
    "forward",  # microbatch that runs forward
    "forward_chunk",
    "forward_slot",  # slot of the input
    "backward",  # microbatch that runs backward
    "backward_chunk",
    "backward_slot",  # slot of the same piece's input, for recomputation
    "gradient_slot",  # slot of the output's cotangent
    "arriving_slot",  # slot for the previous stage's output, which arrives at the end of the tick
    "arriving_gradient_slot",  # slot for the next stage's cotangent
)
"""Columns of a table, int32[ticks, stages] each; -1 for no entry."""


@dataclass(frozen=True)
class Phase:
    """Consecutive ticks [start, end) of one kind.

    Attributes:
      start, end: range of ticks.
      forward: True if any stage runs forward.
      backward: True if any stage runs backward.
    """

    start: int
    end: int
    forward: bool
    backward: bool


@dataclass(frozen=True, eq=False)
class Schedule:
    """The work of every stage in every tick.

    Attributes:
      stages: number of stages.
      chunks: number of pieces per stage.
      microbatches: number of microbatches.
      table: columns by the names in `COLUMNS`.
      slots: maximum number of inputs that a stage buffers, from arrival until the backward pass.
      gradient_slots: maximum number of cotangents that a stage buffers until its backward pass.
    """

    stages: int
    chunks: int
    microbatches: int
    table: Mapping[str, Int32[np.ndarray, "ticks stages"]]
    slots: int
    gradient_slots: int

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """Maximal runs of ticks of one kind. The program has one loop per phase, with equal work on all stages."""
        kinds = [
            (bool((forward >= 0).any()), bool((backward >= 0).any()))
            for forward, backward in zip(self.table["forward"], self.table["backward"], strict=True)
        ]
        starts = [tick for tick, kind in enumerate(kinds) if tick == 0 or kind != kinds[tick - 1]]
        return tuple(Phase(*ends, *kinds[ends[0]]) for ends in zip(starts, [*starts[1:], len(kinds)], strict=True))

    @cached_property
    def recent_microbatches(self) -> int:
        """Maximum number of consecutive microbatches between the last forward and the next backward of a chunk."""
        most = 1
        for stage in range(self.stages):
            for chunk in range(self.chunks):
                # Tick of each microbatch, which run in order in both directions.
                forward, backward = (
                    np.flatnonzero(self.table[f"{kind}_chunk"][:, stage] == chunk) for kind in ("forward", "backward")
                )
                started = np.searchsorted(forward, backward, side="right")
                most = max(most, int(np.max(started - np.arange(self.microbatches))))
        return most

    @property
    def work(self) -> float:
        """Duration relative to one device that runs all layers.

        1F1B and GPipe take (microbatches + stages - 1) / (microbatches x stages).
        """
        forward, backward = (
            sum(phase.end - phase.start for phase in self.phases if getattr(phase, kind))
            for kind in ("forward", "backward")
        )
        return (forward + backward) / (2 * self.microbatches * self.stages * self.chunks)


@cache
def schedule(name: ScheduleName, *, stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Computes a pipeline schedule.

        gpipe:        all microbatches forward, then all backward
        1f1b:         a microbatch runs backward as soon as it has reached the last stage
        interleaved:  1f1b with `chunks` non-adjacent pieces of the layers per stage; the pipeline fills and drains in
                      1 / chunks of the time

    Raises:
      ConfigError: `chunks` is not 1 for a schedule other than "interleaved", or less than 2 for "interleaved".

    Source: Huang et al., GPipe, 2018 (arXiv:1811.06965); Narayanan et al., PipeDream-Flush and the interleaved
    schedule, 2021 (arXiv:2104.04473), section 2.2.
    """
    if (name == "interleaved") != (chunks > 1):
        raise ConfigError(
            f"run.pipeline.chunks is {chunks} with schedule {name!r}; expected 2 or more for interleaved, 1 for others."
        )
    return _Simulation(name, stages, microbatches, chunks).run()


class _Simulation:
    """Greedy simulation in which every stage runs its next possible step in each tick."""

    def __init__(self, name: str, stages: int, microbatches: int, chunks: int) -> None:
        self.name, self.stages, self.microbatches, self.chunks = name, stages, microbatches, chunks
        self.pieces = stages * chunks
        self.ran = np.full((2, microbatches, self.pieces), _NEVER)  # tick of the forward and of the backward step
        self.slots: dict[tuple[str, int, int], int] = {}
        self.taken: dict[tuple[str, int], set[int]] = {}
        self.rows: list[dict[str, list[int]]] = []

    def run(self) -> Schedule:
        # A copy for each stage, because `_tick` pops its entries.
        forward = [list(self._order(reverse=False)) for _ in range(self.stages)]
        backward = [list(self._order(reverse=True)) for _ in range(self.stages)]
        # Each forward step precedes its backward step, so no backward step left means that all are done.
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
        """Yields (microbatch, chunk) in the order of every stage: all chunks of `stages` microbatches at a time."""
        # Groups of `stages` microbatches (Narayanan et al., 2021, section 2.2) keep every stage busy with a chunk.
        for first in range(0, self.microbatches, self.stages):
            for chunk in sorted(range(self.chunks), reverse=reverse):
                for microbatch in range(first, min(first + self.stages, self.microbatches)):
                    yield microbatch, chunk

    def _tick(self, tick: int, forward: list[list[tuple[int, int]]], backward: list[list[tuple[int, int]]]) -> None:
        row = {name: [-1] * self.stages for name in COLUMNS}
        self.rows.append(row)
        drained = not any(forward)
        # All stages are examined before any runs: a result of this tick arrives at the next one.
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
            # Freed when it is read: the slot can receive an input that arrives at the end of this tick.
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
        """Assigns slots on the receiving stages to the results of this tick."""
        for microbatch, piece in np.argwhere(self.ran[0] == tick).tolist():
            if piece + 1 < self.pieces:
                row["arriving_slot"][(piece + 1) % self.stages] = self._take("input", microbatch, piece + 1)
        for microbatch, piece in np.argwhere(self.ran[1] == tick).tolist():
            if piece > 0:
                slot = self._take("gradient", microbatch, piece - 1)
                row["arriving_gradient_slot"][(piece - 1) % self.stages] = slot

    def _take(self, kind: str, microbatch: int, piece: int) -> int:
        taken = self.taken.setdefault((kind, piece % self.stages), set())
        # Taking the lowest free slot limits the number of slots to the maximum number of live buffers.
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
