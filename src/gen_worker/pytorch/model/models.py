"""Shipped models: an MLP, a CNN and a decoder-only transformer."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from gen_worker.errors import SpecError
from gen_worker.pytorch.config import CnnArgs, MlpArgs, TransformerLmArgs

Shape = tuple[int, ...]

_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
}
_INIT_STD = 0.02


def build_mlp(args: MlpArgs, row_shape: Shape | None) -> nn.Module:
    """Rows of any shape, flattened, to `out_features` values."""
    features = args.in_features or (None if row_shape is None else math.prod(row_shape))
    if features is None:
        raise _underived("in_features", "the number of values in a row")
    layers: list[nn.Module] = [nn.Flatten()]
    for width in args.hidden:
        layers += [nn.Linear(features, width), _ACTIVATIONS[args.activation]()]
        if args.dropout:
            layers.append(nn.Dropout(args.dropout))
        features = width
    return Mlp(*layers, nn.Linear(features, args.out_features))


class Mlp(nn.Sequential):
    """Concatenates several inputs to one row of values, in the order of the config."""

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        values = [*inputs, *named.values()]
        if len(values) == 1 and values[0].ndim > 1:
            return self._through(values[0])
        rows = [value.reshape(len(value), -1).to(torch.get_default_dtype()) for value in values]
        return self._through(torch.cat(rows, dim=1))

    def _through(self, rows: Tensor) -> Tensor:
        for layer in self:
            rows = layer(rows)
        return rows


def build_cnn(args: CnnArgs, row_shape: Shape | None) -> nn.Module:
    """Blocks of convolution, norm, ReLU and pooling by two, then a small MLP."""
    shape = tuple(args.input_shape or row_shape or ())
    if not shape:
        raise _underived("input_shape", "[channels, height, width]")
    if len(shape) != 3:
        raise SpecError(
            "the model cannot be built",
            [f"hyperparams.model: cnn takes rows of channels, height and width, found {_words(shape)}"],
        )
    channels, height, width = shape
    layers: list[nn.Module] = []
    for size in args.channels:
        if min(height, width) < 2:
            raise SpecError(
                "the model cannot be built",
                [
                    f"hyperparams.model.args.channels: found {len(args.channels)} blocks, too many for {_words(shape)},"
                    " which each block halves: use fewer blocks or larger images"
                ],
            )
        has_bias = args.norm == "none"
        layers.append(nn.Conv2d(channels, size, args.kernel_size, padding="same", bias=has_bias))
        if args.norm == "batch":
            layers.append(nn.BatchNorm2d(size))
        elif args.norm == "group":
            layers.append(nn.GroupNorm(math.gcd(8, size), size))
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
        channels, height, width = size, height // 2, width // 2
    head = MlpArgs(
        in_features=channels * height * width,
        hidden=args.hidden,
        out_features=args.out_features,
        dropout=args.dropout,
    )
    return nn.Sequential(*layers, build_mlp(head, None))


def build_transformer_lm(args: TransformerLmArgs, row_shape: Shape | None) -> nn.Module:
    """Token ids (rows, positions) to logits (rows, positions, vocabulary)."""
    length = args.context_length
    if length is None and row_shape is not None and len(row_shape) == 1:
        length = row_shape[0]
    if length is None:
        raise _underived("context_length", "the longest sequence")
    if args.width % args.num_heads:
        raise SpecError(
            "the model cannot be built",
            [
                f"hyperparams.model.args.num_heads: found {args.num_heads}, expected a divisor of `width` {args.width}"
            ],
        )
    return TransformerLm(args, length)


class TransformerLm(nn.Module):
    """Decoder-only, pre-norm, learned positions, output weights tied to the embedding."""

    def __init__(self, args: TransformerLmArgs, context_length: int) -> None:
        super().__init__()
        self.context_length = context_length
        self.tokens = nn.Embedding(args.vocab_size, args.width)
        self.positions = nn.Embedding(context_length, args.width)
        self.dropout = nn.Dropout(args.dropout)
        self.blocks = nn.ModuleList(Block(args) for _ in range(args.num_layers))
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, args.vocab_size, bias=False)
        self.apply(_init_weights)
        # The sum on the residual stream grows with the depth: scale its initial weights down.
        for name, parameter in self.named_parameters():
            if name.endswith(("attention.out.weight", "mlp.2.weight")):
                nn.init.normal_(parameter, std=_INIT_STD / math.sqrt(2 * args.num_layers))
        if args.tie_weights:
            self.head.weight = self.tokens.weight
        self.register_buffer("numbers", torch.arange(context_length), persistent=False)
        self.numbers: Tensor

    def forward(self, tokens: Tensor) -> Tensor:
        stream = self.dropout(self.tokens(tokens) + self.positions(self.numbers[: tokens.shape[1]]))
        for block in self.blocks:
            stream = block(stream)
        logits: Tensor = self.head(self.norm(stream))
        return logits


class Block(nn.Module):
    def __init__(self, args: TransformerLmArgs) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(args.width)
        self.attention = CausalAttention(args)
        self.norm_2 = nn.LayerNorm(args.width)
        inner = args.width * args.mlp_ratio
        self.mlp = nn.Sequential(
            nn.Linear(args.width, inner), nn.GELU(), nn.Linear(inner, args.width), nn.Dropout(args.dropout)
        )

    def forward(self, stream: Tensor) -> Tensor:
        stream = stream + self.attention(self.norm_1(stream))
        grown: Tensor = stream + self.mlp(self.norm_2(stream))
        return grown


class CausalAttention(nn.Module):
    def __init__(self, args: TransformerLmArgs) -> None:
        super().__init__()
        self.num_heads = args.num_heads
        self.rate = args.dropout
        self.inputs = nn.Linear(args.width, 3 * args.width)
        self.out = nn.Linear(args.width, args.width)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, stream: Tensor) -> Tensor:
        rows, length, width = stream.shape
        split = self.inputs(stream).view(rows, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=self.rate if self.training else 0.0
        )
        found: Tensor = self.dropout(self.out(mixed.transpose(1, 2).reshape(rows, length, width)))
        return found


def _init_weights(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=_INIT_STD)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def _underived(name: str, meaning: str) -> SpecError:
    return SpecError(
        "the model cannot be built",
        [f"hyperparams.model.args.{name}: missing, and unknown from the columns: set it to {meaning}"],
    )


def _words(shape: Sequence[int]) -> str:
    return f"rows of shape {list(shape)}"
