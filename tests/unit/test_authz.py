import base64
import copy
import dataclasses
import hashlib
import hmac
import io
import json
import logging
import pickle
import traceback

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed448, ed25519, rsa
from hypothesis import given
from hypothesis import strategies as st

from gen_worker.contract.redaction import Secret, SecretRedactor, strip_url_secrets
from gen_worker.errors import AuthError
from gen_worker.trainer.authz import (
    SCOPE_SERVE,
    SCOPES,
    authorize_start,
    mint_capability_token,
    verify_capability_token,
)
from gen_worker.trainer.transfer.policy import TransferOptions, bearer_headers, has_same_origin

NOW = 1_800_000_000.0


def pem_pair(key) -> tuple[str, str]:
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return private.decode(), public.decode()


PRIVATE, PUBLIC = pem_pair(ed25519.Ed25519PrivateKey.generate())


def mint(**changes) -> str:
    wanted = {"owner": "ada", "scopes": ["train"], "run_id": "run-1", "ttl_s": 60.0, "now": NOW}
    return mint_capability_token(PRIVATE, **(wanted | changes))


def verify(token: str, **changes):
    wanted = {"run_id": "run-1", "owner": "ada", "now": NOW}
    return verify_capability_token(token, PUBLIC, **(wanted | changes))


def segment(value: dict) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


def claims(**changes) -> dict:
    return {
        "aud": "trn-worker",
        "owner": "ada",
        "run_id": "run-1",
        "scope": "train",
        "iat": int(NOW),
        "exp": int(NOW) + 60,
    } | changes


def test_a_minted_token_verifies_and_names_what_it_allows():
    context = verify(mint(scopes=["train", "upload"]))
    assert (context.owner, context.run_id, context.scopes) == ("ada", "run-1", {"train", "upload"})
    assert context.expires_at == NOW + 60
    assert context.is_verified


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"now": NOW + 91}, "expired 31 s ago"),
        ({"now": NOW - 31}, "not valid for another 31 s"),
        ({"run_id": "run-2"}, "is for run 'run-1'"),
        ({"owner": "bob"}, "belongs to owner 'ada'"),
        ({"required_scope": "upload"}, "'upload' is needed"),
    ],
)
def test_a_token_out_of_its_bounds_is_refused_with_the_reason(changes, message):
    token = mint()
    with pytest.raises(AuthError, match=message) as caught:
        verify(token, **changes)
    assert token not in str(caught.value)


def test_leeway_covers_clocks_that_differ():
    assert verify(mint(), now=NOW + 85).is_verified
    with pytest.raises(AuthError, match="expired"):
        verify(mint(), now=NOW + 85, leeway_s=0)


def test_a_token_of_another_key_is_refused():
    foreign, _ = pem_pair(ed25519.Ed25519PrivateKey.generate())
    token = mint_capability_token(foreign, owner="ada", scopes=["train"], run_id="run-1", ttl_s=60, now=NOW)
    with pytest.raises(AuthError, match="InvalidSignatureError"):
        verify(token)


def test_algorithm_none_is_refused():
    token = f"{segment({'alg': 'none', 'typ': 'JWT'})}.{segment(claims())}."
    with pytest.raises(AuthError, match="not valid"):
        verify(token)


def test_an_hmac_made_with_the_public_key_is_refused():
    signed = f"{segment({'alg': 'HS256', 'typ': 'JWT'})}.{segment(claims())}"
    signature = hmac.new(PUBLIC.encode(), signed.encode(), hashlib.sha256).digest()
    token = f"{signed}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"
    with pytest.raises(AuthError, match="InvalidAlgorithmError"):
        verify(token)


def test_an_rsa_token_is_refused():
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    token = jwt.encode(claims(), key, algorithm="RS256")
    with pytest.raises(AuthError, match="InvalidAlgorithmError"):
        verify(token)


def test_a_changed_payload_is_refused():
    head, _, signature = mint().split(".")
    with pytest.raises(AuthError, match="InvalidSignatureError"):
        verify(f"{head}.{segment(claims(owner='ada', scope='train upload'))}.{signature}")


