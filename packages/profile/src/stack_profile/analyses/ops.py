"""Device time by category, layer, Python line or operation.

Times are self times (`stack_profile.traces.intervals`): an instant belongs to the innermost running operations, so the
rows sum to the time in which any operation ran.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from stack_core.abi.errors import UnknownName, nearest
from stack_core.report.fields import number
from stack_core.report.plots import bars
from stack_profile.answer import Answer
from stack_profile.traces.categories import category_of
from stack_profile.traces.operations import Operation, Ops
from stack_profile.traces.spans import places_of
from stack_profile.traces.trace import Trace

__all__ = ["GROUPINGS", "Grouping", "OpsRow", "chosen_devices", "grouping", "layer_names", "ops"]

Grouping = Literal["category", "layer", "scope", "line", "file", "op", "kernel"]


@dataclass(frozen=True)
class OpsRow:
    """Total time of one group of operations.

    Attributes:
      name: name of the group; empty for operations without one, such as operations outside of any layer.
      self_s: the group's part of the busy time.
      busy_share: `self_s` as a share of `busy_s`, the time in which any operation ran.
      forward_s, backward_s, recomputed_s, unknown_s: parts of `self_s` by pass of the training step; unknown if the
        trace lacks the operation's program.
      occurrences: number of executions.
      example: the operation with the most self time in the group.
      package_line: the example's line in an installed package; empty if it has none.
    """

    name: str
    self_s: float
    busy_share: float | None
    forward_s: float
    backward_s: float
    recomputed_s: float
    unknown_s: float
    occurrences: int
    example: str
    package_line: str = ""


def ops(trace: Trace, *, by: Grouping = "op", within: Path | None = None, device: str | None = None) -> Answer[OpsRow]:
    """Show where the devices' time went.

    Args:
      by: grouping of the operations: by category of work, layer of the model (outside of layers by function), named
        scope, Python line or file, individually, or by kernel on a GPU, where equal operations share one. Lines are the
        innermost of your own code, outside of installed packages.
      within: assign time to the innermost line of a file under this directory, such as your own code's.
      device: one device instead of all of them together.

    Raises:
      UnknownName: the trace does not have the device.
    """
    devices = chosen_devices(trace, device)
    folder = str(within.resolve()) if within else ""
    # Plots always need these groupings, which may include `by`.
    keys = {each: grouping(each, folder) for each in {by: 0, **dict.fromkeys(_DRAWN)}}
    keys["layer"] = layer_names(devices)
    rows = {each: _rows(devices, key) for each, key in keys.items()}
    return Answer(
        name=f"ops by {by}",
        facts=_totals(devices, folder),
        row_type=OpsRow,
        rows=rows[by],
        notes=(*_notes(devices, trace.about.get("stack_frames", _STACK_FRAMES)), *trace.problems),
        plots=tuple(bars(f"Self time by {each}", rows[each], *_PARTS) for each in _DRAWN) if devices else (),
    )


def _rows(devices: Sequence[Ops], key: Callable[[Operation], str]) -> tuple[OpsRow, ...]:
    sums: dict[str, _Sum] = {}
    for operation, self_s, count in (total for each in devices for total in each.totals()):
        sums.setdefault(key(operation), _Sum()).add(operation, self_s, count)
    busy_s = sum((each.busy_s for each in devices), 0.0)
    return tuple(sorted((found.row(name, busy_s) for name, found in sums.items()), key=lambda row: -row.self_s))


def layer_names(devices: Sequence[Ops]) -> Callable[[Operation], str]:
    """Returns the function that maps an operation to its layer, or outside of layers to a function of the program."""
    operations = [operation for each in devices for operation in each.operations]
    places = zip(operations, places_of(operations), strict=True)
    names = {
        id(operation): "/".join(path)
        for operation, (path, _) in places
        if operation.instruction is not None and operation.instruction.frames
    }
    return lambda operation: GROUPINGS["layer"](operation) or names.get(id(operation), "")


def _totals(devices: Sequence[Ops], folder: str) -> dict[str, Any]:
    """Computes the totals; attributed time belongs to operations with a Python line (under `folder`, if given)."""
    if not devices:
        return {"devices": 0}
    totals = [total for each in devices for total in each.totals()]
    busy_s = sum((each.busy_s for each in devices), 0.0)
    attributed_s = sum((self_s for operation, self_s, _ in totals if _source(operation, folder, line=True)), 0.0)
    unattributed_s = sum((self_s for operation, self_s, _ in totals if not _source(operation, folder, line=True)), 0.0)
    layered_s = sum((self_s for operation, self_s, _ in totals if GROUPINGS["layer"](operation)), 0.0)
    return {
        "devices": len(devices),
        "busy_s": busy_s,
        "attributed_s": attributed_s,
        "unattributed_s": unattributed_s,
        "attributed_busy_share": attributed_s / busy_s if busy_s else None,
        "in_layers_s": layered_s,
        "in_layers_busy_share": layered_s / busy_s if busy_s else None,
        "occurrences": sum(len(each) for each in devices),
    }


def chosen_devices(trace: Trace, device: str | None) -> tuple[Ops, ...]:
    """Returns all devices of a trace, or only the named one.

    Raises:
      UnknownName: the trace does not have the device.
    """
    found = tuple(each for each in trace.devices if device in (None, each.device))
    if not found and device is not None:
        known = [each.device for each in trace.devices]
        raise UnknownName(
            f"The trace has no operations of a device {device!r}.{nearest(device, known)} "
            f"There are: {', '.join(known) or 'none'}."
        )
    return found


def grouping(by: Grouping, within: str = "") -> Callable[[Operation], str]:
    """Returns the function that maps an operation to its group's name."""
    if by in ("line", "file"):
        return lambda operation: _source(operation, within, line=by == "line")
    if by == "kernel":
        return lambda operation: operation.kernel or operation.name
    return GROUPINGS[by]


