"""How the author's state comes to be: fresh, from a checkpoint, or back to an earlier one while training."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gen_worker.trainer.author_state import fill_from_checkpoint, prepare_state
from gen_worker.trainer.checkpoints.store import Checkpoint
from gen_worker.trainer.contracts import StepContext, TrainerPlugin
from gen_worker.trainer.model_runtime import restore_rng
from gen_worker.trainer.optimizer_options import ConfiguredOptions
from gen_worker.trainer.repro import seed_everything
from gen_worker.trainer.resumed_hyperparams import Resumption, fill_and_apply


@dataclass(slots=True, kw_only=True)
class StateRestorer:
    """Of one attempt. `options` are those of the state's optimizers, once `make` has made it."""

    trainer: TrainerPlugin
    ctx: StepContext
    identity: Mapping[str, Any] = field(default_factory=dict)
    options: ConfiguredOptions = field(default_factory=ConfiguredOptions, init=False)

    def make(self, checkpoint: Checkpoint | None) -> Any:
        """The state to train with. Then the random streams, so that no hook can move them."""
        state = self.configure()
        if checkpoint is None:
            self._seed_fresh()
            return state
        resumption = self.fill(state, checkpoint)
        if "seed" in resumption.fields:  # where the order of the data depends on it, the cursor was refused
            self._seed_apart(step=checkpoint.step)
        else:
            self._restore_streams(checkpoint)
        return state

    def configure(self) -> Any:
        """A fresh state, with the options of its optimizers noted."""
        trainer, ctx = self.trainer, self.ctx
        state = prepare_state(trainer, ctx)
        self.options = ConfiguredOptions.of(
            state=state, optimizer=ctx.optimizer, scheduler=ctx.scheduler, trainer=trainer
        )
        return state

    def make_to_evaluate(self, checkpoint: Checkpoint | None) -> Any:
        """The state to look at: nothing is trained, so no setting has to take effect."""
        state = prepare_state(self.trainer, self.ctx)
        if checkpoint is None:
            self._seed_fresh()
        else:
            fill_from_checkpoint(self.trainer, state, self.ctx, checkpoint)
            self._restore_streams(checkpoint)
        return state

    def fill(self, state: Any, checkpoint: Checkpoint) -> Resumption:
        """Load into a state that `configure` made; what the job changed since then takes effect, or is refused."""
        resumption = Resumption.between(checkpoint.identity, self.identity)
        fill_and_apply(self.trainer, state, self.ctx, checkpoint, options=self.options, resumption=resumption)
        return resumption

    def _seed_fresh(self) -> None:
        if self.ctx.rank > 0:
            self._seed_apart()

    def _restore_streams(self, checkpoint: Checkpoint) -> None:
        rank, rng = self.ctx.rank, checkpoint.rng
        streams: Any = rng.get("ranks", [rng]) if rng else []
        if rank < len(streams):
            restore_rng(streams[rank])
        elif self.ctx.world_size > 1:
            self._seed_apart(step=checkpoint.step)

    def _seed_apart(self, step: int = 0) -> None:
        """All processes build the same model; from here on each has random numbers of its own."""
        from gen_worker.trainer.distributed import own_seed

        seed = own_seed(self.ctx.job.seed, self.ctx.rank, step)
        seed_everything(seed, torch="torch" in sys.modules)
