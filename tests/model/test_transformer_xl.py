"""The Transformer-XL model: it equals the oracle, and gradients, dropout, precision and initial weights are right.

The oracle is `forward` of tests/reference.py. Sizes are those of the fixture `make_model` (tests/conftest.py): 3
layers, width 14, 2 heads, feed-forward width 19, 23 tokens in the vocabulary, 11 memory slots.

Shape suffixes: B batch size, T new tokens, M memory slots, S = M + T keys, P distances, D model width, N heads,
V vocabulary.
"""

import pkgutil

import pytest
import torch
from reference import forward as oracle
from tensors import assert_drawn_from_normal, assert_same_tensors, authors_mean_std, named_gradients

from transformer_xl.config import TransformerXLConfig, UserError, load_recipe
from transformer_xl.model.attention import encode_distances
from transformer_xl.model.memory import ContextLimits
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.ops.native import chosen

# pre-norm: LayerNorm at the start of each residual branch, not after it, and (by default) after the last layer;
# untied biases: each layer has its own content and position bias
STYLES = {
    "as in the paper": {},
    "pre-norm": {"norm_first": True},
    "pre-norm as in the authors' code": {"norm_first": True, "final_norm": False},
    "untied biases": {"tie_attention_biases": False},
    "reference kernel": {"attn_implementation": "reference"},
    "normalized queries and keys": {"qk_norm": True},
    "n-grams": {"max_ngram": 4, "ngram_buckets": 17, "d_ngram": 3},
    "value embeddings": {"value_embeddings": True},
    "key offset": {"key_offset": True},
    "attention sinks": {"attention_sinks": True},
    "newer parts": {
        "key_offset": True, "attention_sinks": True, "value_embeddings": True, "qk_norm": True, "norm_first": True,
        "final_norm": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    ("context_limits", "segments"),
    [  # the first argument is the number of memory slots
        (ContextLimits(0), [5]),
        (ContextLimits(7), [5, 2]),
        (ContextLimits(5, attention_window=4), [3, 3]),
        (ContextLimits(5, attention_window=7, clamp_length=3), [1, 5, 1]),
    ],
)
def test_segments_equal_oracle(make_model, tokens, style, context_limits, segments):
    """Compares logits, memory and the gradient of every parameter."""
    model = make_model(**STYLES[style])
    weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    assert ("final_norm.weight" in weights) == (style == "pre-norm")
    oracle_settings = {
        "pre_norm": model.config.norm_first, "tied": model.config.tie_attention_biases,
        "window": context_limits.attention_window, "clamp": context_limits.clamp_length,
        "key_offset": model.config.key_offset,
    }  # fmt: skip
    # `valid`: number of filled slots of each batch row
    num_states = context_limits.memory_length + model.config.key_offset
    expected_memory, valid = [torch.zeros(2, num_states, 14, dtype=torch.float64)] * 3, [0, 0]
    memory, earlier = model.initial_memory(2, context_limits), tokens(2, 0)
    for index, length in enumerate(segments):
        text = tokens(2, length, seed=index)
        hidden_BTD, memory = model(text, memory)
        logits_BTV = model.logits(hidden_BTD)
        expected, expected_memory, valid = oracle(weights, oracle_settings, text, expected_memory, valid, earlier)
        all_tokens = torch.cat([earlier, text], dim=1)
        earlier = all_tokens[:, max(0, all_tokens.shape[1] - context_limits.memory_length) :]
        torch.testing.assert_close(logits_BTV, expected, rtol=0, atol=1e-10)
        assert_same_tensors([cache.hidden_BMD for cache in memory.layers], expected_memory, atol=1e-10)
        assert memory.valid_B.tolist() == valid
    weight = torch.randn(expected.shape, dtype=torch.float64)
    gradients = named_gradients((logits_BTV * weight).sum(), model)
    assert_same_tensors(gradients, named_gradients((expected * weight).sum(), weights), rtol=1e-9, atol=1e-9)


def test_key_offset_is_refused_where_it_has_no_meaning(make_model):
    with pytest.raises(UserError, match="cannot read continuous inputs"):
        make_model(key_offset=True)(inputs=torch.zeros(1, 3, 14, dtype=torch.float64))
    with pytest.raises(UserError, match="set key_offset or attend_empty_memory"):
        make_model(key_offset=True, attend_empty_memory=True)
    with pytest.raises(UserError, match="d_head must be 2 or more"):
        make_model(key_offset=True, d_head=1)


@pytest.mark.parametrize("kernel", ["cpu", "sdpa", "reference"])
@pytest.mark.parametrize("name", ["k_proj", "v_proj"])
def test_memory_gets_no_gradient_but_weights_get_one_through_it(make_model, tokens, name, kernel):
    """The gradient of the weights of keys and values is a sum over memory slots and new tokens."""
    model = make_model(attn_implementation=kernel)
    _, memory = model(tokens(2, 11), model.initial_memory(2))
    linear = getattr(model.layers[1].attention, name)
    calls = []  # input and output of each call of the linear layer; in suffixes below, I is its output width

    def record(_module, inputs, output):
        output.retain_grad()
        calls.append((inputs[0], output))

    linear.register_forward_hook(record)
    hidden_BTD, _ = model(tokens(2, 3, seed=9), memory)
    hidden_BTD.pow(3).sum().backward()
    assert not calls[0][0].requires_grad  # the memory is projected first
    input_BSD = torch.cat([inputs for inputs, _ in calls], 1)
    output_grad_BSI = torch.cat([output.grad for _, output in calls], 1)
    assert input_BSD.shape[1] == 14
    assert output_grad_BSI[:, :11].abs().amax() > 1e-3
    weight_grad_ID = torch.einsum("bsi,bsd->id", output_grad_BSI, input_BSD)
    torch.testing.assert_close(linear.weight.grad, weight_grad_ID, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("style", ["as in the paper", "value embeddings", "key offset"])
def test_trace_and_hidden_states_equal_the_values_in_forward(make_model, tokens, style):
    model, text = make_model(**STYLES[style]), tokens(2, 5)
    _, memory = model(tokens(2, 4, seed=1))
    hidden_BTD, after = model(text, memory)
    traces = list(model.trace(text, memory))
    states_BTD, _ = model.hidden_states(text, memory)
    assert_same_tensors(states_BTD, [model.embedding(text) * 14**0.5, *(t.output_BTD for t in traces)], atol=1e-12)
    torch.testing.assert_close(states_BTD[-1], hidden_BTD)
    assert_same_tensors(states_BTD[:-1], [cache.hidden_BMD[:, -5:] for cache in after.layers])
    _, with_new = model.embed(text, memory)
    assert_same_tensors(with_new.advance([trace.cache for trace in traces], 5), after, atol=1e-12)
    for trace in traces:
        assert trace.terms.probabilities_BNTS.shape == (2, 2, 5, 16)
        torch.testing.assert_close(trace.terms.probabilities_BNTS.sum(-1), torch.ones(2, 2, 5, dtype=torch.float64))
        assert (trace.terms.probabilities_BNTS[..., :7] == 0).all()  # 4 of 11 slots are valid


def test_bfloat16_encodes_positions_in_float32(make_model, tokens):
    # the third argument sets the device, and the dtype unless that has less precision than float32
    encoding_PD = encode_distances(2000, 14, torch.empty(0, dtype=torch.bfloat16))
    assert encoding_PD.dtype == torch.float32
    assert len({tuple(row) for row in encoding_PD.tolist()}) == 2000
    text, models = tokens(1, 300), (make_model(memory_length=600), make_model(memory_length=600).bfloat16())
    exact_BTD, low_BTD = (model(text, model(text)[1])[0] for model in models)
    assert low_BTD.dtype == torch.bfloat16
    assert (low_BTD.double() - exact_BTD).norm() / exact_BTD.norm() < 0.03


def test_dropout_is_applied_as_in_the_authors_code(make_model, tokens, monkeypatch):
    """It is applied to the embedding, to the position encodings (with one mask for all layers), in each layer to the
    attention probabilities, the attention output, and twice in the feed-forward part, and to the last hidden states."""
    model = make_model(dropout=0.5, attention_dropout=0.25, attn_implementation="reference").train()
    dropped = []

    def recorded(function):
        def record(x, p):
            dropped.append((tuple(x.shape), p))
            return function(x, p)

        return record

    for target in ("torch.nn.functional.dropout", "transformer_xl.ops.dropout._mask"):
        monkeypatch.setattr(target, recorded(pkgutil.resolve_name(target)))
    with chosen(dropout="torch"):  # the native operator is where the other is
        model(tokens(3, 5))
    # shapes: probabilities (B, N, T, S), attention output, feed-forward after ReLU, feed-forward output
    layer = [((3, 2, 5, 16), 0.25), ((3, 5, 14), 0.5), ((3, 5, 19), 0.5), ((3, 5, 14), 0.5)]
    # the embedding, the encodings (P, D) of 11 + 5 distances, three layers, the last hidden states
    assert dropped == [((3, 5, 14), 0.5), ((16, 14), 0.5), *layer * 3, ((3, 5, 14), 0.5)]
    dropped.clear()
    model.eval()(tokens(3, 5))
    assert {p for _, p in dropped} == {0.0}  # the attention kernel calls torch's dropout even with probability 0


def test_initial_weights_have_the_distributions_of_the_authors_code():
    torch.manual_seed(0)
    model = TransformerXL(TransformerXLConfig(d_model=128, n_heads=4, n_layers=2))
    assert_drawn_from_normal(model, authors_mean_std)


@pytest.mark.parametrize(("recipe", "count"), [("enwik8-12l", 41_055_436), ("enwik8-24l", 277_231_820)])
def test_parameter_counts_with_the_paper_s_vocabulary(recipe, count):
    """The paper states 41M and 277M parameters for its enwik8 models; enwik8 contains 204 different bytes."""
    with torch.device("meta"):
        model = TransformerXL(TransformerXLConfig(**{**load_recipe(recipe).model, "vocab_size": 204}))
    assert model.num_parameters() == count


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what torch.func.jvp imports
@pytest.mark.parametrize("training", [False, True])
def test_transforms_of_torch_func(make_model, training):
    """Of whatever kernel is chosen: forward and reverse mode, and gradients of each batch row."""
    model = make_model(qk_norm=True, dropout=0.4).train(training)
    torch.manual_seed(3)
    x_BTD, direction_BTD = torch.randn(2, 2, 5, 14, dtype=torch.float64)

    def total(x_BTD):
        torch.manual_seed(4)  # of dropout
        return model(inputs=x_BTD)[0].sin().sum()

    for name in ("auto", "cpu", "reference"):
        model.attn_implementation = name
        _, tangent = torch.func.jvp(total, (x_BTD,), (direction_BTD,))
        gradient_BTD = torch.func.grad(total)(x_BTD)
        step = 1e-6 * direction_BTD
        with torch.autograd.forward_ad.dual_level():  # in which dropout draws the same
            expected = (total(x_BTD + step) - total(x_BTD - step)) / 2e-6
        assert tangent.item() == pytest.approx(expected.item(), rel=1e-6)
        assert (gradient_BTD * direction_BTD).sum().item() == pytest.approx(expected.item(), rel=1e-6)
        if not training:
            rows_BTD = torch.func.vmap(torch.func.grad(lambda x_TD: total(x_TD[None])))(x_BTD)
            torch.testing.assert_close(rows_BTD, gradient_BTD)


def test_lengths_of_small_integers_and_wrong_numbers_of_keys(make_model):
    model = make_model()
    tokens_BT = torch.randint(23, (2, 300))
    for lengths in (torch.tensor([10, 40], dtype=torch.uint8), torch.tensor([100, 100], dtype=torch.int8)):
        assert_same_tensors(model(tokens_BT, lengths=lengths)[0], model(tokens_BT, lengths=lengths.long())[0])
    for visible, message in (
        (torch.full((1, 300), 2), r"visible of shape \(1, 300\).*expected integers of shape \(2, 300\)"),
        (torch.full((2, 300), 2.0), r"dtype torch\.float32; expected integers"),
        ([[2]], "visible is of type list"),
    ):
        with pytest.raises(UserError, match=message):
            model(tokens_BT, visible=visible)
    with pytest.raises(UserError, match="this model has no `visible`; leave it out"):
        make_model(attend_empty_memory=True)(tokens_BT, visible=torch.full((2, 300), 2))
