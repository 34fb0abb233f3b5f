"""LitServe with the model of the others. `python inference_litserve.py PORT OPTIONS` serves until it is ended.

A module of its own: LitServe's processes import the class that they are given.
"""

import json
import sys
import time
from typing import Any

import litserve as ls
import torch

from inference_work import SMALL, make_model


class Mlp(ls.LitAPI):  # type: ignore[misc]
    delay_s = 0.0  # of a batch

    def setup(self, device: str) -> None:
        torch.set_num_threads(1)
        self.model = make_model(SMALL)

    def decode_request(self, request: dict[str, Any], **_: Any) -> Any:
        return request["rows"][0]["x"]

    def batch(self, inputs: list[Any]) -> Any:
        return torch.tensor(inputs)

    def predict(self, x: Any, **_: Any) -> Any:
        if self.delay_s:
            time.sleep(self.delay_s)
        with torch.inference_mode():
            return self.model(x if isinstance(x, torch.Tensor) else torch.tensor([x]))

    def unbatch(self, output: Any) -> Any:
        return list(output)

    def encode_response(self, output: Any, **_: Any) -> Any:
        return {"rows": [{"logits": output.reshape(-1).tolist()}]}


if __name__ == "__main__":
    options = json.loads(sys.argv[2])
    api = Mlp(**({"max_batch_size": 32, "batch_timeout": 0.005} if options["is_batched"] else {}))
    api.delay_s = options.get("delay_s", 0.0)
    server = ls.LitServer(api, accelerator="cpu", timeout=False)
    server.run(host="127.0.0.1", port=int(sys.argv[1]), log_level="error", generate_client_file=False)
