"""Tables of measurements: what was measured of which implementation and config, for which call, on which chip.

A table is one JSON file a chip. It keeps everything, also what was rejected or failed, and can be merged, committed and
shared. Nothing here chooses; `lookup` does.
"""

import dataclasses
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stack_core.abi.errors import TuningError
from stack_core.chips import Chip
from stack_kernels.tuning.shapes import CallShape

__all__ = [
    "FORMAT",
    "HERE",
    "TABLES_VARIABLE",
    "Case",
    "ChipName",
    "Measurement",
    "Table",
    "decoded_config",
    "encoded_config",
    "own_folder",
    "own_table_path",
]

FORMAT = "stack tuned table 1"
HERE = Path(".stack", "tuned")
"""The folder of a working directory that keeps what was measured there, for processes that start there."""
TABLES_VARIABLE = "STACK_TUNED_TABLES"
_FIELDS = {"format", "chip", "cases"}


@dataclass(frozen=True)
class ChipName:
    """What a table's measurements are valid for, and how to tell which other chips are like it.

    Attributes:
      kind: the row's name, "h200"; of CPUs it is "cpu".
      model: what tells chips of one kind apart: a CPU's name and cores.
      rates: peaks by dtype and "memory", in FLOP/s and bytes/s.
    """

    kind: str
    model: str
    rates: Mapping[str, float] = field(compare=False, default_factory=dict)

    @classmethod
    def of(cls, chip: Chip) -> "ChipName":
        memory = {"memory": chip.hbm_bandwidth_bytes_s} if chip.hbm_bandwidth_bytes_s else {}
        return cls(chip.kind, chip.model, {**chip.peak_flops, **memory})

    def __str__(self) -> str:
        return f"{self.kind} ({self.model})" if self.model else self.kind

    @property
    def file_name(self) -> str:
        words = re.findall(r"[a-z0-9.]+", str(self).lower())
        return f"{'-'.join(words)}.json"


@dataclass(frozen=True)
class Case:
    """One direction of one kind of call.

    Attributes:
      direction: "forward" or "backward".
      gradients_of: the arguments that the backward pass was asked gradients of.
    """

    shape: CallShape
    direction: str
    gradients_of: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for calls that share their measurements."""
        return self.shape.op, self.shape.traits, self.shape.bucket, self.direction, self.gradients_of


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What is known of one implementation with one config in one case.

    Attributes:
      config: as JSON has it, None for an implementation without configs.
      outcome: "measured", "rejected" (its numbers were wrong) or "failed" (it raised).
      reason: why it was rejected or failed.
      median_s: wall seconds of a call.
      spread: the interquartile range as a share of the median.
      whole: in a backward case, the seconds are those of value and gradient together, which the two passes share;
        else of the gradient alone.
      versions: of jax and of the packages that were measured.
      date: ISO 8601, UTC.
    """

    case: Case
    implementation: str
    config: Any
    outcome: str
    reason: str = ""
    median_s: float = 0.0
    spread: float = 0.0
    cpu_s: float = 0.0
    rounds: int = 0
    whole: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)
    date: str = ""

    @property
    def jax(self) -> str:
        """The minor version of JAX, which decides what its compilers do: "0.12"."""
        return ".".join(self.versions.get("jax", "").split(".")[:2])

    @property
    def candidate(self) -> tuple[str, str]:
        """Implementation and config."""
        return self.implementation, json.dumps(self.config, sort_keys=True)

    @property
    def key(self) -> tuple[Any, ...]:
        """Of two measurements with one key, a table keeps the newer."""
        return (*self.case.key, *self.candidate, self.jax)


