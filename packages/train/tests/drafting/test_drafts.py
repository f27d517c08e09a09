"""Drafts of families that are here: each has the structure of the file that a person wrote."""

import importlib.util
import json
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from stack_core.abi.errors import ConfigError, ConversionError
from stack_core.abi.plugins import registries
from stack_core.cli import main
from stack_train.commands.models import models
from stack_train.drafting.structure import recognize
from stack_train.huggingface.source import read_config
from stack_train.safetensors_files import read_tensors

from ..huggingface.published import small_checkpoint, tensor_shapes

HELD_OUT = {
    "OLMo-2-0425-1B-Instruct": ("olmo2", []),
    "granite-3.3-2b-instruct": ("granite", []),
    "SmolLM3-3B": ("smollm3", ["max_window_layers", "pretraining_tp"]),
}
"""Family of a checkpoint, and the keys whose meaning a person has to say."""


@pytest.fixture(autouse=True)
def without_torch(monkeypatch):
    for name in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)


def drafted(path):
    spec = importlib.util.spec_from_file_location(f"draft_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FAMILY


@pytest.mark.parametrize("name", HELD_OUT)
def test_a_draft_has_the_layers_and_tensors_of_the_family(name, tmp_path, capsys):
    family, unknown = registries.models[HELD_OUT[name][0]], HELD_OUT[name][1]
    small_checkpoint(name, tmp_path / "hf")
    main(["models", "new", family.name, "--from", f"hf:{tmp_path}/hf", "--out", str(tmp_path / "draft.py")])
    out = capsys.readouterr().out
    assert "not recognized" not in out and "not compared: torch is not installed" in out
    draft, mapping = drafted(tmp_path / "draft.py"), json.loads((tmp_path / "hf" / "config.json").read_text())
    for key in unknown:
        assert f"unknown key of config.json: {key}={mapping[key]}" in out
    known = {key: value for key, value in mapping.items() if key not in unknown}
    ours, theirs = read_config(draft, known), read_config(family, mapping)
    assert draft.spec(ours) == family.spec(theirs)
    assert draft.weight_rules(ours) == family.weight_rules(theirs)
    written = json.loads(json.dumps(draft.config_map.write(ours)))
    assert all(family.config_map.write(theirs)[key] == value for key, value in written.items())
    with pytest.raises(ConversionError, match="frobnicate=3"):
        read_config(draft, {**known, "frobnicate": 3})


def test_windows_of_some_layers_are_drafted(tmp_path, capsys):
    """Of Gemma 2, all but the constants of its code: the scale of embeddings and the offset of norms."""
    small_checkpoint("gemma-2-2b-it", tmp_path / "hf")
    mapping = json.loads((tmp_path / "hf" / "config.json").read_text())
    kinds = ["sliding_attention", "full_attention"] * (mapping["num_hidden_layers"] // 2)
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**mapping, "layer_types": kinds}))
    main(["models", "new", "gemma2", "--from", f"hf:{tmp_path}/hf", "--out", str(tmp_path / "draft.py")])
    assert "not recognized" not in capsys.readouterr().out
    draft, family = drafted(tmp_path / "draft.py"), registries.models["gemma2"]
    known = {key: value for key, value in mapping.items() if key != "cache_implementation"}
    ours, theirs = read_config(draft, {**known, "layer_types": kinds}), read_config(family, mapping)
    assert draft.spec(ours).layers == family.spec(theirs).layers
    assert draft.weight_rules(ours) == family.weight_rules(theirs)
    assert draft.config_map.write(ours)["layer_types"] == kinds


def test_unknown_structure_is_named_and_not_guessed(tmp_path, capsys):
    small_checkpoint("Mixtral-8x7B-Instruct-v0.1", tmp_path / "hf")
    main(["models", "new", "mine", "--from", f"hf:{tmp_path}/hf", "--out", str(tmp_path / "mine.py")])
    out, source = capsys.readouterr().out, (tmp_path / "mine.py").read_text()
    for text in ("no tensor mlp.up_proj.weight", "tensor of a layer block_sparse_moe.gate.weight [4, 32]"):
        assert f"not recognized: {text}" in out and f"# TODO, not recognized: {text}" in source
    assert "unknown key of config.json: num_local_experts=4" in out and "equal to transformers" not in out


def test_layers_biases_norms_and_activations_that_are_not_known_are_named():
    config = {"architectures": ["A"], "model_type": "a", "hidden_size": 8, "num_attention_heads": 2}
    config |= {"num_key_value_heads": 2, "intermediate_size": 6, "vocab_size": 5, "num_hidden_layers": 2}
    shapes = tensor_shapes("A", {**config, "model_type": "llama"})
    assert recognize(config, shapes).unknown == () and recognize(config, shapes).gated
    plain = {name: shape for name, shape in shapes.items() if "gate_proj" not in name}
    assert recognize(config, plain).unknown == () and not recognize(config, plain).gated
    layer = "model.layers.1."
    for changes, options, message in (
        ({"model.extra": (3,)}, {}, "tensor model.extra [3]"),
        ({layer + "mlp.gate_proj.bias": (6,)}, {}, "layer 1 has other tensors than layer 0: mlp.gate_proj.bias"),
        ({f"model.layers.{n}.mlp.up_proj.bias": (6,) for n in (0, 1)}, {}, "biases of some of the feed-forward layer"),
        (
            {f"model.layers.{n}.self_attn.o_proj.bias": (8,) for n in (0, 1)},
            {},
            "a bias of the output of attention only",
        ),
        ({f"model.layers.{n}.self_attn.q_norm.weight": (3,) for n in (0, 1)}, {}, "self_attn.q_norm.weight [3]"),
        ({f"model.layers.{n}.post_feedforward_layernorm.weight": (8,) for n in (0, 1)}, {}, "placement of the norms"),
        ({}, {"hidden_act": "xielu"}, "hidden_act='xielu'"),
        ({}, {"layer_types": ["full_attention", "conv"]}, "layer_types conv"),
    ):
        found = recognize({**config, **options}, {**shapes, **changes}).unknown
        assert any(message in each for each in found), (message, found)
    assert recognize({**config, "use_gate": True}, shapes).unknown_keys == ("use_gate",)


def test_what_cannot_be_drafted_is_refused(tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    save_file({"h.0.attn.weight": np.zeros((2, 2), np.float32)}, tmp_path / "hf" / "model.safetensors")
    assert list(read_tensors(tmp_path / "hf"))
    for arguments, error, message in (
        (["Mine"], ConfigError, "is not a name of a family"),
        (["mine"], ConversionError, "No tensor is named model.layers.N"),
        (["mine", "--out", str(tmp_path / "hf" / "config.json")], ConfigError, "is not overwritten"),
    ):
        options = {"out": tmp_path / "mine.py"} if len(arguments) == 1 else {"out": tmp_path / "hf" / "config.json"}
        with pytest.raises(error, match=message):
            models("new", arguments[0], source=f"hf:{tmp_path}/hf", **options)
    for options in ({"source": "hf:x"}, {"out": tmp_path}):
        with pytest.raises(ConfigError, match="--from and --out are for drafts"):
            models(**options)
    with pytest.raises(ConfigError, match="Name the family and a checkpoint"):
        models("new", "mine")
