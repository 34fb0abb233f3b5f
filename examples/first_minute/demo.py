"""Train, kill -9, resume, compare: does a killed and resumed run end with the same bits as one that was never stopped?

`make demo` runs this. Two runs of one job go through `trn run`, which starts a daemon in a home of the demo's own.
Everything is written below `demo-runs/` (`--out`), which is emptied at each start. At the end the two runs are open as a page; nothing else runs.
"""

import argparse
import hashlib
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import yaml
from digits import SIDE, write_digits
from runs import HERE, TRN, DemoHome, Run, RunFailedError
from screen import Bars, Screen

MARKER = ".made-by-the-demo"  # only a folder that has it is ever emptied


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="less data and fewer steps: for tests")
    parser.add_argument("--out", type=Path, default=HERE.parent.parent / "demo-runs", help="where to write")
    options = parser.parse_args()
    screen = Screen()
    for number in (signal.SIGTERM, signal.SIGHUP):  # on every stop signal, stop the workers first
        signal.signal(number, signal.default_int_handler)
    try:
        return tell_the_story(screen, options.out.resolve(), is_quick=options.quick)
    except KeyboardInterrupt:
        screen.say("\nStopped. No worker is left running.")
        return 130
    except RunFailedError as fault:
        screen.say_error(str(fault))
        return 1


def tell_the_story(screen: Screen, out: Path, *, is_quick: bool) -> int:
    job = read_job(is_quick=is_quick)
    empty_folder(out)
    screen.say("[bold]trn in one minute:[/] train, kill with -9, resume, compare every bit\n")
    num_files, rows_per_file, row_group_size = (2, 400, 100) if is_quick else (4, 2_500, 500)
    write_digits(
        out / "data" / "train",
        num_files=num_files,
        rows_per_file=rows_per_file,
        row_group_size=row_group_size,
        seed=1,
    )
    write_digits(out / "data" / "test", num_files=1, rows_per_file=1_000, row_group_size=1_000, seed=100)
    screen.say(
        f"  data   {num_files * rows_per_file:,} digits of {SIDE}x{SIDE} pixels in {num_files} parquet files, shuffled each epoch"
    )
    screen.say("  model  a small convolution net with dropout; AdamW with warm-up and cosine")
    screen.say(
        f"  job    {job['max_steps']} steps, a checkpoint every {job['checkpoint_every']} steps, run twice\n"
    )
    run_a, run_b = Run(out, "a"), Run(out, "b")
    run_a.write_job(job)
    run_b.write_job(job)
    # Half way, and half way between two checkpoints: the steps since the last one have to be computed again.
    half_way = job["max_steps"] // (4 if is_quick else 2)
    kill_at = half_way - half_way % job["checkpoint_every"] + job["checkpoint_every"] // 2
    for run in (run_a, run_b):
        screen.say(f"  $ trn run --code {near(HERE)} --config {near(run.job_path)}")
    screen.say()
    with DemoHome(out) as home:
        with screen.bars(job["max_steps"]) as bars:
            train(home, run_a, bars, ["A never stopped"])
            train(home, run_b, bars, ["B first worker ", "B second worker"], kill_at=kill_at)
        is_same = compare(screen, out, run_a, run_b, job["max_steps"])
        show_next(screen, run_b, home.open_page(f"/compare?run={run_a.name}&run={run_b.name}"))
    return 0 if is_same else 1


def read_job(*, is_quick: bool) -> dict[str, Any]:
    job: dict[str, Any] = yaml.safe_load((HERE / "job.yaml").read_text())
    if is_quick:
        job["max_steps"], job["checkpoint_every"] = job["max_steps"] // 3, job["checkpoint_every"] // 5
        job["hyperparams"]["warmup_steps"] = 10
    return job


def empty_folder(out: Path) -> None:
    if out.exists() and any(out.iterdir()):
        if not (out / MARKER).exists():
            raise SystemExit(f"{out} holds files that are not the demo's: name another folder with --out")
        DemoHome(out).stop()  # the page of the demo before
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / MARKER).touch()