@dataclass(frozen=True)
class Table:
    """The measurements of one chip. Tables are equal when their contents are."""

    chip: ChipName
    measurements: tuple[Measurement, ...] = ()

    def __hash__(self) -> int:
        return hash((self.chip, len(self.measurements), *(found.date for found in self.measurements[-1:])))

    def merge(self, *others: "Table | Iterable[Measurement]") -> "Table":
        """With the measurements of others; of the same thing the newer wins, of equal age the one of more rounds.

        Raises:
          TuningError: another table is of another chip.
        """
        merged = {found.key: found for found in self.measurements}
        for other in others:
            if isinstance(other, Table) and other.chip != self.chip:
                raise TuningError(f"A table of {other.chip} cannot be merged into one of {self.chip}; keep them apart.")
            for found in other.measurements if isinstance(other, Table) else other:
                known = merged.get(found.key)
                if known is None or (found.date, found.rounds) >= (known.date, known.rounds):
                    merged[found.key] = found
        return Table(self.chip, tuple(merged.values()))

    @classmethod
    def read(cls, path: Path) -> "Table":
        """A table that `write` wrote.

        Raises:
          TuningError: the file is missing, damaged, or of another format.
        """
        try:
            content = json.loads(Path(path).read_bytes())
        except OSError as error:
            raise TuningError(f"The tuned table {str(path)!r} cannot be read: {error}.") from error
        except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are among them
            raise TuningError(
                f"The tuned table {str(path)!r} is damaged: {error}. Delete it, and tune again."
            ) from error
        found = content.get("format") if isinstance(content, dict) else None
        if found != FORMAT:
            raise TuningError(
                f"{str(path)!r} is of format {found!r}; this stack-kernels reads {FORMAT!r}. "
                "Tune again, or install the release that wrote it."
            )
        try:
            if content.keys() != _FIELDS:
                raise ValueError(f"its fields are {sorted(content)}")
            return cls(ChipName(**content["chip"]), tuple(_measurements(content["cases"])))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise TuningError(
                f"The tuned table {str(path)!r} is damaged: {type(error).__name__}: {error}. Delete it, and tune again."
            ) from error

    def write(self, path: Path) -> None:
        """Writes or replaces a file, wholly or not at all.

        Raises:
          TuningError: it cannot be written.
        """
        path = Path(path)
        content = {"format": FORMAT, "chip": dataclasses.asdict(self.chip), "cases": _cases(self.measurements)}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-")
            try:
                with os.fdopen(descriptor, "w") as file:
                    json.dump(content, file, indent=1)
                    file.write("\n")
                Path(temporary).chmod(0o644)
                Path(temporary).replace(path)
            finally:
                Path(temporary).unlink(missing_ok=True)
        except OSError as error:
            raise TuningError(f"The tuned table {str(path)!r} cannot be written: {error}.") from error


def own_table_path(chip: ChipName, folder: Path | None = None) -> Path:
    """Where `tune` keeps what it measures on a chip, in a folder or in `own_folder`."""
    return (folder or own_folder()) / chip.file_name


def own_folder() -> Path:
    """The first folder that `STACK_TUNED_TABLES` names, else `.stack/tuned` of the working directory."""
    named = [Path(place) for place in os.environ.get(TABLES_VARIABLE, "").split(os.pathsep) if place]
    return next((place for place in named if place.suffix != ".json"), HERE)


def _cases(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    grouped: dict[Case, list[dict[str, Any]]] = {}
    for found in measurements:
        record = {name: getattr(found, name) for name in _RECORD}
        grouped.setdefault(found.case, []).append(record)
    return [
        {
            "op": case.shape.op,
            "direction": case.direction,
            "gradients_of": list(case.gradients_of),
            "traits": dict(case.shape.traits),
            "sizes": dict(case.shape.sizes),
            "flops": case.shape.flops,
            "traffic_bytes": case.shape.traffic_bytes,
            "measurements": records,
        }
        for case, records in grouped.items()
    ]


_RECORD = tuple(each.name for each in dataclasses.fields(Measurement) if each.name != "case")
_OUTCOMES = ("measured", "rejected", "failed")


def _measurements(cases: Sequence[Mapping[str, Any]]) -> Iterable[Measurement]:
    for content in cases:
        traits, sizes = (tuple(sorted(content[part].items())) for part in ("traits", "sizes"))
        shape = CallShape(content["op"], traits, sizes, content["flops"], content["traffic_bytes"])
        case = Case(shape, content["direction"], tuple(content["gradients_of"]))
        for record in content["measurements"]:
            found = Measurement(case=case, **record)
            if found.outcome not in _OUTCOMES or not (found.outcome != "measured" or found.median_s > 0):
                raise ValueError(f"a measurement of {found.implementation!r} is {found.outcome!r}, {found.median_s} s")
            yield found


def encoded_config(config: Any) -> Any:
    """A config as JSON has it."""
    return dataclasses.asdict(config) if dataclasses.is_dataclass(config) else config


def decoded_config(value: Any, default: Any) -> Any:
    """The config of the type of `default`, None for no config, that a table's value stands for.

    Raises:
      ValueError: it does not fit that type, as when an implementation has changed since it was measured.
    """
    if default is None:
        if value is not None:
            raise ValueError(f"config {value!r} for an implementation that takes none")
        return None
    kind = type(default)
    if not dataclasses.is_dataclass(kind):
        if type(value) is not kind:
            raise ValueError(f"config {value!r} is no {kind.__name__}")
        return value
    types = {each.name: type(getattr(default, each.name)) for each in dataclasses.fields(kind)}
    if not isinstance(value, dict) or value.keys() != types.keys():
        raise ValueError(f"config {value!r} is no {kind.__name__}, whose fields are {', '.join(types)}")
    for name, part in value.items():
        if type(part) is not types[name]:
            raise ValueError(f"{name}={part!r} in a {kind.__name__}; expected {types[name].__name__}")
    return kind(**value)
