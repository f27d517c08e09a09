"""transformers' Llama on PyTorch, eager: scaled-dot-product attention, fused AdamW, autocast below fp32."""

from pathlib import Path

from peers.peer import Command, Peer, Workload, find_python, run_quietly

__all__ = ["PEER"]

_PYTHON = "3.11"
_PACKAGES = ("torch==2.13.0", "transformers>=5,<6")


def _install(folder: Path, workload: Workload) -> Path:
    """By pip and not uv: a machine may offer pip a small CPU-only PyTorch through `find-links`."""
    del workload
    python = folder / "bin" / "python"
    installed = folder / "installed"
    if not installed.exists():
        run_quietly(find_python(_PYTHON), "-m", "venv", "--clear", folder)
        run_quietly(python, "-m", "pip", "install", *_PACKAGES)
        installed.touch()
    return python


def _command(python: Path, workload: Workload, steps: int) -> Command:
    options = {
        "layers": workload.layers,
        "embed": workload.embed,
        "heads": workload.heads,
        "mlp": workload.mlp,
        "vocab": workload.vocab,
        "seq": workload.seq_tokens,
        "batch": workload.batch,
        "dtype": workload.dtype,
        "steps": steps,
    }
    program = Path(__file__).with_name("torch_llama.py")
    arguments = [f"--{name}={value}" for name, value in options.items()]
    return Command(arguments=[str(python), str(program), *arguments], step_line=r"completed step: \d+")


PEER = Peer(name="PyTorch", install=_install, command=_command, packages=("torch", "transformers"))
