"""Models of any nnx variables train: what the forward pass moves is kept, what is frozen stays, the rest is refused."""

import types
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from stack_core.abi.errors import ConfigError, ShardingError, StackError, TrainingError
from stack_core.abi.mesh import MeshConfig
from stack_core.abi.metrics import Metric
from stack_core.chips.device_mesh import make_mesh
from stack_train.optim import AdamWConfig, GroupConfig, ScheduleConfig
from stack_train.step.program import Program
from stack_train.step.step import make_step
from stack_train.transform import Transforms
from stack_train.variables.model_variables import sharding_rules

WIDTH = 8
FREEZING = AdamWConfig(groups={"kernel|norm": GroupConfig(frozen=True)})


class Adapter(nnx.Variable):
    """A kind of variable that no library knows."""


class Foreign(nnx.Module):
    """A model whose author has never heard of logical axes."""

    def __init__(self, parts, key):
        keys = jax.random.split(key, 4)
        self.kernel = nnx.Param(0.3 * jax.random.normal(keys[0], (WIDTH, WIDTH)))
        self.parts = tuple(parts)
        if "layers" in parts:
            self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(key)) for key in keys[1:3]])
        if "norm" in parts:
            self.norm = nnx.BatchNorm(WIDTH, momentum=0.5, rngs=nnx.Rngs(0))
        if "dropout" in parts:
            self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
        if "table" in parts:
            self.table = nnx.Variable(jnp.arange(WIDTH))
        if "calls" in parts:
            self.calls = nnx.Param(jnp.zeros((), jnp.int32), trained=False)
        if "adapter" in parts:
            self.down = Adapter(0.3 * jax.random.normal(keys[3], (WIDTH, 2)))
            self.up = Adapter(jnp.zeros((2, WIDTH)))
        if "own axis" in parts:
            self.scale = nnx.Param(jnp.ones(WIDTH), logical_axes=("channels",))
        if "integers" in parts:
            self.codes = nnx.Param(jnp.zeros(WIDTH, jnp.int32))
        if "narrow" in parts:
            self.seen = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        x = x @ self.kernel[...]
        if "adapter" in self.parts:
            x = x + x @ self.down[...] @ self.up[...]
        for layer in self.layers if "layers" in self.parts else ():
            x = jnp.tanh(layer(x))
        if "norm" in self.parts:
            x = self.norm(x)
        if "dropout" in self.parts:
            x = self.dropout(x)
        if "table" in self.parts:
            x = x[:, self.table[...]]
        if "calls" in self.parts:
            self.calls[...] += 1
        if "own axis" in self.parts:
            x = x * self.scale[...]
        if "moves its kernel" in self.parts:
            self.kernel[...] *= 0.9
        if "narrow" in self.parts:
            self.seen.set_value(jnp.mean(x))
        return x


class Family:
    name = "foreign"
    config_class = tuple

    def build(self, config, *, key):
        return Foreign(config, key)


class ShardedFamily(Family):
    rules = types.MappingProxyType({"channels": "fsdp"})


def squared_error(model, batch, *, key):
    loss = jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
    return loss, {"loss": Metric.mean(loss, jnp.float32(len(batch["x"])))}


def make_program(*parts, **changes):
    fields = {
        "model": (Family(), parts),
        "objective": squared_error,
        "optimizer": AdamWConfig(learning_rate=3e-2, weight_decay=0.0, schedule=ScheduleConfig(decay="constant")),
        "steps": 30,
    }
    mesh, rules = make_mesh(MeshConfig(), devices=jax.devices()[:1]), changes.pop("rules", {})
    return Program(make_step(**{**fields, **changes}), mesh, rules)


def make_batch():
    rng = np.random.default_rng(0)
    x = rng.normal(1.0, 1.0, (16, WIDTH)).astype(np.float32)
    return {"x": x, "y": x @ rng.normal(0.0, 0.5, (WIDTH, WIDTH)).astype(np.float32)}


def train(program, steps=10):
    """The first state, on the host, the last, and the losses."""
    batch, losses = make_batch(), []
    state, step = program.init(key=jax.random.key(0)), program.compile(batch)
    first = jax.device_get(replace(state, key=None))
    for _ in range(steps):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return first, state, losses


