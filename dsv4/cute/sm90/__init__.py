"""NVFP4 GEMMs on Hopper: weights dequantized to bfloat16 in registers."""
