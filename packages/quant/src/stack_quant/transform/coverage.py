"""What the transform did: a row for each rule and for each operation that a rule touched, or could have."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from stack_quant.rules import Rule

__all__ = ["OpRow", "ParameterRow", "Report", "RuleRow", "report"]


@dataclass(frozen=True)
class OpRow:
    """An operation that a parameter, or two activations, go into; those that are alike are one row.

    Attributes:
      op: its name, the scopes around it included.
      paths: of the parameters among its operands.
      rule: the place of the rule that decided, from 0; None where none did.
      operands: what each operand is: "int8", "float32".
      computed: "quantized" where both operands go into the product as codes; "dequantized" where a parameter is
        turned into floats for it; "rounded" where an operand is only rounded to the type's values; or "float".
      reason: why codes are not multiplied as such, or nothing is quantized; "" where nothing is to be said.
      source: "path:line" of the user's code, or "".
      calls: how many such operations the program has; what is in a loop counts once.
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
    """A parameter, before and after.

    Attributes:
      rule: the place of the rule that matched its path, or None.
      scheme: "int4/t128"; "float32 as int4" where it is held in float and rounded as it is used; its dtype where it is
        left in float.
      scale_shape: of the scales that are held, or None.
      reason: why it is left in float; "" where it is not.
      note: where its tiles are not those of the rule, what they are and why.
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
    """A rule, and how many parameters and operations it decided."""

    number: int
    rule: Rule
    parameters: int
    operations: int


@dataclass(frozen=True)
class Report:
    """What was quantized, what was not, and why; `str` of it is for people.

    Attributes:
      method: the name of the method.
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
        """All rows as plain mappings; the entry "kind" says whether of a rule, a parameter or an operation."""
        kinds = {"rule": self.rules, "parameter": self.parameters, "operation": self.operations}
        return tuple(
            {"kind": kind, **dataclasses.asdict(row)} | ({"rule": str(row.rule)} if kind == "rule" else {})
            for kind, rows in kinds.items()
            for row in rows
        )

    def __str__(self) -> str:
        return "\n".join(self._lines())

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
        yield from _aligned(table, [row.reason or row.note for row in self.parameters])
        yield "operations"
        table = [(row.op, " x ".join(row.operands), row.computed, f"{row.calls}x") for row in self.operations]
        yield from _aligned(table, [_why(row) for row in self.operations])


def report(
    method: str, rules: Sequence[Rule], parameters: Sequence[ParameterRow], operations: Sequence[OpRow]
) -> Report:
    """The report, operations that are alike together."""
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


def _aligned(table: Sequence[tuple[str, ...]], last: Sequence[str]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row, text in zip(table, last, strict=True):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield "  ".join(["", *cells, text]).rstrip()
