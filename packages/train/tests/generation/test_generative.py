import dataclasses
import json
from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from tokenizers import Tokenizer, models

from stack_core import ops
from stack_core.abi.caches import KeysValues
from stack_core.abi.errors import GenerationError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.mesh import AXES
from stack_core.abi.models import Outputs
from stack_core.abi.ops import QView
from stack_core.ops import Head
from stack_train.generation.generative import generative_checkpoint
from stack_train.models.llama import FAMILY, LlamaConfig

from ..random_models import draw_model

CONFIG = LlamaConfig(
    vocab_size=24, embed=16, layers=3, heads=4, kv_heads=2, head_dim=8, mlp=20, max_positions=32, attention_bias=True
)
TOKENS = jnp.arange(12).reshape(2, 6)
POSITIONS = jnp.tile(jnp.arange(6), (2, 1))


@pytest.fixture(scope="module")
def model():
    return draw_model(lambda: FAMILY.build(CONFIG, key=jax.random.key(0)))


@pytest.fixture
def opened(model, tmp_path):
    """Opens the model with what lies in `tmp_path`, or another."""
    return lambda module=model: generative_checkpoint(module, CONFIG, name="tiny", tokenizer=tmp_path, origin=tmp_path)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8Columns:
    values: jax.Array
    scales: jax.Array

    def __stack_qview__(self):
        return QView((1, 0), self.values, self.scales, None, "int8/columns")


def quantized(model):
    """The model with a quantized head, and what a quantizer may keep beside the parameters."""
    copy = nnx.clone(model)
    scales = jnp.max(jnp.abs(copy.lm_head[...]), axis=0, keepdims=True) / 127
    copy.lm_head.set_value(Int8Columns(jnp.round(copy.lm_head[...] / scales).astype(jnp.int8), scales))
    copy.ranges = nnx.Variable({"lm_head": jnp.ones((2,))})
    return copy


def mesh(**sizes):
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    return AbstractMesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def write_tokenizer(directory, *, vocab_size=20, **settings):
    vocabulary = {f"w{index}": index for index in range(vocab_size - 2)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def test_is_a_generative_checkpoint_that_computes_what_the_model_does(opened, model):
    checkpoint = opened()
    assert isinstance(checkpoint, GenerativeCheckpoint)
    assert checkpoint.states == [[KeysValues(repeats=3, kv_heads=2, key_dim=8, value_dim=8, dtype="bfloat16")]]
    assert (checkpoint.name, checkpoint.vocab_size, checkpoint.max_positions) == ("tiny", 24, 32)

    def logits(model):
        return model.logits(model(TOKENS, POSITIONS).hidden)

    actual = jax.jit(lambda params: logits(checkpoint.model(params)))(checkpoint.load_params())
    assert jnp.array_equal(actual, jax.jit(logits)(model))


def test_matrices_are_cast_to_the_compute_dtype_and_scales_and_biases_are_not(opened, model):
    params = opened().load_params()
    assert params["lm_head"].dtype == params["blocks"][0][0]["attention"]["query"]["kernel"].dtype == jnp.bfloat16
    assert params["norm"].dtype == params["blocks"][0][0]["attention"]["query"]["bias"].dtype == jnp.float32
    assert model.lm_head.dtype == jnp.float32


LONGROPE = ops.LongRopeScaling(
    short_factor=(1.0,) * 4, long_factor=(2.0,) * 4, factor=4.0, original_max_position_embeddings=12
)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [(LONGROPE, 12), (ops.DynamicScaling(factor=2.0, max_position_embeddings=20), 20)],
    ids=["longrope", "dynamic"],
)
def test_no_position_is_generated_that_would_turn_kept_keys_otherwise(opened, scaling, expected):
    with pytest.warns(
        UserWarning, match=f"tiny generates up to {expected} of its 32 positions: beyond that, its rope_scaling"
    ):
        checkpoint = opened(FAMILY.build(dataclasses.replace(CONFIG, rope_scaling=scaling), key=jax.random.key(0)))
    assert checkpoint.max_positions == expected


@pytest.mark.parametrize(
    "scaling",
    [
        ops.LinearScaling(factor=2.0),
        dataclasses.replace(LONGROPE, short_factor=LONGROPE.long_factor),
        dataclasses.replace(LONGROPE, original_max_position_embeddings=32),
        ops.DynamicScaling(factor=2.0, max_position_embeddings=64),
    ],
)
def test_all_positions_are_generated_where_they_are_turned_alike(opened, scaling):
    model = FAMILY.build(dataclasses.replace(CONFIG, rope_scaling=scaling), key=jax.random.key(0))
    assert opened(model).max_positions == 32


def test_what_is_quantized_and_what_has_no_axes_stays_as_it_is(opened, model):
    params = opened(quantized(model)).load_params()
    assert isinstance(params["lm_head"], Int8Columns)
    assert params["ranges"]["lm_head"].dtype == params["lm_head"].scales.dtype == jnp.float32


