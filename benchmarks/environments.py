"""The environments that are measured in: ours with most peers, and one apart for those whose pins exclude ours.

No import beyond the standard library: `run.py` makes them before there is anything else.
"""

import hashlib
import subprocess
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A folder, and what is installed in it: pinned peers, and with each of them whatever must not be lost to one."""

    folder: Path
    requirements: Path
    pip_options: tuple[str, ...] = ()
    ours: tuple[str, ...] = ()
    more_pins: tuple[Path, ...] = ()

    @property
    def bin(self) -> Path:
        return self.folder / "bin"

    @property
    def python(self) -> Path:
        return self.bin / "python"

    def make(self) -> None:
        """Installed again when a pin changes. A peer that cannot be had is named; without ours it raises."""
        pins = (self.requirements, *self.more_pins)
        digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in pins)).hexdigest()
        stamp = self.folder / ".bench-ready"
        if stamp.exists() and stamp.read_text() == digest:
            return
        print(f"Setting up {self.folder.name} (once; some minutes)…", flush=True)
        if not self.python.exists():
            venv.create(self.folder, with_pip=True)
        if self._install("-r", str(self.requirements), *self.ours):
            stamp.write_text(digest)
            return
        # One peer that cannot be had must not cost the others: it will be shown as not measured.
        wanted = read_pins(self.requirements)
        torch = [pin for pin in wanted if pin.startswith("torch==")]
        if self.ours and not self._install(*torch, *self.ours):
            raise SystemExit("torch and the worker could not be installed: nothing can be measured")
        for peer in wanted:
            if peer not in torch and not self._install(*torch, peer):
                print(f"{peer} could not be installed: it will be shown as not measured", flush=True)

    def _install(self, *what: str) -> bool:
        pip = [self.python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", *self.pip_options]
        return subprocess.run([*pip, *what], cwd=ROOT, check=False).returncode == 0

    def versions(self, names: Sequence[str]) -> dict[str, str]:
        """Of those that are installed; read from outside, so that no interpreter need be started."""
        sites = [str(site) for site in self.folder.glob("lib/python*/site-packages")]
        found = {each.name: each.version for each in distributions(path=sites)}
        return {name: found[name] for name in names if name in found}


def read_pins(requirements: Path) -> list[str]:
    lines = (line.split("#")[0].strip() for line in requirements.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


MAIN = Environment(
    folder=ROOT / ".venv-bench",
    requirements=HERE / "requirements.txt",
    pip_options=("-c", "constraints.txt"),
    ours=("-e", ".[torch]"),
    more_pins=(ROOT / "constraints.txt", ROOT / "pyproject.toml"),
)
APART = Environment(folder=ROOT / ".venv-bench-apart", requirements=HERE / "requirements-apart.txt")
