"""MLflow as a back end of a logger, through the tracking client of `mlflow-skinny`."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from gen_worker.contract.redaction import strip_url_secrets
from gen_worker.errors import StartupError
from gen_worker.trainer.callbacks.background_logger import (
    Ending,
    Entry,
    RefusedError,
    import_extra,
    job_parameters,
    now_ms,
)
from gen_worker.trainer.callbacks.base import RunHandle

MAX_METRICS = 1000  # the limits of one `log_batch`
MAX_PARAMS = 100
MAX_VALUE_CHARS = 6000
TIMEOUT_S = 10


class MLflowSink:
    """One MLflow run. `on_run_id` is told its id, from the logger's thread, for whoever continues it."""

    def __init__(
        self,
        run: RunHandle,
        *,
        tracking_uri: str | None,
        experiment: str,
        run_name: str | None,
        run_id: str | None,
        on_run_id: Callable[[str], None],
    ) -> None:
        client_module = import_extra("mlflow.tracking.client", "mlflow")
        _calm_mlflow()
        self._entities = import_extra("mlflow.entities", "mlflow")
        self._mlflow_error: type[Exception] = import_extra("mlflow.exceptions", "mlflow").MlflowException
        uri = tracking_uri or import_extra("mlflow.tracking", "mlflow").get_tracking_uri()
        self.name = f"MLflow at {strip_url_secrets(uri)}"
        try:
            self._client = client_module.MlflowClient(tracking_uri=uri)
        except self._mlflow_error as fault:
            raise StartupError(
                f"{self.name} cannot be used: {str(fault).strip()}; give MLflowLogger the `tracking_uri` of a server"
                " (http://…), or set MLFLOW_TRACKING_URI"
            ) from fault
        self._experiment = experiment
        self._run_name = run_name
        self._run_id = run_id
        self._on_run_id = on_run_id
        self._job = run.job
        self._log = run.log
        self._time_ms = now_ms()
        self._params: list[Any] | None = None  # still to be logged; None: the MLflow run is not there yet

    def open(self) -> None:
        if self._params is None:
            has_params = self._find_run()
            values = {} if has_params else job_parameters(self._job)
            self._params = [
                self._entities.Param(_key(name), str(value)[:MAX_VALUE_CHARS])
                for name, value in values.items()
            ]
        while self._params:
            try:
                self._call("log_batch", self._run_id, params=self._params[:MAX_PARAMS])
            except RefusedError as fault:
                self._log(f"{self.name} refused the job's parameters: {fault}", "warning")
            self._params = self._params[MAX_PARAMS:]

    def _find_run(self) -> bool:
        """Continue the run of the checkpoint, or an unfinished one of the same job, or make one; has it parameters?"""
        client, job = self._client, self._job
        if self._run_id is not None:
            try:
                self._call("update_run", self._run_id, status="RUNNING")
            except RefusedError:
                self._run_id = None  # deleted, or on another server
            else:
                return True
        experiment = client.get_experiment_by_name(self._experiment)
        experiment_id = (
            client.create_experiment(self._experiment) if experiment is None else experiment.experiment_id
        )
        unfinished = f"tags.`trn.run_id` = '{job.run_id}' and attributes.status = 'RUNNING'"
        found = client.search_runs([experiment_id], filter_string=unfinished, max_results=1)
        if found:
            self._take_run(found[0].info.run_id)
            return bool(found[0].data.params)
        tags = {**job.tags, "trn.run_id": job.run_id}
        name = self._run_name or job.name or job.run_id
        made = client.create_run(experiment_id, start_time=self._time_ms, tags=tags, run_name=name)
        self._take_run(made.info.run_id)
        return False

    def _take_run(self, run_id: str) -> None:
        self._run_id = run_id
        self._on_run_id(run_id)

    def send(self, entries: Sequence[Entry]) -> int:
        metrics: list[Any] = []
        tags: dict[str, str] = {}
        num_entries = 0
        for entry in entries:
            values = entry.values if entry.kind == "metrics" else {}
            if metrics and len(metrics) + len(values) > MAX_METRICS:
                break
            metrics += [
                self._entities.Metric(_key(name), value, entry.time_ms, entry.step)
                for name, value in values.items()
            ]
            if entry.kind == "checkpoint":
                tags |= {"trn.checkpoint": entry.values["path"], "trn.checkpoint_step": str(entry.step)}
            num_entries += 1
        run_tags = [self._entities.RunTag(name, value) for name, value in tags.items()]
        for start in range(0, max(len(metrics), 1), MAX_METRICS):
            part = metrics[start : start + MAX_METRICS]
            if part or run_tags:
                self._call("log_batch", self._run_id, metrics=part, tags=run_tags)
            run_tags = []
        return num_entries

    def close(self, ending: Ending) -> None:
        tags = {"trn.status": ending.status, "trn.reason": ending.reason or "", "trn.step": str(ending.step)}
        run_tags = [self._entities.RunTag(name, value[:MAX_VALUE_CHARS]) for name, value in tags.items()]
        self._call("log_batch", self._run_id, tags=run_tags)
        status = {"completed": "FINISHED", "failed": "FAILED"}.get(ending.status, "KILLED")
        self._call("set_terminated", self._run_id, status=status, end_time=ending.time_ms)

    def _call(self, method: str, *args: Any, **kwargs: Any) -> None:
        try:
            getattr(self._client, method)(*args, **kwargs)
        except self._mlflow_error as fault:
            status = fault.get_http_status_code()  # type: ignore[attr-defined]
            if 400 <= status < 500 and status not in (401, 403, 408, 429):
                raise RefusedError(str(fault)) from fault
            raise


def _calm_mlflow() -> None:
    """Its defaults wait for many minutes and report its use elsewhere; what the environment says stays."""
    variables = import_extra("mlflow.environment_variables", "mlflow")
    for name, value in (
        ("MLFLOW_HTTP_REQUEST_TIMEOUT", TIMEOUT_S),
        ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", 0),
        ("MLFLOW_DISABLE_TELEMETRY", "true"),
    ):
        variable = getattr(variables, name, None)  # not in every release
        if variable is not None and not variable.is_set():
            variable.set(value)
            if name == "MLFLOW_DISABLE_TELEMETRY":
                import_extra("mlflow.telemetry", "mlflow").set_telemetry_client()


def _key(name: str) -> str:
    """MLflow takes letters, digits and `_-. :/` in names."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)[:250]
