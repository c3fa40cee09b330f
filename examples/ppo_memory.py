"""PPO on tasks whose memory is longer than the training window: agents with Transformer-XL's memory and with others.

    python examples/ppo_memory.py train --agent transformer-xl --seed 1 --out results     # a few minutes on one core
    python examples/ppo_memory.py plot results/*.json --out corridor.svg

Task `corridor`: the first observation of an episode says left or right, once. The agent then walks down a corridor and
must turn to that side at its end. With 24 steps to walk and windows of 16 steps, no window contains both the cue and
the turn: what an agent knows of the cue at the turn, it got from the memory that the window began with.

Any other task is one of POPGym (Morad et al. 2023; pip install popgym) with discrete actions, for example
`--task RepeatPreviousMedium`: cards are shown one by one, and the agent must name the suit of the card 31 steps back.

Every agent has the same environment, number of steps and optimizer; each with a memory has its best of the rates 3e-4,
1e-3 and 3e-3, chosen with another seed (`RATES`). `none` sees the newest observation only.

Shape suffixes: E environments (batch rows), T steps of a window, O observation, D width.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from transformer_xl import Backbone, BackboneConfig

RATES = {
    "corridor": {"transformer-xl": 3e-4, "gru": 3e-3, "lstm": 1e-3, "none": 1e-3},
    "RepeatPreviousMedium": {"transformer-xl": 1e-3, "gru": 3e-3, "lstm": 1e-3, "none": 1e-3},
}
FORWARD, LEFT, RIGHT = range(3)


@dataclass
class Settings:
    """What is trained, and for how long."""

    agent: str = "transformer-xl"
    task: str = "corridor"
    seed: int = 1
    learning_rate: float = 0.0  # 0: that of RATES, or 1e-3
    corridor: int = 24
    steps: int = 300_000
    window: int = 16
    memory_length: int = 32
    width: int = 64
    environments: int = 64
    epochs: int = 3
    minibatches: int = 4
    discount: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    entropy: float = 0.01


class Corridor:
    """A T-maze in each batch row. Observation: cue left, cue right (both only at the start), at the end, a constant.

    In the corridor, FORWARD walks a step, and a turn is refused with a small penalty. At the end, the right turn earns
    1 and the other -1; both end the episode, as does a time limit of twice the length. The score of an episode is 1 if
    it ended with the right turn, else 0.
    """

    num_observations, num_actions = 4, 3

    def __init__(self, num_environments: int, length: int, generator: torch.Generator) -> None:
        self.length, self.generator = length, generator
        self.position_E = torch.zeros(num_environments, dtype=torch.long)
        self.age_E = torch.zeros(num_environments, dtype=torch.long)
        self.side_E = self._sides()

    def _sides(self) -> Tensor:
        return torch.randint(LEFT, RIGHT + 1, self.position_E.shape, generator=self.generator)

    def observe(self) -> Tensor:
        """Return the observations (E, O)."""
        is_first_E, is_end_E = self.age_E == 0, self.position_E == self.length
        columns = (is_first_E & (self.side_E == LEFT), is_first_E & (self.side_E == RIGHT), is_end_E)
        return torch.stack([*columns, torch.ones_like(is_end_E)], -1).float()

    def step(self, action_E: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Act; return the rewards (E), which episodes ended (E), and the scores of these (E)."""
        at_end_E, walks_E = self.position_E == self.length, action_E == FORWARD
        turned_E, right_E = at_end_E & ~walks_E, at_end_E & (action_E == self.side_E)
        reward_E = turned_E * (2.0 * right_E - 1) - 0.02 * (at_end_E == walks_E)
        self.position_E = (self.position_E + walks_E).clamp(max=self.length)
        self.age_E = self.age_E + 1
        done_E = turned_E | (self.age_E >= 2 * self.length)
        self.side_E = torch.where(done_E, self._sides(), self.side_E)
        self.position_E, self.age_E = self.position_E * ~done_E, self.age_E * ~done_E
        return reward_E, done_E, right_E.float()


