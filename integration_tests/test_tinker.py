"""`LocalClient`: adapters trained and sampled from in this process."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.errors import CheckpointError, ConfigError, ConversionError, DataError, TrainingError
from stack_core.abi.generation import SamplingParams
from stack_core.runtime.tree_paths import path_name
from stack_rl import AdamParams, Datum, LocalClient

from .served import write_checkpoint

TEXT = [0, 5, 6, 7, 8, 9, 10, 1]


def datum(text=TEXT, **inputs):
    given = inputs or {"weights": [1.0] * (len(text) - 1)}
    return Datum(text[:-1], {"target_tokens": text[1:], **given})


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("client")
    (folder / "model").mkdir()
    write_checkpoint(folder / "model")
    with LocalClient(folder / "model", max_rank=4, directory=folder / "weights") as client:
        yield client


def dense_loss(client, training):
    """Returns a function of factors and a text: its loss with the adapter added to the matrices, and the gradient."""
    scale = 32.0 / training.rank

    @jax.jit
    @jax.value_and_grad
    def loss(factors, text):
        def merged(path, leaf):
            pair = factors.get(path_name(path))
            return leaf if pair is None else leaf + scale * pair["down"] @ pair["up"]

        model = client.checkpoint.model(jax.tree_util.tree_map_with_path(merged, client.trainer.params))
        hidden = model(text[None, :-1], jnp.arange(len(text) - 1)[None]).hidden
        logprobs = jax.nn.log_softmax(model.head().logits(hidden))[0]
        return -jnp.take_along_axis(logprobs, text[1:, None], axis=1).sum()

    return loss


def test_gradients_are_those_of_merged_matrices_and_steps_those_of_adamw(client):
    training = client.create_lora_training_client(rank=2, seed=0)
    state, trainer = training._state, client.trainer
    rng = np.random.default_rng(0)
    state.factors = jax.tree.map(lambda each: each + rng.normal(0, 0.02, each.shape).astype(np.float32), state.factors)
    first, texts = state.factors, (TEXT, TEXT[::-1], [*TEXT, *TEXT, *TEXT])
    adam = AdamParams(learning_rate=0.01, weight_decay=0.1, eps=1e-8, grad_clip_norm=5.0)
    dense = dense_loss(client, training)
    moments = [jax.tree.map(np.zeros_like, jax.device_get(first)) for _ in range(2)]
    for step in (1, 2):
        losses, gradients = zip(*[dense(state.factors, jnp.asarray(text)) for text in texts], strict=True)
        expected = jax.tree.map(lambda *each: np.sum(each, axis=0), *gradients)
        output = trainer.forward_backward(state, [datum(each) for each in texts], "cross_entropy")
        assert output.metrics["loss:sum"] == pytest.approx(float(sum(losses)), rel=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-4), state.gradient, expected)
        before = jax.device_get(state.factors)
        norm = np.sqrt(sum(np.square(each).sum() for each in jax.tree.leaves(jax.device_get(state.gradient))))
        gradient = jax.tree.map(lambda each: np.asarray(each) * 5.0 / norm, state.gradient)  # noqa: B023, called here
        assert norm > 5 and trainer.optim_step(state, adam)["unclipped_grad_l2:mean"] == pytest.approx(norm, rel=1e-4)
        moments[0] = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], gradient)
        moments[1] = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, moments[1], gradient)

        def stepped(p, m, v, step=step):
            update = (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.95**step)) + 1e-8)
            return p * (1 - 0.01 * 0.1) - 0.01 * update

        after = jax.tree.map(stepped, before, *moments)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), jax.device_get(state.factors), after)
    assert state.steps == 2 and state.gradient is None


def test_weights_stay_until_their_replacement_is_complete(client, monkeypatch):
    old, new = (client.create_lora_training_client(rank=2, seed=seed, model_id="one") for seed in (0, 1))
    path = old.save_state("same").result()
    with pytest.raises(CheckpointError, match="exists already"):
        new.save_state("same").result()
    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", lambda *_, **__: (_ for _ in ()).throw(OSError("no space left on device")))
        with pytest.raises((ConversionError, OSError), match="no space left"):
            new.save_state("same", overwrite=True).result()

    def first_down(factors):
        return np.asarray(next(iter(factors.values()))["down"])

    assert (first_down(client.read(path, optimizer=True).factors) == first_down(old._state.factors)).all()
    assert new.save_state("same", overwrite=True).result() == path
    assert (first_down(client.read(path, optimizer=True).factors) == first_down(new._state.factors)).all()


@pytest.mark.slow
def test_a_client_learns_samples_and_continues_from_its_files(client):
    training, other = (client.create_lora_training_client(rank=rank, seed=rank) for rank in (4, 2))
    for _ in range(50):
        done = training.forward_backward([datum()], "cross_entropy")
        training.optim_step(AdamParams(learning_rate=0.01))
    assert done.result().metrics["loss:sum"] < 0.1
    sampler = training.save_weights_and_get_sampling_client()
    (found,) = sampler.sample([0], 1, SamplingParams(max_tokens=9, temperature=0.0)).result().sequences
    assert found.tokens == TEXT[1:] and found.stop_reason == "stop"
    logprobs = training.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
    np.testing.assert_allclose(found.logprobs, logprobs, atol=1e-5)
    # A custom loss: its value, and a gradient as of the named loss.
    custom = training.forward_backward_custom([datum()], lambda data, given: (-given[0].sum(), {"first": given[0][0]}))
    norm = training.optim_step().result()["unclipped_grad_l2:mean"]
    assert custom.result().metrics == pytest.approx({"loss:sum": -logprobs.sum(), "first": logprobs[0]}, rel=1e-5)
    path = training.save_state("first").result()
    again = client.create_training_client_from_state(path, optimizer=True)
    other.load_state(path)
    whole = [each.forward_backward([datum()], "cross_entropy").result().metrics for each in (training, again, other)]
    assert whole[0] == whole[1] == whole[2] and other.rank == 4 and norm > 0
    norms = [each.optim_step().result() for each in (training, again)]
    assert norms[0] == norms[1]
    moved = [each.forward([datum()], "cross_entropy").result().metrics for each in (training, again)]
    assert moved[0] == moved[1] != whole[0]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda of: of.create_lora_training_client(rank=9), ConfigError, "rank 9; the maximum is 4"),
        (lambda of: of.create_lora_training_client(2, train_attn=False, train_mlp=False), ConfigError, "Nothing"),
        (lambda of: of.create_training_client_from_state("tinker://no/weights/x"), CheckpointError, "no weights at"),
        (lambda of: of.create_training_client_from_state("../x"), CheckpointError, "is not a path of weights"),
        (lambda of: of.create_lora_training_client(2).optim_step().result(), TrainingError, "no gradient"),
        (lambda of: of.create_lora_training_client(2).forward_backward([], "ppo").result(), DataError, "got no data"),
    ],
)
def test_bad_calls_are_refused(client, call, error, message):
    with pytest.raises(error, match=message):
        call(client)