def sizes(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree) if leaf.ndim)


def test_a_model_without_logical_axes_trains_and_its_batch_statistics_move():
    first, state, losses = train(make_program("layers", "norm", "table", "calls"))
    assert losses[-1] < 0.7 * losses[0]
    assert not np.array_equal(first.params["layers"][1]["kernel"], state.params["layers"][1]["kernel"])
    assert set(state.mutable) == {"norm", "table", "calls"} and not state.frozen
    assert np.abs(state.mutable["norm"]["mean"]).max() > 0.01
    np.testing.assert_array_equal(state.mutable["table"], first.mutable["table"])
    assert int(state.mutable["calls"]) == 10


def test_microbatches_move_statistics_one_after_the_other():
    _, state, _ = train(make_program("norm", "calls", accumulation_steps=4), steps=3)
    assert int(state.mutable["calls"]) == 12


def test_evaluation_takes_running_statistics_moves_nothing_and_drops_nothing():
    program = make_program("norm", "dropout")
    _, state, _ = train(program)
    batch, variables = make_batch(), program.step.evaluation_variables(state)
    losses = {float(program.compile_evaluation(batch)(variables, batch)["loss"]) for _ in range(2)}
    one = {name: rows[:1] for name, rows in batch.items()}
    alone = float(program.compile_evaluation(one)(variables, one)["loss"])
    model = program.step.model.merge(variables)
    model.eval()
    np.testing.assert_allclose(alone, float(np.mean((model(one["x"]) - one["y"]) ** 2)), rtol=1e-5)
    assert len(losses) == 1


def test_dropout_draws_from_the_key_of_the_step():
    program, batch = make_program("dropout"), make_batch()
    state = program.init(key=jax.random.key(0))
    gradients = jax.jit(lambda state, batch: program.on_mesh(program.step.gradients)(state, batch)[0]["kernel"])
    states = (state, state, replace(state, step=state.step + 1))
    same, again, next_step = (gradients(one, batch) for one in states)
    np.testing.assert_array_equal(same, again)
    assert not np.array_equal(same, next_step)
    assert "dropout" not in state.mutable and "dropout" not in state.frozen  # nothing of it needs to be saved


@pytest.mark.parametrize(
    "changes",
    [
        {"trained": Adapter},
        {
            "trained": nnx.Any(nnx.Param, Adapter),
            "optimizer": AdamWConfig(groups={"kernel|norm": GroupConfig(frozen=True)}),
        },
    ],
    ids=["filter", "groups"],
)
def test_two_trained_leaves_have_optimizer_state_and_the_rest_is_frozen(changes):
    program = make_program("adapter", "norm", **{"mutable": nnx.BatchStat, **changes})
    first, state, _ = train(program)
    assert set(state.params) == {"down", "up"}
    assert sizes(state.opt_state) == 2 * sizes(state.params) == 2 * (WIDTH * 2 + 2 * WIDTH)
    np.testing.assert_array_equal(state.frozen["kernel"], first.frozen["kernel"])
    assert set(state.frozen["norm"]) == {"scale", "bias"} and set(state.mutable["norm"]) == {"mean", "var"}
    assert not np.array_equal(state.params["up"], first.params["up"])
    assert program.step.model.parameter_count == sizes(state.params) + sizes(state.frozen)


def test_a_step_is_its_two_halves_bitwise():
    program, batch = make_program("layers", "norm", "dropout"), make_batch()
    whole = halves = program.init(key=jax.random.key(0))
    functions = (program.step, program.step.gradients, program.step.update)
    step, gradients, update = (jax.jit(program.on_mesh(function)) for function in functions)
    for _ in range(3):
        whole, whole_metrics = step(whole, batch)
        grads, metrics, mutable = gradients(halves, batch)
        halves, reported = update(halves, grads, mutable)
    for one, other in zip(jax.tree.leaves(replace(whole, key=0)), jax.tree.leaves(replace(halves, key=0)), strict=True):
        np.testing.assert_array_equal(one, other)
    assert jax.tree.map(float, whole_metrics) == jax.tree.map(float, {**metrics, **reported})


