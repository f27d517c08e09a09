"""The checks that stack-kernels adds to `stack doctor`: its environment variables, and the version of Tokamax."""

import importlib.metadata
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from stack_core.abi.findings import Finding
from stack_core.abi.installing import install_command
from stack_core.doctor.accelerators import find_hardware

__all__ = ["CPU_KERNELS_VARIABLE", "TABLES_VARIABLE", "TOKAMAX_VERSION", "check_kernels"]

CPU_KERNELS_VARIABLE = "STACK_CPU_KERNELS"
TABLES_VARIABLE = "STACK_TUNED_TABLES"


TOKAMAX_VERSION = "0.0.17"
"""The version that the adapters to Tokamax are written for. Its kernels are private functions, so others may differ."""


def check_kernels(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Reports settings and packages that keep kernels from being chosen."""
    switch = environ.get(CPU_KERNELS_VARIABLE)
    if switch == "xla":
        yield Finding(CPU_KERNELS_VARIABLE, "note", "is 'xla': stack-kernels does not use its machine code on CPUs")
    elif switch:
        found = f"is {switch!r}, which is not known: stack-kernels does not use its machine code on CPUs"
        yield Finding(CPU_KERNELS_VARIABLE, "warning", found, "Unset it, or set it to xla.")
    if (tables := environ.get(TABLES_VARIABLE)) is not None:
        yield _check_tables(tables)
    try:
        version = importlib.metadata.version("tokamax")
    except importlib.metadata.PackageNotFoundError:
        if find_hardware().has_gpu:
            yield _advise_tokamax()
        return
    if version == TOKAMAX_VERSION:
        yield Finding("tokamax", "ok", f"version {version}")
    else:
        found = f"version {version} is installed; its kernels are used only in version {TOKAMAX_VERSION}"
        yield Finding("tokamax", "warning", found, install_command(f"tokamax=={TOKAMAX_VERSION}"))


def _advise_tokamax() -> Finding:
    found = "not installed: its kernels of attention and of grouped products for this machine's GPU are not used"
    if sys.version_info < (3, 12):
        return Finding("tokamax", "warning", found, "It needs Python 3.12 or newer, with stack-kernels[gpu].")
    return Finding("tokamax", "warning", found, install_command("stack-kernels[gpu]"))


def _check_tables(tables: str) -> Finding:
    places = [Path(place) for place in tables.split(os.pathsep) if place]
    if missing := [str(place) for place in places if not place.exists()]:
        found = f"names {' and '.join(missing)}, which does not exist; no other tuned tables are used"
        return Finding(
            TABLES_VARIABLE, "warning", found, "Correct it, or unset it to use the shipped and local tables."
        )
    if not places:
        return Finding(TABLES_VARIABLE, "note", "is empty: stack-kernels uses no tuned tables")
    return Finding(TABLES_VARIABLE, "note", f"is {tables!r}: stack-kernels uses only these tuned tables")
