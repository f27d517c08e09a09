"""Checkpoints in their publishers' own layout: every key of config.json, shards and index, and what lies beside."""

import json
import math
import re

import numpy as np
import pytest
from safetensors.numpy import load_file

from stack_core.abi.errors import ConversionError
from stack_core.abi.model_formats import open_for_generation
from stack_core.abi.plugins import registries
from stack_core.cli import main
from stack_train.checkpoint import named_leaves
from stack_train.huggingface import FORMAT
from stack_train.huggingface.quantization import QUANTIZATION
from stack_train.huggingface.source import read_config
from stack_train.models.encoder_decoder_family import EncoderDecoderFamily
from stack_train.models.encoder_family import EncoderFamily
from stack_train.models.family import DecoderFamily
from stack_train.run.config import run_config
from stack_train.run.model import abstract_params

from .published import FOLDER, published_config, small_checkpoint, small_config, tensor_shapes

PARAMETERS = {
    "SmolLM2-135M-Instruct": ("llama", 134_515_008),
    "Llama-3.1-8B-Instruct": ("llama", 8_030_261_248),
    "unsloth-Llama-3.2-1B-Instruct": ("llama", 1_235_814_400),
    "Mistral-7B-Instruct-v0.3": ("mistral", 7_248_023_552),
    "Mistral-Small-3.1-24B-Instruct-2503": ("mistral3", 24_011_361_280),
    "Qwen2.5-0.5B-Instruct": ("qwen2", 494_032_768),
    "Qwen3-0.6B": ("qwen3", 596_049_920),
    "Mixtral-8x7B-Instruct-v0.1": ("mixtral", 46_702_792_704),
    "Qwen3-30B-A3B": ("qwen3_moe", 30_532_122_624),
    "gemma-3-1b-it": ("gemma3", 999_885_952),
    "gemma-3-4b-it": ("gemma3_vision", 4_300_079_472),
    "unsloth-gemma-3-12b-it": ("gemma3_vision", 12_187_325_040),
    "Qwen2.5-VL-7B-Instruct": ("qwen2_5_vl", 8_292_166_656),
    "Qwen3-VL-8B-Instruct": ("qwen3_vl", 8_767_123_696),
    "gemma-2-2b-it": ("gemma2", 2_614_341_888),
    "OLMo-2-0425-1B-Instruct": ("olmo2", 1_484_916_736),
    "gpt-oss-20b": ("gpt_oss", 20_914_757_184),
    "DeepSeek-V3": ("deepseek_v3", 682_636_487_424),  # with its layer of multi-token prediction, without copies
    "Kimi-K2-Instruct": ("deepseek_v3", 1_026_408_232_448),
    "Qwen3-Next-80B-A3B-Instruct": ("qwen3_next", 81_324_862_720),
    "SmolLM3-3B": ("smollm3", 3_075_098_624),
    "Olmo-3-7B-Instruct": ("olmo3", 7_298_011_136),
    "Phi-3-mini-4k-instruct": ("phi3", 3_821_079_552),
    "granite-3.3-2b-instruct": ("granite", 2_533_539_840),
    "Seed-OSS-36B-Instruct": ("seed_oss", 36_151_104_512),
    "Qwen1.5-MoE-A2.7B": ("qwen2_moe", 14_315_784_192),
    "GLM-4.5-Air": ("glm4_moe", 109_227_310_848),
    "DeepSeek-V2-Lite": ("deepseek_v2", 15_706_484_224),
    "granite-3.0-1b-a400m-instruct": ("granite_moe", 1_334_628_352),
    "MiniMax-M2.5": ("minimax_m2", 228_689_764_864),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("nemotron_h", 31_577_940_288),
    "all-MiniLM-L6-v2": ("bert", 22_713_216),
    "ModernBERT-base": ("modernbert", 149_014_272),  # without the head of masked language modeling
    "t5-small": ("t5", 60_506_624),
    "t5-v1_1-base": ("t5", 247_577_856),
}
"""Family and parameters of each model, as counted by the publishers' indices, without tensors that repeat others.

The indices of Kimi K2 and MiniMax-M2.5 count scales, too; their numbers are sums of the shapes. So is the number of
Nemotron 3 Nano.
"""
LARGER = "Mistral-Small-3.1-24B-Instruct-2503"
UNPUBLISHED = {"bamba", "gemma4", "granite_moe_hybrid", "llama4", "ministral3", "pixtral", "qwen3_5", "qwen3_5_moe"}
UNPUBLISHED |= {"qwen3_vl_moe", "roberta", "xlm_roberta", "mt5", "umt5", "arcee", "cwm", "exaone4", "ernie4_5", "glm4"}
UNPUBLISHED |= {"deepseek_v32", "deepseek_v4", "gemma4_vision", "glm_moe_dsa", "minimax"}
"""Families whose published files are not here; `integration_tests/parity` reads what transformers writes."""
COPIES = re.compile(r"layers\.\d+\.(embed_tokens|shared_head\.head)\.")
"""Tensors of a layer of multi-token prediction that repeat the embedding and the head."""
FILES = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def test_every_family_has_a_published_checkpoint():
    kinds = DecoderFamily | EncoderFamily | EncoderDecoderFamily
    families = [name for name in registries.models if isinstance(registries.models[name], kinds)]
    assert {family for family, _ in PARAMETERS.values()} | UNPUBLISHED == set(families)
    assert {path.name for path in FOLDER.iterdir()} == PARAMETERS.keys()


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_published_config_is_that_of_a_model_of_its_size(name):
    family, expected = registries.models[PARAMETERS[name][0]], PARAMETERS[name][1]
    mapping = {key: value for key, value in published_config(name).items() if key != QUANTIZATION}
    leaves = named_leaves(abstract_params(read_config(family, mapping)))
    assert sum(math.prod(leaf.shape) for leaf in leaves.values()) == expected


