"""Adapters in and out: directories of PEFT, runs that start from them, and what is refused."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from stack_core.abi.adapters import LowRankFactors
from stack_core.abi.config import parse, to_yaml
from stack_core.abi.errors import ConfigError, ConversionError, StackError
from stack_core.abi.model_formats import open_for_generation
from stack_core.abi.run_directory import RunDirectory
from stack_core.cli import main
from stack_train.checkpoint import CheckpointStore, named_leaves
from stack_train.peft.modules import modules_of
from stack_train.peft.writing import write_peft
from stack_train.run.config import RunConfig, run_config
from stack_train.run.model import abstract_model
from stack_train.run.program import build_program
from stack_train.variables.model_variables import stored_values
from stack_train.variables.trained_adapters import digests_of_run, run_adapters
from stack_train.variables.weights import read_model, read_params

MODEL = {"name": "llama", "vocab_size": 61, "layers": 2, "embed": 32, "heads": 4, "kv_heads": 2, "mlp": 48}
MODEL |= {"max_positions": 64, "initializer_std": 0.2, "dtype": "float32"}
ATTENTION = ("attention/query/kernel", "attention/value/kernel")


def made_run(directory: Path, *, seed: int = 0, **model: Any) -> Path:
    """A run of random weights."""
    fields = {name: value for name, value in {**MODEL, **model}.items() if value is not None}
    mapping = {"output": str(directory), "model": fields, "data": {"seq_tokens": 16}}
    config: RunConfig = parse(RunConfig, mapping)
    family_model = build_program(config).init(key=jax.random.key(seed)).params
    with CheckpointStore(RunDirectory(directory).checkpoints) as store:
        store.save_weights(named_leaves(family_model).items(), to_yaml(config))
    RunDirectory(directory).config.write_text(to_yaml(config))
    return directory


def factors(config: Any, *, rank: int = 4, scale: float = 2.0) -> dict[str, LowRankFactors]:
    """Random adapters of queries and values."""
    random = np.random.default_rng(1)
    shapes = named_leaves(stored_values(abstract_model(config)))
    found = {}
    for path, leaf in shapes.items():
        if path.endswith(ATTENTION):
            layers, d_in, d_out = leaf.shape
            draw = lambda *shape: random.normal(size=shape).astype(np.float32) * 0.1
            found[path] = LowRankFactors(draw(layers, d_in, rank), draw(layers, rank, d_out), scale)
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_run(tmp_path_factory.mktemp("base") / "run")


@pytest.fixture
def peft(base: Path, tmp_path: Path) -> Path:
    """An adapter of the base, as PEFT writes it."""
    (tmp_path / "peft").mkdir()
    config = run_config(base).model
    write_peft(tmp_path / "peft", factors(config), config, base=None, digests={})
    return tmp_path / "peft"


def edited(directory: Path, *, drop: str = "", **settings: Any) -> Path:
    """Changes an adapter's config, and drops the tensors whose name has `drop` in it."""
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    if drop:
        tensors = load_file(directory / "adapter_model.safetensors")
        kept = {name: tensor for name, tensor in tensors.items() if drop not in name}
        save_file(kept, directory / "adapter_model.safetensors")
    return directory


def logits(model: Any) -> np.ndarray:
    tokens = jnp.arange(12).reshape(1, 12)
    return np.asarray(jax.jit(lambda tokens: model.logits(model(tokens, tokens).hidden))(tokens))


def test_an_adapter_goes_to_a_run_and_back(base, tmp_path):
    config = run_config(base).model
    given = factors(config)
    (tmp_path / "peft").mkdir()
    write_peft(tmp_path / "peft", given, config, base=str(base), digests={})
    main(["convert", f"peft:{tmp_path}/peft", str(tmp_path / "run")])
    found = run_adapters(tmp_path / "run")
    assert found.adapters.keys() == given.keys() and found.base.source == f"run:{base}"
    for path, wanted in given.items():
        np.testing.assert_array_equal(found.adapters[path].down, wanted.down)
        np.testing.assert_array_equal(found.adapters[path].up, wanted.up)
        assert found.adapters[path].scale == wanted.scale
    main(["convert", str(tmp_path / "run"), f"peft:{tmp_path}/back"])
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("back", "peft"))
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)
    settings = [json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("back", "peft")]
    assert (
        settings[0] == settings[1] and settings[0]["r"] == 4 and settings[0]["target_modules"] == ["q_proj", "v_proj"]
    )

    adapted, _ = read_model(tmp_path / "run", run_config(tmp_path / "run"))
    merged = load_merged(tmp_path / "run", abstract_model(config))
    np.testing.assert_allclose(logits(adapted), logits(merged), atol=1e-5)
    plain, _ = read_model(base, run_config(base))
    assert np.abs(logits(adapted) - logits(plain)).max() > 0.1


