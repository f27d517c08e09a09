"""Quantized checkpoints against the library compressed-tensors, both ways, and the formulas of GPTQ and AWQ.

Logits of tiny random Llamas are compared.
"""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file

from stack_quant.model import quantize_model
from stack_quant.recipes import as_rules
from stack_quant.section import QuantConfig
from stack_train.huggingface import FORMAT
from stack_train.huggingface.quantization import QUANTIZATION
from stack_train.huggingface.source import open_source
from stack_train.variables.trained_model import RUN_FORMAT

from .conftest import MODELS, PLAIN, model_of

pytestmark = pytest.mark.parity

TOLERANCE = 1e-5
TOKENS = np.arange(24).reshape(2, 12) * 7 % 97
BATCH = {"tokens": jnp.asarray(TOKENS), "positions": jnp.tile(jnp.arange(12), (2, 1))}


def float_checkpoint(directory: Path, **sizes: Any) -> Any:
    """Writes a Llama in float32 and returns it."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**PLAIN, "num_hidden_layers": 1, **sizes})
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(directory)
    return model


def torch_logits(model: Any) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.float().numpy()


def our_logits(directory: Path) -> np.ndarray:
    source = open_source(directory)
    params: dict[Any, Any] = {}
    for path, leaf in source.leaves():
        *folders, name = (int(step) if step.isdigit() else step for step in path.split("/"))
        place = params
        for step in folders:
            place = place.setdefault(step, {})
        place[name] = jnp.asarray(leaf)
    model = model_of(source.config, params)
    return np.asarray(model.logits(model(**BATCH).hidden))


WRITTEN: dict[str, list[dict[str, Any]]] = {
    "int8": [{"path": ".*", "weights": "int8"}],
    "int8 with int8 inputs": [{"path": ".*", "weights": "int8", "activations": "int8"}],
    "int8 with zero points": [
        {"path": ".*head.*|.*embed.*", "weights": "int8"},
        {"path": ".*", "weights": "int8", "activations": "int8", "weight_calibration": "minmax", "tile_size": 5}
        | {"smaller_tiles": True},
    ],
    "int4": [{"path": ".*", "weights": "int4"}],
    "int4 in tiles": [{"path": ".*", "weights": "int4", "tile_size": 5, "smaller_tiles": True}],
    "int4 of rotated matrices": [{"path": ".*", "weights": "int4", "algorithm": "quarot"}],
    "int4 of rotated matrices, untied": [{"path": ".*", "weights": "int4", "algorithm": "quarot"}],
    "fp8": [{"path": ".*", "weights": "fp8_e4m3", "activations": "fp8_e4m3"}],
}


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.filterwarnings("ignore:Written as floats", "ignore:.*which are not applied")
def test_transformers_loads_what_we_write(name: str, tmp_path: Path) -> None:
    # Tiles of 5 divide 30 and 35 inputs; tiles of 3 take their place for 42.
    sizes = {**MODELS["odd_sizes"], "intermediate_size": 35, "tie_word_embeddings": "untied" in name}
    float_checkpoint(tmp_path / "float", **sizes)
    FORMAT.import_run(tmp_path / "float", tmp_path / "run")
    opened = RUN_FORMAT.open_model(tmp_path / "run")
    opened.save(
        tmp_path / "quantized",
        quantize_model(opened.model, WRITTEN[name], BATCH),
        {"quant": QuantConfig(rules=as_rules(WRITTEN[name]))},
    )
    FORMAT.export_run(tmp_path / "quantized", tmp_path / "hf")
    ours = our_logits(tmp_path / "hf")
    quantized = torch_logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval())
    # Their inputs are quantized, too, if the recipe says so; without, the weights alone are compared.
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    has_inputs = False
    for group in config[QUANTIZATION]["config_groups"].values():
        has_inputs |= group["input_activations"] is not None
        group["input_activations"] = None
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    weights = torch_logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval())
    np.testing.assert_allclose(ours, weights, atol=TOLERANCE, rtol=TOLERANCE)
    assert np.abs(quantized - ours).max() < (0.1 * np.abs(ours).max() if has_inputs else TOLERANCE)


def dequantized(parts: dict[str, np.ndarray], layout: str, bits: int) -> np.ndarray:
    """Returns the matrix [d_out, d_in] of GPTQ or AWQ, code by code.

    GPTQ packs codes along the inputs and zero points along the outputs, both from the lowest bits up; its layout "gptq"
    stores zero points minus 1. AWQ packs both along the outputs, in the order 0, 2, 4, 6, 1, 3, 5, 7. Products are
    rounded to float16, as in both libraries.
    """
    count, scales = 32 // bits, parts["scales"].astype(np.float64)

    def code(words: np.ndarray, row: int, column: int, *, along_rows: bool) -> int:
        place = (row if along_rows else column) % count
        place = (0, 4, 1, 5, 2, 6, 3, 7)[place] if layout == "awq" else place
        word = words[row // count, column] if along_rows else words[row, column // count]
        return int(word) >> bits * place & 2**bits - 1

    outputs = scales.shape[1]
    inputs = len(parts["qweight"]) * (1 if layout == "awq" else count)
    groups = parts.get("g_idx", np.arange(inputs) // (inputs // len(scales)))
    matrix = np.empty((outputs, inputs))
    for row, column in np.ndindex(inputs, outputs):
        zero = code(parts["qzeros"], groups[row], column, along_rows=False) + (layout == "gptq")
        matrix[column, row] = code(parts["qweight"], row, column, along_rows=layout != "awq") - zero
        matrix[column, row] *= scales[groups[row], column]
    return matrix.astype(np.float16).astype(np.float32)


BY_FORMULA = {
    "gptq, 8 bits": ("gptq", {"weights": "int8"}),
    "gptq_v2": ("gptq", {"weights": "int4", "tile_size": 8, "smaller_tiles": True, "weight_calibration": "minmax"}),
    "awq": ("awq", {"weights": "int4", "tile_size": 8, "smaller_tiles": True, "weight_calibration": "minmax"}),
    "awq without zero points": ("awq", {"weights": "int3"}),
}


@pytest.mark.parametrize("name", BY_FORMULA)
@pytest.mark.filterwarnings("ignore:Written as floats")
def test_formulas_of_gptq_and_awq_decode_what_we_write(name: str, tmp_path: Path) -> None:
    model = float_checkpoint(tmp_path / "float", **EVEN)
    FORMAT.import_run(tmp_path / "float", tmp_path / "run")
    opened = RUN_FORMAT.open_model(tmp_path / "run")
    stored, rule = BY_FORMULA[name]
    rules = as_rules([{"path": "query|key|value|output|gate|up|down", **rule}])
    section = QuantConfig(rules=rules)
    opened.save(tmp_path / "quantized", quantize_model(opened.model, rules, BATCH), {"quant": section})
    FORMAT.export_run(tmp_path / "quantized", tmp_path / "hf", stored=stored)
    written = json.loads((tmp_path / "hf" / "config.json").read_text())[QUANTIZATION]
    layout, tensors = written.get("checkpoint_format", "awq"), load_file(tmp_path / "hf" / "model.safetensors")
    before = torch_logits(model)
    for module in [name.removesuffix("qweight") for name in tensors if name.endswith("qweight")]:
        names = [name for name in tensors if name.startswith(module)]
        parts = {name.removeprefix(module): tensors.pop(name).numpy() for name in names}
        tensors[f"{module}weight"] = torch.tensor(dequantized(parts, layout, written["bits"]))
    model.load_state_dict(tensors)
    np.testing.assert_allclose(our_logits(tmp_path / "hf"), torch_logits(model), atol=TOLERANCE, rtol=TOLERANCE)
    # The codes are those of this model.
    error = np.abs(torch_logits(model) - before).max() / np.abs(before).max()
    assert 1e-4 < error < {"int8": 0.05, "int4": 0.3, "int3": 1}[rule["weights"]]


def test_the_library_decompresses_our_nvfp4(tmp_path: Path) -> None:
    model = float_checkpoint(tmp_path / "float", **EVEN)
    FORMAT.import_run(tmp_path / "float", tmp_path / "run")
    opened = RUN_FORMAT.open_model(tmp_path / "run")
    rules = as_rules([{"path": "query|key|value|output|gate|up|down", "weights": "nvfp4"}])
    section = QuantConfig(rules=rules)
    opened.save(tmp_path / "quantized", quantize_model(opened.model, rules, BATCH), {"quant": section})
    FORMAT.export_run(tmp_path / "quantized", tmp_path / "hf")
    (group,) = json.loads((tmp_path / "hf" / "config.json").read_text())[QUANTIZATION]["config_groups"].values()
    plan, tensors = QuantizationScheme(**group), load_file(tmp_path / "hf" / "model.safetensors")
    compressor = BaseCompressor.get_value_from_registry(plan.format)
    # In a model that transformers loads, the library multiplies these weights in bfloat16.
    for module in [name.removesuffix("weight_packed") for name in tensors if name.endswith("weight_packed")]:
        packed = {part: tensors.pop(module + part) for part in compressor.compression_param_names(plan)}
        tensors[f"{module}weight"] = compressor.decompress(packed, plan)["weight"].float()
    model.load_state_dict(tensors)
    np.testing.assert_allclose(our_logits(tmp_path / "hf"), torch_logits(model), atol=TOLERANCE, rtol=TOLERANCE)


def scheme(format_: str, **weights: Any) -> QuantizationScheme:
    return QuantizationScheme(targets=["Linear"], format=format_, weights=weights)


EVEN = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
READ: dict[str, tuple[dict[str, Any], QuantizationScheme]] = {
    "int8": (MODELS["odd_sizes"], scheme("int-quantized", num_bits=8, strategy="channel")),
    "int8, asymmetric": (MODELS["odd_sizes"], scheme("int-quantized", num_bits=8, strategy="channel", symmetric=False)),
    "int4 in groups": (EVEN, scheme("pack-quantized", num_bits=4, strategy="group", group_size=8)),
    "int4, asymmetric": (EVEN, scheme("pack-quantized", num_bits=4, strategy="group", group_size=8, symmetric=False)),
    "int4 of odd sizes, asymmetric": (
        MODELS["odd_sizes"],
        scheme("pack-quantized", num_bits=4, strategy="channel", symmetric=False),
    ),
    "int2": (MODELS["odd_sizes"], scheme("pack-quantized", num_bits=2, strategy="channel")),
    "fp8": (MODELS["odd_sizes"], scheme("float-quantized", num_bits=8, type="float", strategy="channel")),
    "fp8 by tensor": (MODELS["odd_sizes"], scheme("float-quantized", num_bits=8, type="float", strategy="tensor")),
    "fp8 by block": (
        EVEN,
        scheme("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[8, 16]),
    ),
    "nvfp4": (
        EVEN,
        scheme("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
    ),
    "mxfp4": (EVEN, scheme("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32)),
}


def range_of(weight: torch.Tensor, scheme: QuantizationScheme) -> dict[str, torch.Tensor]:
    """Scales and zero points of a weight by the largest magnitude of each tile, or by its ends."""
    args = scheme.weights
    rows, columns = weight.shape
    tiles = {"tensor": (1, 1), "channel": (rows, 1)}.get(args.strategy)
    if args.strategy == "block":
        tiles = (rows // args.block_structure[0], columns // args.block_structure[1])
    tiles = tiles or (rows, columns // args.group_size)
    split = weight.reshape(tiles[0], rows // tiles[0], tiles[1], columns // tiles[1]).transpose(1, 2).flatten(2)
    high, low = split.amax(-1), split.amin(-1)
    found = {}
    if args.symmetric:
        largest = torch.maximum(high, -low)
        if args.group_size == 32:
            scale = 2.0 ** torch.ceil(torch.log2(largest / 6))
        elif args.strategy == "tensor_group":
            found["weight_global_scale"] = (448.0 * 6 / weight.abs().amax()).reshape(1)
            scale = (largest / 6 * found["weight_global_scale"]).to(torch.float8_e4m3fn).float()
        else:
            scale = largest / (448.0 if args.type == "float" else 2 ** (args.num_bits - 1) - 1)
    else:
        scale = (high - low) / (2**args.num_bits - 1)
        zero = torch.round(-(2 ** (args.num_bits - 1)) - low / scale)
        found["weight_zero_point"] = zero.clamp(-(2 ** (args.num_bits - 1)), 2 ** (args.num_bits - 1) - 1).to(
            torch.int8
        )
    return {"weight_scale": scale.reshape(1) if args.strategy == "tensor" else scale, **found}


@pytest.mark.parametrize("name", READ)
def test_we_read_what_the_library_compresses(name: str, tmp_path: Path) -> None:
    sizes, plan = READ[name]
    model = float_checkpoint(tmp_path, **sizes)
    compressor = BaseCompressor.get_value_from_registry(plan.format)
    stored, decompressed = {}, {}
    for key, tensor in load_file(tmp_path / "model.safetensors").items():
        if not key.endswith("_proj.weight"):
            stored[key] = tensor
            continue
        module = key.removesuffix("weight")
        packed = compressor.compress({"weight": tensor, **range_of(tensor, plan)}, plan)
        stored |= {module + part: value.contiguous() for part, value in packed.items()}
        decompressed[key] = compressor.decompress(packed, plan)["weight"].float()
        assert not torch.equal(decompressed[key], tensor)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    group = json.loads(plan.model_dump_json())
    config[QUANTIZATION] = {"quant_method": "compressed-tensors", "format": plan.format, "config_groups": {"a": group}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model.load_state_dict(decompressed, strict=False)
    np.testing.assert_allclose(our_logits(tmp_path), torch_logits(model), atol=TOLERANCE, rtol=TOLERANCE)