class Popgym:
    """A task of POPGym in each batch row. The score of an episode is the sum of its rewards, from -1 to 1."""

    def __init__(self, num_environments: int, task: str, seed: int) -> None:
        import gymnasium
        import popgym  # noqa: F401  registers the tasks

        self.environments = [gymnasium.make(f"popgym-{task}-v0") for _ in range(num_environments)]
        self.space = self.environments[0].observation_space
        self.num_observations = gymnasium.spaces.flatdim(self.space)
        self.num_actions = int(self.environments[0].action_space.n)
        self._flatten = gymnasium.spaces.flatten
        self.observations = [
            self._flatten(self.space, environment.reset(seed=1000 * seed + row)[0])
            for row, environment in enumerate(self.environments)
        ]
        self.return_E = torch.zeros(num_environments)

    def observe(self) -> Tensor:
        """Return the observations (E, O)."""
        return torch.stack([torch.as_tensor(observation, dtype=torch.float32) for observation in self.observations])

    def step(self, action_E: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Act; return the rewards (E), which episodes ended (E), and the scores of these (E)."""
        rewards, dones = [], []
        for row, (environment, action) in enumerate(zip(self.environments, action_E.tolist(), strict=True)):
            observation, reward, terminated, truncated, _ = environment.step(action)
            if terminated or truncated:
                observation, _ = environment.reset()
            self.observations[row] = self._flatten(self.space, observation)
            rewards.append(float(reward))
            dones.append(terminated or truncated)
        reward_E, done_E = torch.tensor(rewards), torch.tensor(dones)
        score_E = self.return_E + reward_E
        self.return_E = score_E * ~done_E
        return reward_E, done_E, score_E


class TransformerXLCore(nn.Module):
    """Two layers of GTrXL. Its state is a `Memory` of the last steps, which a window begins with and returns."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width, slots = settings.width, settings.memory_length
        config = BackboneConfig(
            d_input=width, n_layers=2, d_model=width, n_heads=4, d_ff=2 * width, attention_window=slots + 1
        )
        self.backbone = Backbone(config, memory_length=slots)

    def forward(self, x_ETD: Tensor, state: Any, starts_ET: Tensor) -> tuple[Tensor, Any]:
        """Return the features of a window and the state after it."""
        return self.backbone(x_ETD, state, starts=starts_ET)

    @staticmethod
    def select(state: Any, rows: Tensor) -> Any:
        """Return the state of some environments."""
        return None if state is None else state.select(rows)


class RecurrentCore(nn.Module):
    """A GRU or LSTM, whose state is set to zero where an episode starts."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        cell = nn.GRUCell if settings.agent == "gru" else nn.LSTMCell
        self.cell, self.num_states = cell(settings.width, 2 * settings.width), 1 + (cell is nn.LSTMCell)
        self.out_proj = nn.Linear(2 * settings.width, settings.width)

    def forward(self, x_ETD: Tensor, state: Any, starts_ET: Tensor) -> tuple[Tensor, Any]:
        """Return the features of a window and the state after it."""
        state = x_ETD.new_zeros(self.num_states, len(x_ETD), self.cell.hidden_size) if state is None else state
        outputs = []
        for x_ED, starts_E in zip(x_ETD.unbind(1), starts_ET.unbind(1), strict=True):
            state = state * ~starts_E[:, None]
            after = self.cell(x_ED, state[0] if self.num_states == 1 else (state[0], state[1]))
            state = after[None] if self.num_states == 1 else torch.stack(after)
            outputs.append(state[0])
        return self.out_proj(torch.stack(outputs, 1)), state

    @staticmethod
    def select(state: Any, rows: Tensor) -> Any:
        """Return the state of some environments."""
        return None if state is None else state[:, rows]


class MemorylessCore(nn.Module):
    """Two layers that see the newest observation only."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width = settings.width
        self.layers = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width), nn.ReLU())

    def forward(self, x_ETD: Tensor, state: Any, starts_ET: Tensor) -> tuple[Tensor, Any]:
        """Return the features of a window, and no state."""
        return self.layers(x_ETD), None

    @staticmethod
    def select(state: Any, rows: Tensor) -> Any:
        """Return no state."""
        return None


