"""The servers that stand beside ours, and a process without one. `python inference_peers.py NAME PORT` runs until it is ended."""

import json
import signal
import sys
from typing import Any


def hello(port: int) -> None:
    """uvicorn alone: the shortest answer that an ASGI application can give."""
    import uvicorn

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/plain"), (b"content-length", b"5")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"hello"})

    uvicorn.run(
        app, host="127.0.0.1", port=port, log_level="error", access_log=False, lifespan="off", loop="uvloop"
    )


def fastapi(port: int) -> None:
    import torch
    import uvicorn
    from fastapi import FastAPI
    from pydantic import BaseModel

    from inference_work import SMALL, make_model

    class Row(BaseModel):
        x: list[float]

    class Body(BaseModel):
        rows: list[Row]

    torch.set_num_threads(1)
    model = make_model(SMALL)
    app = FastAPI()

    @app.post("/predict")
    def predict(body: Body) -> dict[str, Any]:
        with torch.inference_mode():
            output = model(torch.tensor([row.x for row in body.rows]))
        return {"rows": [{"logits": row} for row in output.tolist()]}

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error", access_log=False)


def bare(_port: int) -> None:
    """No server: a process that has the model in memory, and has called it."""
    import torch

    from inference_work import SMALL, make_model

    torch.set_num_threads(1)
    model = make_model(SMALL)
    with torch.inference_mode():
        model(torch.zeros(1, SMALL))
    print(json.dumps({"port": 0}), flush=True)
    signal.pause()


if __name__ == "__main__":
    {"hello": hello, "fastapi": fastapi, "bare": bare}[sys.argv[1]](int(sys.argv[2]))
