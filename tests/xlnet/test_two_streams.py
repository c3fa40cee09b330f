"""The streams of XLNet: equal to those of transformers, and no gradient comes from what a token may not see.

Shape suffixes: B batch rows, T tokens, Q predicted tokens, M memory slots, D model width, L layers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import XLNetConfig as TheirConfig
from transformers import XLNetModel

from transformer_xl.config import UserError, XLNetConfig
from transformer_xl.inference import prepare_inference
from transformer_xl.model.memory import HiddenCache, HiddenMemory, Memory
from transformer_xl.xlnet.two_streams import Streams, XLNet, visible_in_order

SIZES = {"n_layers": 2, "d_model": 16, "n_heads": 2, "d_ff": 24, "vocab_size": 19, "dropout": 0.0}
B, T, M, Q = 4, 7, 5, 3


def models(clamp: int | None = None, **theirs: Any) -> tuple[XLNet, XLNetModel]:
    """Return both models with the same random weights, large enough that each affects the results."""
    torch.manual_seed(1)
    ours = XLNet(XLNetConfig(**SIZES, clamp_length=clamp), memory_length=M).eval()
    settings = {"n_layer": 2, "d_model": 16, "n_head": 2, "d_inner": 24, "vocab_size": 19, "dropout": 0.0}
    config = TheirConfig(**settings, ff_activation="gelu_new", clamp_len=clamp or -1, mem_len=M, **theirs)
    model = XLNetModel(config).eval()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
        model.word_embedding.weight.copy_(ours.embedding.tables[0])
        model.mask_emb.copy_(ours.mask_embedding)
        for index, (layer, own) in enumerate(zip(model.layer, ours.layers, strict=True)):
            attention = layer.rel_attn
            for name in "qkvr":
                getattr(attention, name).copy_(getattr(own.attention, f"{name}_proj").weight.T.reshape(16, 2, 8))
            attention.o.copy_(own.attention.o_proj.weight.reshape(16, 2, 8))
            for name, vectors in (("w", "content"), ("r", "position"), ("s", "segment")):
                getattr(attention, f"r_{name}_bias").copy_(getattr(ours, f"{vectors}_bias")[index])
            attention.seg_embed.copy_(ours.segment_embedding[index])
            attention.layer_norm.load_state_dict(own.attention.norm.state_dict())
            layer.ff.layer_norm.load_state_dict(own.feed_forward.norm.state_dict())
            layer.ff.layer_1.load_state_dict(own.feed_forward.up_proj.state_dict())
            layer.ff.layer_2.load_state_dict(own.feed_forward.down_proj.state_dict())
    return ours, model


def drawn(number: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tokens, visible, targets and segments; four tokens of a row are visible to all, and three to predict."""
    generator = torch.Generator().manual_seed(number)
    tokens_BT = torch.randint(19, (B, T), generator=generator)
    targets_BQ = torch.stack([torch.randperm(T, generator=generator)[:Q] for _ in range(B)])
    rank_BT = torch.full((B, T), -1).scatter(1, targets_BQ, torch.arange(Q).expand(B, -1))
    return tokens_BT, visible_in_order(rank_BT), targets_BQ, torch.randint(2, (B, T), generator=generator)


def filled_memory(model: XLNet, seed: int = 3) -> Memory:
    generator = torch.Generator().manual_seed(seed)
    empty = model.initial_memory(B)
    assert isinstance(empty, HiddenMemory)
    caches = [HiddenCache(torch.randn(B, M, 16, generator=generator)) for _ in empty.layers]
    return empty.advance(caches, M)


def their_streams(model: XLNetModel, memory: Memory | None, drawn: tuple[Tensor, ...]) -> Any:
    tokens_BT, visible_BTT, targets_BQ, segments_BT = drawn
    mems = None if memory is None else [cache.tensors()["hidden"].transpose(0, 1) for cache in memory.layers]
    mapping_BQT = torch.nn.functional.one_hot(targets_BQ, T).float()
    with torch.no_grad():
        return model(
            tokens_BT, mems=mems, perm_mask=(~visible_BTT).float(), target_mapping=mapping_BQT, use_mems=True,
            token_type_ids=segments_BT, output_hidden_states=True,
        )  # fmt: skip


