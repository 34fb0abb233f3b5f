"""The committed page is what its sources make: told without Node, by the hashes that the build writes beside it."""

import gzip
import hashlib
import json
from pathlib import Path

import trn

ROOT = Path(__file__).parent.parent.parent
WEB = ROOT / "web"
STATIC = Path(trn.__file__).parent / "gateway" / "static"
STAMP = json.loads((STATIC / "built-from.json").read_text())
# What a build reads, as `web/build/stamp.ts` has it.
SOURCES = (
    "build",
    "public",
    "src",
    "index.html",
    "package.json",
    "package-lock.json",
    "tsconfig.json",
    "vite.config.ts",
)
MAX_GZIP_BYTES = 90_000


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _hashes(root: Path, paths: list[Path]) -> dict[str, str]:
    files = [
        file for path in paths for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()
    ]
    return {file.relative_to(root).as_posix(): _hash(file) for file in files}


def test_the_built_page_is_made_from_the_sources_beside_it() -> None:
    now = _hashes(WEB, [WEB / name for name in SOURCES])
    stale = sorted(
        name for name in now.keys() | STAMP["sources"].keys() if now.get(name) != STAMP["sources"].get(name)
    )
    assert not stale, (
        f"changed since the last build: {', '.join(stale)}. Run `make web` and commit the result."
    )


def test_the_built_files_are_those_of_the_last_build() -> None:
    built = _hashes(STATIC, [STATIC])
    built.pop("built-from.json")
    assert built == STAMP["built"], (
        "src/trn/gateway/static/ was changed by hand or by a merge. Run `make web`."
    )


def test_each_built_file_has_its_compressed_form_beside_it() -> None:
    plain = [STATIC / name for name in STAMP["built"] if not name.endswith(".gz")]
    assert plain
    for file in plain:
        assert gzip.decompress(Path(f"{file}.gz").read_bytes()) == file.read_bytes()


def test_the_whole_page_is_small() -> None:
    sizes = {name: (STATIC / name).stat().st_size for name in STAMP["built"] if name.endswith(".gz")}
    assert sum(sizes.values()) <= MAX_GZIP_BYTES, sizes


def test_the_page_loads_nothing_from_elsewhere_and_runs_nothing_inline() -> None:
    html = (STATIC / "index.html").read_text()
    assert "<script>" not in html
    assert "http" not in html
    assert " on" not in html.split("<body>")[1]


def test_the_lock_file_has_a_hash_for_each_package_and_no_download_address() -> None:
    packages = json.loads((WEB / "package-lock.json").read_text())["packages"]
    for name, package in packages.items():
        assert "resolved" not in package, name
        assert name == "" or "integrity" in package, name
