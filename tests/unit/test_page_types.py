"""The page's types are the records that the gateway answers with: told without Node."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_the_types_of_the_page_are_those_of_the_api() -> None:
    generator = runpy.run_path(str(ROOT / "web" / "generate_types.py"))
    assert generator["FILE"].read_text() == generator["make_types"](), (
        "the records of the API have changed: run `python web/generate_types.py`, and `make web` if the page uses them"
    )