@pytest.mark.parametrize("clamp", [None, 3])
@pytest.mark.parametrize("with_memory", [False, True])
def test_both_streams_are_those_of_transformers(with_memory: bool, clamp: int | None) -> None:
    model, theirs = models(clamp)
    memory = filled_memory(model) if with_memory else None
    tokens_BT, visible_BTT, targets_BQ, segments_BT = drawn()
    with torch.no_grad():
        streams = model.two_streams(
            tokens_BT, memory, visible=visible_BTT, targets=targets_BQ, segments=segments_BT, num_kept=4
        )
    out = their_streams(theirs, memory, drawn())
    torch.testing.assert_close(streams.content_BTD, out.hidden_states[-2], atol=1e-5, rtol=0)
    torch.testing.assert_close(streams.query_BQD, out.last_hidden_state, atol=1e-5, rtol=0)


def test_rows_read_backward_are_those_of_transformers() -> None:
    """Theirs are the second half of a batch, ours every second row."""
    model, theirs = models(clamp=4, bi_data=True)
    memory, all_drawn = filled_memory(model), drawn()
    tokens_BT, visible_BTT, targets_BQ, segments_BT = all_drawn
    with torch.no_grad():
        streams = model.two_streams(
            tokens_BT, memory, visible=visible_BTT, targets=targets_BQ, segments=segments_BT, bi_data=True
        )
    order = [0, 2, 1, 3]
    out = their_streams(theirs, memory.select(order), tuple(tensor[order] for tensor in all_drawn))
    torch.testing.assert_close(streams.query_BQD[order], out.last_hidden_state, atol=1e-5, rtol=0)


