"""Reinforcement learning: REINFORCE balances a pole. Each step plays a batch of episodes and learns from it once."""

import os
from typing import Any

import gymnasium as gym
import msgspec
import numpy as np
import torch
from torch import nn

from gen_worker.trainer import EpisodeRecorder, SampleRequest, StepContext, StepResult

ENVIRONMENT = "CartPole-v1"

os.environ.update(SDL_VIDEODRIVER="dummy", PYGAME_HIDE_SUPPORT_PROMPT="1")  # videos need no display
torch.set_num_threads(1)  # a small model is faster on one thread, and the order of sums is fixed


class Observation(msgspec.Struct):
    """A request's row. The training data is generated: there are no columns that could say what it has."""

    position: float
    velocity: float
    angle: float
    angular_velocity: float


class Push(msgspec.Struct):
    to_the_right: bool
    certainty: float


class CartPoleTrainer:
    def setup(self, ctx: StepContext) -> None:
        self.envs = gym.make_vec(
            ENVIRONMENT,
            num_envs=ctx.job.hyperparams["episodes_per_step"],
            vectorization_mode="vector_entry_point",  # all poles in one numpy computation
        )

    def configure(self, ctx: StepContext) -> dict[str, Any]:
        policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        optimizer = torch.optim.Adam(policy.parameters(), lr=ctx.job.hyperparams["learning_rate"])
        return {"policy": policy, "optimizer": optimizer}

    @torch.no_grad()
    def prepare_batch(
        self, raw_batch: int, state: dict[str, Any], ctx: StepContext
    ) -> dict[str, torch.Tensor]:
        """Play one episode on each pole. Every array is (time, pole); after an episode's end it is not `alive`.

        `raw_batch` is the step's number: with the seed it decides how the episodes begin, so that a resumed run
        plays what the straight one would have played. The actions come from torch's own random stream.
        """
        seed = np.random.SeedSequence([ctx.seed, raw_batch]).generate_state(1)
        observation, _ = self.envs.reset(seed=int(seed[0]))
        alive = np.ones(self.envs.num_envs, dtype=bool)
        history: dict[str, list[Any]] = {"observation": [], "action": [], "reward": [], "alive": []}
        while alive.any():
            logits = state["policy"](torch.as_tensor(observation))
            action = torch.distributions.Categorical(logits=logits).sample().numpy()
            history["observation"].append(observation)
            history["action"].append(action)
            history["alive"].append(alive)
            observation, reward, terminated, truncated, _ = self.envs.step(action)
            history["reward"].append(reward * alive)
            alive = alive & ~(terminated | truncated)
        return {name: torch.as_tensor(np.stack(rows)) for name, rows in history.items()}

    def train_step(
        self, prepared_batch: dict[str, torch.Tensor], state: dict[str, Any], ctx: StepContext
    ) -> StepResult:
        episodes, alive = prepared_batch, prepared_batch["alive"]
        to_go = rewards_to_go(episodes["reward"], discount=ctx.job.hyperparams["discount"])
        # The baseline of a time step: the mean return of the episodes that are still running.
        baseline = (to_go * alive).sum(dim=1, keepdim=True) / alive.sum(dim=1, keepdim=True)
        advantage = (to_go - baseline)[alive]
        policy = torch.distributions.Categorical(logits=state["policy"](episodes["observation"][alive]))
        log_probability = policy.log_prob(episodes["action"][alive])
        loss = -(log_probability * advantage / (advantage.std() + 1e-8)).mean()
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        mean_return = episodes["reward"].sum(dim=0).mean()
        return StepResult(metrics={"loss": loss.detach(), "return": mean_return})

    def predict(self, rows: list[Observation], state: dict[str, Any], ctx: StepContext) -> list[Push]:
        """For requests: which way to push each cart. One answer for each row, in the same order."""
        observed = torch.tensor([msgspec.structs.astuple(row) for row in rows])
        share, action = state["policy"](observed).softmax(dim=1).max(dim=1)
        answers = zip(action.tolist(), share.tolist(), strict=True)
        return [Push(to_the_right=bool(side), certainty=certainty) for side, certainty in answers]

    def state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in state.items()}

    def load_state_dict(self, state: dict[str, Any], payload: dict[str, Any], ctx: StepContext) -> None:
        for name, part in state.items():
            part.load_state_dict(payload[name])

    @torch.no_grad()
    def sample(
        self, *, state: dict[str, Any], step: int, request: SampleRequest, output_dir: str, ctx: StepContext
    ) -> None:
        """Record a video of one episode with the greedy policy: an artifact of the run, in `videos/`."""
        env = gym.make(ENVIRONMENT, render_mode="rgb_array", max_episode_steps=200)  # four seconds
        env = EpisodeRecorder(env, ctx, episode_trigger=lambda _: True, name_prefix="cartpole")
        observation, _ = env.reset(seed=request.seed)
        is_over = False
        while not is_over:
            action = state["policy"](torch.as_tensor(observation)).argmax().item()
            observation, _, terminated, truncated, _ = env.step(action)
            is_over = terminated or truncated
        env.close()  # the file is written here


def rewards_to_go(reward: torch.Tensor, *, discount: float) -> torch.Tensor:
    """The discounted return from each time step."""
    to_go = reward.clone()
    for moment in range(len(reward) - 2, -1, -1):
        to_go[moment] += discount * to_go[moment + 1]
    return to_go
