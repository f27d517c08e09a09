"""MaxText, from its package and the requirements that it ships for machines without Google Cloud."""

from pathlib import Path

from peers.peer import Command, Peer, Workload, find_python, find_uv, run_quietly

__all__ = ["PEER"]

_PYTHON = "3.12"
_PACKAGE = "maxtext==0.2.5"
_SITE = Path("lib", f"python{_PYTHON}", "site-packages")
_REQUIREMENTS = _SITE / "dependencies/requirements/generated_requirements/decoupled-requirements.txt"


def _install(folder: Path, workload: Workload) -> Path:
    """As its `docs/run_maxtext/decoupled_mode.md` says; the lowest versions are those it is tested with."""
    del workload
    python = folder / "bin" / "python"
    installed = folder / "installed"
    if not installed.exists():
        install = (find_uv(), "pip", "install", "--compile-bytecode", "--python", python)
        run_quietly(find_uv(), "venv", "--clear", "--python", find_python(_PYTHON), folder)
        run_quietly(*install, "--no-deps", _PACKAGE)
        run_quietly(*install, "--resolution=lowest", "--requirement", folder / _REQUIREMENTS)
        installed.touch()
    return python


def _command(python: Path, workload: Workload, steps: int) -> Command:
    """Its own `seconds` and `Tokens/s` are of dispatch; the line itself appears once the step's loss is there."""
    base = python.parents[1] / _SITE / "maxtext" / "configs" / "base.yml"
    overrides = [f"{name}={value}" for name, value in _options(workload, steps).items()]
    return Command(
        arguments=[str(python), "-m", "maxtext.trainers.pre_train.train", str(base), *overrides],
        step_line=r"completed step: \d+",
        environment={"DECOUPLE_GCLOUD": "TRUE", "JAX_PLATFORMS": "cpu"},
    )


def _options(workload: Workload, steps: int) -> dict[str, object]:
    return {
        "run_name": "bench",
        "base_output_directory": "run",
        "hardware": "cpu",
        "skip_jax_distributed_system": "true",
        "max_inflight_computations": 1,
        "dataset_type": "synthetic",
        "steps": steps,
        "log_period": 1,
        "enable_checkpointing": "false",
        "enable_tensorboard": "false",
        "enable_goodput_recording": "false",
        "monitor_goodput": "false",
        "enable_checkpoint_cloud_logger": "false",
        "model_name": "default",
        "decoder_block": "llama2",
        "base_num_decoder_layers": workload.layers,
        "base_emb_dim": workload.embed,
        "base_num_query_heads": workload.heads,
        "base_num_kv_heads": workload.heads,
        "head_dim": workload.embed // workload.heads,
        "base_mlp_dim": workload.mlp,
        "vocab_size": workload.vocab,
        "max_target_length": workload.seq_tokens,
        "per_device_batch_size": workload.batch,
        "dtype": workload.dtype,
        "weight_dtype": "float32",
        "opt_type": "adamw",
        "attention": "dot_product",
        "enable_dropout": "false",
        "scan_layers": "true",
        "remat_policy": "minimal",
    }


PEER = Peer(name="MaxText", install=_install, command=_command, packages=("maxtext", "jax", "flax", "optax"))
