from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RunState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUN_STATE_UNSPECIFIED: _ClassVar[RunState]
    RUN_STATE_PENDING: _ClassVar[RunState]
    RUN_STATE_DISPATCHING: _ClassVar[RunState]
    RUN_STATE_RUNNING: _ClassVar[RunState]
    RUN_STATE_COMPLETED: _ClassVar[RunState]
    RUN_STATE_FAILED: _ClassVar[RunState]
    RUN_STATE_CANCELLED: _ClassVar[RunState]
RUN_STATE_UNSPECIFIED: RunState
RUN_STATE_PENDING: RunState
RUN_STATE_DISPATCHING: RunState
RUN_STATE_RUNNING: RunState
RUN_STATE_COMPLETED: RunState
RUN_STATE_FAILED: RunState
RUN_STATE_CANCELLED: RunState

class Needs(_message.Message):
    __slots__ = ("devices", "gpus", "cpus", "memory_mb", "pool")
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    CPUS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_MB_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    devices: _containers.RepeatedScalarFieldContainer[str]
    gpus: int
    cpus: int
    memory_mb: int
    pool: str
    def __init__(self, devices: _Optional[_Iterable[str]] = ..., gpus: _Optional[int] = ..., cpus: _Optional[int] = ..., memory_mb: _Optional[int] = ..., pool: _Optional[str] = ...) -> None: ...

class Cause(_message.Message):
    __slots__ = ("id", "fault", "waits_for", "next_attempt_ms", "values_json")
    ID_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    NEXT_ATTEMPT_MS_FIELD_NUMBER: _ClassVar[int]
    VALUES_JSON_FIELD_NUMBER: _ClassVar[int]
    id: str
    fault: str
    waits_for: _containers.RepeatedScalarFieldContainer[str]
    next_attempt_ms: int
    values_json: bytes
    def __init__(self, id: _Optional[str] = ..., fault: _Optional[str] = ..., waits_for: _Optional[_Iterable[str]] = ..., next_attempt_ms: _Optional[int] = ..., values_json: _Optional[bytes] = ...) -> None: ...

class Run(_message.Message):
    __slots__ = ("run_id", "digest", "state", "reason", "config_json", "name", "priority", "parent_run_id", "snapshot", "base_dir", "is_cancel_wanted", "cancel_reason", "submitted_ms", "updated_ms", "ended_ms", "not_before_ms", "attempt", "max_attempts", "step", "end_step", "last_seq", "metrics", "devices", "needs", "tags", "change", "interpreter", "log_dir", "event_log", "frozen_from", "secret_env", "stop_reason", "family", "submission_id", "start_step", "cause", "newest_video", "newest_sample", "num_refused_artifacts", "notes", "kind")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class TagsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PARENT_RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    BASE_DIR_FIELD_NUMBER: _ClassVar[int]
    IS_CANCEL_WANTED_FIELD_NUMBER: _ClassVar[int]
    CANCEL_REASON_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_MS_FIELD_NUMBER: _ClassVar[int]
    UPDATED_MS_FIELD_NUMBER: _ClassVar[int]
    ENDED_MS_FIELD_NUMBER: _ClassVar[int]
    NOT_BEFORE_MS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    MAX_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    END_STEP_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    NEEDS_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    INTERPRETER_FIELD_NUMBER: _ClassVar[int]
    LOG_DIR_FIELD_NUMBER: _ClassVar[int]
    EVENT_LOG_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FROM_FIELD_NUMBER: _ClassVar[int]
    SECRET_ENV_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    SUBMISSION_ID_FIELD_NUMBER: _ClassVar[int]
    START_STEP_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    NEWEST_VIDEO_FIELD_NUMBER: _ClassVar[int]
    NEWEST_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    NUM_REFUSED_ARTIFACTS_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    digest: str
    state: RunState
    reason: str
    config_json: bytes
    name: str
    priority: int
    parent_run_id: str
    snapshot: str
    base_dir: str
    is_cancel_wanted: bool
    cancel_reason: str
    submitted_ms: int
    updated_ms: int
    ended_ms: int
    not_before_ms: int
    attempt: int
    max_attempts: int
    step: int
    end_step: int
    last_seq: int
    metrics: _containers.ScalarMap[str, float]
    devices: _containers.RepeatedScalarFieldContainer[str]
    needs: Needs
    tags: _containers.ScalarMap[str, str]
    change: int
    interpreter: str
    log_dir: str
    event_log: str
    frozen_from: str
    secret_env: _containers.RepeatedScalarFieldContainer[str]
    stop_reason: str
    family: str
    submission_id: str
    start_step: int
    cause: Cause
    newest_video: str
    newest_sample: str
    num_refused_artifacts: int
    notes: str
    kind: str
    def __init__(self, run_id: _Optional[str] = ..., digest: _Optional[str] = ..., state: _Optional[_Union[RunState, str]] = ..., reason: _Optional[str] = ..., config_json: _Optional[bytes] = ..., name: _Optional[str] = ..., priority: _Optional[int] = ..., parent_run_id: _Optional[str] = ..., snapshot: _Optional[str] = ..., base_dir: _Optional[str] = ..., is_cancel_wanted: _Optional[bool] = ..., cancel_reason: _Optional[str] = ..., submitted_ms: _Optional[int] = ..., updated_ms: _Optional[int] = ..., ended_ms: _Optional[int] = ..., not_before_ms: _Optional[int] = ..., attempt: _Optional[int] = ..., max_attempts: _Optional[int] = ..., step: _Optional[int] = ..., end_step: _Optional[int] = ..., last_seq: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., devices: _Optional[_Iterable[str]] = ..., needs: _Optional[_Union[Needs, _Mapping]] = ..., tags: _Optional[_Mapping[str, str]] = ..., change: _Optional[int] = ..., interpreter: _Optional[str] = ..., log_dir: _Optional[str] = ..., event_log: _Optional[str] = ..., frozen_from: _Optional[str] = ..., secret_env: _Optional[_Iterable[str]] = ..., stop_reason: _Optional[str] = ..., family: _Optional[str] = ..., submission_id: _Optional[str] = ..., start_step: _Optional[int] = ..., cause: _Optional[_Union[Cause, _Mapping]] = ..., newest_video: _Optional[str] = ..., newest_sample: _Optional[str] = ..., num_refused_artifacts: _Optional[int] = ..., notes: _Optional[str] = ..., kind: _Optional[str] = ...) -> None: ...

