"""Text generation for the `sample` hook: one text file for each prompt."""

from pathlib import Path
from typing import Any, Protocol

import torch

from gen_worker.errors import SpecError
from gen_worker.pytorch.config import SampleSpec
from gen_worker.pytorch.model.names import import_reference
from gen_worker.trainer.contracts import SampleRequest


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: list[int]) -> str: ...


class Bytes:
    """UTF-8 bytes are the tokens."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


def find_tokenizer(spec: SampleSpec) -> Tokenizer:
    """`bytes`, or `module:symbol` of a class without arguments or an object."""
    if spec.tokenizer == "bytes":
        return Bytes()
    found, faults = import_reference("hyperparams.sample.tokenizer", spec.tokenizer)
    built: Any = found() if isinstance(found, type) else found
    if not faults and not all(callable(getattr(built, name, None)) for name in ("encode", "decode")):
        faults = [
            f"hyperparams.sample.tokenizer: {spec.tokenizer} has no `encode(text)` and `decode(tokens)`"
        ]
    if faults:
        raise SpecError("the tokenizer cannot be used", faults)
    tokenizer: Tokenizer = built
    return tokenizer


@torch.no_grad()
def generate(
    model: torch.nn.Module,
    tokens: list[int],
    *,
    spec: SampleSpec,
    context_length: int,
    device: str,
    seed: int | None,
) -> list[int]:
    """`tokens` and `spec.num_tokens` more. A temperature of 0 takes the most likely token."""
    generator = torch.Generator(device="cpu")
    generator.manual_seed(0 if seed is None else seed)
    found = list(tokens) or [0]
    for _ in range(spec.num_tokens):
        window = torch.tensor([found[-context_length:]], dtype=torch.int64, device=device)
        logits = model(window)[0, -1].float().cpu()
        if spec.temperature == 0:
            found.append(int(logits.argmax()))
            continue
        logits = logits / spec.temperature
        if spec.top_k is not None and spec.top_k < len(logits):
            smallest = logits.topk(spec.top_k).values[-1]
            logits = logits.masked_fill(logits < smallest, float("-inf"))
        found.append(int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
    return found


def write_samples(
    model: torch.nn.Module,
    request: SampleRequest,
    folder: str,
    *,
    spec: SampleSpec,
    tokenizer: Tokenizer,
    context_length: int,
    device: str,
) -> None:
    """Write one text file for each prompt, or one with an empty prompt."""
    training = model.training
    model.eval()
    try:
        for number, prompt in enumerate(request.prompts or ("",)):
            tokens = generate(
                model,
                tokenizer.encode(prompt),
                spec=spec,
                context_length=context_length,
                device=device,
                seed=request.seed,
            )
            Path(folder, f"{number:03d}.txt").write_text(tokenizer.decode(tokens), encoding="utf-8")
    finally:
        model.train(training)