def test_what_is_loaded_is_what_was_announced_in_its_place(opened, model):
    checkpoint = opened(quantized(model))
    devices = jax.make_mesh((1,) * len(AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    shardings = checkpoint.shardings(devices)
    params = checkpoint.load_params(shardings)
    assert jax.tree.structure(params) == jax.tree.structure(checkpoint.parameters)
    for array, announced, place in zip(*map(jax.tree.leaves, (params, checkpoint.parameters, shardings)), strict=True):
        assert (array.shape, array.dtype, array.sharding) == (announced.shape, announced.dtype, place)


@pytest.mark.parametrize(
    ("tensor", "query", "output", "gate", "head"),
    [
        (2, (None, None, "tensor"), (None, "tensor", None), (None, None, "tensor"), (None, "tensor")),
        # Four parts would cut each of the two heads of keys.
        (4, (None, None, None), (None, None, None), (None, None, "tensor"), (None, "tensor")),
        (8, (None, None, None), (None, None, None), (None, None, None), (None, "tensor")),
        (5, (None, None, None), (None, None, None), (None, None, "tensor"), (None, None)),
    ],
)
def test_parameters_are_split_where_the_mesh_divides_them(opened, model, tensor, query, output, gate, head):
    checkpoint = opened(quantized(model))
    shardings = checkpoint.shardings(mesh(data=2, tensor=tensor))
    assert jax.tree.structure(shardings) == jax.tree.structure(checkpoint.parameters)

    def splits(sharding):
        used = {axis: size for axis, size in sharding.mesh.shape.items() if size > 1}
        return tuple(axis if axis in used else None for axis in sharding.spec)

    attention, feed_forward = shardings["blocks"][0][0]["attention"], shardings["blocks"][0][0]["feed_forward"]
    assert splits(attention["query"]["kernel"]) == splits(attention["key"]["kernel"]) == query
    assert splits(attention["query"]["bias"]) == query[::2]
    assert splits(attention["output"]["kernel"]) == output
    assert splits(feed_forward["gate"]["kernel"]) == gate
    assert splits(shardings["lm_head"].values) == splits(shardings["lm_head"].scales) == head
    assert shardings["ranges"]["lm_head"].spec == PartitionSpec(None)


def test_tokenizer_template_and_special_tokens_are_the_directorys(opened, tmp_path):
    write_tokenizer(
        tmp_path, bos_token="<s>", eos_token={"content": "</s>"}, add_bos_token=True, chat_template="{{ messages }}"
    )
    checkpoint = opened()
    assert checkpoint.tokenizer.bos_id == 18
    assert checkpoint.chat_template == "{{ messages }}"
    assert checkpoint.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert checkpoint.end_tokens == {19}


def test_without_files_nothing_is_made_up(opened):
    checkpoint = opened()
    assert checkpoint.tokenizer is checkpoint.chat_template is None
    assert checkpoint.end_tokens == frozenset()
    assert checkpoint.special_tokens == checkpoint.sampling_defaults == {}


def test_end_tokens_and_defaults_are_those_of_the_models_makers(opened, tmp_path):
    write_tokenizer(tmp_path, eos_token="</s>")
    (tmp_path / "config.json").write_text('{"eos_token_id": 11}')
    settings = {
        "eos_token_id": [7, 9],
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": None,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "num_beams": 4,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    checkpoint = opened()
    assert checkpoint.end_tokens == {7, 9, 11, 19}
    assert checkpoint.sampling_defaults == {"temperature": 0.6, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"generation_config\.json cannot be read"),
        ("[1]", r"generation_config\.json holds a list, not an object"),
        ('{"top_p": 3}', r"generation_config\.json recommends .*top_p"),
    ],
)
def test_a_generation_config_that_makes_no_sense_is_refused(opened, tmp_path, content, message):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(GenerationError, match=message):
        opened()


def test_a_tokenizer_of_another_model_is_refused(opened, tmp_path):
    write_tokenizer(tmp_path, vocab_size=25)
    with pytest.raises(GenerationError, match=r"25 tokens, but the model only 24"):
        opened()


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        ({}, {"vocab_size": 4, "max_positions": 8, "dtype": "float32"}, "model lacks states, head, logits. See `Lang"),
        ({"states": (), "head": None, "logits": None}, {"vocab_size": 4}, "config lacks max_positions, dtype. See"),
    ],
    ids=["model", "config"],
)
def test_parts_that_engines_need_are_named(tmp_path, model, config, message):
    model, config = SimpleNamespace(**model), SimpleNamespace(name="mamba", **config)
    with pytest.raises(GenerationError, match=f"'mamba': its {message}"):
        generative_checkpoint(model, config, name="tiny", tokenizer=tmp_path, origin=tmp_path)


class Mean(nnx.Module):
    """A language model without a cache, whose hidden states are the means of the tokens so far, or of each alone."""

    states = ()

    def __init__(self, *, looks_back):
        self.embedding = nnx.Param(jax.random.normal(jax.random.key(0), (CONFIG.vocab_size, 8)))
        self.looks_back = looks_back

    def __call__(self, tokens, positions, segment_ids=None, cache=None):
        rows = self.embedding[tokens]
        mean = jnp.cumsum(rows, axis=1) / (1 + positions[..., None]).astype(rows.dtype)
        return Outputs(mean if self.looks_back else rows, cache)

    def head(self):
        return Head(self.embedding.get_value().T)

    def logits(self, hidden):
        return self.head().logits(hidden)


def test_a_model_that_looks_back_without_states_is_refused(tmp_path):
    paths = {"name": "mean", "tokenizer": tmp_path, "origin": tmp_path}
    model = Mean(looks_back=False)
    assert generative_checkpoint(model, CONFIG, **paths).load_params()
    model.embedding[...] = jnp.full((CONFIG.vocab_size, 8), jnp.nan)
    assert generative_checkpoint(model, CONFIG, **paths).load_params(), "NaN is no sign of a state"
    with pytest.raises(GenerationError, match="mean declares no `states`, but its output depends on earlier tokens"):
        generative_checkpoint(Mean(looks_back=True), CONFIG, **paths).load_params()
