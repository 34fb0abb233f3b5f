"""The caller's environment reaches a worker where that is asked for, and secrets reach nothing else."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from gen_worker.contract.redaction import Secret, SecretRedactor, looks_secret
from trn.cli.output import Output
from trn.cli.submitting.submit_options import describe_differences, say_differences
from trn.client.caller_environment import find_passed, read_given, tell_environment
from trn.client.wire_requests import make_submit_request
from trn.core.errors import InvalidRequestError
from trn.core.variables import matters, needs_fresh_start
from trn.daemon.api.secret_values import SecretValues, reveal
from trn.daemon.intake.run_judge import find_differences
from trn.daemon.machine.environment_report import relevant_variables
from trn.proto.records import EnvDifference


@pytest.mark.parametrize(
    ("name", "is_secret"),
    [
        *(
            (name, True)
            for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "DB_PWD")
        ),
        *(
            (name, True)
            for name in ("GITHUBTOKEN", "hf_token", "MY_PASSWD", "GOOGLE_APPLICATION_CREDENTIALS")
        ),
        *(
            (name, False)
            for name in ("TOKENIZERS_PARALLELISM", "MAX_TOKENS", "PWD", "OLDPWD", "KEYBOARD", "HF_HOME")
        ),
        *((name, False) for name in ("OMP_NUM_THREADS", "PATH", "MONKEY", "SECRETARY")),
    ],
)
def test_one_judge_says_which_names_look_like_secrets(name: str, is_secret: bool) -> None:
    assert looks_secret(name) is is_secret
    assert (name in relevant_variables({name: "x"})) is (matters(name) and not is_secret)


def test_a_file_of_variables_is_read_with_quotes_comments_and_export(tmp_path: Path) -> None:
    path = tmp_path / "my.env"
    path.write_text(
        '# comment\n\nexport A=1\nB = two words # comment\nC="x\\ny \\"z\\"" # comment\n'
        "D='$HOME # no'\nE=\nF=a=b#c\nA=2\n"
    )
    given = read_given(files=[path])
    assert given.env == {
        "A": "2",
        "B": "two words",
        "C": 'x\ny "z"',
        "D": "$HOME # no",
        "E": "",
        "F": "a=b#c",
    }


def test_every_fault_is_told_at_once_with_its_line_and_without_a_value(tmp_path: Path) -> None:
    path = tmp_path / "bad.env"
    path.write_text("OK=1\nhunter2\nA='hunter2\nB=${hunter2}\n1C=hunter2\n")
    pairs = ["=hunter2", "NOWHERE", "a b=hunter2"]
    with pytest.raises(InvalidRequestError) as refused:
        read_given(pairs=pairs, secret_pairs=["GONE"], files=[path, tmp_path / "none"])
    text = str(refused.value)
    assert "hunter2" not in text
    assert [fault.partition(": ")[0] for fault in refused.value.faults] == [
        *(f"{path}:{number}" for number in (2, 3, 4, 5)),
        f"--env-file {tmp_path / 'none'}",
        "--env ",
        "--env NOWHERE",
        "--env a b",
        "--secret-env GONE",
    ]


def test_a_flag_wins_over_the_file_the_job_and_the_settings_in_this_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "my.env"
    path.write_text("A=file\nB=file\n")
    environ = {"A": "caller", "B": "caller", "C": "caller", "D": "caller", "E": "caller", "D_TOKEN": "caller"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    given = read_given(pairs=["A=flag"], files=[path])
    job = {"env": {"A": "job", "B": "job", "C": "job", "OWN_TOKEN": "job"}}
    request = make_submit_request(
        job,
        {"env": given.env, "secret_env": given.secret_env},
        pass_env=["A", "B", "C", "D", "D_TOK*"],
    )
    assert msgspec.json.decode(request.config_json)["env"] == {
        "A": "flag",
        "B": "file",
        "C": "job",
        "D": "caller",
        "OWN_TOKEN": "job",
    }
    assert dict(request.secret_env) == {"D_TOKEN": "caller"}
    assert job == {"env": {"A": "job", "B": "job", "C": "job", "OWN_TOKEN": "job"}}, (
        "the caller's own is left alone"
    )


def test_a_secret_is_no_part_of_the_config_even_where_the_job_holds_it_too() -> None:
    given = read_given(environ={"HF_TOKEN": "abc"}, pairs=["HF_TOKEN", "PLAIN=1"], secret_pairs=["PLAIN=2"])
    assert given == ({}, {"HF_TOKEN": "abc", "PLAIN": "2"})
    request = make_submit_request(
        {"env": {"HF_TOKEN": "abc"}}, {"env": {"HF_TOKEN": "abc"}, "secret_env": {"PLAIN": "2"}}
    )
    assert b"abc" not in request.config_json
    assert dict(request.secret_env) == {"HF_TOKEN": "abc", "PLAIN": "2"}


def test_an_option_that_there_is_not_is_refused() -> None:
    options: Any = {"enviroment": {}}
    with pytest.raises(TypeError, match="no option enviroment"):
        make_submit_request({}, options)


def test_the_settings_pass_names_and_patterns_and_never_what_is_a_workers_own() -> None:
    environ = {"HF_HOME": "/x", "WANDB_MODE": "offline", "OTHER": "1", "TRAINER_ATTEMPT": "3", "RANK": "0"}
    assert find_passed(["HF_HOME", "WANDB_*", "TRAINER_*", "RANK"], environ=environ) == {
        "HF_HOME": "/x",
        "WANDB_MODE": "offline",
    }
    assert find_passed([], environ) == {}
    assert find_passed(["CUDA_*"], {"CUDA_VISIBLE_DEVICES": "1", "CUDA_CACHE_PATH": "/x"}) == {
        "CUDA_CACHE_PATH": "/x"
    }


def test_a_choice_of_devices_is_not_passed_and_it_is_said_how_to_choose(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    say_differences(Output(is_json=False), differences_of({"CUDA_VISIBLE_DEVICES": "1"}, {}))
    assert capsys.readouterr().err == (
        "trn: no effect on the worker: CUDA_VISIBLE_DEVICES=1; choose devices with --devices or --cpu-only\n"
    )


def differences_of(caller: dict[str, str], worker: dict[str, str], *decided: str) -> list[EnvDifference]:
    fingerprints, salt = tell_environment(caller)
    assert not set(caller.values()) & set(fingerprints.values()), "values are not told"
    return [
        EnvDifference(
            name=item.name,
            is_in_caller=item.is_in_caller,
            is_in_worker=item.is_in_worker,
            worker_value=item.worker_value,
        )
        for item in find_differences(fingerprints, salt, worker, decided=decided)
    ]


def test_what_differs_is_said_in_one_line_and_secrets_only_by_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = {
        "OMP_NUM_THREADS": "2",
        "HF_TOKEN": "mine",
        "HF_HOME": "/x",
        "EDITOR": "vi",
        "MKL_A": "1",
        "NCCL_B": "1",
    }
    worker = {
        "OMP_NUM_THREADS": "4",
        "HF_TOKEN": "yours",
        "CUDA_A": "1",
        "EDITOR": "ed",
        "MKL_A": "1",
        "WANDB_KEY": "z",
    }
    found = differences_of(caller, worker, "NCCL_B")
    for name, value in caller.items():
        monkeypatch.setenv(name, value)
    say_differences(Output(is_json=False), found)
    assert capsys.readouterr().err.splitlines() == [
        "trn: not passed to the worker: HF_HOME=/x, HF_TOKEN (the worker has another), OMP_NUM_THREADS=2 (the worker"
        " has 4); pass with --env HF_HOME --env HF_TOKEN --env OMP_NUM_THREADS; set in the worker and not here:"
        " CUDA_A=1, WANDB_KEY"
    ]
    assert describe_differences(found) == [
        {"name": "CUDA_A", "value": None, "worker_value": "1"},
        {"name": "HF_HOME", "value": "/x", "worker_value": None},
        {"name": "HF_TOKEN", "value": None, "worker_value": None},
        {"name": "OMP_NUM_THREADS", "value": "2", "worker_value": "4"},
        {"name": "WANDB_KEY", "value": None, "worker_value": None},
    ]
    assert differences_of(worker, worker) == []


def test_what_loaded_libraries_would_not_obey_needs_a_fresh_start() -> None:
    assert needs_fresh_start({"MKL_NUM_THREADS": "1"}, {})
    assert needs_fresh_start({"LD_LIBRARY_PATH": "/a"}, {"LD_LIBRARY_PATH": "/b"})
    assert not needs_fresh_start({"MKL_NUM_THREADS": "1"}, {"MKL_NUM_THREADS": "1"})
    assert not needs_fresh_start({"OMP_NUM_THREADS": "1", "PYTHONPATH": "/a", "HF_HOME": "/x"}, {})


def test_a_daemon_forgets_values_and_looks_in_its_own_environment() -> None:
    values = SecretValues({"HF_TOKEN": "of the daemon"})
    values.keep("1", {"A_KEY": Secret("given")})
    found, missing = values.find("1", ["A_KEY", "HF_TOKEN", "B_KEY"])
    assert (reveal(found), missing) == ({"A_KEY": "given", "HF_TOKEN": "of the daemon"}, ["B_KEY"])
    assert "given" not in repr(found)
    assert values.find("2", ["A_KEY"]) == ({}, ["A_KEY"]), "of another run"


def test_values_that_could_be_any_word_are_not_masked() -> None:
    redactor = SecretRedactor()
    redactor.add_variables({"A": "a", "B": "hunter2"}, ["A", "B", "C"])
    assert redactor.redact("a word with hunter2") == "a word with ***"
