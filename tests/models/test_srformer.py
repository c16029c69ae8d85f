"""What SRformer promises beyond the common tests: its parents as special cases, Algorithm 1, the identities."""

import copy
import math

import pytest
import tokenizers
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DataCollatorForSeq2Seq,
    DynamicCache,
    MBartConfig,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

import hf_hybrid

from ..tolerances import assert_close
from .srformer import (
    MODES,
    ONE_PART,
    PARENTS,
    algorithm_1,
    attend,
    attentions,
    every_type,
    memories,
    parent,
    projected,
    random,
    seq2seq,
)
from .tiny import tiny_config, tiny_inputs, tiny_labels, tiny_model

# the parents as special cases


@every_type
@pytest.mark.parametrize("mode", ["sr", "segmented", "own_segment", "no_raf"])
def test_one_segment_is_the_parent(model_type, mode):
    """Nothing is left outside of the segment: P = 0, no neuron fires, O_R = 0, with recurrence on."""
    base = parent(model_type)
    model = seq2seq(model_type, segment_size=50, cross_attention_mode=mode)
    assert not model.load_state_dict(base.state_dict(), strict=False).unexpected_keys
    inputs = tiny_inputs(base, length=50)
    with torch.no_grad():
        expected = base(**inputs).logits
        outputs = model(**inputs, use_cache=True)
        if mode != "own_segment":  # ablation IV puts the segment itself into the neurons
            for memory in memories(outputs):
                assert memory.states is None or torch.equal(memory.states, torch.zeros_like(memory.states))
            assert_close(outputs.logits, expected, "float32 model")
            longer = {**inputs, "input_ids": inputs["input_ids"][:, :31]}
            assert_close(model(**longer).logits, base(**longer).logits, "float32 model")
        else:
            assert (outputs.logits - expected).abs().max() > 1e-3
    two = seq2seq(model_type, segment_size=25, cross_attention_mode=mode)
    two.load_state_dict(base.state_dict(), strict=False)
    assert (two(**inputs).logits - expected).abs().max() > 1e-3


@every_type
def test_mode_full_is_the_parent_bit_for_bit(model_type):
    base = parent(model_type)
    model = seq2seq(model_type, cross_attention_mode="full")
    model.load_state_dict(base.state_dict())
    inputs, labels = tiny_inputs(base, length=17), tiny_labels(base)
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, -5:] = 0
    with torch.no_grad():
        assert_close(model(**inputs, attention_mask=mask).logits, base(**inputs, attention_mask=mask).logits, "exact")
    ids = inputs["input_ids"]
    assert_close(model(input_ids=ids, labels=labels).loss, base(input_ids=ids, labels=labels).loss, "float32")
    for strategy in ({}, {"num_beams": 3}):
        options = {"max_new_tokens": 8, "min_new_tokens": 8, **strategy}
        assert torch.equal(model.generate(ids, **options), base.generate(ids, **options))


