"""Comparison of a drafted family with transformers, layer by layer."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from stack_core.abi.errors import ConversionError
from stack_train.huggingface.source import read_config
from stack_train.models.decoder import Block
from stack_train.nn.residual import ResidualStream, Rows
from stack_train.safetensors_files import StoredTensor

__all__ = ["Difference", "first_difference", "load_draft"]

TOLERANCE = 1e-4
Difference = tuple[str, float]
"""Name of a part of the model, and the largest difference of its output, relative to the largest value if above 1."""


def load_draft(family: Any, mapping: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> Any:
    """Builds a family's model with the values of a checkpoint, in float32, without registering the family.

    Raises:
      ConversionError: the config or the tensors do not fit; lists the names.
    """
    config = read_config(family, mapping)
    model = nnx.eval_shape(lambda: family.build(config, key=jax.random.key(0)))
    graph, state = nnx.split(model)
    shapes = {"/".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
    expected: dict[str, tuple[int, ...]] = {}
    rules = family.weight_rules(config)
    for rule in rules:
        expected |= rule.tensor_shapes(shapes[rule.parameter].get_value().shape)
    given = {name: tensor.shape for name, tensor in tensors.items() if name not in family.redundant_tensors(config)}
    differing = [name for name in sorted({*given, *expected}) if given.get(name) != expected.get(name)]
    if differing:
        lines = "\n  ".join(f"{name}: {given.get(name)}; in the draft {expected.get(name)}" for name in differing)
        raise ConversionError(f"The draft has other tensors than the checkpoint:\n  {lines}")
    values: dict[tuple[Any, ...], Any] = {}
    for rule in rules:
        leaf = np.empty(shapes[rule.parameter].get_value().shape, np.float32)
        for name, part in rule.tensors(leaf).items():
            part[...] = rule.part_of(tensors[name].read())
        values[tuple(int(step) if step.isdigit() else step for step in rule.parameter.split("/"))] = jnp.asarray(leaf)
    return nnx.merge(graph, nnx.State(nnx.traversals.unflatten_mapping(values)))


def first_difference(model: Any, directory: Path) -> tuple[Difference | None, list[Difference]]:
    """Compares each part with transformers' on transformers' own input of that part.

    Args:
      model: `Decoder` with the checkpoint's values in float32.
      directory: the checkpoint.

    Returns:
      The first part whose outputs differ by more than 1e-4, or None; and all parts with their differences.

    Raises:
      ImportError: PyTorch or transformers is not installed.
    """
    # Neither is a requirement of this package.
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    seen: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def watch(name: str, module: Any) -> None:
        def hook(_: Any, inputs: Any, options: Any, output: Any) -> None:
            given = inputs[0] if inputs else options["hidden_states"]
            made = output[0] if isinstance(output, tuple) else output
            seen[name] = given.detach().numpy(), made.detach().numpy()

        module.register_forward_hook(hook, with_kwargs=True)

    body = theirs.model
    for number, layer in enumerate(body.layers):
        for name, module in (("", layer), (".self_attn", layer.self_attn), (".mlp", layer.mlp)):
            watch(f"layers.{number}{name}", module)
    watch("norm", body.norm)
    vocab, tokens_count = model.config.vocab_size, min(model.config.max_positions, 24)
    tokens = np.random.default_rng(0).integers(0, vocab, (1, tokens_count))
    with torch.no_grad():
        logits = theirs(torch.tensor(tokens)).logits.numpy()
    return _compare(model, tokens, seen, logits)


def _compare(
    model: Any, tokens: np.ndarray, seen: Mapping[str, tuple[np.ndarray, np.ndarray]], logits: np.ndarray
) -> tuple[Difference | None, list[Difference]]:
    rows = Rows(jnp.arange(tokens.shape[1])[None], None)
    found = [("embedding", _difference(model._embedded(jnp.asarray(tokens)), seen["layers.0"][0]))]
    blocks = _blocks(model)
    for number, block in enumerate(blocks):
        given, made = seen[f"layers.{number}"]
        ours = block(ResidualStream(jnp.asarray(given), None), rows, None, None)[0].joined().x
        x, y = seen[f"layers.{number}.self_attn"]
        attended, _ = block.attention(jnp.asarray(x), rows, None, None)
        found.append((f"layers.{number}.self_attn", _difference(attended, y)))
        x, y = seen[f"layers.{number}.mlp"]
        fed, _ = block.feed_forward(jnp.asarray(x), rows)
        found.append((f"layers.{number}.mlp", _difference(fed, y)))
        found.append((f"layers.{number}, its norms and residual sums", _difference(ours, made)))
    given, made = seen["norm"]
    found.append(("norm", _difference(model.norm_spec(jnp.asarray(given), model.norm), made)))
    found.append(("lm_head", _difference(model.logits(jnp.asarray(made)), logits)))
    whole = model.logits(model(jnp.asarray(tokens), rows.positions).hidden)
    found.append(("the whole model", _difference(whole, logits)))
    return next((each for each in found if not each[1] <= TOLERANCE), None), found


def _blocks(model: Any) -> list[Block]:
    """Returns the blocks in the order of the layers, each with the parameters of one layer."""
    found: dict[int, Block] = {}
    for group, period in zip(model.groups, model.blocks, strict=True):
        for place, block in enumerate(period):
            graph, state = nnx.split(block)
            for repeat, number in enumerate(group.layers(place)):
                found[number] = nnx.merge(graph, jax.tree.map(lambda leaf, repeat=repeat: leaf[repeat], state))
    return [found[number] for number in sorted(found)]


def _difference(output: Any, expected: np.ndarray) -> float:
    """Returns the largest difference, relative to max(1, max |expected|).

    It is infinity if the shapes differ, and NaN if an array contains NaN.
    """
    actual = np.asarray(output, np.float64)
    if actual.shape != expected.shape:
        return float("inf")
    return float(np.max(np.abs(actual - expected)) / max(1.0, np.max(np.abs(expected))))
