"""LitServe around a jitted function, batched by LitServe. Runs in a separate environment.

Usage: python litserve_jit.py MODEL PORT
"""

import sys

import jax
import litserve
import numpy as np

from inference.models import MODELS, SIZES

_WAIT_S = 0.001


class Api(litserve.LitAPI):
    """Joins rows up to the largest size, and pads them to a size that is compiled."""

    def setup(self, device: str) -> None:
        del device
        model = MODELS[sys.argv[1]]
        weights = jax.device_put(model.weights())

        @jax.jit
        def compute(weights: list[jax.Array], pixels: jax.Array) -> jax.Array:
            *hidden, last = weights
            for weight in hidden:
                pixels = jax.nn.relu(pixels @ weight)
            return pixels @ last

        self.compute = lambda pixels: np.asarray(compute(weights, pixels))
        for size in SIZES:
            self.compute(np.zeros((size, model.widths[0]), np.float32))

    def decode_request(self, request: dict[str, list[list[float]]]) -> np.ndarray:
        return np.array(request["pixels"][0], np.float32)

    def batch(self, inputs: list[np.ndarray]) -> tuple[np.ndarray, int]:
        size = next(size for size in SIZES if size >= len(inputs))
        rows = np.zeros((size, len(inputs[0])), np.float32)
        rows[: len(inputs)] = inputs
        return rows, len(inputs)

    def predict(self, x: tuple[np.ndarray, int]) -> np.ndarray:
        rows, count = x
        return self.compute(rows)[:count]

    def unbatch(self, output: np.ndarray) -> list[np.ndarray]:
        return list(output)

    def encode_response(self, output: np.ndarray) -> dict[str, list[list[float]]]:
        return {"logits": [output.tolist()]}


def main() -> None:
    api = Api(max_batch_size=SIZES[-1], batch_timeout=_WAIT_S)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1)
    server.run(host="127.0.0.1", port=int(sys.argv[2]), generate_client_file=False, log_level="warning")


if __name__ == "__main__":
    main()