@every_type
@pytest.mark.parametrize("kind", ["plain", "gated and untied"])
def test_a_plain_checkpoint_loads_whole(model_type, kind, tmp_path):
    if kind != "plain" and model_type == "srformer_bart":
        base = parent(model_type, scale_embedding=True, activation_function="relu")
    elif kind == "plain":
        base = parent(model_type)
    else:  # T5 v1.1 and Flan-T5
        base = parent(model_type, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
        base.lm_head.weight = torch.nn.Parameter(base.lm_head.weight + 0.3)
    base.save_pretrained(tmp_path)
    torch.manual_seed(5)
    model, info = PARENTS[model_type][2].from_pretrained(tmp_path, segment_size=50, output_loading_info=True)
    new = {name for name in model.state_dict() if ".raf." in name or ".recurrent_gate." in name}
    assert set(info["missing_keys"]) == new
    assert len(new) == 4 * 2
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    for name, tensor in base.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    inputs = tiny_inputs(base, length=50)
    assert_close(model.eval()(**inputs).logits, base(**inputs).logits, "float32 model")
    assert model.config.model_type == model_type
    again = transformers.AutoModelForSeq2SeqLM.from_config(model.config)
    assert type(again) is type(model)


@pytest.mark.parametrize("loaded", [True, False])
@every_type
def test_what_is_new_starts_as_in_the_published_code(model_type, loaded, tmp_path):
    """A Linear's own draw for T5, a normal one for BART; and drawn parameters of the parent keep their scale."""
    wide = {"d_model": 128, "d_kv": 64} if model_type == "srformer_t5" else {"d_model": 128, "init_std": 0.02}
    model = PARENTS[model_type][2](tiny_config(model_type, **wide))
    if loaded:
        parent(model_type, **wide).save_pretrained(tmp_path)
        model = PARENTS[model_type][2].from_pretrained(tmp_path, recurrent_init="published")
    assert not any("gate" in name for name in model.state_dict())
    leak = {"srformer_t5": 0.1, "srformer_bart": 0.5}[model_type]
    for module in attentions(model):
        weight = module.raf.linear.weight
        assert module.raf.leak.tolist() == pytest.approx([leak])
        assert module.raf.threshold.tolist() == pytest.approx([0.1])
        if model_type == "srformer_t5":
            assert 0.9 / 8 < weight.abs().max() <= 1 / 8
            assert weight.std().item() == pytest.approx(1 / 8 / 3**0.5, rel=0.1)
            assert module.k.weight.std().item() == pytest.approx(128**-0.5, rel=0.1)
        else:
            assert weight.std().item() == pytest.approx(0.02, rel=0.1)
            assert weight.abs().max() > 0.05
    assert not torch.equal(*(module.raf.linear.weight for module in attentions(model)))


def test_parameter_counts_of_the_paper():
    """T5-small and BART-base, and d^2 + 2 numbers per decoder layer on top."""
    t5 = {"vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8}
    layers = {"encoder_layers": 6, "decoder_layers": 6, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072}
    heads = {"encoder_attention_heads": 12, "decoder_attention_heads": 12}
    for model_class, config, count in (
        (T5ForConditionalGeneration, T5Config(**t5), 60_506_624),
        (PARENTS["srformer_t5"][2], hf_hybrid.SRformerT5Config(**t5), 60_531_212),
        (BartForConditionalGeneration, BartConfig(d_model=768, **layers, **heads), 139_420_416),
        (PARENTS["srformer_bart"][2], hf_hybrid.SRformerBartConfig(d_model=768, **layers, **heads), 139_445_004),
    ):
        with torch.device("meta"):
            model = model_class(config)
        assert sum(parameter.numel() for parameter in model.parameters()) == count


# how recurrent attention begins


def converted(base, how, folder, **fields):
    """An SRformer of a parent, in one of the ways to make one."""
    model_class = PARENTS[f"srformer_{base.config.model_type}"][2]
    if how == "patched":
        return hf_hybrid.patch_cross_attention(copy.deepcopy(base), **fields)
    base.save_pretrained(folder)
    if how == "loaded":
        return model_class.from_pretrained(folder, **fields).eval()
    config = model_class.config_class.from_parent(base.config, **fields)
    return model_class.from_pretrained(folder, config=config).eval()


@every_type
@pytest.mark.parametrize(
    ("how", "mode"),
    [(how, "sr") for how in ("loaded", "with a config")]
    + [("patched", mode) for mode in MODES if mode not in ONE_PART],
)
def test_what_is_made_of_a_parent_begins_as_segmented_attention(model_type, how, mode, tmp_path):
    """Bit for bit, and its gates learn from the first step on, what is behind them from the second."""
    base = parent(model_type)
    model = converted(base, how, tmp_path, segment_size=3, cross_attention_mode=mode)
    segmented = converted(base, how, tmp_path, segment_size=3, cross_attention_mode="segmented")
    inputs, labels = tiny_inputs(base, length=20), tiny_labels(base)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][1, 13:] = 0
    with torch.no_grad():
        assert_close(model(**inputs).logits, segmented(**inputs).logits, "exact")
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "num_beams": 2}
    document = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    assert torch.equal(model.generate(**document, **options), segmented.generate(**document, **options))

    neurons = {name: weight for name, weight in model.named_parameters() if ".raf." in name}
    gates = {name: weight for name, weight in model.named_parameters() if ".recurrent_gate." in name}
    assert (len(neurons), len(gates)) == (0 if mode == "no_raf" else 6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(**document, labels=labels).loss.backward()
    assert all((gate.grad != 0).all() for gate in gates.values())  # every head's
    assert all((weight.grad == 0).all() for weight in neurons.values())
    optimizer.step()
    optimizer.zero_grad()
    model(**document, labels=labels).loss.backward()
    for name, weight in neurons.items():
        assert weight.grad.abs().max() > 0, name
    with torch.no_grad():
        assert (model(**inputs).logits - segmented(**inputs).logits).abs().max() > 1e-6


@every_type
def test_what_is_made_of_a_parent_begins_with_its_values_as_they_are(model_type, tmp_path):
    base = parent(model_type)
    for how in ("patched", "loaded", "with a config"):
        model = converted(base, how, tmp_path)
        assert model.config.recurrent_init == "gated"
        for module in attentions(model):
            assert torch.equal(module.raf.linear.weight, torch.eye(16))
            assert torch.equal(module.recurrent_gate.weight, torch.zeros(2))
            assert module.raf.threshold.tolist() == pytest.approx([0.1])
        published = converted(base, how, tmp_path, recurrent_init="published")
        assert published.config.recurrent_init == "published"
        for module in attentions(published):
            assert not hasattr(module, "recurrent_gate")
            assert (module.raf.linear.weight - torch.eye(16)).abs().max() > 0.5
    assert tiny_config(model_type).recurrent_init == "published"  # as in every config that does not say it


@every_type
@pytest.mark.parametrize(
    "fields", [{"mix": "sigma"}, *({"cross_attention_mode": mode} for mode in MODES if mode in ONE_PART)], ids=str
)
def test_a_gate_stands_where_something_is_added_to_segmented_attention(model_type, fields):
    model = hf_hybrid.patch_cross_attention(parent(model_type), **fields)
    assert not any(".recurrent_gate." in name for name in model.state_dict())
    for module in attentions(model):
        assert not hasattr(module, "raf") or torch.equal(module.raf.linear.weight, torch.eye(16))
        assert not hasattr(module, "sigma") or module.sigma.tolist() == [0.5]


@every_type
def test_a_gate_weighs_what_each_head_adds(model_type):
    """O = O_S + g O_R: linear in the gates, and with all of them at one what it is without."""
    module = attentions(seq2seq(model_type, recurrent_init="gated").double())[0]
    published = attentions(seq2seq(model_type).double())[0]
    published.load_state_dict({name: x for name, x in module.state_dict().items() if "gate" not in name})
    hidden, source = random(2, 9, 32), random(2, 22, 32, seed=1)

    def gated(*gates):
        with torch.no_grad():
            module.recurrent_gate.weight.copy_(torch.tensor(gates, dtype=torch.float64))
            return attend(module, hidden, source)

    assert_close(gated(1, 1), attend(published, hidden, source), "exact")
    nothing, first, second = gated(0, 0), gated(1, 0), gated(0, 1)
    assert (first - nothing).abs().max() > 1e-3
    assert (second - first).abs().max() > 1e-3
    assert_close(gated(0.3, -2), nothing + 0.3 * (first - nothing) - 2 * (second - nothing), "float64")


@every_type
def test_a_gated_model_is_saved_with_its_gates(model_type, tmp_path):
    model = seq2seq(model_type, recurrent_init="gated")
    model.save_pretrained(tmp_path)
    loaded, info = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    inputs = tiny_inputs(model, length=20)
    assert_close(loaded.eval()(**inputs).logits, model(**inputs).logits, "exact")
    again = copy.deepcopy(model)
    for module in attentions(again):
        torch.nn.init.zeros_(module.recurrent_gate.weight)
    assert (again(**inputs).logits - model(**inputs).logits).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_gate_at_zero_is_silent_in_16_bits(dtype):
    """However large the states behind it are."""
    model = hf_hybrid.patch_cross_attention(parent("srformer_t5"), 3, threshold_init=1e-3)
    segmented = hf_hybrid.patch_cross_attention(parent("srformer_t5"), 3, cross_attention_mode="segmented")
    hidden, source = random(2, 9, 32, dtype=dtype), 30 * random(2, 22, 32, seed=1, dtype=dtype)
    outputs = [attend(attentions(one)[0].to(dtype), hidden, source) for one in (model, segmented)]
    assert_close(outputs[0], outputs[1], "exact")


# Algorithm 1


@pytest.mark.parametrize(
    ("length", "target", "horizon"),
    [(24, 20, 20), (24, 8, 8), (24, 3, 3), (23, 13, 13), (22, 7, 7), (3, 5, 5), (1, 4, 4), (24, 6, 20), (22, 17, 9)],
)
@every_type
def test_all_tokens_at_once_are_algorithm_1(model_type, length, target, horizon):
    """Outputs and every gradient, for targets longer and shorter than the segments are many, and than the horizon."""
    results = []
    for function in (attend, algorithm_1):
        module = attentions(seq2seq(model_type).double())[0]
        hidden, source = random(2, target, 32), random(2, length, 32, seed=1)
        leaves = [hidden.requires_grad_(), source.requires_grad_(), *module.parameters()]
        output = function(module, hidden, source, horizon=horizon)
        weights = random(*output.shape, seed=2)
        results.append([output, *torch.autograd.grad(output, leaves, weights, allow_unused=True)])
    for index, (actual, expected) in enumerate(zip(*results, strict=True)):
        assert_close(actual, expected, "float64 gradient" if index else "float64")
    names = [name for name, _ in module.named_parameters()]
    if -(-length // 3) > 2:
        for name in ("raf.leak", "raf.threshold", "raf.linear.weight"):
            assert results[0][3 + names.index(name)].abs().max() > 1e-6, f"no gradient reaches {name}"


@every_type
@pytest.mark.parametrize("horizon", [1, 2, 7, 8, 9, 20])
def test_a_step_at_a_position_is_the_loop_at_that_token(model_type, horizon):
    module = attentions(seq2seq(model_type).double())[0]
    hidden, source = random(2, 23, 32), random(2, 22, 32, seed=1)
    expected = algorithm_1(module, hidden, source, horizon)
    for position in (*range(10), 19, 22):
        for past in (position, torch.tensor(position)):
            step = attend(module, hidden[:, position : position + 1], source, horizon=horizon, past=past)
            assert_close(step, expected[:, position : position + 1], "float64")
    chunk = attend(module, hidden[:, 5:16], source, horizon=horizon, past=5)
    assert_close(chunk, expected[:, 5:16], "float64")


@every_type
@pytest.mark.parametrize("lengths", [(22, 9, 1, 14), (24, 23, 12, 13), (5, 24, 24, 24)])
@pytest.mark.parametrize(("target", "horizon"), [(20, 20), (40, 40), (3, 3), (5, 12), (30, 12)])
def test_each_document_of_a_batch_is_read_as_if_alone(model_type, lengths, target, horizon):
    """Against Algorithm 1 on each document without its padding, which may lie anywhere."""
    module = attentions(seq2seq(model_type).double())[0]
    hidden, source = random(4, target, 32), random(4, 24, 32, seed=1)
    generator = torch.Generator().manual_seed(3)
    for side in ("right", "left", "holes"):
        mask = torch.zeros(4, 24, dtype=torch.long)
        for row, length in enumerate(lengths):
            columns = torch.randperm(24, generator=generator)[:length].sort().values
            mask[row, {"right": slice(length), "left": slice(24 - length, 24), "holes": columns}[side]] = 1
        dirty = source.masked_fill(mask[..., None] == 0, 1e3)
        output = attend(module, hidden, dirty, mask=mask, horizon=horizon)
        for row in range(4):
            alone = source[row : row + 1, mask[row].bool()]
            expected = algorithm_1(module, hidden[row : row + 1], alone, horizon)
            assert_close(output[row : row + 1], expected, "float64")
            one = slice(row, row + 1)  # padded, and in a batch by itself
            assert_close(attend(module, hidden[one], dirty[one], mask=mask[one], horizon=horizon), expected, "float64")


def test_queries_of_a_segment_share_its_keys():
    """No copy of keys, values or states per token: training touches little more than once what there is."""

    class Largest(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            outputs = func(*args, **(kwargs or {}))
            for output in outputs if isinstance(outputs, tuple | list) else (outputs,):
                if isinstance(output, torch.Tensor):
                    self.numel = max(self.numel, output.numel())
            return outputs

    module = attentions(seq2seq("srformer_t5", segment_size=16))[0]
    hidden, source = random(2, 256, 32, dtype=torch.float32), random(2, 128, 32, seed=1, dtype=torch.float32)
    mask = torch.ones(2, 128, dtype=torch.long)
    mask[1, 90:] = 0
    for given in (None, mask):
        with Largest() as largest:
            attend(module, hidden, source, mask=given)
        # scores (2, 2 heads, 256, 16), wasted rows included; keys per token would be 256 / 8 times the keys
        assert largest.numel <= 3 * 2 * 2 * 256 * 16
        assert largest.numel < 2 * 2 * 256 * 16 * 16


# identities


@every_type
def test_neurons_that_never_fire_leave_segmented_attention(model_type):
    model = seq2seq(model_type, threshold_init=1e9)
    other = seq2seq(model_type, cross_attention_mode="segmented")
    other.load_state_dict(model.state_dict(), strict=False)
    inputs = tiny_inputs(model, length=20)
    assert_close(model(**inputs).logits, other(**inputs).logits, "exact")


@every_type
def test_recurrent_and_segmented_parts_add_up(model_type):
    hidden, source = random(2, 9, 32), random(2, 20, 32, seed=1)
    whole = seq2seq(model_type).double()
    if model_type == "srformer_bart":  # or each part would add it
        torch.nn.init.zeros_(attentions(whole)[0].out_proj.bias)

    def module_with(**fields):
        model = seq2seq(model_type, **fields).double()
        model.load_state_dict(whole.state_dict(), strict=False)
        return attentions(model)[0]

    modes = ("sr", "segmented", "recurrent")
    parts = {mode: attend(module_with(cross_attention_mode=mode), hidden, source) for mode in modes}
    assert_close(parts["segmented"] + parts["recurrent"], parts["sr"], "float64")
    assert parts["recurrent"].abs().max() > 1e-3
    mixed = module_with(mix="sigma")
    assert_close(attend(mixed, hidden, source), parts["sr"] / 2, "float64")
    mixed.sigma.data.fill_(0.8)
    expected = 0.8 * parts["segmented"] + 0.2 * parts["recurrent"]
    assert_close(attend(mixed, hidden, source), expected, "float64")


def test_full_attention_is_the_weighted_sum_of_its_parts():
    """Eq. 9: O = (c_s / c) O_S + (1 - c_s / c) O_R, with O_S what this module computes for a segment."""
    module = attentions(seq2seq("srformer_t5", cross_attention_mode="segmented").double())[0]
    module.o = torch.nn.Identity()
    hidden, source = random(1, 7, 32), random(1, 21, 32, seed=1)
    segmented = attend(module, hidden, source).unflatten(2, (2, 16))
    q, k, v = (x[0] for x in projected(module, hidden, source))
    weights = torch.einsum("thk,lhk->thl", q, k).exp()
    own = torch.zeros(7, 1, 21, dtype=torch.float64)
    for t in range(7):
        own[t, :, 3 * t : 3 * t + 3] = 1
    share = ((weights * own).sum(-1) / weights.sum(-1))[..., None]
    rest = torch.einsum("thl,lhv->thv", weights * (1 - own), v) / (weights * (1 - own)).sum(-1)[..., None]
    full = torch.einsum("thl,lhv->thv", weights, v) / weights.sum(-1)[..., None]
    assert_close(share * segmented[0] + (1 - share) * rest, full, "float64")


@pytest.mark.parametrize("norm_type", ["feature_l2", "frobenius"])
def test_the_norm_undoes_the_keys_scale(norm_type):
    """Ablation III, which is linear in keys and values: Q P / norm(K) does not change with the size of K."""
    module = attentions(seq2seq("srformer_t5", cross_attention_mode="no_raf", norm_type=norm_type).double())[0]
    key, value = random(2, 2, 4, 3, 16), random(2, 2, 4, 3, 16, seed=1)
    states, norm = module._states(key, value, None), module._norm(key)
    assert norm.shape == (2, 2, 1, 16 if norm_type == "feature_l2" else 1)
    whole = torch.einsum("bhmsk,bhmsv->bhkv", key, value)[:, :, None]
    assert_close(states, whole - torch.einsum("bhmsk,bhmsv->bhmkv", key, value), "float64")
    assert_close(
        module._states(5 * key, value, None) / module._norm(5 * key)[:, :, None], states / norm[:, :, None], "float64"
    )
    assert_close(module._states(key, 3 * value, None), 3 * states, "float64")
    zero = torch.zeros(1, 1, 2, 3, 16, dtype=torch.float64, requires_grad=True)
    floor = module._norm(zero)
    assert floor.min() > 0
    floor.sum().backward()
    assert torch.isfinite(zero.grad).all()


def test_no_norm_and_norm_type_none_are_one():
    inputs = tiny_inputs(seq2seq("srformer_t5"), length=20)
    logits = [
        seq2seq("srformer_t5", **fields)(**inputs).logits
        for fields in ({"cross_attention_mode": "no_norm"}, {"norm_type": "none"}, {})
    ]
    assert_close(logits[0], logits[1], "exact")
    assert (logits[0] - logits[2]).abs().max() > 1e-4


def test_transformer_xl_reads_the_segment_before_through_an_rnn():
    module = attentions(seq2seq("srformer_t5", cross_attention_mode="transformer_xl").double())[0]
    hidden, source = random(2, 5, 32), random(2, 15, 32, seed=1)
    q, k, v = (x.flatten(2) for x in projected(module, hidden, source))
    old_k, old_v = module.rnn_k(k)[0], module.rnn_v(v)[0]
    outputs = []
    for t in range(5):
        own, before = slice(3 * t, 3 * t + 3), slice(3 * max(t - 1, 0), 3 * max(t - 1, 0) + 3)
        keys, values = (
            torch.cat([old[:, before], x[:, own]], 1).unflatten(2, (2, 16)) for old, x in ((old_k, k), (old_v, v))
        )
        weights = torch.einsum("bhk,bshk->bhs", q[:, t].unflatten(1, (2, 16)), keys).softmax(-1)
        outputs.append(torch.einsum("bhs,bshv->bhv", weights, values).flatten(1))
    assert_close(attend(module, hidden, source), module.o(torch.stack(outputs, 1)), "float64")


def test_longt5_sees_the_mean_of_every_segment():
    module = attentions(seq2seq("srformer_t5", cross_attention_mode="longt5").double())[0]
    hidden, source = random(1, 5, 32), random(1, 14, 32, seed=1)
    q, k, v = (x[0] for x in projected(module, hidden, source))
    means = [torch.stack([part.mean(0) for part in x.split(3)]) for x in (k, v)]
    outputs = []
    for t in range(5):
        keys, values = (torch.cat([x[3 * t : 3 * t + 3], mean]) for x, mean in zip((k, v), means, strict=True))
        weights = torch.einsum("hk,shk->hs", q[t], keys).softmax(-1)
        outputs.append(torch.einsum("hs,shv->hv", weights, values).flatten())
    assert_close(attend(module, hidden, source)[0], module.o(torch.stack(outputs)), "float64")


# padding and batches


@pytest.mark.parametrize("mode", MODES)
@every_type
def test_a_document_does_not_depend_on_its_batch(model_type, mode):
    model = seq2seq(model_type, cross_attention_mode=mode)
    documents = [tiny_inputs(model, batch=1, length=length, seed=length)["input_ids"] for length in (20, 7, 13)]
    target = tiny_inputs(model, batch=3, target_length=8)["decoder_input_ids"]
    ids, mask = torch.zeros(3, 20, dtype=torch.long), torch.zeros(3, 20, dtype=torch.long)
    for row, document in enumerate(documents):
        ids[row, : document.shape[1]], mask[row, : document.shape[1]] = document[0], 1
    with torch.no_grad():
        together = model(input_ids=ids, attention_mask=mask, decoder_input_ids=target).logits
        for row, document in enumerate(documents):
            alone = model(input_ids=document, decoder_input_ids=target[row : row + 1]).logits
            assert_close(together[row : row + 1], alone, "float32 model")
    beams = {"num_beams": 3, "max_new_tokens": 9, "min_new_tokens": 9}
    generated = model.generate(ids, attention_mask=mask, **beams)
    for row, document in enumerate(documents):
        assert torch.equal(generated[row : row + 1], model.generate(document, **beams))


@every_type
def test_a_document_without_tokens_is_silence(model_type):
    model = seq2seq(model_type)
    inputs = tiny_inputs(model)
    mask = torch.ones_like(inputs["input_ids"])
    mask[1] = 0
    logits = model(**inputs, attention_mask=mask).logits
    assert torch.isfinite(logits).all()
    module = attentions(model)[0]
    output = attend(module, random(2, 4, 32, dtype=torch.float32), random(2, 11, 32, dtype=torch.float32), mask=mask)
    bias = 0 if model_type == "srformer_t5" else module.out_proj.bias.expand(4, -1)
    assert_close(output[1], torch.zeros(4, 32) + bias, "exact")


@every_type
def test_masks_in_every_form(model_type):
    model = seq2seq(model_type)
    inputs = tiny_inputs(model)
    encoded = model.get_encoder()(inputs["input_ids"])
    kept = torch.ones(2, 11, dtype=torch.bool)
    kept[0, 6:] = False
    target = inputs["decoder_input_ids"]
    forms = (kept, kept.long(), kept.float(), kept[:, None, None], torch.where(kept, 0.0, -1e9)[:, None, None])
    logits = [model(encoder_outputs=encoded, attention_mask=mask, decoder_input_ids=target).logits for mask in forms]
    for other in logits[1:]:
        assert_close(other, logits[0], "exact")
    with pytest.raises(
        ValueError, match=r"attention_mask must be of shape \(batch, length\) = \(2, 11\).*\(2, 7, 11\)"
    ):
        model(encoder_outputs=encoded, attention_mask=torch.ones(2, 7, 11), decoder_input_ids=target)


@every_type
def test_official_masks_are_the_published_codes(model_type):
    """Padding is in K^T V and norm(K); T5's softmax hides it but sees the zeros that fill the last segment; BART's
    sees everything."""
    module = attentions(seq2seq(model_type, mask_mode="official", per_example_segments=False).double())[0]
    hidden, source = random(2, 4, 32), random(2, 11, 32, seed=1)
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, 7:] = 0
    output = attend(module, hidden, source, mask=mask)
    if model_type == "srformer_bart":
        assert_close(output, attend(module, hidden, source), "exact")
        return
    q, k, v = projected(module, hidden, source)
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 1)) for x in (k, v))
    seen = torch.nn.functional.pad(mask, (0, 1), value=1).bool()
    states, norm = (
        module._states(*(x.unflatten(1, (4, 3)).permute(0, 3, 1, 2, 4) for x in (k, v)), None),
        k.norm(dim=1),
    )
    for t in range(4):
        own = slice(3 * t, 3 * t + 3)
        scores = torch.einsum("bhk,bshk->bhs", q[:, t], k[:, own]).masked_fill(~seen[:, None, own], -1e9)
        attended = torch.einsum("bhs,bshv->bhv", scores.softmax(-1), v[:, own])
        recurrent = torch.einsum("bhk,bhkv->bhv", q[:, t], states[:, :, t]) / norm
        row = module.o((attended + recurrent).flatten(1))
        visible = seen[:, own].any(1)  # otherwise the published code averages what is hidden
        assert_close(output[visible, t], row[visible], "float64")


