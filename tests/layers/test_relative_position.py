"""T5's relative position bias: what decoding looks up is what the table says."""

import copy

import pytest
import torch

from hf_hybrid.layers.relative_position import RelativePositionBias
from tests.tolerances import assert_close


@pytest.mark.parametrize("bidirectional", [False, True])
def test_biases_of_the_past_are_those_of_their_offsets(bidirectional):
    table = RelativePositionBias(3, num_buckets=8, max_distance=20, bidirectional=bidirectional)
    for reach in (0, 5, 2, 40, 40, 7):  # the buckets that are kept are too few, then more than are asked for
        with torch.inference_mode():
            first = table(reach=reach).clone()
        assert_close(first, table(torch.arange(-reach, 1)), "exact")
        (gradient,) = torch.autograd.grad(table(reach=reach).sum(), table.weight)  # after inference, training
        assert gradient.sum() == 3 * (reach + 1)
    assert list(table.state_dict()) == ["weight"]
    moved = table.to("meta")(reach=3)
    assert moved.is_meta


@pytest.mark.parametrize("scaled", [False, True])
def test_tokens_look_their_biases_up_once_and_a_sequence_or_a_gradient_forgets_them(scaled):
    table = RelativePositionBias(3, num_buckets=8, max_distance=20, bidirectional=False)
    scale = torch.nn.Parameter(torch.tensor([-2.0, 0.5, 3.0])) if scaled else None

    def check(reach):
        factor = scale.abs()[:, None] if scaled else 1
        expected = torch.nn.functional.embedding(table._buckets(torch.arange(-reach, 1)), table.weight).t() * factor
        actual = table(reach=reach, scale=scale)
        assert_close(actual, expected, "exact")
        return actual

    with torch.no_grad():
        first = check(6)
        assert check(6).data_ptr() == first.data_ptr()
        assert check(5).data_ptr() == first[:, 1:].data_ptr()
        for changed in (table.weight, scale) if scaled else (table.weight,):
            changed.mul_(1.25)  # seen in the midst of a sequence, too
            check(6)
        fresh = copy.deepcopy(table)
        assert fresh._kept is None
        for forget in (lambda: table(torch.arange(3)), table.train):
            table.weight.data.mul_(1.25)  # leaves no trace, as a fused optimizer
            forget()
            check(6)
    table.weight.data.mul_(1.25)
    torch.autograd.grad(check(6).sum(), [x for x in (table.weight, scale) if x is not None])
    with torch.no_grad():
        check(6)
