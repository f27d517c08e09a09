"""The shell command that installs a missing package with this environment's installer and source."""

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlparse

__all__ = ["install_command"]

_CORE = "stack-core"


def install_command(requirement: str, *, upgrade: bool = False, reinstall: bool = False) -> str:
    """Returns the shell command that installs a requirement, such as "stack-core[tpu]", to match this stack-core.

    The package comes from the origin of stack-core: an index, a folder of wheels, or a source tree. The command uses
    the installer of stack-core (pip or uv) and the running Python.

    Args:
      upgrade: whether to install a newer version than the present one.
      reinstall: whether to install again regardless of the present version.
    """
    try:
        core = distribution(_CORE)
    except PackageNotFoundError:  # run from source, without an installation
        core = None
    return _command(requirement, core, Path(sys.prefix), os.environ, upgrade=upgrade, reinstall=reinstall)


def _command(
    requirement: str,
    core: Distribution | None,
    prefix: Path,
    environ: Mapping[str, str],
    *,
    upgrade: bool = False,
    reinstall: bool = False,
) -> str:
    uses_uv = core is not None and (core.read_text("INSTALLER") or "").strip() == "uv"
    options = ["--upgrade"] * upgrade + ["--reinstall" if uses_uv else "--force-reinstall"] * reinstall
    source = _source(requirement, core)
    if uses_uv and (prefix.parent / "uv.lock").is_file():
        return shlex.join(["uv", "add", *options, *source])
    folder = prefix / "bin"
    if uses_uv:
        chosen = [] if environ.get("VIRTUAL_ENV") == str(prefix) else ["--python", str(folder / "python")]
        return shlex.join(["uv", "pip", "install", *chosen, *options, *source])
    found = shutil.which("pip", path=environ.get("PATH"))
    pip = ["pip"] if found and Path(found).parent == folder else [str(folder / "python"), "-m", "pip"]
    return shlex.join([*pip, "install", *options, *source])


def _source(requirement: str, core: Distribution | None) -> list[str]:
    """Returns the arguments that specify a package: its name, or its location next to stack-core's."""
    record = core.read_text("direct_url.json") if core is not None else None
    own = re.fullmatch(r"(stack-\w+)(\[.*\])?", requirement)
    if record is None or own is None:
        return [requirement]
    name, extras = own[1], own[2] or ""
    found = json.loads(record)
    place = Path(unquote(urlparse(found["url"]).path))
    if "dir_info" in found:
        folder = place.parent / name.removeprefix("stack-")
        editable = ["--editable"] if found["dir_info"].get("editable") else []
        return [*editable, f"{folder}{extras}"] if (folder / "pyproject.toml").is_file() else [requirement]
    wheels = sorted(place.parent.glob(f"{name.replace('-', '_')}-*.whl"))
    return [f"{wheels[-1]}{extras}"] if wheels else [requirement]
