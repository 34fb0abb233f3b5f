"""Frozen code is what is imported: through every kind of editable install, in every process, and only the author's."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from gen_worker.frozen_imports import COPY, ORIGINAL, FrozenCode, frozen_variables, name_originals

# As setuptools writes it for an editable install of a package whose folder has another place than its name says.
EDITABLE_FINDER = """
import importlib.util, pathlib, sys
MAPPING = {mapping!r}
class _EditableFinder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name not in MAPPING:
            return None
        folder = pathlib.Path(MAPPING[name])
        return importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)])
sys.meta_path.append(_EditableFinder)
"""


class Project:
    """A folder with code, its frozen copy, and edits that were made since."""

    def __init__(self, root: Path) -> None:
        self.original, self.copy = root / "project", root / "run" / "code"
        for folder in (self.original, self.copy):
            folder.mkdir(parents=True)

    def freeze(self, *paths: str, **sources: str) -> None:
        """Files, empty or with a source by the name of the file; each is edited after it was frozen."""
        for path in paths:
            text = sources.get(Path(path).stem.strip("_"), "")
            for folder in (self.original, self.copy):
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (self.copy / path).write_text(f"{text}\nWHICH = 'frozen'\n")
            (self.original / path).write_text(f"{text}\nWHICH = 'edited'\n")

    def leave_out(self, path: str) -> Path:
        file = self.original / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("WHICH = 'live'\n")
        return file

    def ask(self, code: str, *, before: str = "", original: Path | None = None, **environ: str) -> Any:
        """What `code` answers in a process of a worker, after `before` and the author's first import."""
        lines = [
            "import json, sys",
            textwrap.dedent(before),
            "from gen_worker.trainer.author.plugin_import import import_author_module as load",
            textwrap.dedent(code),
        ]
        done = subprocess.run(
            [sys.executable, "-P", "-c", "\n".join(lines)],
            env={
                **os.environ,
                "PYTHONPATH": str(self.copy),
                "PYTHONSAFEPATH": "1",
                **frozen_variables(str(original or self.original), str(self.copy)),
                **environ,
            },
            cwd=self.original,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


SAY = "print(json.dumps([load(name).WHICH for name in {names}]))"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def path_link(folder: Path) -> str:
    """As a `.pth` file of an editable install does it."""
    return f"sys.path.append({str(folder)!r})"


def test_a_source_folder_that_is_installed_by_a_path_file_is_imported_from_the_copy(project: Project) -> None:
    project.freeze(
        "src/pkg/__init__.py",
        "src/pkg/model.py",
        model="from pkg import WHICH as OTHER\nassert OTHER == 'frozen'",
    )
    code = SAY.format(names=["pkg", "pkg.model"])
    assert project.ask(code, before=path_link(project.original / "src")) == ["frozen", "frozen"]


def test_a_package_that_an_editable_finder_knows_is_imported_from_the_copy(project: Project) -> None:
    project.freeze("lib/code/__init__.py", "lib/code/model.py")
    finder = EDITABLE_FINDER.format(mapping={"pkg": str(project.original / "lib" / "code")})
    assert project.ask(SAY.format(names=["pkg", "pkg.model"]), before=finder) == ["frozen", "frozen"]


def test_links_on_either_side_lead_to_the_copy(project: Project, tmp_path: Path) -> None:
    project.freeze("src/pkg/__init__.py")
    alias, other = tmp_path / "alias", tmp_path / "other"
    for link in (alias, other):
        link.symlink_to(project.original)
    code = SAY.format(names=["pkg"])
    assert project.ask(code, before=path_link(alias / "src")) == ["frozen"]
    assert project.ask(code, before=path_link(alias / "src"), original=other) == ["frozen"]
    assert project.ask(code, before=path_link(project.original / "src"), original=other) == ["frozen"]


def test_a_copy_that_lies_inside_the_folder_is_still_the_copy(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.copy = project.original / ".home" / "runs" / "r" / "code"
    project.copy.mkdir(parents=True)
    project.freeze("src/pkg/__init__.py", "src/pkg/model.py")
    code = SAY.format(names=["pkg", "pkg.model"])
    assert project.ask(code, before=path_link(project.original / "src")) == ["frozen", "frozen"]


def test_folders_without_a_file_of_their_own_are_the_copys(project: Project) -> None:
    project.freeze("src/space/one.py", "src/space/deep/two.py")
    code = SAY.format(names=["space.one", "space.deep.two"])
    assert project.ask(code, before=path_link(project.original / "src")) == ["frozen", "frozen"]


def test_a_folder_that_the_author_adds_later_leads_to_the_copy(project: Project) -> None:
    project.freeze("tools/extra.py", "start.py")
    code = f"load('start'); sys.path.insert(0, {str(project.original / 'tools')!r}); " + SAY.format(
        names=["extra"]
    )
    assert project.ask(code) == ["frozen"]


def test_a_relative_folder_of_the_jobs_own_pythonpath_leads_to_the_copy(project: Project) -> None:
    project.freeze("src/pkg/__init__.py")
    path = os.pathsep.join(["src", str(project.copy)])
    assert project.ask(SAY.format(names=["pkg"]), PYTHONPATH=path) == ["frozen"]


def test_what_the_launcher_had_imported_already_is_imported_anew(project: Project) -> None:
    project.freeze("src/pkg/__init__.py")
    before = f"{path_link(project.original / 'src')}\nimport pkg\nassert pkg.WHICH == 'edited'"
    assert project.ask(SAY.format(names=["pkg"]), before=before) == ["frozen"]


def test_also_a_warm_process_forgets_what_it_had_imported_of_the_author(project: Project) -> None:
    project.freeze("src/pkg/__init__.py", "src/late/__init__.py")
    before = f"""
{path_link(project.original / "src")}
import pkg
from gen_worker.frozen_imports import note_warm_modules
note_warm_modules()
import late
"""
    assert project.ask(SAY.format(names=["pkg", "late"]), before=before) == ["frozen", "frozen"]


def test_what_the_copy_does_not_have_is_imported_live_and_named(project: Project) -> None:
    project.freeze("src/pkg/__init__.py")
    left_out = [project.leave_out("src/pkg/secret.py"), project.leave_out("src/local_settings.py")]
    code = """
    found = [load(name).WHICH for name in ("pkg", "pkg.secret", "local_settings")]
    from gen_worker.trainer.author.code_identity import find_outside_code, outside_imports
    outside = {name: module.file for name, module in find_outside_code(outside_imports()).items()}
    print(json.dumps([found, outside]))
    """
    found, outside = project.ask(code, before=path_link(project.original / "src"))
    assert found == ["frozen", "live", "live"]
    assert outside == {"pkg.secret": str(left_out[0]), "local_settings": str(left_out[1])}


def test_a_module_that_was_left_out_of_the_snapshot_is_named_where_it_is_missed(project: Project) -> None:
    project.freeze("start.py", start="import local_settings")
    left_out = project.leave_out("local_settings.py")
    code = """
    from gen_worker.errors import PluginError
    told = []
    for name in ("start", "local_settings"):
        try:
            load(name)
        except PluginError as fault:
            told.append(str(fault))
    print(json.dumps(told))
    """
    for fault in project.ask(code):
        assert f"{left_out} is not in the frozen code" in fault


def test_code_of_another_editable_install_is_named_and_installed_packages_are_not(
    project: Project, tmp_path: Path
) -> None:
    project.freeze("start.py")
    shared = tmp_path / "elsewhere" / "src"
    (shared / "shared_lib").mkdir(parents=True)
    (shared / "shared_lib" / "__init__.py").touch()
    target = tmp_path / "target"
    (target / "given-1.0.dist-info").mkdir(parents=True)
    (target / "given.py").touch()
    vendored = project.original / ".venv" / "lib" / "site-packages"
    vendored.mkdir(parents=True)
    (vendored / "installed.py").touch()
    before = "\n".join(path_link(folder) for folder in (shared, target, vendored))
    code = """
    load("start")
    import numpy, yaml, shared_lib, given, installed
    from gen_worker.trainer.author.code_identity import find_outside_code, outside_imports
    print(json.dumps(list(find_outside_code(outside_imports()))))
    """
    assert project.ask(code, before=before) == ["shared_lib"]


def test_our_own_package_is_never_imported_twice_though_its_folder_was_frozen(project: Project) -> None:
    import gen_worker

    ours = Path(gen_worker.__file__).parent.parent
    (project.copy / "src" / "gen_worker").mkdir(parents=True)
    (project.copy / "src" / "gen_worker" / "__init__.py").write_text("raise SystemExit('a second copy')")
    (project.copy / "src" / "beside.py").write_text("WHICH = 'frozen'")
    (project.copy / "start.py").write_text(
        "import gen_worker.contract.sizes, trn.core.errors, gen_worker.launcher.server"
    )
    code = """
    load("start")
    print(json.dumps([sys.modules[name].__file__ for name in ("gen_worker", "trn", "gen_worker.launcher.server")]))
    """
    files = project.ask(code, original=ours.parent)
    assert all(file.startswith(f"{ours}/") for file in files)


def test_a_spawned_process_of_the_authors_imports_the_copy(project: Project) -> None:
    project.freeze(
        "lib/code/__init__.py",
        "lib/code/late.py",
        init="def which():\n    from pkg import late\n    return late.WHICH",
    )
    finder = EDITABLE_FINDER.format(mapping={"pkg": str(project.original / "lib" / "code")})
    site = project.copy.parent / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(finder)  # in every interpreter, as a path file would have it
    # As in a worker: `__main__` is the entry point, and so a spawned process begins with it.
    code = """
    from gen_worker import entrypoint
    sys.modules["__main__"] = entrypoint
    import multiprocessing
    answers = []
    for method in ("spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            answers.append(pool.apply(load("pkg").which))
    print(json.dumps(answers))
    """
    path = os.pathsep.join([str(project.copy), str(site)])
    assert project.ask(code, PYTHONPATH=path) == ["frozen", "frozen"]


def test_text_names_the_authors_file_beside_the_frozen_one() -> None:
    environ = {ORIGINAL: "/home/u/proj", COPY: "/trn/runs/r/code"}
    text = """Traceback (most recent call last):
  File "/trn/runs/r/code/src/model.py", line 31, in train_step
    return 1 / 0
ZeroDivisionError: at /trn/runs/r/code/data.py:7, in f; not /trn/runs/r/codes/x.py"""
    told = """Traceback (most recent call last):
  File "/home/u/proj/src/model.py", line 31, in train_step (frozen copy: /trn/runs/r/code/src/model.py)
    return 1 / 0
ZeroDivisionError: at /home/u/proj/data.py:7 (frozen copy: /trn/runs/r/code/data.py), in f; not /trn/runs/r/codes/x.py"""
    assert name_originals(text, environ) == told
    assert name_originals(told, environ) == told
    assert name_originals(text, {}) == text


def test_paths_are_mapped_by_whole_names(tmp_path: Path) -> None:
    code = FrozenCode("/home/u/proj", "/run/code", "/home/u/proj", "/run/code")
    assert code.to_copy("/home/u/proj/a/b.py") == "/run/code/a/b.py"
    assert code.to_copy("/home/u/proj") == "/run/code"
    assert code.to_copy("/home/u/project/b.py") is None
    assert code.to_original("/run/code/a/b.py") == "/home/u/proj/a/b.py"
    assert code.to_original(str(tmp_path)) is None
