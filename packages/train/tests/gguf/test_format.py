import dataclasses
import subprocess
import sys

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Regex, pre_tokenizers

from stack_core.abi.config import to_mapping
from stack_core.abi.errors import ConversionError, GenerationError
from stack_core.abi.plugins import registries
from stack_core.ops.building import is_quantized
from stack_train.checkpoint import named_leaves
from stack_train.commands.convert import convert
from stack_train.data.tokenizer import HuggingFaceTokenizer
from stack_train.gguf import FORMAT
from stack_train.gguf.names import ARCHITECTURES, architecture_of
from stack_train.gguf.vocabulary import Vocabulary
from stack_train.run.config import run_config
from stack_train.variables.weights import read_params

from .random_blocks import random_blocks
from .tiny_runs import TEMPLATE, TEXT, VOCAB, make_run, write_tokenizer

FAMILIES = {
    "llama": {"tie_embeddings": True},
    "llama3": {
        "family": "llama",
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "mistral": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "mixtral": {"experts": 4},
    "qwen3_moe": {"head_dim": 32, "experts": 4, "active_experts": 2, "expert_mlp": 64},
    "gemma3": {"layers": 7, "window": 8, "query_scalar": 16},
}


def parameters(run):
    return named_leaves(read_params(run, run_config(run).model)[0])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_has_what_the_run_had(tmp_path, name):
    config = make_run(tmp_path / "run", **{"family": name, **FAMILIES[name]}).model
    FORMAT.export_run(tmp_path / "run", tmp_path / "model.gguf")
    assert FORMAT.recognizes(tmp_path / "model.gguf") and not FORMAT.recognizes(tmp_path / "run" / "config.yaml")
    FORMAT.import_run(tmp_path / "model.gguf", tmp_path / "again")
    again = to_mapping(run_config(tmp_path / "again").model)
    unlike = {"initializer_std", "name"} if name == "mistral" else {"initializer_std"}  # a file of either is a Llama's
    kept = {key: value for key, value in again.items() if key not in unlike}
    ours = to_mapping(dataclasses.replace(config, kv_heads=config.kv_head_count, head_dim=config.head_size))
    assert kept == {key: ours.get(key, kept[key]) for key in kept}
    before, after = parameters(tmp_path / "run"), parameters(tmp_path / "again")
    assert before.keys() == after.keys()
    for path, value in before.items():
        stored = np.asarray(value)
        if path.endswith(("kernel", "embedding", "lm_head", "_gate", "_up", "_down")) and "router" not in path:
            stored = stored.astype(np.float16).astype(np.float32)
        elif name == "gemma3":
            stored = (stored + np.float32(1)) - np.float32(1)  # norms are written with the one that Gemma adds
        np.testing.assert_array_equal(after[path], stored, err_msg=path)


@pytest.mark.parametrize("stored", ["Q8_0", "Q4_0"])
def test_quantized_matrices_are_read_as_the_format_dequantizes_them(tmp_path, stored):
    make_run(tmp_path / "run", "qwen2")
    convert(str(tmp_path / "run"), f"gguf:{tmp_path / 'model.gguf'}", stored=stored)
    convert(f"gguf:{tmp_path / 'model.gguf'}", str(tmp_path / "again"))
    before, after = parameters(tmp_path / "run"), parameters(tmp_path / "again")
    kernel = "blocks/0/0/feed_forward/up/kernel"
    kind = gguf.GGMLQuantizationType[stored]
    for layer in range(2):
        plain = np.asarray(before[kernel][layer]).T
        wanted = gguf.quants.dequantize(gguf.quants.quantize(np.ascontiguousarray(plain), kind), kind)
        np.testing.assert_array_equal(np.asarray(after[kernel][layer]).T, wanted)
        assert 0 < np.abs(wanted - plain).max() < {"Q8_0": 0.01, "Q4_0": 0.15}[stored]
    bits = {"Q8_0": 8.5, "Q4_0": 4.5}[stored]
    size = (tmp_path / "model.gguf").stat().st_size
    assert size < 30_000 + sum(value.size for value in before.values()) * bits / 8 * 1.1


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_matrices_get_the_types_of_llama_cpp(tmp_path, tied):
    def types_of(stored):
        path = tmp_path / f"{stored}.gguf"
        FORMAT.export_run(tmp_path / "run", path, stored=stored)
        return {each.name: each.tensor_type.name for each in gguf.GGUFReader(path).tensors}

    make_run(tmp_path / "run", embed=256, layers=4, tie_embeddings=tied)
    mixture = types_of("Q4_K_M")
    assert mixture["token_embd.weight"] == ("Q6_K" if tied else "Q4_K")
    assert mixture.get("output.weight") == (None if tied else "Q6_K")
    # 96 is not a multiple of 256; the sensitive layers of four are the last two.
    assert [mixture[f"blk.{layer}.ffn_down.weight"] for layer in range(4)] == ["Q5_0", "Q5_0", "Q8_0", "Q8_0"]
    assert [mixture[f"blk.{layer}.attn_v.weight"] for layer in range(4)] == ["Q4_K", "Q4_K", "Q6_K", "Q6_K"]
    assert {mixture[f"blk.{layer}.ffn_up.weight"] for layer in range(4)} == {"Q4_K"}
    plain = types_of("Q4_0")
    assert plain["blk.0.ffn_down.weight"] == "Q4_0"
    assert plain["token_embd.weight" if tied else "output.weight"] == "Q6_K"


def write_imatrix(path, means, *, count=8):
    """Writes importance as llama.cpp does: sums of squares and their counts."""
    writer = gguf.GGUFWriter(path, "")
    writer.add_string("general.type", "imatrix")
    for name, mean in means.items():
        writer.add_tensor(f"{name}.in_sum2", mean * count)
        writer.add_tensor(f"{name}.counts", np.full((len(mean), 1), count, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.slow), "mixtral"])
