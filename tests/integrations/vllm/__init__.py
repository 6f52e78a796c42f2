"""vLLM runs on a CPU here if there is no GPU: the choice is made before any module imports it.

``make test-vllm`` sets ``VLLM_TARGET_DEVICE=cpu`` in any case; tests marked ``gpu`` run without it.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
