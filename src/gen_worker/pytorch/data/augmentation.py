"""Image augmentation while training: crop, flip, brightness, contrast, erase. Needs only torch.

The changes follow from the run's seed, the step, the rank and the place in the batch. So a resumed run sees the same
images as an uninterrupted one, and no other random stream changes.
"""

import hashlib
import math

import torch

from gen_worker.pytorch.config import AugmentSpec

MAX_PIXEL = 255
ERASED_SHARE = (0.02, 0.33)  # of an image's area
ERASED_ASPECT = (0.3, 3.3)  # height to width
# All are drawn for every image, so that a changed setting does not affect the others.
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
    """Augments a batch of images (rows, channels, height, width). Brightness and contrast need uint8.

    Returns a new tensor; the batch does not change.
    """

    def __init__(self, spec: AugmentSpec) -> None:
        self._spec = spec

    def __call__(self, images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        if len(images) == 0:
            return images
        numbers = torch.rand((len(images), len(_DRAWS)), generator=generator, dtype=torch.float64)
        drawn = dict(zip(_DRAWS, numbers.unbind(1), strict=True))
        spec = self._spec
        if spec.crop_padding:
            images = _crop(images, spec.crop_padding, drawn["top"], drawn["left"])
        if spec.horizontal_flip:
            is_flipped = (drawn["flip"] < spec.horizontal_flip).view(-1, 1, 1, 1)
            images = torch.where(is_flipped, images.flip(-1), images)
        if spec.brightness or spec.contrast:
            images = _change_light(images, spec, drawn["brightness"], drawn["contrast"])
        if spec.erase:
            images = _erase(images, spec.erase, drawn)
        return images


def step_generator(seed: int, *, step: int, rank: int) -> torch.Generator:
    """The random numbers of one step in one process."""
    digest = hashlib.blake2b(f"augment/{seed}/{rank}/{step}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def _crop(images: torch.Tensor, padding: int, top: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    """Pad with black, and crop to the old size at a random place."""
    height, width = images.shape[-2:]
    padded = torch.nn.functional.pad(images, (padding,) * 4)
    places = [(place * (2 * padding + 1)).long().tolist() for place in (top, left)]
    cut = torch.empty_like(images, memory_format=torch.contiguous_format)
    for number, (y, x) in enumerate(zip(*places, strict=True)):
        cut[number] = padded[number, :, y : y + height, x : x + width]
    return cut


def _change_light(
    images: torch.Tensor, spec: AugmentSpec, brightness: torch.Tensor, contrast: torch.Tensor
) -> torch.Tensor:
    values = images.to(torch.float32)
    if spec.brightness:
        values = values * _factor(brightness, spec.brightness)
    if spec.contrast:
        values = values.clamp(0, MAX_PIXEL)
        mean = values.mean(dim=(1, 2, 3), keepdim=True)
        values = mean + (values - mean) * _factor(contrast, spec.contrast)
    return values.round().clamp(0, MAX_PIXEL).to(images.dtype)


def _factor(drawn: torch.Tensor, amount: float) -> torch.Tensor:
    """From 1 - amount to 1 + amount, for each image."""
    return (1 + (2 * drawn - 1) * amount).to(torch.float32).view(-1, 1, 1, 1)


def _erase(images: torch.Tensor, probability: float, drawn: dict[str, torch.Tensor]) -> torch.Tensor:
    """Set one rectangle of an image to black."""
    height, width = images.shape[-2:]
    min_share, max_share = ERASED_SHARE
    shares = (min_share + drawn["share"] * (max_share - min_share)).tolist()
    low, high = (math.log(aspect) for aspect in ERASED_ASPECT)
    aspects = (low + drawn["aspect"] * (high - low)).exp().tolist()
    tops, lefts = drawn["erase_top"].tolist(), drawn["erase_left"].tolist()
    changed = images.clone()
    for number in (drawn["erase"] < probability).nonzero().flatten().tolist():
        area, aspect = shares[number] * height * width, aspects[number]
        tall = min(max(round(math.sqrt(area * aspect)), 1), height)
        wide = min(max(round(math.sqrt(area / aspect)), 1), width)
        y, x = int(tops[number] * (height - tall + 1)), int(lefts[number] * (width - wide + 1))
        changed[number, :, y : y + tall, x : x + wide] = 0
    return changed
