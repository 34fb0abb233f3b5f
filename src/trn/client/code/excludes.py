"""What a snapshot leaves out: secrets, junk that git does not track, data outside git, and the paths of `.trnignore`."""

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

# Never code, unless git tracks it.
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
# Outside git: rarely code.
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
    UNWANTED = "unwanted"  # excluded on purpose, so not reported


class Excludes:
    """Rules as in a `.gitignore`; the last one that matches decides. A path that ends in '/' is a folder."""

    def __init__(self, rules: Iterable[tuple[str, Kind]]) -> None:
        from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

        self._rules: list[tuple[re.Pattern[str], Kind | None]] = []
        self._asked_for: list[re.Pattern[str]] = []
        texts = []
        for pattern, kind in rules:
            text, is_exclude = GitIgnoreSpecPattern.pattern_to_regex(pattern)
            if text is None:  # a comment, or no valid pattern
                continue
            text = text.replace("(?P<ps_d>", "(?:")  # a named group could not be joined with others
            text = f"(?i:{text})" if kind is Kind.SECRET else text
            regex = re.compile(text, re.DOTALL)
            self._rules.append((regex, kind if is_exclude else None))
            texts.append(text)
            if not is_exclude and kind is Kind.UNWANTED:
                self._asked_for.append(regex)
        self._any = re.compile("|".join(texts) or r"(?!)", re.DOTALL)  # fast: most paths match no rule

    def kind(self, path: str) -> Kind | None:
        """Why that path is left out; None where it is not."""
        if not self._any.match(path):
            return None
        return next(kind for regex, kind in reversed(self._rules) if regex.match(path))

    def is_asked_for(self, path: str) -> bool:
        """Whether `.trnignore` includes it with a `!`, whatever it holds."""
        return any(regex.match(path) for regex in self._asked_for) and self.kind(path) is None


def read_excludes(folder: Path, extra: Iterable[str], *, is_in_git: bool) -> Excludes:
    """The rules for that folder. Those of its `.trnignore` come last and may include anything again with '!'."""
    rules = (
        []
        if is_in_git
        else [*((rule, Kind.UNWANTED) for rule in JUNK), *((rule, Kind.DATA) for rule in DATA)]
    )
    rules += [(rule, Kind.SECRET) for rule in SECRETS]
    path = folder / IGNORE_FILE
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    except (OSError, UnicodeDecodeError) as fault:
        raise InvalidRequestError(f"{path} cannot be read: {fault}") from fault
    return Excludes([*rules, *((rule, Kind.UNWANTED) for rule in (*extra, *lines))])
