"""What the sources of the packages may import, read from their syntax trees."""

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = sorted(path.name for path in Path("packages").iterdir() if (path / "src").is_dir())


def _modules(package: str) -> dict[str, ast.Module]:
    """The syntax tree of every module of a package, by its dotted name."""
    source = Path("packages", package, "src")
    trees = {}
    for path in source.rglob("*.py"):
        parts = path.relative_to(source).with_suffix("").parts
        trees[".".join(parts).removesuffix(".__init__")] = ast.parse(path.read_text(), str(path))
    return trees


def _imports(tree: ast.Module) -> Iterator[str]:
    """The dotted names that a module imports anywhere, late imports and imports for annotations included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _module_of(name: str, modules: dict[str, ast.Module]) -> str:
    """The module that an imported name is, or is an attribute of."""
    return name if name in modules else name.rpartition(".")[0]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_sibling_is_imported(package: str) -> None:
    allowed = {"stack_core", f"stack_{package}"}
    for module, tree in _modules(package).items():
        ours = {name.partition(".")[0] for name in _imports(tree) if name.startswith("stack_")}
        assert ours <= allowed, f"{module} imports {sorted(ours - allowed)}; meet it in a registry of stack_core"


@pytest.mark.parametrize("package", PACKAGES)
def test_only_plugin_modules_implement_hooks(package: str) -> None:
    for module, tree in _modules(package).items():
        decorators = [decorator for node in ast.walk(tree) for decorator in getattr(node, "decorator_list", ())]
        hooks = [ast.unparse(decorator) for decorator in decorators if "hookimpl" in ast.unparse(decorator)]
        assert module == f"stack_{package}.plugin" or not hooks, f"{module} implements hooks; move them to plugin.py"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_files_import_each_other_in_a_circle(package: str) -> None:
    modules = _modules(package)
    graph = {name: {_module_of(imported, modules) for imported in _imports(tree)} & modules.keys() for name, tree in modules.items()}
    graphlib.TopologicalSorter(graph).prepare()
