"""Triton's step of local attention, interpreted, against the reference in float64."""

from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from hf_hybrid.kernels import local_attention_step
from hf_hybrid.kernels.launching import record_launches
from hf_hybrid.kernels.local_attention import step
from hf_hybrid.kernels.local_attention.settings import StepSettings
from hf_hybrid.kernels.local_attention.step.reference import local_attention_step as reference
from tests.kernels.guarded import guarded, guarded_allocations
from tests.kernels.interpreter import interpreted
from tests.kernels.test_local_attention_step import CALLS, ROWS, check, make
from tests.tolerances import assert_close


@contextmanager
def small_blocks():
    """Few keys at a time, so that short windows have several blocks."""
    from hf_hybrid.kernels.local_attention.step import triton_kernels

    small = {
        name: c._replace(tiles=c.tiles | {"BS": 4, "D": c.tiles["D"] // 8})
        for name, c in triton_kernels.CONFIGURATIONS.items()
    }
    with patch.multiple(triton_kernels, CONFIGURATIONS=small):
        yield


@pytest.mark.parametrize(("options", "length", "start", "key_start"), CALLS)
@interpreted
def test_it_is_the_reference(options, length, start, key_start):
    with guarded_allocations(), small_blocks():
        check(options, length, start, key_start, torch.float32, "float32")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@interpreted
def test_16_bits(dtype):
    with guarded_allocations(), small_blocks():
        check({"chunk_size": 7}, 13, 12, 0, dtype, ROWS[dtype])


@pytest.mark.parametrize(("width", "value_width"), [(1, 64), (65, 128), (256, 7)])
@interpreted
def test_shipped_blocks_and_any_width(width, value_width):
    with guarded_allocations():
        check({"radius": 140}, 150, 149, 0, torch.float32, "float32", heads=1, width=width, value_width=value_width)


@interpreted
def test_what_is_not_seen_is_not_read():
    """Keys outside of the window, behind the token and hidden by the mask hold NaN, as does what surrounds them."""
    (query, key, value, bias), mask = make({"radius": 5}, 16, 11, torch.float32)
    hidden = torch.ones(3, 16, dtype=torch.bool)
    hidden[:, 6:12] = mask[:, 6:] == 0
    expected = reference(query, key, value, bias=bias, radius=5, query_start=11, attention_mask=mask)
    key, value = (x.masked_fill(hidden[..., None, None], torch.nan) for x in (key, value))
    caches = [guarded(x.transpose(1, 2)).transpose(1, 2) for x in (key, value)]
    with guarded_allocations(), small_blocks():
        actual = local_attention_step(
            guarded(query), *caches, bias=guarded(bias), radius=5, query_start=11, attention_mask=guarded(mask)
        )
    assert_close(actual, expected, "float32")


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.float32])
@interpreted
def test_any_mask_and_any_strides_with_the_same_bits(dtype):
    tensors, mask = make({"chunk_size": 6}, 12, 11, torch.float32)
    options = {"chunk_size": 6, "query_start": 11}
    with small_blocks():
        first = local_attention_step(*tensors[:3], bias=tensors[3], attention_mask=mask, **options)
        turned = [x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0) for x in tensors[:3]]
        kept = mask.to(dtype).t().contiguous().t()
        bias = tensors[3].t().contiguous().t()
        second = local_attention_step(*turned, bias=bias, attention_mask=kept, **options)
    assert_close(second, first, "exact")


@interpreted
def test_a_grid_of_chunks_may_start_far_behind_the_first_position():
    (query, key, value, _), _ = make({"chunk_size": 3}, 4, 2103, torch.float32, batch=2)
    mask = torch.ones(2, 2104)
    mask[0, :2049] = mask[1, :1023] = 0
    options = {"chunk_size": 3, "query_start": 2103, "key_start": 2100, "attention_mask": mask}
    with small_blocks():
        actual = local_attention_step(query, key, value, **options)
    assert_close(actual, reference(query, key, value, **options), "float32")


@interpreted
def test_opcheck():
    (query, key, value, bias), mask = make({"radius": 3}, 6, 5, torch.float32)
    position = torch.tensor([5])
    for backend in ("triton", "torch"):
        for tensors, numbers in (
            ((bias, mask, position, None), (0, 0, 3, None, True)),
            ((None, None, None, None), (5, 0, None, 4, False)),
        ):
            torch.library.opcheck(step.op.local_attention_step, (query, key, value, *tensors, *numbers, 0.5, backend))


@interpreted
def test_compiled_as_one_graph():
    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(query, key, value, bias, start):
        return local_attention_step(query, key, value, bias=bias, radius=3, query_start=start, backend="triton")

    tensors, _ = make({"radius": 3}, 6, 5, torch.float32)
    for start in (torch.tensor(4), 5, 3):
        actual = compiled(*tensors, start)
        assert_close(actual, reference(*tensors[:3], bias=tensors[3], radius=3, query_start=start), "float32")


@interpreted
def test_a_cuda_graph_could_hold_it():
    """One launch, and nothing reads a value: the tensors have none."""
    from hf_hybrid.kernels.local_attention.step import triton_kernels

    (*tensors, bias), mask = make({"chunk_size": 6}, 12, 11, torch.bfloat16)
    query, key, value, bias, mask, position = (x.to("meta") for x in (*tensors, bias, mask, torch.tensor(11)))
    with record_launches(90) as launches:
        settings = StepSettings(0, 0, None, 6, True, 0.5)
        output = triton_kernels.forward(query, key, value, bias, mask, position, position, settings)
    (only,) = launches
    assert output.shape == (3, 1, 2, 3)
    assert only.arguments["k"] is key, "a cache is read in place"


def test_a_mask_that_grows_compiles_nothing_anew():
    from benchmarks.aot_launches import argument_type
    from hf_hybrid.kernels.local_attention.step import triton_kernels

    query, cache = torch.empty(2, 1, 3, 8, device="meta"), torch.empty(2, 32, 3, 8, device="meta")
    kinds = []
    for kept in (1, 15, 16, 17):
        mask = torch.empty(2, kept, dtype=torch.bool, device="meta")
        with record_launches(90) as launches:
            settings = StepSettings(kept - 1, 0, None, 6, True, 0.5)
            triton_kernels.forward(query, cache, cache, None, mask, None, None, settings)
        (only,) = launches
        kinds.append({name: argument_type(only.kernel, name, value) for name, value in only.arguments.items()})
    assert kinds[0]["K_B"] == ("i32", None, True)  # loads of keys are aligned
    assert all(kind == kinds[0] for kind in kinds)


@interpreted
def test_what_the_kernel_cannot_take_is_refused():
    (query, key, value, _), _ = make({"radius": 1}, 4, 3, torch.float32)
    wide = torch.zeros(3, 1, 2, 257)
    for arguments, message in (
        ((wide, wide.expand(-1, 4, -1, -1), value), "K and V must be at most 256; got 257 and 3"),
        ([x.double() for x in (query, key, value)], r"query must be float32, .* got torch\.float64"),
        ((query.clone().requires_grad_(), key, value), "a gradient is needed, and the kernel has none"),
    ):
        with pytest.raises(ValueError, match=f"local_attention_step cannot run on triton: {message}"):
            local_attention_step(*arguments, radius=1, query_start=3)
