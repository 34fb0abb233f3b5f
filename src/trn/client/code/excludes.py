"""What is left out of a snapshot: secrets always, junk unless git tracks it, data outside git, what `.trnignore` says."""

import re
from collections.abc import Iterable
from enum import Enum
from pathlib import Path

from trn.core.errors import InvalidRequestError

IGNORE_FILE = ".trnignore"

SECRETS = (
    ".env",
    ".env.*",
    ".env[-_]*",
    "*.env",
    "*.env.local",
    "*.env.prod*",
    "*.env.dev*",
    "*.env.stag*",
    "!.env.example",
    "!.env.sample",
    "!.env.template",
    ".envrc",
    "*.pem",
    "*.key",
    "*.p12",
    "*.pfx",
    "*.jks",
    "*.kdbx",
    "*.ppk",
    "*.keystore",
    "id_rsa*",
    "id_dsa*",
    "id_ecdsa*",
    "id_ed25519*",
    "*.credentials",
    "*credentials*.json",
    "*secret*.json",
    "*service?account*.json",
    "*serviceaccount*.json",
    "kaggle.json",
    "token.json",
    "*.token",
    ".*-token",
    ".*_token",
    "*.tfvars",
    "*.tfstate",
    ".netrc",
    "_netrc",
    ".npmrc",
    ".pypirc",
    ".pgpass",
    ".htpasswd",
    ".git-credentials",
    ".aws/",
    ".ssh/",
    ".gnupg/",
    ".kube/",
    ".docker/",
    ".azure/",
    ".kaggle/",
    ".boto",
    ".s3cfg",
    ".databrickscfg",
    ".dockercfg",
    "secrets.*",
)

# Never code, unless somebody told git otherwise.
JUNK = (
    ".git/",
    ".hg/",
    ".svn/",
    "__pycache__/",
    "node_modules/",
    ".venv/",
    "venv/",
    ".tox/",
    ".nox/",
    ".*cache*/",
    ".ipynb_checkpoints/",
    "*.egg-info/",
    "wandb/",
    "mlruns/",
    "*.py[co]",
    ".DS_Store",
    "*.sw[op]",
    "*.log",
    "nohup.out",
)
# Outside git nobody has said what is code; this is hardly it.
DATA = (
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.safetensors",
    "*.gguf",
    "*.onnx",
    "*.h5",
    "*.hdf5",
    "*.np[yz]",
    "*.parquet",
    "*.arrow",
    "*.feather",
    "*.tfrecord",
    "*.jsonl",
    "*.csv",
    "*.tsv",
    "*.zip",
    "*.tar",
    "*.gz",
)


class Kind(Enum):
    SECRET = "it looks like a secret"  # noqa: S105 (a reason in words)  # by its name; by content: `secret_content`
    DATA = "weights or data, not code"
    UNWANTED = "unwanted"  # somebody said so: not worth a word


class Excludes:
    """Rules as in a `.gitignore`, the last that matches decides; a path that ends in '/' is a folder."""

    def __init__(self, rules: Iterable[tuple[str, Kind]]) -> None:
        self._rules: list[tuple[re.Pattern[str], Kind | None]] = []
        self._asked_for: list[re.Pattern[str]] = []
        texts = []
        for pattern, kind in rules:
            is_back = pattern.startswith("!")
            text = _regex(pattern.removeprefix("!"))
            text = f"(?i:{text})" if kind is Kind.SECRET else text
            regex = re.compile(text, re.DOTALL)
            self._rules.append((regex, None if is_back else kind))
            texts.append(text)
            if is_back and kind is Kind.UNWANTED:
                self._asked_for.append(regex)
        # One match tells of most paths that no rule knows them.
        self._any = re.compile("|".join(texts) or r"(?!)", re.DOTALL)

    def kind(self, path: str) -> Kind | None:
        """Why that path is left out; None where it is not."""
        if not self._any.match(path):
            return None
        return next(kind for regex, kind in reversed(self._rules) if regex.match(path))

    def is_asked_for(self, path: str) -> bool:
        """Whether `.trnignore` takes it with a `!`, whatever it holds."""
        return any(regex.match(path) for regex in self._asked_for) and self.kind(path) is None


def read_excludes(folder: Path, extra: Iterable[str], *, is_in_git: bool) -> Excludes:
    """The rules for that folder. What its `.trnignore` says comes last and may take anything back with '!'."""
    rules = (
        []
        if is_in_git
        else [*((rule, Kind.UNWANTED) for rule in JUNK), *((rule, Kind.DATA) for rule in DATA)]
    )
    rules += [(rule, Kind.SECRET) for rule in SECRETS]
    rules += [(rule, Kind.UNWANTED) for rule in (*extra, *_ignore_lines(folder / IGNORE_FILE))]
    return Excludes(rules)


def _ignore_lines(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as fault:
        raise InvalidRequestError(f"{path} cannot be read: {fault}") from fault
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line.strip("!/") and not line.startswith("#")]


def _regex(pattern: str) -> str:
    """A regular expression for the paths that the pattern names, and for all that lies below them."""
    is_folder = pattern.endswith("/")
    body = pattern.strip("/")
    is_anchored = pattern.startswith("/") or "/" in body
    text = "" if is_anchored else "(?:.*/)?"
    at = 0
    while at < len(body):
        if body.startswith("**/", at):
            text, at = text + "(?:.*/)?", at + 3
        elif body.startswith("**", at):
            text, at = text + ".*", at + 2
        elif body[at] == "*":
            text, at = text + "[^/]*", at + 1
        elif body[at] == "?":
            text, at = text + "[^/]", at + 1
        elif body[at] == "[" and (end := body.find("]", at + 2)) > 0:
            inner = body[at + 1 : end].replace("\\", r"\\")
            text, at = text + "[" + ("^" + inner[1:] if inner[0] in "!^" else inner) + "]", end + 1
        elif body[at] == "\\" and at + 1 < len(body):
            text, at = text + re.escape(body[at + 1]), at + 2
        else:
            text, at = text + re.escape(body[at]), at + 1
    return text + (r"/.*\Z" if is_folder else r"(?:/.*)?\Z")
