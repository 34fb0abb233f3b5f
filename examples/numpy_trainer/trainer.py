"""Without torch: matrix factorisation of film ratings in numpy."""

from typing import Any

import numpy as np

from gen_worker.trainer import StepContext, StepResult


class RatingTrainer:
    def setup(self, ctx: StepContext) -> None:
        self.rate = ctx.job.hyperparams["learning_rate"]
        self.decay = ctx.job.hyperparams["weight_decay"]

    def configure(self, ctx: StepContext) -> dict[str, Any]:
        sizes = ctx.job.hyperparams
        return {
            "likes": np.random.normal(scale=0.1, size=(sizes["num_people"], sizes["num_tastes"])),
            "offers": np.random.normal(scale=0.1, size=(sizes["num_films"], sizes["num_tastes"])),
            "mean": 0.0,
            "num_ratings": 0,
        }

    def prepare_batch(self, raw_batch: Any, state: dict[str, Any], ctx: StepContext) -> dict[str, np.ndarray]:
        return {name: raw_batch.column(name).to_numpy() for name in ("person", "film", "rating")}

    def train_step(
        self, prepared_batch: dict[str, np.ndarray], state: dict[str, Any], ctx: StepContext
    ) -> StepResult:
        person, film, rating = prepared_batch.values()
        state["num_ratings"] += len(rating)
        state["mean"] += (rating - state["mean"]).sum() / state["num_ratings"]
        likes, offers = state["likes"][person], state["offers"][film]
        error = state["mean"] + (likes * offers).sum(axis=1) - rating
        # A person can be in a batch several times: `at` adds all gradients, `-=` would keep only one.
        np.subtract.at(state["likes"], person, self.rate * (error[:, None] * offers + self.decay * likes))
        np.subtract.at(state["offers"], film, self.rate * (error[:, None] * likes + self.decay * offers))
        return StepResult(metrics={"loss": np.mean(error**2)})

    def validate_step(
        self, batch: dict[str, np.ndarray], state: dict[str, Any], ctx: StepContext
    ) -> dict[str, float]:
        guess = state["mean"] + (state["likes"][batch["person"]] * state["offers"][batch["film"]]).sum(axis=1)
        return {
            "loss": np.mean((guess - batch["rating"]) ** 2),
            "within_half_a_star": np.mean(np.abs(guess - batch["rating"]) < 0.5),
        }

    def predict(self, rows: Any, state: dict[str, Any], ctx: StepContext) -> dict[str, np.ndarray]:
        """For requests and `trn predict`: `rows` has the columns `person` and `film`; one value a row and name."""
        person, film = rows.column("person").to_numpy(), rows.column("film").to_numpy()
        return {"rating": state["mean"] + (state["likes"][person] * state["offers"][film]).sum(axis=1)}

    def state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        return state  # arrays and plain numbers can be saved directly

    def load_state_dict(self, state: dict[str, Any], payload: dict[str, Any], ctx: StepContext) -> None:
        state.update(payload)
