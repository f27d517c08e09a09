"""`stack bundle`: commands that list, inspect and verify bundles."""

import json as json_format
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from stack_core.abi.config import to_mapping
from stack_core.abi.errors import BundleError, StackError

__all__ = ["inspect", "ls", "verify"]

Json = Annotated[bool, Parameter(negative=())]


def ls(directory: Path = Path(), /, *, json: Json = False) -> None:
    """List the bundles in a directory tree: stack bundle ls REPOSITORY

    Args:
      directory: root of the directory tree (the current directory).
      json: print the list as JSON.
    """
    from stack_serve.bundle.integrity import MANIFEST_DIGEST, read_manifest

    if not directory.is_dir():
        raise BundleError(f"{directory} is not a directory. Name one that contains bundles, such as a repository.")
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
    if not rows:
        print(f"stack: there is no bundle below {directory}; `stack export` writes one.", file=sys.stderr)
    for row in rows:
        what = row.get("problem") or f"{row['name']}  {', '.join(row['signatures'])}  {row['bytes'] / 1e6:.1f} MB"
        print(f"{row['directory']}  {what}")


def inspect(bundle: Path, /, *, json: Json = False) -> None:
    """Print the signatures, targets and licence of a bundle: stack bundle inspect BUNDLE

    Args:
      bundle: directory of the bundle.
      json: print the manifest as JSON.
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
    """Check the digests of a bundle's files and replay its examples: stack bundle verify BUNDLE

    Args:
      bundle: directory of the bundle.
      replay: compile the programs and compare their outputs with the stored examples.
    """
    from stack_serve.bundle.integrity import verify as compare
    from stack_serve.bundle.opened import load

    manifest = compare(bundle)
    if replay:
        load(bundle)
    done = f"; examples replayed: {len(manifest.examples)}" if replay else ""
    print(f"{bundle}: {len(manifest.files)} files match their digests{done}.")
