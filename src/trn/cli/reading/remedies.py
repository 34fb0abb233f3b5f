"""What a person can do about a cause, by its id; the causes themselves are in `trn.core.causes`."""

_RESUME = "`trn resume {run_id}` {resumes}"
_FIXED = "fix the code, then `trn resume {run_id}{code}` {resumes}"
_SUBMIT = "fix the job or its code and submit it again; `trn logs {run_id}` has the details"
_MEMORY = "use a smaller batch or more memory_mb, then `trn resume {run_id}` {resumes}"
_LONGER = "`trn resume {run_id} --set time_limit_s=…` {resumes}"
_REPORT = "report it with `daemon.log`; `trn resume {run_id}` tries again"
_DEFAULT = "`trn logs {run_id}` has the details"

REMEDIES: dict[str, str] = {
    "startup": _SUBMIT,
    "input": _SUBMIT,
    "auth": "renew the token, then submit it again",
    "model-load": _SUBMIT,
    "train-step": _FIXED,
    "upload": "check the endpoint, then `trn resume {run_id}` {resumes}",
    "stopped": _RESUME,
    "timeout": _LONGER,
    "connection": "check the other side, then `trn resume {run_id}` {resumes}",
    "disk-full": "free some space, then `trn resume {run_id}` {resumes}",
    "out-of-memory": _MEMORY,
    "killed": _RESUME,
    "crashed": "`trn logs {run_id}` has the line of the code that crashed; `trn resume {run_id}` {resumes}",
    "bug": "`trn logs {run_id}` has the output; `trn resume {run_id}{code}` {resumes}",
    "lost": _RESUME,
    "reboot": _RESUME,
    "heartbeat-timeout": "`trn logs {run_id}` has the last lines; `trn resume {run_id}` {resumes}",
    "start-timeout": "check the disk and the network, then `trn resume {run_id}` {resumes}",
    "time-limit": _LONGER,
    "launch-failed": _REPORT,
    "never-launched": _RESUME,
    "code-missing": "submit it again",
    "secret-missing": "pass them again: `trn resume {run_id} {secrets}` {resumes}",
    "trn-fault": _REPORT,
}
_BY_SIGNAL = {
    "SIGKILL": "if you did not kill it, the system was out of memory: " + _MEMORY,
    "SIGILL": "install packages that were built for this CPU",
    "SIGXCPU": "raise the limit on CPU time, then `trn resume {run_id}` {resumes}",
}


def find_remedy(cause_id: str, signal: str = "") -> str:
    """A template with run_id, resumes (what a resume does), code and secrets (options). Ids of newer releases: the log."""
    return _BY_SIGNAL.get(signal) or REMEDIES.get(cause_id, _DEFAULT)
