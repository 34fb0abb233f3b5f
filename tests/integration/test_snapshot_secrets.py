"""Snapshots leave out secrets, known by name or by what is in the file, and say so."""

import base64
import json
import random
import string
from pathlib import Path

import pytest
from test_snapshot_git import CODE, LIMIT, git, patch, paths, write

from trn.cli.output import Output
from trn.client.code.frozen_code import FrozenCode
from trn.client.code.secret_content import OVERLAP_BYTES, SHAPES, SecretFinder, find_secret
from trn.client.code.snapshot import take_snapshot
from trn.core.home import Home
from trn.core.snapshots import SMALL_BYTES

BY_NAME = (
    "prod.env",
    "deploy/prod.env.local",
    ".env-staging",
    "service-account.json",
    "my_service_account_prod.json",
    ".vault-token",
    "conf/api.token",
    "putty.ppk",
    "kaggle.json",
    "app-secret.json",
    "prod.tfvars",
)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    home.make()
    return home


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "project", dict.fromkeys(CODE, "x = 1"))
    return tmp_path / "project"


@pytest.fixture
def repo(folder: Path) -> Path:
    git(folder, "init", "--initial-branch=main")
    git(folder, "add", ".")
    git(folder, "commit", "-m", "first")
    return folder


def draw(length: int, alphabet: str = string.ascii_letters + string.digits) -> str:
    """Made here, so that no file of this repository looks like a secret."""
    return "".join(random.Random(length).choices(alphabet, k=length))


def pem(kind: str = "RSA ", body: str = "") -> str:
    body = body or base64.b64encode(bytes(range(200))).decode()
    lines = "\n".join(body[at : at + 64] for at in range(0, len(body), 64))
    return f"-----BEGIN {kind}PRIVATE " + f"KEY-----\n{lines}\n-----END {kind}PRIVATE KEY-----\n"


ENCRYPTED = pem().replace("KEY-----\n", "KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-256-CBC,0102\n\n", 1)
CONTENTS = {
    "a private key": pem(),
    "a private key ": pem("OPENSSH "),
    "a private key  ": ENCRYPTED,
    "a private key   ": json.dumps({"type": "service_account", "private_key": pem("")}),
    "an AWS key": f"key = AKIA{draw(16, string.ascii_uppercase)}",
    "an AWS key ": f"aws_secret_access_key = {draw(40)}",
    "a Google API key": f"AIza{draw(35)}",
    "a GitHub token": f"token: ghp_{draw(36)}",
    "a GitHub token ": f"github_pat_{draw(70)}",
    "a GitLab token": f"glpat-{draw(20)}",
    "a Hugging Face token": f"hf_{draw(34)}",
    "a Vault token": f"hvs.{draw(30)}",
    "a Slack token": f"xoxb-{draw(30)}",
    "an Anthropic key": f"sk-ant-{draw(60)}",
    "an npm token": f"npm_{draw(36)}",
    "a bearer of trn": json.dumps({"url": "http://127.0.0.1:1", "bearer": draw(43)}),
}


def test_secrets_are_known_by_more_names(repo: Path, home: Home) -> None:
    write(
        repo,
        dict.fromkeys(BY_NAME, "hunter2") | {"tokens.py": "", "environment.yml": "", "service.json": "{}"},
    )
    git(repo, "add", "--force", "prod.env", ".vault-token")
    taken = take_snapshot(repo, home, max_bytes=LIMIT)
    assert paths(home, taken) == {*CODE, "tokens.py", "environment.yml", "service.json"}
    assert {skipped.path for skipped in taken.skipped} == set(BY_NAME)


@pytest.mark.parametrize(("words", "content"), CONTENTS.items(), ids=lambda item: item[:20])
def test_a_secret_is_known_by_what_is_in_the_file(
    folder: Path,
    home: Home,
    words: str,
    content: str,
) -> None:
    write(folder, {"deploy_notes.txt": f"some words\n{content}\n"})
    taken = take_snapshot(folder, home, max_bytes=LIMIT)
    assert paths(home, taken) == CODE
    (skipped,) = taken.skipped
    assert skipped.path == "deploy_notes.txt"
    assert skipped.reason.startswith(f"it seems to hold {words.strip()};")
    stored = b"".join(path.read_bytes() for path in home.root.rglob("*") if path.is_file())
    assert content[:30].encode() not in stored
    # It is found again: what was left out is not remembered as looked through.
    assert take_snapshot(folder, home, max_bytes=LIMIT).digest == taken.digest


