"""The coverage report of the transform: a row for each rule, parameter and operation."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from stack_core.report.markup import element
from stack_quant.rules import Rule

__all__ = ["OpRow", "ParameterRow", "Report", "RuleRow", "aligned", "report"]


@dataclass(frozen=True)
class OpRow:
    """Identical operations on a parameter or on two activations.

    Attributes:
      op: name of the operation, including the enclosing named scopes.
      paths: paths of the parameters among the operands.
      rule: index of the applied rule, from 0; None without a matching rule.
      operands: type of each operand, such as "int8" or "float32".
      computed: "quantized" if both operands enter the product as codes; "dequantized" if a parameter is dequantized
        first; "rounded" if an operand is only rounded to the values of its type; else "float".
      reason: reason why codes are not multiplied, or why nothing is quantized; else "".
      source: "path:line" of the user's code, or "".
      calls: number of such operations in the program; an operation in a loop counts once.
    """

    op: str
    paths: tuple[str, ...]
    rule: int | None
    operands: tuple[str, ...]
    computed: str
    reason: str = ""
    source: str = ""
    calls: int = 1


@dataclass(frozen=True)
class ParameterRow:
    """A parameter before and after quantization.

    Attributes:
      path: path of the parameter.
      rule: index of the rule that applies, or None.
      shape: shape of the parameter.
      scheme: "int4/t128" if it is quantized; "float32 as int4" if it is stored in float and rounded in products; else
        its dtype.
      scale_shape: shape of the stored scales, or None.
      bytes_before, bytes_after: memory of the parameter.
      reason: reason why the parameter stays in float; else "".
      note: remark on tiles that differ from the tiles of the rule, or on an untied head; else "".
    """

    path: str
    rule: int | None
    shape: tuple[int, ...]
    scheme: str
    scale_shape: tuple[int, ...] | None
    bytes_before: int
    bytes_after: int
    reason: str = ""
    note: str = ""


@dataclass(frozen=True)
class RuleRow:
    """A rule and its matches.

    Attributes:
      number: index of the rule, from 0.
      rule: the rule.
      parameters: number of parameters that it quantizes.
      operations: number of operations to which it applies.
    """

    number: int
    rule: Rule
    parameters: int
    operations: int


@dataclass(frozen=True, repr=False)
class Report:
    """Coverage report of a quantized program, with a reason for everything left in float.

    `str(report)` is a table; notebooks show one with headings.

    Attributes:
      method: name of the method.
      rules, parameters, operations: rows of the report.
    """

    method: str
    rules: tuple[RuleRow, ...]
    parameters: tuple[ParameterRow, ...]
    operations: tuple[OpRow, ...]

    @property
    def bytes_before(self) -> int:
        return sum(row.bytes_before for row in self.parameters)

    @property
    def bytes_after(self) -> int:
        return sum(row.bytes_after for row in self.parameters)

    def rows(self) -> tuple[dict[str, Any], ...]:
        """Returns all rows as mappings. The entry "kind" is "rule", "parameter" or "operation"."""
        kinds = {"rule": self.rules, "parameter": self.parameters, "operation": self.operations}
        return tuple(
            {"kind": kind, **dataclasses.asdict(row)} | ({"rule": str(row.rule)} if kind == "rule" else {})
            for kind, rows in kinds.items()
            for row in rows
        )

    def __repr__(self) -> str:
        done = sum(row.scale_shape is not None for row in self.parameters)
        size = f"{self.bytes_before:,} bytes before, {self.bytes_after:,} after"
        return f"<Report of {self.method}: {done} of {len(self.parameters)} parameters quantized, {size}>"

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _repr_html_(self) -> str:
        # One row for each parameter; operations are listed by `str` and by `rows`.
        heads = ("parameter", "shape", "stored as", "scales", "bytes before", "after", "")
        cells = (
            (
                row.path,
                str(list(row.shape)),
                row.scheme,
                _scales(row).removeprefix("scales "),
                f"{row.bytes_before:,}",
                f"{row.bytes_after:,}",
                row.reason or row.note,
            )
            for row in self.parameters
        )
        body = (element("tr", *(element("td", cell) for cell in row)) for row in cells)
        head = element("tr", *(element("th", name, scope="col") for name in heads))
        table = element("table", element("thead", head), element("tbody", *body))
        return str(element("div", element("p", repr(self).strip("<>")), table))

    def _lines(self) -> Iterator[str]:
        share = self.bytes_after / max(self.bytes_before, 1)
        yield f"{self.method}: {self.bytes_before:,} bytes before, {self.bytes_after:,} after ({share:.1%})"
        yield "rules"
        for row in self.rules:
            yield f"  {row.number}  {row.rule}: {row.parameters} parameters, {row.operations} operations"
        yield "parameters"
        table = [
            (row.path, str(list(row.shape)), row.scheme, _scales(row), f"{row.bytes_before:,} -> {row.bytes_after:,}")
            for row in self.parameters
        ]
        yield from aligned(table, [row.reason or row.note for row in self.parameters])
        yield "operations"
        table = [(row.op, " x ".join(row.operands), row.computed, f"{row.calls}x") for row in self.operations]
        yield from aligned(table, [_why(row) for row in self.operations])


def report(
    method: str, rules: Sequence[Rule], parameters: Sequence[ParameterRow], operations: Sequence[OpRow]
) -> Report:
    """Builds the report, with identical operations merged into one row."""
    counted = Counter(operations)
    merged = tuple(dataclasses.replace(row, calls=calls) for row, calls in counted.items())
    of_parameters = Counter(row.rule for row in parameters if not row.reason)
    of_operations = Counter(row.rule for row in operations)
    listed = tuple(
        RuleRow(number, rule, of_parameters[number], of_operations[number]) for number, rule in enumerate(rules)
    )
    return Report(method, listed, tuple(parameters), merged)


def _scales(row: ParameterRow) -> str:
    return "" if row.scale_shape is None else f"scales {list(row.scale_shape)}"


def _why(row: OpRow) -> str:
    paths = f"[{', '.join(row.paths)}]" if row.paths else ""
    return "  ".join(part for part in (paths, row.reason, row.source) if part)


def aligned(table: Sequence[tuple[str, ...]], last: Sequence[str]) -> Iterator[str]:
    """Yields the lines of a table with aligned columns, each followed by a text."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row, text in zip(table, last, strict=True):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield "  ".join(["", *cells, text]).rstrip()