def test_importance_of_ours_and_of_llama_cpp_gives_the_same_file(tmp_path, family):
    make_run(tmp_path / "run", family, **({"experts": 4} if family == "mixtral" else {}))
    random = np.random.default_rng(0)
    gate, own = ("expert_gate", "ffn_gate_exps") if family == "mixtral" else ("gate/kernel", "ffn_gate")
    path = f"blocks/0/0/feed_forward/{gate}"
    lead = parameters(tmp_path / "run")[path].shape[:-2]
    mean = random.lognormal(sigma=2, size=(*lead, 64, 1)).astype(np.float32)
    np.savez(tmp_path / "mine.npz", **{path: mean})
    write_imatrix(
        tmp_path / "imatrix.gguf", {f"blk.{layer}.{own}.weight": mean[layer].reshape(-1, 64) for layer in range(2)}
    )
    run, files = str(tmp_path / "run"), {}
    for name in ("mine.npz", "imatrix.gguf", None):
        importance = None if name is None else tmp_path / name
        convert(run, f"gguf:{tmp_path / f'{name}-fitted.gguf'}", stored="Q4_0", importance=importance)
        reader = gguf.GGUFReader(tmp_path / f"{name}-fitted.gguf")
        files[name] = {each.name: each.data.copy() for each in reader.tensors}
        assert ("quantize.imatrix.file" in reader.fields) == (name is not None)
    changed = {name for name, data in files["mine.npz"].items() if not np.array_equal(data, files[None][name])}
    assert changed == {f"blk.{layer}.{own}.weight" for layer in range(2)}
    for name, data in files["mine.npz"].items():
        np.testing.assert_array_equal(files["imatrix.gguf"][name], data)


