"""The model: the oracle's numbers, exactness over segments, causality, gradients, and no hidden changes."""

import pkgutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import forward as oracle
from tensors import assert_drawn_from_normal, assert_same_tensors, authors_mean_std, copied_tensors, named_gradients

from transformer_xl.config import TransformerXLConfig, UserError, load_recipe
from transformer_xl.model.attention import encode_distances
from transformer_xl.model.memory import ContextLimits
from transformer_xl.model.transformer_xl import TransformerXL

STYLES = {
    "the paper's": {},
    "pre-norm": {"norm_first": True},
    "pre-norm as the authors'": {"norm_first": True, "final_norm": False},
    "untied biases": {"tie_attention_biases": False},
    "reference kernel": {"attn_implementation": "reference"},
}


def oracle_settings(model: TransformerXL, context_limits: ContextLimits) -> dict:
    config = model.config
    return {
        "layers": config.n_layers, "heads": config.n_heads, "pre_norm": config.norm_first,
        "tied": config.tie_attention_biases, "window": context_limits.attention_window,
        "clamp": context_limits.clamp_length,
    }  # fmt: skip


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    ("context_limits", "segments"),
    [
        (ContextLimits(0), [5]),
        (ContextLimits(3), [5, 2]),
        (ContextLimits(7), [3, 3]),
        (ContextLimits(5, attention_window=4), [3, 3]),
        (ContextLimits(5, attention_window=7, clamp_length=3), [1, 5, 1]),
    ],
)
def test_equals_the_oracle(make_model, tokens, style, context_limits, segments):
    """Logits, memory and every gradient of a model read segment by segment."""
    model = make_model(**STYLES[style])
    weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    assert ("final_norm.weight" in weights) == (style == "pre-norm")
    wanted_memory, valid = [torch.zeros(2, context_limits.memory_length, 14, dtype=torch.float64)] * 3, [0, 0]
    memory = model.initial_memory(2, context_limits)
    for index, length in enumerate(segments):
        text = tokens(2, length, seed=index)
        hidden_BTD, memory = model(text, memory)
        logits_BTV = model.logits(hidden_BTD)
        wanted, wanted_memory, valid = oracle(
            weights, oracle_settings(model, context_limits), text, wanted_memory, valid
        )
        torch.testing.assert_close(logits_BTV, wanted, rtol=0, atol=1e-10)
        assert_same_tensors([cache.hidden_BMD for cache in memory.layers], wanted_memory, atol=1e-10)
        assert memory.valid_B.tolist() == valid
    weight = torch.randn(wanted.shape, dtype=torch.float64)
    found_grads = named_gradients((logits_BTV * weight).sum(), model)
    assert_same_tensors(found_grads, named_gradients((wanted * weight).sum(), weights), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("norm_first", [False, True])
@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), clamp=st.none() | st.integers(1, 40))
def test_segments_of_any_lengths_equal_one_pass(norm_first, lengths, clamp):
    """With memory for all that came before, cutting a text changes nothing (up to float64 rounding)."""
    torch.manual_seed(5)
    small = {"vocab_size": 23, "n_layers": 3, "d_model": 14, "n_heads": 2, "d_ff": 19, "dropout": 0.0}
    model = TransformerXL(TransformerXLConfig(**small, norm_first=norm_first)).double().eval()
    text, targets = (torch.randint(0, 23, (2, sum(lengths))) for _ in range(2))
    whole_BT = model.nats(model(text, model.initial_memory(2, ContextLimits(0, None, clamp)))[0], targets)
    memory, parts, start = model.initial_memory(2, ContextLimits(sum(lengths), None, clamp)), [], 0
    for length in lengths:
        hidden_BTD, memory = model(text[:, start : start + length], memory)
        parts.append(model.nats(hidden_BTD, targets[:, start : start + length]))
        start += length
    torch.testing.assert_close(torch.cat(parts, dim=1), whole_BT, rtol=0, atol=1e-10)


@pytest.mark.parametrize("segment", [1, 2, 3, 7])
def test_with_a_window_the_segment_does_not_matter(make_model, tokens, segment):
    """A window fixes the context, so any memory of at least window - 1 slots gives the same result."""
    model, text = make_model(), tokens(2, 21)
    whole_BTD, _ = model(text, model.initial_memory(2, ContextLimits(0, attention_window=4)))
    memory, parts = model.initial_memory(2, ContextLimits(5, attention_window=4)), []
    for part in text.split(segment, dim=1):
        hidden_BTD, memory = model(part, memory)
        parts.append(hidden_BTD)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole_BTD, rtol=0, atol=1e-10)


