"""Writes the table of contracts and their tenants into docs/abi.md.

    python tools/contracts.py            # writes it
    python tools/contracts.py --check    # fails if it is out of date; part of `nox -s lint`

A contract is a protocol or an abstract base class of `stack_core.abi`. A package implements it with a class that has
its members or derives from it, and uses it by importing it. Most protocols are structural: implementers do not import
them.
"""

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ABI = ROOT / "packages/core/src/stack_core/abi"
PAGE = ROOT / "docs/abi.md"
BEGIN, END = "<!-- contracts: begin -->\n", "<!-- contracts: end -->\n"

# Why there is a contract that one package both implements and uses.
_FORMAT, _FAMILY = "an optional ability of a plugin's format", "an optional ability of a plugin's architecture"
REASONS = {
    **dict.fromkeys(
        (
            "ImportsRuns",
            "StartsRuns",
            "IgnoresKeys",
            "ImportsAdapters",
            "ExportsRuns",
            "ExportsAdapters",
            "ExportsStored",
            "ExportsByImportance",
        ),
        _FORMAT,
    ),
    **dict.fromkeys(("ConvertibleFamily", "FitsTensors", "IsPart", "ShardsItself"), _FAMILY),
    "ModelFamily": "a plugin's architecture; the examples' are values of `stack_train.models.family.DecoderFamily`",
    "ConfigReader": "an attribute of `ConvertibleFamily`",
    "Launcher": "a plugin's launcher; core has `processes`, `joined` and `ray`",
    "MeasuresData": "an optional ability of a plugin's batches",
    "Panel": "any function; five packages register panels",
}


Classes = dict[tuple[str, str], ast.ClassDef]


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def contracts() -> Iterator[tuple[str, ast.ClassDef]]:
    """Yields the module and the definition of each protocol and abstract base class."""
    for path in sorted(ABI.glob("*.py")):
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and bases(node) & {"Protocol", "ABC"}:
                yield path.stem, node


def bases(node: ast.ClassDef) -> set[str]:
    return {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}


def members(node: ast.ClassDef) -> set[str]:
    """Returns the names of the methods and attributes that a class body defines, without private ones."""
    names = set[str]()
    for each in node.body:
        if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(each.name)
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            names.add(each.target.id)
        elif isinstance(each, ast.Assign):
            names |= {target.id for target in each.targets if isinstance(target, ast.Name)}
    return {name for name in names if not name.startswith("_") or name == "__call__"}


def is_distinctive(contract: ast.ClassDef) -> bool:
    """Returns whether having the members of a protocol shows that a class implements it."""
    names = members(contract)
    is_one_attribute = len(names) == 1 and not any(isinstance(each, ast.FunctionDef) for each in contract.body)
    return "Protocol" in bases(contract) and names != {"__call__"} and not is_one_attribute


def sources() -> Iterator[tuple[str, Path]]:
    """Yields the package of each source file; "examples" for the example plugins."""
    for path in [*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("examples/plugins/**/*.py")]:
        parts = path.relative_to(ROOT).parts
        yield "examples" if parts[0] == "examples" else parts[1], path


def scan(names: set[str]) -> tuple[Classes, dict[str, set[str]]]:
    """Returns all classes by package and name, and the packages that import each contract."""
    classes, uses = Classes(), dict[str, set[str]]((name, set()) for name in names)
    for package, path in sources():
        tree = parsed(path)
        if package == "examples":  # a module may implement a protocol, too
            classes[package, str(path)] = ast.ClassDef(path.stem, [], [], tree.body, [])
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[package, node.name] = node
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("stack_core.abi."):
                for name in names & {alias.name for alias in node.names}:
                    uses[name].add(package)
    return classes, uses


def inherited(classes: Classes, package: str, node: ast.ClassDef) -> tuple[set[str], set[str]]:
    """Returns the members and the bases of a class, including those of its bases."""
    names, ancestors = members(node), bases(node)
    for name in list(ancestors):
        if base := classes.get((package, name)) or classes.get(("core", name)):
            more, above = inherited(classes, package, base)
            names, ancestors = names | more, ancestors | above
    return names, ancestors


def table() -> str:
    """Returns the table as Markdown."""
    found = list(contracts())
    classes, uses = scan({node.name for _, node in found})
    kinds = [
        (package, *inherited(classes, package, node)) for (package, name), node in classes.items() if name not in uses
    ]
    rows = ["| contract | module | implemented by | used by | |", "|---|---|---|---|---|"]
    for module, node in found:
        has_members = members(node).issubset if is_distinctive(node) else (lambda _: False)
        implementers = {package for package, names, ancestors in kinds if node.name in ancestors or has_members(names)}
        reason = REASONS[node.name] if len(implementers | uses[node.name]) < 2 else ""
        columns = (", ".join(sorted(each)) or "-" for each in (implementers, uses[node.name]))
        rows.append(f"| `{node.name}` | `abi.{module}` | {' | '.join(columns)} | {reason} |".replace("|  |", "| |"))
    return "\n".join(rows) + "\n"


def main() -> int:
    """Writes the table, or with --check returns 1 if the page has another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; return 1 if the file is out of date")
    check = parser.parse_args().check
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    old, after = rest.split(END)
    new = f"\n{table()}\n"
    if check:
        if old != new:
            print("The table of contracts in docs/abi.md is out of date: run `python tools/contracts.py`.")
        return int(old != new)
    PAGE.write_text(before + BEGIN + new + END + after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
