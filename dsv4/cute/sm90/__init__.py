"""NVFP4 products on Hopper: weights expanded to bfloat16 in registers."""