def test_memory_is_that_of_transformers() -> None:
    """The first tokens of each segment, with those before them."""
    model, theirs = models(reuse_len=4)
    memory, mems = model.initial_memory(B), None
    for number in range(3):
        tokens_BT, visible_BTT, targets_BQ, segments_BT = drawn(number)
        with torch.no_grad():
            memory = model.two_streams(
                tokens_BT, memory, visible=visible_BTT, targets=targets_BQ, segments=segments_BT, num_kept=4
            ).memory
            mems = theirs(
                tokens_BT, mems=mems, perm_mask=(~visible_BTT).float(), token_type_ids=segments_BT, use_mems=True
            ).mems
    assert memory.valid_B.tolist() == [M] * B
    for cache, hidden_MBD in zip(memory.layers, mems, strict=True):
        torch.testing.assert_close(cache.tensors()["hidden"], hidden_MBD.transpose(0, 1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("clamp", [None, 3])
@pytest.mark.parametrize("is_prepared", [False, True])
def test_reading_from_left_to_right_is_that_of_transformers(is_prepared: bool, clamp: int | None) -> None:
    """Each token is predicted by a query at its place that sees all before it, in segments of any length."""
    model, theirs = models(clamp)
    tokens_BT = torch.randint(19, (B, M + 1), generator=torch.Generator().manual_seed(1))
    reader: Any = prepare_inference(model) if is_prepared else model
    memory, parts = reader.initial_memory(B), list[Tensor]()
    with torch.no_grad():
        for length in (3, 1, M + 1 - 4):
            start = sum(part.shape[1] for part in parts)
            hidden_BTD, memory = reader(tokens_BT[:, start : start + length], memory)
            parts.append(hidden_BTD)
        num_new = M + 2  # with a token after them, which the last query predicts
        causal_TT = torch.ones(num_new, num_new).triu()
        out = theirs(
            torch.cat([tokens_BT, tokens_BT[:, :1]], 1), perm_mask=causal_TT.expand(B, -1, -1), use_mems=False,
            target_mapping=torch.eye(num_new)[1:].expand(B, -1, -1),
        )  # fmt: skip
    torch.testing.assert_close(torch.cat(parts, 1), out.last_hidden_state, atol=1e-5, rtol=0)


def test_gradients_come_only_from_what_a_token_sees() -> None:
    """Of the loss of each prediction, with respect to each embedding: of tokens and, through memory, of the past."""
    model, _ = models()
    tokens_BT, visible_BTT, targets_BQ, segments_BT = drawn()
    visible_BTT[:, :3, 3:] = False  # the first part does not see the second
    inputs_BTD = model.embedding(tokens_BT).detach().requires_grad_()

    class Embedding(torch.nn.Module):
        def forward(self, _: Tensor) -> Tensor:
            return inputs_BTD

    model.embedding = Embedding()  # pyrefly: ignore[bad-assignment]
    streams = model.two_streams(
        tokens_BT, filled_memory(model), visible=visible_BTT, targets=targets_BQ, segments=segments_BT, num_kept=3
    )
    # what is visible through any number of layers
    seen_BTT = (visible_BTT | torch.eye(T, dtype=torch.bool)).float()
    reached_BTT = (visible_BTT.float() @ seen_BTT @ seen_BTT) > 0
    for row in range(B):
        for index, place in enumerate(targets_BQ[row].tolist()):
            (grad_BTD,) = torch.autograd.grad(
                streams.query_BQD[row, index].square().sum(), inputs_BTD, retain_graph=True
            )
            assert not reached_BTT[row, place, place]
            assert torch.equal(grad_BTD[row].abs().sum(-1) > 0, reached_BTT[row, place])
    assert not any(tensor.requires_grad for cache in streams.memory.layers for tensor in cache.tensors().values())


def test_what_memory_keeps_has_seen_nothing_of_the_rest() -> None:
    """Memory is the same whatever the tokens after those that it keeps."""
    model, _ = models()
    tokens_BT, visible_BTT, _, segments_BT = drawn()
    visible_BTT[:, :4, 4:] = False
    others_BT = torch.cat([tokens_BT[:, :4], (tokens_BT[:, 4:] + 1) % 19], 1)
    one, other = (
        model.two_streams(tokens, visible=visible_BTT, segments=segments_BT, num_kept=4).memory.tensors()
        for tokens in (tokens_BT, others_BT)
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


def call(**changes: Any) -> Streams:
    tokens_BT, visible_BTT, targets_BQ, segments_BT = drawn()
    given = {"tokens": tokens_BT, "visible": visible_BTT, "targets": targets_BQ, "segments": segments_BT, **changes}
    return models()[0].two_streams(**given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"visible": torch.ones(B, T, T + 1, dtype=torch.bool)}, r"visible is torch.bool \(4, 7, 8\); give torch.bool"),
        ({"visible": torch.ones(B, T, T)}, "visible is torch.float32"),
        ({"visible": [[True]]}, "visible"),
        ({"targets": torch.full((B, Q), T)}, "positions outside of 0 to 6"),
        ({"targets": torch.zeros(B + 1, Q, dtype=torch.long)}, "targets is torch.int64"),
        ({"segments": torch.zeros(B, T)}, "segments is torch.float32"),
        ({"lengths": torch.full((B,), T)}, "lengths and visible were both given"),
        ({"num_kept": T + 1}, "num_kept 8: must be from 0 to 7"),
        ({"num_kept": "3"}, "num_kept is of type str"),
        (
            {"lengths": torch.full((B,), T), "visible": None, "num_kept": 3},
            "lengths and num_kept were both given",
        ),
        (
            {"tokens": [[1] * T], "bi_data": True, "visible": None, "targets": None, "segments": None},
            "reverses every second row, and the batch has 1",
        ),
    ],
)
def test_wrong_arguments_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        call(**changes)


@pytest.mark.parametrize("rank", [torch.tensor([[0, 1, 1]]), torch.tensor([0, 1]), torch.tensor([[0.0, 1.0]])])
def test_what_is_no_order_is_refused(rank: Tensor) -> None:
    with pytest.raises(UserError, match="rank is"):
        visible_in_order(rank)