def load_merged(run: Path, model: Any) -> Any:
    from flax import nnx

    params = read_params(run, model.config)[0]
    return nnx.merge(nnx.split(model)[0], nnx.State(params))


def test_a_checkpoint_reads_adapters_of_its_base_alone(base, peft, tmp_path):
    main(["convert", f"peft:{peft}", str(tmp_path / "run"), "--base", str(base)])
    main(["convert", str(tmp_path / "run"), f"peft:{tmp_path}/written"])
    main(["convert", str(base), f"hf:{tmp_path}/hf"])
    other = open_for_generation(str(made_run(tmp_path / "other", seed=1)))
    wider = open_for_generation(str(made_run(tmp_path / "wider", mlp=64)))
    addresses = (f"run:{tmp_path}/run", f"peft:{tmp_path}/written", str(peft))
    for checkpoint in (open_for_generation(str(base)), open_for_generation(f"hf:{tmp_path}/hf")):
        assert all(len(checkpoint.read_adapters(address)) == 2 for address in addresses)
    for address in (f"{tmp_path}/run", f"{tmp_path}/written"):
        with pytest.raises(ConversionError, match=r"embedding: digest \w{16} when they were trained, \w{16} here"):
            other.read_adapters(address)
    with pytest.raises(ConversionError, match=r"model\.mlp: "):
        wider.read_adapters(f"{tmp_path}/run")
    for address, message in ((str(base), "has no adapters"), (str(tmp_path), "neither a run nor an adapter")):
        with pytest.raises(ConversionError, match=message):
            other.read_adapters(address)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drop": "layers.1.self_attn.q_proj.lora_B"}, r"model.layers.1.self_attn.q_proj.lora_B is missing"),
        ({"drop": "layers.1.self_attn.q_proj"}, r"layers.1.self_attn.q_proj has no tensors, but model.layers.0"),
        ({"target_modules": ["q_proj", "v_proj", "mixer"]}, "target_modules has 'mixer', which none"),
        ({"r": 8}, r"has shape \(4, 32\); expected \(8, 32\), of rank 8"),
        ({"alpha_pattern": {"layers.1.self_attn.q_proj": 1}}, "layers of different ranks or scales: .*scale 0.25"),
        ({"bias": "all"}, "bias is 'all'; 'none' alone is read"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is .*, which is not read"),
        ({"init_lora_weights": "pissa_niter_4"}, "changed the base"),
        ({"init_lora_weights": "lora_ga"}, "changed the base"),
        ({"kasa_config": {"beta": 1.0}}, "kasa_config is .*, which is not read"),
        ({"rank_pattern": {"q_proj)": 4}}, "is not a regular expression"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_dora": True}, "q_proj.lora_magnitude_vector is missing"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(base, peft, tmp_path, changes, message):
    edited(peft, **changes)
    with pytest.raises(ConversionError, match=message):
        open_for_generation(str(base)).read_adapters(str(peft))


@pytest.fixture
def head_peft(base: Path, tmp_path: Path) -> Path:
    """An adapter of queries, values and the head, with copies of head and embedding as PEFT saves them."""
    config, random = run_config(base).model, np.random.default_rng(2)
    draw = lambda *shape: random.normal(size=shape).astype(np.float32) * 0.1
    head = LowRankFactors(draw(config.embed, 4), draw(4, config.vocab_size), 2.0)
    (tmp_path / "head").mkdir()
    write_peft(tmp_path / "head", {**factors(config), "lm_head": head}, config, base=None, digests={})
    params = read_params(base, config)[0]
    copies = {"lm_head.base_layer": params["lm_head"].T, "model.embed_tokens": params["embedding"]}
    return with_tensors(tmp_path / "head", {f"{name}.weight": np.asarray(copy) for name, copy in copies.items()})


def with_tensors(directory: Path, tensors: dict[str, np.ndarray]) -> Path:
    path = directory / "adapter_model.safetensors"
    added = {f"base_model.model.{name}": np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    save_file(load_file(path) | added, path)
    return directory


def test_an_adapter_of_the_head_comes_with_a_copy_of_its_base(base, head_peft, tmp_path):
    main(["convert", f"peft:{head_peft}", str(tmp_path / "run"), "--base", str(base)])
    found = run_adapters(tmp_path / "run").adapters
    assert found["lm_head"].up.shape == (4, 61) and len(found) == 3
    adapted, _ = read_model(tmp_path / "run", run_config(tmp_path / "run"))
    merged = load_merged(tmp_path / "run", abstract_model(run_config(base).model))
    np.testing.assert_allclose(logits(adapted), logits(merged), atol=1e-5)
    for checkpoint in (open_for_generation(str(base)),):
        assert checkpoint.read_adapters(f"peft:{head_peft}").keys() == found.keys()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "lm_head.base_layer.weight",
            lambda copy: copy + 1,
            r"lm_head.base_layer.weight holds other values than the base",
        ),
        (
            "model.embed_tokens.weight",
            lambda copy: copy[:60],
            r"embed_tokens.weight is \[60, 32\] .*\[61, 32\] in the base",
        ),
        (
            "model.embed_tokens.lora_embedding_A",
            lambda _: np.zeros((4, 61), np.float32),
            "adapts the lookup of model.embed",
        ),
        (
            "model.norm.base_layer.weight",
            lambda _: np.zeros(32, np.float32),
            "norm.base_layer.weight holds other values",
        ),
    ],
)
def test_a_base_that_an_adapter_changed_is_refused(base, head_peft, name, change, message):
    copy = load_file(head_peft / "adapter_model.safetensors").get(f"base_model.model.{name}")
    with_tensors(head_peft, {name: change(copy)})
    with pytest.raises(ConversionError, match=message):
        open_for_generation(str(base)).read_adapters(str(head_peft))


