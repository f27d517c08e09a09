"""What every test of every package runs under, and what a skipped test would have needed."""

import gc
import importlib.util
import itertools
import os
from collections import Counter
from collections.abc import Iterator

import hypothesis
import pytest
from browser import CHROMIUM, Browser, open_browser
from similar_cases import SIMILAR

# A first example may compile for seconds, and a busy machine draws slowly; on CI the examples are always the same.
hypothesis.settings.register_profile(
    "stack",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    derandomize="CI" in os.environ,
)
hypothesis.settings.load_profile("stack")

# Read when jax is first imported, and inherited by the processes that tests start.
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"

# What was measured on this machine changes which implementations are chosen; tests of that name tables of their own.
os.environ["STACK_TUNED_TABLES"] = ""

# Traced programs are many objects that stay. Searching them for cycles took a tenth of the CPU time of two test files.
gc.set_threshold(100_000, 20, 50)

# No test depends on the Hugging Face hub; a name of a model there fails at once, with or without a network.
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Starts Chromium, if the machine has it, in a profile of its own."""
    if CHROMIUM is None:
        pytest.skip("needs a browser: apt-get install chromium")
    with open_browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Makes slow what a covering choice leaves out; skips what this environment cannot run, and says what it needs."""
    for item in _left_out(items):
        item.add_marker(pytest.mark.slow)
    for item in items:
        for marker, missing in _MISSING.items():
            found = item.get_closest_marker(marker)
            if found is not None and (reason := missing(config, *found.args)):
                item.add_marker(pytest.mark.skip(reason=reason))


def _left_out(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """The cases of tests marked `covering` that need not run by default."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("covering") is not None:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        chosen = _chosen(cases)
        yield from (case for place, case in enumerate(cases) if place not in chosen)


def _chosen(cases: list[pytest.Function]) -> set[int]:
    """The indices of the cases to run: by turns for an op's contract, by a greedy search for other tests."""
    if all(case.callspec.params.keys() == {"check"} for case in cases):
        return _chosen_checks(cases)
    (size,) = cases[0].get_closest_marker("covering").args or (1,)
    values = [sorted((name, id(value)) for name, value in case.callspec.params.items()) for case in cases]
    covered_by = [set(itertools.combinations(each, size)) for each in values]
    missing, chosen, uses = set().union(*covered_by), set(), Counter()
    while missing:  # first what covers most; of several, the one whose values occurred least
        best = max(range(len(cases)), key=lambda i: (len(covered_by[i] & missing), -sum(uses[v] for v in values[i])))
        missing -= covered_by[best]
        chosen.add(best)
        uses.update(values[best])
    return chosen


def _chosen_checks(cases: list[pytest.Function]) -> set[int]:
    """The indices of an op's checks to run: of each case the covering aspect that the fewest cases before it have.

    Cases that others resemble are left out.
    """
    aspects: dict[object, list[int]] = {}
    for place, case in enumerate(cases):
        check = case.callspec.params["check"]
        is_similar = check.case.name in SIMILAR.get(check.case.op, ())
        if check.is_covering and not is_similar and case.get_closest_marker("slow") is None:
            aspects.setdefault(check.case, []).append(place)
    chosen, uses = set(), Counter()
    for places in aspects.values():
        best = min(places, key=lambda place: uses[cases[place].callspec.params["check"].aspect])
        uses[cases[best].callspec.params["check"].aspect] += 1
        chosen.add(best)
    return chosen


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


def _clients(config: pytest.Config, *modules: str) -> str | None:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    return f"needs {' and '.join(missing)}, as in `nox -s clients`" if missing else None


_MISSING = {
    "slow": _slow,
    "gpu": _gpu,
    "tpu_aot": _tpu_aot,
    "gpu_aot": _gpu_aot,
    "parity": _parity,
    "clients": _clients,
}
