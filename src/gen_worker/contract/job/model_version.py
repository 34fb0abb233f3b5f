"""A checkpoint, and all that is needed to answer with it."""

from typing import Any

import msgspec

from gen_worker.contract.sizes import Count


class VersionFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Which model it is: what events, records and the headers of an answer say of a version."""

    run_id: str  # that saved the checkpoint
    step: Count
    weights_hash: str  # of its data file, as the meta says it
    code_hash: str = ""  # of the snapshot; empty: the code was not frozen

    @property
    def label(self) -> str:
        return f"{self.run_id}@{self.step}"


class ModelVersion(VersionFacts, frozen=True, kw_only=True):
    checkpoint: str  # path of its .meta.json
    trainer: str  # module:symbol
    config: dict[str, Any]  # the job of the run that saved it
    code_dir: str = ""  # first on the import path of its workers; empty: none
    frozen_from: str = ""
    base_dir: str = ""
    interpreter: str = ""  # of the run that saved it; empty: that of the daemon

    @property
    def facts(self) -> VersionFacts:
        return VersionFacts(
            run_id=self.run_id, step=self.step, weights_hash=self.weights_hash, code_hash=self.code_hash
        )
