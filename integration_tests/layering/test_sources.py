"""What the modules of a package import, read from their syntax trees."""

import ast
import functools
import graphlib
import importlib.metadata
import itertools
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE = ROOT / "packages/core/src/stack_core"
# A package of core imports from its own floor and from lower ones; packages that are not listed are on the top floor.
FLOORS = {"abi": 0, "ops": 1, "programs": 1, "chips": 1, "runtime": 2}
TOP = 3
MAX_ABI_LINES = 5_000
PROGRAMS = ("benchmarks/**/*.py", "examples/**/*.py", "integration_tests/**/*.py", "packages/*/tests/**/*.py")


@functools.cache
def _modules(source: Path) -> dict[str, ast.Module]:
    """The syntax tree of every module of a package, by its dotted name."""
    names = {path: ".".join(path.relative_to(source.parent).with_suffix("").parts) for path in source.rglob("*.py")}
    return {name.removesuffix(".__init__"): ast.parse(path.read_text(), str(path)) for path, name in names.items()}


def _imports(tree: ast.Module) -> Iterator[str]:
    """The dotted names that a module imports anywhere, late imports and those for annotations included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_sibling_is_imported(source: Path) -> None:
    for module, tree in _modules(source).items():
        imported = {name.partition(".")[0] for name in _imports(tree)}
        siblings = {name for name in imported if name.startswith("stack_")} - {"stack_core", source.name}
        assert not siblings, f"{module} imports {sorted(siblings)}; meet them in a registry of stack_core"


def test_only_the_plugin_module_implements_hooks(source: Path) -> None:
    for module, tree in _modules(source).items():
        decorators = [decorator for node in ast.walk(tree) for decorator in getattr(node, "decorator_list", ())]
        hooks = [decorator for decorator in decorators if "hookimpl" in ast.unparse(decorator)]
        assert module == f"{source.name}.plugin" or not hooks, f"{module} implements hooks; move them to plugin.py"


def test_no_files_import_each_other_in_a_circle(source: Path) -> None:
    modules = _modules(source)
    graph = {}
    for module, tree in modules.items():
        named = {name if name in modules else name.rpartition(".")[0] for name in _imports(tree)}
        graph[module] = named & modules.keys()
    graphlib.TopologicalSorter(graph).prepare()


def test_no_floor_of_core_imports_from_a_higher_one() -> None:
    modules = _modules(CORE)
    for module, tree in modules.items():
        for name in _imports(tree):
            imported = name if name in modules else name.rpartition(".")[0]
            higher = imported in modules and _floor(imported) > _floor(module)
            assert not higher, f"{module} imports {imported}, which is on a higher floor"
    assert _floor("stack_core.abi.errors") < _floor("stack_core.ops") < _floor("stack_core.runtime.hosts") < TOP
    assert _floor("stack_core.cli") == _floor("stack_core.text.detokenize") == TOP


def _floor(module: str) -> int:
    return FLOORS.get(module.removeprefix("stack_core").lstrip(".").partition(".")[0], TOP)


def test_the_lowest_floor_is_small_and_names_no_package_above_core() -> None:
    files = sorted((CORE / "abi").rglob("*.py"))
    lines = sum(len(path.read_text().splitlines()) for path in files)
    assert lines <= MAX_ABI_LINES, f"stack_core/abi has {lines:,} lines; move modules with one user to that user"
    packages = {path.name.removeprefix("stack_") for path in ROOT.glob("packages/*/src/stack_*")}
    sibling = re.compile(rf"\bstack[_-](?:{'|'.join(sorted(packages - {'core'}))})\b")
    assert not {path.name: found for path in files if (found := sibling.findall(path.read_text()))}


def test_only_declared_dependencies_are_imported(source: Path) -> None:
    declared = _declared(source.parents[1]) | _declared(source.parents[2] / "core")
    distributions = importlib.metadata.packages_distributions()
    for module, tree in _modules(source).items():
        names = {name.partition(".")[0] for name in _imports(tree)} - sys.stdlib_module_names
        for name in names - {source.name, "stack_core"}:
            providers = {_canonical(provider) for provider in distributions.get(name, [name])}
            assert providers & declared, f"{module} imports {name}, which the package's pyproject.toml does not declare"


def _declared(package: Path) -> set[str]:
    """The distributions that a package requires, those of its extras included."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {}).values()
    return {_canonical(re.split(r"[^\w.-]", line)[0]) for line in itertools.chain(project["dependencies"], *extras)}


def _canonical(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def test_programs_beside_the_packages_import_what_there_is() -> None:
    """Benchmarks, examples and what tests start are checked by no type checker, and some run only before a release."""
    packages = {path.name for path in ROOT.glob("packages/*/src/stack_*")}
    missing = []
    for program in itertools.chain(*(ROOT.glob(pattern) for pattern in PROGRAMS)):
        for node in ast.walk(ast.parse(program.read_text(), str(program))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in packages:
                names = [alias.name for alias in node.names]
                missing += [f"{program}: {node.module}.{name}" for name in names if not _is_there(node.module, name)]
    assert not missing, "\n".join(missing)
    assert not _is_there("stack_core.abi.errors", "NoSuchError") and not _is_there("stack_core.no_module", "x")


def _is_there(module: str, name: str) -> bool:
    """Whether a module is a file of a package, and `name` stands in it or is a module below it."""
    package, *parts = module.split(".")
    path = ROOT.joinpath("packages", package.removeprefix("stack_"), "src", package, *parts)
    file = next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None)
    if file is None:
        return False
    is_below = (path / f"{name}.py").exists() or (path / name / "__init__.py").exists()
    return is_below or re.search(rf"\b{name}\b", file.read_text()) is not None