def loaded(directory):
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


# A checkpoint of each layout; the others differ from these in their config alone.
LAYOUTS = [name for name in PARAMETERS if not name.startswith(("unsloth", "Llama"))]


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_tensors_of_a_family_have_the_published_names_and_shapes(name):
    family, config = registries.models[PARAMETERS[name][0]], small_config(name)
    config.pop(QUANTIZATION, None)
    model = read_config(family, config)
    leaves = named_leaves(abstract_params(model))
    rules = family.weight_rules(model)
    found = [rule.tensor_shapes(leaves[rule.parameter].shape) for rule in rules]
    expected = tensor_shapes(name, config)
    if family.name == "modernbert":
        expected = {tensor.removeprefix("model."): shape for tensor, shape in expected.items()}
    if name == "Qwen3-0.6B":
        del expected["lm_head.weight"]  # a copy of the embedding
    assert {tensor: shape for shapes in found for tensor, shape in shapes.items()} == {
        tensor: shape for tensor, shape in expected.items() if not COPIES.search(tensor)
    }


# Each mechanism: a repeated head, joined and fused tensors, experts in either order and in codes, latent attention,
# layers of several kinds, multi-token prediction, towers, encoders and encoder-decoders.
ROUND_TRIPS = (
    "Qwen3-0.6B",
    "Phi-3-mini-4k-instruct",
    "Mixtral-8x7B-Instruct-v0.1",
    "gpt-oss-20b",
    "DeepSeek-V3",
    "Qwen3-Next-80B-A3B-Instruct",
    "Mistral-Small-3.1-24B-Instruct-2503",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "ModernBERT-base",
    "t5-small",
)


@pytest.mark.filterwarnings("ignore:.*which are not applied")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ROUND_TRIPS else pytest.mark.slow) for name in LAYOUTS]
)
def test_a_published_checkpoint_opens_and_comes_back(name, tmp_path):
    tensors = small_checkpoint(name, tmp_path / "hf")
    result = FORMAT.import_run(tmp_path / "hf", tmp_path / "run")
    assert run_config(tmp_path / "run").model.name == PARAMETERS[name][0]
    assert {*FILES, "chat_template.jinja"} <= set(result.kept)
    FORMAT.export_run(tmp_path / "run", tmp_path / "back", max_shard_bytes=20_000)
    for file in FILES:
        assert (tmp_path / "back" / file).read_bytes() == (tmp_path / "hf" / file).read_bytes(), file
    config, back = (json.loads((tmp_path / each / "config.json").read_text()) for each in ("hf", "back"))
    if QUANTIZATION in config:
        assert QUANTIZATION not in back and back["architectures"] == config["architectures"]
        return  # written as the floats that the codes stand for; test_blocks.py has their values
    if config["model_type"] == "modernbert":  # without its head
        config["architectures"] = ["ModernBertModel"]
        tensors = {each.removeprefix("model."): tensor for each, tensor in tensors.items()}
    assert config.items() <= back.items()
    found = loaded(tmp_path / "back")
    copies = {"lm_head.weight"} if back.get("tie_word_embeddings") else set()
    copies |= {each for each in tensors if COPIES.search(each)}
    assert found.keys() == tensors.keys() - copies
    for each, tensor in found.items():
        np.testing.assert_array_equal(tensor.view(np.uint8), tensors[each].view(np.uint8), err_msg=each)