def test_an_exported_adapter_names_the_base_that_it_is_given(base, peft, tmp_path, capsys):
    main(["convert", f"peft:{peft}", str(tmp_path / "run"), "--base", str(base)])
    for options, name in (((), str(base)), (("--base-model", "acme/base"), "acme/base")):
        written = tmp_path / f"written{len(options)}"
        main(["convert", str(tmp_path / "run"), f"peft:{written}", *options])
        assert json.loads((written / "adapter_config.json").read_text())["base_model_name_or_path"] == name
        assert ("--base-model NAME" in capsys.readouterr().out) == (not options)
    with pytest.raises(SystemExit):
        main(["convert", str(base), f"hf:{tmp_path}/hf", "--base-model", "acme/base"])
    assert "--base-model applies to written adapters" in capsys.readouterr().err


def test_layers_that_were_left_out_have_zeros(base, peft):
    edited(peft, drop="layers.0", layers_to_transform=[1])
    for each in open_for_generation(str(base)).read_adapters(str(peft)).values():
        assert not each.up[0].any() and each.up[1].any()


def test_a_run_goes_on_with_given_adapters(base, peft, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def trained(**lora: Any) -> None:
        mapping = {"output": str(tmp_path / "run"), "data": {"source": "stdlib", "seq_tokens": 16, "batch_size": 2}}
        (tmp_path / "text").mkdir(exist_ok=True)
        (tmp_path / "text" / "a.txt").write_text("red or blue, up or down " * 40)
        mapping["data"] |= {"source": f"text:{tmp_path}/text/a.txt", "vocab_size": 262, "validation_fraction": 0.0}
        mapping["run"] = {"steps": 1, "init_from": str(wide), "adapters_from": str(peft)}
        mapping["optimizer"] = {"name": "sgd", "learning_rate": 1e-9}
        mapping |= {"lora": {"rules": lora}} if lora else {}
        (tmp_path / "run.yaml").write_text(json.dumps(mapping))
        from stack_core.abi.config import load_yaml
        from stack_train.run.resolve import parse_run
        from stack_train.run.train import train

        train(parse_run(load_yaml(tmp_path / "run.yaml")))

    wide = made_run(tmp_path / "wide", vocab_size=262)
    with pytest.raises(ConfigError, match="adapters_from needs a section"):
        trained()
    rules = {"path": "attention/(query|value)", "rank": 8}
    with pytest.raises(StackError, match=r"rank 4, scale 2, .* given, rank 8, scale 2, "):
        trained(**rules)
    trained(**rules | {"rank": 4, "alpha": 8.0})
    before = open_for_generation(str(wide)).read_adapters(str(peft))
    for path, each in run_adapters(tmp_path / "run").adapters.items():
        np.testing.assert_allclose(each.down, before[path].down, atol=1e-6)
        np.testing.assert_allclose(each.up, before[path].up, atol=1e-6)


def test_what_peft_has_no_place_for_is_refused(tmp_path):
    config = abstract_model(parse(RunConfig, {"output": "x", "model": {"name": "mixtral", "layers": 1}}).model).config
    path = "blocks/0/0/feed_forward/expert_up"
    given = {path: LowRankFactors(np.zeros((1, 8, 4, 2)), np.zeros((1, 8, 2, 4)), 1.0)}
    with pytest.raises(ConversionError, match=f"has none for {path}"):
        write_peft(tmp_path, given, config, base=None, digests={})
    assert {module.parameter.split("/")[3] for module in modules_of(config).values() if module.layer is not None} == {
        "attention",
        "feed_forward",
    }


def test_digests_of_a_run_are_those_of_its_leaves(base):
    assert digests_of_run(base).keys() == named_leaves(read_params(base, run_config(base).model)[0]).keys()