class Rounds:
    """Holds the kernel in steps of a quarter, which no optimizer moves."""

    def apply(self, model):
        model = nnx.clone(model)
        if not isinstance(model.kernel.get_value(), jax.ShapeDtypeStruct):
            model.kernel.set_value(jnp.round(model.kernel[...] * 4) / 4)
        return model

    def call(self, function, model, *args, **kwargs):
        return function(model, *args, **kwargs)

    def trained(self, path, variable):
        return path != ("kernel",)


class Adapts:
    """Adds a product of two small matrices to the kernel, whatever it holds."""

    def apply(self, model):
        model = nnx.clone(model)
        model.down = nnx.Param(jnp.full((WIDTH, 1), 0.1))
        model.up = nnx.Param(jnp.full((1, WIDTH), 0.1))
        return model

    def call(self, function, model, *args, **kwargs):
        twin = nnx.clone(model)
        twin.kernel.set_value(model.kernel[...] + model.down[...] @ model.up[...])
        return function(twin, *args, **kwargs)

    def trained(self, path, variable):
        return path in (("down",), ("up",))


def test_transforms_apply_in_order_and_say_what_is_trained():
    program = make_program("layers", transform=Transforms((Rounds(), Adapts())))
    first, state, losses = train(program)
    assert set(state.params) == {"down", "up"}
    np.testing.assert_array_equal(first.frozen["kernel"] * 4 % 1, 0)
    np.testing.assert_array_equal(state.frozen["kernel"], first.frozen["kernel"])
    assert losses[-1] < losses[0]
    batch, variables = make_batch(), program.step.variables(state)
    evaluated = float(program.compile_evaluation(batch)(variables, batch)["loss"])
    twin = program.step.model.merge(variables)
    twin.kernel.set_value(twin.kernel[...] + twin.down[...] @ twin.up[...])
    np.testing.assert_allclose(evaluated, np.mean((twin(batch["x"]) - batch["y"]) ** 2), rtol=1e-5)


def test_a_run_may_start_from_some_of_the_variables():
    program = make_program("adapter", trained=Adapter)
    given = jnp.full((WIDTH, WIDTH), 2.0)
    state = program.init({"kernel": jnp.array(given)}, key=jax.random.key(0))
    np.testing.assert_array_equal(state.frozen["kernel"], given)
    np.testing.assert_array_equal(state.params["down"], program.init(key=jax.random.key(0)).params["down"])


def test_a_family_brings_rules_for_its_own_axes_and_the_run_has_the_last_word():
    programs = [make_program(model=(ShardedFamily(), ("own axis",)), rules=rules) for rules in ({}, {"channels": None})]
    specs = [program.state_shardings.params["scale"].spec for program in programs]
    assert specs == [jax.sharding.PartitionSpec("fsdp"), jax.sharding.PartitionSpec(None)]
    # A rule that equals the default precedes the family's too.
    family = ShardedFamily()
    family.rules = types.MappingProxyType({"channels": "fsdp", "embed": "tensor"})
    for given, expected in (({}, ("tensor",)), ({"embed": "fsdp"}, ("fsdp",))):
        assert sharding_rules(family, given).mesh_axes("embed") == expected
    train(programs[0], steps=1)


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        (("own axis",), ShardingError, r"scale: no rule for the logical axis 'channels'.*mesh\.rules\.channels"),
        (("integers",), TrainingError, "'codes' holds int32; only floats can be trained"),
        (("moves its kernel",), TrainingError, "assigns variable 'kernel', which is trained"),
        (("narrow",), TrainingError, r"assigns float32\[\] to variable 'seen', which holds int32\[\]"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(parts, error, message):
    with pytest.raises(error, match=message) as caught:
        make_program(*parts).trace(make_batch())
    assert isinstance(caught.value, StackError)


def test_a_forward_pass_may_not_move_what_is_frozen():
    program = make_program(
        "moves its kernel", "layers", optimizer=AdamWConfig(groups={"kernel": GroupConfig(frozen=True)})
    )
    with pytest.raises(TrainingError, match="assigns variable 'kernel', which is frozen"):
        program.trace(make_batch())


def test_a_group_that_matches_nothing_is_refused():
    with pytest.raises(ConfigError, match="Did you mean 'kernel'"):
        make_program(optimizer=AdamWConfig(groups={"kernal": GroupConfig(frozen=True)})).trace(make_batch())