@pytest.mark.parametrize("missing", ["aud", "exp", "iat", "owner", "run_id", "scope"])
def test_every_claim_is_required(missing):
    private = serialization.load_pem_private_key(PRIVATE.encode(), None)
    token = jwt.encode({k: v for k, v in claims().items() if k != missing}, private, algorithm="EdDSA")
    with pytest.raises(AuthError, match="MissingRequiredClaim"):
        verify(token)


@pytest.mark.parametrize(
    "changes", [{"aud": "another"}, {"exp": "soon"}, {"exp": True}, {"exp": float("inf")}]
)
def test_claims_of_the_wrong_kind_are_refused(changes):
    private = serialization.load_pem_private_key(PRIVATE.encode(), None)
    with pytest.raises(AuthError):
        verify(jwt.encode(claims(**changes), private, algorithm="EdDSA"))


def test_a_worker_refuses_to_hold_a_private_key():
    with pytest.raises(AuthError, match="public key only") as caught:
        verify_capability_token(mint(), PRIVATE, run_id="run-1", now=NOW)
    assert PRIVATE.splitlines()[1] not in str(caught.value)


def test_a_public_key_cannot_mint():
    with pytest.raises(AuthError, match="private key"):
        mint_capability_token(PUBLIC, owner="ada", scopes=["train"], run_id="run-1", ttl_s=60)


@pytest.mark.parametrize("pem", ["", "nonsense", pem_pair(ed448.Ed448PrivateKey.generate())[1]])
def test_only_an_ed25519_key_is_taken(pem):
    with pytest.raises(AuthError, match="Ed25519"):
        verify_capability_token(mint(), pem, run_id="run-1", now=NOW)


@pytest.mark.parametrize(
    "changes", [{"scopes": []}, {"scopes": ["rule"]}, {"ttl_s": 0}, {"ttl_s": float("nan")}, {"owner": ""}]
)
def test_a_senseless_token_is_never_minted(changes):
    with pytest.raises(AuthError, match="cannot mint"):
        mint(**changes)


def start(**changes):
    wanted = {
        "orchestrated": True,
        "token": None,
        "public_key_pem": None,
        "run_id": "run-1",
        "owner": "ada",
        "now": NOW,
    }
    return authorize_start(**(wanted | changes))


@pytest.mark.parametrize("token", [None, "", "  \n"])
def test_an_orchestrated_start_without_a_token_is_refused_by_the_variables_name(token):
    with pytest.raises(AuthError, match="TRAINER_CAPABILITY_TOKEN"):
        start(token=token)


def test_a_start_alone_needs_no_token():
    assert start(orchestrated=False) is None


def test_a_start_alone_still_refuses_a_token_that_expired():
    with pytest.raises(AuthError, match="expired"):
        start(orchestrated=False, token=mint(ttl_s=1), now=NOW + 100)


def test_an_opaque_token_is_left_for_the_endpoints_to_judge():
    context = start(token="opaque-0123456789\n")
    assert context.authorization_header() == "Bearer opaque-0123456789"
    assert context.scopes == SCOPES
    assert not context.is_verified


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"now": NOW + 1000}, "expired"),
        ({"run_id": "run-2"}, "is for run"),
        ({"owner": "bob"}, "belongs to owner"),
    ],
)
def test_without_a_key_a_readable_token_is_held_to_its_own_words(changes, message):
    with pytest.raises(AuthError, match=message):
        start(token=mint(), **changes)


def test_without_a_key_a_token_of_ours_without_the_scope_is_refused():
    with pytest.raises(AuthError, match="'train' is needed"):
        start(token=mint(scopes=["upload"]))


@pytest.mark.parametrize("key", [None, PUBLIC])
def test_a_server_needs_a_token_for_serving_and_a_trainer_one_for_training(key):
    serve, train = mint(scopes=["serve"]), mint(scopes=["train"])
    assert start(token=serve, public_key_pem=key, scope=SCOPE_SERVE).allows(SCOPE_SERVE)
    with pytest.raises(AuthError, match="'serve' is needed"):
        start(token=train, public_key_pem=key, scope=SCOPE_SERVE)
    with pytest.raises(AuthError, match="'train' is needed"):
        start(token=serve, public_key_pem=key)


def test_a_foreign_issuers_scopes_are_not_read_as_ours():
    token = f"{segment({'alg': 'RS256'})}.{segment({'aud': 'other', 'scope': 'openid'})}.c2ln"
    assert start(token=token).scopes == SCOPES


