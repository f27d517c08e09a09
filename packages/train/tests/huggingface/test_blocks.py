"""Checkpoints in FP8 with a scale for each block, and in MXFP4."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from stack_core.abi.errors import ConversionError
from stack_train.huggingface.format import FORMAT
from stack_train.huggingface.quantization import with_codes
from stack_train.huggingface.source import open_source
from stack_train.run.config import run_config
from stack_train.safetensors_files import read_tensors
from stack_train.variables.weights import read_params

ROWS, COLUMNS = 8, 6  # neither divides every matrix
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "uint8": "U8"}
DTYPES |= {"float8_e8m0fnu": "F8_E8M0", "float16": "F16", "int8": "I8", "int32": "I32", "int64": "I64"}


def write_file(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """A safetensors file, which its library writes from NumPy without FP8."""
    header, start = {}, 0
    for name, tensor in tensors.items():
        end = start + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype.name], "shape": tensor.shape, "data_offsets": [start, end]}
        start = end
    content = json.dumps(header).encode()
    path.write_bytes(len(content).to_bytes(8, "little") + content + b"".join(map(np.ndarray.tobytes, tensors.values())))


def coded(directory: Path, tensors: dict[str, np.ndarray], **coding: object) -> dict[str, np.ndarray]:
    """Writes the layers' matrices in FP8 and returns what all tensors stand for, block by block."""
    random = np.random.default_rng(2)
    stored, expected = {}, {}
    for name, tensor in tensors.items():
        if tensor.ndim != 2 or "layers" not in name:
            stored[name] = expected[name] = tensor.astype(ml_dtypes.bfloat16)
            continue
        scales = random.uniform(0.5, 2, (-(-tensor.shape[0] // ROWS), -(-tensor.shape[1] // COLUMNS)))
        stored[name], stored[f"{name}_scale_inv"] = tensor.astype(ml_dtypes.float8_e4m3fn), scales.astype(np.float32)
        whole = np.empty(tensor.shape, ml_dtypes.bfloat16)
        for row, column in np.ndindex(tensor.shape):
            scale = stored[f"{name}_scale_inv"][row // ROWS, column // COLUMNS]
            whole[row, column] = np.float32(stored[name][row, column]) * scale
        expected[name] = whole
    write_file(directory / "model.safetensors", stored)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [ROWS, COLUMNS]} | coding
    (directory / "config.json").write_text(json.dumps(config))
    return expected


def test_blocks_are_read_as_the_floats_that_they_stand_for(make_checkpoint, tmp_path):
    directory, tensors = make_checkpoint()
    expected = coded(directory, tensors)
    source = open_source(directory)
    assert source.config.param_dtype == "bfloat16"
    leaves = dict(source.leaves())
    for rule in source.rules:
        for name, part in rule.tensors(leaves[rule.parameter]).items():
            np.testing.assert_array_equal(part, expected[name], err_msg=name)
    FORMAT.import_run(directory, tmp_path / "run")
    params = read_params(tmp_path / "run", run_config(tmp_path / "run").model)[0]
    np.testing.assert_array_equal(params["lm_head"], leaves["lm_head"])
    FORMAT.export_run(tmp_path / "run", tmp_path / "back")
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    back = dict(open_source(tmp_path / "back").leaves())
    assert all(np.array_equal(back[name], leaf) for name, leaf in leaves.items())


@pytest.mark.parametrize(
    ("coding", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method='bitsandbytes'.*Read are compressed-tensors, gptq, awq, fp8"),
        ({"weight_block_size": [4]}, r"weight_block_size=\[4\], not \[rows, columns\] or null"),
        ({"weight_block_size": None}, r"q_proj.weight_scale_inv is F32\[2, 3\]; expected F32\[\]"),
        ({"rotation": "hadamard"}, "rotation='hadamard'"),
        ({"activation_scheme": "block"}, "activation_scheme='block', not 'dynamic' or 'static'"),
        ({"weight_block_size": [4, 4]}, r"q_proj.weight_scale_inv is F32\[2, 3\]; expected F32\[4, 4\]"),
    ],
)
def test_what_is_coded_otherwise_is_refused(make_checkpoint, coding, message):
    directory, tensors = make_checkpoint()
    coded(directory, tensors, **coding)
    with pytest.raises(ConversionError, match=message):
        open_source(directory)


@pytest.mark.parametrize("scheme", ["dynamic", "static"])
def test_fp8_inputs_are_not_applied_and_named(make_checkpoint, scheme):
    directory, tensors = make_checkpoint(num_hidden_layers=1)
    coded(directory, tensors, activation_scheme=scheme)
    with pytest.warns(
        UserWarning, match=rf"fp8 inputs of products \(activation_scheme='{scheme}'\), which are not applied"
    ):
        open_source(directory)


V4 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [ROWS, COLUMNS], "scale_fmt": "ue8m0"}}


def powered(directory: Path, **changes: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, object]]:
    """Writes a matrix in FP8 and one in FP4 as DeepSeek-V4 does, and opens them."""
    random = np.random.default_rng(4)
    tensors = {
        "attn.wq.weight": random.normal(size=(10, 9)).astype(ml_dtypes.float8_e4m3fn),
        "attn.wq.scale": random.integers(120, 134, (2, 2)).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu),
        "ffn.w1.weight": random.integers(-128, 128, (3, 32)).astype(np.int8),
        "ffn.w1.scale": random.integers(120, 134, (3, 2)).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu),
        "hc.scale": np.ones(3, np.float32),
    }
    write_file(directory / "model.safetensors", tensors | changes)
    return tensors, dict(with_codes(V4, read_tensors(directory))[1].tensors)


