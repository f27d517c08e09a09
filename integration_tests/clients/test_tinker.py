"""The unmodified tinker SDK against `stack rl serve`: training, sampling, saved weights, several clients, errors."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ..served import VOCAB, write_checkpoint

pytestmark = [
    pytest.mark.clients("tinker", "torch"),
    pytest.mark.filterwarnings("default"),  # warnings of the SDK are not errors of the server
]
KEY = "tml-of-the-test"
END = 1


class TinkerServer:
    """`stack rl serve` of a tiny Llama."""

    def __init__(self, folder: Path, model: Path, *options: str) -> None:
        command = [
            *(sys.executable, "-m", "stack_core", "rl", "serve", str(model), "--port", "0", "--json"),
            *("--output", str(folder / "weights"), "--max-rank", "8", "--api-key", KEY, *options),
        ]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stdout is not None and self.process.stderr is not None
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        found = json.loads(line)
        self.address, self.model = found["address"], found["model"]

    def service(self, key: str = KEY) -> Any:
        import tinker

        return tinker.ServiceClient(base_url=self.address, api_key=key)

    def trainer(self, **options: Any) -> Any:
        return self.service().create_lora_training_client(self.model, rank=4, **options).result()

    def stop(self) -> str:
        self.process.send_signal(signal.SIGTERM)
        _, errors = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, errors
        return errors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tinker")
    (folder / "model").mkdir()
    write_checkpoint(folder / "model")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[TinkerServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_TELEMETRY", "0")
        server = TinkerServer(folder, folder / "model")
        yield server
        assert "Traceback" not in server.stop()
        gc.collect()  # connections that the SDK left open, while its warnings are no errors


def datum(text: list[int], **inputs: Any) -> Any:
    from tinker import types

    given = inputs or {"weights": [1.0] * (len(text) - 1)}
    arrays: dict[str, Any] = {name: np.asarray(value, np.float32) for name, value in given.items()}
    arrays["target_tokens"] = np.asarray(text[1:], np.int64)
    return types.Datum(model_input=types.ModelInput.from_ints(text[:-1]), loss_fn_inputs=arrays)


def adam(learning_rate: float = 0.01) -> Any:
    from tinker import types

    return types.AdamParams(learning_rate=learning_rate)


def prompt(tokens: list[int]) -> Any:
    from tinker import types

    return types.ModelInput.from_ints(tokens)


def sampling(**options: Any) -> Any:
    from tinker import types

    return types.SamplingParams(**options)


def learn(trainer: Any, text: list[int], steps: int) -> float:
    """Trains on one text, with all requests in flight at once, and returns the last loss."""
    losses = []
    for _ in range(steps):
        losses.append(trainer.forward_backward([datum(text)], "cross_entropy"))
        trainer.optim_step(adam())
    return losses[-1].result().metrics["loss:sum"]


def greedy(sampler: Any, first: list[int], **options: Any) -> list[int]:
    found = sampler.sample(prompt(first), 1, sampling(temperature=0.0, max_tokens=8, **options)).result()
    return list(found.sequences[0].tokens)


def test_supervised_training_is_learned_and_sampled(server: TinkerServer) -> None:
    trainer, text = server.trainer(seed=0), [0, 5, 6, 7, 8, 9, END]
    info = trainer.get_info()
    assert (info.model_name, info.is_lora, info.lora_rank) == (server.model, True, 4)
    assert learn(trainer, text, 60) < 0.1
    sampler = trainer.save_weights_and_get_sampling_client().result()
    assert greedy(sampler, [0]) == text[1:]
    assert greedy(sampler, [0], stop=[7]) == [5, 6, 7] and len(greedy(sampler, [0], stop=[])) == 8
    found = sampler.sample(prompt([0]), 3, sampling(max_tokens=8), topk_sample_logprobs=2).result().sequences
    assert [list(each.tokens) for each in found] == [text[1:]] * 3 and {each.stop_reason for each in found} == {"stop"}
    assert len({each.sequence_id for each in found}) == 3 and found[0].topk_logprobs_np.token_ids[0, 0] == 5
    # Sampler and trainer agree on the log-probabilities, of the answer and of the prompt.
    trained = trainer.forward([datum(text)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    np.testing.assert_allclose(found[0].logprobs, trained, atol=1e-5)
    of_prompt = sampler.compute_logprobs(prompt(text)).result()
    assert of_prompt[0] is None
    np.testing.assert_allclose(of_prompt[1:], trained, atol=1e-5)
    # The base has not changed.
    base = server.service().create_sampling_client(base_model=server.model).result()
    assert greedy(base, [0]) != text[1:]


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo"])
def test_samples_with_a_reward_are_reinforced(server: TinkerServer, loss: str) -> None:
    """The reward is the fraction of tokens in the first half of the vocabulary."""
    trainer, rewards, norms = server.trainer(seed=1), [], []
    for _ in range(12):
        sampler = trainer.save_weights_and_get_sampling_client().result()
        found = sampler.sample(prompt([0]), 32, sampling(max_tokens=4, stop=[], temperature=1.0)).result().sequences
        scores = np.array([np.mean(np.asarray(each.tokens) < VOCAB // 2) for each in found])
        rewards.append(scores.mean())
        data = [
            datum([0, *each.tokens], logprobs=each.logprobs, advantages=[score - scores.mean()] * len(each.tokens))
            for each, score in zip(found, scores, strict=True)
        ]
        done, step = trainer.forward_backward(data, loss), trainer.optim_step(adam(0.02))
        of_trainer = np.concatenate([each["logprobs"].to_numpy() for each in done.result().loss_fn_outputs])
        np.testing.assert_allclose(of_trainer, np.concatenate([each.logprobs for each in found]), atol=1e-4)
        norms.append(step.result().metrics["unclipped_grad_l2:mean"])
    assert norms[0] > 0 and np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.15, rewards


def test_a_custom_loss_has_the_gradient_of_the_named_one(server: TinkerServer) -> None:
    text, weights = [0, 5, 6, 7], [0.5, 1.0, 2.0]
    named, custom = server.trainer(seed=2), server.trainer(seed=2)

    def loss_fn(data: Any, logprobs: Any) -> Any:
        import torch

        assert logprobs[0].requires_grad
        loss = -(logprobs[0] * torch.tensor(weights)).sum()
        return loss, {"half:sum": loss.item() / 2}

    first = named.forward_backward([datum(text, weights=weights)], "cross_entropy").result()
    second = custom.forward_backward_custom([datum(text, weights=weights)], loss_fn).result()
    assert second.metrics["loss:sum"] == pytest.approx(first.metrics["loss:sum"], rel=1e-5)
    assert second.metrics["half:sum"] == pytest.approx(first.metrics["loss:sum"] / 2, rel=1e-5)
    norms = [each.optim_step(adam()).result().metrics["unclipped_grad_l2:mean"] for each in (named, custom)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    losses = [each.forward([datum(text)], "cross_entropy").result().metrics["loss:sum"] for each in (named, custom)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_gradients_of_several_calls_add_up(server: TinkerServer) -> None:
    texts = [[0, 5, 6, 7], [0, 9, 8, 7, 6, 5, 4]]
    together, apart = server.trainer(seed=3), server.trainer(seed=3)
    together.forward_backward([datum(each) for each in texts], "cross_entropy")
    for each in texts:
        apart.forward_backward([datum(each)], "cross_entropy")
    steps = [each.optim_step(adam()) for each in (together, apart)]
    norms = [each.result().metrics["unclipped_grad_l2:mean"] for each in steps]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_saved_states_continue_as_if_nothing_had_happened(server: TinkerServer) -> None:
    service, text = server.service(), [0, 5, 6, 7, END]
    trainer = service.create_lora_training_client(server.model, rank=4, seed=4).result()
    learn(trainer, text, 3)
    path = trainer.save_state("third").result().path
    restored = service.create_training_client_from_state_with_optimizer(path).result()
    without = service.create_training_client_from_state(path).result()
    later = [learn(each, text, 4) for each in (trainer, restored, without)]
    assert later[0] == later[1] != later[2]
    with pytest.raises(Exception, match="exists already"):
        trainer.save_state("third").result()
    assert trainer.save_state("third", overwrite=True).result().path == path
    sampled = trainer.save_weights_for_sampler("last").result().path
    of_file = service.create_sampling_client(model_path=sampled).result().compute_logprobs(prompt(text)).result()
    live = trainer.save_weights_and_get_sampling_client().result().compute_logprobs(prompt(text)).result()
    assert of_file == live


def test_clients_at_the_same_time_have_their_own_adapters(server: TinkerServer) -> None:
    texts = [[0, 10 * number, 10 * number + 1, 10 * number + 2, END] for number in range(1, 5)]
    found: dict[int, list[int]] = {}

    def client(number: int) -> None:
        trainer = server.trainer(seed=number)
        learn(trainer, texts[number], 60)
        found[number] = greedy(trainer.save_weights_and_get_sampling_client().result(), [0])

    threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(timeout=300)
    assert found == {number: text[1:] for number, text in enumerate(texts)}


def test_samplers_keep_their_weights_while_training_goes_on(server: TinkerServer) -> None:
    trainer, text = server.trainer(seed=5), [0, 5, 6, 7, END]
    before = trainer.save_weights_and_get_sampling_client().result()
    first = greedy(before, [0])
    learn(trainer, text, 60)
    after = trainer.save_weights_and_get_sampling_client().result()
    assert greedy(before, [0]) == first != text[1:] == greedy(after, [0])


def test_what_is_wrong_is_named(server: TinkerServer) -> None:
    service = server.service()
    trainer = service.create_lora_training_client(server.model, rank=4).result()
    text = [0, 5, 6]
    for call, message in (
        (lambda: service.create_lora_training_client("llama-9", rank=4).result(), "no model 'llama-9'"),
        (lambda: service.create_lora_training_client(server.model, rank=64).result(), "the maximum is 8"),
        (lambda: trainer.forward_backward([datum(text)], "gspo").result(), "no loss 'gspo'.*Known: cross_entropy"),
        (lambda: trainer.forward_backward([datum(text)], "ppo").result(), "no logprobs and no advantages"),
        (
            lambda: trainer.forward_backward([datum([0, VOCAB + 9])], "cross_entropy").result(),
            "target_tokens has token",
        ),
        (lambda: trainer.forward_backward([datum(text)], "cross_entropy", {"x": 1.0}).result(), "has no settings"),
        (lambda: trainer.optim_step(adam()).result(), "found no gradient"),
        (lambda: trainer.save_state("../up").result(), "is not a name"),
        (lambda: service.create_sampling_client(model_path="tinker://x/weights/y").result(), "no weights at"),
        (lambda: service.create_training_client_from_state("tinker://x/weights/y").result(), "no weights at"),
        (lambda: server.service("tml-another").create_lora_training_client(server.model).result(), "API key"),
    ):
        with pytest.raises(Exception, match=message):
            call()
    # The client goes on after an error.
    assert trainer.forward_backward([datum(text)], "cross_entropy").result().metrics["loss:sum"] > 0
    sampler = service.create_sampling_client(base_model=server.model).result()
    with pytest.raises(Exception, match="maximum"):
        sampler.sample(prompt([0] * 600), 1, sampling(max_tokens=4)).result()