@pytest.fixture
def larger(monkeypatch, tmp_path):
    """Directory of a larger model that no family has as a whole."""
    monkeypatch.setitem(vars(registries.models["mistral"]), "published_in", ("AcmeForConditionalGeneration",))
    small_checkpoint(LARGER, tmp_path / "hf", files=1)
    mapping = small_config(LARGER) | {"architectures": ["AcmeForConditionalGeneration"], "model_type": "acme"}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(mapping))
    return mapping


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_a_language_model_comes_out_of_a_larger_one(prefix, larger, tmp_path, capsys):
    if prefix.startswith("model."):  # as transformers saves it since 4.52
        tensors = loaded(tmp_path / "hf")
        renamed = {f"model.{name}" if "language" not in name else name: each for name, each in tensors.items()}
        renamed = {name.replace("language_model.model.", prefix): each for name, each in renamed.items()}
        rewrite(tmp_path / "hf", renamed)
    main(["convert", f"hf:{tmp_path}/hf", str(tmp_path / "run")])
    left_out = "vision_tower (20 tensors), multi_modal_projector (4 tensors)"
    assert sorted(left_out.split(", ")) == sorted(
        capsys.readouterr().out.splitlines()[-1].removeprefix("left out: ").split(", ")
    )
    with pytest.warns(UserWarning, match="is read without .*vision_tower"):
        opened = open_for_generation(f"hf:{tmp_path}/hf")
    assert opened.vocab_size == 53


def rewrite(directory, tensors):
    from safetensors.numpy import save_file

    (file,) = directory.glob("*.safetensors")
    save_file(tensors, file)
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, file.name)}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_larger_model_of_another_language_model_is_refused(larger, tmp_path):
    for text, message in (({"model_type": "gemma2"}, "'gemma2'; one of model_type 'm"), (None, "None")):
        (tmp_path / "hf" / "config.json").write_text(json.dumps(larger | {"text_config": text}))
        with pytest.raises(ConversionError, match=message):
            FORMAT.import_run(tmp_path / "hf", tmp_path / "run")


def test_an_unknown_key_is_refused_and_can_be_ignored(tmp_path, capsys):
    small_checkpoint("Qwen3-0.6B", tmp_path / "hf")
    config = small_config("Qwen3-0.6B") | {"acme_note": "best", "acme_gain": 2}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    source = ["convert", f"hf:{tmp_path}/hf", str(tmp_path / "run")]
    for options, message in (
        ([], "acme_note='best'; acme_gain=2. To ignore a key .*--ignore KEY"),
        (["--ignore", "acme_note"], "does not implement: acme_gain=2"),
        (["--ignore", "acme_nose"], "no key 'acme_nose' to ignore. Did you mean 'acme_note'"),
    ):
        with pytest.raises(SystemExit):
            main([*source, *options])
        assert_matches(message, capsys.readouterr().err)
    main([*source, "--ignore", "acme_note", "--ignore", "acme_gain"])
    main(["convert", str(tmp_path / "run"), f"hf:{tmp_path}/back"])
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert back == {key: value for key, value in config.items() if not key.startswith("acme")}
    with pytest.raises(SystemExit):
        main(["convert", str(tmp_path / "run"), f"hf:{tmp_path}/other", "--ignore", "acme_note"])
    assert "--ignore ignores keys" in capsys.readouterr().err


def assert_matches(pattern, text):
    with pytest.raises(RuntimeError, match=pattern):
        raise RuntimeError(" ".join(text.split()))
