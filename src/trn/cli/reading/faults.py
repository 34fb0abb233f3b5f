"""Whose fault an attempt's end was, and what to do about it, from the words that the daemon recorded of it.

The daemon's table of failures decides; this one knows its rows by how their words begin. A test holds them together.
"""

from typing import NamedTuple

_LOG = "`trn logs {run_id}` has its last words"
_MEND = "mend the job or its code and submit it again; `trn logs {run_id}` has the details"
_RESUME = "`trn resume {run_id}` {resumes}"
_MENDED = "`trn resume {run_id}{code}` {resumes}"
_LESS_MEMORY = "use a smaller batch or model, or give the run more memory_mb"
_MEMORY = f"{_LESS_MEMORY}; {_RESUME}"
_KILLED = f"if nobody here killed it, the system did for want of memory: {_LESS_MEMORY}; {_RESUME}"
_REPORT = "please report it, with `daemon.log`; `trn resume {run_id}` tries it again"
_LONGER = "`trn resume {run_id} --set time_limit_s=…` has more time, and {resumes}"


class Blame(NamedTuple):
    """Whose fault (job, machine, trn), and what to do."""

    fault: str
    remedy: str


# How the words of a cause begin -> blame; the longest beginning that fits decides.
BLAMES: dict[str, Blame] = {
    "could not start": Blame("job", _MEND),
    "an input is not valid": Blame("job", _MEND),
    "not authorized": Blame("job", "renew its token or its rights and submit it again"),
    "the model did not load": Blame("job", _MEND),
    "failed while training": Blame("job", f"mend its code; {_LOG}; {_MENDED}"),
    "a connection broke": Blame("machine", f"see that the other side answers; {_RESUME}"),
    "the disk is full": Blame("machine", f"free some space; {_RESUME}"),
    "an upload failed": Blame("machine", f"see that the far side answers; {_RESUME}"),
    "stopped from outside": Blame("machine", _RESUME),
    "reached its time limit": Blame("job", _LONGER),
    "killed by SIGSEGV": Blame("job", f"look for native code that is not right; {_LOG}"),
    "killed by SIGBUS": Blame(
        "job", f"look for a file that was cut short, or for full shared memory; {_LOG}"
    ),
    "killed by SIGABRT": Blame("job", _LOG),
    "killed by SIGFPE": Blame("job", _LOG),
    "killed by SIGILL": Blame("job", "install packages that were built for this CPU"),
    "killed by SIGKILL": Blame("machine", _KILLED),
    "killed by SIGXCPU": Blame("machine", f"raise the limit on CPU time; {_RESUME}"),
    "killed by SIGTERM": Blame("machine", _RESUME),
    "killed by SIGINT": Blame("machine", _RESUME),
    "killed by SIGHUP": Blame("machine", _RESUME),
    "killed by ": Blame("machine", _RESUME),
    "out of memory": Blame("machine", _MEMORY),
    "process exited without a terminal event": Blame(
        "job",
        f"look for what ends the process, such as os._exit; `trn logs {{run_id}}` has what it printed; {_MENDED}",
    ),
    "process exited; exit status unknown": Blame("machine", _RESUME),
    "the machine went down": Blame("machine", _RESUME),
    "no heartbeat; killed": Blame("machine", f"{_LOG}; {_RESUME}"),
    "did not start in time; killed": Blame("machine", f"look at the disk and the network; {_RESUME}"),
    "did not stop at its time limit; killed": Blame("job", _LONGER),
    "could not be launched": Blame("trn", _REPORT),
    "the daemon ended before": Blame("trn", _RESUME),
    "its code snapshot or its Python is missing": Blame("trn", "submit it again"),
    "the values of its secret variables": Blame(
        "trn", "pass them again: `trn resume {run_id} --env NAME` {resumes}"
    ),
    "a fault of trn itself": Blame("trn", _REPORT),
}


# How Python, numpy and torch say that there was not enough memory.
_MEMORY_WORDS = ("MemoryError", "out of memory", "can't allocate memory", "Cannot allocate memory")


def find_blame(cause: str, run_id: str, *, resumes: str, code: str = "") -> Blame | None:
    """Whose fault, by the longest beginning. None for words not in the table: a newer daemon may have more.

    `resumes`: what a resume of the run does; `code`: the option with which it takes code that was mended since.
    """
    known = [beginning for beginning in BLAMES if cause.startswith(beginning)]
    if not known:
        return None
    blame = BLAMES[max(known, key=len)]
    if blame.fault == "job" and any(words in cause for words in _MEMORY_WORDS):
        blame = blame._replace(remedy=f"{_MEMORY}; {_LOG}")
    return blame._replace(remedy=blame.remedy.format(run_id=run_id, resumes=resumes, code=code))
