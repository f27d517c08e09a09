"""Clients that ask while versions come and go."""

import collections
import threading
from collections.abc import Callable
from typing import Any

import httpx2
import numpy as np
import pytest

from ..bundle.digits import export, images, params, predict
from .conftest import Served

DOCUMENTED = {429, 503}


@pytest.mark.parametrize(("clients", "swaps"), [(4, 2), pytest.param(64, 20, marks=pytest.mark.slow)])
def test_requests_are_answered_through_swaps_and_no_answer_mixes_versions(
    serve: Callable[..., Served], clients: int, swaps: int
) -> None:
    served = serve()
    x = images(4)
    outputs = {version: np.asarray(predict(params(version), x)["probabilities"]) for version in range(2, swaps + 2)}
    outputs[1] = np.asarray(predict(params(0), x)["probabilities"])
    body = {"inputs": [{"name": "pixels", "datatype": "FP32", "shape": list(x.shape), "data": x.tolist()}]}
    statuses: collections.Counter[int] = collections.Counter()
    wrong: list[Any] = []
    versions: set[int] = set()
    done = threading.Event()

    def ask() -> None:
        with httpx2.Client(base_url=f"http://{served.address}", timeout=60) as client:
            while not done.is_set():
                answer = client.post("/v2/models/digits/infer", json=body)
                statuses[answer.status_code] += 1
                if answer.status_code != 200:
                    continue
                told = answer.json()
                found = np.reshape(told["outputs"][0]["data"], (4, 10))
                versions.add(int(told["model_version"]))
                if not np.allclose(found, outputs[int(told["model_version"])], atol=1e-5):
                    wrong.append(told)

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for version in range(2, swaps + 2):
        export(served.repository / "digits" / str(version), seed=version)
        served.wait_until(lambda version=version: version in versions)
    done.set()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert statuses.keys() <= {200, *DOCUMENTED}
    assert statuses[200] >= 0.99 * statuses.total()
    assert versions == set(range(1, swaps + 2))
