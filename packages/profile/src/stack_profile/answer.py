"""What every analysis returns: totals, rows, and the four forms in which they are read.

The name of a field is its unit: `_s` seconds, `_bytes`, `_flops`, `_share` a part of what the word before it names, so
that `busy_share` is a share of the busy time, and `idle_step_share` the idle part of a step. None is "not known", which
is not 0.
"""

import csv
import dataclasses
import importlib
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from stack_profile.errors import ProfileError
from stack_profile.plots import Plot

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Answer", "number", "present", "share_of", "title"]

Row = TypeVar("Row")


@dataclass(frozen=True)
class Answer(Generic[Row]):
    """The result of an analysis.

    Attributes:
      facts: totals; those that shares refer to are among them.
      row_type: of the rows, of which there may be none.
      notes: what the numbers mean, and what is missing from them.
      plots: what of it a report draws.
    """

    name: str
    facts: Mapping[str, Any]
    row_type: type[Row]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    plots: tuple[Plot, ...] = ()

    def as_mapping(self) -> dict[str, Any]:
        """For JSON."""
        rows = [dataclasses.asdict(row) for row in self.rows]  # pyrefly: ignore
        return {"analysis": self.name, "facts": dict(self.facts), "rows": rows, "notes": list(self.notes)}

    def as_pandas(self) -> Any:
        """The rows as a `pandas.DataFrame`.

        Raises:
          ProfileError: pandas is not installed.
        """
        try:
            pandas: Any = importlib.import_module("pandas")
        except ImportError as error:
            raise ProfileError("pandas is not installed: pip install stack-profile[pandas].") from error
        return pandas.DataFrame(self.as_mapping()["rows"], columns=self.columns)

    def as_csv(self) -> Iterator[str]:
        """Lines of a spreadsheet, the first of them the names; what is not known is empty."""
        for cells in (self.columns, *([getattr(row, name) for name in self.columns] for row in self.rows)):
            line = io.StringIO()
            csv.writer(line, lineterminator="\n").writerow(cells)
            yield line.getvalue()

    @property
    def columns(self) -> list[str]:
        return [field.name for field in dataclasses.fields(self.row_type)]  # pyrefly: ignore

    def table(self, limit: int | None = None) -> "Table":
        """The rows for a terminal, the first `limit` of them; columns in which nothing is known are left out."""
        from rich.table import Table

        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        shown = self.rows[:limit]
        cells = {name: [getattr(row, name) for row in shown] for name in self.columns}
        kept = {name: column for name, column in cells.items() if any(cell not in (None, "") for cell in column)}
        for name, column in kept.items():
            is_text = all(isinstance(cell, str) for cell in column if cell is not None)
            table.add_column(title(name), justify="left" if is_text else "right", overflow="fold")
        for cell_row in zip(*kept.values(), strict=True):
            table.add_row(*(number(name, cell) for name, cell in zip(kept, cell_row, strict=True)))
        return table


def present(answer: Answer[Any], limit: int | None = None) -> Iterable[Any]:
    """What a terminal shows of an answer: facts, the table, what was left out, notes."""
    yield ", ".join(f"{title(name)}: {number(name, value)}" for name, value in answer.facts.items())
    if answer.rows:
        yield answer.table(limit)
    else:
        yield "No rows: see the notes." if answer.notes else "No rows."
    if limit is not None and len(answer.rows) > limit:
        yield f"... and {len(answer.rows) - limit} more rows; --limit 0 shows all."
    yield from (f"note: {note}" for note in answer.notes)


def title(name: str) -> str:
    """The heading of a field, "idle % of step" of `idle_step_share`."""
    if name.endswith("_share"):
        *part, whole = name.removesuffix("_share").split("_")
        return " ".join([*part, "% of", whole])
    for suffix, form in _TITLES.items():
        if name.endswith(suffix):
            return form.format(name.removesuffix(suffix).strip("_").replace("_", " ")).strip()
    return name.replace("_", " ")


_TITLES: Final = {
    "_flops_s": "{} FLOP/s",
    "_bytes_s": "{} B/s",
    "flops": "{} FLOPs",
    "_bytes": "{}",
    "_s": "{}",
}
_DASH: Final = "-"


def number(name: str, value: object) -> str:
    """A value of the field `name` for people: three digits and a unit; a dash is "not known"."""
    if value is None or value == "":
        return _DASH if value is None else "(none)"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {number(name, each)}" for key, each in value.items())
    if isinstance(value, bool) or not isinstance(value, int | float):
        return (
            ", ".join(number(name, each) for each in value)
            if isinstance(value, Sequence) and not isinstance(value, str)
            else str(value)
        )
    form = next((form for suffix, form in _FORMS.items() if name.endswith(suffix)), None)
    if form is not None:
        return form(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.3g}"


def share_of(text: str) -> float:
    """The share that "3%" or "0.03" is.

    Raises:
      ProfileError: the text is neither.
    """
    number_, percent, rest = text.partition("%")
    try:
        share = float(number_) / (100 if percent else 1)
    except ValueError:
        share = -1.0
    if rest or not share >= 0:
        raise ProfileError(f"{text!r} is no share. Write one as 3% or as 0.03.")
    return share


def _scaled(value: int | float, base: int, units: Sequence[str]) -> str:
    scaled, unit = float(value), 0
    while abs(scaled) >= base and unit + 1 < len(units):
        scaled, unit = scaled / base, unit + 1
    return f"{scaled:.3g} {units[unit]}".strip() if scaled < 1000 else f"{scaled:.0f} {units[unit]}".strip()


def _seconds(value: int | float) -> str:
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {unit}" if value < 1000 else f"{value:,.0f} s"
    return "0" if value == 0 else f"{value / 1e-9:.3g} ns"


def _share(value: int | float) -> str:
    return f"{value:.1%}" if value == 0 or abs(value) >= 0.001 else f"{100 * value:.2g}%"


def _flops(value: int | float) -> str:
    return _scaled(value, 1000, ("", "k", "M", "G", "T", "P", "E"))


def _bytes(value: int | float) -> str:
    return _scaled(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


# The longer suffixes first: "_bytes_s" is no time.
_FORMS: Final[Mapping[str, Callable[[int | float], str]]] = {
    "_share": _share,
    "_flops_s": _flops,
    "flops": _flops,
    "_bytes_s": _bytes,
    "_bytes": _bytes,
    "_s": _seconds,
}