def test_wrong_importance_is_refused(tmp_path):
    make_run(tmp_path / "run")
    kernel = "blocks/0/0/feed_forward/gate/kernel"
    wrong = {
        "other": ({kernel: np.ones((2, 32, 1))}, r"importance of \[2, 32, 1\] columns"),
        "foreign": ({"mlp": np.ones((2, 32, 1))}, "no importance of a quantized tensor of this model; it has: mlp"),
        "negative": ({kernel: np.full((2, 64, 1), -1.0)}, "has negative or infinite numbers"),
    }
    for name, (arrays, message) in wrong.items():
        np.savez(tmp_path / f"{name}.npz", **arrays)
        with pytest.raises(ConversionError, match=message):
            FORMAT.export_run(tmp_path / "run", tmp_path / "a.gguf", stored="Q4_0", importance=tmp_path / f"{name}.npz")
    write_imatrix(tmp_path / "wide.gguf", {"blk.0.ffn_gate.weight": np.ones((1, 96), np.float32)})
    with pytest.raises(ConversionError, match=r"blk.0.ffn_gate.weight has the importance of \[96\] columns"):
        FORMAT.export_run(tmp_path / "run", tmp_path / "a.gguf", stored="Q4_0", importance=tmp_path / "wide.gguf")
    write_imatrix(tmp_path / "experts.gguf", {"blk.0.ffn_gate.weight": np.ones((4, 64), np.float32)})
    with pytest.raises(ConversionError, match=r"has the importance of \[4, 64\] columns, and the model has \[64\]"):
        FORMAT.export_run(tmp_path / "run", tmp_path / "a.gguf", stored="Q4_0", importance=tmp_path / "experts.gguf")
    (tmp_path / "text.npz").write_text("no archive")
    for name in ("text.npz", "none.npz"):
        with pytest.raises(ConversionError, match="stack quantize RUN --importance"):
            FORMAT.export_run(tmp_path / "run", tmp_path / "a.gguf", stored="Q4_0", importance=tmp_path / name)
    with pytest.raises(ConversionError, match="no effect on Q8_0"):
        FORMAT.export_run(tmp_path / "run", tmp_path / "a.gguf", stored="Q8_0", importance=tmp_path / "text.npz")
    assert not list(tmp_path.glob("*a.gguf*"))


