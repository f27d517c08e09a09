"""Checks of a release that need no package of ours, and its notes.

python tools/release.py notes dist/notes.md                        # equal semantic versions; all changelogs in one file
python tools/release.py audit requirements.txt dist/advisories.json
python tools/release.py plugins                                    # loads every installed plugin and what it registers
"""

import importlib
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
SEMANTIC = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?")  # as PEP 440 writes it


def main() -> None:
    command, *paths = sys.argv[1:] or [""]
    commands = {"notes": write_notes, "audit": audit, "plugins": check_plugins}
    if command not in commands:
        raise SystemExit(__doc__)
    print(commands[command](*map(Path, paths)))


def write_notes(notes: Path) -> str:
    """Writes the changelogs of all packages, each its section of this version, or "Unreleased" before it has one."""
    projects = [tomllib.loads(path.read_text())["project"] for path in sorted(ROOT.glob("packages/*/pyproject.toml"))]
    versions = {project["name"]: project["version"] for project in projects}
    version = versions["stack-core"]
    if set(versions.values()) != {version} or not SEMANTIC.fullmatch(version):
        raise SystemExit(f"Packages of one release have one version MAJOR.MINOR.PATCH; there are {versions}.")
    parts = [f"# stack {version}", ""]
    for path in sorted(ROOT.glob("packages/*/CHANGELOG.md")):
        entries = changes(path.read_text(), version)
        parts += [f"## stack-{path.parent.name}", "", entries or "No changes.", ""]
    notes.write_text("\n".join(parts))
    return f"{notes}: stack {version}, {sum(line.startswith('- ') for line in notes.read_text().splitlines())} changes"


def changes(changelog: str, version: str) -> str:
    """Returns the section of a version, or the section "Unreleased"."""
    sections = dict(re.findall(r"^## (\S+)[^\n]*\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL))
    return sections.get(version, sections.get("Unreleased", "")).strip()


def audit(requirements: Path, answer: Path) -> str:
    """Asks the package index for advisories. A dependency that it has no data for is a failure, not a pass."""
    options = ["--no-deps", "--disable-pip", "--progress-spinner=off", "--format=json", f"--output={answer}"]
    answer.unlink(missing_ok=True)
    command = ["pip-audit", *options, f"--requirement={requirements}"]
    done = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
    if not answer.exists():
        raise SystemExit(f"Nothing was audited: the advisory service cannot be reached.\n{done.stderr.strip()[-300:]}")
    return check_audit(json.loads(answer.read_text())["dependencies"])


def check_audit(dependencies: list[dict]) -> str:
    """Returns the result of an audit, or raises SystemExit."""
    skipped = [each for each in dependencies if "skip_reason" in each]
    found = [f"{each['name']} {each['version']}: {one['id']}" for each in dependencies for one in each.get("vulns", ())]
    if found:
        raise SystemExit("Dependencies with known vulnerabilities:\n" + "\n".join(found))
    if skipped:
        raise SystemExit(
            f"{len(skipped)} of {len(dependencies)} dependencies were not audited: the advisory service cannot be "
            f"reached, or does not know them. Run this where the service answers. First: {skipped[0]['skip_reason']}."
        )
    return f"{len(dependencies)} dependencies, no known vulnerabilities"


def check_plugins() -> str:
    """Loads every registered name of every installed plugin; fails if a plugin was left out or a name does not load."""
    abi = importlib.import_module("stack_core.abi.plugins")
    kinds = importlib.import_module("stack_core.abi.hookspecs").REGISTRY_KINDS
    names = [(kind, name) for kind in kinds for name in getattr(abi.registries, kind).names()]
    problems = []
    for kind, name in names:
        try:
            getattr(abi.registries, kind)[name]
        except Exception as error:  # a plugin may raise anything; every failure is listed
            problems.append(f"{kind}/{name}: {type(error).__name__}: {error}")
    reports = list(abi.plugins.reports())
    problems += [
        f"{each.name}: {each.status}, {each.problems}" for each in reports if each.status != "loaded" or each.problems
    ]
    if problems:
        raise SystemExit("Plugins that no longer load:\n" + "\n".join(problems))
    return f"{len(reports)} plugins loaded, {len(names)} names"


if __name__ == "__main__":
    main()
