"""Two traces of one training: the first difference, and its likely cause."""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from gen_worker.tools.certificate.digest import Leaf
from gen_worker.tools.certificate.trace import Moment

CauseName = Literal[
    "unsaved-rng",
    "outside-state-dict",
    "load-state-dict",
    "wall-clock",
    "set-order",
    "unseeded-rng",
    "random-stream",
    "data-order",
    "not-repeatable",
    "unknown",
]


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """The first difference: `place` counts the lines of the second trace."""

    kind: Literal["batch", "metric", "state"]
    name: str
    step: int
    attempt: int
    expected: str
    found: str
    place: int


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """Why two runs differ, the evidence, and what to do."""

    cause: CauseName
    message: str
    evidence: list[str]
    remedy: str


def is_loss(name: str) -> bool:
    return "loss" in name.lower()


def find_divergence(straight: Sequence[Moment], other: Sequence[Moment]) -> Divergence | None:
    """The first step of `other` whose batch, losses or state differ from `straight`. `other` may repeat steps."""
    by_step = {moment.step: moment for moment in straight if moment.kind == "step"}
    attempt = 0
    for place, moment in enumerate(other):
        if moment.kind == "begin":
            attempt += 1
            continue
        known = by_step.get(moment.step)
        if known is None:
            continue
        for kind, expected, found in (
            ("batch", {"batch": known.batch}, {"batch": moment.batch}),
            ("metric", _losses(known), _losses(moment)),
            ("state", _digests(known.state), _digests(moment.state)),
        ):
            name = first_difference(expected, found)
            if name is not None:
                shown = (known.state, moment.state) if kind == "state" else (expected, found)
                return Divergence(
                    kind=kind,  # type: ignore[arg-type]
                    name=name,
                    step=moment.step,
                    attempt=attempt,
                    expected=_words(shown[0].get(name)),
                    found=_words(shown[1].get(name)),
                    place=place,
                )
    return None


def differing_metrics(straight: Sequence[Moment], other: Sequence[Moment]) -> list[str]:
    """Metrics, except losses, that differ."""
    by_step = {moment.step: moment for moment in straight if moment.kind == "step"}
    names: set[str] = set()
    for moment in other:
        known = by_step.get(moment.step)
        if known is not None and moment.kind == "step":
            names |= {
                name
                for name in moment.metrics.keys() | known.metrics.keys()
                if not is_loss(name) and moment.metrics.get(name) != known.metrics.get(name)
            }
    return sorted(names)


def first_difference(expected: Mapping[str, object], found: Mapping[str, object]) -> str | None:
    names = [*expected, *(name for name in found if name not in expected)]
    return next((name for name in names if expected.get(name) != found.get(name)), None)


def explain_resume(straight: Sequence[Moment], killed: Sequence[Moment], divergence: Divergence) -> Cause:
    """Runs without a kill are equal, so the difference comes from a checkpoint."""
    resumed = next(
        (moment for moment in reversed(killed[: divergence.place]) if moment.kind == "begin"), killed[0]
    )
    first = straight[0]
    known = next(
        (moment for moment in straight if moment.step == resumed.step and moment.kind == "step"), first
    )
    where = f"attempt {divergence.attempt} resumed at step {resumed.step}"
    lost = first_difference(_digests(known.state), _digests(resumed.state))
    if lost is not None:
        return Cause(
            cause="load-state-dict",
            message=f"{lost} differs from what was saved after load_state_dict",
            evidence=[
                where,
                f"{lost} was {_words(known.state.get(lost))}, is {_words(resumed.state.get(lost))}",
            ],
            remedy="make load_state_dict restore everything that state_dict returns",
        )
    changed = _not_restored(first, known, resumed)
    streams = [path for path in changed if known.hidden[path].kind == "rng"]
    if streams:
        return Cause(
            cause="unsaved-rng",
            message=f"the random generator {streams[0]} is not saved: it starts again after a resume",
            evidence=[
                where,
                *(f"{path} ({known.hidden[path].words}) has another state" for path in streams[:5]),
            ],
            remedy=f"put the state of {streams[0]} into state_dict, or use the global generators, which are saved for you",
        )
    if changed:
        others = f"; so do {len(changed) - 1} others" if len(changed) > 1 else ""
        return Cause(
            cause="outside-state-dict",
            message=f"{changed[0]} changes while training and is not restored{others}",
            evidence=[
                where,
                *(
                    f"{path} was {known.hidden[path].words}, is {_words(resumed.hidden.get(path))}"
                    for path in changed[:5]
                ),
            ],
            remedy=f"put {_whole(changed[0])} into state_dict and set it in load_state_dict",
        )
    stream = first_difference(_digests(known.rng), _digests(resumed.rng))
    if stream is not None:
        return Cause(
            cause="random-stream",
            message=f"the global random stream {stream} is at another position after the resume",
            evidence=[where],
            remedy="draw random numbers only in train_step and prepare_batch, not in threads or at import",
        )
    if divergence.kind == "batch":
        return Cause(
            cause="data-order",
            message="the order of the data differs after the resume",
            evidence=[where, "the state and the random streams are equal"],
            remedy="use data whose order follows from seed and epoch: see docs/data-order.md",
        )
    return Cause(
        cause="unknown",
        message="no visible state differs at the resume, but training differs",
        evidence=[where, "state_dict, attributes, globals and random streams are equal"],
        remedy="look for state in C extensions, files, caches or other modules",
    )


