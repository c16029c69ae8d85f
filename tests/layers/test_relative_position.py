"""T5's relative position bias: what decoding looks up is what the table says."""

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