@every_type
def test_segments_of_the_batch_instead_of_the_document(model_type):
    model = seq2seq(model_type, per_example_segments=False)
    ids = tiny_inputs(model, batch=1, length=6)["input_ids"]
    target = tiny_inputs(model, batch=1, target_length=12)["decoder_input_ids"]
    mask = torch.cat([torch.ones_like(ids), torch.zeros(1, 9, dtype=torch.long)], 1)
    padded = {"input_ids": torch.cat([ids, torch.zeros(1, 9, dtype=torch.long)], 1), "attention_mask": mask}
    alone, beside_longer = (
        model(**inputs, decoder_input_ids=target).logits for inputs in ({"input_ids": ids}, padded)
    )
    assert (alone[:, -1] - beside_longer[:, -1]).abs().max() > 1e-3  # its last tokens read padding
    assert_close(beside_longer[:, :1], alone[:, :1], "float32 model")


# training


@every_type
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("surrogate", [False, True])
@pytest.mark.parametrize("weight", ["sigma", "recurrent_gate"])
def test_every_new_parameter_learns(model_type, mode, surrogate, weight):
    if (surrogate and mode != "sr") or (weight == "recurrent_gate" and mode in ONE_PART):
        return
    weighed = {"sigma": {"mix": "sigma"}, "recurrent_gate": {"recurrent_init": "gated"}}[weight]
    fields = {} if mode in ONE_PART else weighed
    model = seq2seq(model_type, cross_attention_mode=mode, raf_surrogate=surrogate, leak_init=0.7, **fields)
    inputs = tiny_inputs(model, length=20)
    model(input_ids=inputs["input_ids"], labels=tiny_labels(model)).loss.backward()
    new = {
        name: p.grad for name, p in model.named_parameters() if any(part in name for part in (".raf.", weight, "rnn_"))
    }
    counts = {"sr": 8, "no_norm": 8, "own_segment": 8, "recurrent": 6, "no_raf": 2, "transformer_xl": 16}
    assert len(new) == counts.get(mode, 0)
    for name, gradient in new.items():
        assert torch.isfinite(gradient).all()
        assert gradient.abs().max() > 0, name


