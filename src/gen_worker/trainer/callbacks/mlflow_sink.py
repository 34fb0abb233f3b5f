"""MLflow as a logger's back end, through the tracking client of `mlflow-skinny`."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from gen_worker.trainer.callbacks.loggers import MLflowLogger

MAX_METRICS = 1000  # the limits of one `log_batch`
MAX_PARAMS = 100
MAX_VALUE_CHARS = 6000
TIMEOUT_S = 10


class MLflowSink:
    """One MLflow run. Sets `mlflow_run_id` of its logger, from the delivery thread."""

    def __init__(self, logger: "MLflowLogger", run: RunHandle) -> None:
        client_module = import_extra("mlflow.tracking.client", "mlflow")
        _set_defaults()
        self._entities = import_extra("mlflow.entities", "mlflow")
        self._mlflow_error: type[Exception] = import_extra("mlflow.exceptions", "mlflow").MlflowException
        uri = logger.tracking_uri or import_extra("mlflow.tracking", "mlflow").get_tracking_uri()
        self.name = f"MLflow at {strip_url_secrets(uri)}"
        try:
            self._client = client_module.MlflowClient(tracking_uri=uri)
        except self._mlflow_error as fault:
            cause = strip_url_secrets(str(fault)).strip(" .\n")
            raise StartupError(
                f"{self.name} cannot be used: {cause}. Give MLflowLogger the `tracking_uri` of a server"
                " (http://…), or set MLFLOW_TRACKING_URI"
            ) from fault
        self._logger = logger
        self._run_id = logger.mlflow_run_id
        self._job = run.job
        self._log = run.log
        self._time_ms = now_ms()
        self._params: list[Any] | None = None  # still to be logged; None: there is no MLflow run yet

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
                self._log(f"{self.name} rejected the job's parameters: {fault}", "warning")
            self._params = self._params[MAX_PARAMS:]

    def _find_run(self) -> bool:
        """Continue the run of the checkpoint, or an unfinished one of the same job, or create one.

        Returns whether it has parameters.
        """
        client, job, logger = self._client, self._job, self._logger
        if self._run_id is not None:
            try:
                self._call("update_run", self._run_id, status="RUNNING")
            except RefusedError:
                self._run_id = None  # deleted, or on another server
            else:
                return True
        experiment = client.get_experiment_by_name(logger.experiment)
        experiment_id = (
            client.create_experiment(logger.experiment) if experiment is None else experiment.experiment_id
        )
        unfinished = f"tags.`trn.run_id` = '{job.run_id}' and attributes.status = 'RUNNING'"
        found = client.search_runs([experiment_id], filter_string=unfinished, max_results=1)
        if found:
            mlflow_run = found[0]
        else:
            tags = {**job.tags, "trn.run_id": job.run_id}
            name = logger.run_name or job.name or job.run_id
            mlflow_run = client.create_run(experiment_id, start_time=self._time_ms, tags=tags, run_name=name)
        self._run_id = logger.mlflow_run_id = mlflow_run.info.run_id
        return bool(found and mlflow_run.data.params)

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


def _set_defaults() -> None:
    """MLflow's own defaults wait for minutes and send telemetry. Environment variables take precedence."""
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
    """MLflow allows letters, digits and `_-. :/` in names."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)[:250]
