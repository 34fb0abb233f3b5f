"""Which run a name means, how further runs of it are numbered, and how a line of descent is found."""

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trn.core.causes import Cause
from trn.core.errors import AmbiguousError, InvalidRequestError, NotFoundError
from trn.core.runs import LineagePart, RunState
from trn.registry.base import Ending, NewRun
from trn.registry.connection import check_integrity
from trn.registry.metrics import Stretch, line_of_descent
from trn.registry.sqlite import RunRegistry

_numbers = itertools.count()


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[RunRegistry]:
    registry = RunRegistry(tmp_path / "registry.db")
    yield registry
    registry.close()


def submit(registry: RunRegistry, name: str, **more: Any) -> str:
    new = NewRun(run_id=name, digest=f"d{next(_numbers)}", config={}, **more)
    return registry.submit(new).result()[0].run_id


def test_further_runs_of_a_name_are_numbered_and_the_name_means_the_newest(registry: RunRegistry) -> None:
    assert [submit(registry, "shapes") for _ in range(3)] == ["shapes", "shapes.2", "shapes.3"]
    submit(registry, "other")
    for text, run_id in (
        ("shapes", "shapes.3"),
        ("sha", "shapes.3"),
        ("shapes.", "shapes.3"),
        ("shapes.2", "shapes.2"),
        ("shapes.1", "shapes"),
        ("o", "other"),
    ):
        assert registry.find(text).run_id == run_id, text
        with pytest.raises(NotFoundError):
            registry.find(f"{text}x")
    assert registry.find("shapes", is_exact=True).run_id == registry.get("shapes").run_id == "shapes"
    for text in ("shapes.1", "sha"):
        with pytest.raises(NotFoundError):
            registry.find(text, is_exact=True)
    assert registry.get("shapes.3").config == {"run_id": "shapes.3"}


def test_ten_and_more_runs_stay_in_their_order(registry: RunRegistry) -> None:
    names = [submit(registry, "a") for _ in range(12)]
    assert names[-1] == "a.12"
    assert registry.find("a").run_id == "a.12"
    assert registry.find("a.1").run_id == "a", "not the first of a.10, a.11 and a.12"
    assert registry.next_id("a") == "a.13"


def test_a_number_that_was_given_by_hand_is_a_family_of_its_own_unless_a_run_has_it(
    registry: RunRegistry,
) -> None:
    assert submit(registry, "net.2") == "net.2"
    assert submit(registry, "net") == "net"
    assert submit(registry, "net") == "net.3", "net.2 is taken"
    assert registry.family_of("net.3") == "net", "asked for by that id, the next run is of this family"
    assert registry.family_of("net.2") == "net.2"
    assert registry.family_of("net.4") == ""
    assert submit(registry, "net.2") == "net.2.2"
    assert registry.find("net").run_id == "net.3"
    assert registry.find("net.2").run_id == "net.2.2"
    assert submit(registry, "v2.1") == "v2.1"
    assert submit(registry, "v2") == "v2"
    assert registry.find("v2.1").run_id == "v2.1", "a run that has that very id"


def remove(registry: RunRegistry, *run_ids: str) -> None:
    for run_id in run_ids:
        registry.want_cancel(run_id, "not needed").result()
    registry.remove(run_ids).result()


def test_the_id_of_a_removed_run_is_never_used_again(registry: RunRegistry) -> None:
    """Its lines in the logs, on the event bus and in people's notes would be taken for those of another run."""
    assert [submit(registry, "shapes") for _ in range(3)] == ["shapes", "shapes.2", "shapes.3"]
    remove(registry, "shapes.3")
    assert registry.find("shapes").run_id == "shapes.2"
    assert registry.next_id("shapes") == "shapes.4"
    assert registry.family_of("shapes.3") == "shapes", "asked for by that id, it is of that family"
    assert submit(registry, "shapes") == "shapes.4"
    remove(registry, "shapes", "shapes.2", "shapes.4")
    with pytest.raises(NotFoundError):
        registry.find("shapes")
    assert submit(registry, "shapes") == "shapes.5"
    assert registry.find("shapes").run_id == "shapes.5", "the name still means the newest"