@pytest.mark.parametrize(
    "text",
    [
        'HEADER = "-----BEGIN RSA PRIVATE KEY-----"\nFOOTER = "-----END RSA PRIVATE KEY-----"\n',
        pem().replace("PRIVATE", "PUBLIC"),
        "AKIAIOSFODNN7EXAMPLE\naws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
        "hf_hub_download(repo_id, revision)\nghp_ = 1\nnpm_config_registry",
        f"commit {'0123456789abcdef' * 3}",
        "if token.startswith(('ghp_', 'github_pat_')): ...",
    ],
)
def test_code_that_speaks_of_secrets_is_taken(folder: Path, home: Home, text: str) -> None:
    write(folder, {"reader.py": text})
    assert paths(home, take_snapshot(folder, home, max_bytes=LIMIT)) == {*CODE, "reader.py"}


def test_a_secret_is_found_across_the_pieces_of_a_large_file(folder: Path, home: Home) -> None:
    for at in (SMALL_BYTES, 1 << 20):
        (folder / "large.txt").write_text(
            "x" * (at - 20) + "\n" + CONTENTS["a GitHub token"] + "\n" + "y" * at
        )
        taken = take_snapshot(folder, home, max_bytes=LIMIT)
        assert [skipped.path for skipped in taken.skipped] == ["large.txt"], at
    finder = SecretFinder()
    finder(pem()[:50].encode())
    with pytest.raises(Exception, match="a private key"):
        finder(pem()[50:].encode())
    assert all(len(shape.marker) < OVERLAP_BYTES for shape in SHAPES)


def test_who_takes_a_file_back_gets_it_until_it_is_not_asked_for(folder: Path, home: Home) -> None:
    write(folder, {"fixture.py": CONTENTS["a GitHub token"], ".trnignore": "!/fixture.py\n"})
    assert "fixture.py" in paths(home, take_snapshot(folder, home, max_bytes=LIMIT))
    write(folder, {".trnignore": "# nothing\n"})
    assert "fixture.py" not in paths(home, take_snapshot(folder, home, max_bytes=LIMIT))


def test_a_patch_holds_no_secret_not_even_one_that_went(repo: Path, home: Home) -> None:
    secret = CONTENTS["a GitHub token"]
    write(repo, {"pkg/model.py": f"TOKEN = '{secret}'\n"})
    git(repo, "add", ".")
    git(repo, "commit", "-m", "by mistake")
    write(repo, {"pkg/model.py": "TOKEN = None\n", "train.py": "print(4)"})
    taken = take_snapshot(repo, home, max_bytes=LIMIT)
    assert "pkg/model.py" in paths(home, taken)  # the secret is gone from it
    assert b"print(4)" in patch(home, taken)
    assert secret.encode() not in patch(home, taken)
    write(repo, {"train.py": f"print('{secret}')"})
    taken = take_snapshot(repo, home, max_bytes=LIMIT)
    assert "train.py" not in paths(home, taken)
    assert secret.encode() not in patch(home, taken)


def test_what_was_left_out_by_content_is_said_first(
    folder: Path,
    home: Home,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(folder, dict.fromkeys(BY_NAME, "x") | {"zz_main.py": CONTENTS["a Slack token"]})
    for line in FrozenCode(take_snapshot(folder, home, max_bytes=LIMIT)).lines():
        Output(is_json=True).say(line)
    said = capsys.readouterr().err.splitlines()
    assert said[1] == (
        "  without zz_main.py: it seems to hold a Slack token; `!/zz_main.py` in .trnignore includes it anyway"
    )


def test_no_file_of_ours_looks_like_a_secret() -> None:
    """Else a snapshot of this repository would lack it."""
    root = Path(__file__).parents[2]
    for path in [*root.glob("src/**/*.py"), *root.glob("docs/*.md"), *root.glob("examples/**/*.py")]:
        assert find_secret(path.read_bytes()) == "", path