def test_the_surrogate_changes_gradients_and_nothing_else():
    results = []
    for surrogate in (False, True):
        model = seq2seq("srformer_t5", raf_surrogate=surrogate, leak_init=1.0)
        outputs = model(input_ids=tiny_inputs(model, length=20)["input_ids"], labels=tiny_labels(model))
        outputs.loss.backward()
        results.append((outputs.logits, attentions(model)[0].raf.threshold.grad))
    assert_close(results[0][0], results[1][0], "exact")
    assert (results[0][1] - results[1][1]).abs() > 1e-7


@every_type
def test_a_threshold_may_reach_zero(model_type):
    """It is a divisor, so a floor keeps it from its pole."""
    model = seq2seq(model_type)
    for module in attentions(model):
        module.raf.threshold.data.fill_(0.0)
    outputs = model(input_ids=tiny_inputs(model, length=20)["input_ids"], labels=tiny_labels(model))
    outputs.loss.backward()
    assert torch.isfinite(outputs.loss)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@every_type
def test_label_smoothing_of_the_trainer(model_type, tmp_path):
    model = seq2seq(model_type, dropout=0.0, attention_dropout=0.0)
    arguments = transformers.Seq2SeqTrainingArguments(
        output_dir=str(tmp_path), label_smoothing_factor=0.2, report_to=[], use_cpu=True
    )
    rows = [
        {
            "input_ids": tiny_inputs(model, batch=1, length=9 + row)["input_ids"][0].tolist(),
            "labels": tiny_labels(model, batch=1, length=4 + row)[0].tolist(),
        }
        for row in range(3)
    ]

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0}, "<pad>"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>")
    batch = DataCollatorForSeq2Seq(tokenizer, model=model)(rows)
    trainer = transformers.Seq2SeqTrainer(model=model.eval(), args=arguments)
    labels = batch["labels"].clone()
    logits = model(**{name: batch[name] for name in ("input_ids", "attention_mask", "decoder_input_ids")}).logits
    loss = trainer.compute_loss(model, dict(batch))
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.2)
    assert_close(loss, expected, "float32")


