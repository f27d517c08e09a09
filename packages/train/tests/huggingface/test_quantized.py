"""Quantized checkpoints of compressed-tensors, GPTQ and AWQ, packed here code by code from the published layouts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from stack_core import ops
from stack_core.abi.errors import ConversionError
from stack_train import load
from stack_train.huggingface.codes import pack_words, unpack_words
from stack_train.huggingface.format import FORMAT
from stack_train.huggingface.quantization import READERS
from stack_train.huggingface.source import open_source
from stack_train.nn.quantized import QuantizedMatrix
from stack_train.run.config import run_config
from stack_train.safetensors_files import read_tensors
from stack_train.variables.weights import read_params

from .test_blocks import write_file

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
RANDOM = np.random.default_rng(5)


def packed(codes: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """Packs unsigned codes along the last axis into int32 words, one code at a time; `order` as in AWQ."""
    count = 32 // bits
    words = np.zeros((*codes.shape[:-1], -(-codes.shape[-1] // count)), np.uint32)
    for index in np.ndindex(codes.shape):
        word, place = divmod(index[-1], count)
        place = place if order is None else order.index(place)
        words[(*index[:-1], word)] |= np.uint32(int(codes[index]) << bits * place)
    return words.view(np.int32)


def scales_of(*shape: int) -> np.ndarray:
    return RANDOM.uniform(0.01, 0.1, shape).astype(np.float16)


Stored = tuple[dict[str, np.ndarray], np.ndarray]
"""Tensors of a layer by the end of their names, and the matrix [d_out, d_in] that they stand for, in float32."""


def integers(shape: tuple[int, int], *, group: int | None, symmetric: bool, is_packed: bool, bits: int = 8) -> Stored:
    """int-quantized or pack-quantized, with a scale for each output (None) or group."""
    rows, columns = shape
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    codes = RANDOM.integers(low, high + 1, shape)
    groups = 1 if group is None else columns // group
    scales, zeros = scales_of(rows, groups), RANDOM.integers(low, high + 1, (rows, groups)) * (not symmetric)
    whole = np.empty(shape, np.float32)
    for row, column in np.ndindex(shape):
        tile = 0 if group is None else column // group
        whole[row, column] = (codes[row, column] - zeros[row, tile]) * np.float32(scales[row, tile])
    tensors: dict[str, np.ndarray] = {"weight_scale": scales}
    if is_packed:
        tensors |= {"weight_packed": packed(codes - low, bits), "weight_shape": np.array(shape, np.int64)}
    else:
        tensors["weight"] = codes.astype(np.int8)
    if not symmetric:
        # Zero points are packed along the outputs.
        tensors["weight_zero_point"] = packed((zeros - low).T, bits).T if is_packed else zeros.astype(np.int8)
    return tensors, whole


def floats(shape: tuple[int, int], scales: np.ndarray) -> Stored:
    codes = RANDOM.normal(0, 50, shape).astype(ml_dtypes.float8_e4m3fn)
    factors = scales.astype(np.float32)
    if factors.shape not in ((1,), (shape[0], 1)):  # blocks of 8 x 6
        factors = np.array([[factors[row // 8, column // 6] for column in range(shape[1])] for row in range(shape[0])])
    return {"weight": codes, "weight_scale": scales}, codes.astype(np.float32) * factors


def fours(shape: tuple[int, int], size: int) -> Stored:
    """nvfp4 (groups of 16) and mxfp4 (32)."""
    codes = RANDOM.integers(0, 16, shape)
    pairs = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    tiles = (shape[0], shape[1] // size)
    if size == 32:
        exponents = RANDOM.integers(118, 124, tiles).astype(np.uint8)
        factors, tensors = 2.0 ** (exponents.astype(np.float32) - 127), {"weight_scale": exponents}
    else:
        small, unit = RANDOM.uniform(1, 400, tiles).astype(ml_dtypes.float8_e4m3fn), np.array([3000.0], np.float32)
        factors = small.astype(np.float32) / unit
        tensors = {"weight_scale": small, "weight_global_scale": unit}
    whole = np.empty(shape, np.float32)
    for row, column in np.ndindex(shape):
        whole[row, column] = np.float32(E2M1[codes[row, column]]) * factors[row, column // size]
    return {"weight_packed": pairs, **tensors}, whole.astype(ml_dtypes.bfloat16).astype(np.float32)


def gptq(shape: tuple[int, int], *, bits: int, group: int, offset: int, acts_in_order: bool = False) -> Stored:
    rows, columns = shape
    size = columns if group == -1 else group
    groups = -(-columns // size)
    codes, zeros = RANDOM.integers(0, 2**bits, shape), RANDOM.integers(0, 2**bits, (groups, rows))
    zeros[0, 0] = 0
    scales, index = scales_of(groups, rows), np.arange(columns) // size
    if acts_in_order:
        index = RANDOM.permutation(index)
    whole = np.empty(shape, np.float32)
    for row, column in np.ndindex(shape):
        tile = index[column]
        whole[row, column] = (codes[row, column] - zeros[tile, row]) * np.float32(scales[tile, row])
    tensors = {
        "qweight": packed(codes, bits).T,  # along the inputs
        "qzeros": packed((zeros - offset) % 2**bits, bits),
        "scales": scales,
        "g_idx": index.astype(np.int32),
        "bias": np.zeros(rows, np.float16),  # AutoGPTQ writes one for every layer
    }
    return tensors, whole


def awq(shape: tuple[int, int], *, group: int) -> Stored:
    rows, columns = shape
    codes, zeros = RANDOM.integers(0, 16, (columns, rows)), RANDOM.integers(0, 16, (columns // group, rows))
    scales, order = scales_of(columns // group, rows), (0, 2, 4, 6, 1, 3, 5, 7)
    whole = np.empty(shape, np.float32)
    for row, column in np.ndindex(shape):
        tile = column // group
        whole[row, column] = (int(codes[column, row]) - int(zeros[tile, row])) * np.float32(scales[tile, row])
    return {"qweight": packed(codes, 4, order), "qzeros": packed(zeros, 4, order), "scales": scales}, whole


def group_of(format_: str, targets: tuple[str, ...] = ("Linear",), **weights: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, "observer": "minmax", **weights}
    return {"targets": list(targets), "format": format_, "weights": weights, "input_activations": None}


def compressed(format_: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "config_groups": {"group_0": group_of(format_, **weights)},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "quantization_status": "compressed",
        "version": "0.20.0",
    }


Write = Callable[[tuple[int, int]], Stored]
INT4 = {"num_bits": 4, "strategy": "group", "group_size": 4}
# Groups of 16 and 32 inputs need wider layers; words of GPTQ and AWQ need whole words.
WIDE, EVEN = {"hidden_size": 32, "intermediate_size": 64}, {"intermediate_size": 24}
CASES: dict[str, tuple[dict[str, Any], Write, dict[str, int]]] = {
    "int-quantized": (
        compressed("int-quantized", strategy="channel"),
        lambda shape: integers(shape, group=None, symmetric=True, is_packed=False),
        {},
    ),
    "int-quantized with zero points": (
        compressed("int-quantized", strategy="group", group_size=4, symmetric=False),
        lambda shape: integers(shape, group=4, symmetric=False, is_packed=False),
        {},
    ),
    "pack-quantized": (
        compressed("pack-quantized", **INT4, actorder="weight"),
        lambda shape: integers(shape, group=4, symmetric=True, is_packed=True, bits=4),
        {},
    ),
    "pack-quantized, asymmetric": (
        compressed("pack-quantized", **INT4 | {"symmetric": False}),
        lambda shape: integers(shape, group=4, symmetric=False, is_packed=True, bits=4),
        {},
    ),
    "pack-quantized in 8 bits": (
        compressed("pack-quantized", strategy="channel"),
        lambda shape: integers(shape, group=None, symmetric=True, is_packed=True),
        {},
    ),
    "float-quantized by tensor": (
        compressed("float-quantized", type="float", strategy="tensor"),
        lambda shape: floats(shape, scales_of(1)),
        {},
    ),
    "float-quantized by channel": (
        compressed("float-quantized", type="float", strategy="channel"),
        lambda shape: floats(shape, scales_of(shape[0], 1)),
        {},
    ),
    "float-quantized by block": (
        compressed("float-quantized", type="float", strategy="block", block_structure=[8, 6]),
        lambda shape: floats(shape, scales_of(-(-shape[0] // 8), -(-shape[1] // 6))),
        {},
    ),
    "nvfp4-pack-quantized": (
        compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        lambda shape: fours(shape, 16),
        WIDE,
    ),
    "mxfp4-pack-quantized": (
        compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
        lambda shape: fours(shape, 32),
        WIDE,
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": False, "sym": False, "damp_percent": 0.1},
        lambda shape: gptq(shape, bits=4, group=8, offset=1),
        EVEN,
    ),
    "gptq in the order of activations": (
        {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": True, "checkpoint_format": "gptq_v2"},
        lambda shape: gptq(shape, bits=4, group=8, offset=0, acts_in_order=True),
        EVEN,
    ),
    "gptq with a partial group": (
        {"quant_method": "gptq", "bits": 8, "group_size": 12, "checkpoint_format": "gptq"},
        lambda shape: gptq(shape, bits=8, group=12, offset=1),
        {},
    ),
    "gptq in 2 bits by channel": (
        {"quant_method": "gptq", "bits": 2, "group_size": -1},
        lambda shape: gptq(shape, bits=2, group=-1, offset=1),
        {"intermediate_size": 32},
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True, "version": "gemm"},
        lambda shape: awq(shape, group=8),
        EVEN,
    ),
}


@pytest.fixture
def write(make_checkpoint: Callable[..., Any]) -> Callable[..., tuple[Path, dict[str, np.ndarray]]]:
    """Returns write(case, edit, coding) -> (directory, values that the tensors stand for)."""

    def make(
        case: str, edit: Callable[[dict[str, np.ndarray]], object] | None = None, coding: dict[str, Any] | None = None
    ) -> tuple[Path, dict[str, np.ndarray]]:
        own, matrix, sizes = CASES[case]
        directory, tensors = make_checkpoint(num_hidden_layers=1, **sizes)
        stored, expected = {}, {}
        for name, tensor in tensors.items():
            if tensor.ndim != 2 or "layers" not in name:
                stored[name], expected[name] = tensor, tensor
                continue
            parts, expected[name] = matrix(tensor.shape)
            stored |= {name.removesuffix("weight") + part: np.ascontiguousarray(array) for part, array in parts.items()}
        if edit is not None:
            edit(stored)
        write_file(directory / "model.safetensors", stored)
        config = json.loads((directory / "config.json").read_text())
        config["quantization_config"] = own if coding is None else coding
        (directory / "config.json").write_text(json.dumps(config))
        return directory, expected

    return make


def check_values(directory: Path, expected: dict[str, np.ndarray]) -> None:
    source = open_source(directory)
    leaves = dict(source.leaves())
    for rule in source.rules:
        for name, part in rule.tensors(leaves[rule.parameter]).items():
            # The format rounds the product of code and scale to the dtype of the scale.
            stored = source.tensors[name].numpy_dtype
            np.testing.assert_array_equal(part.astype(np.float32), expected[name].astype(stored), err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_codes_are_read_as_the_floats_that_they_stand_for(case, write):
    directory, expected = write(case)
    check_values(directory, expected)


def test_a_quantized_checkpoint_becomes_a_run_and_generates(write, tmp_path):
    directory, expected = write("pack-quantized, asymmetric")
    FORMAT.import_run(directory, tmp_path / "run")
    params = read_params(tmp_path / "run", run_config(tmp_path / "run").model)[0]
    query = params["blocks"][0][0]["attention"]["query"]["kernel"]
    wanted = expected["model.layers.0.self_attn.q_proj.weight"].astype(np.float16)
    np.testing.assert_array_equal(query[0].T, wanted.astype(np.float32))
    opened = load(f"hf:{directory}")
    assert opened.checkpoint.load_params()["lm_head"].shape == (16, 53)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_words_hold_codes_from_the_lowest_bits_up(bits):
    codes = RANDOM.integers(0, 2**bits, (3, 21))
    words = packed(codes, bits)
    np.testing.assert_array_equal(pack_words(codes, bits), words)
    np.testing.assert_array_equal(unpack_words(words, bits, 21), codes)


EIGHT = {"num_bits": 8, "symmetric": True}
GROUP = group_of("float-quantized", type="float", strategy="tensor")


@pytest.mark.parametrize(
    ("group", "section", "named"),
    [
        (
            {"input_activations": {**EIGHT, "type": "int", "dynamic": True, "strategy": "token"}},
            {},
            r"int8 inputs of products \(input_activations of group_0: dynamic, token\)",
        ),
        (
            {"output_activations": {**EIGHT, "type": "float", "dynamic": False, "strategy": "tensor"}},
            {"kv_cache_scheme": {**EIGHT, "type": "float"}},
            r"fp8 outputs of products \(output_activations of group_0: static, tensor\), "
            r"fp8 keys and values in caches \(kv_cache_scheme: static\)",
        ),
        ({}, {}, "the stored scales of activations"),
    ],
)
def test_quantized_activations_and_caches_of_a_checkpoint_are_not_applied_and_named(group, section, named, write):
    def edit(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.0.self_attn.q_proj.input_scale"] = np.ones(1, np.float32)
        if section:
            tensors["model.layers.0.self_attn.k_scale"] = np.ones(1, np.float32)

    coding = CASES["float-quantized by tensor"][0] | {"config_groups": {"group_0": GROUP | group}} | section
    directory, expected = write("float-quantized by tensor", edit, coding)
    with pytest.warns(UserWarning, match=f"{named}, which are not applied: .* stack quantize hf:DIR --recipe w8a8"):
        check_values(directory, expected)


def test_names_take_precedence_over_expressions_and_classes(write):
    coding = compressed("pack-quantized", **INT4)
    eight = group_of("int-quantized", ("re:.*q_proj",), strategy="channel")
    coding["config_groups"] = {"all": coding["config_groups"]["group_0"], "queries": eight}
    coding["format"] = "mixed-precision"
    name, matrix = "model.layers.0.self_attn.q_proj.", {}

    def edit(tensors: dict[str, np.ndarray]) -> None:
        for part in ("weight_packed", "weight_shape", "weight_scale"):
            del tensors[name + part]
        parts, matrix[f"{name}weight"] = integers((16, 16), group=None, symmetric=True, is_packed=False)
        tensors.update({name + part: array for part, array in parts.items()})

    directory, expected = write("pack-quantized", edit, coding)
    check_values(directory, expected | matrix)
    exact = group_of("pack-quantized", (name.removesuffix("."),), **INT4)
    coding["config_groups"]["exact"] = exact
    directory = write_config(directory, coding)
    with pytest.raises(ConversionError, match=r"q_proj.weight_shape is missing; expected I64 or I32\[2\]"):
        open_source(directory)


def write_config(directory: Path, coding: dict[str, Any]) -> Path:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": coding}))
    return directory


Q = "model.layers.0.self_attn.q_proj."


@pytest.mark.parametrize(
    ("case", "name", "tensor", "problem"),
    [
        ("pack-quantized", "weight_scale", None, r"weight_scale is missing; expected F32 or BF16 or F16\[16, 4\]"),
        ("pack-quantized", "weight_scale", scales_of(16, 2), r"weight_scale is F16\[16, 2\]; expected .*\[16, 4\]"),
        ("pack-quantized", "weight_packed", np.ones((16, 1), np.int32), r"is I32\[16, 1\]; expected I32\[16, 2\]"),
        ("pack-quantized", "weight_shape", np.array([16, 18]), r"weight_packed is I32\[16, 2\]; expected I32\[16, 3\]"),
        ("pack-quantized", "weight_g_idx", np.ones(9, np.int32), r"weight_g_idx is I32\[9\]; expected .*\[16\]"),
        ("pack-quantized, asymmetric", "weight_zero_point", None, r"zero_point is missing; expected I32\[2, 4\]"),
        ("int-quantized", "weight_scale", None, r"weight_scale is missing; expected F32 or BF16 or F16\[16, 1\]"),
        ("int-quantized", "weight", np.ones(16, np.int8), r"q_proj.weight is I8\[16\]; expected I8\[d_out, d_in\]"),
        ("int-quantized with zero points", "weight_zero_point", None, r"zero_point is missing; expected I8\[16, 4\]"),
        ("float-quantized by tensor", "weight_scale", scales_of(16, 1), r"is F16\[16, 1\]; expected .*\[1\]"),
        ("nvfp4-pack-quantized", "weight_global_scale", None, r"global_scale is missing; expected F32\[1\]"),
        ("mxfp4-pack-quantized", "weight_scale", scales_of(32, 1), r"is F16\[32, 1\]; expected U8\[32, 1\]"),
        ("gptq", "scales", None, r"scales is missing; expected F16 or BF16 or F32\[2, 16\] for group_size=8"),
        ("gptq", "qzeros", np.ones((2, 1), np.int32), r"qzeros is I32\[2, 1\]; expected I32\[2, 2\]"),
        ("gptq", "g_idx", np.ones(3, np.int32), r"g_idx is I32\[3\]; expected I32 or I64\[16\]"),
        ("gptq", "bias", np.ones(16, np.float16), r"q_proj.bias is unexpected; it has shape \(16,\)"),
        ("awq", "qweight", np.ones((2, 2, 2), np.int32), r"qweight is I32\[2, 2, 2\]; expected I32\[d_in, d_out / 8\]"),
        ("awq", "scales", scales_of(1, 16), r"scales is F16\[1, 16\]; expected .*\[2, 16\] for group_size=8"),
    ],
)
def test_tensors_that_do_not_fit_are_named(case, name, tensor, problem, write):
    def edit(tensors: dict[str, np.ndarray]) -> None:
        tensors.pop(Q + name, None)
        if tensor is not None:
            tensors[Q + name] = tensor

    directory, _ = write(case, edit)
    with pytest.raises(ConversionError, match=problem):
        open_source(directory)


def changed(case: str, **weights: Any) -> dict[str, Any]:
    coding = json.loads(json.dumps(CASES[case][0]))
    coding["config_groups"]["group_0"]["weights"] |= weights
    return coding


@pytest.mark.parametrize(
    ("case", "coding", "problem"),
    [
        ("gptq", {"bits": 3}, "bits=3, not 2, 4 or 8"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format='marlin', not 'gptq' or 'gptq_v2'"),
        ("gptq", {"dynamic": {"-:.*down.*": {}}}, "dynamic={'-:.*down.*': {}}"),
        ("gptq", {"group_size": 4}, r"scales is F16\[2, 16\]; expected .*\[4, 16\] for group_size=4"),
        ("gptq", {"group_size": 0}, "group_size=0, not -1 or a positive integer"),
        ("pack-quantized", changed("pack-quantized", group_size="4"), "group_size='4', not a positive integer"),
        (
            "int-quantized",
            {"config_groups": {"a": group_of("int-quantized", ("re:(",))}},
            "is not a regular expression",
        ),
        ("awq", {"version": "gemv"}, "version='gemv', not 'gemm'"),
        ("awq", {"bits": 8}, "bits=8, not 4"),
        ("awq", {"group_size": 12}, "has 16 inputs, which group_size=12 does not divide"),
        ("int-quantized", {"sparsity_config": {"format": "24"}}, "sparsity_config={'format': '24'}"),
        ("int-quantized", {"transform_config": {"config_groups": {"R1": 1}}}, "transform_config="),
        (
            "int-quantized",
            {"format": "marlin-24", "config_groups": {"a": group_of("marlin-24")}},
            "format='marlin-24', not int-quantized or",
        ),
        ("int-quantized", {"config_groups": {"a": {"targets": []}}}, "config_groups.a of config.json is"),
        ("int-quantized", {"config_groups": {"a": group_of("int-quantized", ("re:nothing",))}}, "no entry of config"),
        (
            "int-quantized",
            changed("int-quantized", num_bits=4),
            "int4 by channel, which int-quantized does not have: int8 by",
        ),
        ("pack-quantized", changed("pack-quantized", num_bits=3), "int3 by group, which pack-quantized does not have"),
        ("pack-quantized", changed("pack-quantized", group_size=5), "16 inputs, which group_size=5 does not divide"),
        ("pack-quantized", changed("pack-quantized", rotation=2), "weights of config.json has .* rotation=2"),
    ],
)
def test_settings_that_are_not_supported_are_named(case, coding, problem, write):
    directory, _ = write(case, coding=CASES[case][0] | coding)
    with pytest.raises(ConversionError, match=problem):
        open_source(directory)


@pytest.mark.parametrize("case", ["pack-quantized", "gptq"])
def test_groups_outside_of_the_scales_are_refused(case, write):
    def edit(tensors: dict[str, np.ndarray]) -> None:
        tensors[Q + ("weight_g_idx" if case == "pack-quantized" else "g_idx")] = np.full(16, 7, np.int32)

    directory, _ = write(case, edit)
    with pytest.raises(ConversionError, match=r"q_proj.*g_idx names a group outside of the . groups"):
        dict(open_source(directory).leaves())


def test_a_truncated_file_is_named(write):
    directory, _ = write("pack-quantized")
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ConversionError, match="is not a complete safetensors file"):
        read_tensors(directory)


def test_every_method_has_a_case():
    tested = {coding["quant_method"] for coding, *_ in CASES.values()}
    assert tested | {"fp8", "mxfp4"} == set(READERS)  # these two are in test_blocks.py


KEPT = [name for name in CASES if name not in ("nvfp4-pack-quantized", "mxfp4-pack-quantized")]
AS_FLOATS = {"float-quantized by block", "gptq in the order of activations", "gptq with a partial group"}


@pytest.mark.parametrize("case", [name for name in KEPT if name not in AS_FLOATS])
def test_matrices_stay_quantized_when_a_model_generates(case, write):
    directory, expected = write(case)
    opened = load(f"hf:{directory}").checkpoint
    params = opened.load_params()
    layer = params["blocks"][0][0]
    for module, name in ((layer["attention"], "self_attn.{}_proj"), (layer["feed_forward"], "mlp.{}_proj")):
        for part, linear in module.items():
            matrix, end = linear["kernel"], {"query": "q", "key": "k", "value": "v", "output": "o"}.get(part, part)
            assert isinstance(matrix, QuantizedMatrix)
            wanted = expected[f"model.layers.0.{name.format(end)}.weight"]
            # Without the format's rounding of the product to the dtype of the scale.
            np.testing.assert_allclose(ops.dequantize(matrix, "float32")[0].T, wanted, rtol=1e-6, atol=1e-7)
    floats = opened.dequantized()
    tokens, positions = jnp.arange(12)[None] * 4, jnp.arange(12)[None]

    def logits(checkpoint: Any) -> np.ndarray:
        model = checkpoint.model(checkpoint.load_params())
        return np.asarray(model.logits(model(tokens, positions).hidden))

    if case in ("pack-quantized, asymmetric", "awq"):
        # Their weights are rounded to float16.
        np.testing.assert_allclose(logits(opened), logits(floats), atol=0.02)
    with pytest.raises(ConversionError, match="cannot be combined with quantized weights"):
        opened.read_adapters("peft:somewhere")


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("gptq in the order of activations", "7 in int4, groups of 8"),
        ("gptq with a partial group", "7 in int8, groups of 12"),
        ("nvfp4-pack-quantized", "7 in fp4, groups of 16"),
    ],
)
def test_codes_that_products_do_not_take_are_read_as_floats_and_named(case, named, write):
    directory, _ = write(case)
    with pytest.warns(UserWarning, match=f"quantized matrices that are read as floats: {named}"):
        opened = load(f"hf:{directory}")
    assert opened.checkpoint.load_params()["blocks"][0][0]["attention"]["query"]["kernel"].shape[0] == 1
