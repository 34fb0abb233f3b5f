"""What the docs say of the daemon and its API is what the code has: tables are compared, row by row."""

import configparser
import importlib
import inspect
import json
import re
import shlex
from typing import get_type_hints

from documents import ROOT, code_words, table_rows

DOCS = ROOT / "docs"


def test_the_states_of_a_run_are_the_table_of_the_code() -> None:
    from trn.core.runs import OWNERS, TRANSITIONS

    shown = {
        code_words(row[0])[0]: (set(code_words(row[1])), row[2])
        for row in table_rows(DOCS / "architecture.md", "States of a run")
    }
    assert shown == {
        state.value: ({str(after) for after in TRANSITIONS[state]}, OWNERS.get(state, "none: it is final"))
        for state in TRANSITIONS
    }


_RETRIES = {
    "no": "no",
    "yes": "yes",
    "on error": "with `retry.on_error`",
    "not counted": "yes, not counted",
}


def test_the_failure_table_is_the_one_that_is_obeyed() -> None:
    from trn.core.cause_words import FAILURE_WORDS
    from trn.core.causes import FAILURES

    shown = [
        (code_words(row[0])[0], code_words(row[1])[0], row[2], row[3], row[4], row[5])
        for row in table_rows(DOCS / "daemon.md", "The table of failures")
    ]
    assert shown == [
        (
            row.id,
            row.category,
            row.fault,
            FAILURE_WORDS[row.id].what,
            _RETRIES[row.retry],
            FAILURE_WORDS[row.id].why,
        )
        for row in FAILURES.values()
    ]


def test_the_settings_in_the_operating_guide_are_all_that_there_are() -> None:
    import msgspec

    from trn.core.settings import DeviceSetting, HttpSettings, InventorySettings, ListenSettings, Settings

    def defaults(record: type[msgspec.Struct], prefix: str) -> dict[str, object]:
        fields = msgspec.structs.fields(record)
        return {
            f"{prefix}{field.encode_name}": "needed"
            if field.required
            else field.default
            if field.default is not msgspec.NODEFAULT
            else field.default_factory()
            for field in fields
            if not isinstance(field.default, msgspec.Struct)
        }

    expected = {
        **defaults(Settings, ""),
        **defaults(ListenSettings, "listen."),
        **defaults(HttpSettings, "http."),
        **defaults(InventorySettings, "inventory."),
        **defaults(DeviceSetting, "inventory.devices[]."),
    }
    shown = {
        code_words(row[0])[0]: row[1] if row[1] == "needed" else json.loads(code_words(row[1])[0])
        for row in table_rows(DOCS / "daemon.md", "Settings")
    }
    assert shown == expected


def test_the_statuses_in_the_api_reference_are_those_of_the_service() -> None:
    from trn.daemon.api.server import STATUSES

    rows = table_rows(DOCS / "api.md", "Errors")
    assert {code_words(row[1])[0]: code_words(row[0])[0] for row in rows} == {
        code: status.name for code, status in STATUSES.items()
    }


def test_every_call_and_message_of_the_proto_is_in_the_api_reference() -> None:
    from trn.proto import trainer_pb2
    from trn.proto.methods import METHODS

    page = DOCS / "api.md"
    overview = {code_words(row[0])[0]: row[1] for row in table_rows(page, "Calls")}
    assert overview == {name: "stream" if method.is_stream else "one" for name, method in METHODS.items()}

    def shown(heading: str) -> list[str]:
        return sorted(word for row in table_rows(page, heading) for word in code_words(row[0]))

    def fields(*names: str) -> list[str]:
        messages = trainer_pb2.DESCRIPTOR.message_types_by_name
        return sorted(field.name for name in names for field in messages[name].fields)

    of_calls = {}
    for method in METHODS.values():
        names = method.request.DESCRIPTOR.name, method.response.DESCRIPTOR.name
        of_calls[method.name] = names
        # ResumeRun answers as SubmitRun does, whose table has it.
        # CheckRun is asked as SubmitRun is.
        asked = {"ResumeRun": names[:1], "CheckRun": names[1:]}.get(method.name, names)
        assert shown(method.name) == fields(*asked), method.name
    others = set(trainer_pb2.DESCRIPTOR.message_types_by_name) - {
        name for names in of_calls.values() for name in names
    }
    for name in others:
        assert shown(name) == fields(name), name
    assert shown("RunState") == sorted(trainer_pb2.RunState.keys())


def test_the_methods_of_the_clients_are_in_the_api_reference() -> None:
    from trn import AsyncClient, Client
    from trn.client.wire_requests import ResumeOptions, SubmitOptions

    rows = table_rows(DOCS / "api.md", "The Python client")
    shown = {word.partition("(")[0] for row in rows for word in code_words(row[0])}
    for client in (AsyncClient, Client):
        assert shown == {name for name in dir(client) if not name.startswith("_")}
    for word in (word for row in rows for word in code_words(row[0]) if "(" in word):
        name, _, parameters = word.partition("(")
        known = dict(inspect.signature(getattr(Client, name)).parameters)
        if "options" in known:
            del known["options"]
            known |= dict.fromkeys(get_type_hints(ResumeOptions if name == "resume" else SubmitOptions))
        named = set(re.findall(r"\w+", parameters))
        assert named <= known.keys(), word
        if ", …" not in word and name != "wait":  # cut short; and only one of the two has a limit
            assert named == known.keys() - {"self"}, word


def test_the_promises_name_tests_that_exist() -> None:
    rows = table_rows(DOCS / "promises.md", "The five promises of the contract")
    assert len(rows) == 5
    for row in rows:
        named = [word.partition("::") for word in code_words(row[1])]
        assert named
        for path, _, test in named:
            assert re.search(rf"(?m)^def {test}\(", (ROOT / path).read_text()), f"{path}::{test}"


def test_the_systemd_unit_starts_a_command_that_exists_and_spares_the_workers() -> None:
    from trn.daemon.__main__ import _parser

    unit = configparser.RawConfigParser()
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(DOCS / "trn.service")
    service = dict(unit["Service"])
    _python, *arguments = shlex.split(service["ExecStart"])
    assert arguments[:3] == ["-P", "-m", "trn.daemon"]
    assert _parser().parse_args(arguments[3:])
    assert {name: service[name] for name in ("KillMode", "Restart", "OOMPolicy")} == {
        "KillMode": "process",
        "Restart": "always",
        "OOMPolicy": "continue",
    }


def test_the_limits_in_the_operating_guide_are_those_of_the_code() -> None:
    rows = table_rows(DOCS / "daemon.md", "Limits")
    assert len(rows) >= 12
    for row in rows:
        module, _, name = code_words(row[2])[0].rpartition(".")
        found = getattr(importlib.import_module(f"trn.daemon.{module}"), name)
        assert int(code_words(row[1])[0]) == found, row