def explain_unrepeatable(
    one: Sequence[Moment], other: Sequence[Moment], *, agrees_when_stopped: bool
) -> Cause:
    """Two runs without a kill differ: the resume is not the cause."""
    evidence = ["two runs without a kill differ"]
    if agrees_when_stopped:
        return Cause(
            cause="wall-clock",
            message="training depends on the wall clock",
            evidence=[*evidence, "two runs are equal with a stopped clock in the author's modules"],
            remedy="use ctx.step for schedules and ctx.seed for seeds, not the time",
        )
    before, after = one[0].hidden, other[0].hidden
    streams = [
        path
        for path, leaf in before.items()
        if leaf.kind == "rng" and _digest(after.get(path)) != leaf.digest
    ]
    if streams:
        return Cause(
            cause="unseeded-rng",
            message=f"the random generator {streams[0]} has no seed",
            evidence=[*evidence, *(f"{path} differs before the first step" for path in streams[:5])],
            remedy="seed it with ctx.seed, and put its state into state_dict",
        )
    return Cause(
        cause="not-repeatable",
        message="training is not repeatable: two equal runs differ, even with a stopped clock",
        evidence=evidence,
        remedy="set `deterministic: true` in the job; look for threads, os.urandom, uuid4, or the pid",
    )


def explain_set_order(divergence: Divergence) -> Cause:
    return Cause(
        cause="set-order",
        message="training depends on the order of a set, or on hash()",
        evidence=[
            "two runs with the same PYTHONHASHSEED are equal",
            f"with another one they differ at step {divergence.step} in {divergence.name}",
        ],
        remedy="sort sets before iterating: `for name in sorted(names)`; do not use hash() of a string",
    )


def _whole(path: str) -> str:
    """The `state_dict()` that contains it: an optimizer's step is not saved alone."""
    head, mark, _ = path.partition(".state_dict()")
    return head + mark


def not_restored(straight: Sequence[Moment], killed: Sequence[Moment]) -> list[str]:
    """Attributes that changed in training and differ after a resume. They may be harmless."""
    by_step = {moment.step: moment for moment in straight if moment.kind == "step"}
    found: dict[str, None] = {}
    for moment in killed:
        if moment.kind == "begin" and moment.step in by_step:
            found |= dict.fromkeys(_not_restored(straight[0], by_step[moment.step], moment))
    return list(found)


def _not_restored(first: Moment, known: Moment, resumed: Moment) -> list[str]:
    return [
        path
        for path, leaf in known.hidden.items()
        if _digest(resumed.hidden.get(path)) != leaf.digest and _digest(first.hidden.get(path)) != leaf.digest
    ]


def _losses(moment: Moment) -> dict[str, str]:
    return {name: value for name, value in moment.metrics.items() if is_loss(name)}


def _digests(leaves: Mapping[str, Leaf]) -> dict[str, str]:
    return {path: leaf.digest for path, leaf in leaves.items()}


def _digest(leaf: Leaf | None) -> str | None:
    return None if leaf is None else leaf.digest


def _words(value: object) -> str:
    if isinstance(value, Leaf):
        return value.words if value.kind == "value" else f"{value.words} ({value.digest})"
    if isinstance(value, str) and "0x" in value:
        return repr(float.fromhex(value))
    return "missing" if value is None else str(value)
