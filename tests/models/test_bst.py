"""What the Block-State Transformer alone promises: no leak, the paper's equations and counts, decoding, its errors."""

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from hf_hybrid import BstConfig, BstForCausalLM, BstForSequenceClassification, BstModel
from hf_hybrid.kernels.ssm_kernel import reference
from hf_hybrid.layers.implicit_filter import ImplicitConv
from hf_hybrid.layers.relative_position import relative_position_bucket
from hf_hybrid.models.bst import modeling_bst
from hf_hybrid.models.bst.context import WindowBeforeContext
from hf_hybrid.models.bst.windows import from_windows, to_windows

from ..matrix import some
from ..tolerances import assert_close
from .tiny import UNSTRUCTURED, check_unequal_prompts, tiny_config, tiny_inputs, tiny_model

WINDOW, LENGTH = 5, 18  # three windows and a part of one
TYPES = {
    "single head": {"context_type": "single_head"},
    "multi head": {"context_type": "multi_head"},
    "multi filter": {"context_type": "multi_filter", "num_context_states": 6},
    "single head, shifted": {"context_type": "single_head", "context_shift": "window"},
    "multi head, shifted": {"context_type": "multi_head", "context_shift": "window"},
}
FILTERS = {"s4": {}, "unstructured": {**UNSTRUCTURED, "filter_length": 32}}
VARIANTS = [
    pytest.param({**options, **filters}, id=f"{name}, {kind}")
    for name, options in TYPES.items()
    for kind, filters in FILTERS.items()
]
every_variant = pytest.mark.parametrize("options", VARIANTS)
LAYOUTS = {
    "windows of one token": {"window": 1},
    "strictly before": {"include_self": False},
    "windows apart": {"sliding_context_layers": False},
    "windows of one token, apart, strictly before": {
        "window": 1,
        "include_self": False,
        "sliding_context_layers": False,
    },
}
every_layout = pytest.mark.parametrize(
    "options",
    [
        pytest.param({**TYPES[name], **layout}, id=f"{name}, {where}")
        for name in ("single head", "multi head", "multi filter")
        for where, layout in LAYOUTS.items()
    ],
)


def base_model(seed=0, **options) -> BstModel:
    """A base model in float64 whose every number is drawn, in evaluation mode."""
    torch.manual_seed(seed)
    model = BstModel(tiny_config("bst", **options)).double().eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if not any(part in name for part in ("log_dt", "log_A", "A_imag", "filter.mlp", "frequency")):
                tensor.normal_(std=0.4)
    return model


