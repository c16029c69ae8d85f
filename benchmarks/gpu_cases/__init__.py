"""The cases of `benchmarks.gpu` for each kernel: inputs, the op, named peers, and the least cost of the work.

B batch · T length · S cached keys · H heads · D width · K key dim · J taps · P states · N state size · C filters
"""

from benchmarks.gpu_cases import attention, convolutions, segments, state_spaces
from benchmarks.gpu_cases.case import Case, Function, Tensors
from benchmarks.gpu_cases.packed import packed_cases

__all__ = ["Case", "Function", "Tensors", "cases", "checked_cases"]

_ODD_HEADS = ((1013, 3, 64), (1013, 3, 128), (5003, 2, 100), (700, 1, 1024), (129, 40, 64))


def cases(small: bool) -> list[Case]:
    """Return every case; small ones run on a CPU within seconds."""
    if small:
        return [
            convolutions.short(2, 40, 16, 3),
            attention.linear(2, 40, 2, 16),
            attention.linear_normed(2, 40, 2, 16),
            attention.local(2, 40, 2, 16, 7),
            convolutions.long(2, 40, 8),
            convolutions.long(2, 40, 8, groups=2),
            segments.recurrence(2, 2, 4, 8, 8),
            segments.step(2, 2, 4, 8, 8),
            state_spaces.scan(2, 40, 8),
            state_spaces.real_scan(2, 40, 8),
            state_spaces.kernel(4, 8, 40),
            state_spaces.step(2, 6, 8, 2),
            attention.local_step(2, 40, 2, 16, 7),
        ]
    found = [convolutions.short(8, 4096, 768, taps) for taps in (3, 9)]
    found += [attention.linear(8, length, 8, 128) for length in (4096, 16384)]
    found += [attention.linear(8, 4096, 4, 64), attention.linear(8, 4096, 1, 1024)]
    found += [attention.linear_normed(8, 4096, heads, width) for heads, width in ((4, 64), (8, 128))]
    found += [attention.local(8, length, 12, 64, 128) for length in (4096, 16384)]
    found += [convolutions.long(8, length, 768) for length in (4096, 16384)]
    found += [convolutions.long(8, 4096, 768, groups=4)]
    found += [segments.recurrence(8, 12, 64, 64, 64), segments.step(32, 12, 256, 64, 64)]
    found += [state_spaces.scan(8, 4096, 384), state_spaces.real_scan(8, 4096, 768)]
    found += [state_spaces.kernel(768, size, 16384) for size in (16, 64)]
    found += [state_spaces.step(batch, 768, 64, filters) for batch, filters in ((1, 1), (8, 1), (8, 12))]
    found += [attention.local_step(batch, 4096, 12, 64, 256) for batch in (1, 8, 64)]
    return found


def checked_cases(small: bool) -> list[Case]:
    """Return shapes that together use every configuration and are no multiples of a tile."""
    if small:
        return cases(True)
    found = packed_cases()
    found += [convolutions.short(3, 1013, 200, taps) for taps in (1, 3, 9)]
    found += [attention.linear(2, length, heads, width) for length, heads, width in _ODD_HEADS]
    found += [attention.linear_normed(2, 1013, 3, width) for width in (16, 60, 200)]
    found += [attention.local(2, 997, 3, width, 100) for width in (16, 32, 64, 96, 128, 256)]
    found += [state_spaces.kernel(60, size, 3001, filters) for size, filters in ((16, 1), (64, 1), (64, 2), (10, 5))]
    found += [state_spaces.step(3, 101, size, 3, low_rank=size != 30) for size in (2, 10, 30, 64, 200)]
    found += [attention.local_step(3, 997, 3, width, 100, padding=7) for width in (32, 64, 96, 256)]
    found += [attention.local_step(3, 997, 3, 64, 100, chunks=True, padding=350)]
    found += [convolutions.long(2, 3001, 200), convolutions.long(2, 3001, 200, groups=4)]
    found += [
        segments.recurrence(2, 3, 5, 60, width, neurons) for width in (64, 100, 200) for neurons in (True, False)
    ]
    found += [segments.step(3, 5, 7, 60, width) for width in (50, 100, 200)]
    found += [attention.local_dropout(2, 150, 3, width, 50, 0.25) for width in (16, 64, 128, 256)]
    found += [scan(2, length, 100) for scan in (state_spaces.scan, state_spaces.real_scan) for length in (100, 1013)]
    return found
