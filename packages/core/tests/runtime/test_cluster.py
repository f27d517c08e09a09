"""One driver that trains on a mesh of processes and generates on another, and loses processes of either."""

import os
import signal

import numpy as np
import pytest

from stack_core.abi.errors import ArgumentError, ClusterError, FormationLost
from stack_core.runtime.cluster import Cluster
from stack_core.runtime.config import ClusterConfig
from stack_core.runtime.remote import RemoteArray, get, remote

VOCAB, STEPS, SAVES_EVERY = 16, 6, 2


@pytest.fixture
def cluster(bench):
    config = ClusterConfig(hosts=3, start_s=120.0, silence_s=10.0, orphan_s=1.0)
    with Cluster.connect(config) as cluster:
        yield cluster
    bench.wait_until_gone()


def programs(training, generation):
    """A step of a table of bigrams, and greedy generation from it."""
    import jax
    import jax.numpy as jnp

    @remote(training, donate_argnums=(0,))
    def step(table, tokens):
        def loss(table):
            logprobs = jax.nn.log_softmax(table[tokens[:, :-1]])
            return -jnp.mean(jnp.take_along_axis(logprobs, tokens[:, 1:, None], -1))

        value, gradient = jax.value_and_grad(loss)(table)
        return table - 5.0 * gradient, {"loss": value}

    @remote(generation)
    def generate(table, first):
        def next_token(token, _):
            token = jnp.argmax(table[token], -1)
            return token, token

        return jax.lax.scan(next_token, first, length=8)[1]

    return step, generate


def batch(number):
    starts = np.random.default_rng(number).integers(0, VOCAB, size=(4, 1))
    return ((starts + np.arange(9)) % VOCAB).astype("i4")  # each token is followed by the next number


def drive(training, generation, disturb=lambda step: None):
    """Trains, hands the weights over and generates after each step, through lost formations."""
    step_of, generate = programs(training, generation)
    saved, texts = (0, np.zeros((VOCAB, VOCAB), "f4")), {}
    held, number, losses = None, 0, 0
    while number < STEPS:
        try:
            if held is None:
                number, held = saved[0], training.put(saved[1])
            held, metrics = step_of(held, training.put(batch(number), ("data",)))
            number += 1
            disturb(number)
            weights = held.reshard(generation)
            texts[number] = generate(weights, generation.put(np.int32(3))).get().tolist()
            assert np.isfinite(metrics["loss"].get())
            if number % SAVES_EVERY == 0:
                saved = (number, get(held))
        except FormationLost:
            losses += 1
            held = None
            for mesh in (training, generation):
                if not mesh.alive:
                    mesh.form()
    return get(held), texts, losses


def kill_at(mesh, step, rank=0, number=signal.SIGKILL):
    struck = []

    def disturb(now):
        if now == step and not struck:
            struck.append(mesh.pids[rank])
            os.kill(mesh.pids[rank], number)

    return disturb


def test_a_driver_of_two_meshes_goes_on_when_a_process_of_either_is_killed(cluster):
    training, generation = cluster.mesh({"data": 2}, hosts=2), cluster.mesh({"data": 1}, hosts=1)
    table, texts, losses = drive(training, generation)
    assert losses == 0 and sorted(texts) == list(range(1, STEPS + 1)) and texts[STEPS][:3] == [4, 5, 6]
    for mesh, rank in ((training, 1), (generation, 0)):
        again, texts_again, losses = drive(training, generation, kill_at(mesh, 4, rank))
        assert losses == 1 and texts_again == texts
        np.testing.assert_array_equal(again, table)

    stale = training.put(np.ones(3, "f4"))
    training.form()
    with pytest.raises(FormationLost, match="is gone: its mesh has formation"):
        stale.get()
    with pytest.raises(ArgumentError, match="on another mesh"):
        programs(training, generation)[1](training.put(table), 3)
    with pytest.raises(ClusterError, match=r"formation needs 1 hosts, but 0 are free"):
        cluster.mesh({"data": 1}, hosts=1)

    @remote(training)
    def broken(x):
        import jax

        return jax.pure_callback(lambda value: 1 / 0, x, x)

    failed = broken(training.put(np.float32(1)))
    with pytest.raises(ClusterError, match=r"(?s)Rank \d of RemoteMesh.*ZeroDivisionError"):
        failed.get()

    training.close()
    with pytest.raises(
        ClusterError, match=r"data 8 does not fit the 2 devices of its 2 hosts \(host 0: 1, host 1: 1\)"
    ):
        cluster.mesh({"data": 8}, hosts=2)
    assert isinstance(generation.put(table), RemoteArray)
