"""What every test of every package runs under, and what a skipped test would have needed."""

import importlib.util
import os

import hypothesis
import pytest

# A first example may compile for seconds; on CI the examples are always the same.
hypothesis.settings.register_profile("stack", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("stack")

# Read when jax is first imported, and inherited by the processes that tests start.
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"

# What was measured on this machine changes which implementations are chosen; tests of that name tables of their own.
os.environ["STACK_TUNED_TABLES"] = ""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips what this environment cannot run, and says what it would need."""
    for item in items:
        for marker, missing in _MISSING.items():
            if item.get_closest_marker(marker) is not None and (reason := missing(config)):
                item.add_marker(pytest.mark.skip(reason=reason))


def _slow(config: pytest.Config) -> str | None:
    return None if "slow" in config.option.markexpr else "takes minutes: needs `-m slow`, as in `nox -s slow`"


def _gpu(config: pytest.Config) -> str | None:
    import jax

    return None if jax.default_backend() == "gpu" else "needs an NVIDIA GPU and `pip install stack-core[cuda13]`"


def _tpu_aot(config: pytest.Config) -> str | None:
    return None if importlib.util.find_spec("libtpu") else "needs `pip install stack-core[tpu]`, but no TPU"


def _gpu_aot(config: pytest.Config) -> str | None:
    plugin = importlib.util.find_spec("jax_cuda13_plugin")
    return None if plugin else "needs `pip install stack-core[cuda13]`, but no GPU"


def _parity(config: pytest.Config) -> str | None:
    peers = ("torch", "transformers")
    missing = [peer for peer in peers if importlib.util.find_spec(peer) is None]
    return f"needs {' and '.join(missing)}, as in `nox -s parity`" if missing else None


def _clients(config: pytest.Config) -> str | None:
    missing = [client for client in ("tritonclient", "kserve") if importlib.util.find_spec(client) is None]
    return f"needs {' and '.join(missing)}, as in `nox -s clients`" if missing else None


_MISSING = {
    "slow": _slow,
    "gpu": _gpu,
    "tpu_aot": _tpu_aot,
    "gpu_aot": _gpu_aot,
    "parity": _parity,
    "clients": _clients,
}