# what is refused


@every_type
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"segment_size": 0}, "segment_size must be a positive integer; got 0"),
        ({"segment_size": -3}, "segment_size must be a positive integer; got -3"),
        ({"segment_size": 2.5}, "segment_size"),
        ({"decoder_horizon": 0}, "decoder_horizon must be a positive integer; got 0"),
        (
            {"cross_attention_mode": "segment"},
            "cross_attention_mode must be one of sr, .*got 'segment'. Did you mean 'seg",
        ),
        ({"horizon_mode": "target"}, "horizon_mode must be one of target_length, fixed; got 'target'"),
        ({"mask_mode": "none"}, "mask_mode must be one of exact, official; got 'none'"),
        ({"norm_type": "l2"}, "norm_type must be one of feature_l2, frobenius, none; got 'l2'"),
        ({"mix": "gate"}, "mix must be one of add, sigma; got 'gate'"),
        (
            {"recurrent_init": "gate"},
            "recurrent_init must be one of published, gated; got 'gate'. Did you mean 'gated'",
        ),
        ({"mask_mode": "official"}, "per_example_segments must be False with mask_mode 'official'"),
        ({"mix": "sigma", "cross_attention_mode": "recurrent"}, "mix must be 'add' unless .* got 'sigma'"),
        ({"mix": "sigma", "cross_attention_mode": "longt5"}, "mix must be 'add' unless .* got 'sigma'"),
        ({"kv_clamp": 0}, "kv_clamp must be positive and finite; got 0"),
        ({"threshold_init": -0.1}, "threshold_init must be positive and finite; got -0.1"),
        ({"leak_init": math.inf}, "leak_init must be finite; got inf"),
    ],
)
def test_config_rules(model_type, fields, message):
    with pytest.raises(Exception, match=message):
        tiny_config(model_type, **fields)