@dataclass
class _Sum:
    self_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    recomputed_s: float = 0.0
    unknown_s: float = 0.0
    occurrences: int = 0
    # Below 0, so an operation without self time can be the example, too.
    largest_s: float = -1.0
    example: Operation | None = None

    def add(self, operation: Operation, self_s: float, count: int) -> None:
        self.self_s += self_s
        self.occurrences += count
        field = f"{operation.instruction.scope.direction if operation.instruction else 'unknown'}_s"
        setattr(self, field, getattr(self, field) + self_s)
        if self_s > self.largest_s:
            self.largest_s, self.example = self_s, operation

    def row(self, name: str, busy_s: float) -> OpsRow:
        share = self.self_s / busy_s if busy_s else None
        parts = (self.forward_s, self.backward_s, self.recomputed_s, self.unknown_s)
        instruction = self.example.instruction if self.example else None
        package_line = str((instruction.package_source if instruction else None) or "")
        example = self.example.name if self.example else ""
        return OpsRow(name, self.self_s, share, *parts, self.occurrences, example, package_line)


def _source(operation: Operation, within: str, *, line: bool) -> str:
    frame = operation.instruction.source(within) if operation.instruction else None
    if frame is None:
        return ""
    return str(frame) if line else frame.path


GROUPINGS: Final[Mapping[str, Callable[[Operation], str]]] = {
    "category": category_of,
    "layer": lambda operation: operation.instruction.layer if operation.instruction else "",
    "scope": lambda operation: operation.instruction.scope.path if operation.instruction else "",
    "op": lambda operation: f"{operation.module}: {operation.name}" if operation.module else operation.name,
}


_DRAWN: Final[Sequence[Grouping]] = ("category", "layer", "line")
_PARTS: Final = ("forward_s", "backward_s", "recomputed_s", "unknown_s")


_STACK_FRAMES: Final = 100  # JAX's default limit


def _notes(devices: tuple[Ops, ...], stack_frames: int) -> Iterable[str]:
    """Yields the notes; `stack_frames` is JAX's limit of frames per Python stack, negative if unlimited."""
    if not devices:
        yield (
            "No data: the trace has no operations of any device. Capture while a compiled function runs; operations of "
            "functions that are interpreted, and those under jax.disable_jit, have no events."
        )
        return
    yield "Shares are fractions of the busy time, in which any operation ran. Attributed time has a Python line."
    totals = [total for each in devices for total in each.totals()]
    without = [total for total in totals if total[0].instruction is None]
    for reason, found in (
        (
            "executions belong to programs whose HLO the trace lacks: they have only names and times",
            [total for total in without if total[0].program is None and not total[0].beside and not total[0].kernel],
        ),
        (
            "kernels could not be joined with an instruction of their program, because its HLO is missing or does not "
            "explain them",
            [total for total in without if total[0].kernel and not total[0].beside],
        ),
        ("copies and kernels belong to no program", [total for total in without if total[0].beside]),
    ):
        if found:
            self_s, count = sum(total[1] for total in found), sum(total[2] for total in found)
            yield f"{count:,} {reason}: {number('_s', self_s)} in {_names(found)}."
    cut_s = sum((self_s for operation, self_s, _ in totals if _is_cut(operation, stack_frames)), 0.0)
    if cut_s:
        yield (
            f"{number('_s', cut_s)} are in no layer, of operations whose Python stacks may be cut off: JAX keeps "
            f"{stack_frames} frames. With JAX_TRACEBACK_IN_LOCATIONS_LIMIT=-1 in the environment when the program is "
            "traced it keeps all; layers that jax.named_scope names need none."
        )


def _names(totals: Sequence[tuple[Operation, float, int]]) -> str:
    """Returns the names of the operations with the most self time."""
    names = list(dict.fromkeys(total[0].name for total in sorted(totals, key=lambda total: -total[1])))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _is_cut(operation: Operation, stack_frames: int) -> bool:
    instruction = operation.instruction
    # A stack of the maximum length may have lost its outer frames, and the layer with these.
    return instruction is not None and not instruction.layer and 0 <= stack_frames <= len(instruction.frames)
