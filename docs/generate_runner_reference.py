"""Writes docs/runner-reference.md from the code: names, types and defaults are the code's, the meanings are here.

`python docs/generate_runner_reference.py` rewrites the page; with `--check` it only says whether the page is fresh.
A field without a meaning, or a meaning without a field, is an error.
"""

import json
import sys
import types
import typing
from pathlib import Path
from typing import Any

import msgspec

from gen_worker.pytorch.config import (
    AugmentSpec,
    CnnArgs,
    ColumnSpec,
    ColumnsSpec,
    CompileSpec,
    EmaSpec,
    ImageSpec,
    LossSpec,
    MetricSpec,
    MlpArgs,
    ModelSpec,
    NormalizeSpec,
    OptimizerSpec,
    RunnerConfig,
    SampleSpec,
    SchedulerSpec,
    TransformerLmArgs,
)

PAGE = Path(__file__).with_name("runner-reference.md")

HEAD = """# The runner's config, field by field

<!-- Made by docs/generate_runner_reference.py; change the meanings there. A test fails when this page is stale. -->

What the `hyperparams` of a job hold when its `trainer` is `gen_worker.pytorch_runner:PyTorchTrainer`. The other fields
of the file are those of [any job](job-reference.md); the [guide](pytorch-runner.md) shows them at work. Where a field
may be text or an object, the text is the object's first field: `loss: mse` is `loss: {name: mse}`.
"""

# (heading, path in the document, record), in the order of the page
SECTIONS: list[tuple[str, str, type[msgspec.Struct]]] = [
    ("hyperparams", "", RunnerConfig),
    ("model", "model.", ModelSpec),
    ("model.args of `mlp`", "mlp.", MlpArgs),
    ("model.args of `cnn`", "cnn.", CnnArgs),
    ("model.args of `transformer_lm`", "transformer_lm.", TransformerLmArgs),
    ("columns", "columns.", ColumnsSpec),
    ("A column: columns.inputs.NAME and columns.target", "column.", ColumnSpec),
    ("normalize", "normalize.", NormalizeSpec),
    ("image", "image.", ImageSpec),
    ("augment", "augment.", AugmentSpec),
    ("loss", "loss.", LossSpec),
    ("metrics.NAME", "metric.", MetricSpec),
    ("optimizer", "optimizer.", OptimizerSpec),
    ("scheduler", "scheduler.", SchedulerSpec),
    ("ema", "ema.", EmaSpec),
    ("compile", "compile.", CompileSpec),
    ("sample", "sample.", SampleSpec),
]

