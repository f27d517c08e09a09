"""Candidate types of mixed precision, and budgets, as written on the command line."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from stack_core.abi.errors import ArgumentError
from stack_quant.qtypes import qtype

__all__ = ["FLOAT", "TYPES", "Budget", "type_fields"]

FLOAT: Final = "float"
"""The candidate that leaves a parameter as it is."""

TYPES: Final = ("int2/t128", "int3/t128", "int4/t128", "int4/t32", "int5/t128", "int6/t128", "int8", FLOAT)
"""Default candidates."""

_UNITS: Final = {
    "bits": None,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)},
}


@dataclass(frozen=True)
class Budget:
    """A limit on the memory of all parameters, and the candidate types.

        Budget("3.5bits")  # per parameter
        Budget("2GB", types=("int3/t128", "int4/t32", "int8", "float"))  # of all parameters; also MB, GiB, ...

    Attributes:
      text: bits per parameter, or bytes of all parameters.
      types: candidates for each parameter: "int4/t32" is int4 with a scale for 32 inputs, "float" the parameter itself.

    Raises:
      UnknownName: a type does not exist.
      ArgumentError: the text has neither of these forms, or is not positive; or a type is malformed or repeated.
    """

    text: str
    types: Sequence[str] = TYPES

    def __post_init__(self) -> None:
        type_fields(self.types)
        self.bytes(1)

    def bytes(self, entries: int) -> int:
        """Returns the limit in bytes for a model with this number of parameters."""
        text = self.text
        found = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([a-z]+)", text.strip().lower())
        unit = found and found[2].replace("bit", "bits").replace("bitss", "bits")
        if found is None or unit not in _UNITS or not float(found[1]):
            raise ArgumentError(
                f"budget={text!r}: expected bits per parameter or bytes of all parameters, such as 3.5bits, 500MB, "
                "2GB or 1.5GiB."
            )
        factor = _UNITS[unit]
        return int(float(found[1]) * (entries / 8 if factor is None else factor))


def type_fields(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns the fields of `Rule` for each candidate: "int4/t32" is int4 in tiles of 32, "float" needs none.

    As in recipes, a tile that does not divide an axis becomes the largest smaller divisor.

    Raises:
      UnknownName: a type does not exist.
      ArgumentError: a tile is not a positive number, a name occurs twice, or the list is empty.
    """
    if not names or len(set(names)) < len(names):
        raise ArgumentError(f"types={', '.join(names)!r}: expected different types, such as {','.join(TYPES)}.")
    return {name: _fields(name) for name in names}


def _fields(name: str) -> dict[str, Any]:
    if name == FLOAT:
        return {}
    kind, separator, tile = name.partition("/t")
    fields = {"weights": qtype(kind).name}
    if not separator:
        return fields
    if not tile.isascii() or not tile.isdigit() or not int(tile):
        raise ArgumentError(f"type {name!r}: expected a positive tile after '/t', such as {kind}/t128.")
    if qtype(kind).block_size is not None:
        raise ArgumentError(f"type {name!r}: {kind} has tiles of {qtype(kind).block_size}. Give {kind!r} alone.")
    return {**fields, "tile_size": int(tile), "smaller_tiles": True}