def embedded(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def outputs(model, x, **inputs):
    with torch.no_grad():
        return model(inputs_embeds=x, use_cache=False, **inputs).last_hidden_state


# no leak ----------------------------------------------------------------------------------------------------------


def changes(model, **options):
    """How much each output changes (columns) when each token does (rows), over a whole sequence."""
    x = embedded(1, LENGTH, 32)
    other = x.repeat(LENGTH, 1, 1)
    other[torch.arange(LENGTH), torch.arange(LENGTH)] += embedded(LENGTH, 32, seed=2)
    with torch.no_grad():
        before, after = (model(inputs_embeds=y, **options).last_hidden_state for y in (x, other))
    return (after - before).abs().amax(-1)


def leak(difference):
    """The largest change before a changed token, and the smallest change of the token's own output."""
    return difference.tril(-1).max(), difference.diagonal().min()


@every_variant
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_nothing_leaks_whichever_token_changes(options, attention):
    difference = changes(base_model(**options, attn_implementation=attention), use_cache=False)
    before, own = leak(difference)
    assert before < 1e-12
    assert own > 1e-3
    # two layers of windows reach eight tokens back; the states reach all
    assert difference[0, 2 * WINDOW :].min() > 1e-9


@every_layout
def test_nothing_leaks_however_windows_lie(options):
    assert leak(changes(base_model(**options), use_cache=False))[0] < 1e-12


def test_without_states_only_windows_are_seen():
    difference = changes(base_model(bst_layers=[]), use_cache=False)
    assert leak(difference)[0] < 1e-12
    assert difference[0, : 2 * WINDOW - 1].min() > 1e-9
    assert difference[0, 2 * WINDOW - 1 :].max() < 1e-12


@pytest.mark.parametrize("kind", FILTERS)
@pytest.mark.parametrize("name", ["single head", "multi head"])
def test_without_the_mask_a_window_leaks(name, kind):
    model = base_model(**TYPES[name], **FILTERS[kind])
    model.layers[1].context.is_causal = False
    difference = changes(model, use_cache=False)
    later = torch.arange(LENGTH)[:, None] > torch.arange(LENGTH)
    same = torch.arange(LENGTH)[:, None] // WINDOW == torch.arange(LENGTH) // WINDOW
    assert difference[later & same].min() > 1e-9  # all of the window sees all of it
    assert difference[later & ~same].max() < 1e-12


@pytest.mark.parametrize("kind", FILTERS)
@pytest.mark.parametrize("name", ["multi filter", "single head, shifted", "multi head, shifted"])
def test_without_the_shift_a_window_leaks(name, kind, monkeypatch):
    """Pseudocode 4 shifts along the filters' axis, which leaves the windows where they were."""
    model = base_model(**TYPES[name], **FILTERS[kind])
    assert leak(changes(model, use_cache=True))[0] < 1e-12
    kind_of_context = type(model.layers[model.config.bst_layers[0]].context)
    first = kind_of_context._first_pair
    monkeypatch.setattr(kind_of_context, "_first_pair", lambda self, batch: [x[:, :0] for x in first(self, batch)])
    difference = changes(model, use_cache=True)
    assert torch.stack([difference[end, end - WINDOW + 1 : end].min() for end in (4, 9, 14)]).min() > 1e-9


@pytest.mark.parametrize("kind", FILTERS)
def test_a_windows_states_depend_on_exactly_the_tokens_before_it(kind, monkeypatch):
    model = base_model(num_hidden_layers=1, bst_layers=[0], **TYPES["multi filter"], **FILTERS[kind])
    context, seen = model.layers[0].context, []
    original = WindowBeforeContext._attend_all

    def attend_all(self, query, key, value, **rest):
        seen.append((key, value))
        return original(self, query, key, value, **rest)

    monkeypatch.setattr(WindowBeforeContext, "_attend_all", attend_all)
    x = embedded(1, LENGTH, 32)
    for token in range(LENGTH):
        other = x.clone()
        other[:, token] += 1
        outputs(model, x), outputs(model, other)
        (key, value), (other_key, other_value) = seen[-2:]
        for w in range(4):
            same = (key[w] - other_key[w]).abs().max() < 1e-12 and (value[w] - other_value[w]).abs().max() < 1e-12
            assert same == (token >= w * WINDOW), (token, w)
    states = context.initial_states + context.state_embedding
    assert_close(seen[-1][1][0].flatten(1), states @ context.v_proj.weight.T, "float64")


# the equations ----------------------------------------------------------------------------------------------------


def softmax_rows(scores, values, visible):
    """Attention of one head, row by row, zeros where nothing is visible."""
    rows = []
    for row, mask in zip(scores, visible, strict=True):
        weights = (row[mask] - row[mask].max()).exp() if mask.any() else row[mask]
        rows.append((weights / weights.sum()) @ values[mask] if mask.any() else torch.zeros_like(values[0]))
    return torch.stack(rows)


def heads_of(x, projection, heads):
    return (x @ projection.T).unflatten(-1, (heads, -1))


def normed(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def filter_taps(filters, length):
    """Taps `(C, D, length)` of all filters."""
    if isinstance(filters, ImplicitConv):
        return filters._generate(min(length, filters.max_length))[0].mT
    B, P, C = (torch.view_as_complex(getattr(filters, name).detach()) for name in "BPC")
    w = torch.complex(-filters.log_A_real.exp(), filters.A_imag)
    return reference.s4_kernel(C, B[0], P[0], w, filters.log_dt.exp(), length)


def states_by_definition(context, u):
    """Y `(C, T, D)` by the double sum over tokens (pseudocode 1)."""
    taps, skip = filter_taps(context.filter, len(u)), context.filter.D.reshape(-1, u.shape[1])
    rows = [
        sum(taps[:, :, lag] * u[t - lag] for lag in range(min(t + 1, taps.shape[2]))) + skip * u[t]
        for t in range(len(u))
    ]
    return torch.stack(rows, dim=1)


def keys_and_values(context, u, head, config):
    """For every query's window the states it may attend to: lists over windows of keys and values of one head."""
    head_dim = config.head_dim
    part = slice(head * head_dim, (head + 1) * head_dim)
    windows = -(-len(u) // config.window)
    y = states_by_definition(context, u)
    if config.context_type == "multi_filter":
        ends = [y[:, w * config.window + config.window - 1] for w in range(windows - 1)]
        states = [s + context.state_embedding for s in (context.initial_states, *ends)]
        if config.context_lift:
            lift = context.lift.weight.unflatten(0, (config.num_attention_heads, -1))[head]
            bias = context.lift.bias.unflatten(0, (config.num_attention_heads, -1))[head]
            states = [s @ lift.T + bias for s in states]
            return [(s @ context.k_heads.weight[head], s @ context.v_heads.weight[head]) for s in states]
        return [(s @ context.k_proj.weight[part].T, s @ context.v_proj.weight[part].T) for s in states]

    def project(s):  # (T, D)
        if config.context_type == "multi_head":
            return s @ context.k_heads.weight[head], s @ context.v_heads.weight[head]
        if config.context_lift:
            s = s * context.lift_weight[head] + context.lift_bias[head]
        return s @ context.k_proj.weight[part].T, s @ context.v_proj.weight[part].T

    y = y[head if config.context_type == "multi_head" else 0]
    states = list(y.split(config.window))
    if config.context_shift == "window":
        states = [context.initial_states[head if config.context_type == "multi_head" else 0], *states[:-1]]
    return [project(s) for s in states]


def layer_by_definition(layer, x):
    """One sequence `(T, D)` through a layer, by the paper's equations and loops."""
    config, attention, context = layer.config, layer.attention, layer.context
    length, heads = len(x), config.num_attention_heads
    n = layer.attention_norm(x)
    position = torch.arange(length)
    offset = position[None] - position[:, None]
    visible = (offset <= 0) & (offset >= -config.window + 1) if config.include_self else (offset < 0)
    visible = visible & (offset >= -config.window)
    if context is not None and not config.sliding_context_layers:
        visible = visible & (position[None] // config.window == position[:, None] // config.window)
    query, key, value = (heads_of(n, getattr(attention, f"{name}_proj").weight, heads) for name in ("q", "k", "v"))
    buckets = relative_position_bucket(offset, bidirectional=False, num_buckets=32, max_distance=128)
    bias = attention.relative_attention_bias.weight[buckets]
    found = []
    for h in range(heads):
        if config.qk_norm:
            scores = (normed(query[:, h]) @ normed(key[:, h]).T + bias[..., h]) * attention.score_scale[h].abs()
        else:
            scores = query[:, h] @ key[:, h].T / config.head_dim**0.5 + bias[..., h]
        found.append(softmax_rows(scores, value[:, h], visible))
    projections = [attention.o_proj.weight]
    if context is not None:
        u = n if config.context_input == "normed" else x
        query = heads_of(n, context.q_proj.weight, heads)
        for h in range(heads):
            rows, pairs = [], keys_and_values(context, u, h, config)
            for t in range(length):
                k, v = pairs[t // config.window]
                shown = torch.ones(len(k), dtype=torch.bool)
                if config.context_shift == "none":
                    shown = torch.arange(len(k)) <= t % config.window
                if config.qk_norm:
                    scores = normed(query[t, h]) @ normed(k).T * context.score_scale[h].abs()
                else:
                    scores = query[t, h] @ k.T / config.head_dim**0.5
                rows.append(softmax_rows(scores[None], v, shown[None])[0])
            found.append(torch.stack(rows))
        projections.append(context.o_proj.weight)
    # the heads of both, side by side, and one projection of all
    y = torch.cat(found, dim=-1) @ torch.cat(projections, dim=1).T
    if layer.gate_bias is not None:
        gate = torch.sigmoid(layer.gate_bias)
        y = x * gate + y * (1 - gate)
    else:
        y = x + y
    f = layer.feed_forward
    return y + torch.relu(layer.feed_forward_norm(y) @ f.up_proj.weight.T) @ f.down_proj.weight.T


@pytest.mark.parametrize(
    "options",
    [
        *VARIANTS,
        {"include_self": False},
        {"include_self": False, "sliding_context_layers": False},
        {"qk_norm": False, "context_mixing": "gate"},
        {"context_input": "raw", "context_lift": True},
        {"context_lift": True, "context_shift": "window"},
        {"context_lift": True, **TYPES["multi filter"], "sliding_context_layers": False},
        {"window": 40},
        {"window": 1, **TYPES["multi filter"]},
    ],
    ids=str,
)
def test_layers_are_the_papers_equations(options):
    model = base_model(**options)
    x = embedded(2, LENGTH, 32)
    with torch.no_grad():
        expected = torch.stack(
            [layer_by_definition(model.layers[1], layer_by_definition(model.layers[0], row)) for row in x]
        )
    assert_close(outputs(model, x), model.final_norm(expected), "float64 gradient")


def test_a_wide_window_without_states_is_a_full_causal_transformer():
    """Against torch's own attention, with the states' projection at zero."""
    model = base_model(window=LENGTH + 3, qk_norm=False)
    x = hidden = embedded(2, LENGTH, 32)
    model.layers[1].context.o_proj.weight.data.zero_()
    offset = torch.arange(LENGTH)[None] - torch.arange(LENGTH)[:, None]
    buckets = relative_position_bucket(offset, bidirectional=False, num_buckets=32, max_distance=128)
    for layer in model.layers:
        attention, n = layer.attention, layer.attention_norm(hidden)
        query, key, value = (
            heads_of(n, getattr(attention, f"{name}_proj").weight, 2).transpose(1, 2) for name in ("q", "k", "v")
        )
        mask = attention.relative_attention_bias.weight[buckets].movedim(-1, 0).masked_fill(offset > 0, -torch.inf)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        hidden = hidden + attention.o_proj(attended.transpose(1, 2).flatten(2))
        hidden = hidden + layer.feed_forward(layer.feed_forward_norm(hidden))
    assert_close(outputs(model, x), model.final_norm(hidden), "float64 gradient")


def copy_into(model, source):
    """Load another model's weights, as far as both have them."""
    state = {name: tensor for name, tensor in source.state_dict().items() if name in model.state_dict()}
    model.load_state_dict(state, strict=False)
    return model


@every_variant
def test_without_their_projection_states_leave_a_sliding_layer(options):
    model = base_model(**options)
    model.layers[1].context.o_proj.weight.data.zero_()
    plain = copy_into(base_model(bst_layers=[]), model)
    x = embedded(2, LENGTH, 32)
    assert_close(outputs(model, x), outputs(plain, x), "float64")


def test_a_lift_to_heads_can_be_folded_into_the_projections():
    lifted = base_model(context_lift=True, qk_norm=False)
    context = lifted.layers[1].context
    x = embedded(2, LENGTH, 32)
    context.lift_bias.data.zero_()
    folded = copy_into(base_model(qk_norm=False), lifted)
    for projection in (folded.layers[1].context.k_proj, folded.layers[1].context.v_proj):
        projection.weight.data.unflatten(0, (2, -1)).mul_(context.lift_weight[:, None, None])
    assert_close(outputs(folded, x), outputs(lifted, x), "float64")


@pytest.mark.parametrize("kind", FILTERS)
def test_equal_filters_for_all_heads_are_one_filter(kind):
    many = base_model(**TYPES["multi head"], **FILTERS[kind])
    one = base_model(**FILTERS[kind], seed=1)
    theirs, ours = many.layers[1].context, one.layers[1].context
    state = {name: tensor for name, tensor in many.state_dict().items() if "context.filter" not in name}
    one.load_state_dict(state, strict=False)
    for (name, target), (_, source) in zip(theirs.filter.own_tensors(), ours.filter.own_tensors(), strict=True):
        source = source.reshape(1, -1) if name == "D" else source
        target.data.copy_(source.expand_as(target))
    for mapped, projection in ((theirs.k_heads, ours.k_proj), (theirs.v_heads, ours.v_proj)):
        projection.weight.data.copy_(mapped.weight.transpose(1, 2).flatten(0, 1))
    x = embedded(2, LENGTH, 32)
    assert_close(outputs(one, x), outputs(many, x), "float64")


@pytest.mark.parametrize("options", [{}, {"sliding_context_layers": False}, {"attn_implementation": "eager"}], ids=str)
def test_without_the_querys_own_key_its_value_has_no_part(options):
    model = base_model(include_self=False, num_hidden_layers=1, bst_layers=[0], **options)
    attention = model.layers[0].attention
    x = embedded(1, LENGTH, 32).requires_grad_()
    value = []
    attention.v_proj.register_forward_hook(lambda *call: value.append(call[-1]))
    output, _ = attention(x)
    assert torch.isfinite(output).all()
    assert output[:, 0].abs().max() == 0  # nothing lies before the first token
    for t in (1, 4, 5, 17):
        (gradient,) = torch.autograd.grad(output[0, t].sum(), value[0], retain_graph=True)
        assert gradient[0, t].abs().max() == 0
        if attention.attention_type == "window" or t % WINDOW:
            assert gradient[0, t - 1].abs().max() > 0
    gradients = torch.autograd.grad(output.square().sum(), [x, *attention.parameters()])
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


# lengths and padding ----------------------------------------------------------------------------------------------


@every_variant
def test_any_length_is_the_beginning_of_a_longer_one(options):
    model, x = base_model(**options), embedded(2, LENGTH, 32)
    whole = outputs(model, x)
    for length in (1, 4, 5, 6, 15):
        assert_close(outputs(model, x[:, :length]), whole[:, :length], "float64")


@every_variant
def test_rows_padded_on_either_side_are_as_alone(options):
    """Windows are counted from each row's first token; what stands in padding is never read."""
    model = base_model(**options)
    x, lengths = embedded(4, LENGTH, 32), (18, 3, 11, 5)
    for side in ("left", "right"):
        padded, mask = torch.full_like(x, torch.nan), torch.zeros(4, LENGTH, dtype=torch.long)
        padded[:] = 1e3
        for row, length in enumerate(lengths):
            part = slice(LENGTH - length, LENGTH) if side == "left" else slice(length)
            padded[row, part], mask[row, part] = x[row, :length], 1
        actual = outputs(model, padded, attention_mask=mask)
        for row, length in enumerate(lengths):
            expected = outputs(model, x[row : row + 1, :length])[0]
            assert_close(actual[row][mask[row] == 1], expected, "float64 gradient")


@every_variant
def test_gradients_reach_through_a_cache(options):
    """Of inputs long before the last window, by states alone; the same as without a cache."""
    model = base_model(**options, window=WINDOW)
    embeds = model.embed_tokens(tiny_inputs(model, length=LENGTH)["input_ids"]).detach()
    grads = []
    for parts in ([LENGTH], [8, LENGTH - 8]):
        leaf = embeds.clone().requires_grad_()
        cache = transformers.DynamicCache(config=model.config) if len(parts) > 1 else None
        for part in leaf.split(parts, dim=1):
            last = model(inputs_embeds=part, past_key_values=cache, use_cache=cache is not None).last_hidden_state
        last[:, -1].square().sum().backward()
        grads.append(leaf.grad)
    assert (grads[0][:, :2].abs().amax((1, 2)) > 0).all()
    assert_close(grads[1], grads[0], "float64 gradient")


@every_variant
def test_nothing_is_asked_of_a_device_without_numbers(options):
    """Forward and backward with a mask on the meta device."""
    with torch.device("meta"):
        model = BstModel(tiny_config("bst", **options, window=WINDOW))
        mask = torch.ones(2, LENGTH, dtype=torch.long)
        hidden = model(torch.zeros(2, LENGTH, dtype=torch.long), attention_mask=mask).last_hidden_state
    assert hidden.shape == (2, LENGTH, model.config.hidden_size)
    hidden.sum().backward()


COMPILED = next(variant for variant in VARIANTS if variant.id == "multi filter, s4")


@pytest.mark.parametrize("options", some(VARIANTS, COMPILED))
def test_compiles_without_graph_breaks(options):
    """With padding, and backward; test_all_models compiles a training step without padding, of the default variant."""
    torch.compiler.reset()  # what other models compiled counts as recompilation
    model = base_model(**options, window=WINDOW)
    ids = tiny_inputs(model, length=LENGTH)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected = model(**inputs).last_hidden_state
    actual = compiled(**inputs).last_hidden_state
    assert_close(actual[mask.bool()], expected[mask.bool()], "float64")


def test_windows_can_be_cut_and_put_back():
    x = embedded(3, 7, 2)
    first = torch.tensor([0, 4, 7])
    windows = to_windows(x, first, 3, 3)
    assert torch.equal(windows[1].flatten(0, 1)[:3], x[1, 4:])
    assert windows[1].flatten(0, 1)[3:].abs().max() == windows[2].abs().max() == 0
    back = from_windows(windows, first, 7)
    assert torch.equal(back[0], x[0])
    assert torch.equal(back[1, 4:], x[1, 4:])
    assert torch.equal(from_windows(to_windows(x, None, 3, 3), None, 7), x)


# decoding ---------------------------------------------------------------------------------------------------------


def decode(model, x, stops, mask=None):
    """The outputs of a sequence read in stretches, and the last cache."""
    pieces, cache, start = [], None, 0
    with torch.no_grad():
        for stop in stops:
            step = model(
                inputs_embeds=x[:, start:stop],
                attention_mask=None if mask is None else mask[:, :stop],
                past_key_values=cache,
                use_cache=True,
            )
            pieces.append(step.last_hidden_state)
            cache, start = step.past_key_values, stop
    return torch.cat(pieces, 1), cache


@every_variant
@pytest.mark.parametrize("stops", [[18], [10, 18], [4, 5, 6, 18], [3, 15, 16, 17, 18]], ids=str)
def test_rows_in_different_places_decode_as_alone(options, stops):
    """Left padding puts every row elsewhere in its window; one has no token before the third stretch at the least."""
    check_decoding(options, stops)


@every_layout
def test_decoding_however_windows_lie(options):
    check_decoding(options, [3, 15, 16, 17, 18])


def check_decoding(options, stops):
    model = base_model(**options)
    x, lengths = embedded(4, LENGTH, 32), (18, 9, 13, 5)
    mask = (torch.arange(LENGTH) >= LENGTH - torch.tensor(lengths)[:, None]).long()
    actual, _ = decode(model, x, stops, mask)
    for row, length in enumerate(lengths):
        expected = outputs(model, x[row : row + 1, LENGTH - length :])[0]
        assert_close(actual[row, LENGTH - length :], expected, "float64 decode")


@every_variant
def test_rows_of_a_cache_can_be_repeated_selected_and_moved(options):
    model, x = base_model(**options), embedded(2, LENGTH, 32)
    _, cache = decode(model, x[:, :8], [8])
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 1, 0, 2]))
    cache.batch_select_indices(torch.tensor([0, 2, 3]))  # rows 1, 0, 1
    rows = torch.tensor([1, 0, 1])
    with torch.no_grad():
        rest = model(inputs_embeds=x[rows, 8:], past_key_values=cache, use_cache=True).last_hidden_state
    assert_close(rest, outputs(model, x)[rows, 8:], "float64 decode")
    cache.reset()
    with torch.no_grad():
        again = model(inputs_embeds=x, past_key_values=cache, use_cache=True).last_hidden_state
    assert_close(again, outputs(model, x), "float64 decode")


def cache_bytes(cache) -> int:
    total = 0
    for layer in cache.layers:
        tensors = [layer.keys, layer.values, *(getattr(layer, "state", None) or ())]
        total += sum(x.untyped_storage().nbytes() for x in tensors if isinstance(x, torch.Tensor))
    return total


@every_variant
def test_the_cache_does_not_grow_with_the_context(options):
    model = base_model(**options)
    sizes = []
    for stops in ([39, 40], [42, 43], [199, 200], [10, 199, 200], [199], [10, 199]):
        _, cache = decode(model, embedded(1, stops[-1], 32), stops)
        assert cache.get_seq_length() == cache.get_seq_length(1) == stops[-1]
        state = cache.layers[1].state
        sizes.append((cache_bytes(cache), sum(x.untyped_storage().nbytes() for x in state if x is not None)))
    # right behind a long stretch transformers keeps its view of self-attention's keys until the next token
    assert sizes[0] == sizes[1] == sizes[2] == sizes[3]
    assert max(state for _, state in sizes) < 1.3 * sizes[0][1]


def test_filters_share_their_state():
    """However many filters read it, S4's state is D N / 2 complex numbers."""
    for options in (TYPES["single head"], TYPES["multi head"], TYPES["multi filter"]):
        _, cache = decode(base_model(**options), embedded(3, LENGTH, 32), [LENGTH])
        assert cache.layers[1].state.filter.shape == (3, 32, 4, 2)


def test_a_batch_of_prompts_of_unequal_length_generates_as_each_alone():
    for options in (
        {},
        TYPES["multi filter"],
        {**TYPES["multi filter"], **UNSTRUCTURED},
        TYPES["multi head, shifted"],
    ):
        check_unequal_prompts(tiny_model("bst", "AutoModelForCausalLM", **options))


def test_a_cache_that_keeps_no_state_is_refused():
    model = base_model()
    with pytest.raises(ValueError, match=r"past_key_values must be .* DynamicCache\(config=model.config\).* layer 1"):
        model(inputs_embeds=embedded(1, 3, 32), past_key_values=transformers.DynamicCache())


def test_unstructured_filters_see_no_further_than_they_were_trained(monkeypatch):
    said = []
    monkeypatch.setattr(modeling_bst.logger, "warning_once", said.append)
    options = {**UNSTRUCTURED, "filter_length": 8, "num_hidden_layers": 1, "bst_layers": [0]}
    model = base_model(**options)
    x = embedded(1, LENGTH, 32)
    whole = outputs(model, x[:, :8])
    assert not said
    other = x.clone()
    other[:, 0] += 1
    difference = (outputs(model, x) - outputs(model, other)).abs().amax(-1)[0]
    # the states of tokens 5 to 7 know of token 0, those from 8 on do not; the window that sees the former ends at 9
    assert len(said) == 2
    assert "longer than filter_length 8, beyond which unstructured filters see nothing" in said[0]
    assert difference[:10].min() > 1e-9
    assert difference[10:].max() < 1e-12
    assert_close(outputs(model, x)[:, :8], whole, "float64")
    said.clear()
    _, cache = decode(model, x, [8])
    assert not said
    with torch.no_grad():
        model(inputs_embeds=x[:, 8:9], past_key_values=cache, use_cache=True)
    assert len(said) == 1
    outputs(base_model(), embedded(1, 300, 32))
    assert len(said) == 1  # S4 reaches any length


# heads, sizes, configuration --------------------------------------------------------------------------------------


def test_logits_are_scaled_and_tied():
    model = tiny_model("bst", "AutoModelForCausalLM").double()
    inputs = tiny_inputs(model)
    plain = tiny_model("bst", "AutoModelForCausalLM", scale_decoder_outputs=False).double()
    hidden = plain.model(**inputs, use_cache=False).last_hidden_state
    assert_close(plain(**inputs).logits, hidden @ model.model.embed_tokens.weight.T, "float64")
    assert_close(model(**inputs).logits, hidden @ model.model.embed_tokens.weight.T / 32**0.5, "float64")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    without_head = tiny_model("bst", "AutoModel").double()
    without_head.load_state_dict(plain.model.state_dict())
    assert_close(without_head(**inputs, use_cache=False).last_hidden_state, hidden, "float64")


def test_weights_start_as_documented():
    torch.manual_seed(0)
    model = BstForCausalLM(
        BstConfig.from_preset("tiny", vocab_size=1000, context_type="multi_filter", tie_word_embeddings=False)
    )
    context = model.model.layers[1].context
    for tensor, std in (
        (model.model.embed_tokens.weight, 1.0),
        (model.lm_head.weight, 1.0),
        (model.model.layers[0].attention.k_proj.weight, 1 / 16),
        (context.k_proj.weight, 1 / 16),
        (context.initial_states, 0.1),
        (context.state_embedding, 0.1),
    ):
        assert 0.7 * std < tensor.std() < 1.3 * std
    assert (context.score_scale == 8).all()  # heads of width 64
    assert (model.model.layers[0].attention.score_scale == 8).all()
    # ALiBi's slopes of 4 heads times the buckets' nearest distances: 16 of one token each, then ever wider ones
    table = model.model.layers[0].attention.relative_attention_bias.weight
    table = 8 * table  # by which it is multiplied, as all scores
    assert table[[0, 1, 15, 16]].tolist() == [[-d * 4.0**-h for h in (1, 2, 3, 4)] for d in (0, 1, 15, 16)]
    assert (table[16:-1] > table[17:]).all()
    assert -128 < 4 * table[-1, 0] < -100
    for scale in (None, 1):
        config = BstConfig.from_preset(
            "tiny", vocab_size=1000, relative_attention_init="normal", initializer_range=0.02, score_scale_init=scale
        )
        attention = BstForCausalLM(config).model.layers[0].attention
        assert (attention.score_scale == (scale or 8)).all()
        assert 0.014 < attention.score_scale[0] * attention.relative_attention_bias.weight.std() < 0.026


@pytest.mark.parametrize("pooling", ["last", "mean", "first"])
def test_sequence_classification_pools(pooling):
    model = tiny_model("bst", "AutoModelForSequenceClassification", pooling=pooling)
    assert isinstance(model, BstForSequenceClassification)
    ids = tiny_inputs(model, length=9)["input_ids"]
    mask = torch.tensor([[1] * 6 + [0] * 3, [0] * 4 + [1] * 5])
    hidden = model.model(ids, attention_mask=mask).last_hidden_state
    kept = [hidden[0, :6], hidden[1, 4:]]
    reduce = {"last": lambda x: x[-1], "first": lambda x: x[0], "mean": lambda x: x.mean(0)}[pooling]
    expected = model.classifier(torch.stack([reduce(x) for x in kept]))
    assert_close(model(ids, attention_mask=mask).logits, expected, "float32")
    labels = torch.tensor([0, 2])
    loss = model(ids, attention_mask=mask, labels=labels).loss
    assert_close(loss, nn.functional.cross_entropy(expected, labels), "float32")


def counted(config) -> int:
    """Stored numbers by the formula of docs/models/bst.md, per layer and table."""
    width, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    layer = 4 * width**2 + 2 * width * inner + 2 * width + 32 * heads + heads
    total = config.vocab_size * width + config.num_hidden_layers * layer + width
    filters = {"single_head": 1, "multi_head": heads, "multi_filter": config.num_context_states}[config.context_type]
    context = 4 * width**2 + heads + filters * width  # the last of them: the skip connections
    if config.context_filter == "s4":
        state = config.state_size
        context += filters * width * state + 3 * width * state + width  # C; A, B and P; the step
    else:
        size, features = config.filter_size, config.filter_embedding_size
        context += filters * width * size + size * features + 2 * size**2 + 4 * size
    if config.context_type == "multi_filter":
        context += 2 * config.num_context_states * width
    return total + len(config.bst_layers) * context


@pytest.mark.parametrize("kind", FILTERS)
@pytest.mark.parametrize("name", ["single head", "multi head", "multi filter"])
def test_counts_are_the_formulas(name, kind):
    options = {"context_type": TYPES[name]["context_type"], "context_filter": kind}
    with torch.device("meta"):
        for preset in ("base", "tiny"):
            config = BstConfig.from_preset(preset, **options)
            assert BstForCausalLM(config).num_parameters() == counted(config)
        slide = BstForCausalLM(BstConfig(bst_layers=[])).num_parameters()
        layer = BstForCausalLM(BstConfig(bst_layers=[9], **options)).num_parameters() - slide
    assert layer - 4_194_304 == counted(BstConfig(bst_layers=[0], **options)) - slide - 4 * 1024**2
    assert slide == 12 * (12 * 1024**2 + 2 * 1024 + 33 * 8) + 32128 * 1024 + 1024


def test_the_papers_layers_and_their_defaults():
    config = BstConfig()
    assert (config.bst_layers, config.window, config.state_size) == ([1, 7, 9], 512, 16)
    assert BstConfig(num_hidden_layers=8).bst_layers == [1, 7]
    assert BstConfig(num_hidden_layers=24).bst_layers == [1, 7, 9]
    assert BstConfig(context_type="multi_filter").context_shift == "window"
    assert (config.local_radius, BstConfig(include_self=False).local_radius) == (511, 512)
    assert config.layer_types[:2] == ["sliding_attention", "sliding_state"]
    with pytest.raises(ValueError, match=r"preset must be one of base, tiny; got 'tinny'. Did you mean 'tiny'\?"):
        BstConfig.from_preset("tinny")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bst_layers": [12]}, r"bst_layers must be distinct, from 0 to 11; got \[12\]"),
        ({"bst_layers": [-1]}, r"bst_layers must be distinct, from 0 to 11; got \[-1\]"),
        ({"bst_layers": [3, 3]}, r"bst_layers must be distinct, from 0 to 11; got \[3, 3\]"),
        ({"window": 0}, "window must be a positive integer; got 0"),
        ({"state_size": 7}, "state_size must be even; got 7"),
        ({"state_size": 0}, "state_size must be a positive integer; got 0"),
        ({"dt_min": 0.2}, "dt_max must be at least dt_min; got 0.1 and dt_min 0.2"),
        ({"context_type": "multi_heads"}, "context_type must be one of .*Did you mean 'multi_head'"),
        ({"context_filter": "s5"}, "context_filter must be one of s4, unstructured; got 's5'"),
        ({"context_type": "multi_filter", "context_shift": "none"}, "context_shift must be window for context_type"),
        ({"context_type": "multi_head", "context_lift": True}, "context_lift must be False for context_type multi_h"),
        ({"num_context_states": 8}, "num_context_states must be left at 32 for context_type single_head, which does"),
        ({"filter_length": 8}, "filter_length must be left at 4096 for context_filter s4, which does not read it"),
        (
            {"context_filter": "unstructured", "state_size": 32},
            "state_size must be left at 16 for context_filter unstructured",
        ),
        ({"context_filter": "unstructured", "filter_embedding_size": 4}, "filter_embedding_size must be odd and at"),
        ({"adaptive_factor": 2}, "adaptive_factor must be left at 4 for adaptive_cutoffs None"),
        ({"adaptive_cutoffs": [5, 5]}, "adaptive_cutoffs must be a list of ascending token ids"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder must be False, because BST is one stack; got True"),
        ({"is_decoder": False}, "is_decoder must be True: a Block-State Transformer is causal"),
        ({"relative_attention_num_buckets": 3}, "relative_attention_num_buckets must be even and at least 4; got 3"),
        ({"relative_attention_init": "alibi"}, "relative_attention_init must be one of normal, recency; got 'alibi'"),
        ({"dropout": 1.0}, r"dropout must lie in \[0, 1\); got 1.0"),
        ({"pad_token_id": 40000}, "pad_token_id must lie in the vocabulary"),
        ({"hidden_act": "rellu"}, "hidden_act must name an activation.*Did you mean 'relu'"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bad_fields_are_named(fields, message):
    with pytest.raises(StrictDataclassError) as error:
        BstConfig(**fields)
    with pytest.raises(ValueError, match=message):
        raise error.value.__cause__ or error.value


def test_bad_inputs_are_named():
    with pytest.raises(ValueError, match="hidden_size must be a multiple of num_attention_heads"):
        BstConfig(hidden_size=30)
    model = base_model()
    x = embedded(1, 3, 32)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model()
    with pytest.raises(
        ValueError, match=r"attention_mask must be of shape \(batch, length\) = \(1, 3\).*got \(1, 1, 3, 3\)"
    ):
        model(inputs_embeds=x, attention_mask=torch.zeros(1, 1, 3, 3))
    cache = model(inputs_embeds=x, use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"attention_mask must be .* = \(1, 6\).*got \(1, 3\)"):
        model(inputs_embeds=x, attention_mask=torch.ones(1, 3), past_key_values=cache)
    model.config.bst_layers = [2]
    with pytest.raises(StrictDataclassError):
        BstModel(model.config)
