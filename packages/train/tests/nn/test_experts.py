from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from stack_train.nn.build import Build
from stack_train.nn.experts import Experts, Router, route
from stack_train.nn.parallel_experts import ParallelExperts
from stack_train.nn.residual import Norm, Rows
from stack_train.nn.stack import scan_layers

EMBED, TOKENS = 8, (2, 6)
X = jax.random.normal(jax.random.key(1), (*TOKENS, EMBED))
ROWS = Rows(jnp.zeros(TOKENS, int), None)
GROUPED = Router(experts=6, active=2, score="sigmoid", groups=3, kept_groups=2, scale=2.5, bias_rate=0.01)


def build(spec, repeats=1):
    return spec.build(Build(EMBED, repeats, 0.5, 0.5, Norm(), "float32", jax.random.key(0)))


def first_layer(module):
    graph, state = nnx.split(module)
    return nnx.merge(graph, jax.tree.map(lambda leaf: leaf[0], state))


def by_hand(layer, x, router, *, scaled_inputs=False, replayed=None, routed=None):
    """Token by token in NumPy."""
    gate, up, down = (np.asarray(each[...]) for each in (layer.expert_gate, layer.expert_up, layer.expert_down))
    outputs = []
    for place, token in enumerate(np.asarray(x).reshape(-1, EMBED)):
        read = token if routed is None else np.asarray(routed).reshape(-1, EMBED)[place]
        logits = read @ np.asarray(layer.router.kernel[...])
        scores = 1 / (1 + np.exp(-logits)) if router.score == "sigmoid" else np.exp(logits) / np.exp(logits).sum()
        choice = scores if layer.selection_bias is None else scores + np.asarray(layer.selection_bias[...])
        groups = choice.reshape(router.groups, -1)
        best = np.argsort(-np.sort(groups, axis=1)[:, -router.group_best :].sum(axis=1))[: router.kept_groups]
        allowed = np.isin(np.arange(router.experts) // groups.shape[1], best)
        chosen = np.argsort(-np.where(allowed, choice, -np.inf))[: router.active]
        if replayed is not None and replayed[place, 0] >= 0:
            chosen = replayed[place]
        weights = scores[chosen] / scores[chosen].sum() if router.normalized else scores[chosen]
        if layer.expert_scales is not None:
            weights = weights * np.asarray(layer.expert_scales[...])[chosen]
        before, after = (weights, np.ones_like(weights)) if scaled_inputs else (np.ones_like(weights), weights)
        inputs = [w * token for w in before]
        hidden = [
            (h := x @ gate[e]) / (1 + np.exp(-h)) * (x @ up[e]) @ down[e] for x, e in zip(inputs, chosen, strict=True)
        ]
        outputs.append(router.scale * sum(w * h for w, h in zip(after, hidden, strict=True)))
    return np.array(outputs).reshape(x.shape)


BEST = Router(experts=6, active=2, normalized=False, groups=3, kept_groups=2, group_best=1)


@pytest.mark.parametrize(
    "router", [Router(experts=5, active=2), Router(experts=4, active=3, normalized=False), GROUPED, BEST], ids=str
)
def test_a_mixture_is_the_sum_over_each_tokens_experts(router):
    layer = first_layer(build(Experts(router=router, width=12)))
    if layer.selection_bias is not None:
        layer.selection_bias[...] = jnp.array([0.5, -0.5, 0.0, 0.3, 0.0, -0.2])
    expected = by_hand(layer, X, router)
    np.testing.assert_allclose(layer(X, ROWS)[0], expected, rtol=1e-4, atol=1e-5)


def test_experts_beside_a_dense_layer_have_norms_router_inputs_and_scales_of_their_own():
    router = Router(experts=4, active=2, expert_scales=True)
    layer = first_layer(build(ParallelExperts(router=router, width=12, dense=10)))
    scales = jax.random.uniform(jax.random.key(2), (5, EMBED), minval=0.5, maxval=2.0)
    names = ("dense_norm", "dense_output_norm", "expert_norm", "expert_output_norm", "router_scale")
    for name, scale in zip(names, scales, strict=True):
        getattr(layer, name)[...] = scale
    layer.expert_scales[...] = jnp.array([0.5, 2.0, 1.5, 0.7])
    norm = lambda x, name: Norm()(x, getattr(layer, name))
    x, routed = norm(X, "expert_norm"), norm(X, "router_scale") / np.sqrt(EMBED)
    experts = by_hand(layer, x, router, routed=routed)
    expected = norm(layer.dense(norm(X, "dense_norm"), ROWS)[0], "dense_output_norm")
    expected += norm(jnp.asarray(experts), "expert_output_norm")
    np.testing.assert_allclose(layer(X, ROWS)[0], expected, rtol=1e-4, atol=1e-5)


def test_weights_of_inputs_act_before_the_experts():
    router = Router(experts=4, active=2, score="sigmoid", normalized=False)
    layer = first_layer(build(Experts(router=router, width=12, scaled_inputs=True)))
    np.testing.assert_allclose(layer(X, ROWS)[0], by_hand(layer, X, router, scaled_inputs=True), rtol=1e-4, atol=1e-5)


REPLAYED = np.asarray([[0, 5], [4, 1], [-1, -1]] * 4, np.int16)


@pytest.mark.parametrize("router", [Router(experts=6, active=2), GROUPED], ids=str)
def test_replayed_experts_replace_the_choice_and_are_weighed_by_the_router(router):
    layer = lambda: first_layer(build(Experts(router=router, width=12)))  # new for each call, which moves its bias
    rows = replace(ROWS, experts=jnp.asarray(REPLAYED.reshape(2, 6, 2)))
    (own, own_facts), (found, facts) = layer()(X, ROWS), layer()(X, rows)
    np.testing.assert_allclose(found, by_hand(layer(), X, router, replayed=REPLAYED), rtol=1e-4, atol=1e-5)
    kept, is_own = np.asarray(own_facts["experts"]), REPLAYED[:, 0].reshape(2, 6) < 0
    np.testing.assert_allclose(found[is_own], own[is_own], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(facts["experts"], np.where(is_own[..., None], kept, REPLAYED.reshape(2, 6, 2)))
    pairs = zip(kept[~is_own].tolist(), REPLAYED[REPLAYED[:, 0] >= 0].tolist(), strict=True)
    differs = [set(left) != set(right) for left, right in pairs]
    assert sum(differs) > 0 and facts["routing_mismatch"] == pytest.approx(np.mean(differs))
    padded = replace(rows, segment_ids=jnp.asarray([[1, 0, 0, 0, 0, 0], [0] * 6]))
    assert float(layer()(X, padded)[1]["routing_mismatch"]) == differs[0]
    # The order of a token's experts is no difference.
    again, facts = layer()(X, replace(ROWS, experts=jnp.asarray(kept[..., ::-1])))
    np.testing.assert_allclose(again, own, rtol=1e-5, atol=1e-6)
    assert facts["routing_mismatch"] == 0


def test_the_router_learns_from_replayed_experts_as_from_its_own():
    """The gradient by all parameters is that of a sum over all experts, masked by the replayed ones."""
    layer = first_layer(build(Experts(router=Router(experts=6, active=2), width=12)))
    graph, state = nnx.split(layer)
    replayed = np.stack([np.arange(12) % 6, (np.arange(12) + 2) % 6], axis=1).astype(np.int16)

    def ours(state):
        y, _ = nnx.merge(graph, state)(X, replace(ROWS, experts=jnp.asarray(replayed.reshape(2, 6, 2))))
        return jnp.sum(jnp.sin(y))

    def formula(state):
        layer, x = nnx.merge(graph, state), X.reshape(-1, EMBED)
        mask = jnp.any(replayed[..., None] == np.arange(6), axis=1)
        weights = jax.nn.softmax(jnp.where(mask, x @ layer.router.kernel[...], -jnp.inf), axis=-1)
        hidden = jax.nn.silu(jnp.einsum("td,edm->tem", x, layer.expert_gate[...]))
        hidden = hidden * jnp.einsum("td,edm->tem", x, layer.expert_up[...])
        return jnp.sum(jnp.sin(jnp.einsum("te,tem,emd->td", weights, hidden, layer.expert_down[...])))

    found, expected = jax.grad(ours)(state), jax.grad(formula)(state)
    assert np.abs(found.router.kernel[...]).max() > 1e-3
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)


def test_the_bias_chooses_and_does_not_weigh():
    logits = jnp.zeros((1, 4))
    weights, chosen, *_ = route(logits, jnp.array([0.0, 9.0, 0.0, 8.0]), Router(experts=4, active=2, score="sigmoid"))
    assert sorted(chosen[0].tolist()) == [1, 3]
    np.testing.assert_allclose(weights, [[0.5, 0.5]])


def test_shared_experts_take_every_token():
    plain = first_layer(build(Experts(router=Router(experts=4, active=2), width=12)))
    both = first_layer(build(Experts(router=Router(experts=4, active=2), width=12, shared=10, shared_gate=True)))
    shared = both.shared(X, ROWS)[0] * jax.nn.sigmoid(X @ both.shared_gate.kernel[...])
    np.testing.assert_allclose(both(X, ROWS)[0], plain(X, ROWS)[0] + shared, rtol=1e-5, atol=1e-5)


def test_experts_without_a_gate_are_plain_layers():
    router = Router(experts=3, active=3, normalized=False)  # of which every token takes all
    layer = first_layer(build(Experts(router=router, width=12, gated=False, activation="relu_squared", shared=10)))
    shares = jax.nn.softmax(X @ layer.router.kernel[...], axis=-1)
    plain = lambda up, down: jnp.square(jnp.maximum(X @ up, 0)) @ down
    expected = plain(layer.shared.up.kernel[...], layer.shared.down.kernel[...])
    for expert in range(3):
        expected += shares[..., expert, None] * plain(layer.expert_up[...][expert], layer.expert_down[...][expert])
    np.testing.assert_allclose(layer(X, ROWS)[0], expected, rtol=1e-4, atol=1e-5)
    assert layer.expert_gate is None


def test_facts_leave_padding_out():
    layer = first_layer(build(Experts(router=Router(experts=5, active=2), width=12)))
    padded = Rows(ROWS.positions, jnp.array([[1, 1, 1, 0, 0, 0]] * 2))
    _, facts = layer(X, padded)
    _, expected = layer(X[:, :3], Rows(ROWS.positions[:, :3], None))
    for name in ("expert_load", "balance_loss", "router_z"):
        np.testing.assert_allclose(facts[name], expected[name], rtol=1e-5)
    assert np.isclose(facts["expert_load"].sum(), 1) and facts["balance_loss"] >= 0.5


def test_an_even_router_has_a_balance_loss_of_one():
    layer = first_layer(build(Experts(router=Router(experts=4, active=4), width=12)))
    layer.router.kernel[...] = jnp.zeros((EMBED, 4))
    _, facts = layer(X, ROWS)
    np.testing.assert_allclose(facts["expert_load"], 0.25, rtol=1e-6)
    np.testing.assert_allclose([facts["balance_loss"], facts["router_z"]], [1, np.log(4) ** 2], rtol=1e-5)


def test_the_forward_pass_moves_the_bias_of_stacked_layers_and_a_cache_leaves_it():
    def run(moves):
        module = build(Experts(router=GROUPED, width=12), repeats=2)

        def body(layer, x, rows, layer_input):
            y, facts = layer(x, rows)
            return x + y, facts

        options = {"per_row": ROWS, "remat": "full", "unroll": False, "moves": moves}
        _, (facts,) = scan_layers(body, [module], X, [None], **options)
        return module.selection_bias[...], facts["expert_load"]

    bias, load = run(moves=True)
    np.testing.assert_allclose(bias, -0.01 * np.sign(load - 1 / 6), atol=1e-7)
    assert bias.shape == (2, 6) and not jnp.array_equal(bias[0], bias[1])
    assert not run(moves=False)[0].any()
