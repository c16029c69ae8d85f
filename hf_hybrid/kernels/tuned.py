"""Configurations of Triton kernels that were measured to be faster than the default; the tuner writes this file.

``python -m benchmarks.gpu --parts tune`` measures, and writes its table, which replaces this file. Devices and
configurations that are not in it have the defaults of each op's ``CONFIGURATIONS``.
"""

# op, configuration, compute capability times 10 -> tiles, num_warps, num_stages
TUNED: dict[tuple[str, str, int], tuple[dict[str, int], int, int]] = {}