@pytest.mark.parametrize("context_limits", [ContextLimits(11), ContextLimits(11, attention_window=3), ContextLimits(0)])
def test_causality_by_gradient(make_model, context_limits):
    """The output at a position depends on no input after it, nor (one layer) on any beyond the window."""
    model = make_model(n_layers=1)
    inputs_BTD = torch.randn(1, 9, 14, dtype=torch.float64, requires_grad=True)
    hidden_BTD, _ = model(memory=model.initial_memory(1, context_limits), inputs_BTD=inputs_BTD)
    for position in range(9):
        (slope_BTD,) = torch.autograd.grad(hidden_BTD[:, position].square().sum(), inputs_BTD, retain_graph=True)
        touched = slope_BTD[0].abs().sum(-1) > 0
        first = 0 if context_limits.attention_window is None else max(0, position - context_limits.attention_window + 1)
        assert touched.tolist() == [first <= index <= position for index in range(9)]


@pytest.mark.parametrize("kernel", ["cpu", "sdpa", "reference"])
@pytest.mark.parametrize("name", ["k_proj", "v_proj"])
def test_gradient_stops_at_memory_but_reaches_keys_and_values_through_it(make_model, tokens, name, kernel):
    """The weights' gradient is a sum over memory rows too, though the rows themselves carry none."""
    model = make_model(attn_implementation=kernel)
    _, memory = model(tokens(2, 11), model.initial_memory(2))
    assert not any(cache.hidden_BMD.requires_grad for cache in memory.layers)
    linear = getattr(model.layers[1].attention, name)
    seen = []

    def keep(_module, given, made):
        made.retain_grad()
        seen.append((given[0], made))

    linear.register_forward_hook(keep)
    hidden_BTD, _ = model(tokens(2, 3, seed=9), memory)
    hidden_BTD.pow(3).sum().backward()
    assert not seen[0][0].requires_grad  # memory rows
    rows_BSD = torch.cat([rows for rows, _ in seen], 1)
    made_grad_BSI = torch.cat([made.grad for _, made in seen], 1)
    assert rows_BSD.shape[1] == 14
    assert made_grad_BSI[:, :11].abs().amax() > 1e-3
    whole_ID = torch.einsum("bsi,bsd->id", made_grad_BSI, rows_BSD)
    torch.testing.assert_close(linear.weight.grad, whole_ID, rtol=1e-9, atol=1e-9)


def test_neither_inputs_nor_memory_change(make_model, tokens):
    model, text = make_model().train(), tokens(2, 5)
    _, memory = model(tokens(2, 7))
    before = copied_tensors(memory)
    kept = text.clone()
    hidden_BTD, after = model(text, memory)
    model.nats(hidden_BTD, text).sum().backward()
    assert torch.equal(text, kept)
    assert_same_tensors(memory, before)
    assert after is not memory


def test_a_sequence_does_not_depend_on_the_others_of_its_batch(make_model, tokens):
    model = make_model()
    text, more = tokens(5, 7), tokens(5, 6, seed=8)
    _, memory = model(text)
    memory = memory.reset([1, 3])  # batch rows with different numbers of valid slots
    hidden_BTD, after = model(more, memory)
    order = [4, 1, 0, 3, 2]
    shuffled_BTD, _ = model(more[order], memory.select(order))
    torch.testing.assert_close(shuffled_BTD, hidden_BTD[order], rtol=0, atol=1e-12)
    for row in range(5):
        alone_BTD, alone_after = model(more[row : row + 1], memory.select([row]))
        torch.testing.assert_close(alone_BTD, hidden_BTD[row : row + 1], rtol=0, atol=1e-12)
        assert_same_tensors(alone_after, after.select([row]), atol=1e-12)


def test_a_batch_row_after_reset_is_as_new(make_model, tokens):
    model, more = make_model(), tokens(2, 6, seed=8)
    _, memory = model(tokens(2, 7))
    hidden_BTD, _ = model(more, memory.reset([1]))
    fresh_BTD, _ = model(more)
    torch.testing.assert_close(hidden_BTD[1], fresh_BTD[1], rtol=0, atol=1e-12)


def test_trace_shows_what_forward_does(make_model, tokens):
    model, text = make_model(), tokens(2, 5)
    _, memory = model(tokens(2, 4, seed=1))
    hidden_BTD, after = model(text, memory)
    traces = list(model.trace(text, memory))
    assert len(traces) == 3
    torch.testing.assert_close(traces[-1].output_BTD, hidden_BTD)
    torch.testing.assert_close(after.layers[1].hidden_BMD[:, -5:], traces[0].output_BTD)
    assert_same_tensors(memory.advance([trace.cache for trace in traces], 5), after, atol=1e-12)
    for trace in traces:
        assert trace.terms.probabilities_BNTS.shape == (2, 2, 5, 16)
        torch.testing.assert_close(trace.terms.probabilities_BNTS.sum(-1), torch.ones(2, 2, 5, dtype=torch.float64))
        assert (trace.terms.probabilities_BNTS[..., :7] == 0).all()  # 4 of 11 slots are valid


