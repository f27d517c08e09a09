"""Writes `stack_core/abi/providers.json`: the package that provides each registered name, to advise who lacks it.

python tools/providers.py            # writes it; all packages must be installed
python tools/providers.py --check    # fails if it is out of date; part of the integration tests
"""

import argparse
import json
import sys
from pathlib import Path

from stack_core.abi.hookspecs import REGISTRY_KINDS
from stack_core.abi.plugins import plugins, registries

FILE = Path(__file__).parents[1] / "packages/core/src/stack_core/abi/providers.json"

# The package to suggest for a name that none of several packages registers.
DEFAULTS = {"data": "stack-train", "engines": "stack-serve", "objectives": "stack-rl", "panels": "stack-train"}


def providers() -> dict[str, dict[str, str]]:
    """Returns, per registry, the package of each name; "*" stands for any name."""
    distributions = {report.name: report.distribution for report in plugins.reports()}
    found = {}
    for kind in REGISTRY_KINDS:
        if kind in ("ops", "tuned_tables", "observers"):  # nobody asks for these by name
            continue
        registered = {entry.name: distributions[entry.provider] for entry in getattr(registries, kind).entries()}
        packages = {name: package for name, package in sorted(registered.items()) if package != "stack-core"}
        if kind == "commands":  # a group of commands is asked for by its first word, too
            groups = {name.partition(" ")[0]: package for name, package in reversed(packages.items()) if " " in name}
            packages = dict(sorted((groups | packages).items()))
        default = DEFAULTS.get(kind) or (next(iter(packages.values())) if len(set(packages.values())) == 1 else None)
        if default is not None and kind not in ("commands", "sections"):
            packages = {"*": default, **{name: package for name, package in packages.items() if package != default}}
        if packages:
            found[kind] = packages
    return found


def main() -> int:
    """Writes the file, or with --check returns 1 if it has other contents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; return 1 if the file is out of date")
    check = parser.parse_args().check
    text = json.dumps(providers(), indent=2) + "\n"
    if not check:
        FILE.write_text(text, encoding="utf-8")
        return 0
    if differs := FILE.read_text(encoding="utf-8") != text:
        print(f"{FILE.name} is out of date: run `python tools/providers.py`.")
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
