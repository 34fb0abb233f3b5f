"""The values of runs' secret variables: in this process's memory and nowhere else. A restart forgets them."""

from collections.abc import Iterable, Mapping

from gen_worker.contract.redaction import Secret


class SecretValues:
    """One for a daemon. What it was never given, or has forgotten, it looks for in the daemon's own environment."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._of_runs: dict[str, dict[str, Secret]] = {}  # by submission: a run's id is known later

    def keep(self, submission_id: str, values: Mapping[str, Secret]) -> None:
        """Besides those that it has of the run; for as long as this daemon lives: a run may be resumed after its end."""
        if values and submission_id:
            self._of_runs.setdefault(submission_id, {}).update(values)

    def find(self, submission_id: str, names: Iterable[str]) -> tuple[dict[str, Secret], list[str]]:
        """(the values that there are, the names of the others)."""
        kept = self._of_runs.get(submission_id, {})
        found: dict[str, Secret] = {}
        missing = []
        for name in names:
            if name in kept:
                found[name] = kept[name]
            elif name in self._environ:
                found[name] = Secret(self._environ[name])
            else:
                missing.append(name)
        return found, missing


def reveal(values: Mapping[str, Secret]) -> dict[str, str]:
    """For the worker's environment."""
    return {name: value.reveal() for name, value in values.items()}


def how_to_pass(names: Iterable[str]) -> str:
    """The options that give them anew."""
    return " ".join(f"--env {name}" for name in names)