def test_hidden_states_are_all_layers_outputs(make_model, tokens):
    model, text = make_model(), tokens(2, 5)
    states, memory = model.hidden_states(text)
    hidden_BTD, wanted = model(text)
    assert len(states) == 4
    torch.testing.assert_close(states[-1], hidden_BTD)
    assert_same_tensors(memory, wanted)
    assert_same_tensors(states[:-1], [cache.hidden_BMD[:, -5:] for cache in wanted.layers])


def test_continuous_inputs_equal_the_embedding(make_model, tokens):
    model, text = make_model(), tokens(2, 5)
    inputs_BTD = model.embedding(text) * 14**0.5
    torch.testing.assert_close(model(inputs_BTD=inputs_BTD)[0], model(text)[0])


def test_bfloat16_keeps_positions_in_float32(make_model, tokens):
    encoding_PD = encode_distances(2000, 14, torch.empty(0, dtype=torch.bfloat16))
    assert encoding_PD.dtype == torch.float32
    assert len({tuple(row) for row in encoding_PD.tolist()}) == 2000
    model = make_model(memory_length=600)
    half = make_model(memory_length=600).bfloat16()
    text = tokens(1, 300)
    exact_BTD, low_BTD = (one(text, one(text)[1])[0] for one in (model, half))
    assert low_BTD.dtype == torch.bfloat16
    assert (low_BTD.double() - exact_BTD).norm() / exact_BTD.norm() < 0.03


def test_dropout_at_the_authors_places(make_model, tokens, monkeypatch):
    """Embedding; position encodings, one mask for all layers; in each layer probabilities, attention's output and
    twice in the feed-forward part; the last hidden states."""
    model = make_model(dropout=0.5, attention_dropout=0.25, attn_implementation="reference").train()
    dropped = []

    def recorded(draw):
        def record(given, share):
            dropped.append((tuple(given.shape), share))
            return draw(given, share)

        return record

    for where in ("torch.nn.functional.dropout", "transformer_xl.model.dropout._mask"):
        monkeypatch.setattr(where, recorded(pkgutil.resolve_name(where)))
    model(tokens(3, 5))
    layer = [((3, 2, 5, 16), 0.25), ((3, 5, 14), 0.5), ((3, 5, 19), 0.5), ((3, 5, 14), 0.5)]
    assert dropped == [((3, 5, 14), 0.5), ((16, 14), 0.5), *layer * 3, ((3, 5, 14), 0.5)]
    dropped.clear()
    model.eval()(tokens(3, 5))
    assert {share for _, share in dropped} == {0.0}


@pytest.mark.parametrize("kernel", ["cpu", "sdpa", "reference"])
def test_dropout_depends_on_the_random_state_alone(make_model, tokens, kernel):
    model = make_model(dropout=0.5, attention_dropout=0.5, attn_implementation=kernel).train()
    torch.manual_seed(1)
    first, _ = model(tokens(2, 5))
    second, _ = model(tokens(2, 5))
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(model(tokens(2, 5))[0], first)


def test_initial_weights_are_the_authors():
    torch.manual_seed(0)
    model = TransformerXL(TransformerXLConfig(d_model=128, n_heads=4, n_layers=2))
    assert_drawn_from_normal(model, authors_mean_std)


@pytest.mark.parametrize(("recipe", "counted"), [("enwik8-12l", 41_055_436), ("enwik8-24l", 277_231_820)])
def test_parameters_at_the_paper_s_vocabulary(recipe, counted):
    """enwik8 holds 204 different bytes."""
    with torch.device("meta"):
        model = TransformerXL(TransformerXLConfig(**{**load_recipe(recipe).model, "vocab_size": 204}))
    assert model.num_parameters() == counted


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda model: model(), "either tokens_BT or inputs_BTD"),
        (lambda model: model(torch.zeros(2, 3)), "expected integers"),
        (lambda model: model(torch.zeros(2, 0, dtype=torch.int64)), "expected integers"),
        (lambda model: model(inputs_BTD=torch.zeros(2, 3, 5)), r"expected \(batch, tokens, 14\)"),
        (
            lambda model: model(torch.zeros(2, 3, dtype=torch.int64), model.initial_memory(3)),
            "batch size 3 .* batch size 2",
        ),
        (lambda model: TransformerXL(TransformerXLConfig(attn_implementation="refrence")), "did you mean 'reference'"),
    ],
)
def test_wrong_calls_are_refused(make_model, call, text):
    with pytest.raises(UserError, match=text):
        call(make_model())


def test_memory_of_another_model_is_refused(make_model, tokens):
    other = make_model(n_layers=2).initial_memory(2)
    with pytest.raises(UserError, match="another model"):
        make_model()(tokens(2, 3), other)