def test_with_a_key_an_opaque_token_is_refused():
    with pytest.raises(AuthError, match="not valid"):
        start(token="opaque-0123456789", public_key_pem=PUBLIC)


@pytest.mark.parametrize("token", ["Bearer abc", "tok en", "naïve", "x\r\nEvil: 1", '"quoted"'])
def test_a_value_no_header_can_carry_is_refused_without_being_shown(token):
    with pytest.raises(AuthError) as caught:
        start(token=token)
    assert token not in "".join(traceback.format_exception(caught.value))


NESTED = b"[" * 40_000 + b"]" * 40_000
ODD_PAYLOADS = [
    NESTED,
    b'{"a":' * 40_000 + b"1" + b"}" * 40_000,
    b"\xff\xfe",
    b"[]",
    b"null",
    b'{"exp":' + b"9" * 400 + b"}",
    b'{"exp":' + b"9" * 5000 + b"}",
    b'{"exp":1e999}',
    *(
        json.dumps(claims(**changes)).encode()
        for changes in (
            {"exp": 10**400},
            {"iat": -(10**400)},
            {"nbf": 10**400},
            {"exp": True},
            {"exp": "soon"},
            {"run_id": "x" * 50_000},
            {"run_id": ["run-1"]},
            {"run_id": "\ud800\u202e\x1b[2J"},
            {"owner": {"ada": "x" * 50_000}},
            {"aud": {"trn-worker": 1}},
            {"scope": [["train"]]},
        )
    ),
]
ODD_HEADERS = [
    {"alg": "none"},
    {"alg": "NONE"},
    {"alg": "HS256"},
    {"alg": ["EdDSA"]},
    {"alg": None},
    {"alg": "EdDSA", "crit": ["x"]},
    {"alg": "EdDSA", "b64": False},
    {},
]


