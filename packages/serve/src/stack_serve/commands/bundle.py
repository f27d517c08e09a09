"""`stack bundle`: what bundles are there, what is in one, and whether it is whole."""

import json as json_format
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from stack_core.abi.config import to_mapping
from stack_core.abi.errors import StackError

__all__ = ["inspect", "ls", "verify"]

Json = Annotated[bool, Parameter(negative=())]


def ls(directory: Path = Path(), /, *, json: Json = False) -> None:
    """List the bundles below a directory: stack bundle ls REPOSITORY

    Args:
      directory: where to look.
      json: print machine-readable results.
    """
    from stack_serve.bundle.integrity import MANIFEST_DIGEST, read_manifest

    rows: list[dict[str, Any]] = []
    for path in sorted(directory.rglob(MANIFEST_DIGEST)):
        row: dict[str, Any] = {"directory": str(path.parent)}
        try:
            manifest = read_manifest(path.parent)
            size_bytes = sum((path.parent / name).stat().st_size for name in manifest.files)
            row |= {"name": manifest.name, "signatures": list(manifest.signatures), "bytes": size_bytes}
        except (StackError, OSError) as error:
            row["problem"] = str(error)
        rows.append(row)
    if json:
        print(json_format.dumps(rows, indent=2))
        return
    for row in rows:
        what = row.get("problem") or f"{row['name']}  {', '.join(row['signatures'])}  {row['bytes'] / 1e6:.1f} MB"
        print(f"{row['directory']}  {what}")


def inspect(bundle: Path, /, *, json: Json = False) -> None:
    """Tell what a bundle computes, for what, and under which licence: stack bundle inspect BUNDLE

    Args:
      bundle: its directory.
      json: print the manifest.
    """
    from stack_serve.bundle.integrity import read_manifest

    manifest = read_manifest(bundle)
    if json:
        print(json_format.dumps(to_mapping(manifest), indent=2))
        return
    print(f"{manifest.name}, licence {manifest.licence}, StableHLO {manifest.stablehlo}, written by jax {manifest.jax}")
    for name, signature in manifest.signatures.items():
        targets = sorted({program.target for program in manifest.programs if program.signature == name})
        print(f"  {name}{signature} on {', '.join(targets)}")
    calls = sorted({call for program in manifest.programs for call in program.custom_calls})
    print(f"  parameters: {len(manifest.weights)}, examples: {len(manifest.examples)}, custom calls: {calls or 'none'}")


def verify(bundle: Path, /, *, replay: bool = True) -> None:
    """Compare every file of a bundle with its digest, and repeat its examples: stack bundle verify BUNDLE

    Args:
      bundle: its directory.
      replay: compile and repeat the examples, too.
    """
    from stack_serve.bundle.integrity import verify as compare
    from stack_serve.bundle.opened import load

    manifest = compare(bundle)
    if replay:
        load(bundle)
    done = f"; examples repeated: {len(manifest.examples)}" if replay else ""
    print(f"{bundle}: {len(manifest.files)} files have their digests{done}.")
