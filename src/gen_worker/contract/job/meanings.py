"""What each field of a job means, for people: docs/job-reference.md is made of it, and so are the hints of the page's form.

Links are relative to docs/. `say_plainly` is for readers who cannot follow them.
"""

import re

_SEE = re.compile(r"[:,;.]? ?[Ss]ee \[[^]]+\]\([^)]+\)\.?$")
_LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")


def say_plainly(meaning: str) -> str:
    """Without links; names stay in backticks."""
    text = _LINK.sub(r"\1", _SEE.sub(".", meaning))
    return text.replace("..", ".")


MEANINGS = {
    "trainer_api_version": "Version of this document. Another one is refused.",
    "run_id": "Name of the run: letters, digits, `.`, `_` and `-`, at most 128. A run's folder belongs to one `run_id`.",
    "name": "A title for people; it is in the `started` event.",
    "trainer": "`module:symbol` of the trainer class. `TRAINER_PLUGIN` wins over it.",
    "owner": "Whose run it is. A capability token must name the same owner.",
    "release_ref": "What release of the author's code this is.",
    "mode": "What the run's worker does (`WORKER_MODE`): it trains, or it serves or predicts with a checkpoint.",
    "max_steps": "Stop after this many steps, over as many epochs as it takes.",
    "epochs": "Stop after this many passes over the data.",
    "metric_every": "Report metrics every N steps.",
    "checkpoint_every": "Save a checkpoint every N steps. One is always saved at the end.",
    "sample_every": "Call the `sample` hook every N steps.",
    "validate_every": 'Validate every N steps, or at the end of each `"epoch"`.',
    "early_stopping": "End the run, as complete, when a metric no longer improves: see [trainer](trainer.md#early-stopping).",
    "early_stopping.metric": "The metric to watch, by its reported name: `val/accuracy`, `train/loss`.",
    "early_stopping.mode": "Whether smaller or larger is better.",
    "early_stopping.patience": "Reports of the metric without improvement, in a row, before stopping.",
    "early_stopping.min_delta": "By how much a value must be better to count as an improvement.",
    "fast_dev_run": "A trial run of this many steps through everything: each reported, as many batches of each held-out set, "
    "one checkpoint, in a folder apart. 0 is off.",
    "overfit_batches": "Train only on the first N batches, to test whether a model can learn them. 0 is off.",
    "hyperparams": "The author's own settings: `ctx.job.hyperparams`.",
    "seed": "Seeds python, numpy and torch, and the order of the data.",
    "precision": "Becomes `ctx.dtype`; checked against the device. The trainer class applies it.",
    "deterministic": "Ask torch for deterministic algorithms; an operation that has none then fails.",
    "strict": "A hyperparameter, `precision` or base model that [nothing reads](authoring.md#unused-settings) by step 1 is an "
    "error; else a warning.",
    "callbacks": "`module:symbol` of [callbacks](callbacks.md), classes or instances, in the order in which they are called.",
    "dataset": "The training data.",
    "dataset.parquet_paths": "Files, folders (their `*.parquet`, recursively, sorted), globs, and "
    "[folders with an index](datasets.md).",
    "dataset.batch_size": "Rows of one step, over all processes.",
    "dataset.readahead": "Row groups to decode ahead, per reader. For parquet files only.",
    "dataset.columns": "Columns to read; all where it is not given. For parquet files only.",
    "dataset.shuffle": "A new order each epoch, as a function of `seed` and epoch: see [data order](data-order.md).",
    "dataset.drop_last": "Leave out the last batch of an epoch when it is shorter.",
    "dataset.decode_cache": "Decode once into an Arrow file in the cache folder and map it from then on.",
    "dataset.generated": "There is no data: each batch is the number of its step, and the trainer class makes its own.",
    "dataset.source": "`module:symbol` of your own data: a Dataset, a DataLoader, an iterable, or a class or function that "
    "makes one. See [your own data](own-data.md).",
    "dataset.args": "Keyword arguments for the class or function that `source` names.",
    "mock_batches": "Batches in the job itself, one pass; for smoke runs.",
    "validation": "Data for `validate_step`.",
    "validation.dataset": "As `dataset`; never shuffled.",
    "test": "Data for `test_step`, after the last step and before the final checkpoint.",
    "test.dataset": "As `validation.dataset`.",
    "inputs": "Refs to fetch before training: see [inputs and uploads](inputs-and-uploads.md).",
    "inputs.base_model_ref": 'Base weights; the local path is `ctx.model_handles["base_model"]`.',
    "inputs.dataset_parquet_refs": "Parquet files of the training data.",
    "inputs.resume_checkpoint_ref": "A checkpoint to resume from if the run has none yet, with its step, data position and random state; "
    "`max_steps` counts from its step 0.",
    "uploads": "Where artifacts go besides the run's folder. The environment wins, target by target.",
    "uploads.metrics_url": "Endpoint or object-store prefix for metrics.",
    "uploads.checkpoint_url": "For checkpoints.",
    "uploads.sample_url": "For samples.",
    "uploads.terminal_url": "For the end of the attempt.",
    "resume_from_latest": "Resume from the run's newest verified checkpoint. `false` refuses a folder that has one.",
    "resume_non_finite": "Resume from checkpoints whose state holds NaN or infinity, too. `trn resume --force` sets it.",
    "resume_older": "Where `resume_checkpoint_path` does not verify, take the newest older checkpoint beside it that does, and say so. "
    "`trn resume RUN` sets it.",
    "resume_checkpoint_path": "A checkpoint to resume from if the run has none yet, with its step, data position and random state; "
    "`max_steps` counts from its step 0.",
    "weights": 'Initial weights: a checkpoint, `.pt` or `.safetensors`. The class reads `ctx.model_handles["weights"]`; where it does '
    "not, [the runtime loads them](authoring.md#unused-settings).",
    "checkpoints": "Format and retention.",
    "checkpoints.keep_last": "Keep this many of the newest; 0 keeps all.",
    "checkpoints.keep_best": "Keep this many of the best, too: by what early stopping watches, else by `val/loss`, else by "
    "`train/loss`.",
    "checkpoints.format": "The data file: see [checkpoint format](checkpoint-format.md).",
    "artifacts": "Retention of samples and videos, by their steps: see [artifacts](artifacts.md#retention).",
    "artifacts.keep_last": "Keep what this many of the newest steps show; 0 keeps all. What the step of a kept checkpoint shows is "
    "kept with it.",
    "artifacts.keep_best": "Keep what this many of the best steps show, too: best as for `checkpoints.keep_best`. Needs "
    "`artifacts.keep_last`.",
    "sample_prompts": "Texts or objects for the `sample` hook: `request.prompts`.",
    "sample_seed": "For the `sample` hook: `request.seed`.",
    "serving": "A model server, for `mode: inference`. `trn serve` writes it.",
    "serving.checkpoint": "The checkpoint to serve: its `.meta.json`.",
    "serving.version": "That checkpoint with the config and the code of its run. `trn serve` writes it.",
    "serving.version.run_id": "The run that saved it.",
    "serving.version.step": "Its step.",
    "serving.version.weights_hash": "The hash of its data file.",
    "serving.version.code_hash": "The digest of the code snapshot. Empty: the code was not frozen.",
    "serving.version.checkpoint": "The path of its `.meta.json`.",
    "serving.version.trainer": "The trainer class, as `module:symbol`.",
    "serving.version.config": "The job of the run that saved it.",
    "serving.version.code_dir": "The folder of the code.",
    "serving.version.frozen_from": "The folder that the snapshot was taken of.",
    "serving.version.base_dir": "Where relative paths of the config start.",
    "serving.version.interpreter": "The Python of the run that saved it.",
    "serving.address": "Where it answers: `HOST:PORT` (port 0 is any free one) or `unix:PATH`.",
    "serving.replicas": "Model workers that answer side by side.",
    "serving.max_batch_rows": "Most rows of one call of `predict`.",
    "serving.max_delay_ms": "How long a free model worker waits for more rows. 0: it takes what is there.",
    "serving.max_queue_rows": "Rows that may wait. A request that does not fit is refused at once with 429.",
    "serving.max_body_bytes": "Largest request.",
    "serving.deadline_ms": "Deadline of requests without the header `X-Deadline-Ms`.",
    "serving.request_log": "Share of the requests that is kept as parquet, from 0 to 1.",
    "serving.gate": "What a checkpoint must pass before it is served. Its hash and its answers to probe rows are always checked.",
    "serving.gate.metric": "A metric that the checkpoints recorded. Without it, none is compared.",
    "serving.gate.mode": "Whether smaller or larger is better.",
    "serving.gate.tolerance": "By how much the metric may be worse than that of the served checkpoint.",
    "serving.gate.max_latency_ms": "Longest time that a full batch of probe rows may take.",
    "serving.follow": "A run whose new best checkpoints are promoted, each through the gate.",
    "serving.feedback": "What was right, sent back later; rules that submit the next run.",
    "serving.feedback.columns": "Columns of the training data that feedback carries. Empty: all that requests lack.",
    "serving.feedback.rows": "Submit a run after this many new rows.",
    "serving.feedback.max_age_s": "Submit a run when the oldest new row is this old.",
    "serving.feedback.metric": "An error that is computed from answers and feedback: `mse`, `rmse`, `mae` or `error_rate`, with "
    "`:ANSWER=LABEL` where it is not clear which columns are compared. A run is submitted when it is above `above`. A version that "
    "is worse on the newest feedback is not promoted.",
    "serving.feedback.keep_mb": "Room for answered requests that wait for feedback. The oldest are forgotten: feedback to them is "
    "answered as `unknown`.",
    "serving.feedback.above": "See `serving.feedback.metric`.",
    "serving.feedback.newest_rows": "How many of the newest rows of feedback a run trains on, in whole files. Without it: all.",
    "serving.feedback.train": "Fields laid over the config of the run that trained the served checkpoint.",
    "prediction": "Predictions for parquet files, for `mode: inference`. `trn predict` writes it.",
    "prediction.checkpoint": "The checkpoint to predict with: its `.meta.json`.",
    "prediction.version": "As `serving.version`. `trn predict` writes it.",
    "prediction.parquet_paths": "Files, folders and globs, as in `dataset.parquet_paths`.",
    "prediction.out": "The folder for the output files.",
    "prediction.batch_rows": "Rows of one call of `predict`. The bits of an answer depend on it.",
    "prediction.columns": "Columns of the input that are copied into the output.",
    "resources": "What the run needs.",
    "resources.devices": "One device by name, such as `cpu` or `cuda:1`, or a list: one for each process of a machine. Without it, GPUs in "
    "their order, or the CPU.",
    "resources.gpus": "A number of GPUs, instead of names: see [devices](daemon.md#devices).",
    "resources.cpus": "CPUs that the run holds; its worker uses as many threads. Without it, one for each process.",
    "resources.memory_mb": "Memory that the run holds; counted, not enforced. Without it, not counted.",
    "resources.processes": "Processes on each machine: see [many processes](distributed.md).",
    "resources.nodes": "Machines. Above 1 it is refused unless torchrun started the worker on each: see "
    "[several machines](distributed.md#several-machines).",
    "resources.pool": "Where the run starts: `local`, the daemon's machine, or a [pool](daemon.md#pools) of its settings.",
    "retry": "When to try again: see [retries](daemon.md#retries).",
    "retry.on_error": "Try again also after an exception of the trainer class.",
    "retry.max_attempts": "Attempts in a row without progress before the run fails. 0: never try again.",
    "retry.backoff_s": "Seconds to wait after an attempt without progress; doubled each time, at most 300.",
    "time_limit_s": "Seconds an attempt may take; then it saves and ends as `timeout`. "
    "`TRAINER_MAX_RUNTIME_SECONDS` can only shorten it.",
    "grace_s": "Seconds from a stop request until the worker leaves without the step in progress.",
    "heartbeat_s": "Seconds between two heartbeats.",
    "env": "Environment variables of the worker; recorded with the run: see [environment variables](cli-run.md#environment-variables).",
    "tags": "Labels to filter runs by: `trn list --tag`.",
    "group": "A name that several runs share, a sweep for example. Kept as the tag `group`: `trn list --tag group=NAME`.",
    "profiles": "Named overlays for this document.",
}
