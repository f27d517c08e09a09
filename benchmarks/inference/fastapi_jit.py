"""FastAPI around a jitted function, which each request calls once. Runs in a separate environment.

Usage: python fastapi_jit.py MODEL PORT
"""

import sys

import jax
import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

from inference.models import MODELS


class Rows(BaseModel):
    """A request in JSON."""

    pixels: list[list[float]]


def main() -> None:
    model = MODELS[sys.argv[1]]
    weights = jax.device_put(model.weights())

    @jax.jit
    def compute(weights: list[jax.Array], pixels: jax.Array) -> jax.Array:
        *hidden, last = weights
        for weight in hidden:
            pixels = jax.nn.relu(pixels @ weight)
        return pixels @ last

    np.asarray(compute(weights, model.pixels()))
    app = FastAPI()

    # On the event loop: a thread for each call costs more than a call of the small model, and there is one device.
    @app.post("/json")
    async def of_json(rows: Rows) -> dict[str, list[list[float]]]:
        return {"logits": np.asarray(compute(weights, np.array(rows.pixels, np.float32))).tolist()}

    @app.post("/binary")
    async def of_bytes(request: Request) -> Response:
        pixels = np.frombuffer(await request.body(), np.float32).reshape(-1, model.widths[0])
        return Response(np.asarray(compute(weights, pixels)).tobytes(), media_type="application/octet-stream")

    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")


if __name__ == "__main__":
    main()
