"""The figures of a front as Prometheus reads them."""

from collections.abc import Iterable

from gen_worker.inference.front.figures import Figures
from gen_worker.inference.front.pool import ReplicaPool

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


def describe_figures(figures: Figures, pools: Iterable[tuple[str, ReplicaPool]]) -> str:
    """`pools` are those that compute, each with its role: live, split or shadow."""
    lines: list[str] = []

    def family(name: str, kind: str, what: str) -> str:
        lines.append(f"# HELP {name} {what}\n# TYPE {name} {kind}")
        return name

    def sample(name: str, value: float, **labels: object) -> None:
        shown = ",".join(f'{key}="{_escape(str(label))}"' for key, label in labels.items())
        lines.append(f"{name}{{{shown}}} {value}" if shown else f"{name} {value}")

    name = family("trn_requests_total", "counter", "Answers, by path and status.")
    for (path, status), number in sorted(figures.requests.items()):
        sample(name, number, path=path.decode("ascii", "replace"), code=status)
    sample(family("trn_rows_total", "counter", "Rows that were answered."), figures.rows)
    sample(
        family("trn_clients_left_total", "counter", "Requests whose client left before the answer."),
        figures.left,
    )
    name = family("trn_request_seconds", "histogram", "From a request's last byte to its answer.")
    for bound, number in figures.histogram():
        sample(f"{name}_bucket", number, le=bound)
    sample(f"{name}_bucket", figures.num_predictions, le="+Inf")
    sample(f"{name}_sum", figures.seconds)
    sample(f"{name}_count", figures.num_predictions)
    pools = list(pools)
    name = family("trn_model_info", "gauge", "The versions that compute.")
    for role, pool in pools:
        facts = pool.facts
        sample(
            name,
            1,
            role=role,
            run=facts.run_id,
            step=facts.step,
            weights=facts.weights_hash,
            code=facts.code_hash,
        )
    for name, (kind, what) in _OF_POOLS.items():
        family(name, kind, what)
        for role, pool in pools:
            sample(name, _read_pool(pool)[name], role=role, version=pool.facts.label)
    name = family("trn_batches_total", "counter", "Batches, by their shape.")
    for role, pool in pools:
        for shape, number in sorted(pool.counters.batches.items()):
            sample(name, number, role=role, version=pool.facts.label, shape=shape)
    name = family("trn_shadow_rows_total", "counter", "Rows that a shadow computed, too.")
    sample(name, figures.shadow_equal, result="equal")
    sample(name, figures.shadow_different, result="different")
    sample(name, figures.shadow_failed, result="failed")
    sample(
        family("trn_shadow_largest_difference", "gauge", "The largest difference of a number."),
        figures.shadow_largest_difference,
    )
    return "\n".join(lines) + "\n"


_OF_POOLS = {
    "trn_queue_rows": ("gauge", "Rows that wait."),
    "trn_workers_ready": ("gauge", "Model workers that are ready."),
    "trn_worker_ends_total": ("counter", "Model workers that ended."),
    "trn_batches_raised_total": ("counter", "Batches that raised."),
    "trn_rows_quarantined_total": ("counter", "Rows that ended a model worker."),
    "trn_compute_seconds_total": ("counter", "Time in the model."),
}


def _read_pool(pool: ReplicaPool) -> dict[str, float]:
    counters = pool.counters
    return {
        "trn_queue_rows": pool.queued_rows,
        "trn_workers_ready": pool.num_ready,
        "trn_worker_ends_total": counters.worker_ends,
        "trn_batches_raised_total": counters.raised_batches,
        "trn_rows_quarantined_total": counters.quarantined_rows,
        "trn_compute_seconds_total": counters.compute_s,
    }


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
