"""Secrets found by content, whatever the file's name: private keys, tokens of well-known services.

A pattern is searched only where its marker occurs, so that ordinary code costs a few fast searches.
"""

import re
from typing import NamedTuple

OVERLAP_BYTES = 4096  # of two pieces of a file: no shape is longer


class HoldsSecretError(Exception):
    """A file that is left out; names the kind of secret, never the secret."""


class _Shape(NamedTuple):
    marker: bytes
    pattern: bytes  # compiled where its marker was found
    words: str


def _shape(words: str, marker: str, pattern: str) -> _Shape:
    return _Shape(marker.encode(), pattern.encode(), words)


# Code that reads keys may have the header alone; a key has a body. In JSON its line ends are escaped.
_KEY = r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----(?:(?!-----)[\s\S]){0,300}?[A-Za-z0-9+/]{40}"
_ALONE = r"(?<![A-Za-z0-9_])%s(?![A-Za-z0-9])"
SHAPES = (
    _shape("a private key", "PRIVATE KEY", _KEY),
    _shape("a private key", "PuTTY-User-Key-File", r"PuTTY-User-Key-File-\d:[\s\S]{0,4000}Private-Lines:"),
    _shape("a private key", "AGE-SECRET-KEY-1", r"AGE-SECRET-KEY-1[0-9A-Z]{58}"),
    # Not the key that documentation has.
    *(
        _shape("an AWS key", prefix, _ALONE % (prefix + r"(?![A-Z0-9]*EXAMPLE)[A-Z2-7]{16}"))
        for prefix in ("AKIA", "ASIA")
    ),
    *(
        _shape(
            "an AWS key", name, name + r"[\"']?\s*[=:]\s*[\"']?(?![A-Za-z0-9/+]*EXAMPLE)[A-Za-z0-9/+]{40}\b"
        )
        for name in ("aws_secret_access_key", "AWS_SECRET_ACCESS_KEY", "SecretAccessKey")
    ),
    _shape("a Google API key", "AIza", _ALONE % r"AIza[0-9A-Za-z_-]{35}"),
    _shape("a Google token", "ya29.", _ALONE % r"ya29\.[0-9A-Za-z_-]{30,}"),
    _shape("a Google client secret", "GOCSPX-", r"GOCSPX-[0-9A-Za-z_-]{28}"),
    *(
        _shape("a GitHub token", f"gh{letter}_", _ALONE % rf"gh{letter}_[A-Za-z0-9]{{36,}}")
        for letter in "pousr"
    ),
    _shape("a GitHub token", "github_pat_", r"github_pat_[A-Za-z0-9_]{60,}"),
    _shape("a GitLab token", "glpat-", _ALONE % r"glpat-[0-9A-Za-z_-]{20,}"),
    _shape("a Hugging Face token", "hf_", _ALONE % r"hf_[A-Za-z0-9]{34}"),
    _shape("a Vault token", "hvs.", _ALONE % r"hvs\.[0-9A-Za-z_-]{24,}"),
    _shape("a Slack token", "xox", _ALONE % r"xox[abprs]-[0-9A-Za-z-]{20,}"),
    _shape("an OpenAI key", "T3BlbkFJ", r"sk-[0-9A-Za-z_-]{10,100}T3BlbkFJ[0-9A-Za-z_-]{10}"),
    _shape("an Anthropic key", "sk-ant-", r"sk-ant-[0-9A-Za-z_-]{40,}"),
    _shape("a Stripe key", "k_live_", _ALONE % r"[rs]k_live_[0-9A-Za-z]{24,}"),
    _shape("an npm token", "npm_", _ALONE % r"npm_[A-Za-z0-9]{36}"),
    _shape("a PyPI token", "pypi-AgE", r"pypi-AgE[0-9A-Za-z_-]{50,}"),
    # Of `trn ui --json` and `trn serve --json`.
    _shape("a bearer of trn", '"bearer"', r'"bearer"\s*:\s*"[0-9A-Za-z_-]{43}"'),
    _shape("an Azure key", "AccountKey=", r"AccountKey=[A-Za-z0-9+/]{86}=="),
)


def find_secret(data: bytes) -> str:
    """The kind of secret that it seems to hold; "" if none."""
    return next(
        (shape.words for shape in SHAPES if shape.marker in data and re.search(shape.pattern, data)),
        "",
    )


class SecretFinder:
    """Scans a file while it is read, piece by piece. HoldsSecretError as soon as there is one."""

    def __init__(self) -> None:
        self._end = b""

    def __call__(self, piece: bytes) -> None:
        found = find_secret(self._end + piece)
        if found:
            raise HoldsSecretError(found)
        self._end = (self._end + piece)[-OVERLAP_BYTES:]