@pytest.mark.filterwarnings("ignore:.*which are not applied")
def test_scales_that_are_powers_of_2_are_read_for_fp8_and_fp4(tmp_path):
    written, found = powered(tmp_path)
    assert found.keys() == {"attn.wq.weight", "ffn.w1.weight", "hc.scale"}
    scales = {name: written[f"{name}.scale"].view(np.uint8) for name in ("attn.wq", "ffn.w1")}
    wide = found["attn.wq.weight"].read()
    for row, column in np.ndindex(10, 9):
        power = 2.0 ** (int(scales["attn.wq"][row // ROWS, column // COLUMNS]) - 127)
        assert wide[row, column] == np.float32(written["attn.wq.weight"][row, column]) * power
    experts = found["ffn.w1.weight"].read()
    assert experts.shape == (3, 64) and experts.dtype == ml_dtypes.bfloat16
    for row, column in np.ndindex(3, 64):
        code = int(written["ffn.w1.weight"].view(np.uint8)[row, column // 2]) >> 4 * (column % 2) & 15
        value = FP4[code % 8] * (-1.0 if code > 7 else 1.0)
        assert experts[row, column] == value * 2.0 ** (int(scales["ffn.w1"][row, column // 32]) - 127)


def test_scales_of_fp4_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(ConversionError, match=r"ffn\.w1\.scale is F32\[3, 2\]; expected F8_E8M0\[3, 2\]"):
        powered(tmp_path, **{"ffn.w1.scale": np.ones((3, 2), np.float32)})


MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}, "other": 1}
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def microscaled(directory: Path, **changes: np.ndarray) -> tuple[dict[str, object], dict[str, object]]:
    """Writes codes of experts, [2, 3 outputs, 64 inputs], and opens them."""
    random = np.random.default_rng(3)
    blocks = random.integers(0, 256, (2, 3, 2, 16)).astype(np.uint8)
    scales = random.integers(118, 136, (2, 3, 2)).astype(np.uint8)
    tensors = {"experts.up_blocks": blocks, "experts.up_scales": scales, "norm": np.ones(4, ml_dtypes.bfloat16)}
    write_file(
        directory / "model.safetensors", {name: array for name, array in (tensors | changes).items() if array.size}
    )
    config, coding = with_codes(MXFP4, read_tensors(directory))
    return {"config": config, **tensors}, dict(coding.tensors)


def test_microscaled_blocks_are_read_as_the_floats_that_they_stand_for(tmp_path):
    written, found = microscaled(tmp_path)
    assert written["config"] == {"other": 1} and found.keys() == {"experts.up", "norm"}
    values = found["experts.up"].read()
    assert values.shape == found["experts.up"].shape == (2, 64, 3) and values.dtype == ml_dtypes.bfloat16
    for expert, place, output in np.ndindex(values.shape):
        byte = int(written["experts.up_blocks"][expert, output, place // 32, place % 32 // 2])
        code = byte >> 4 if place % 2 else byte & 15
        scale = 2.0 ** (int(written["experts.up_scales"][expert, output, place // 32]) - 127)
        assert values[expert, place, output] == (-1) ** (code >> 3) * FP4[code & 7] * scale


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"experts.up_scales": np.zeros(0, np.uint8)}, r"experts.up_scales is missing; expected U8\[2, 3, 2\]"),
        ({"experts.up_scales": np.ones((2, 3, 1), np.uint8)}, r"experts.up_scales is U8\[2, 3, 1\]"),
        (
            {"experts.up_blocks": np.ones((2, 3, 32), np.uint8)},
            r"experts.up_blocks is U8\[2, 3, 32\]; expected U8\[experts",
        ),
    ],
)
def test_blocks_of_mxfp4_that_do_not_fit_are_named(changes, problem, tmp_path):
    with pytest.raises(ConversionError, match=problem):
        microscaled(tmp_path, **changes)
