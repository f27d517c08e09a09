"""What is DeepSeek-V4's own: its keys, its names of tensors, and variables that training does not change."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from stack_core.abi.config import parse
from stack_core.abi.errors import ConfigError, ConversionError, TrainingError
from stack_core.abi.plugins import registries
from stack_core.ops.kv_cache import DenseKVCache
from stack_train.checkpoint import named_leaves
from stack_train.huggingface import FORMAT
from stack_train.models.weight_map import joined_tensors, shared_tensors
from stack_train.nn import boundary
from stack_train.nn.residual import Rows
from stack_train.run.model import abstract_params

from .test_families import make_config

FAMILY = registries.models["deepseek_v4"]
READ = FAMILY.config_map.read
FLASH = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "compress_rope_theta": 160000,
    "eos_token_id": 1,
    "expert_dtype": "fp4",
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "initializer_range": 0.02,
    "max_position_embeddings": 1048576,
    "model_type": "deepseek_v4",
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_hidden_layers": 43,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 129280,
}
"""The keys of DeepSeek-V4-Flash, without its quantization, put together from public copies."""


def test_flash_is_a_model_of_its_size():
    config = parse(FAMILY.config_class, {**READ(FLASH), "dtype": "bfloat16", "param_dtype": "bfloat16"})
    assert config.layer_kinds == ("window", "window", *("sparse", "heavy") * 20, "sparse")
    assert (config.entry_rope_theta, config.rope_scaling.attention_factor) == (160_000, 1.0)
    leaves = named_leaves(abstract_params(config))
    tables = [name for name in leaves if name.endswith("/table")]
    count = sum(leaf.size for name, leaf in leaves.items() if name not in tables)
    assert round(count / 1e9) == 284  # as DeepSeek rounds it
    inactive = config.layers * (config.experts - config.active_experts) * 3 * config.embed * config.mlp
    # Of the embedding, a token reads one row.
    assert round((count - inactive - config.vocab_size * config.embed) / 1e9) == 13
    states = [layer.state(1, "bfloat16") for layer in FAMILY.spec(config).layers[2:4]]
    tokens = 2**20
    assert [state.shapes[2::2] for state in states] == [
        ((tokens // 4, 512), (tokens // 4, 128)),
        ((tokens // 128, 512),),
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {
            "compress_ratios": None,
            "layer_types": ["sliding_attention"] * 2
            + ["compressed_sparse_attention", "heavily_compressed_attention"] * 20
            + ["compressed_sparse_attention"],
        },
        {"num_hash_layers": None, "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 40},
        {"compress_rates": {"compressed_sparse_attention": 4}},
        {"qk_rope_head_dim": None, "partial_rotary_factor": 0.125},
        {
            "rope_scaling": None,
            "rope_parameters": {
                "main": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.125},
                "compress": {**FLASH["rope_scaling"], "attention_factor": 1.0, "rope_theta": 160000},
            },
        },
    ],
)
def test_transformers_spells_the_same_model_in_other_keys(changes):
    assert READ({key: value for key, value in {**FLASH, **changes}.items() if value is not None}) == READ(FLASH)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compress_ratios": [0, 4]}, r"compress_ratios=\[0, 4\], not one of 0, 4, 128 for each of 43 layers"),
        ({"compress_ratios": [8] * 43}, "compress_ratios="),
        ({"layer_types": ["full_attention"] * 43}, "layer_types=.*'sliding_attention'"),
        ({"mlp_layer_types": ["moe", "hash_moe"] * 22}, "mlp_layer_types=.*'hash_moe' layers followed by 'moe'"),
        ({"n_shared_experts": 2}, "n_shared_experts=2, not 1"),
        ({"scoring_func": "sigmoid"}, "scoring_func='sigmoid', not 'sqrtsoftplus'"),
        ({"norm_topk_prob": False}, "norm_topk_prob=False, not True"),
        ({"rope_parameters": {"main": {"rope_type": "linear"}, "compress": {"factor": 2}}}, r"rope_parameters\.main"),
        ({"first_k_dense_replace": 3}, "first_k_dense_replace=3, not 0"),
    ],
)
def test_keys_that_the_model_does_not_support_are_refused_by_name(changes, message):
    with pytest.raises(ConversionError, match=message):
        READ({**FLASH, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kinds": ("window",)}, "kinds has 1 entries; expected one for each of layers=4"),
        ({"hash_layers": 5}, "hash_layers=5 is more than layers=4"),
        ({"window": 1}, "window=1: expected at least 2 tokens"),
        ({"heavy_rate": 1}, "heavy_rate=1: expected at least 2 tokens"),
        ({"tie_embeddings": True}, "tie_embeddings=True: DeepSeek-V4 has its own head"),
        ({"kv_heads": 2}, "kv_heads=2: all heads share one key"),
        ({"rope_dim": 5}, "rope_dim=5: expected an even number"),
        ({"index_dim": 4}, "rope_dim=6: .* index_dim=4"),
        ({"output_groups": 3}, "heads=4 is not a multiple of output_groups=3"),
    ],
)
def test_sizes_that_the_model_cannot_have_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        make_config("deepseek_v4", **changes)


def test_a_cache_has_room_for_the_tokens_that_the_config_names():
    config = make_config("deepseek_v4", cached_tokens=12)
    model = nnx.eval_shape(lambda: FAMILY.build(config, key=jax.random.key(0)))
    assert model.kv_cache_positions == 12
    rows = {shape[0] for state in jax.tree.leaves(model.states) if hasattr(state, "shapes") for shape in state.shapes}
    assert {12 // config.sparse_rate, 12 // config.heavy_rate} < rows
    unlimited = nnx.eval_shape(lambda: FAMILY.build(make_config("deepseek_v4"), key=jax.random.key(0)))
    assert unlimited.kv_cache_positions == config.max_positions


def test_a_cache_may_be_shorter_than_an_entry():
    config = make_config("deepseek_v4", layers=1, kinds=("heavy",), heavy_rate=40, hash_layers=0)
    model = FAMILY.build(config, key=jax.random.key(0))
    tokens, positions = jnp.arange(6)[None], jnp.arange(6)[None]
    cache = DenseKVCache.empty(model.states, batch=1, capacity=8)
    outputs = jax.jit(lambda model, cache: model(tokens, positions, cache=cache))(model, cache)
    expected = jax.jit(lambda model: model(tokens, positions).hidden)(model)
    np.testing.assert_allclose(outputs.hidden, expected, atol=1e-5)


def test_training_changes_neither_the_indexer_nor_the_table():
    model = nnx.eval_shape(lambda: FAMILY.build(make_config("deepseek_v4"), key=jax.random.key(0)))
    leaves = nnx.to_flat_state(nnx.state(model))
    fixed = {path for path, leaf in leaves if not leaf.get_metadata().get("trained", True)}
    assert fixed == {path for path, _ in leaves if "indexer" in path or path[-1] in ("table", "selection_bias")}


def test_stages_are_refused():
    config, tokens = make_config("deepseek_v4", layers=2, kinds=("heavy",) * 2), jnp.zeros((2, 4), jnp.int32)
    model = nnx.eval_shape(lambda: FAMILY.build(config, key=jax.random.key(0)))
    call = lambda model, tokens: boundary.in_stage(boundary.Received(None, None, 0, 2), model, tokens, tokens)
    with pytest.raises(TrainingError, match=r"attend to compressed tokens.*mesh\.stage=1"):
        jax.eval_shape(call, model, tokens)


def test_a_table_chooses_experts_and_scores_weigh_them():
    config = make_config("deepseek_v4")
    model = FAMILY.build(config, key=jax.random.key(0))
    graph, state = nnx.split(model.blocks[0][0].feed_forward)
    layer = nnx.merge(graph, jax.tree.map(lambda leaf: leaf[0], state))
    table = np.asarray(layer.table[...])
    assert {len(set(row)) for row in table.tolist()} == {config.active_experts}
    assert np.ptp(np.bincount(table.ravel())) <= 1
    tokens = jnp.array([[3, 60, 3, 7]])
    x = jax.random.normal(jax.random.key(1), (1, 4, config.embed))
    _, facts = layer(x, Rows(jnp.arange(4)[None], None, tokens=tokens))
    np.testing.assert_array_equal(facts["experts"], table[np.asarray(tokens)])
    assert "routing_mismatch" not in facts
    replayed = jnp.array([[[0, 1], [-1, -1], [2, 3], [4, 0]]])
    _, facts = layer(x, Rows(jnp.arange(4)[None], None, tokens=tokens, experts=replayed))
    np.testing.assert_array_equal(facts["experts"], jnp.where(replayed < 0, table[60], replayed))


def test_a_checkpoint_comes_back_bitwise_without_its_layers_that_predict_later_tokens(tmp_path):
    config = make_config("deepseek_v4")
    random, leaves = np.random.default_rng(0), named_leaves(abstract_params(config))
    values = {
        name: random.integers(0, config.experts, leaf.shape).astype(np.int32)
        if name.endswith("/table")
        else random.normal(size=leaf.shape).astype(leaf.dtype)
        for name, leaf in leaves.items()
    }
    tensors = {}
    for group in shared_tensors(FAMILY.weight_rules(config)):
        tensors |= joined_tensors(group, [values[rule.parameter] for rule in group])
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    assert tensors["layers.0.ffn.gate.tid2eid"].dtype == np.int64
    (tmp_path / "hf").mkdir()
    later = {"mtp.0.enorm.weight": np.ones(3, np.float32), "mtp.0.ffn.experts.0.w1.scale": np.ones(3, np.uint8)}
    save_file({**tensors, **later}, tmp_path / "hf" / "model.safetensors")
    mapping = {**FAMILY.config_map.write(config), "num_nextn_predict_layers": 1}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(mapping))
    result = FORMAT.import_run(tmp_path / "hf", tmp_path / "run")
    assert result.left_out == ("mtp (2 tensors)",)
    FORMAT.export_run(tmp_path / "run", tmp_path / "back")
    written = load_file(tmp_path / "back" / "model.safetensors")
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == written[name].dtype and np.array_equal(tensor, written[name]), name
    tensors["layers.0.ffn.gate.tid2eid"] = tensors["layers.0.ffn.gate.tid2eid"].astype(np.float32)
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(ConversionError, match=r"layers\.0\.ffn\.gate\.tid2eid has dtype F32; I32 and I64 are read"):
        FORMAT.import_run(tmp_path / "hf", tmp_path / "other")


def test_names_of_transformers_are_published_names():
    name = FAMILY.published_name
    assert (
        name("model.layers.3.self_attn.compressor.indexer.kv_proj.weight")
        == "layers.3.attn.indexer.compressor.wkv.weight"
    )
    assert name("model.layers.3.mlp.shared_experts.gate_proj.weight") == "layers.3.ffn.shared_experts.w1.weight"
    assert name("model.layers.3.attn.norm.weight") == "layers.3.attn.kv_norm.weight"
    assert name("model.norm.weight") == "norm.weight"
    rules = FAMILY.weight_rules(make_config("deepseek_v4"))
    assert all(name(rule.tensor) == rule.tensor for rule in rules)


def test_layers_with_entries_take_turns_by_default():
    config = make_config("deepseek_v4", kinds=(), layers=4)
    assert config.layer_kinds == ("window", "window", "sparse", "heavy")
