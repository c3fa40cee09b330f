"""What XLNet learns from: spans, orders, parts, masks and losses against loops and transformers, and what is refused.

Shape suffixes: B batch rows, T tokens, Q predicted tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from library_tokenizers import LINES, word_piece
from torch import Tensor
from training_runs import MODEL, OPTIONS, letters_corpus, start
from xlnet.test_two_streams import models

from transformer_xl import train
from transformer_xl.config import UserError, XLNetConfig, run_settings
from transformer_xl.model.memory import Memory
from transformer_xl.text.corpus_writer import write_corpus
from transformer_xl.text.documents import Document
from transformer_xl.text.segments import DatasetPosition, Shard
from transformer_xl.text.tokenizers import ByteTokenizer
from transformer_xl.text.tokenizers.library import LibraryTokenizer
from transformer_xl.xlnet.objective import PermutedDataset, draw_order, draw_targets
from transformer_xl.xlnet.two_streams import XLNet

SEP, CLS, N, T, R = 201, 202, 200, 20, 8
STARTS = np.array([0, 30, 95], dtype=np.uint64)


def dataset(text: npt.NDArray[Any] | None = None, rows: int = 4, shard: Shard | None = None, **settings: Any) -> Any:
    """Return a dataset of the text 0, 1, ..., 199, in which a token tells its position."""
    sizes: dict[str, Any] = {"reuse_length": R, "perm_size": 5, "num_predict": 7, "max_gram": 3, "mask_alpha": 2}
    model = XLNetConfig(**{"functional_tokens": (SEP, CLS), **sizes, **settings})
    text = np.arange(N, dtype=np.uint8) if text is None else text
    places = {} if shard is None else {"shard": shard}
    return PermutedDataset(
        text, STARTS, batch_size=rows, segment_length=T, bos_token_id=0, seed=3, model=model, **places
    )


def positions(data: PermutedDataset, epochs: int = 1) -> list[DatasetPosition]:
    return [
        DatasetPosition(epoch=epoch, segment_index=index)
        for epoch in range(epochs)
        for index in range(data.segments_in(epoch))
    ]


def visible_by_loops(rank_T: npt.NDArray[np.int64], part: int = R) -> npt.NDArray[np.bool_]:
    """Return what each token sees, by the rules of the paper and its code."""
    visible_TT = np.zeros((len(rank_T), len(rank_T)), np.bool_)
    for i, rank in enumerate(rank_T):
        for j, other in enumerate(rank_T):
            if i < part <= j:
                continue  # memory would have seen what follows it
            visible_TT[i, j] = j < part <= i or other < 0 or other < rank
    return visible_TT


def test_segments_are_two_parts_of_the_text() -> None:
    """The first continues the segment before; B follows A, or is text from the start of a document."""
    data, following, elsewhere = dataset(), 0, set[int]()
    assert data.segments_in(0) == 1 + (N // 4 - T) // R
    for position in positions(data, epochs=25):
        batch = data.read(position)
        np.testing.assert_array_equal(batch.inputs_BX, batch.targets_BT)
        for row, (ids, segments) in enumerate(zip(batch.inputs_BX, batch.order_B2T[:, 1], strict=True)):
            first_sep, second_sep = np.flatnonzero(ids == SEP)
            a, b = ids[:first_sep], ids[first_sep + 1 : second_sep]
            np.testing.assert_array_equal(a, row * 50 + position.segment_index * R + np.arange(len(a)))
            np.testing.assert_array_equal(b, b[0] + np.arange(len(b)))
            assert (second_sep, ids[-1]) == (T - 2, CLS)
            np.testing.assert_array_equal(segments, [0] * (first_sep + 1) + [1] * (len(b) + 1) + [2])
            assert R < first_sep < T - 3
            is_next = b[0] == a[-1] + 1
            following += is_next
            elsewhere |= set() if is_next else {int(b[0])}
    assert 0.4 < following / (25 * 4 * data.segments_in(0)) < 0.65
    assert elsewhere == set(STARTS.tolist())


def test_half_of_the_rows_read_the_same_text_backward() -> None:
    data = dataset(bi_data=True, functional_tokens=())
    forward = [data.read(position).inputs_BX for position in positions(data)]
    starts = [int(batch[row, 0]) for batch in forward[:2] for row in range(4)]
    assert starts == [0, 99, 100, 199, R, 99 - R, 100 + R, 199 - R]
    for batch in forward:
        np.testing.assert_array_equal(np.diff(batch[::2]), 1)
        np.testing.assert_array_equal(np.diff(batch[1::2]), -1)
    data, found = dataset(bi_data=True), set[int]()
    for position in positions(data, epochs=5):
        ids = data.read(position).inputs_BX[1]
        first_sep, second_sep = np.flatnonzero(ids == SEP)
        np.testing.assert_array_equal(np.diff(ids[:first_sep]), -1)
        np.testing.assert_array_equal(np.diff(ids[first_sep + 1 : second_sep]), -1)
        found |= {int(ids[first_sep + 1])} - {int(ids[first_sep - 1]) - 1}
    assert found <= {N - 1, 29, 94, *range(R)}  # the end of a document, or of the first text that is long enough


def test_draws_follow_from_position_and_row_alone() -> None:
    data, position = dataset(), DatasetPosition(epoch=2, segment_index=1)
    batch = data.read(position)
    parts = [dataset(shard=Shard(index, 2)).read(position) for index in range(2)]
    np.testing.assert_array_equal(batch.order_B2T, np.concatenate([part.order_B2T for part in parts]))
    np.testing.assert_array_equal(batch.loss_mask_BT, np.concatenate([part.loss_mask_BT for part in parts]))
    other = data.read(DatasetPosition(epoch=3, segment_index=1))
    assert (batch.loss_mask_BT != other.loss_mask_BT).any()
    assert (batch.loss_mask_BT[0] != batch.loss_mask_BT[1]).any()


def test_orders_are_permutations_of_blocks() -> None:
    """What is predicted, SEP and CLS have places, in the range of their block; each place is equally probable."""
    data, before = dataset(), list[bool]()
    for position in positions(data, epochs=40):
        batch = data.read(position)
        for ids, mask, rank in zip(batch.inputs_BX, batch.loss_mask_BT, batch.order_B2T[:, 0], strict=True):
            is_functional = ids >= SEP
            assert (mask[:R].sum(), mask[R:].sum()) == (4, 3)
            assert not (mask & is_functional).any()
            np.testing.assert_array_equal(rank >= 0, mask | is_functional)
            for first, stop in ((0, 5), (5, 8), (8, 13), (13, 18), (18, 20)):
                in_block = rank[first:stop][rank[first:stop] >= 0]
                assert len(set(in_block)) == len(in_block)
                assert ((in_block >= first) & (in_block < stop)).all()
            before.append(rank[18] < rank[19])
    assert 0.45 < np.mean(before) < 0.55
    rng = np.random.default_rng(1)
    counts = np.zeros((5, 5))
    for _ in range(2000):
        counts[np.arange(5), draw_order(np.ones(5, np.bool_), [5], 5, rng)] += 1
    assert abs(counts / 2000 - 0.2).max() < 0.05


def test_spans_are_drawn_as_in_the_paper() -> None:
    """Lengths 1 to 3 in proportion to 1 / n, each in a context of 2 n tokens, until there are as many as wanted."""
    rng, config, lengths = np.random.default_rng(2), XLNetConfig(max_gram=3, mask_alpha=2), np.zeros(4)
    can_predict = np.ones(3000, np.bool_)
    for _ in range(20):
        chosen = draw_targets(can_predict, 300, config, rng)
        assert chosen.sum() == 300
        edges = np.flatnonzero(np.diff(np.concatenate([[0], chosen.astype(int), [0]])))
        runs = edges[1::2] - edges[::2]
        assert edges[-1] < 900 + 9  # each span of n takes 3 n
        lengths += np.bincount(runs[runs <= 3], minlength=4)
    # adjacent spans look like a longer one, which makes single tokens rarer
    np.testing.assert_allclose(lengths[1:] / lengths.sum(), np.array([6, 3, 2]) / 11, atol=0.06)
    few = np.zeros(50, np.bool_)
    few[[3, 20, 41]] = True
    np.testing.assert_array_equal(draw_targets(few, 3, config, rng), few)
    with pytest.raises(UserError, match="num_predict 4 is more than the 3 tokens"):
        draw_targets(few, 4, config, rng)


def training_batch() -> tuple[XLNet, Any, Any, Memory]:
    """Return both models in float64 and a batch in their vocabulary, with SEP and CLS and memory."""
    ours, theirs = models()
    config = ours.config.model_copy(
        update={"reuse_length": R, "num_predict": 7, "perm_size": 5, "functional_tokens": (17, 18), "max_gram": 3}
    )
    ours.config = config
    text = np.random.default_rng(5).integers(0, 17, N).astype(np.uint8)
    data = PermutedDataset(text, STARTS, batch_size=4, segment_length=T, bos_token_id=0, seed=3, model=config)
    ours, theirs = ours.double(), theirs.double()
    theirs.reuse_len, encodings = R, theirs.relative_positional_encoding
    theirs.relative_positional_encoding = lambda *args, **kwargs: encodings(*args, **kwargs).double()
    before, batch = (data.read(DatasetPosition(segment_index=index)) for index in (0, 1))
    memory = losses_of(ours, before, ours.initial_memory(4))[1]
    return ours, theirs, batch, memory


def losses_of(model: XLNet, batch: Any, memory: Memory) -> tuple[Tensor, Memory]:
    tokens, order = torch.from_numpy(batch.inputs_BX), torch.from_numpy(batch.order_B2T)
    losses_BT, auxiliary_BT, memory = model.training_losses(tokens, tokens, memory, progress=0.5, order=order)
    assert not auxiliary_BT.any()
    return losses_BT, memory


def test_losses_are_those_of_transformers_with_masks_by_loops() -> None:
    model, theirs, batch, memory = training_batch()
    losses_BT, after = losses_of(model, batch, memory)
    visible_BTT = np.stack([visible_by_loops(rank) for rank in batch.order_B2T[:, 0]])
    mapping_BQT = np.zeros((4, 7, T))
    for row, mask in enumerate(batch.loss_mask_BT):
        for index, place in enumerate(np.flatnonzero(mask)):
            mapping_BQT[row, index, place] = 1
    filled = memory.length - int(memory.valid_B[0])
    mems = [cache.tensors()["hidden"][:, filled:].transpose(0, 1) for cache in memory.layers]
    with torch.no_grad():
        out = theirs(
            torch.from_numpy(batch.inputs_BX), mems=mems, perm_mask=torch.from_numpy(~visible_BTT).double(),
            target_mapping=torch.from_numpy(mapping_BQT), token_type_ids=torch.from_numpy(batch.order_B2T[:, 1]),
            use_mems=True,
        )  # fmt: skip
    logits_BQV = out.last_hidden_state @ model.embedding.tables[0].T + model.softmax.bias
    for row, mask in enumerate(batch.loss_mask_BT):
        for index, place in enumerate(np.flatnonzero(mask)):
            nats = -logits_BQV[row, index].log_softmax(-1)[batch.targets_BT[row, place]]
            torch.testing.assert_close(losses_BT[row, place], nats, atol=1e-5, rtol=0)  # theirs has float32 positions
    for cache, hidden in zip(after.layers, out.mems, strict=True):
        torch.testing.assert_close(cache.tensors()["hidden"], hidden.transpose(0, 1), atol=1e-5, rtol=0)


def test_predictions_have_no_gradient_from_what_they_may_not_see() -> None:
    """Nor memory: its states are detached, and those of the first part do not depend on the second."""
    model, _, batch, memory = training_batch()
    inputs_BTD = model.embedding(torch.from_numpy(batch.inputs_BX)).detach().requires_grad_()

    class Embedding(torch.nn.Module):
        def forward(self, _: Tensor) -> Tensor:
            return inputs_BTD

    model.embedding = Embedding()  # pyrefly: ignore[bad-assignment]
    losses_BT, after = losses_of(model, batch, memory)
    for row, mask in enumerate(batch.loss_mask_BT):
        visible_TT = visible_by_loops(batch.order_B2T[row, 0])
        seen_TT = (visible_TT | np.eye(T, dtype=np.bool_)).astype(int)
        reached_TT = visible_TT.astype(int) @ seen_TT > 0  # in two layers
        for place in np.flatnonzero(mask):
            (grad_BTD,) = torch.autograd.grad(losses_BT[row, place], inputs_BTD, retain_graph=True)
            assert not reached_TT[place, place]
            np.testing.assert_array_equal((grad_BTD[row].abs().sum(-1) > 0).numpy(), reached_TT[place])
            assert not grad_BTD[[other for other in range(4) if other != row]].any()
    assert not any(tensor.requires_grad for cache in after.layers for tensor in cache.tensors().values())
    changed = batch.inputs_BX.copy()
    changed[:, R:] = (changed[:, R:] + 1) % 17
    with torch.no_grad():
        inputs_BTD[:, R:] += 1
    again = losses_of(model, batch, memory)[1]
    assert all(torch.equal(after.tensors()[name], tensor) for name, tensor in again.tensors().items())


def test_micro_batches_make_the_same_step(tmp_path: Path) -> None:
    """Also with rows that are read backward; validation tells both losses."""
    corpus, weights = letters_corpus(tmp_path / "corpus", 300, 60), list[dict[str, Tensor]]()
    model = {**MODEL, "architecture": "xlnet", "bi_data": True, "num_predict": 3}
    for size in (None, 2):
        trainer = start(
            tmp_path / f"run-{size}", corpus, model=model, batch_size=4, micro_batch_size=size, max_steps=3,
            warmup_steps=0, segment_length=12, eval_interval=3,
        )  # fmt: skip
        assert trainer.run()
        weights.append({name: tensor.clone() for name, tensor in trainer.model.state_dict().items()})
        valid = trainer.folder.metrics()[-1]
        assert valid["split"] == "valid"
        assert 2 < valid["nats_per_token"] < 7
        assert 2 < valid["nats_per_predicted_token"] < 7
        assert trainer.folder.metrics()[0]["nats_per_token"] == pytest.approx(5.5, abs=0.3)  # ln 256
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, atol=2e-4, rtol=0)


def test_tokenizers_with_sep_and_cls_make_segments_of_two_texts(tmp_path: Path) -> None:
    """From which both embeddings of segments learn; that of another segment has no gradient from plain text."""
    changes = list[Tensor]()
    for tokenizer, ids in ((LibraryTokenizer("tokenizers", json.dumps(word_piece())), (3, 2)), (ByteTokenizer(), ())):
        text = "".join(LINES).encode() * 30
        splits = {"train": [Document(f"{index}", [text]) for index in range(3)]}
        corpus = write_corpus(tmp_path / f"{len(ids)}", splits, name="tiny", source="a test", tokenizer=tokenizer)
        settings = {**MODEL, "architecture": "xlnet"}
        lengths = {"segment_length": 24, "memory_length": 8, "batch_size": 2, "max_steps": 2, "warmup_steps": 0}
        result = train(None, corpus, tmp_path / f"run-{len(ids)}", model=settings, train=lengths, **OPTIONS)
        model = result.run.model
        assert isinstance(model, XLNet)
        assert model.config.functional_tokens == ids
        torch.manual_seed(1)
        changes.append(model.segment_embedding - XLNet(model.config).segment_embedding)
    assert changes[0].all()
    assert not changes[1][:, 1].any()


@pytest.mark.parametrize(
    ("model", "training", "message"),
    [
        ({"max_gram": 9, "perm_size": 8}, {}, "max_gram 9 is longer than a block of perm_size 8 tokens"),
        ({"functional_tokens": (3,)}, {}, "functional_tokens 3 must be two token ids below vocab_size 256"),
        ({"functional_tokens": (3, 256)}, {}, "must be two token ids below vocab_size 256"),
        ({"norm_first": True}, {}, "norm_first true is not for xlnet"),
        ({"max_ngram": 2}, {}, "max_ngram 2 is not for xlnet"),
        ({"attention_window": 9}, {}, "attention_window 9 is not for xlnet"),
        ({"reuse_length": 16}, {}, "model.reuse_length 16 leaves too little of train.segment_length 16"),
        ({"num_predict": 17}, {}, "model.num_predict 17 is more than the tokens of a segment's parts; give 16"),
        ({"num_predict": 16, "functional_tokens": (1, 2)}, {}, "num_predict 16 is more .* give 11"),
        ({"bi_data": True}, {"batch_size": 3}, "model.bi_data reads half of a batch backward; give an even"),
        ({"bi_data": True}, {"batch_size": 6, "micro_batch_size": 3}, "give an even batch_size and micro_batch_size"),
        ({}, {"shuffle_documents": True}, "train.shuffle_documents true is not for xlnet"),
        ({}, {"shuffle_length": 64}, "train.shuffle_length 64 is not for xlnet"),
        ({}, {"loss": "half"}, "train.loss half is not for xlnet"),
        ({}, {"segment_length": 1}, "reuse_length 0 leaves too little"),
    ],
)
def test_wrong_settings_are_refused(model: dict[str, Any], training: dict[str, Any], message: str) -> None:
    settings = {"model": {"architecture": "xlnet", **model}, "train": {"segment_length": 16, **training}}
    with pytest.raises(UserError, match=message) as refused:
        run_settings(settings, "test")
    assert len(str(refused.value).splitlines()) == 1


def test_odd_micro_batches_of_backward_rows_are_refused(tmp_path: Path) -> None:
    model = {**MODEL, "architecture": "xlnet", "bi_data": True}
    with pytest.raises(UserError, match="6 rows make odd micro-batches; give a batch_size that is a multiple"):
        start(tmp_path / "run", letters_corpus(tmp_path / "corpus"), model=model, batch_size=6, micro_batch_size=4)


def test_the_collator_of_transformers_hides_what_should_be_seen() -> None:
    """It masks the content stream too, and has a query for every place; the paper's objective has neither."""
    from tokenizers import Tokenizer, models
    from transformers import DataCollatorForPermutationLanguageModeling, PreTrainedTokenizerFast

    vocab = {word: index for index, word in enumerate(["<mask>", "<pad>", *(f"w{index}" for index in range(30))])}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token="<pad>")), mask_token="<mask>", pad_token="<pad>"
    )
    torch.manual_seed(3)
    batch = DataCollatorForPermutationLanguageModeling(fast)([{"input_ids": list(range(2, 32))}])
    is_target_BT = batch["labels"] != -100
    assert 1 < is_target_BT.sum() < 15
    assert (batch["input_ids"][is_target_BT] == fast.mask_token_id).all()
    assert torch.equal(batch["target_mapping"][0], torch.eye(30))
    segment = dataset(functional_tokens=()).read(DatasetPosition())  # ours has the text itself, and fewer queries
    np.testing.assert_array_equal(segment.inputs_BX, segment.targets_BT)
    assert (segment.loss_mask_BT.sum(1) == 7).all()
