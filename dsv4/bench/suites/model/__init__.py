"""``python -m dsv4.bench model``: times of a whole model and their roofline bounds.

Each row is a number of sequences at a context. Its times are milliseconds per step, in which every
sequence gets one token: of ``generate``, of a runner's step, of a decode step captured in a CUDA
graph, and the sum of that step's kernels. Each row has its roofline bounds. Prompts give the
time to the first token.
"""
