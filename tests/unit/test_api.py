import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gen_worker.errors import Category, PluginError, TrainingCanceled
from gen_worker.trainer.api import load_trainer_plugin
from gen_worker.trainer.author.plugin_import import import_symbol
from gen_worker.trainer.contracts import TrainerPlugin

SOUND = """
class {name}:
    def setup(self, ctx): pass
    def configure(self, ctx): return {{}}
    def prepare_batch(self, raw_batch, state, ctx): return raw_batch
    def train_step(self, prepared_batch, state, ctx): return None
    def state_dict(self, state): return state
    def load_state_dict(self, state, payload, ctx): pass
"""

Author = Callable[..., Path]


def sound(name: str = "MyTrainer") -> str:
    return SOUND.format(name=name)


@pytest.fixture
def author(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Author]:
    """Writes an author's module into the working folder."""
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(source: str, name: str = "author_code") -> Path:
        path = tmp_path / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        return path

    yield write
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def refusal(ref: str) -> str:
    with pytest.raises(PluginError) as caught:
        load_trainer_plugin(ref)
    assert caught.value.category is Category.STARTUP
    return str(caught.value)


class TestFinding:
    def test_a_class_is_built_and_an_instance_is_taken(self, author: Author) -> None:
        author(sound() + "\nREADY = MyTrainer()\n")
        built = load_trainer_plugin("author_code:MyTrainer")
        assert type(built).__name__ == "MyTrainer"
        assert isinstance(built, TrainerPlugin)
        assert load_trainer_plugin("author_code:READY") is sys.modules["author_code"].READY

    def test_the_working_folder_comes_first(self, author: Author, tmp_path: Path) -> None:
        author(sound())
        load_trainer_plugin("author_code:MyTrainer")
        assert sys.path[0] == str(tmp_path)
        load_trainer_plugin("author_code:MyTrainer")
        assert sys.path.count(str(tmp_path)) == 1

    def test_pythonpath_is_searched_also_when_it_was_set_after_the_start(
        self, author: Author, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        author(sound(), "elsewhere.far_code")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/nowhere", str(tmp_path / "elsewhere")]))
        assert type(load_trainer_plugin("far_code:MyTrainer")).__name__ == "MyTrainer"

    def test_a_module_in_a_package_and_a_nested_class(self, author: Author) -> None:
        author("", "pkg.__init__")
        author("class Outer:\n" + textwrap.indent(sound("Inner"), "    "), "pkg.train")
        assert type(load_trainer_plugin("pkg.train:Outer.Inner")).__qualname__ == "Outer.Inner"

    @pytest.mark.parametrize(
        ("source", "found"),
        [
            (sound("Trainer") + sound("Other"), "Trainer"),
            (sound("A") + "\ntrainer = A()\n" + sound("B"), "A"),
            (sound("Trainer") + sound("A") + "\nTRAINER = A\n", "A"),
            (sound("Only") + "\nclass Model: pass\n", "Only"),
            (sound("Only") + "\nAlias = Only\n", "Only"),
            ("from gen_worker.trainer.contracts import TrainerPlugin\n" + sound("Only"), "Only"),
            ("from gen_worker import trainer\n" + sound("Only"), "Only"),
        ],
    )
    def test_a_module_alone_holds_its_trainer(self, author: Author, source: str, found: str) -> None:
        author(source)
        assert type(load_trainer_plugin("author_code")).__name__ == found

    def test_a_trainer_class_that_was_imported_under_the_usual_name_is_not_the_authors(
        self, author: Author
    ) -> None:
        author("class Trainer: pass\n", "some_library")
        author("from some_library import Trainer\n" + sound("Only"))
        assert type(load_trainer_plugin("author_code")).__name__ == "Only"

    def test_several_candidates_are_listed(self, author: Author) -> None:
        author(sound("B") + sound("A") + sound("_Base"))
        assert "name one of them: author_code:A, author_code:B" in refusal("author_code")

    def test_a_module_without_a_candidate_says_what_its_classes_lack(self, author: Author) -> None:
        author(sound().replace("def train_step", "def training_step"))
        assert "MyTrainer lacks train_step" in refusal("author_code")

    def test_a_missing_symbol_names_the_nearest(self, author: Author) -> None:
        path = author(sound())
        text = refusal("author_code:MyTrainr")
        assert f"module 'author_code' ({path}) has no 'MyTrainr': did you mean 'MyTrainer'?" in text

    def test_a_missing_symbol_without_a_near_name_lists_the_classes(self, author: Author) -> None:
        author(sound())
        assert "it has the classes MyTrainer" in refusal("author_code:Zzzz")

    @pytest.mark.parametrize("ref", ["", ":A", "a:", "a b:C", ".a:B", "a:B:C", "1a:B", None, 3])
    def test_a_malformed_reference_is_refused_with_an_example(self, ref: Any) -> None:
        assert "expected module:symbol" in refusal(ref)

    @pytest.mark.parametrize("ref", ["pkg/train.py:Mine", "./pkg/train.py:Mine", "pkg/train:Mine"])
    def test_a_file_is_turned_into_the_module_it_is(self, ref: str) -> None:
        assert "expected a module: pkg.train:Mine" in refusal(ref)

    def test_symbols_that_are_no_trainers_are_loaded_too(self, author: Author) -> None:
        author("class Print: pass\n")
        assert import_symbol("author_code:Print").__name__ == "Print"
        with pytest.raises(PluginError, match="module only"):
            import_symbol("author_code")


class TestImportFaults:
    def test_a_missing_module_names_the_folders_searched_and_the_nearest(
        self, author: Author, tmp_path: Path
    ) -> None:
        author(sound())
        text = refusal("author_kode:MyTrainer")
        assert "module 'author_kode' is not found" in text
        assert "did you mean 'author_code'" in text
        assert f"\n  - {tmp_path}" in text

    def test_a_missing_submodule_is_not_found_either(self, author: Author) -> None:
        author(sound())
        assert "'author_code' is not a package" in refusal("author_code.deeper:MyTrainer")

    def test_a_class_with_a_dot_is_shown_with_a_colon(self, author: Author) -> None:
        author(sound())
        assert "did you mean 'author_code:MyTrainer'?" in refusal("author_code.MyTrainer")

    def test_no_module_of_an_installed_package_is_taken_for_the_authors(self, author: Author) -> None:
        author(sound())
        assert "did you mean" not in refusal("nomodule:MyTrainer")

    def test_a_module_missing_inside_the_authors_code_names_the_authors_line(self, author: Author) -> None:
        path = author("import os\nimport not_installed_anywhere\n")
        text = refusal("author_code:MyTrainer")
        assert text.startswith(f"{path}:2: importing 'author_code' raised ModuleNotFoundError")
        assert "searched" not in text

    def test_a_package_that_fails_to_import_its_own_module_names_the_line(self, author: Author) -> None:
        path = author("import pkg2.train\n", "pkg2.__init__")
        assert refusal("pkg2.train:T").startswith(f"{path}:1: ")

    def test_a_syntax_error_names_file_and_line(self, author: Author) -> None:
        path = author("x = 1\ndef f(:\n    pass\n")
        assert refusal("author_code:T").startswith(f"{path}:2: SyntaxError: ")

    def test_any_other_exception_names_the_authors_line_and_is_chained(self, author: Author) -> None:
        path = author("import json\n\njson.loads('{')\n")
        with pytest.raises(PluginError) as caught:
            load_trainer_plugin("author_code:T")
        assert str(caught.value).startswith(f"{path}:3: importing 'author_code' raised JSONDecodeError: ")
        assert isinstance(caught.value.__cause__, ValueError)

    def test_a_module_that_exits_is_refused_with_what_to_do(self, author: Author) -> None:
        path = author("import sys\nsys.exit(3)\n")
        text = refusal("author_code:T")
        assert text.startswith(f"{path}:2: ")
        assert "if __name__ == '__main__':" in text

    def test_an_exception_whose_text_raises_is_still_reported(self, author: Author) -> None:
        author("class Bad(Exception):\n    def __str__(self): raise ValueError\nraise Bad\n")
        assert "raised Bad: Bad()" in refusal("author_code:T")

    def test_a_stop_request_during_the_import_passes_through(self, author: Author) -> None:
        author("from gen_worker.errors import TrainingCanceled\nraise TrainingCanceled('stop')\n")
        with pytest.raises(TrainingCanceled):
            load_trainer_plugin("author_code:T")


class TestBuilding:
    @pytest.mark.parametrize(
        "source",
        [
            "def T(ctx): pass",
            "T = lambda: 0",
            "import functools\nT = functools.partial(print)",
            "T = len",
            "class C:\n    def __call__(self): pass\nT = C()",
        ],
    )
    def test_plain_callables_are_refused(self, author: Author, source: str) -> None:
        author(source)
        assert "plain callables are unsupported" in refusal("author_code:T")

    def test_a_function_is_refused_with_its_line(self, author: Author) -> None:
        path = author("\n\ndef train(ctx):\n    pass\n")
        assert refusal("author_code:train").startswith(f"{path}:3: ")

    def test_a_constructor_that_needs_arguments_is_refused(self, author: Author) -> None:
        path = author(sound() + "    def __init__(self, lr): pass\n")
        text = refusal("author_code:MyTrainer")
        assert text.startswith(f"{path}:2: author_code:MyTrainer cannot be built")
        assert "missing a required argument: 'lr'" in text

    def test_a_constructor_that_raises_is_refused_with_its_line(self, author: Author) -> None:
        path = author(sound() + "    def __init__(self):\n        raise OSError('no weights')\n")
        assert (
            refusal("author_code:MyTrainer")
            == f"{path}:10: building author_code:MyTrainer raised OSError: no weights"
        )

    def test_a_constructor_that_exits_is_refused(self, author: Author) -> None:
        author(sound() + "    def __init__(self):\n        raise SystemExit(2)\n")
        assert "raised SystemExit: 2" in refusal("author_code:MyTrainer")

    def test_an_abstract_class_is_refused(self, author: Author) -> None:
        author("import abc\nclass T(abc.ABC):\n    @abc.abstractmethod\n    def setup(self, ctx): ...\n")
        assert "abstract" in refusal("author_code:T")

    def test_a_module_is_refused(self, author: Author) -> None:
        author("import json as T\n")
        assert "is a module, expected a class: json:MyTrainer" in refusal("author_code:T")

    def test_a_value_that_is_no_trainer_is_refused(self, author: Author) -> None:
        author("T = {}\n")
        text = refusal("author_code:T")
        assert "missing setup, configure" in text
        assert "`setup(self, ctx)`" in text


class TestHooks:
    def test_all_missing_hooks_are_named_with_the_class(self, author: Author) -> None:
        path = author(
            "class T:\n    def setup(self, ctx): pass\n    def training_step(self, b, s, c): pass\n"
        )
        text = refusal("author_code:T")
        assert text.startswith(
            f"{path}:1: author_code:T is not a valid trainer class: missing configure, prepare_batch"
        )
        for hook in ("prepare_batch", "train_step", "state_dict", "load_state_dict"):
            assert f"`{hook}(self, " in text
        assert "`training_step`: rename it to `train_step`?" in text
        assert "`setup(self" not in text

    def test_a_hook_that_cannot_take_its_arguments_is_refused_with_its_line(self, author: Author) -> None:
        path = author(
            sound().replace("train_step(self, prepared_batch, state, ctx)", "train_step(self, batch)")
        )
        text = refusal("author_code:MyTrainer")
        assert (
            f"{path}:6: `train_step(batch)` cannot be called positionally with (prepared_batch, state, ctx)"
            in text
        )
        assert "expected `train_step(self, prepared_batch, state, ctx)`" in text

    def test_every_fault_of_the_hooks_is_reported_at_once(self, author: Author) -> None:
        source = (
            sound()
            .replace("def setup(self, ctx): pass", "setup = 3")
            .replace("def configure(self, ctx)", "def configure(self)")
        )
        author(source + "    def sample(self, state): pass\n")
        text = refusal("author_code:MyTrainer")
        assert "`setup` is a int" in text
        assert "`configure()` cannot be called" in text
        assert (
            "`sample(state)` cannot be called by keyword with (state, step, request, output_dir, ctx)" in text
        )

    @pytest.mark.parametrize(
        ("hook", "accepted"),
        [
            ("def save_checkpoint(self, *, state, step, output_dir, final, ctx): pass", True),
            ("def save_checkpoint(self, state, step, output_dir, final, ctx): pass", True),
            ("def save_checkpoint(self, **everything): pass", True),
            ("def save_checkpoint(self, *, state, step, folder, final, ctx): pass", False),
            ("def save_checkpoint(self, state, step, output_dir, final, /, ctx): pass", False),
            ("def load_checkpoint(self, *, state, checkpoint_dir, payload, ctx): pass", True),
            ("def load_checkpoint(self, *, state, checkpoint_dir, ctx): pass", False),
            ("def validate_step(self, b, s, c): pass", True),
            ("def validate_step(self, *, batch, state, ctx): pass", False),
            ("def test_step(self, b, s, c, extra=1): pass", True),
            ("def test_step(self, b, s, c, extra): pass", False),
            ("def sample(self, *, state, step, request, output_dir, ctx): pass", True),
            ("sample = None", True),
            ("sample = 'x'", False),
            ("@staticmethod\n    def validate_step(b, s, c): pass", True),
            ("@classmethod\n    def validate_step(cls, b, s, c): pass", True),
        ],
    )
    def test_optional_hooks_are_checked_when_they_are_there(
        self, author: Author, hook: str, accepted: bool
    ) -> None:
        author(sound() + f"    {hook}\n")
        if accepted:
            load_trainer_plugin("author_code:MyTrainer")
        else:
            assert "is not a valid trainer class" in refusal("author_code:MyTrainer")

    @pytest.mark.parametrize("hook", ["setup", "train_step"])
    def test_async_hooks_are_refused_with_their_line(self, author: Author, hook: str) -> None:
        path = author(sound().replace(f"def {hook}", f"async def {hook}"))
        text = refusal("author_code:MyTrainer")
        assert f"{path}:{3 if hook == 'setup' else 6}: `{hook}` is async" in text

    def test_a_generator_is_refused(self, author: Author) -> None:
        author(sound().replace("return None", "yield None"))
        assert "`train_step` contains `yield`" in refusal("author_code:MyTrainer")

    def test_a_required_hook_that_is_none_is_refused(self, author: Author) -> None:
        author(sound() + "    setup = None\n")
        assert "`setup` is None" in refusal("author_code:MyTrainer")

    def test_a_decorated_hook_is_judged_by_what_it_wraps(self, author: Author) -> None:
        decorator = """
        import functools
        def logged(f):
            @functools.wraps(f)
            def wrapper(*args, **kwargs): return f(*args, **kwargs)
            return wrapper
        """
        author(
            textwrap.dedent(decorator) + sound() + "    @logged\n    def validate_step(self, batch): pass\n"
        )
        assert "`validate_step(batch)` cannot be called" in refusal("author_code:MyTrainer")

    def test_hooks_given_in_the_constructor_count(self, author: Author) -> None:
        author(
            sound().replace(
                "    def setup(self, ctx): pass", "    def __init__(self): self.setup = lambda ctx: None"
            )
        )
        assert callable(load_trainer_plugin("author_code:MyTrainer").setup)
