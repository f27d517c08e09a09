"""Results of `stack bench ops`, as a file to compare later runs against."""

import dataclasses
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stack_core.abi.errors import BenchmarkError
from stack_kernels.tuning.measure import Timing

__all__ = ["Results", "Row"]

FORMAT = "stack bench ops 1"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One call, measured in turns with the same call of the reference.

    Attributes:
      op: name of the op.
      model: model size that the call belongs to, as in `BenchCase`.
      case: name of the case.
      dtype: measured dtype.
      direction: "forward", or "gradient" for the value and all gradients.
      asked: requested implementation, or "" if core chose.
      ran: implementation that ran forward and, if different, backward, each with its config.
      wall_s: wall seconds of each round.
      cpu_s: CPU seconds of each round, over all threads.
      reference_wall_s: wall seconds of the reference in the same rounds.
      reference_cpu_s: CPU seconds of the reference in the same rounds.
      flops: FLOPs of the call's products.
      traffic_bytes: bytes of its operands and results.
      bound_s: shortest time that the chip's peaks allow; None if a peak is unknown.
      denominator: the peak that limits the call.
    """

    op: str
    model: str
    case: str
    dtype: str
    direction: str
    asked: str
    ran: str
    wall_s: tuple[float, ...]
    cpu_s: tuple[float, ...]
    reference_wall_s: tuple[float, ...]
    reference_cpu_s: tuple[float, ...]
    flops: int
    traffic_bytes: int
    bound_s: float | None
    denominator: str | None

    @property
    def key(self) -> tuple[str, ...]:
        """Identifies the same call in another run."""
        return (self.op, self.model, self.case, self.dtype, self.direction, self.asked)

    @property
    def title(self) -> str:
        return " ".join(self.key).strip()

    @property
    def timing(self) -> Timing:
        return Timing(self.wall_s, self.cpu_s)

    @property
    def reference_timing(self) -> Timing:
        return Timing(self.reference_wall_s, self.reference_cpu_s)

    @property
    def ratios(self) -> tuple[float, ...]:
        """Time over the reference's time, by round."""
        return tuple(own / other for own, other in zip(self.wall_s, self.reference_wall_s, strict=True))

    @property
    def ratio(self) -> float:
        """The median of the ratios."""
        return statistics.median(self.ratios)

    @property
    def roofline_share(self) -> float | None:
        """The bound over the median time; above 1 if the operands stay in caches."""
        return None if self.bound_s is None else self.bound_s / self.timing.median_s


@dataclass(frozen=True, kw_only=True)
class Results:
    """Results of one run.

    Attributes:
      date: ISO 8601, UTC.
      chip: `Chip.kind` of the device.
      model: `Chip.model` of the device.
      provenance: source of the chip's peaks.
      versions: versions of the packages that affect speed, by name.
      rows: measured calls.
    """

    date: str
    chip: str
    model: str
    provenance: str
    versions: dict[str, str]
    rows: tuple[Row, ...]

    @property
    def chip_name(self) -> str:
        return f"{self.chip} ({self.model})" if self.model else self.chip

    @property
    def heading(self) -> str:
        """One line with the date, the chip and the versions."""
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return f"{self.date[:10]}, {self.chip_name}, {versions}"

    def write(self, path: Path) -> None:
        """Writes the results to a file; raises BenchmarkError if it cannot be written."""
        try:
            path.write_text(json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1) + "\n")
        except OSError as error:
            raise BenchmarkError(f"The results cannot be written to {str(path)!r}: {error}.") from error

    @classmethod
    def read(cls, path: Path) -> "Results":
        """Reads a file that `write` wrote.

        Raises:
          BenchmarkError: the file is missing, damaged or of another format.
        """
        try:
            content = json.loads(path.read_bytes())
        except OSError as error:
            raise BenchmarkError(
                f"The baseline {str(path)!r} cannot be read: {error}. Make one with `stack bench ops --json {path}`."
            ) from error
        except ValueError as error:  # includes JSONDecodeError and UnicodeDecodeError
            raise _damaged(path, f"it is no JSON: {error}") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            found = content.get("format") if isinstance(content, dict) else type(content).__name__
            raise _damaged(path, f"its format is {found!r}, expected {FORMAT!r}")
        try:
            return cls._parsed(content)
        except (TypeError, ValueError, KeyError) as error:
            raise _damaged(path, f"{type(error).__name__}: {error}") from error

    @classmethod
    def _parsed(cls, content: dict[str, Any]) -> "Results":
        fields = {name: value for name, value in content.items() if name != "format"}
        rows = tuple(_row(row) for row in fields.pop("rows"))
        if not isinstance(fields["versions"], dict):
            raise ValueError(f"its versions are {fields['versions']!r}")
        if len({row.key for row in rows}) < len(rows):
            raise ValueError("a call is in it twice")
        return cls(**fields, rows=rows)


def _row(mapping: dict[str, Any]) -> Row:
    timings: dict[str, Any] = {
        name: tuple(mapping[name]) for name in ("wall_s", "cpu_s", "reference_wall_s", "reference_cpu_s")
    }
    row = Row(**{**mapping, **timings})
    seconds = (*row.wall_s, *row.reference_wall_s)
    if not all(isinstance(value, float) and value > 0 for value in seconds) or not row.wall_s:
        raise ValueError(f"the times of {row.title} are not all positive")
    if len(row.wall_s) != len(row.reference_wall_s):
        raise ValueError(f"{row.title} has {len(row.wall_s)} rounds, its reference {len(row.reference_wall_s)}")
    return row


def _damaged(path: Path, problem: str) -> BenchmarkError:
    return BenchmarkError(
        f"The baseline {str(path)!r} cannot be used: {problem}. Make it anew with `stack bench ops --json {path}`."
    )
