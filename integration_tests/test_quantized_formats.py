"""Quantized runs become checkpoints of compressed-tensors, which stand for the same floats; the table of formats."""

import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from stack_core.abi.errors import ConversionError, StackError
from stack_core.cli import main
from stack_quant.model import quantize_model
from stack_quant.recipes import as_rules
from stack_quant.section import QuantConfig
from stack_train.checkpoint import named_leaves
from stack_train.huggingface import FORMAT
from stack_train.huggingface.compressed_tensors import FORMATS
from stack_train.huggingface.quantization import READERS
from stack_train.huggingface.source import open_source
from stack_train.run.config import run_config
from stack_train.variables.trained_model import RUN_FORMAT
from stack_train.variables.weights import read_params

PAGE = Path(__file__).parents[1] / "docs" / "quantized.md"
SIZES = {"vocab_size": 53, "hidden_size": 32, "intermediate_size": 52, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 2, **SIZES}
BATCH = {name: jnp.zeros((1, 8), jnp.int32) for name in ("tokens", "positions", "segment_ids")}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with random parameters."""
    folder, random = tmp_path_factory.mktemp("formats"), np.random.default_rng(0)
    linears = dict.fromkeys(("self_attn.q_proj", "self_attn.o_proj"), (32, 32))
    linears |= {"self_attn.k_proj": (16, 32), "self_attn.v_proj": (16, 32)}
    linears |= {"mlp.gate_proj": (52, 32), "mlp.up_proj": (52, 32), "mlp.down_proj": (32, 52)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (53, 32), "lm_head": (53, 32), "model.norm": (32,)}
    for layer in range(2):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in linears.items()}
        shapes |= {f"model.layers.{layer}.{name}_layernorm": (32,) for name in ("input", "post_attention")}
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text(json.dumps(CONFIG))
    tensors = {f"{name}.weight": random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(tensors, folder / "hf" / "model.safetensors")
    FORMAT.import_run(folder / "hf", folder / "run")
    return folder / "run"


def quantized(run: Path, destination: Path, rules: Any) -> Path:
    opened = RUN_FORMAT.open_model(run)
    model = quantize_model(opened.model, rules, BATCH)
    opened.save(destination, model, {"quant": QuantConfig(rules=as_rules(rules))})
    return destination


def one(**rule: Any) -> list[dict[str, Any]]:
    return [{"path": "query", **rule}]


ALL = [
    {"path": "query", "weights": "int8", "activations": "int8"},
    {"path": "key", "weights": "int8", "activations": "int8", "tile_size": 4, "weight_calibration": "minmax"},
    {"path": "value", "weights": "fp8_e4m3", "activations": "fp8_e4m3"},
    {"path": "output", "weights": "mxfp4"},
    {"path": "gate", "weights": "int3", "tile_size": [4, 2]},
    {"path": "up", "weights": "int6"},
    {"path": "down", "weights": "int4", "tile_size": 4, "activations": "int8", "weight_calibration": "minmax"},
]
WRITTEN = {"int-quantized", "float-quantized", "pack-quantized", "mxfp4-pack-quantized"}


def check_written(directory: Path, stored: Path) -> dict[str, Any]:
    """Checks that a checkpoint stands for the floats of a run, and returns its `quantization_config`."""
    wanted = named_leaves(read_params(stored, run_config(stored).model)[0])
    for path, leaf in open_source(directory).leaves():
        np.testing.assert_array_equal(leaf, wanted[path], err_msg=path)
    return json.loads((directory / "config.json").read_text())["quantization_config"]


@pytest.mark.filterwarnings("ignore:.*which are not applied")
def test_every_type_is_written_in_codes(run, tmp_path):
    stored = quantized(run, tmp_path / "run", ALL)
    result = FORMAT.export_run(stored, tmp_path / "hf")
    section = check_written(tmp_path / "hf", stored)
    assert section["format"] == "mixed-precision" and result.dtype == "mixed-precision and float32"
    assert {group["format"] for group in section["config_groups"].values()} == WRITTEN


@pytest.mark.covering
@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "with zero points"])
@pytest.mark.parametrize(("kind", "tile", "size"), [("int3", 8, 8), ("int6", None, -1)])
def test_gptq_stands_for_the_floats_of_the_run(kind, tile, size, zeros, run, tmp_path, capsys):
    rule: dict[str, Any] = {"weights": kind, "tile_size": tile, "smaller_tiles": tile is not None}
    rule |= {"weight_calibration": "minmax" if zeros else "absmax"}
    stored = quantized(run, tmp_path / "run", [{"path": ".*", **rule}])
    # The 52 inputs or outputs of the feed-forward layers are no whole words of 8 codes, but of 4.
    floats = ("" if kind == "int6" else "blocks.*down/kernel, blocks.*gate/kernel, .*") + "embedding, lm_head"
    with pytest.warns(UserWarning, match=f"one group have codes in GPTQ, in whole words: {floats}"):
        main(["convert", str(stored), f"hf:{tmp_path / 'hf'}", "--stored", "gptq"])
    layout = "gptq_v2" if zeros else "gptq"
    assert f"{layout} and float32" in capsys.readouterr().out
    section = json.loads((tmp_path / "hf" / "config.json").read_text())["quantization_config"]
    assert section["bits"] == (4 if kind == "int3" else 8) and section["group_size"] == size
    assert (section["sym"], section["checkpoint_format"]) == (not zeros, layout)
    names = {"self_attn." + name for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    assert {*section.get("modules_in_block_to_quantize", [names])[0]} == names
    wanted = named_leaves(read_params(stored, run_config(stored).model)[0])
    for path, leaf in open_source(tmp_path / "hf").leaves():
        # Scales are rounded to float16, and so is the product.
        np.testing.assert_allclose(leaf, wanted[path], rtol=2**-10 if "attention/" in path or kind == "int6" else 0)
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    assert load_file(file)["model.layers.1.self_attn.q_proj.g_idx"].tolist() == [
        place // (tile or 32) for place in range(32)
    ]


def test_awq_stands_for_the_floats_of_the_run(run, tmp_path, capsys):
    tiles: dict[str, Any] = {"tile_size": 8, "smaller_tiles": True}
    rules = [{"path": "query|output|up", "weights": "int4", **tiles, "weight_calibration": "minmax"}]
    rules += [{"path": "key", "weights": "int3", **tiles}, {"path": "value", "weights": "int8"}]
    stored = quantized(run, tmp_path / "run", rules)
    # The feed-forward layers have 52 outputs, which are no whole words of 8 codes.
    with pytest.warns(UserWarning, match="one group have codes in AWQ, in whole words: .*value/kernel, .*up/kernel."):
        main(["convert", str(stored), f"hf:{tmp_path / 'hf'}", "--stored", "awq"])
    assert "awq and float32" in capsys.readouterr().out
    section = json.loads((tmp_path / "hf" / "config.json").read_text())["quantization_config"]
    floats = section.pop("modules_to_not_convert")
    assert section == {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 8, "zero_point": True}
    ends = ("mlp.down_proj", "mlp.gate_proj", "mlp.up_proj", "self_attn.v_proj")
    assert floats == ["lm_head", *(f"model.layers.{layer}.{end}" for layer in range(2) for end in ends)]
    wanted = named_leaves(read_params(stored, run_config(stored).model)[0])
    for path, leaf in open_source(tmp_path / "hf").leaves():
        # Scales are rounded to float16, and so is the product.
        in_codes = any(name in path for name in ("query", "output", "key"))
        np.testing.assert_allclose(leaf, wanted[path], rtol=2**-10 if in_codes else 0, err_msg=path)


def test_nvfp4_stands_for_the_floats_of_the_run(run, tmp_path):
    stored = quantized(run, tmp_path / "run", [{"path": "query|output", "weights": "nvfp4"}])
    FORMAT.export_run(stored, tmp_path / "hf")
    section = json.loads((tmp_path / "hf" / "config.json").read_text())["quantization_config"]
    assert section["format"] == "nvfp4-pack-quantized"
    wanted = named_leaves(read_params(stored, run_config(stored).model)[0])
    for path, leaf in open_source(tmp_path / "hf").leaves():
        # Floats of this format are read in bfloat16, as by its library.
        np.testing.assert_allclose(leaf.astype(np.float32), wanted[path], rtol=2**-8, err_msg=path)


@pytest.mark.parametrize(
    ("rules", "layout", "problem"),
    [
        (one(weights="fp8_e4m3"), "gptq", "GPTQ stores integers and float inputs, unlike fp8_e4m3"),
        (one(weights="int8", activations="int8"), "gptq", "unlike int8 with int8 inputs. Leave out --stored"),
        ([{"path": "up", "weights": "int4"}], "gptq", "belongs to a linear layer that gptq stores in codes"),
        (one(weights="int8"), "awq", "belongs to a linear layer that awq stores in codes"),
        (one(weights="int4", activations="int8"), "awq", "AWQ stores integers and float inputs, unlike int4 with int8"),
        (one(weights="int4"), "exl2", "'exl2' is not a layout that `hf:` writes; take one of .*, gptq, awq"),
        (None, "gptq", "is not quantized. Quantize it first"),
    ],
)
def test_a_layout_that_cannot_hold_a_run_is_refused(rules, layout, problem, run, tmp_path):
    stored = run if rules is None else quantized(run, tmp_path / "run", rules)
    with pytest.raises(ConversionError, match=problem):
        FORMAT.export_run(stored, tmp_path / "hf", stored=layout)
    assert not (tmp_path / "hf").exists()


def test_the_command_names_what_stays_in_float(run, tmp_path, capsys):
    stored = quantized(run, tmp_path / "run", "w4_t128")
    with pytest.warns(UserWarning, match="Written as floats, because only linear layers have codes.*: embedding"):
        main(["convert", str(stored), f"hf:{tmp_path / 'hf'}"])
    assert "pack-quantized and float32" in capsys.readouterr().out
    section = check_written(tmp_path / "hf", stored)
    assert section["format"] == "pack-quantized"
    four, eight = section["config_groups"]["group_0"], section["config_groups"]["group_1"]
    assert (four["targets"], four["weights"]["num_bits"], four["weights"]["group_size"]) == (["Linear"], 4, None)
    assert {"lm_head"} <= {each for group in section["config_groups"].values() for each in group["targets"]}
    assert eight["input_activations"] is None and section["ignore"] == []


@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        (one(weights="nf4", tile_size=4), "is nf4/t4, which `hf:` does not write"),
        (one(weights="fp8_e5m2"), "is fp8_e5m2, which `hf:` does not write"),
        (one(weights="int8", tile_size=1), "with a scale for each input, which `hf:` does not write"),
        (one(weights="int8", activations="fp8_e4m3"), "is int8 and multiplies inputs in fp8_e4m3"),
        ([{"path": "embedding", "weights": "int8"}], "No quantized parameter belongs to a linear layer"),
    ],
)
def test_codes_without_a_place_are_refused(rules, problem, run, tmp_path):
    stored = quantized(run, tmp_path / "run", rules)
    with pytest.raises(ConversionError, match=problem):
        FORMAT.export_run(stored, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        ({"algorithm": "hadamard"}, "rotated by 32, which `hf:` does not write"),
        ({"activations": "int8", "static_ranges": True}, "multiplies inputs with static ranges"),
    ],
)
def test_inputs_without_a_place_are_refused(rule, problem, run, tmp_path):
    opened = RUN_FORMAT.open_model(run)
    rules = [{"path": "query", "weights": "int8", **rule}]
    model = quantize_model(opened.model, rules, BATCH, stream=[BATCH])
    opened.save(tmp_path / "run", model, {"quant": QuantConfig(rules=as_rules(rules))})
    with pytest.raises(StackError, match=problem):
        FORMAT.export_run(tmp_path / "run", tmp_path / "hf")


def rows() -> list[list[str]]:
    """The cells of the table's rows, with the names in backticks alone for the first two columns."""
    lines = re.findall(r"^\| (`.*) \|$", PAGE.read_text(), re.MULTILINE)
    cells = [[cell.strip() for cell in line.split("|")] for line in lines]
    return [[*(re.sub("`", "", cell) for cell in row[:2]), *row[2:]] for row in cells if row[0] != "`quant_method`"]


def test_the_table_lists_what_is_read_and_written():
    read = [row for row in rows() if row[3] == "yes"]
    assert {row[0] for row in read} == set(READERS)
    assert {row[1] for row in read if row[0] == "compressed-tensors"} == set(FORMATS)
    assert {row[1] for row in rows() if row[4] == "yes"} == WRITTEN | {"nvfp4-pack-quantized", "gptq, gptq_v2", "gemm"}
