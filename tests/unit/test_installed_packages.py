"""The stamp of what is installed: it changes with every install, and with nothing else."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from gen_worker.contract import installed_packages
from gen_worker.contract.installed_packages import is_same_python, packages_stamp, site_folders

LONG_AGO = 1_600_000_000


class Environment:
    """A real virtual environment, whose folders look as if nothing had happened in it for long."""

    def __init__(self, folder: Path, *, has_system: bool = False) -> None:
        venv.create(folder, with_pip=False, symlinks=True, system_site_packages=has_system)
        self.python = folder / "bin" / "python"
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        self.site = folder / "lib" / version / "site-packages"
        self.settle()

    def install(self, name: str, *, at: int = LONG_AGO) -> Path:
        info = self.site / f"{name}.dist-info"
        info.mkdir()
        os.utime(info, (at, at))
        return info

    def settle(self, at: int = LONG_AGO) -> None:
        for path in (*self.site.iterdir(), self.site):
            os.utime(path, (at, at))


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "env")


def test_the_stamp_is_the_same_while_nothing_is_installed(environment: Environment) -> None:
    assert packages_stamp(environment.python) == packages_stamp(environment.python)
    assert packages_stamp() == packages_stamp()
    assert packages_stamp() != packages_stamp(environment.python)


def test_an_install_an_upgrade_a_reinstall_and_a_removal_change_it(environment: Environment) -> None:
    stamps = [packages_stamp(environment.python)]
    info = environment.install("shapes-1.0")
    stamps.append(packages_stamp(environment.python))
    info.rename(environment.site / "shapes-1.1.dist-info")
    stamps.append(packages_stamp(environment.python))
    (environment.site / "shapes-1.1.dist-info").rmdir()
    environment.install("shapes-1.1", at=LONG_AGO + 1)
    stamps.append(packages_stamp(environment.python))
    assert len(set(stamps)) == len(stamps)
    (environment.site / "shapes-1.1.dist-info").rmdir()
    assert packages_stamp(environment.python) == stamps[0]


def test_a_module_without_a_distribution_does_not_change_it(environment: Environment) -> None:
    before = packages_stamp(environment.python)
    (environment.site / "__pycache__").mkdir()
    assert packages_stamp(environment.python) == before


def test_an_editable_link_that_is_pointed_elsewhere_changes_it(environment: Environment) -> None:
    link = environment.site / "__editable__.shapes-1.0.pth"
    link.write_text("/one/src\n")
    environment.settle()
    before = packages_stamp(environment.python)
    link.write_text("/two/src\n")  # in place: the folder's own time stays
    os.utime(environment.site, (LONG_AGO, LONG_AGO))
    assert packages_stamp(environment.python) != before


def test_a_repeated_call_neither_lists_folders_nor_starts_an_interpreter(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = packages_stamp(environment.python)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("not again")

    monkeypatch.setattr(subprocess, "run", refuse)
    monkeypatch.setattr(installed_packages.os, "scandir", refuse)
    assert packages_stamp(environment.python) == before


def test_a_folder_that_has_just_changed_is_not_taken_for_known(environment: Environment) -> None:
    packages_stamp(environment.python)
    environment.install("shapes-1.0")
    before = packages_stamp(environment.python)
    found = environment.site.stat()
    environment.install("colours-1.0")  # within the same tick of the file system's clock
    os.utime(environment.site, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert packages_stamp(environment.python) != before


def test_this_interpreter_is_never_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    assert packages_stamp(sys.executable) == packages_stamp()


def test_another_process_of_this_interpreter_finds_the_same_stamp() -> None:
    code = "from gen_worker.contract.installed_packages import packages_stamp; print(packages_stamp())"
    done = subprocess.run(
        [sys.executable, "-P", "-s", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == packages_stamp()


def test_system_folders_count_where_the_environment_includes_them(tmp_path: Path) -> None:
    def folders_of(environment: Environment) -> list[str]:
        done = subprocess.run(
            [environment.python, "-I", installed_packages.__file__],
            capture_output=True,
            text=True,
            check=True,
        )
        return list(installed_packages.json.loads(done.stdout)[2])

    alone, included = Environment(tmp_path / "alone"), Environment(tmp_path / "included", has_system=True)
    assert folders_of(alone) == [str(alone.site)]
    assert folders_of(included)[0] == str(included.site)
    assert len(folders_of(included)) > 1
    assert set(site_folders()) != set()


def test_an_interpreter_that_cannot_be_asked_is_an_error_that_names_it(tmp_path: Path) -> None:
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nexit 3\n")
    silent.chmod(0o755)
    with pytest.raises(OSError, match=str(silent)):
        packages_stamp(silent)
    with pytest.raises(OSError, match="nowhere"):
        packages_stamp(tmp_path / "nowhere")


def test_a_python_by_another_of_its_names_is_still_the_same(tmp_path: Path) -> None:
    real, other = tmp_path / "python3.11", tmp_path / "elsewhere"
    other.mkdir()
    real.touch()
    for name in (tmp_path / "python", tmp_path / "python3", other / "python"):
        name.symlink_to(real)
    assert is_same_python(str(tmp_path / "python"), str(tmp_path / "python3"))
    assert not is_same_python(str(tmp_path / "python"), str(other / "python"))  # another environment
