"""Variables of the caller for the worker: by option, from a file, by the settings; secrets are kept apart."""

import fnmatch
import os
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from trn.core.errors import InvalidRequestError
from trn.core.variables import fingerprint, instead_of, is_variable_name, matters, without_workers_variables

_LINE = re.compile(r"(?:export\s+)?([^\s=#]+)\s*=\s*(.*)", re.DOTALL)
_DOUBLE = re.compile(r'"((?:[^"\\]|\\.)*)"\s*(?:#.*)?')
_SINGLE = re.compile(r"'([^']*)'\s*(?:#.*)?")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", '"': '"', "\\": "\\", "$": "$"}


class GivenVariables(NamedTuple):
    """`env` becomes part of the job; of `secret_env` only the names are recorded."""

    env: dict[str, str]
    secret_env: dict[str, str]


def read_given(
    *,
    pairs: Iterable[str] = (),
    secret_pairs: Iterable[str] = (),
    files: Iterable[Path] = (),
    environ: Mapping[str, str] = os.environ,
) -> GivenVariables:
    """`NAME` (the caller's value) or `NAME=VALUE`, over the files. InvalidRequestError with every fault."""
    faults: list[str] = []
    given: dict[str, str] = {}
    for path in files:
        given.update(_read_file(path, faults))
    given.update(_read_pairs("--env", pairs, environ, faults))
    secret = _read_pairs("--secret-env", secret_pairs, environ, faults)
    if faults:
        raise InvalidRequestError("the variables for the worker are not valid", faults)
    ordinary, looking = set_apart(given)
    return GivenVariables(
        {name: value for name, value in ordinary.items() if name not in secret}, {**looking, **secret}
    )


def set_apart(variables: Mapping[str, str]) -> GivenVariables:
    """Ordinary variables, and those whose names look like secrets."""
    from gen_worker.contract.redaction import looks_secret

    looking = {name: value for name, value in variables.items() if looks_secret(name)}
    return GivenVariables({name: variables[name] for name in variables if name not in looking}, looking)


def find_passed(patterns: Sequence[str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The caller's variables that the settings' `pass_env` names."""
    if not patterns:
        return {}
    return {
        name: value
        for name, value in without_workers_variables(environ).items()
        if instead_of(name) is None and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }


def tell_environment(environ: Mapping[str, str] = os.environ) -> tuple[dict[str, str], str]:
    """(fingerprints of variables that matter to a training, their salt): the daemon compares, but cannot read them."""
    salt = secrets.token_hex(8)
    own = without_workers_variables(environ)
    return {name: fingerprint(value, salt) for name, value in own.items() if matters(name)}, salt


def show_value(name: str) -> str | None:
    """The caller's value; None for a secret."""
    from gen_worker.contract.redaction import looks_secret, strip_url_secrets

    return None if looks_secret(name) else strip_url_secrets(os.environ.get(name, ""))


def _read_pairs(
    option: str, pairs: Iterable[str], environ: Mapping[str, str], faults: list[str]
) -> dict[str, str]:
    found = {}
    for pair in pairs:
        name, has_value, value = pair.partition("=")
        if not is_variable_name(name):
            faults.append(f"{option} {name}: expected NAME or NAME=VALUE")
        elif has_value:
            found[name] = value
        elif name in environ:
            found[name] = environ[name]
        else:
            faults.append(f"{option} {name}: not set in this environment: set it, or give {name}=VALUE")
    return found


def _read_file(path: Path, faults: list[str]) -> dict[str, str]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as fault:
        faults.append(f"--env-file {path}: cannot be read: {fault.strerror}")
        return {}
    except UnicodeDecodeError as fault:
        faults.append(f"--env-file {path}: not UTF-8 text: byte {fault.start}")
        return {}
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = _LINE.fullmatch(text)
        try:
            if match is None or not is_variable_name(match[1]):
                raise ValueError("expected NAME=VALUE")
            found[match[1]] = _read_value(match[2])
        except ValueError as fault:
            faults.append(f"{path}:{number}: {fault}")  # never the line itself: it may hold a secret
    return found


def _read_value(text: str) -> str:
    if text.startswith("'"):
        single = _SINGLE.fullmatch(text)
        if single is None:
            raise ValueError("a quote is not closed, or text follows it")
        return single[1]
    if text.startswith('"'):
        double = _DOUBLE.fullmatch(text)
        if double is None:
            raise ValueError("a quote is not closed, or text follows it")
        _refuse_expansion(double[1])
        return re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[0]), double[1])
    value = re.split(r"\s+#", text, maxsplit=1)[0].strip()
    _refuse_expansion(value)
    return "" if value.startswith("#") else value


def _refuse_expansion(text: str) -> None:
    if re.search(r"(?<!\\)\$[A-Za-z_{(]", text):
        raise ValueError("variables are not expanded: write the value out, or put it in single quotes")
