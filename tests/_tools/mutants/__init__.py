"""A table of mutants: every known way of getting the model wrong, as a change of one function.

``python -m tests._tools.mutants [9 ...]`` applies each of them to a copy and expects the named test
to fail. A number is that of a known pitfall (specification, section 15). "HF" are errors of the
drop-in for transformers; "files" are errors with files that are replaced, or come from elsewhere;
"load" are errors of packing while a checkpoint is read; P1 to P4 are errors of plans, tapes and
launches;
"start" are errors of what is compiled ahead; "text" are errors of prompts, answers and streams;
"ranks" are errors of models on several ranks; "draft" are errors of DSpark, "served"
of steps with drafts; "hosted" are errors of experts in host memory.
"""

from __future__ import annotations

from .attention import MUTANTS as _ATTENTION
from .bench import MUTANTS as _BENCH
from .checkpoints import MUTANTS as _CHECKPOINTS
from .cubins import MUTANTS as _CUBINS
from .drafting import MUTANTS as _DRAFTING
from .drafts import MUTANTS as _DRAFTS
from .dropin import MUTANTS as _DROPIN
from .exchange import MUTANTS as _EXCHANGE
from .files import MUTANTS as _FILES
from .hosting import MUTANTS as _HOSTING
from .kernels import MUTANTS as _KERNELS
from .launching import MUTANTS as _LAUNCHING
from .layering import MUTANTS as _LAYERING
from .loading import MUTANTS as _LOADING
from .mixing import MUTANTS as _MIXING
from .mutant import Mutant
from .quantisation import MUTANTS as _QUANTISATION
from .ranks import MUTANTS as _RANKS
from .starting import MUTANTS as _STARTING
from .state import MUTANTS as _STATE
from .texts import MUTANTS as _TEXTS

__all__ = ["MUTANTS", "REQUIRED", "Mutant"]

MUTANTS: tuple[Mutant, ...] = (
    *_ATTENTION,
    *_MIXING,
    *_STATE,
    *_QUANTISATION,
    *_KERNELS,
    *_CUBINS,
    *_BENCH,
    *_DRAFTING,
    *_DRAFTS,
    *_DROPIN,
    *_CHECKPOINTS,
    *_FILES,
    *_HOSTING,
    *_LAUNCHING,
    *_LAYERING,
    *_LOADING,
    *_STARTING,
    *_TEXTS,
    *_RANKS,
    *_EXCHANGE,
)
REQUIRED = tuple(f"pitfall {n}" for n in (*range(1, 23), *range(25, 34), 35, 41))