def rewrite(source, target, type_of):
    """Copies a file, with random blocks of the type `type_of(name)` as its matrices, or as they are if it is None."""
    reader, writer = gguf.GGUFReader(source), gguf.GGUFWriter(target, "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            writer.add_key_value(
                name, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None
            )
    rng = np.random.default_rng(0)
    for each in reader.tensors:
        if len(each.shape) == 1 or (kind := type_of(each.name)) is None:
            writer.add_tensor(each.name, np.asarray(each.data), raw_dtype=each.tensor_type)
        else:
            blocks = random_blocks(kind, tuple(map(int, reversed(each.shape))), rng)
            writer.add_tensor(each.name, blocks, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A file without quantized matrices whose rows divide into the blocks of all types."""
    root = tmp_path_factory.mktemp("plain")
    make_run(root / "run", embed=256, heads=4, mlp=256)
    FORMAT.export_run(root / "run", root / "plain.gguf")
    return root / "plain.gguf"


def wanted_values(path):
    return {each.name: gguf.quants.dequantize(each.data, each.tensor_type) for each in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("kind", ["Q4_K", pytest.param("Q6_K", marks=pytest.mark.slow), "TQ1_0"])
def test_types_that_llama_cpp_writes_are_imported(tmp_path, plain, kind):
    """Blocks of random bytes are as good as any: each stands for numbers."""
    rewrite(plain, tmp_path / "model.gguf", lambda name: kind)
    FORMAT.import_run(tmp_path / "model.gguf", tmp_path / "again")
    found, wanted = parameters(tmp_path / "again"), wanted_values(tmp_path / "model.gguf")
    np.testing.assert_array_equal(found["embedding"], wanted["token_embd.weight"])
    down = np.asarray(found["blocks/0/0/feed_forward/down/kernel"])
    np.testing.assert_array_equal(down[1].T, wanted["blk.1.ffn_down.weight"])
    assert np.isfinite(down).all() and down.std() > 0


def logits(checkpoint):
    tokens = jnp.arange(12).reshape(2, 6) * 7 % VOCAB

    def compute(params):
        model = checkpoint.model(params)
        return model.logits(model(tokens, jnp.broadcast_to(jnp.arange(6), tokens.shape)).hidden)

    return np.asarray(jax.jit(compute)(checkpoint.load_params()))


MIXED = {
    "attn_q": "Q2_K",
    "attn_k": "Q3_K",
    "attn_v": "Q5_0",
    "attn_output": "Q5_1",
    "ffn_gate": "Q4_K",
    "ffn_up": "Q5_K",
    "ffn_down": "Q6_K",
    "blk.1.ffn_down": "Q4_1",
    "token_embd": "Q4_0",
    "output": "Q8_0",
}


@pytest.mark.parametrize("kind", ["mixed", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("Q4_1", "Q6_K"))])
def test_a_model_opened_for_generation_stays_quantized(tmp_path, plain, kind):
    """The logits equal those of the float32 weights, with all types in one model, too."""

    def type_of(name):
        place = name.removesuffix(".weight")
        return kind if kind != "mixed" else MIXED.get(place) or MIXED[place.split(".")[-1]]

    rewrite(plain, tmp_path / "model.gguf", type_of)
    ours = FORMAT.open_for_generation(tmp_path / "model.gguf")
    floats = ours.dequantized()
    quantized = [each for each in jax.tree.leaves(ours.parameters, is_leaf=is_quantized) if is_quantized(each)]
    assert len(quantized) == 9  # seven kernels, the embedding and the head
    assert not any(map(is_quantized, jax.tree.leaves(floats.parameters, is_leaf=is_quantized)))
    found, wanted = logits(ours), logits(floats)
    assert wanted.std() > 0.1
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())
    with pytest.raises(GenerationError, match="are not read in another form"):
        floats.dequantized()


@pytest.mark.slow
def test_experts_stay_quantized(tmp_path):
    make_run(tmp_path / "run", "mixtral", embed=256, heads=4, mlp=256, experts=4)
    FORMAT.export_run(tmp_path / "run", tmp_path / "plain.gguf")
    kinds = {"ffn_gate_inp": None, "ffn_down_exps": "Q6_K"}
    rewrite(tmp_path / "plain.gguf", tmp_path / "model.gguf", lambda name: kinds.get(name.split(".")[-2], "Q4_K"))
    ours = FORMAT.open_for_generation(tmp_path / "model.gguf")
    layer = ours.parameters["blocks"][0][0]["feed_forward"]
    assert all(is_quantized(layer[f"expert_{name}"]) for name in ("gate", "up", "down"))
    assert not is_quantized(layer["router"]["kernel"])
    found, wanted = logits(ours), logits(ours.dequantized())
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())


def test_types_that_do_not_stay_quantized_are_named(tmp_path, plain):
    # Layers of one parameter are stacked, so F16 in one of them makes all of them floats.
    kinds = {"blk.0.ffn_up.weight": None, "blk.0.ffn_gate.weight": "TQ1_0"}
    rewrite(plain, tmp_path / "model.gguf", lambda name: kinds.get(name, "Q4_0"))
    with pytest.warns(UserWarning, match="read as float32: 1 of type TQ1_0, 2 of type Q4_0"):
        ours = FORMAT.open_for_generation(tmp_path / "model.gguf")
    layer = ours.parameters["blocks"][0][0]["feed_forward"]
    assert [is_quantized(layer[name]["kernel"]) for name in ("gate", "up", "down")] == [False, False, True]


LLAMA_3 = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(
            Regex(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                r"|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
            "isolated",
        ),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)


@pytest.mark.parametrize(("cut", "name"), [(None, "gpt-2"), (LLAMA_3, "smaug-bpe")])
def test_the_tokenizer_and_its_chat_template_come_back(tmp_path, cut, name):
    write_tokenizer(tmp_path / "tokenizer", pre_tokenizer=cut)
    tokenizer = HuggingFaceTokenizer.load(tmp_path / "tokenizer")
    vocabulary = Vocabulary.of(tokenizer, VOCAB + 3)
    assert vocabulary.cut == name and vocabulary.tokens[-1] == f"[PAD{VOCAB + 2}]" and vocabulary.adds_bos
    again = HuggingFaceTokenizer(Vocabulary.read(dict(vocabulary.settings())).files(), "again")
    for text in (*TEXT, "<|im_start|>a 12345\n\n cat<|im_end|>", "  two  spaces", "日本語"):
        assert again.encode(text) == tokenizer.encode(text)
        assert again.decode(again.encode(text)) == tokenizer.decode(tokenizer.encode(text))
    assert (again.eos_id, again.bos_id, again.pad_id) == (tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id)
    assert again.chat_template == tokenizer.chat_template == TEMPLATE


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("gemma2", {}, r"family 'gemma2' are not written to GGUF; these are: llama"),
        ("gemma3", {"period": 2, "query_scalar": 32}, r"period=2, not 6; query_scalar=32, not the head_dim 16"),
        ("qwen3_moe", {"dense_layers": [0]}, r"dense_layers=\(0,\), not \(\)"),
        ("mistral", {"window": 8}, "window=8, not None"),
        ("llama", {"attention_bias": True}, "attention_bias=True"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": 128}},
            "not linear or llama3",
        ),
    ],
)
def test_what_has_no_place_in_a_file_is_refused(tmp_path, family, fields, message):
    make_run(tmp_path / "run", family, **fields)
    with pytest.raises(ConversionError, match=message):
        FORMAT.export_run(tmp_path / "run", tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()


LANGUAGE = [name for name in sorted(registries.models) if hasattr(registries.models[name], "weight_rules")]


@pytest.mark.parametrize("family", LANGUAGE)
def test_every_family_is_written_or_refused_by_its_name(family):
    config = registries.models[family].config_class(name=family, **({"query_scalar": 64} if family == "gemma3" else {}))
    if family in ARCHITECTURES:
        assert architecture_of(config) is ARCHITECTURES[family]
        return
    with pytest.raises(ConversionError, match=f"family '{family}' are not written to GGUF; these are: llama, mistral"):
        architecture_of(config)


def test_bad_input_is_named(tmp_path, monkeypatch):
    make_run(tmp_path / "run")
    FORMAT.export_run(tmp_path / "run", tmp_path / "model.gguf")
    with pytest.raises(ConversionError, match="overwrites nothing"):
        FORMAT.export_run(tmp_path / "run", tmp_path / "model.gguf")
    with pytest.raises(ConversionError, match="'Q5_9' is not a type"):
        convert(str(tmp_path / "run"), f"gguf:{tmp_path / 'other.gguf'}", stored="Q5_9")
    with pytest.raises(ConversionError, match="'Q8_0' is not a layout that `hf:` writes"):
        convert(str(tmp_path / "run"), f"hf:{tmp_path / 'other'}", stored="Q8_0")
    content = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "torn.gguf").write_bytes(content[: len(content) // 2])
    with pytest.raises(ConversionError, match=r"torn.gguf is not a complete GGUF file"):
        FORMAT.import_run(tmp_path / "torn.gguf", tmp_path / "again")
    renamed = content.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight")
    (tmp_path / "renamed.gguf").write_bytes(renamed)
    with pytest.raises(ConversionError, match=r"ffn_up.weight is missing(.|\n)*ffn_xx.weight is unexpected"):
        FORMAT.import_run(tmp_path / "renamed.gguf", tmp_path / "again")
    (tmp_path / "other.gguf").write_bytes(content.replace(b"llama", b"bloom"))
    with pytest.raises(ConversionError, match=r"'bloom'; these are read: gemma3, llama, qwen2, qwen3, qwen3moe"):
        FORMAT.import_run(tmp_path / "other.gguf", tmp_path / "again")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConversionError, match=r"\[gguf\]"):
        FORMAT.import_run(tmp_path / "model.gguf", tmp_path / "again")


def test_orbax_is_not_imported_to_open_a_file():
    code = "import sys, stack_train.gguf.format; sys.exit(bool({'orbax', 'tensorstore'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0, "serving would start 0.6 s later"