def test_configs_of_other_models_are_refused(tmp_path):
    MBartConfig().save_pretrained(tmp_path)
    for config_class, kinds in (
        (hf_hybrid.SRformerBartConfig, "srformer_bart or bart"),
        (hf_hybrid.SRformerT5Config, "srformer_t5 or t5"),
    ):
        with pytest.raises(ValueError, match=f"must hold a model of type {kinds} .*; got mbart in"):
            config_class.from_pretrained(tmp_path)


@pytest.mark.parametrize("mode", MODES)
def test_every_tensor_is_made_where_the_document_is(mode):
    """On a device without memory, where every tensor that an operation makes is looked at; a GPU would refuse it."""

    class Devices(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            outputs = func(*args, **(kwargs or {}))
            for output in outputs if isinstance(outputs, tuple | list) else (outputs,):
                assert not isinstance(output, torch.Tensor) or output.device.type == "meta", func
            return outputs

    hidden, source = torch.empty(4, 9, 32, device="meta"), torch.empty(4, 11, 32, device="meta")
    for fields in ({}, {"segment_size": 2}):
        module = attentions(tiny_model("srformer_t5", "AutoModel", cross_attention_mode=mode, **fields))[0].to("meta")
        for mask in (None, torch.ones(4, 11, dtype=torch.long, device="meta")):
            for horizon, past in ((9, 0), (3, 0), (12, 5)):
                with Devices():
                    output = attend(module, hidden, source, mask=mask, horizon=horizon, past=past)
                assert (output.device.type, output.shape) == ("meta", hidden.shape)


@every_type
def test_bad_inputs(model_type):
    model = seq2seq(model_type)
    target = torch.ones(2, 4, dtype=torch.long)
    nothing = BaseModelOutput(torch.zeros(2, 0, 32))
    for mode in ("sr", "full"):
        with pytest.raises(
            ValueError, match=r"encoder_hidden_states must hold at least one position; got \(2, 0, 32\)"
        ):
            seq2seq(model_type, cross_attention_mode=mode)(encoder_outputs=nothing, decoder_input_ids=target)
    something = BaseModelOutput(torch.zeros(2, 5, 32))
    with pytest.raises(ValueError, match="past_key_values must be an EncoderDecoderCache; got DynamicCache"):
        model(encoder_outputs=something, decoder_input_ids=target, past_key_values=DynamicCache())
    full = seq2seq(model_type, cross_attention_mode="full")
    foreign = full(encoder_outputs=something, decoder_input_ids=target, use_cache=True).past_key_values
    assert isinstance(foreign, EncoderDecoderCache)
    with pytest.raises(ValueError, match=r"past_key_values must come from an SRformer .* is a DynamicCache"):
        model(encoder_outputs=something, decoder_input_ids=target[:, :1], past_key_values=foreign)
    for horizon in (0, 2.5):
        with pytest.raises(ValueError, match=f"decoder_horizon must be a positive integer; got {horizon}"):
            model.generate(torch.ones(1, 5, dtype=torch.long), decoder_horizon=horizon)


@pytest.mark.parametrize(("mode", "drops"), [("segmented", True), ("recurrent", False)])
@every_type
def test_dropout_is_on_the_softmaxs_probabilities_alone(model_type, mode, drops):
    model = seq2seq(model_type, cross_attention_mode=mode, attention_dropout=0.5)
    module = attentions(model)[0].train()
    hidden, source = torch.randn(2, 12, 32), torch.randn(2, 21, 32)
    trained, expected = attend(module, hidden, source), attend(module.eval(), hidden, source)
    assert torch.equal(trained, expected) != drops


@every_type
def test_the_loss_counts_the_items_it_is_told_of(model_type):
    model = seq2seq(model_type)
    inputs, labels = tiny_inputs(model), tiny_labels(model)
    labels[0, 3:] = -100
    items = int((labels != -100).sum())
    loss = model(input_ids=inputs["input_ids"], labels=labels).loss
    counted = model(input_ids=inputs["input_ids"], labels=labels, num_items_in_batch=2 * items).loss
    assert_close(2 * counted, loss, "float32")