def raw_segment(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def odd_tokens() -> list[str]:
    good = mint()
    head, body, signature = good.split(".")
    tokens = [f"{head}.{raw_segment(payload)}.{signature}" for payload in ODD_PAYLOADS]
    tokens += [f"{segment({'alg': 'none'})}.{raw_segment(payload)}." for payload in ODD_PAYLOADS]
    tokens += [f"{segment(header)}.{body}.{signature}" for header in ODD_HEADERS]
    tokens += [f"{segment(header)}.{body}." for header in ODD_HEADERS]
    tokens += [good[:length] for length in range(1, len(good), 3)]  # cut
    tokens += [
        good[:at] + ("A" if good[at] != "A" else "B") + good[at + 1 :] for at in range(0, len(good) - 1, 3)
    ]
    return [
        *tokens,
        "a" * 1_000_000,
        "." * 1_000,
        "ä" * 50,
        "\ud800",
        "a\nb",
        f"Bearer {good}",
        f"{good}.x",
        "\x00",
    ]


def test_whatever_a_token_holds_it_is_refused_with_few_words_that_do_not_show_it():
    refusals: list[tuple[str, AuthError]] = []
    for token in odd_tokens():
        for key in (PUBLIC, None):
            try:
                found = authorize_start(
                    orchestrated=True, token=token, public_key_pem=key, run_id="run-1", owner="ada", now=NOW
                )
            except AuthError as refusal:
                refusals.append((token, refusal))
            else:
                assert key is None, "a token that nobody signed"
                assert not found.is_verified
    assert len(refusals) > len(odd_tokens())
    for token, refusal in refusals:
        assert len(str(refusal)) < 1_000
        said = "".join(traceback.format_exception(refusal))
        assert not [part for part in token.split(".") if len(part) >= 24 and part[:24] in said]


def test_a_secret_is_never_shown():
    token = mint()
    context = verify(token)
    shown = [
        repr(context),
        str(context),
        f"{context}",
        f"{context.token}",
        f"{context.token:>40}",
        "%s %r" % (context.token, context.token),  # noqa: UP031
        repr(dataclasses.asdict(context)),
        repr(copy.deepcopy(context)),
        repr({"token": context.token}),
        json.dumps(dataclasses.asdict(context), default=str),
    ]
    assert not [text for text in shown if token in text or token.rpartition(".")[2] in text]
    for value in (context, context.token):
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(value)


def test_secrets_compare_by_value():
    assert Secret("a") == Secret("a")
    assert Secret("a") != Secret("b")
    assert Secret("a") != "a"
    assert len({Secret("a"), Secret("a")}) == 1


def test_the_redactor_keeps_a_token_out_of_every_part_of_a_log_record():
    token = mint()
    written = io.StringIO()
    handler = logging.StreamHandler(written)  # its own, for formatters share what an earlier one cached
    handler.addFilter(SecretRedactor([Secret(token)]))
    logger = logging.Logger("trn.test.redaction")
    logger.addHandler(handler)
    try:
        try:
            raise ValueError(f"header was Bearer {token}")
        except ValueError as inner:
            raise RuntimeError("outer") from inner
    except RuntimeError:
        logger.exception("failed with %s", token, stack_info=True)
    logger.warning("GET https://ada:pw@host/x?sig=%s&y=1", "abc")
    assert token not in written.getvalue()
    assert "failed with ***" in written.getvalue()
    assert "header was Bearer ***" in written.getvalue()
    assert "https://***@host/x?***" in written.getvalue()


def test_a_record_without_secrets_keeps_its_arguments_and_traceback(caplog):
    caplog.handler.addFilter(redactor := SecretRedactor(["s3cret"]))
    try:
        raise KeyError("plain")
    except KeyError:
        logging.getLogger("trn.test.redaction").exception("step %d", 3)
    caplog.handler.removeFilter(redactor)
    (record,) = caplog.records
    assert record.args == (3,)
    assert record.exc_info is not None


@given(
    secrets=st.lists(st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=8), min_size=1),
    between=st.lists(st.text()),
)
def test_no_known_secret_survives_redaction(secrets, between):
    redactor = SecretRedactor([*secrets, None, ""])
    text = " ".join(part for pair in zip(secrets, [*between, *secrets], strict=False) for part in pair)
    redacted = redactor.redact(text)
    assert not [secret for secret in secrets if secret in redacted.replace("***", "\0")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("see https://h/p?X-Amz-Signature=abc for", "see https://h/p?*** for"),
        ("https://user:pa@ss@h:8/p", "https://***@h:8/p"),
        ("https://user:pa?ss@h/p", "https://***"),
        ("'s3://key:secret@bucket/k'", "'s3://***@bucket/k'"),
        ("https://h/a@b/c", "https://h/a@b/c"),
        ("two http://a/?x and http://b#y", "two http://a/?*** and http://b#***"),
        ("no url: a/b?c=d", "no url: a/b?c=d"),
    ],
)
def test_urls_lose_their_credentials(text, expected):
    assert strip_url_secrets(text) == expected


@pytest.mark.parametrize(
    ("url", "settings", "is_sent"),
    [
        ("https://host/x", {}, True),
        ("http://host/x", {}, False),
        ("http://host/x", {"allow_insecure_token": True}, True),
        ("http://127.0.0.1:8/x", {}, True),
        ("http://[::1]:8/x", {}, True),
        ("http://localhost.evil.example/x", {}, False),
        ("https://u:p@host/x", {}, False),
        ("https://HOST/x", {"token_hosts": frozenset({"host"})}, True),
        ("https://host:8443/x", {"token_hosts": frozenset({"host:8443"})}, True),
        ("https://host:9/x", {"token_hosts": frozenset({"host:8443"})}, False),
        ("https://other/x", {"token_hosts": frozenset({"host"})}, False),
        ("http://host/x", {"token_hosts": frozenset({"host"})}, False),
    ],
)
def test_the_token_goes_only_where_it_is_safe(url, settings, is_sent):
    auth = verify(mint(scopes=["train", "upload"]))
    assert bool(bearer_headers(url, auth, scope="upload", options=TransferOptions(**settings))) is is_sent
    assert bearer_headers(url, auth, scope="read-inputs", options=TransferOptions(**settings)) == {}
    assert bearer_headers(url, None, scope="upload", options=TransferOptions(**settings)) == {}


@pytest.mark.parametrize(
    ("other", "is_same"),
    [
        ("https://host/y", True),
        ("https://host:443/y", True),
        ("https://host:444/y", False),
        ("http://host/y", False),
        ("https://host.evil/y", False),
    ],
)
def test_an_origin_is_scheme_host_and_port(other, is_same):
    assert has_same_origin("https://Host/x", other) is is_same