CORES = {"transformer-xl": TransformerXLCore, "gru": RecurrentCore, "lstm": RecurrentCore, "none": MemorylessCore}


class Agent(nn.Module):
    """Observation encoder, core with or without memory, policy and value."""

    def __init__(self, settings: Settings, num_observations: int, num_actions: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(num_observations, settings.width), nn.ReLU())
        self.core = CORES[settings.agent](settings)
        self.policy, self.value = nn.Linear(settings.width, num_actions), nn.Linear(settings.width, 1)
        nn.init.normal_(self.policy.weight, std=0.01)

    def forward(self, observation_ETO: Tensor, state: Any, starts_ET: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Return logits (E, T, actions), values (E, T) and the next state."""
        features_ETD, state = self.core(self.encoder(observation_ETO), state, starts_ET)
        return self.policy(features_ETD), self.value(features_ETD)[..., 0], state


def train(settings: Settings) -> Iterator[dict[str, float]]:
    """Train an agent; yield the number and mean score of the episodes that ended, after each 10,000 steps.

    A window begins with the state that acting had there (of the weights of then), as in recurrent PPO; no gradient
    goes beyond it.
    """
    torch.manual_seed(settings.seed)
    if settings.task == "corridor":
        generator = torch.Generator().manual_seed(settings.seed)
        environments = Corridor(settings.environments, settings.corridor, generator)
    else:
        environments = Popgym(settings.environments, settings.task, settings.seed)
    agent = Agent(settings, environments.num_observations, environments.num_actions)
    rate = settings.learning_rate or RATES.get(settings.task, {}).get(settings.agent, 1e-3)
    optimizer = torch.optim.Adam(agent.parameters(), rate, eps=1e-5)
    steps_per_window = settings.window * settings.environments
    state, starts_E = None, torch.ones(settings.environments, dtype=torch.bool)
    ended, score, since = 0, 0.0, 0
    for update in range(settings.steps // steps_per_window):
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 - update * steps_per_window / settings.steps)
        first_state, steps = state, []
        with torch.no_grad():
            for _ in range(settings.window):
                observation_EO = environments.observe()
                logits_E1A, value_E1, state = agent(observation_EO[:, None], state, starts_E[:, None])
                policy = Categorical(logits=logits_E1A[:, 0])
                action_E = policy.sample()
                reward_E, done_E, score_E = environments.step(action_E)
                steps.append(
                    (observation_EO, starts_E, action_E, policy.log_prob(action_E), value_E1[:, 0], reward_E, done_E)
                )
                starts_E, ended, score = done_E, ended + int(done_E.sum()), score + float(score_E[done_E].sum())
            last_value_E = agent(environments.observe()[:, None], state, starts_E[:, None])[1][:, 0]
        observation_ETO, starts_ET, action_ET, log_prob_ET, value_ET, reward_ET, done_ET = (
            torch.stack(column, 1) for column in zip(*steps, strict=True)
        )
        advantage_ET = advantages(settings, reward_ET, done_ET, value_ET, last_value_E)
        for _ in range(settings.epochs):
            for rows in torch.randperm(settings.environments).chunk(settings.minibatches):
                part = agent.core.select(first_state, rows)
                logits, values, _ = agent(observation_ETO[rows], part, starts_ET[rows])
                policy = Categorical(logits=logits)
                advantage = advantage_ET[rows]
                target = advantage + value_ET[rows]
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                ratio = (policy.log_prob(action_ET[rows]) - log_prob_ET[rows]).exp()
                clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
                loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
                loss = loss + 0.5 * (values - target).square().mean() - settings.entropy * policy.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        since += steps_per_window
        if ended and (since >= 10_000 or update == settings.steps // steps_per_window - 1):
            yield {"step": (update + 1) * steps_per_window, "episodes": ended, "score": score / max(ended, 1)}
            ended, score, since = 0, 0.0, 0


def advantages(settings: Settings, reward_ET: Tensor, done_ET: Tensor, value_ET: Tensor, last_E: Tensor) -> Tensor:
    """Return the generalized advantage estimates of a window (Schulman et al. 2016)."""
    advantage_ET, next_E = torch.zeros_like(reward_ET), torch.zeros_like(last_E)
    for t in reversed(range(reward_ET.shape[1])):
        goes_on_E = ~done_ET[:, t]
        delta_E = reward_ET[:, t] + settings.discount * last_E * goes_on_E - value_ET[:, t]
        next_E = delta_E + settings.discount * settings.gae_lambda * goes_on_E * next_E
        advantage_ET[:, t], last_E = next_E, value_ET[:, t]
    return advantage_ET


def run(settings: Settings, folder: Path) -> None:
    """Train, and write settings and curve to a file of their own, unless it is there."""
    path = folder / f"{settings.agent}-{settings.seed}.json"
    if path.exists():
        print(f"{path} exists")
        return
    start, curve = time.perf_counter(), list[dict[str, float]]()
    for point in train(settings):
        curve.append(point)
        print(settings.agent, settings.seed, point, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    result = {"settings": asdict(settings), "seconds": round(time.perf_counter() - start, 1), "curve": curve}
    path.write_text(json.dumps(result, indent=1) + "\n")


def plot(paths: list[Path], out: Path) -> None:
    """Draw the curves of each agent: the mean over seeds, and from the lowest to the highest. Print the last values."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    results: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(paths):
        result = json.loads(path.read_text())
        results.setdefault(result["settings"]["agent"], []).append(result)
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    print("| agent | score at the end, by seed | mean | seconds |\n|---|---|---|---|")
    styles = zip(("#0072B2", "#E69F00", "#009E73", "#CC79A7"), ("-", "--", "-.", ":"), strict=True)
    for (agent, runs), (color, line) in zip(results.items(), styles, strict=False):
        steps = [point["step"] for point in runs[0]["curve"]]
        score = torch.tensor([[point["score"] for point in one["curve"]] for one in runs])
        axes.plot(steps, score.mean(0), line, color=color, label=agent)
        axes.fill_between(steps, score.amin(0), score.amax(0), color=color, alpha=0.2, linewidth=0)
        last = score[:, -3:].mean(1)
        seconds = sum(one["seconds"] for one in runs) / len(runs)
        print(
            f"| {agent} | {', '.join(f'{x:.3f}' for x in last.tolist())} | {float(last.mean()):.3f} | {seconds:.0f} |"
        )
    task = next(iter(results.values()))[0]["settings"]["task"]
    label = "share of episodes with the right turn" if task == "corridor" else f"mean return of {task}"
    axes.set(xlabel="environment steps", ylabel=label)
    axes.legend(loc="best")
    figure.savefig(out)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    training = commands.add_parser("train", help="train one agent with one seed")
    for name, value in asdict(Settings()).items():
        choices = list(CORES) if name == "agent" else None
        training.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, choices=choices)
    training.add_argument("--out", type=Path, default=Path("results"), help="folder of the results")
    plotting = commands.add_parser("plot", help="draw the curves of results")
    plotting.add_argument("results", type=Path, nargs="+")
    plotting.add_argument("--out", type=Path, default=Path("corridor.svg"))
    arguments = vars(parser.parse_args())
    out, command = arguments.pop("out"), arguments.pop("command")
    if command == "plot":
        plot(arguments["results"], out)
    else:
        torch.set_num_threads(1)  # the tensors are small
        run(Settings(**arguments), out)


if __name__ == "__main__":
    main()