def train(home: DemoHome, run: Run, bars: Bars, names: list[str], kill_at: int | None = None) -> None:
    """Follow one run by the JSON lines of `trn run`; kill its first worker after it has reported step `kill_at`."""
    bar = bars.add(names[0])
    attempt, was_killed = 1, False
    try:
        for event in run.follow(home):
            if event.get("attempt", attempt) > attempt:
                attempt = event["attempt"]
                bar.note(f"killed with -9 at step {bar.step}", "bold red")
                bar = bars.add(names[1])
            if event["event"] == "metrics":
                bar.advance(event["step"], event["values"]["train/loss"])
            elif event["event"] == "log" and event["message"].startswith("resumed at"):
                bar.step = event["step"]
                bar.note(f"resumed at step {event['step']}", "green")
            if kill_at is not None and not was_killed and bar.step >= kill_at:
                run.kill_worker(attempt)
                was_killed = True
    except KeyboardInterrupt:
        bar.note("stopping", "yellow")
        raise
    if was_killed and attempt == 1:
        raise RunFailedError("the worker had finished before it could be killed: run the demo again")


def compare(screen: Screen, out: Path, run_a: Run, run_b: Run, num_steps: int) -> bool:
    """Show how the two runs ended. Returns whether they are equal to the bit."""
    from results import count_differences, test_accuracy

    losses_a, losses_b = run_a.losses(), run_b.losses()
    same_steps = sum(
        losses_a.get(step, [])[-1:] == losses_b.get(step, [None])[-1:] for step in range(1, num_steps + 1)
    )
    repeated = {step: values for step, values in losses_b.items() if len(values) > 1}
    num_changed = sum(len(set(values)) > 1 for values in repeated.values())
    hash_a, hash_b = (hashlib.sha256(run.final_checkpoint.read_bytes()).hexdigest() for run in (run_a, run_b))
    num_different, num_values = count_differences(run_a.final_checkpoint, run_b.final_checkpoint)
    score_a, score_b = (test_accuracy(run.final_checkpoint, out / "data" / "test") for run in (run_a, run_b))
    screen.show_digits(score_a.images, score_a.guesses, score_a.labels)
    last_a, last_b = (values[num_steps][-1] for values in (losses_a, losses_b))
    screen.show_comparison(
        [
            ("steps", f"{num_steps}", f"{num_steps}, {len(repeated)} of them twice"),
            ("loss at the last step", f"{last_a!r}", f"{last_b!r}"),
            ("accuracy, unseen data", f"{score_a.accuracy:.1%}", f"{score_b.accuracy:.1%}"),
            ("sha256 of final.pt", f"{hash_a[:16]}…", f"{hash_b[:16]}…"),
        ]
    )
    is_same = same_steps == num_steps and not num_changed and hash_a == hash_b and not num_different
    verdict = "[bold green]Bit-identical.[/]" if is_same else "[bold red]NOT bit-identical.[/]"
    screen.say(f"\n  {verdict} {same_steps} of {num_steps} step losses are equal;")
    screen.say(f"  {num_different} of the {num_values:,} values in final.pt (weights and optimizer) differ.")
    if num_changed:
        screen.say(
            f"  {num_changed} of the {len(repeated)} steps that were computed twice gave another loss."
        )
    return is_same


def show_next(screen: Screen, run: Run, link: str) -> None:
    # A command for a shell without any setup.
    command = TRN.name if shutil.which(TRN.name) else near(TRN)
    home = near(run.folder.parent.parent)
    screen.show_next(
        [
            (f"{command} --home {home} status {run.name}", "status of run B"),
            (near(run.events_path), "its events, one per line"),
            (near(run.final_checkpoint.parent), "its checkpoints"),
            ("examples/first_minute/trainer.py", "the trainer class: six methods"),
            ("docs/authoring.md", "how to write your own"),
            ("make test", "runs all tests"),
        ]
    )
    screen.show_page(link, again=f"{command} --home {home} ui", stop=f"{command} --home {home} daemon stop")


def near(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


if __name__ == "__main__":
    sys.exit(main())
