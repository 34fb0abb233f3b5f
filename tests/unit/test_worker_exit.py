"""A forked worker ends as an interpreter does: threads are waited for, exit functions run, the launcher's do not."""

import subprocess
import sys

PROGRAM = """
import atexit, concurrent.futures, os, threading, weakref
from gen_worker.launcher import worker
from gen_worker.launcher.messages import WorkerPlan

class Owner: ...

launchers = Owner()
weakref.finalize(launchers, print, "finalizer of the launcher", flush=True)
plan = WorkerPlan(run_id="r", number=1, argv=(), env={}, cwd=".", code_dir="", log_path="", attempt_dir="",
                  is_warm=True, is_writer_wanted=False)
pool = concurrent.futures.ThreadPoolExecutor(1)
own = Owner()
pid = os.fork()
if pid == 0:
    def work():
        worker._prepare_interpreter(plan, [], dict(os.environ))
        threads = concurrent.futures.ThreadPoolExecutor(1)
        threads.submit(int).result()  # it is idle at the end
        atexit.register(print, "exit function", flush=True)
        weakref.finalize(own, print, "finalizer of the worker", flush=True)
        started, may_end = threading.Event(), threading.Event()
        def last():
            started.set()
            may_end.wait()
            print("last thread", flush=True)
        threading.Thread(target=last).start()
        started.wait()
        may_end.set()
        return 7
    worker._run_to_exit(work)
print("exit code", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
os._exit(0)
"""


def test_a_forked_worker_ends_as_an_interpreter_does() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=120
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "last thread"
    assert sorted(lines[1:3]) == ["exit function", "finalizer of the worker"]
    assert lines[3:] == ["exit code 7"]
