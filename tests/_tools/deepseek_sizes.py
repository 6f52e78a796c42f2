"""Sizes of DeepSeek-V4's GEMMs, for which kernels are compiled and inspected.

Specification, sections 1 and 4.
"""

# N, K and groups of the matrices, Pro then Flash.
MATRICES = (
    (65536, 1536, 1),
    (7168, 16384, 1),
    (6144, 7168, 1),
    (7168, 3072, 1),
    (2048, 7168, 1),
    (16384, 4096, 16),
    (8192, 1536, 1),
    (32768, 1024, 1),
    (4096, 8192, 1),
    (4096, 4096, 1),
    (4096, 2048, 1),
    (1536, 4096, 1),
    (8192, 4096, 8),
    (8192, 1024, 1),
)
INTERLEAVED = ((6144, 7168, 1), (4096, 4096, 1))  # fused gate and up projections
# Experts, intermediate and hidden size: Pro's, Flash's, and an eighth of Pro's experts.
ROUTED = ((384, 3072, 7168), (256, 2048, 4096), (48, 3072, 7168))
