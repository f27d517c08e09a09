"""Tables of measurements: results by implementation, config, call and chip.

A table is one JSON file per chip. It keeps every result, including rejected and failed candidates, and can be merged,
committed and shared. `lookup` chooses from tables; this module does not.
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
from stack_kernels.checks import TABLES_VARIABLE
from stack_kernels.tuning.shapes import CallShape

__all__ = [
    "FORMAT",
    "HERE",
    "Case",
    "ChipName",
    "Measurement",
    "Table",
    "decoded_config",
    "encoded_config",
    "local_folder",
    "local_table_path",
]

FORMAT = "stack tuned table 1"
HERE = Path(".stack", "tuned")
"""Folder in the working directory for its measurements, read by processes that start there."""
_FIELDS = {"format", "chip", "cases"}


@dataclass(frozen=True)
class ChipName:
    """Identity of the chip that a table is valid for, with the peaks that determine which other chips are similar.

    Attributes:
      kind: name of the chip's row, such as "h200"; "cpu" for CPUs.
      model: distinguishes chips of one kind: a CPU's name and cores.
      rates: peaks by dtype and "memory", in FLOP/s and bytes/s.
    """

    kind: str
    model: str
    # Not compared: peaks of a CPU are measured, and a later measurement may differ.
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
      shape: kind and sizes of the call.
      direction: "forward" or "backward".
      gradients_of: arguments with respect to which the backward pass computes gradients.
    """

    shape: CallShape
    direction: str
    gradients_of: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        """Key shared by calls that share their measurements."""
        return self.shape.op, self.shape.traits, self.shape.bucket, self.direction, self.gradients_of


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Result of one implementation with one config in one case.

    Attributes:
      case: the case.
      implementation: name of the implementation.
      config: config in JSON form; None for an implementation without configs.
      outcome: "measured", "rejected" (wrong numbers) or "failed" (it raised).
      reason: reason of a rejection or failure.
      median_s: median wall seconds of a call.
      spread: interquartile range over the median.
      cpu_s: median CPU seconds of a call, over all threads of the process.
      rounds: number of rounds.
      whole: True in a backward case if the seconds cover value and gradient together, because the passes share private
        residuals; False if they cover only the gradient.
      versions: versions of jax and of the measured packages.
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
        """The minor version of JAX, such as "0.12", which determines the behavior of its compilers."""
        return ".".join(self.versions.get("jax", "").split(".")[:2])

    @property
    def candidate(self) -> tuple[str, str]:
        """The implementation and its config, as a hashable key."""
        return self.implementation, json.dumps(self.config, sort_keys=True)

    @property
    def key(self) -> tuple[Any, ...]:
        """Key of the measurement; a table keeps only the newest measurement per key."""
        return (*self.case.key, *self.candidate, self.jax)


@dataclass(frozen=True)
class Table:
    """Measurements of one chip. Tables with equal contents are equal."""

    chip: ChipName
    measurements: tuple[Measurement, ...] = ()

    def __hash__(self) -> int:
        # Measurements contain mappings, which cannot be hashed.
        return hash((self.chip, len(self.measurements), *(found.date for found in self.measurements[-1:])))

    def merge(self, *tables: "Table | Iterable[Measurement]") -> "Table":
        """Returns a table with the measurements of others added.

        Per key the newer measurement wins; at equal age, the measurement with more rounds.

        Raises:
          TuningError: another table is for another chip.
        """
        merged = {found.key: found for found in self.measurements}
        for other in tables:
            if isinstance(other, Table) and other.chip != self.chip:
                raise TuningError(f"A table of {other.chip} cannot be merged into one of {self.chip}; keep them apart.")
            for found in other.measurements if isinstance(other, Table) else other:
                known = merged.get(found.key)
                if known is None or (found.date, found.rounds) >= (known.date, known.rounds):
                    merged[found.key] = found
        return Table(self.chip, tuple(merged.values()))

    @classmethod
    def read(cls, path: Path) -> "Table":
        """Reads a table that `write` wrote.

        Raises:
          TuningError: the file is missing, damaged, or of another format.
        """
        try:
            content = json.loads(Path(path).read_bytes())
        except OSError as error:
            raise TuningError(f"The tuned table {str(path)!r} cannot be read: {error}. Name another.") from error
        except ValueError as error:  # includes JSONDecodeError and UnicodeDecodeError
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
        """Writes or replaces a file atomically.

        Raises:
          TuningError: the file cannot be written.
        """
        path = Path(path)
        content = {"format": FORMAT, "chip": dataclasses.asdict(self.chip), "cases": _cases(self.measurements)}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Written in the same folder and renamed: a reader sees the old table or the new one.
            descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-")
            try:
                with os.fdopen(descriptor, "w") as file:
                    json.dump(content, file, indent=1)
                    file.write("\n")
                # `mkstemp` lets only the owner read; tables are shared.
                Path(temporary).chmod(0o644)
                Path(temporary).replace(path)
            finally:
                Path(temporary).unlink(missing_ok=True)
        except OSError as error:
            raise TuningError(f"The tuned table {str(path)!r} cannot be written: {error}.") from error


def local_table_path(chip: ChipName, folder: Path | None = None) -> Path:
    """Returns the file in which `tune` stores the measurements of a chip, in `folder` or in `local_folder()`."""
    return (folder or local_folder()) / chip.file_name


def local_folder() -> Path:
    """Returns the first folder that `STACK_TUNED_TABLES` names, else `.stack/tuned` of the working directory."""
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
    """Converts a config to JSON form."""
    return dataclasses.asdict(config) if dataclasses.is_dataclass(config) else config


def decoded_config(value: Any, default: Any) -> Any:
    """Converts a table's value to a config of the type of `default`; None stands for no config.

    Raises:
      ValueError: the value does not fit that type, for example because the implementation changed since the
        measurement.
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
        # Not isinstance, which takes True for an int.
        if type(part) is not types[name]:
            raise ValueError(f"{name}={part!r} in a {kind.__name__}; expected {types[name].__name__}")
    return kind(**value)