class Attempt(_message.Message):
    __slots__ = ("number", "launched_ms", "ended_ms", "pid", "exit_code", "category", "reason", "last_heartbeat_ms", "step", "devices", "cause")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LAUNCHED_MS_FIELD_NUMBER: _ClassVar[int]
    ENDED_MS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    CATEGORY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LAST_HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    number: int
    launched_ms: int
    ended_ms: int
    pid: int
    exit_code: int
    category: str
    reason: str
    last_heartbeat_ms: int
    step: int
    devices: _containers.RepeatedScalarFieldContainer[str]
    cause: Cause
    def __init__(self, number: _Optional[int] = ..., launched_ms: _Optional[int] = ..., ended_ms: _Optional[int] = ..., pid: _Optional[int] = ..., exit_code: _Optional[int] = ..., category: _Optional[str] = ..., reason: _Optional[str] = ..., last_heartbeat_ms: _Optional[int] = ..., step: _Optional[int] = ..., devices: _Optional[_Iterable[str]] = ..., cause: _Optional[_Union[Cause, _Mapping]] = ...) -> None: ...

class Submission(_message.Message):
    __slots__ = ("config_json", "code_identity", "snapshot", "base_dir", "interpreter", "priority", "force_new", "is_dry_run", "log_dir", "event_log", "is_import_tried", "frozen_from", "submission_id", "secret_env", "caller_env", "caller_salt", "takes_refusal")
    class SecretEnvEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class CallerEnvEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    CODE_IDENTITY_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    BASE_DIR_FIELD_NUMBER: _ClassVar[int]
    INTERPRETER_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    FORCE_NEW_FIELD_NUMBER: _ClassVar[int]
    IS_DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    LOG_DIR_FIELD_NUMBER: _ClassVar[int]
    EVENT_LOG_FIELD_NUMBER: _ClassVar[int]
    IS_IMPORT_TRIED_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FROM_FIELD_NUMBER: _ClassVar[int]
    SUBMISSION_ID_FIELD_NUMBER: _ClassVar[int]
    SECRET_ENV_FIELD_NUMBER: _ClassVar[int]
    CALLER_ENV_FIELD_NUMBER: _ClassVar[int]
    CALLER_SALT_FIELD_NUMBER: _ClassVar[int]
    TAKES_REFUSAL_FIELD_NUMBER: _ClassVar[int]
    config_json: bytes
    code_identity: str
    snapshot: str
    base_dir: str
    interpreter: str
    priority: int
    force_new: bool
    is_dry_run: bool
    log_dir: str
    event_log: str
    is_import_tried: bool
    frozen_from: str
    submission_id: str
    secret_env: _containers.ScalarMap[str, str]
    caller_env: _containers.ScalarMap[str, str]
    caller_salt: str
    takes_refusal: bool
    def __init__(self, config_json: _Optional[bytes] = ..., code_identity: _Optional[str] = ..., snapshot: _Optional[str] = ..., base_dir: _Optional[str] = ..., interpreter: _Optional[str] = ..., priority: _Optional[int] = ..., force_new: _Optional[bool] = ..., is_dry_run: _Optional[bool] = ..., log_dir: _Optional[str] = ..., event_log: _Optional[str] = ..., is_import_tried: _Optional[bool] = ..., frozen_from: _Optional[str] = ..., submission_id: _Optional[str] = ..., secret_env: _Optional[_Mapping[str, str]] = ..., caller_env: _Optional[_Mapping[str, str]] = ..., caller_salt: _Optional[str] = ..., takes_refusal: _Optional[bool] = ...) -> None: ...

