"""Pools of more than two gigabytes for tests of offsets, of which a CPU touches what is written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dsv4.kv_cache.pages import Pages


def allocate(*sizes: int, device: torch.device | str, **options: Any) -> Pages:
    """``Pages.allocate``; on a CPU its zeros are the system's, where ``torch.zeros`` writes them.

    Writing them takes a second a pool.
    """
    if torch.device(device).type != "cpu":
        return Pages.allocate(*sizes, device=device, **options)
    pages = Pages.allocate(*sizes, device="meta", **options)
    zeros = torch.from_numpy(np.zeros(pages.data.nbytes, np.uint8))
    return replace(pages, data=zeros.view(pages.data.dtype).view(pages.data.shape))
