"""AMX: tile registers of 16 rows of 64 bytes, and their products.

Source: Intel 64 and IA-32 Architectures Optimization Reference Manual, chapter on Intel AMX.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from stack_kernels.jit_cpu.builder import BYTE, SHORT, Builder

__all__ = ["TILE_BYTES", "TILE_LINE", "TILE_ROWS", "TileRegisters"]

TILE_ROWS = 16
TILE_LINE = 64
"""Bytes per row."""
TILE_BYTES = TILE_ROWS * TILE_LINE

_REGISTERS = 8


@dataclass(frozen=True)
class TileRegisters:
    """Emits tile instructions into a function; registers are numbered from 0 to 7."""

    builder: Builder

    def configure(self, rows: Any, few: Collection[int]) -> None:
        """Configures the registers, before any other use: `few` have `rows` rows, the others 16."""
        builder = self.builder
        # The palette is in byte 0, the bytes per row of each register from byte 16 on, its rows from byte 48 on.
        config = builder.scratch(BYTE, TILE_LINE)
        builder.clear(config, builder.index(TILE_LINE))
        builder.store(BYTE(1), config)
        for number in range(_REGISTERS):
            builder.store(SHORT(TILE_LINE), builder.at(config, 16 + 2 * number))
            builder.store(
                builder.build.trunc(rows, BYTE) if number in few else BYTE(TILE_ROWS), builder.at(config, 48 + number)
            )
        self._write("ldtilecfg", config)

    def release(self) -> None:
        """Releases the registers, after their last use."""
        self._write("tilerelease")

    def clear(self, register: int) -> None:
        self._write("tilezero", BYTE(register))

    def load(self, register: int, pointer: Any, stride: Any, *, passes_first_cache: bool = False) -> None:
        """Loads rows that are `stride` bytes apart."""
        self._write("tileloaddt164" if passes_first_cache else "tileloadd64", BYTE(register), pointer, stride)

    def store(self, register: int, pointer: Any, stride: Any) -> None:
        self._write("tilestored64", BYTE(register), pointer, stride)

    def multiply(self, total: int, left: int, right: int) -> None:
        """Computes total[i, j] += sum of left[i, 2k + h] * right[k, 2j + h] over k and h = 0, 1.

        Bf16 with fp32 accumulation.
        """
        self._write("tdpbf16ps", BYTE(total), BYTE(left), BYTE(right))

    def _write(self, name: str, *operands: Any) -> None:
        self.builder.intrinsic(f"llvm.x86.{name}", ir.VoidType(), *operands)
