"""Importing has no effect: a fresh, watched interpreter imports every module of every package, core's first."""

import ast
import subprocess
import sys
from pathlib import Path

SOURCES = sorted(Path(__file__).parents[2].glob("packages/*/src/stack_*"))

# Third-party modules come first: what they do on import is theirs to answer for.
WATCH = """
import importlib, importlib.util, logging, os, signal, sys, warnings
import jax
from jax._src import xla_bridge  # jax has no public way to ask this without starting its devices

def pairs(mapping):
    return {f"{name}={value}" for name, value in mapping.items()}

def state():
    named = logging.root.manager.loggerDict.values()
    loggers = [logging.root, *(logger for logger in named if isinstance(logger, logging.Logger))]
    return {
        "environment variables": pairs(os.environ),
        "logging handlers": {f"{logger.name}: {handler}" for logger in loggers for handler in logger.handlers},
        "logging levels": {f"{logger.name}: {logger.level}" for logger in loggers if logger.level},
        "warning filters": set(map(str, warnings.filters)),
        "signal handlers": {f"{name}: {signal.getsignal(name)}" for name in signal.valid_signals()},
        "exception hook": {str(sys.excepthook)},
        "jax configuration": pairs(jax.config.values),
        "jax devices": {f"started: {xla_bridge.backends_are_initialized()}"},
    }

others, ours = (filter(None, names.split(",")) for names in sys.argv[1:])
for name in others:
    if importlib.util.find_spec(name.partition(".")[0]):  # what an extra brings need not be there
        importlib.import_module(name)
before = state()
for name in ours:
    importlib.import_module(name)
    for what, value in state().items():
        if value != before[what]:
            sys.exit(f"importing {name} changed {what}: {sorted(value ^ before[what])}")
"""


def test_importing_a_package_changes_nothing() -> None:
    """One process for all, because what others' modules take on import is most of the time."""
    files = [path.relative_to(source.parent) for source in SOURCES for path in sorted(source.rglob("*.py"))]
    ours = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in files]
    others = sorted(set().union(*(_third_party_imports(path) for source in SOURCES for path in source.rglob("*.py"))))
    command = [sys.executable, "-c", WATCH, ",".join(others), ",".join(ours)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _third_party_imports(path: Path) -> set[str]:
    """The modules outside stack and the standard library that a file imports, at any depth."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return {
        name for name in names if name.split(".")[0] not in sys.stdlib_module_names and not name.startswith("stack_")
    }