def test_a_removed_id_that_was_given_by_hand_is_passed_over(registry: RunRegistry) -> None:
    submit(registry, "net.2")
    remove(registry, "net.2")
    assert [submit(registry, "net") for _ in range(2)] == ["net", "net.3"]


def test_a_prefix_of_two_families_is_ambiguous_and_of_one_is_not(registry: RunRegistry) -> None:
    for name in ("ab", "ab", "ac", "b"):
        submit(registry, name)
    with pytest.raises(AmbiguousError, match="'a' is the beginning of several runs: ab, ac; give more"):
        registry.find("a")
    assert registry.find("ab").run_id == "ab.2"
    for number in range(8):
        submit(registry, f"a{number}")
    with pytest.raises(AmbiguousError, match="and 5 more"):
        registry.find("a")


def test_a_name_that_is_too_long_for_a_number_is_refused_with_the_reason(registry: RunRegistry) -> None:
    name = "x" * 127
    submit(registry, name)
    with pytest.raises(InvalidRequestError, match="129 characters, at most 128 are allowed"):
        submit(registry, name)


def test_numbers_are_given_in_the_commit_and_survive_a_kill(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from trn.registry.sqlite import RunRegistry; from trn.registry.base import NewRun\n"
        "registry = RunRegistry(Path(sys.argv[1]))\n"
        "for number in range(10**6):\n"
        "    new = NewRun(run_id='a', digest=f'{number}', config={}, submission_id=f's{number}')\n"
        "    print(registry.submit(new).result()[0].run_id, flush=True)\n"
    )
    path = tmp_path / "registry.db"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        told = [process.stdout.readline().strip() for _ in range(20)]
        os.kill(process.pid, signal.SIGKILL)
        told += process.stdout.read().split()
    assert told == ["a", *(f"a.{number}" for number in range(2, len(told) + 1))]
    registry = RunRegistry(path)
    try:
        assert {run.run_id for run in registry.page(limit=1000)} >= set(told)
        repeated = NewRun(run_id="a", digest="0", config={}, submission_id="s0")
        assert registry.submit(repeated).result()[0].run_id == "a"
        assert check_integrity(path) == []
    finally:
        registry.close()


def test_a_line_of_descent_leaves_out_what_led_nowhere(registry: RunRegistry) -> None:
    submit(registry, "a")
    submit(registry, "a", parent_run_id="a", start_step=100)  # a.2
    submit(registry, "a", parent_run_id="a.2", start_step=100)  # a.3: a.2 saved nothing
    submit(registry, "b", parent_run_id="a.3", start_step=150)
    assert registry.lineage(registry.get("b")) == [
        LineagePart(run_id="a", from_step=0, to_step=100),
        LineagePart(run_id="a.3", from_step=100, to_step=150),
        LineagePart(run_id="b", from_step=150),
    ]
    assert registry.lineage(registry.get("a")) == [LineagePart(run_id="a")]
    submit(registry, "orphan", parent_run_id="gone", start_step=5)
    assert registry.lineage(registry.get("orphan")) == [LineagePart(run_id="orphan", from_step=5)]


def test_a_curve_takes_of_each_run_the_steps_that_led_to_the_next() -> None:
    parts = [
        LineagePart(run_id="a", to_step=100),
        LineagePart(run_id="b", from_step=100, to_step=150),
        LineagePart(run_id="c", from_step=150),
    ]
    assert line_of_descent(parts) == [Stretch("a", 0, 100), Stretch("b", 101, 150), Stretch("c", 151, None)]
    assert line_of_descent(parts, 120, 140) == [Stretch("b", 120, 140)]
    assert line_of_descent(parts, 100, None) == [
        Stretch("a", 100, 100),
        Stretch("b", 101, 150),
        Stretch("c", 151, None),
    ]


def test_two_live_runs_of_one_family_are_runs_like_any_others(registry: RunRegistry) -> None:
    for name in ("a", "a.2"):
        submit(registry, "a")
        registry.claim(name, []).result()
    for name in ("a", "a.2"):
        ending = Ending(state=RunState.COMPLETED, cause=Cause(id="completed"))
        assert registry.end(name, 1, ending).result().state is RunState.COMPLETED
