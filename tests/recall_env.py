"""An environment of TorchRL whose reward is for recalling a number that only the first observation of an episode shows.

It is in a module of its own, so that the processes of a collector can import it.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torchrl.data import Binary, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase, InitTracker, TransformedEnv
from torchrl.envs.transforms import Compose


class RecallEnv(EnvBase):
    """Episodes of 3, 4, 5, 3, ... steps; the observation is the number to recall (then 0), the step, and a constant."""

    def __init__(self) -> None:
        super().__init__(device="cpu", batch_size=[])
        self.observation_spec = Composite(observation=Unbounded(shape=(3,)))
        self.action_spec = Categorical(2)
        self.reward_spec = Unbounded(shape=(1,))
        self.done_spec = Binary(n=1, dtype=torch.bool, shape=(1,))
        self.episode, self.step_index, self.number = 0, 0, 0

    def _observe(self) -> torch.Tensor:
        return torch.tensor([self.number - 0.5 if not self.step_index else 0.0, self.step_index / 5, 1.0])

    def _reset(self, tensordict, **_):
        self.number, self.step_index, self.episode = (self.episode * 7 // 3) % 2, 0, self.episode + 1
        done = torch.zeros(1, dtype=torch.bool)
        return TensorDict({"observation": self._observe(), "done": done, "terminated": done}, batch_size=[])

    def _step(self, tensordict):
        self.step_index += 1
        done = torch.tensor([self.step_index >= 3 + (self.episode - 1) % 3])
        reward = (tensordict["action"] == self.number).float().reshape(1)
        values = {"observation": self._observe(), "reward": reward, "done": done, "terminated": done}
        return TensorDict(values, batch_size=[])

    def _set_seed(self, seed) -> None:
        self.episode = seed or 0


def make_env(primer) -> TransformedEnv:
    """Return the environment with starts of episodes, and the memory that the primer puts in."""
    return TransformedEnv(RecallEnv(), Compose(InitTracker(), primer))
