"""`python` for tests, forked from a process that has torch imported: seconds saved per start.

A program runs as in a new interpreter, with a `__main__`, arguments, import path, environment and descriptors of its own.
/proc shows its arguments and environment as well. Only torch and torchmetrics are loaded already, and nothing of ours. A
start with options or variables that only a new interpreter obeys gets one.
"""

import atexit
import builtins
import contextlib
import ctypes
import functools
import gc
import itertools
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
import warnings
from pathlib import Path
from typing import NoReturn

_NUM_FDS = 3
_SIZE_BYTES = 4
_ROOM_BYTES = 1 << 15  # for what /proc shows of a program
# What is started as `python`: it passes on all that it has, then its signals, and ends as the program does.
_SHIM = """#!{python} -IS
import os, signal, socket, sys
known = {{"PYTHONPATH", "PYTHONWARNINGS", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "PYTHON_EXEC"}}
words = sys.argv[1:]
first = next((word for word in words if word not in ("-u", "-P")), "-")
is_plain = first in ("-c", "-m") or not first.startswith("-")
if not is_plain or any(name.startswith("PYTHON") and name not in known for name in os.environ):
    os.execv({python!r}, [{python!r}, *words])
variables = [f"{{name}}={{value}}" for name, value in os.environ.items()]
content = os.fsencode("\\0".join([str(len(words)), *words, os.getcwd(), *variables]))
link = socket.socket(socket.AF_UNIX)
link.connect({address!r})
socket.send_fds(link, [len(content).to_bytes({size_bytes}, "little")], [0, 1, 2])
link.sendall(content)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, _frame: link.send(bytes([number])))
code = int(link.recv(16))
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if code != -signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""
# For launchers, which daemons start with their own interpreter.
_SITE = """import os, sys
if sys.orig_argv[1:4] == ["-P", "-m", "gen_worker.launcher"] and "--bare" not in sys.orig_argv:
    os.execv({shim!r}, [{shim!r}, *sys.orig_argv[1:]])
"""


def launchers_folder() -> str:
    """A folder for PYTHONPATH, with which launchers are started from the warm process, too."""
    folder = Path(python_folder(), "launchers")
    if not folder.exists():
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(_SITE.format(shim=f"{python_folder()}/python"))
    return str(folder)


@functools.cache
def python_folder() -> str:
    """A folder for the front of PATH, with a `python` that starts programs from a warm process. That ends with this one."""
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    address = folder / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen(64)
        process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(listener.fileno()), "-" * _ROOM_BYTES],
            env={**os.environ, "ROOM": "-" * _ROOM_BYTES},
            pass_fds=(listener.fileno(),),
            stdin=subprocess.PIPE,
        )
    atexit.register(process.communicate)  # the end of our pipe ends it
    shim = folder / "python"
    shim.write_text(_SHIM.format(python=sys.executable, address=str(address), size_bytes=_SIZE_BYTES))
    shim.chmod(0o700)
    return str(folder)


def _accept_program(listener: socket.socket) -> list[str]:
    """Fork a keeper for each program, until stdin ends. Returns in the programs, with their words."""
    while True:
        ready, _, _ = select.select([listener, 0], [], [])
        if 0 in ready:
            os._exit(0)
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            return _fork_program(connection)
        connection.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # keepers that have ended
                pass


def _fork_program(connection: socket.socket) -> list[str]:
    """Returns in the program; this process keeps it."""
    size, fds, _, _ = socket.recv_fds(connection, _SIZE_BYTES, _NUM_FDS)
    content = connection.recv(int.from_bytes(size, "little"), socket.MSG_WAITALL)
    pid = os.fork()
    if pid > 0:
        _keep(pid, connection)
    connection.close()
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    return os.fsdecode(content).split("\0")


def _keep(pid: int, connection: socket.socket) -> NoReturn:
    """Pass on signals, and say how the program ended; kill it if the one who wants it is gone."""
    program = os.pidfd_open(pid)
    while program not in select.select([program, connection], [], [])[0]:
        for number in connection.recv(16) or [signal.SIGKILL]:
            os.kill(pid, number)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _run(words: list[str], import_path: list[str]) -> None:
    """Set what a new interpreter has at its start, and run the program in it."""
    num_words = int(words[0])
    argv, cwd, variables = words[1 : num_words + 1], words[num_words + 1], words[num_words + 2 :]
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variable.partition("=")[::2] for variable in variables)
    _show([sys.executable, *argv], variables)
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in os.environ
    sys.warnoptions[:] = filter(None, os.environ.get("PYTHONWARNINGS", "").split(","))
    warnings._processoptions(sys.warnoptions)  # type: ignore[attr-defined]
    _set_threads()
    options = set(itertools.takewhile({"-u", "-P"}.__contains__, argv))
    argv = argv[len(options) :]
    if "-u" in options or os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    folders = (
        [] if "-P" in options else [{"-c": "", "-m": cwd}.get(argv[0], str(Path(argv[0]).absolute().parent))]
    )
    named = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [*folders, *(str(Path(path).absolute()) for path in named), *import_path]
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    if argv[0] == "-m":
        sys.argv[:] = argv[1:]
        runpy._run_module_as_main(argv[1])  # type: ignore[attr-defined]
    elif argv[0] == "-c":
        sys.argv[:] = ["-c", *argv[2:]]
        exec(compile(argv[1], "<string>", "exec"), module.__dict__)
    else:
        sys.argv[:] = argv
        module.__file__ = str(Path(argv[0]).absolute())
        exec(compile(Path(argv[0]).read_bytes(), argv[0], "exec"), module.__dict__)


def _show(argv: list[str], variables: list[str]) -> None:
    """In /proc, where others look for processes: over what this process was started with."""
    places = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arg_start, arg_end, env_start, env_end = map(int, places[45:49])
    title = os.fsencode(" ".join(argv))[: arg_end - arg_start - 2].ljust(arg_end - arg_start - 1, b"\0")
    ctypes.memmove(
        arg_start, title + b" ", arg_end - arg_start
    )  # the end that is no zero says that it is a title
    content = os.fsencode("\0".join(variables))[: env_end - env_start - 1]
    ctypes.memmove(env_start, content.ljust(env_end - env_start, b"\0"), env_end - env_start)


def _set_threads() -> None:
    """torch has read the variable at its import."""
    import torch

    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))


def main() -> None:
    import_path = sys.path[:]
    import torch._dynamo  # the first optimizer imports it, which takes a second
    import torch.distributed.run  # noqa: F401
    import torchmetrics  # noqa: F401

    gc.freeze()  # else a collection in a program would copy all pages
    _run(_accept_program(socket.socket(fileno=int(sys.argv[1]))), import_path)


if __name__ == "__main__":
    main()