MEANINGS = {
    "model": "What is trained.",
    "columns": "Which columns the model sees, and which one the loss compares with.",
    "loss": "What is minimised.",
    "metrics": "What is measured on held-out data, by name: reported as `val/NAME` and `test/NAME`.",
    "optimizer": "How it is minimised.",
    "learning_rate": "The optimizer's rate, before the schedule.",
    "scheduler": "How the rate changes; constant where it is not given.",
    "gradient_accumulation": "Parts that a step's batch is split into, to fit memory; the result is that of the whole batch.",
    "gradient_clip_norm": "Scale gradients down to this norm.",
    "gradient_clip_value": "Clip each gradient to this value.",
    "ema": "Keep an average of the weights; it is what is validated, tested and sampled.",
    "freeze": "Patterns of parameter names (`encoder.*`) that are not trained.",
    "weights_strict": "`false` takes from the job's `weights` what fits by name and shape, and logs the rest.",
    "weights_from": "Which weights of a checkpoint of ours the job's `weights` means.",
    "strategy": "In several processes: a copy of the model in each, or a share.",
    "compile": "Compile the model: yes, a mode of `torch.compile`, or an object.",
    "channels_last": "Memory layout of pictures and convolutions; faster on some devices.",
    "threads": "Torch's threads on a CPU. Same bits need the same number.",
    "sample": "How the `sample` hook writes text; for models that are trained with `next_token`.",
    "model.type": "`mlp`, `cnn`, `transformer_lm`, or `module:symbol` of a class or function that returns a `torch.nn.Module`.",
    "model.args": "What it is built with.",
    "mlp.out_features": "Numbers that come out for a row.",
    "mlp.in_features": "Values in a row; taken from the column where it is not given.",
    "mlp.hidden": "Widths of the hidden layers.",
    "mlp.activation": "Between the layers.",
    "mlp.dropout": "After each hidden layer.",
    "cnn.out_features": "Numbers that come out for a picture.",
    "cnn.input_shape": "Channels, height and width; taken from the column where it is not given.",
    "cnn.channels": "Of each block of convolution, norm, ReLU and pooling by two.",
    "cnn.kernel_size": "Of each convolution.",
    "cnn.norm": "After each convolution.",
    "cnn.hidden": "Widths of the layers after the blocks.",
    "cnn.dropout": "After each of those.",
    "transformer_lm.vocab_size": "Number of tokens.",
    "transformer_lm.context_length": "Longest sequence; taken from the column where it is not given.",
    "transformer_lm.num_layers": "Blocks.",
    "transformer_lm.num_heads": "Attention heads; must divide `width`.",
    "transformer_lm.width": "Numbers per position.",
    "transformer_lm.mlp_ratio": "How much wider a block is inside.",
    "transformer_lm.dropout": "Everywhere.",
    "transformer_lm.tie_weights": "One matrix for embedding and output.",
    "columns.inputs": "What the model gets: one input as its argument, several by these names.",
    "columns.target": "What the loss compares with. Not for `next_token`, which makes it from the input.",
    "column.column": "Name in the data; for an input, its own name where it is not given.",
    "column.dtype": "Type of the tensor. By itself: `int64` for whole numbers, `float32` for all that is scaled or not whole.",
    "column.shape": "Of a row, such as `[1, 28, 28]`; needed for lists whose type leaves the length open.",
    "column.scale": "Factor; 1/255 for pictures.",
    "column.normalize": "Subtract a mean and divide by a deviation, after `scale`.",
    "column.image": "The column holds pictures: bytes of PNG, JPEG and so on, or records with a field `bytes`.",
    "column.augment": "Change the pictures at random while training; held-out data stays as it is.",
    "column.one_hot": "Number of classes: a 1 at the class, zeros elsewhere.",
    "column.sequence_length": "For lists of token ids: cut or pad each row to this length. `next_token` feeds all but the last token.",
    "column.pad_id": "The token that fills up. No real token may have it; `next_token` never counts it.",
    "augment.crop_padding": "Pad each side with this many black pixels, then crop the original size at a random position.",
    "augment.horizontal_flip": "Probability to mirror a picture left to right; usually 0.5.",
    "augment.brightness": "Multiply by a factor between 1 - this and 1 + this.",
    "augment.contrast": "Move each pixel from or to the picture's mean, by such a factor.",
    "augment.erase": "Probability to blacken a rectangle of 2 to 33 % of the area.",
    "normalize.mean": "One number, or one for each channel.",
    "normalize.std": "One number, or one for each channel.",
    "image.size": "Height and width; pictures of another size are resized.",
    "image.mode": "One channel or three.",
    "image.threads": "That decode a batch together.",
    "loss.name": "`next_token`; a function or class of `torch.nn` on (output, target), with or without its `_loss`; or `module:symbol`.",
    "loss.args": "Its arguments; lists become tensors where it takes `weight` or `pos_weight`.",
    "metric.type": "A class of torchmetrics, or `module:symbol` of one with `update`, `compute`, `reset` and `to`.",
    "metric.args": "Its arguments.",
    "optimizer.name": "A class of `torch.optim`, but not `LBFGS`.",
    "optimizer.args": "Its arguments, without `lr`.",
    "optimizer.no_weight_decay": "Patterns of parameter names without weight decay; `auto`: all vectors, which are biases and norms.",
    "scheduler.name": "`warmup_cosine` (with `warmup_steps`, `total_steps`, `min_lr_ratio`), or a class of `torch.optim.lr_scheduler`, but not `ReduceLROnPlateau`.",
    "scheduler.args": "Its arguments; `lr_lambda` as `module:symbol`. `total_steps` of `warmup_cosine` is the job's length by itself.",
    "scheduler.every": "When it is stepped.",
    "scheduler.schedulers": "The parts of a `SequentialLR` or `ChainedScheduler`.",
    "ema.decay": "What is kept of the average at each update.",
    "ema.every": "Steps between updates.",
    "compile.mode": "Of `torch.compile`.",
    "compile.backend": "Of `torch.compile`.",
    "compile.dynamic": "Of `torch.compile`. With `false` the kernels do not depend on the batches seen so far, so a resume is exact.",
    "compile.fullgraph": "Of `torch.compile`.",
    "sample.num_tokens": "To add to a prompt.",
    "sample.temperature": "0 always takes the likeliest.",
    "sample.top_k": "Sample from the N most likely tokens.",
    "sample.tokenizer": "`bytes`, or `module:symbol` with `encode(text)` and `decode(tokens)`.",
}

_PLAIN = {int: "int", float: "number", str: "text", bool: "bool", Any: "any"}


def type_in_words(hint: Any) -> str:
    """A type as an author would say it."""
    words = []
    for item in _union(hint):
        origin, arguments = typing.get_origin(item), typing.get_args(item)
        if item is type(None):
            words.append("null")
        elif origin is typing.Annotated:
            words.append(type_in_words(arguments[0]) + _bounds(arguments[1:]))
        elif origin is typing.Literal:
            words += [f"`{json.dumps(value)}`" for value in arguments]
        elif origin is list:
            words.append(f"list of {type_in_words(arguments[0])}")
        elif origin is dict or (isinstance(item, type) and issubclass(item, msgspec.Struct)):
            words.append("object")
        else:
            words.append(_PLAIN[item])
    return " or ".join(dict.fromkeys(words))


def _union(hint: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def _bounds(annotations: tuple[Any, ...]) -> str:
    signs = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
    found = [
        f"{sign} {getattr(meta, name)}"
        for meta in annotations
        for name, sign in signs
        if getattr(meta, name) is not None
    ]
    return f" {' and '.join(found)}" if found else ""


def _default_in_words(field: msgspec.structs.FieldInfo) -> str:
    default = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    if default is msgspec.NODEFAULT:
        return "required"
    if isinstance(default, msgspec.Struct):
        return ""
    return f"`{json.dumps(default)}`"


def build_page() -> str:
    paths = {
        prefix + field.name for _, prefix, record in SECTIONS for field in msgspec.structs.fields(record)
    }
    if paths != MEANINGS.keys():
        raise SystemExit(
            f"meanings missing for {sorted(paths - MEANINGS.keys())}, meanings of no field {sorted(MEANINGS.keys() - paths)}"
        )
    lines = []
    for heading, prefix, record in SECTIONS:
        lines += ["", f"## {heading}", "", "| field | type | default | meaning |", "|---|---|---|---|"]
        for field in msgspec.structs.fields(record):
            words = type_in_words(field.type).replace("|", "\\|")
            lines.append(
                f"| `{field.name}` | {words} | {_default_in_words(field)} | {MEANINGS[prefix + field.name]} |"
            )
    return HEAD + "\n".join(lines) + "\n"


def main() -> int:
    page = build_page()
    if "--check" in sys.argv[1:]:
        return 0 if PAGE.exists() and PAGE.read_text() == page else 1
    PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
