import dataclasses
import gc
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

from stack_core.abi.errors import CheckpointDamaged, CheckpointError, ConversionError, RunDirectoryError
from stack_train.huggingface import FORMAT
from stack_train.run.config import run_config
from stack_train.variables.trained_model import RUN_FORMAT
from stack_train.variables.weights import read_params


def raw_tensors(directory):
    """Every tensor's dtype, shape and bytes, as the safetensors library reads them."""
    found = {}
    for path in directory.glob("*.safetensors"):
        found |= {
            name: (e["dtype"], tuple(e["shape"]), bytes(e["data"]))
            for name, e in safetensors.deserialize(path.read_bytes())
        }
    return found


def entries(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.covering
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize(
    ("files", "config"),
    [
        (1, {}),
        (3, {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        (1, {"num_key_value_heads": 4, "head_dim": 6, "vocab_size": 37, "num_hidden_layers": 1}),
    ],
)
def test_round_trip_is_bitwise(make_checkpoint, tmp_path, dtype, files, config):
    source, _ = make_checkpoint(dtype=dtype, files=files, **config)
    FORMAT.import_run(source, tmp_path / "run")
    FORMAT.export_run(tmp_path / "run", tmp_path / "back", max_shard_bytes=3000 if files > 1 else 10**9)
    assert raw_tensors(tmp_path / "back") == raw_tensors(source)
    assert (tmp_path / "back" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert (tmp_path / "back" / "model.safetensors.index.json").exists() == (files > 1)


def test_values_land_transposed_and_stacked(make_checkpoint, tmp_path):
    source, tensors = make_checkpoint()
    result = FORMAT.import_run(source, tmp_path / "run")
    config = run_config(tmp_path / "run").model
    assert (config.embed, config.kv_heads, config.param_dtype, config.dtype) == (16, 2, "float32", "float32")
    params = read_params(tmp_path / "run", config)[0]
    name = "model.layers.2.self_attn.k_proj.weight"
    np.testing.assert_array_equal(params["blocks"][0][0]["attention"]["key"]["kernel"][2], tensors[name].T)
    np.testing.assert_array_equal(params["lm_head"], tensors["lm_head.weight"].T)
    assert result.parameters == sum(tensor.size for tensor in tensors.values())


def test_parameters_are_cast_where_the_config_asks_for_it(make_checkpoint, tmp_path):
    source, tensors = make_checkpoint(dtype="BF16")
    FORMAT.import_run(source, tmp_path / "run")
    wide = dataclasses.replace(run_config(tmp_path / "run").model, param_dtype="float32")
    params = read_params(tmp_path / "run", wide)[0]
    np.testing.assert_array_equal(params["norm"], tensors["model.norm.weight"].astype(np.float32))


def test_tokenizer_template_and_configs_are_kept_byte_for_byte(make_checkpoint, tmp_path):
    source, _ = make_checkpoint()
    files = {
        "tokenizer.json": Tokenizer(models.WordLevel({"a": 0})).to_str().encode(),
        "tokenizer_config.json": b'{"eos_token":   null}\n\n',
        "chat_template.jinja": "{{ messages }} \u00e9\n".encode(),
        "generation_config.json": b'{"eos_token_id": [1,   2]}',
    }
    for name, content in files.items():
        (source / name).write_bytes(content)
    result = FORMAT.import_run(source, tmp_path / "run")
    assert set(files) < set(result.kept)
    FORMAT.export_run(tmp_path / "run", tmp_path / "back")
    assert {name: (tmp_path / "back" / name).read_bytes() for name in files} == files


def test_changed_model_is_exported_with_its_own_config(make_checkpoint, tmp_path):
    source, _ = make_checkpoint()
    FORMAT.import_run(source, tmp_path / "run")
    text = (tmp_path / "run" / "config.yaml").read_text()
    (tmp_path / "run" / "config.yaml").write_text(text.replace("max_positions: 64", "max_positions: 128"))
    FORMAT.export_run(tmp_path / "run", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["max_position_embeddings"] == 128


def test_the_truncated_config_of_a_checkpoint_is_a_damaged_checkpoint(make_checkpoint, tmp_path):
    FORMAT.import_run(make_checkpoint()[0], tmp_path / "run")
    (path,) = (tmp_path / "run" / "checkpoints").glob("*/config.yaml")
    path.write_text("model: {name: 'lla")
    with pytest.raises(CheckpointError, match=rf"{path} is damaged: it does not match its SHA-256"):
        read_params(tmp_path / "run", run_config(tmp_path / "run").model)


def test_a_run_without_a_generation_config_is_exported_with_its_tokenizer_s_special_tokens(make_checkpoint, tmp_path):
    source, _ = make_checkpoint()
    FORMAT.import_run(source, tmp_path / "run")
    (tmp_path / "run" / "huggingface" / "config.json").unlink()
    tokenizer = tmp_path / "run" / "tokenizer"
    tokenizer.mkdir()
    words = Tokenizer(models.WordLevel({"a": 0, "<s>": 1, "</s>": 2}, unk_token="a"))
    (tokenizer / "tokenizer.json").write_text(words.to_str())
    (tokenizer / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    result = FORMAT.export_run(tmp_path / "run", tmp_path / "back")
    assert "generation_config.json" in result.kept
    expected = {"bos_token_id": 1, "eos_token_id": 2}
    assert json.loads((tmp_path / "back" / "generation_config.json").read_text()) == expected
    assert expected.items() <= json.loads((tmp_path / "back" / "config.json").read_text()).items()


def test_rows_of_a_converted_run_are_no_longer_than_its_model_s_longest_sequence(make_checkpoint, tmp_path):
    FORMAT.import_run(make_checkpoint()[0], tmp_path / "run")
    config = run_config(tmp_path / "run")
    assert config.data.seq_tokens == config.model.max_positions == 64
    config.data.check(config.model)


def test_every_wrong_tensor_is_named_at_once(make_checkpoint, tmp_path):
    def edit(tensors):
        del tensors["model.norm.weight"]
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((3, 4), np.float32)
        tensors["model.layers.0.mlp.extra.weight"] = np.zeros((2,), np.float32)
        tensors["lm_head.weight"] = np.zeros((53, 16), np.int32)

    source, _ = make_checkpoint(edit=edit)
    with pytest.raises(ConversionError) as caught:
        FORMAT.import_run(source, tmp_path / "run")
    message = str(caught.value)
    assert "5 tensors" in message
    assert "model.norm.weight is missing; expected shape (16,)" in message
    assert "model.layers.1.mlp.up_proj.weight is missing" in message
    assert "model.layers.0.mlp.up_proj.weight has shape (3, 4); expected (20, 16)" in message
    assert "model.layers.0.mlp.extra.weight is unexpected" in message
    assert "lm_head.weight has dtype I32" in message
    assert entries(tmp_path) == ["hf"]


def test_mixed_dtypes_become_the_one_that_holds_them_exactly(make_checkpoint, tmp_path):
    def edit(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(ml_dtypes.bfloat16)

    source, tensors = make_checkpoint(dtype="F16", edit=edit)
    assert FORMAT.import_run(source, tmp_path / "run").dtype == "float32"
    config = run_config(tmp_path / "run").model
    params = read_params(tmp_path / "run", config)[0]
    np.testing.assert_array_equal(params["norm"], tensors["model.norm.weight"].astype(np.float32))
    np.testing.assert_array_equal(params["embedding"], tensors["model.embed_tokens.weight"].astype(np.float32))


def test_a_repeated_tied_head_has_to_be_the_embedding(make_checkpoint, tmp_path):
    def repeat(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = np.ones((2,), np.float32)

    same, _ = make_checkpoint("same", tie_word_embeddings=True, edit=repeat)
    FORMAT.import_run(same, tmp_path / "run")

    def differ(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    different, _ = make_checkpoint("different", tie_word_embeddings=True, edit=differ)
    with pytest.raises(ConversionError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        FORMAT.import_run(different, tmp_path / "other")

    def narrow(tensors):
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].astype(ml_dtypes.float8_e4m3fn)
        repeat(tensors)

    unread, _ = make_checkpoint("unread", tie_word_embeddings=True, edit=narrow)
    with pytest.raises(ConversionError, match=r"\(1 tensors\):\n  model.embed_tokens.weight has dtype F8_E4M3"):
        FORMAT.import_run(unread, tmp_path / "other")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["LlamaForCausalLn"]}, "Did you mean 'LlamaForCausalLM'"),
        ({"architectures": None}, "has no key 'architectures'"),
        ({"sliding_window": 4096}, "sliding_window=4096"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu', not 'silu'"),
        ({"rope_scaling": {"rope_type": "yarm", "factor": 2.0}}, "Did you mean 'yarn'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "heads=4 is not a multiple of kv_heads=3"),
    ],
)
def test_unsupported_configs_are_refused_by_name(make_checkpoint, tmp_path, config, message):
    source, _ = make_checkpoint()
    mapping = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**mapping, **config}))
    with pytest.raises(ConversionError, match=message):
        FORMAT.import_run(source, tmp_path / "run")
    assert entries(tmp_path) == ["hf"]


HARMLESS = {
    "is_llama_config": True,
    "rope_interleaved": False,
    "unsloth_fixed": True,
    "unsloth_version": "2025.3.3",
    "_attn_implementation_autoset": True,
    "transformers.js_config": {"dtype": "q4", "kv_cache_dtype": {"q4f16": "float16"}},
    "gradient_checkpointing": True,
    "cache_implementation": "hybrid",
    "pruned_heads": {},
    "temperature": 0.7,
    "tokenizer_class": "LlamaTokenizer",
}


def test_keys_that_change_nothing_pass_and_come_back(make_checkpoint, tmp_path):
    source, _ = make_checkpoint(**HARMLESS)
    FORMAT.import_run(source, tmp_path / "run")
    FORMAT.export_run(tmp_path / "run", tmp_path / "back")
    assert (tmp_path / "back" / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_nothing_is_overwritten(make_checkpoint, tmp_path):
    source, _ = make_checkpoint()
    (tmp_path / "run").mkdir()
    with pytest.raises(ConversionError, match="exists already"):
        FORMAT.import_run(source, tmp_path / "run")
    FORMAT.import_run(source, tmp_path / "other")
    with pytest.raises(ConversionError, match="exists already"):
        FORMAT.export_run(tmp_path / "other", source)
    assert entries(tmp_path / "run") == []


def test_a_truncated_file_is_refused(make_checkpoint, tmp_path):
    source, _ = make_checkpoint()
    content = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(content[:-10])
    with pytest.raises(ConversionError, match="not a complete safetensors file"):
        FORMAT.import_run(source, tmp_path / "run")
    (source / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ConversionError, match="not a complete safetensors file"):
        FORMAT.import_run(source, tmp_path / "run")


def test_a_file_that_the_index_names_has_to_be_there(make_checkpoint, tmp_path):
    source, _ = make_checkpoint(files=2)
    (source / "model-1.safetensors").unlink()
    with pytest.raises(
        ConversionError, match=r"model-1\.safetensors is not a complete safetensors file: FileNotFoundError"
    ):
        FORMAT.import_run(source, tmp_path / "run")


def test_an_index_that_disagrees_with_its_files_is_refused(make_checkpoint, tmp_path):
    source, _ = make_checkpoint(files=2)
    index = json.loads((source / "model.safetensors.index.json").read_text())
    index["weight_map"].pop("model.norm.weight")
    index["weight_map"]["model.gone.weight"] = "model-0.safetensors"
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConversionError, match=r"model.gone.weight.*not listed: model.norm.weight"):
        FORMAT.import_run(source, tmp_path / "run")


def test_a_tensor_in_a_file_that_the_index_does_not_name_for_it_is_refused(make_checkpoint, tmp_path):
    source, tensors = make_checkpoint(files=2)
    index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    name = "model.norm.weight"
    other = next(file for file in set(index.values()) if file != index[name])
    held = {each: tensors[each] for each, file in index.items() if file == other}
    save_file({**held, name: tensors[name] + 1}, source / other)
    with pytest.raises(ConversionError, match=rf"There, but not listed: model.norm.weight \({other}\)"):
        FORMAT.import_run(source, tmp_path / "run")


def test_a_failure_midway_leaves_nothing(make_checkpoint, tmp_path):
    source, _ = make_checkpoint()

    def fail(path, done_bytes, total_bytes):
        if done_bytes > total_bytes / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        FORMAT.import_run(source, tmp_path / "run", progress=fail)
    assert entries(tmp_path) == ["hf"]
    FORMAT.import_run(source, tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        FORMAT.export_run(tmp_path / "run", tmp_path / "back", progress=fail)
    assert entries(tmp_path) == ["hf", "run"]


def test_a_directory_without_a_run_or_with_a_damaged_one(make_checkpoint, tmp_path):
    with pytest.raises(RunDirectoryError, match="holds no run"):
        FORMAT.export_run(tmp_path / "nothing", tmp_path / "back")
    source, _ = make_checkpoint()
    FORMAT.import_run(source, tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints").rglob("*"):
        if path.is_file() and "/d/" in str(path):
            path.write_bytes(b"\0" * path.stat().st_size)
    with pytest.raises(CheckpointDamaged):
        FORMAT.export_run(tmp_path / "run", tmp_path / "back")
    assert entries(tmp_path) == ["hf", "run"]


MEMORY_SCRIPT = """
    import json, sys
    from pathlib import Path
    from stack_train.huggingface import FORMAT
    from stack_train.huggingface.source import open_source

    def peak_bytes():
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

    source, small, run, back = map(Path, sys.argv[1:])
    FORMAT.import_run(small, run.with_name("warm"))
    FORMAT.export_run(run.with_name("warm"), run.with_name("warm_back"))
    before = peak_bytes()
    for leaf in open_source(source).leaves():
        del leaf
    reading = peak_bytes() - before
    FORMAT.import_run(source, run)
    FORMAT.export_run(run, back)
    print(json.dumps([reading, peak_bytes() - before]))
"""


@pytest.mark.slow
def test_memory_holds_a_few_leaves_and_not_the_checkpoint(make_checkpoint, tmp_path):
    """The peak is Linux's VmHWM: ru_maxrss starts at the parent's peak, and this one has held the checkpoint."""
    small, _ = make_checkpoint("small")
    big, _ = make_checkpoint(
        "big", dtype="BF16", hidden_size=1024, intermediate_size=8192, num_hidden_layers=40, vocab_size=2000
    )
    script = textwrap.dedent(MEMORY_SCRIPT)
    arguments = [str(path) for path in (big, small, tmp_path / "run", tmp_path / "back")]
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True)
    reading_bytes, converting_bytes = json.loads(done.stdout)
    largest_leaf_bytes = 2 * 40 * 1024 * 8192
    assert reading_bytes < 1.1 * largest_leaf_bytes
    assert converting_bytes < 5 * largest_leaf_bytes


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_a_checkpoint_and_its_run_generate_from_the_same(make_checkpoint, tmp_path, dtype):
    source, _ = make_checkpoint(dtype=dtype)
    (source / "generation_config.json").write_text('{"temperature": 0.5, "eos_token_id": 3}')
    FORMAT.import_run(source, tmp_path / "run")
    assert FORMAT.recognizes(source) and not FORMAT.recognizes(tmp_path / "run")
    ours, theirs = FORMAT.open_for_generation(source), RUN_FORMAT.open_for_generation(tmp_path / "run")
    assert (ours.name, theirs.name) == ("hf", "run")
    assert ours.states == theirs.states
    assert ours.states[0][0].dtype == {"F32": "float32", "BF16": "bfloat16"}[dtype]
    assert ours.end_tokens == theirs.end_tokens == {1, 2, 3}
    assert ours.sampling_defaults == theirs.sampling_defaults == {"temperature": 0.5}
    assert ours.parameters == theirs.parameters
    same = jax.tree.map(
        lambda a, b: a.dtype == b.dtype and np.array_equal(a, b), ours.load_params(), theirs.load_params()
    )
    assert jax.tree.all(same)


def test_parameters_come_from_the_host_to_the_devices_that_they_are_split_over(make_checkpoint, tmp_path):
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 4}
    source, _ = make_checkpoint(vocab_size=64, intermediate_size=32, **sizes)
    FORMAT.import_run(source, tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("\n  dtype: float32", "\n  dtype: bfloat16"))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    script = Path(__file__).with_name("loads_on_eight_devices.py")
    command = [sys.executable, "-W", "error", str(script), str(source), str(tmp_path / "run")]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_checkpoint_that_is_opened_holds_no_parameters_and_keeps_none_that_it_loads(make_checkpoint, tmp_path):
    source, _ = make_checkpoint()
    FORMAT.import_run(source, tmp_path / "run")
    for format_, directory in ((FORMAT, source), (RUN_FORMAT, tmp_path / "run")):
        before = jax.live_arrays()
        checkpoint = format_.open_for_generation(directory)
        params = checkpoint.load_params()
        gc.collect()
        held = [array for array in jax.live_arrays() if all(array is not other for other in before)]
        assert sum(array.nbytes for array in held) == sum(array.nbytes for array in jax.tree.leaves(params))
