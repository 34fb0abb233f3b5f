"""What differs between the environment of whoever submits a run and that of its worker, as far as it matters."""

from collections.abc import Collection, Mapping

from gen_worker.contract.redaction import looks_secret, strip_url_secrets
from trn.core.training_variables import fingerprint, matters
from trn.core.workers_variables import without_workers_variables
from trn.proto import trainer_pb2 as pb

MAX_VALUE = 200


def find_differences(
    caller: Mapping[str, str], salt: str, inherited: Mapping[str, str], *, decided: Collection[str]
) -> list[pb.EnvDifference]:
    """`caller` are fingerprints of values, by name; `decided` are the names that somebody has set for this run."""
    worker = without_workers_variables(inherited)
    differences = []
    for name in sorted({*caller, *worker}):
        if name in decided or not matters(name):
            continue
        value = worker.get(name)
        if value is not None and caller.get(name) == fingerprint(value, salt):
            continue
        is_told = value is not None and not looks_secret(name)
        differences.append(
            pb.EnvDifference(
                name=name,
                is_in_caller=name in caller,
                is_in_worker=value is not None,
                worker_value=strip_url_secrets(value or "")[:MAX_VALUE] if is_told else "",
            )
        )
    return differences
