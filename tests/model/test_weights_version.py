"""What was computed with a model's weights is not used after they change: it is refused, or computed anew.

Shape suffixes: B batch rows, T tokens, D model width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensors import run_parts
from torch import Tensor

from transformer_xl import UserError
from transformer_xl.config import LoraConfig
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.lora import add_lora, merge_lora
from transformer_xl.model.memory import Memory
from transformer_xl.model.precision import with_matrices_in

LORA = LoraConfig(rank=3, alpha=5, targets=("k_proj", "r_proj", "up_proj"))


def with_adapters(model: LanguageModel) -> None:
    """Give a model an adapter, and another one, of peft's own making, that is not active."""
    add_lora(model, LORA)
    for layer in lora_layers(model):
        layer.update_layer("other", r=2, lora_alpha=3, config=peft_config())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()


def peft_config() -> Any:
    from peft import LoraConfig as PeftLoraConfig

    return PeftLoraConfig(r=2)


def lora_layers(model: LanguageModel) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "lora_A")]


def optimizer_step(model: LanguageModel) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def step_of_one(model: LanguageModel) -> None:
    parameter = model.layers[0].attention.norm.bias
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=0.1).step()


def load_weights(model: LanguageModel, **arguments: Any) -> None:
    model.load_state_dict({name: tensor * 1.5 for name, tensor in model.state_dict().items()}, **arguments)


def replace_parameters(model: LanguageModel) -> None:
    """By others that torch has counted as many changes of."""
    counts = {name: parameter._version for name, parameter in model.named_parameters()}
    load_weights(model, assign=True)
    for name, parameter in model.named_parameters():
        while parameter._version < counts[name]:
            torch.autograd.graph.increment_version(parameter)
    assert counts == {name: parameter._version for name, parameter in model.named_parameters()}


def add_adapter(model: LanguageModel) -> None:
    add_lora(model, LORA)
    for layer in lora_layers(model):
        torch.nn.init.normal_(layer.lora_B["default"].weight)


def switch(model: LanguageModel) -> None:
    for layer in lora_layers(model):
        layer.set_adapter("other")


def disable(model: LanguageModel) -> None:
    for layer in lora_layers(model):
        layer.enable_adapters(False)


def merge_both(model: LanguageModel) -> None:
    for layer in lora_layers(model):
        layer.merge(adapter_names=["default", "other"])


CHANGES: dict[str, tuple[Callable[[LanguageModel], Any], bool]] = {  # and whether there are adapters before
    "optimizer step": (optimizer_step, False),
    "optimizer step of one parameter": (step_of_one, False),
    "load_state_dict": (load_weights, False),
    "load_state_dict, assigned": (replace_parameters, False),
    "adapter added": (add_adapter, False),
    "adapter switched": (switch, True),
    "adapter disabled": (disable, True),
    "adapters merged": (merge_both, True),
    "adapter merged and removed": (merge_lora, True),
    "optimizer step of an adapter": (optimizer_step, True),
}


def read(model: LanguageModel, memory: Memory, tokens_BT: Tensor) -> Tensor:
    return run_parts(model, memory, *tokens_BT.split(3, dim=1))[0]


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_computed_with_earlier_weights_is_used(make_model, tokens, change):
    """Keys of hidden states are computed in each step, so results with them are those of the new weights."""
    model, (apply, has_adapters) = make_model(), CHANGES[change]
    if has_adapters:
        with_adapters(model)
    text_BT = tokens(2, 8)
    before_BTD, memory = run_parts(model, model.inference_memory(2), text_BT)
    run_parts(model, memory, text_BT)  # the same weights continue it
    low = with_matrices_in(model, torch.bfloat16)
    apply(model)
    model.eval()
    with pytest.raises(UserError, match="keys and values of other weights than the model has now; begin with a new"):
        model(text_BT, memory)
    model.requires_grad_(False)
    expected_BTD = read(model, model.initial_memory(2), text_BT)
    torch.testing.assert_close(read(model, model.inference_memory(2), text_BT), expected_BTD, rtol=0, atol=1e-10)
    if change != "adapter merged and removed":
        assert not torch.allclose(before_BTD, expected_BTD, atol=1e-3)
    with pytest.raises(UserError, match="keys and values of other weights"):
        low(text_BT, model.inference_memory(2))
    # a copy in bfloat16 made anew has the new weights
    model.float()
    with torch.autocast("cpu", torch.bfloat16):
        new = with_matrices_in(model, torch.bfloat16)
        results = [read(one, model.inference_memory(2), text_BT) for one in (model, new)]
    assert torch.equal(*results)


def test_hidden_states_outlive_a_change_of_weights(make_model, tokens):
    """As in training."""
    model = make_model()
    _, memory = run_parts(model, model.initial_memory(2), tokens(2, 8))
    optimizer_step(model)
    run_parts(model, memory, tokens(2, 8))


def test_copies_refuse_each_others_memories_unless_they_have_the_same_weights(make_model, tokens):
    model, text_BT = make_model().float(), tokens(2, 5)
    _, memory = run_parts(model, model.inference_memory(2), text_BT)
    with torch.autocast("cpu", torch.bfloat16):
        run_parts(with_matrices_in(model, torch.bfloat16), model.inference_memory(2), text_BT)
    twin = copy.deepcopy(model)
    with pytest.raises(UserError, match="keys and values of other weights"):
        twin(text_BT, memory)


def test_weights_that_torch_does_not_count_are_read(make_model, tokens):
    """Inference tensors have no count of changes."""
    with torch.inference_mode():
        model = make_model()
        _, memory = model(tokens(2, 5), model.inference_memory(2))
        model(tokens(2, 5), memory)
