"""Importing has no effect: every module of every package is imported in a fresh interpreter that is watched."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = sorted(path.name for path in Path("packages").iterdir() if (path / "src").is_dir())

# Third-party packages are imported first: what they do on import is theirs to answer for.
WATCH = """
import importlib, logging, os, signal, sys, warnings

def state():
    loggers = [logging.getLogger(), *filter(lambda x: isinstance(x, logging.Logger), logging.root.manager.loggerDict.values())]
    return {
        "environment variables": dict(os.environ),
        "logging handlers": [(logger.name, *map(repr, logger.handlers)) for logger in loggers if logger.handlers],
        "logging levels": {logger.name: logger.level for logger in loggers if logger.level},
        "warning filters": list(map(repr, warnings.filters)),
        "signal handlers": {name: signal.getsignal(name) for name in signal.valid_signals()},
        "exception hook": sys.excepthook,
        "jax configuration": dict(sys.modules["jax"].config.values) if "jax" in sys.modules else None,
        "jax devices": "jax" in sys.modules and importlib.import_module("jax.extend.backend").backends_are_initialized(),
    }

others, ours = (names.split(",") for names in sys.argv[1:])
for name in others:
    importlib.import_module(name)
before = state()
for name in ours:
    importlib.import_module(name)
    for what, value in state().items():
        if value != before[what]:
            sys.exit(f"importing {name} changed {what}: {before[what]} became {value}")
"""


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_a_package_changes_nothing(package: str) -> None:
    source = Path("packages", package, "src")
    files = sorted(source.rglob("*.py"))
    ours = [".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__") for path in files]
    others = sorted({name for path in files for name in _third_party_imports(path)} | {"jax"})
    done = subprocess.run(
        [sys.executable, "-c", WATCH, ",".join(others), ",".join(ours)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def _third_party_imports(path: Path) -> set[str]:
    """The modules outside stack and the standard library that a file imports, at any depth."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return {name for name in names if name.partition(".")[0] not in sys.stdlib_module_names and not name.startswith("stack_")}
