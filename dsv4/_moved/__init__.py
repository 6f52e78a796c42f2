"""Old paths of public modules, for one release: each warns and is the module that it became.

This folder is at the end of ``dsv4.__path__``: ``import dsv4.formats`` finds ``formats.py`` here.
"""

from __future__ import annotations

import importlib
import sys
import warnings


def moved(old: str, new: str) -> None:
    """Replace the module that is being imported by another, with a ``DeprecationWarning``.

    Args:
        old: Its name.
        new: The name of the module that it became.
    """
    message = f"{old} is now {new}; the old path goes with the next release"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
    sys.modules[old] = importlib.import_module(new)
