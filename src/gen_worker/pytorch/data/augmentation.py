"""Random changes of pictures while training: crop, flip, brightness, contrast, erase. Torch only.

What happens to a picture follows from the run's seed, the step, the process and the picture's place in the batch. So a
resumed run sees what an uninterrupted one would have seen, and no other random stream is touched.
"""

import hashlib
import math

import torch

from gen_worker.pytorch.config import AugmentSpec

MAX_PIXEL = 255
ERASED_SHARE = (0.02, 0.33)  # of a picture's area
ERASED_ASPECT = (0.3, 3.3)  # height to width
# What is drawn for each picture, always all of it: a setting that changes leaves the others as they were.
_DRAWS = (
    "top",
    "left",
    "flip",
    "brightness",
    "contrast",
    "erase",
    "share",
    "aspect",
    "erase_top",
    "erase_left",
)


class Augmentation:
    """Changes a batch of pictures (rows, channels, height, width), of uint8 where brightness or contrast are asked for.

    The batch itself stays as it is.
    """

    def __init__(self, spec: AugmentSpec) -> None:
        self._spec = spec

    def __call__(self, pictures: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        if len(pictures) == 0:
            return pictures
        numbers = torch.rand((len(pictures), len(_DRAWS)), generator=generator, dtype=torch.float64)
        drawn = dict(zip(_DRAWS, numbers.unbind(1), strict=True))
        spec = self._spec
        if spec.crop_padding:
            pictures = _crop(pictures, spec.crop_padding, drawn["top"], drawn["left"])
        if spec.horizontal_flip:
            is_flipped = (drawn["flip"] < spec.horizontal_flip).view(-1, 1, 1, 1)
            pictures = torch.where(is_flipped, pictures.flip(-1), pictures)
        if spec.brightness or spec.contrast:
            pictures = _change_light(pictures, spec, drawn["brightness"], drawn["contrast"])
        if spec.erase:
            pictures = _erase(pictures, spec.erase, drawn)
        return pictures


def step_generator(seed: int, *, step: int, rank: int) -> torch.Generator:
    """The random numbers of one step in one process."""
    digest = hashlib.blake2b(f"augment/{seed}/{rank}/{step}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def _crop(pictures: torch.Tensor, padding: int, top: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    """Pad with black, and cut the size that it was, somewhere."""
    height, width = pictures.shape[-2:]
    padded = torch.nn.functional.pad(pictures, (padding,) * 4)
    places = [(place * (2 * padding + 1)).long().tolist() for place in (top, left)]
    cut = torch.empty_like(pictures, memory_format=torch.contiguous_format)
    for number, (y, x) in enumerate(zip(*places, strict=True)):
        cut[number] = padded[number, :, y : y + height, x : x + width]
    return cut


def _change_light(
    pictures: torch.Tensor, spec: AugmentSpec, brightness: torch.Tensor, contrast: torch.Tensor
) -> torch.Tensor:
    values = pictures.to(torch.float32)
    if spec.brightness:
        values = values * _factor(brightness, spec.brightness)
    if spec.contrast:
        values = values.clamp(0, MAX_PIXEL)
        mean = values.mean(dim=(1, 2, 3), keepdim=True)
        values = mean + (values - mean) * _factor(contrast, spec.contrast)
    return values.round().clamp(0, MAX_PIXEL).to(pictures.dtype)


def _factor(drawn: torch.Tensor, amount: float) -> torch.Tensor:
    """From 1 - amount to 1 + amount, for each picture."""
    return (1 + (2 * drawn - 1) * amount).to(torch.float32).view(-1, 1, 1, 1)


def _erase(pictures: torch.Tensor, probability: float, drawn: dict[str, torch.Tensor]) -> torch.Tensor:
    """Blacken one rectangle of a picture."""
    height, width = pictures.shape[-2:]
    least, most = ERASED_SHARE
    shares = (least + drawn["share"] * (most - least)).tolist()
    low, high = (math.log(aspect) for aspect in ERASED_ASPECT)
    aspects = (low + drawn["aspect"] * (high - low)).exp().tolist()
    tops, lefts = drawn["erase_top"].tolist(), drawn["erase_left"].tolist()
    changed = pictures.clone()
    for number in (drawn["erase"] < probability).nonzero().flatten().tolist():
        area, aspect = shares[number] * height * width, aspects[number]
        tall = min(max(round(math.sqrt(area * aspect)), 1), height)
        wide = min(max(round(math.sqrt(area / aspect)), 1), width)
        y, x = int(tops[number] * (height - tall + 1)), int(lefts[number] * (width - wide + 1))
        changed[number, :, y : y + tall, x : x + wide] = 0
    return changed