class EnvDifference(_message.Message):
    __slots__ = ("name", "is_in_caller", "is_in_worker", "worker_value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    IS_IN_CALLER_FIELD_NUMBER: _ClassVar[int]
    IS_IN_WORKER_FIELD_NUMBER: _ClassVar[int]
    WORKER_VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    is_in_caller: bool
    is_in_worker: bool
    worker_value: str
    def __init__(self, name: _Optional[str] = ..., is_in_caller: _Optional[bool] = ..., is_in_worker: _Optional[bool] = ..., worker_value: _Optional[str] = ...) -> None: ...

class Fault(_message.Message):
    __slots__ = ("text", "path", "kind", "found", "expected", "hint")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    text: str
    path: str
    kind: str
    found: str
    expected: str
    hint: str
    def __init__(self, text: _Optional[str] = ..., path: _Optional[str] = ..., kind: _Optional[str] = ..., found: _Optional[str] = ..., expected: _Optional[str] = ..., hint: _Optional[str] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("code", "reason", "faults")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    code: str
    reason: str
    faults: _containers.RepeatedCompositeFieldContainer[Fault]
    def __init__(self, code: _Optional[str] = ..., reason: _Optional[str] = ..., faults: _Optional[_Iterable[_Union[Fault, _Mapping]]] = ...) -> None: ...

class SubmitRunResponse(_message.Message):
    __slots__ = ("run", "existed", "run_token", "plan_json", "notes", "env_differences", "refusal")
    RUN_FIELD_NUMBER: _ClassVar[int]
    EXISTED_FIELD_NUMBER: _ClassVar[int]
    RUN_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PLAN_JSON_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    ENV_DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    run: Run
    existed: bool
    run_token: str
    plan_json: bytes
    notes: _containers.RepeatedScalarFieldContainer[str]
    env_differences: _containers.RepeatedCompositeFieldContainer[EnvDifference]
    refusal: Refusal
    def __init__(self, run: _Optional[_Union[Run, _Mapping]] = ..., existed: _Optional[bool] = ..., run_token: _Optional[str] = ..., plan_json: _Optional[bytes] = ..., notes: _Optional[_Iterable[str]] = ..., env_differences: _Optional[_Iterable[_Union[EnvDifference, _Mapping]]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ...) -> None: ...

class CheckRunResponse(_message.Message):
    __slots__ = ("faults", "code", "reason", "notes", "run", "plan_json", "env_differences", "refusal")
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    PLAN_JSON_FIELD_NUMBER: _ClassVar[int]
    ENV_DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    faults: _containers.RepeatedScalarFieldContainer[str]
    code: str
    reason: str
    notes: _containers.RepeatedScalarFieldContainer[str]
    run: Run
    plan_json: bytes
    env_differences: _containers.RepeatedCompositeFieldContainer[EnvDifference]
    refusal: Refusal
    def __init__(self, faults: _Optional[_Iterable[str]] = ..., code: _Optional[str] = ..., reason: _Optional[str] = ..., notes: _Optional[_Iterable[str]] = ..., run: _Optional[_Union[Run, _Mapping]] = ..., plan_json: _Optional[bytes] = ..., env_differences: _Optional[_Iterable[_Union[EnvDifference, _Mapping]]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ...) -> None: ...

class CancelRunRequest(_message.Message):
    __slots__ = ("run_id", "reason", "is_exact")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    IS_EXACT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    reason: str
    is_exact: bool
    def __init__(self, run_id: _Optional[str] = ..., reason: _Optional[str] = ..., is_exact: _Optional[bool] = ...) -> None: ...

class CancelRunResponse(_message.Message):
    __slots__ = ("run", "was_live")
    RUN_FIELD_NUMBER: _ClassVar[int]
    WAS_LIVE_FIELD_NUMBER: _ClassVar[int]
    run: Run
    was_live: bool
    def __init__(self, run: _Optional[_Union[Run, _Mapping]] = ..., was_live: _Optional[bool] = ...) -> None: ...

class UpdateRunRequest(_message.Message):
    __slots__ = ("run_id", "notes", "tags", "removed_tags", "is_exact", "name")
    class TagsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_TAGS_FIELD_NUMBER: _ClassVar[int]
    IS_EXACT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    notes: str
    tags: _containers.ScalarMap[str, str]
    removed_tags: _containers.RepeatedScalarFieldContainer[str]
    is_exact: bool
    name: str
    def __init__(self, run_id: _Optional[str] = ..., notes: _Optional[str] = ..., tags: _Optional[_Mapping[str, str]] = ..., removed_tags: _Optional[_Iterable[str]] = ..., is_exact: _Optional[bool] = ..., name: _Optional[str] = ...) -> None: ...

class UpdateRunResponse(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: Run
    def __init__(self, run: _Optional[_Union[Run, _Mapping]] = ...) -> None: ...

class ResumeRunRequest(_message.Message):
    __slots__ = ("run_id", "checkpoint_path", "overrides_json", "is_exact", "is_forced", "submission", "priority", "config_json", "code_identity", "snapshot", "base_dir", "interpreter", "force_new", "log_dir", "event_log", "is_import_tried", "frozen_from", "submission_id", "secret_env", "caller_env", "caller_salt")
    class SecretEnvEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class CallerEnvEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_PATH_FIELD_NUMBER: _ClassVar[int]
    OVERRIDES_JSON_FIELD_NUMBER: _ClassVar[int]
    IS_EXACT_FIELD_NUMBER: _ClassVar[int]
    IS_FORCED_FIELD_NUMBER: _ClassVar[int]
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    CODE_IDENTITY_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    BASE_DIR_FIELD_NUMBER: _ClassVar[int]
    INTERPRETER_FIELD_NUMBER: _ClassVar[int]
    FORCE_NEW_FIELD_NUMBER: _ClassVar[int]
    LOG_DIR_FIELD_NUMBER: _ClassVar[int]
    EVENT_LOG_FIELD_NUMBER: _ClassVar[int]
    IS_IMPORT_TRIED_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FROM_FIELD_NUMBER: _ClassVar[int]
    SUBMISSION_ID_FIELD_NUMBER: _ClassVar[int]
    SECRET_ENV_FIELD_NUMBER: _ClassVar[int]
    CALLER_ENV_FIELD_NUMBER: _ClassVar[int]
    CALLER_SALT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    checkpoint_path: str
    overrides_json: bytes
    is_exact: bool
    is_forced: bool
    submission: Submission
    priority: int
    config_json: bytes
    code_identity: str
    snapshot: str
    base_dir: str
    interpreter: str
    force_new: bool
    log_dir: str
    event_log: str
    is_import_tried: bool
    frozen_from: str
    submission_id: str
    secret_env: _containers.ScalarMap[str, str]
    caller_env: _containers.ScalarMap[str, str]
    caller_salt: str
    def __init__(self, run_id: _Optional[str] = ..., checkpoint_path: _Optional[str] = ..., overrides_json: _Optional[bytes] = ..., is_exact: _Optional[bool] = ..., is_forced: _Optional[bool] = ..., submission: _Optional[_Union[Submission, _Mapping]] = ..., priority: _Optional[int] = ..., config_json: _Optional[bytes] = ..., code_identity: _Optional[str] = ..., snapshot: _Optional[str] = ..., base_dir: _Optional[str] = ..., interpreter: _Optional[str] = ..., force_new: _Optional[bool] = ..., log_dir: _Optional[str] = ..., event_log: _Optional[str] = ..., is_import_tried: _Optional[bool] = ..., frozen_from: _Optional[str] = ..., submission_id: _Optional[str] = ..., secret_env: _Optional[_Mapping[str, str]] = ..., caller_env: _Optional[_Mapping[str, str]] = ..., caller_salt: _Optional[str] = ...) -> None: ...

class GetRunRequest(_message.Message):
    __slots__ = ("run_id", "is_exact")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    IS_EXACT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    is_exact: bool
    def __init__(self, run_id: _Optional[str] = ..., is_exact: _Optional[bool] = ...) -> None: ...

class GetRunResponse(_message.Message):
    __slots__ = ("run", "attempts", "folder")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    run: Run
    attempts: _containers.RepeatedCompositeFieldContainer[Attempt]
    folder: str
    def __init__(self, run: _Optional[_Union[Run, _Mapping]] = ..., attempts: _Optional[_Iterable[_Union[Attempt, _Mapping]]] = ..., folder: _Optional[str] = ...) -> None: ...

class ListRunsRequest(_message.Message):
    __slots__ = ("states", "name_contains", "page_size", "page_token", "with_config", "tags", "group")
    class TagsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    STATES_FIELD_NUMBER: _ClassVar[int]
    NAME_CONTAINS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    WITH_CONFIG_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    states: _containers.RepeatedScalarFieldContainer[RunState]
    name_contains: str
    page_size: int
    page_token: str
    with_config: bool
    tags: _containers.ScalarMap[str, str]
    group: str
    def __init__(self, states: _Optional[_Iterable[_Union[RunState, str]]] = ..., name_contains: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., with_config: _Optional[bool] = ..., tags: _Optional[_Mapping[str, str]] = ..., group: _Optional[str] = ...) -> None: ...

class ListRunsResponse(_message.Message):
    __slots__ = ("runs", "next_page_token")
    RUNS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[Run]
    next_page_token: str
    def __init__(self, runs: _Optional[_Iterable[_Union[Run, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class WatchRunsRequest(_message.Message):
    __slots__ = ("after_change", "run_ids", "live_only", "is_exact")
    AFTER_CHANGE_FIELD_NUMBER: _ClassVar[int]
    RUN_IDS_FIELD_NUMBER: _ClassVar[int]
    LIVE_ONLY_FIELD_NUMBER: _ClassVar[int]
    IS_EXACT_FIELD_NUMBER: _ClassVar[int]
    after_change: int
    run_ids: _containers.RepeatedScalarFieldContainer[str]
    live_only: bool
    is_exact: bool
    def __init__(self, after_change: _Optional[int] = ..., run_ids: _Optional[_Iterable[str]] = ..., live_only: _Optional[bool] = ..., is_exact: _Optional[bool] = ...) -> None: ...

class WatchRunsResponse(_message.Message):
    __slots__ = ("runs", "fell_behind", "change")
    RUNS_FIELD_NUMBER: _ClassVar[int]
    FELL_BEHIND_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[Run]
    fell_behind: FellBehind
    change: int
    def __init__(self, runs: _Optional[_Iterable[_Union[Run, _Mapping]]] = ..., fell_behind: _Optional[_Union[FellBehind, _Mapping]] = ..., change: _Optional[int] = ...) -> None: ...

class FellBehind(_message.Message):
    __slots__ = ("missed_from", "missed_to")
    MISSED_FROM_FIELD_NUMBER: _ClassVar[int]
    MISSED_TO_FIELD_NUMBER: _ClassVar[int]
    missed_from: int
    missed_to: int
    def __init__(self, missed_from: _Optional[int] = ..., missed_to: _Optional[int] = ...) -> None: ...

class StreamEventsRequest(_message.Message):
    __slots__ = ("run_id", "after_seq", "follow", "is_exact")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQ_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    IS_EXACT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    after_seq: int
    follow: bool
    is_exact: bool
    def __init__(self, run_id: _Optional[str] = ..., after_seq: _Optional[int] = ..., follow: _Optional[bool] = ..., is_exact: _Optional[bool] = ...) -> None: ...

class StreamEventsResponse(_message.Message):
    __slots__ = ("first_seq", "last_seq", "lines", "fell_behind", "is_end")
    FIRST_SEQ_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    FELL_BEHIND_FIELD_NUMBER: _ClassVar[int]
    IS_END_FIELD_NUMBER: _ClassVar[int]
    first_seq: int
    last_seq: int
    lines: bytes
    fell_behind: FellBehind
    is_end: bool
    def __init__(self, first_seq: _Optional[int] = ..., last_seq: _Optional[int] = ..., lines: _Optional[bytes] = ..., fell_behind: _Optional[_Union[FellBehind, _Mapping]] = ..., is_end: _Optional[bool] = ...) -> None: ...

class StreamLogsRequest(_message.Message):
    __slots__ = ("run_id", "offset", "follow", "tail_bytes", "is_exact")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    TAIL_BYTES_FIELD_NUMBER: _ClassVar[int]
    IS_EXACT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    offset: int
    follow: bool
    tail_bytes: int
    is_exact: bool
    def __init__(self, run_id: _Optional[str] = ..., offset: _Optional[int] = ..., follow: _Optional[bool] = ..., tail_bytes: _Optional[int] = ..., is_exact: _Optional[bool] = ...) -> None: ...

class StreamLogsResponse(_message.Message):
    __slots__ = ("offset", "data", "is_end")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    IS_END_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    is_end: bool
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ..., is_end: _Optional[bool] = ...) -> None: ...

class GetMetricsRequest(_message.Message):
    __slots__ = ("run_id", "names", "from_step", "to_step", "max_points", "is_exact", "with_ancestors", "with_discarded")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    FROM_STEP_FIELD_NUMBER: _ClassVar[int]
    TO_STEP_FIELD_NUMBER: _ClassVar[int]
    MAX_POINTS_FIELD_NUMBER: _ClassVar[int]
    IS_EXACT_FIELD_NUMBER: _ClassVar[int]
    WITH_ANCESTORS_FIELD_NUMBER: _ClassVar[int]
    WITH_DISCARDED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    names: _containers.RepeatedScalarFieldContainer[str]
    from_step: int
    to_step: int
    max_points: int
    is_exact: bool
    with_ancestors: bool
    with_discarded: bool
    def __init__(self, run_id: _Optional[str] = ..., names: _Optional[_Iterable[str]] = ..., from_step: _Optional[int] = ..., to_step: _Optional[int] = ..., max_points: _Optional[int] = ..., is_exact: _Optional[bool] = ..., with_ancestors: _Optional[bool] = ..., with_discarded: _Optional[bool] = ...) -> None: ...

class LineagePart(_message.Message):
    __slots__ = ("run_id", "from_step", "to_step")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    FROM_STEP_FIELD_NUMBER: _ClassVar[int]
    TO_STEP_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    from_step: int
    to_step: int
    def __init__(self, run_id: _Optional[str] = ..., from_step: _Optional[int] = ..., to_step: _Optional[int] = ...) -> None: ...

class MetricSeries(_message.Message):
    __slots__ = ("name", "steps", "values", "timestamps_ms", "num_points", "lows", "highs", "counts", "width")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMPS_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_POINTS_FIELD_NUMBER: _ClassVar[int]
    LOWS_FIELD_NUMBER: _ClassVar[int]
    HIGHS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    name: str
    steps: _containers.RepeatedScalarFieldContainer[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    timestamps_ms: _containers.RepeatedScalarFieldContainer[int]
    num_points: int
    lows: _containers.RepeatedScalarFieldContainer[float]
    highs: _containers.RepeatedScalarFieldContainer[float]
    counts: _containers.RepeatedScalarFieldContainer[int]
    width: int
    def __init__(self, name: _Optional[str] = ..., steps: _Optional[_Iterable[int]] = ..., values: _Optional[_Iterable[float]] = ..., timestamps_ms: _Optional[_Iterable[int]] = ..., num_points: _Optional[int] = ..., lows: _Optional[_Iterable[float]] = ..., highs: _Optional[_Iterable[float]] = ..., counts: _Optional[_Iterable[int]] = ..., width: _Optional[int] = ...) -> None: ...

class DiscardedPoints(_message.Message):
    __slots__ = ("run_id", "name", "attempt", "steps", "values", "timestamps_ms", "num_points", "num_dropped")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMPS_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_POINTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DROPPED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    name: str
    attempt: int
    steps: _containers.RepeatedScalarFieldContainer[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    timestamps_ms: _containers.RepeatedScalarFieldContainer[int]
    num_points: int
    num_dropped: int
    def __init__(self, run_id: _Optional[str] = ..., name: _Optional[str] = ..., attempt: _Optional[int] = ..., steps: _Optional[_Iterable[int]] = ..., values: _Optional[_Iterable[float]] = ..., timestamps_ms: _Optional[_Iterable[int]] = ..., num_points: _Optional[int] = ..., num_dropped: _Optional[int] = ...) -> None: ...

class GetMetricsResponse(_message.Message):
    __slots__ = ("series", "lineage", "discarded")
    SERIES_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    DISCARDED_FIELD_NUMBER: _ClassVar[int]
    series: _containers.RepeatedCompositeFieldContainer[MetricSeries]
    lineage: _containers.RepeatedCompositeFieldContainer[LineagePart]
    discarded: _containers.RepeatedCompositeFieldContainer[DiscardedPoints]
    def __init__(self, series: _Optional[_Iterable[_Union[MetricSeries, _Mapping]]] = ..., lineage: _Optional[_Iterable[_Union[LineagePart, _Mapping]]] = ..., discarded: _Optional[_Iterable[_Union[DiscardedPoints, _Mapping]]] = ...) -> None: ...

class ListArtifactsRequest(_message.Message):
    __slots__ = ("run_id", "kind", "page_size", "page_token", "is_exact")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    IS_EXACT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    kind: str
    page_size: int
    page_token: str
    is_exact: bool
    def __init__(self, run_id: _Optional[str] = ..., kind: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., is_exact: _Optional[bool] = ...) -> None: ...

class ListArtifactsResponse(_message.Message):
    __slots__ = ("artifacts", "next_page_token")
    ARTIFACTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    artifacts: _containers.RepeatedCompositeFieldContainer[Artifact]
    next_page_token: str
    def __init__(self, artifacts: _Optional[_Iterable[_Union[Artifact, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class Artifact(_message.Message):
    __slots__ = ("artifact_id", "run_id", "attempt", "step", "kind", "name", "media_type", "size_bytes", "sha256", "created_ms", "poster_id", "state", "is_present", "reason", "cause")
    ARTIFACT_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MEDIA_TYPE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    CREATED_MS_FIELD_NUMBER: _ClassVar[int]
    POSTER_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    IS_PRESENT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    artifact_id: str
    run_id: str
    attempt: int
    step: int
    kind: str
    name: str
    media_type: str
    size_bytes: int
    sha256: str
    created_ms: int
    poster_id: str
    state: str
    is_present: bool
    reason: str
    cause: Cause
    def __init__(self, artifact_id: _Optional[str] = ..., run_id: _Optional[str] = ..., attempt: _Optional[int] = ..., step: _Optional[int] = ..., kind: _Optional[str] = ..., name: _Optional[str] = ..., media_type: _Optional[str] = ..., size_bytes: _Optional[int] = ..., sha256: _Optional[str] = ..., created_ms: _Optional[int] = ..., poster_id: _Optional[str] = ..., state: _Optional[str] = ..., is_present: _Optional[bool] = ..., reason: _Optional[str] = ..., cause: _Optional[_Union[Cause, _Mapping]] = ...) -> None: ...

class ReadArtifactRequest(_message.Message):
    __slots__ = ("artifact_id", "offset", "length")
    ARTIFACT_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    artifact_id: str
    offset: int
    length: int
    def __init__(self, artifact_id: _Optional[str] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class ReadArtifactResponse(_message.Message):
    __slots__ = ("offset", "data", "is_end")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    IS_END_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    is_end: bool
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ..., is_end: _Optional[bool] = ...) -> None: ...

class RemoveRunsRequest(_message.Message):
    __slots__ = ("run_ids", "is_dry_run", "is_exact")
    RUN_IDS_FIELD_NUMBER: _ClassVar[int]
    IS_DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    IS_EXACT_FIELD_NUMBER: _ClassVar[int]
    run_ids: _containers.RepeatedScalarFieldContainer[str]
    is_dry_run: bool
    is_exact: bool
    def __init__(self, run_ids: _Optional[_Iterable[str]] = ..., is_dry_run: _Optional[bool] = ..., is_exact: _Optional[bool] = ...) -> None: ...

class RemoveRunsResponse(_message.Message):
    __slots__ = ("freed",)
    FREED_FIELD_NUMBER: _ClassVar[int]
    freed: _containers.RepeatedCompositeFieldContainer[Freed]
    def __init__(self, freed: _Optional[_Iterable[_Union[Freed, _Mapping]]] = ...) -> None: ...

class Freed(_message.Message):
    __slots__ = ("kind", "name", "size_bytes")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    kind: str
    name: str
    size_bytes: int
    def __init__(self, kind: _Optional[str] = ..., name: _Optional[str] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class PruneRequest(_message.Message):
    __slots__ = ("ended_before_ms", "keep_best", "metric", "is_max_best", "is_dry_run")
    ENDED_BEFORE_MS_FIELD_NUMBER: _ClassVar[int]
    KEEP_BEST_FIELD_NUMBER: _ClassVar[int]
    METRIC_FIELD_NUMBER: _ClassVar[int]
    IS_MAX_BEST_FIELD_NUMBER: _ClassVar[int]
    IS_DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    ended_before_ms: int
    keep_best: int
    metric: str
    is_max_best: bool
    is_dry_run: bool
    def __init__(self, ended_before_ms: _Optional[int] = ..., keep_best: _Optional[int] = ..., metric: _Optional[str] = ..., is_max_best: _Optional[bool] = ..., is_dry_run: _Optional[bool] = ...) -> None: ...

class PruneResponse(_message.Message):
    __slots__ = ("freed", "kept")
    FREED_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    freed: _containers.RepeatedCompositeFieldContainer[Freed]
    kept: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, freed: _Optional[_Iterable[_Union[Freed, _Mapping]]] = ..., kept: _Optional[_Iterable[str]] = ...) -> None: ...

class VersionFacts(_message.Message):
    __slots__ = ("run_id", "step", "weights_hash", "code_hash")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_HASH_FIELD_NUMBER: _ClassVar[int]
    CODE_HASH_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    step: int
    weights_hash: str
    code_hash: str
    def __init__(self, run_id: _Optional[str] = ..., step: _Optional[int] = ..., weights_hash: _Optional[str] = ..., code_hash: _Optional[str] = ...) -> None: ...

class ServedModel(_message.Message):
    __slots__ = ("name", "run_id", "state", "is_ready", "url", "bearer_file", "live", "previous", "second", "second_is", "percent", "ready_ms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    IS_READY_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    BEARER_FILE_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    SECOND_FIELD_NUMBER: _ClassVar[int]
    SECOND_IS_FIELD_NUMBER: _ClassVar[int]
    PERCENT_FIELD_NUMBER: _ClassVar[int]
    READY_MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    run_id: str
    state: RunState
    is_ready: bool
    url: str
    bearer_file: str
    live: VersionFacts
    previous: VersionFacts
    second: VersionFacts
    second_is: str
    percent: float
    ready_ms: int
    def __init__(self, name: _Optional[str] = ..., run_id: _Optional[str] = ..., state: _Optional[_Union[RunState, str]] = ..., is_ready: _Optional[bool] = ..., url: _Optional[str] = ..., bearer_file: _Optional[str] = ..., live: _Optional[_Union[VersionFacts, _Mapping]] = ..., previous: _Optional[_Union[VersionFacts, _Mapping]] = ..., second: _Optional[_Union[VersionFacts, _Mapping]] = ..., second_is: _Optional[str] = ..., percent: _Optional[float] = ..., ready_ms: _Optional[int] = ...) -> None: ...

class Promotion(_message.Message):
    __slots__ = ("name", "run_id", "number", "action", "state", "version", "previous", "percent", "by", "asked_ms", "ended_ms", "cause", "words", "gate_json")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    PERCENT_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    ASKED_MS_FIELD_NUMBER: _ClassVar[int]
    ENDED_MS_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    GATE_JSON_FIELD_NUMBER: _ClassVar[int]
    name: str
    run_id: str
    number: int
    action: str
    state: str
    version: VersionFacts
    previous: VersionFacts
    percent: float
    by: str
    asked_ms: int
    ended_ms: int
    cause: str
    words: str
    gate_json: bytes
    def __init__(self, name: _Optional[str] = ..., run_id: _Optional[str] = ..., number: _Optional[int] = ..., action: _Optional[str] = ..., state: _Optional[str] = ..., version: _Optional[_Union[VersionFacts, _Mapping]] = ..., previous: _Optional[_Union[VersionFacts, _Mapping]] = ..., percent: _Optional[float] = ..., by: _Optional[str] = ..., asked_ms: _Optional[int] = ..., ended_ms: _Optional[int] = ..., cause: _Optional[str] = ..., words: _Optional[str] = ..., gate_json: _Optional[bytes] = ...) -> None: ...

class PromoteRequest(_message.Message):
    __slots__ = ("name", "model", "action", "percent", "gate_json", "by", "promotion_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    PERCENT_FIELD_NUMBER: _ClassVar[int]
    GATE_JSON_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    PROMOTION_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    action: str
    percent: float
    gate_json: bytes
    by: str
    promotion_id: str
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ..., action: _Optional[str] = ..., percent: _Optional[float] = ..., gate_json: _Optional[bytes] = ..., by: _Optional[str] = ..., promotion_id: _Optional[str] = ...) -> None: ...

class PromoteResponse(_message.Message):
    __slots__ = ("promotion",)
    PROMOTION_FIELD_NUMBER: _ClassVar[int]
    promotion: Promotion
    def __init__(self, promotion: _Optional[_Union[Promotion, _Mapping]] = ...) -> None: ...

class RollbackRequest(_message.Message):
    __slots__ = ("name", "by", "promotion_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    PROMOTION_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    by: str
    promotion_id: str
    def __init__(self, name: _Optional[str] = ..., by: _Optional[str] = ..., promotion_id: _Optional[str] = ...) -> None: ...

class ListServedRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListServedResponse(_message.Message):
    __slots__ = ("served",)
    SERVED_FIELD_NUMBER: _ClassVar[int]
    served: _containers.RepeatedCompositeFieldContainer[ServedModel]
    def __init__(self, served: _Optional[_Iterable[_Union[ServedModel, _Mapping]]] = ...) -> None: ...

class GetServedRequest(_message.Message):
    __slots__ = ("name", "limit")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    name: str
    limit: int
    def __init__(self, name: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class GetServedResponse(_message.Message):
    __slots__ = ("served", "promotions")
    SERVED_FIELD_NUMBER: _ClassVar[int]
    PROMOTIONS_FIELD_NUMBER: _ClassVar[int]
    served: ServedModel
    promotions: _containers.RepeatedCompositeFieldContainer[Promotion]
    def __init__(self, served: _Optional[_Union[ServedModel, _Mapping]] = ..., promotions: _Optional[_Iterable[_Union[Promotion, _Mapping]]] = ...) -> None: ...

class MakePromoteTokenRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class MakePromoteTokenResponse(_message.Message):
    __slots__ = ("token",)
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token: str
    def __init__(self, token: _Optional[str] = ...) -> None: ...

class ListDevicesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Device(_message.Message):
    __slots__ = ("device_id", "kind", "name", "memory_mb", "run_id", "attempt", "quarantine_reason")
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MEMORY_MB_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    QUARANTINE_REASON_FIELD_NUMBER: _ClassVar[int]
    device_id: str
    kind: str
    name: str
    memory_mb: int
    run_id: str
    attempt: int
    quarantine_reason: str
    def __init__(self, device_id: _Optional[str] = ..., kind: _Optional[str] = ..., name: _Optional[str] = ..., memory_mb: _Optional[int] = ..., run_id: _Optional[str] = ..., attempt: _Optional[int] = ..., quarantine_reason: _Optional[str] = ...) -> None: ...

class ListDevicesResponse(_message.Message):
    __slots__ = ("devices", "cpus", "cpus_held", "memory_mb", "memory_mb_held")
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    CPUS_FIELD_NUMBER: _ClassVar[int]
    CPUS_HELD_FIELD_NUMBER: _ClassVar[int]
    MEMORY_MB_FIELD_NUMBER: _ClassVar[int]
    MEMORY_MB_HELD_FIELD_NUMBER: _ClassVar[int]
    devices: _containers.RepeatedCompositeFieldContainer[Device]
    cpus: int
    cpus_held: int
    memory_mb: int
    memory_mb_held: int
    def __init__(self, devices: _Optional[_Iterable[_Union[Device, _Mapping]]] = ..., cpus: _Optional[int] = ..., cpus_held: _Optional[int] = ..., memory_mb: _Optional[int] = ..., memory_mb_held: _Optional[int] = ...) -> None: ...

class GetHealthRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetHealthResponse(_message.Message):
    __slots__ = ("version", "pid", "started_ms", "home", "address", "runs_by_state", "launcher", "num_watchers", "warnings", "last_change")
    class RunsByStateEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STARTED_MS_FIELD_NUMBER: _ClassVar[int]
    HOME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RUNS_BY_STATE_FIELD_NUMBER: _ClassVar[int]
    LAUNCHER_FIELD_NUMBER: _ClassVar[int]
    NUM_WATCHERS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    LAST_CHANGE_FIELD_NUMBER: _ClassVar[int]
    version: str
    pid: int
    started_ms: int
    home: str
    address: str
    runs_by_state: _containers.ScalarMap[str, int]
    launcher: str
    num_watchers: int
    warnings: _containers.RepeatedScalarFieldContainer[str]
    last_change: int
    def __init__(self, version: _Optional[str] = ..., pid: _Optional[int] = ..., started_ms: _Optional[int] = ..., home: _Optional[str] = ..., address: _Optional[str] = ..., runs_by_state: _Optional[_Mapping[str, int]] = ..., launcher: _Optional[str] = ..., num_watchers: _Optional[int] = ..., warnings: _Optional[_Iterable[str]] = ..., last_change: _Optional[int] = ...) -> None: ...
