"""The module for TorchRL: windows equal the single steps that were collected, and replay keeps one memory a window.

Shape suffixes: B batch size, T steps, D width.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

torchrl = pytest.importorskip("torchrl")

from recall_env import make_env  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from tensordict.nn import TensorDictModule, TensorDictSequential  # noqa: E402
from torchrl.collectors import MultiSyncCollector  # noqa: E402
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer  # noqa: E402
from torchrl.modules import ProbabilisticActor, ValueOperator, set_recurrent_mode  # noqa: E402
from torchrl.objectives import ClipPPOLoss  # noqa: E402
from torchrl.objectives.value import GAE  # noqa: E402

from transformer_xl import Backbone, BackboneConfig, UserError  # noqa: E402
from transformer_xl.apps.rl.torchrl import BackboneModule, as_steps, to_windows  # noqa: E402

MEMORY, WINDOW, STEPS = 7, 6, 24  # memory slots (longer than an episode); steps of a window, and of a rollout


def make_module(*, keys: dict[str, str] | None = None, **settings) -> BackboneModule:
    torch.manual_seed(3)
    sizes = {"d_input": 3, "n_layers": 2, "d_model": 10, "n_heads": 2, "d_ff": 11, "attention_window": MEMORY + 1}
    backbone = Backbone(BackboneConfig(**{**sizes, **settings}), memory_length=MEMORY)
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return BackboneModule(backbone, in_key="observation", **{"out_key": "features", **(keys or {})})


def make_actor(module: BackboneModule) -> ProbabilisticActor:
    head = TensorDictModule(torch.nn.Linear(10, 2), in_keys=["features"], out_keys=["logits"])
    return ProbabilisticActor(
        TensorDictSequential(module, head),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )


@pytest.fixture(scope="module")
def rollout():
    """A module, and the steps that a policy with it takes in six episodes, with all memories."""
    module = make_module()
    actor, env = make_actor(module), make_env(module.make_tensordict_primer())
    with torch.no_grad():
        steps = env.rollout(STEPS, actor, break_when_any_done=False)
    assert steps["is_init"].sum() == 6
    return module, steps


def features_of(module: BackboneModule, steps) -> torch.Tensor:
    """Return the features of windows, computed anew."""
    with torch.no_grad(), set_recurrent_mode(True):
        return module(steps.exclude("features"))["features"]


def test_a_window_equals_the_collected_steps(rollout):
    """Episodes start inside the window, and it is one row or, cut at any step, two."""
    module, steps = rollout
    torch.testing.assert_close(features_of(module, steps), steps["features"], rtol=0, atol=1e-5)
    for start in range(1, STEPS):
        later = steps[start:]
        torch.testing.assert_close(features_of(module, later), later["features"], rtol=0, atol=1e-5)


def test_is_init_at_a_slice_s_start_means_the_stored_memory(rollout):
    """Samplers of slices mark each start so; inside a slice the memory is empty at is_init, whatever is stored."""
    module, steps = rollout
    cut = next(i for i in range(2, STEPS) if not steps["is_init"][i])  # in the middle of an episode
    later = steps[cut:].clone()
    later["is_init"][0] = True
    torch.testing.assert_close(features_of(module, later), later["features"], rtol=0, atol=1e-5)
    assert not torch.allclose(
        features_of(module, later.exclude("memory", "memory_valid")), later["features"], atol=1e-3
    )
    later["memory"][1:] = 1e3  # not read
    torch.testing.assert_close(features_of(module, later), later["features"], rtol=0, atol=1e-5)


def test_single_steps_start_with_an_empty_memory_where_is_init_is_true(rollout):
    module, steps = rollout
    first = steps[:1].clone()
    assert first["is_init"].all()
    first["memory"], first["memory_valid"] = torch.full_like(first["memory"], 5.0), torch.tensor([3])
    with torch.no_grad():
        after = module(first)
    torch.testing.assert_close(after["features"], steps["features"][:1], rtol=0, atol=1e-6)
    assert after["next", "memory_valid"].tolist() == [1]


def test_replay_keeps_one_memory_a_window(rollout):
    module, steps = rollout
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(STEPS // WINDOW), batch_size=3)
    buffer.extend(to_windows(steps, WINDOW))
    assert len(buffer) == STEPS // WINDOW
    stored = buffer[:]
    assert stored["memory"].shape == (STEPS // WINDOW, 2, MEMORY, 10)  # windows, layers, slots, width
    assert ("next", "memory") not in stored.keys(include_nested=True)
    batch = as_steps(buffer.sample())
    assert batch.batch_size == batch["next"].batch_size == (3, WINDOW)
    assert batch["memory"].untyped_storage().nbytes() == 4 * 3 * 2 * MEMORY * 10
    torch.testing.assert_close(features_of(module, batch), batch["features"], rtol=0, atol=1e-5)


def test_ppo_on_what_two_workers_collect():
    """Before the first update the policy of the windows is the one that acted, and gradients reach the backbone."""
    module = make_module()
    actor, primer = make_actor(module), module.make_tensordict_primer()
    critic = TensorDictSequential(module, ValueOperator(torch.nn.Linear(10, 1), in_keys=["features"]))
    collector = MultiSyncCollector(
        [partial(make_env, primer)] * 2, actor, frames_per_batch=2 * STEPS, total_frames=2 * STEPS, cat_results="stack"
    )
    try:
        (data,) = collector
    finally:
        collector.shutdown()
    assert data.batch_size == (2, STEPS)
    with torch.no_grad():
        GAE(gamma=0.9, lmbda=0.9, value_network=critic, shifted=True)(data)
    loss = ClipPPOLoss(actor, critic)
    batch = as_steps(to_windows(data, WINDOW))
    assert batch.batch_size == (2 * STEPS // WINDOW, WINDOW)
    losses = loss(batch)
    assert abs(float(losses["kl_approx"])) < 1e-5
    assert float(losses["clip_fraction"]) == 0
    # the values of windows are those that GAE computed over all steps
    torch.testing.assert_close(features_of(module, batch), batch["features"], rtol=0, atol=1e-5)
    (losses["loss_objective"] + losses["loss_critic"]).backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in module.parameters())


def test_policy_and_value_have_a_memory_each():
    """Both memories are kept once a window, also where the number of layers is the number of its steps."""
    module = make_module()
    second = make_module(keys={"out_key": "value_features", "memory_key": "value_memory"}, n_layers=WINDOW)
    both = TensorDictSequential(module, second)
    env = make_env(module.make_tensordict_primer()).append_transform(second.make_tensordict_primer())
    with torch.no_grad():
        steps = env.rollout(STEPS, TensorDictSequential(both, make_actor(module)), break_when_any_done=False)
    keys = ["memory", "value_memory"]
    windows = to_windows(steps, WINDOW, memory_keys=keys)
    assert windows["value_memory"].shape == (STEPS // WINDOW, WINDOW, MEMORY, 10)
    batch = as_steps(windows, memory_keys=keys)
    with torch.no_grad(), set_recurrent_mode(True):
        again = both(batch.exclude("features", "value_features"))
    for key in ("features", "value_features"):
        torch.testing.assert_close(again[key], batch[key], rtol=0, atol=1e-5)
    with pytest.raises(UserError, match="memory_keys"):
        to_windows(steps, WINDOW, memory_keys="memory")


def test_wrong_input_is_refused(rollout):
    module, steps = rollout
    cases = {
        "attention_window none would .* give BackboneConfig.attention_window=8.": lambda: make_module(
            attention_window=None
        ),
        "attention_window 9 would": lambda: make_module(attention_window=9),
        "give a transformer_xl.Backbone": lambda: BackboneModule(torch.nn.Linear(3, 3), in_key="a", out_key="b"),
        "the tensordict has no is_init; InitTracker": lambda: module(steps.exclude("is_init")),
        "the tensordict has no observation": lambda: module(steps.exclude("observation")),
        r"24 steps are no whole number of windows of 5; collect a multiple of 5": lambda: to_windows(steps, 5),
        "the saved memory has another shape than this model, batch size and memory length need": lambda: features_of(
            module, steps.clone().set("memory", steps["memory"][:, :, :3])
        ),
        "the last dimension of a tensordict is time": lambda: features_of(module, steps[0]),
    }
    for message, call in cases.items():
        with pytest.raises(UserError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("window_length", [0, -4, 3])
def test_windows_of_a_wrong_length_are_refused(window_length):
    steps = {"memory": torch.zeros(2, 8, 1, 4, 6), "memory_valid": torch.zeros(2, 8, dtype=torch.long)}
    with pytest.raises(UserError, match="8 steps are no whole number of windows"):
        to_windows(TensorDict(steps, batch_size=(2, 8)), window_length)
    with pytest.raises(UserError, match="with the keys memory and memory_valid"):
        to_windows(TensorDict({"memory": steps["memory"]}, batch_size=(2, 8)), 4)
