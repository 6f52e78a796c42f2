"""NVFP4, MXFP4 and FP8 tensors: formats, codes, block scales and the layouts of packed weights."""
