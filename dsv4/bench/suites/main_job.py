"""The main job: does a checkpoint generate what transformers generates, is every operator right.

A small random model is written in NVIDIA's layout, loaded back, and generates greedily three times:
in this package's model, in transformers' model with this package's layers, and in transformers'
own model that holds the dequantised weights and reruns the whole sequence for every token. The
tokens must be the same and the logits equal to ``TOLERANCE``.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dsv4 import checkpoint
from dsv4.bench.cases import MAKERS, cases
from dsv4.bench.environment import Rates
from dsv4.bench.measure import Options, attempt
from dsv4.bench.report import REASON
from dsv4.bench.results import Row
from dsv4.bench.tables import short
from dsv4.bench.verdict import Check
from dsv4.config import ModelConfig
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.testing.models import random_model, transformers_twin

PROMPT, NEW, TOKENS = 21, 12, 16
_KIND, _OWN, _DROP_IN = "generation", "our model", "drop-in"
# Relative, float32 weights on both sides: K u of the longest sums, over the layers.
TOLERANCE = 1e-5


def generation(device: torch.device, seed: int = 0) -> list[Check]:
    """Write, load, generate and compare; prints what it does.

    A step that raises is a check that failed; its traceback goes to stderr.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="dsv4-bench-") as folder:
            return _generation(Path(folder), device, seed)
    except Exception as error:  # whatever it is, the operators are still checked
        traceback.print_exc()
        name: str = "compare"
        cause: BaseException = error
        if isinstance(error, _StepError):
            name, cause = str(error), error.__cause__ or error
        said = short(f"raised {type(cause).__name__}: {cause}", REASON)
        print(f"{'compare':<11}{'WRONG':>7}  {name}: {said}", flush=True)
        return [Check(_KIND, name, False, said)]


class _StepError(Exception):
    """A step raised, its name is the argument."""


def _generation(path: Path, device: torch.device, seed: int) -> list[Check]:
    _step("write", lambda: _write(path, seed))
    model = _step("load", lambda: _load(path, device))
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(2, model.config.vocab_size, (PROMPT,), generator=generator).tolist()
    tokens = _step("generate", lambda: model.generate([prompt], NEW, stop_ids=())[0], str)
    if importlib.util.find_spec("transformers") is None:
        print("compare     transformers is not installed: nothing to compare with", flush=True)
        return [Check(_KIND, name, None) for name in (_OWN, _DROP_IN)]
    return _compare(path, model, prompt, tokens)


def _step(name: str, action: Callable[[], Any], words: Callable[[Any], str] | None = None) -> Any:
    """Do something and print how long it took."""
    start = time.perf_counter()
    try:
        done = action()
    except Exception as error:
        raise _StepError(name) from error
    seconds = time.perf_counter() - start
    what = done[1] if isinstance(done, tuple) else (words(done) if words else "")
    print(f"{name:<12}{seconds:6.2f} s  {what}", flush=True)
    return done[0] if isinstance(done, tuple) else done


def _write(path: Path, seed: int) -> tuple[None, str]:
    config = ModelConfig.tiny(numerics="transformers")
    checkpoint.save(random_model(config, seed, mtp=True), path, layout="nvidia")
    size = sum(file.stat().st_size for file in path.iterdir())
    return None, f"{len(list(path.iterdir()))} files, {size / 1e6:.2f} MB, NVIDIA's layout"


def _load(path: Path, device: torch.device) -> tuple[DeepseekV4ForCausalLM, str]:
    with checkpoint.Checkpoint.open(path) as source:
        formats = [e.format.name if e.format else "plain" for e in source.entries.values()]
    counts = ", ".join(f"{formats.count(name)} {name}" for name in sorted(set(formats)))
    model = checkpoint.load(
        path, device=device, numerics="transformers", dtype=torch.float32, progress=False
    )
    return model, f"{counts} tensors"


def _compare(
    path: Path, model: DeepseekV4ForCausalLM, prompt: list[int], tokens: list[int]
) -> list[Check]:
    twin = _step("independent", lambda: (_twin(model), "transformers with dequantised weights"))
    dropped = _step(_DROP_IN, lambda: _drop_in(path, model.device))
    ids = torch.tensor([prompt], device=model.device)
    with torch.inference_mode():
        expected = _greedy(twin, ids)
        theirs = _generate(dropped, ids)
        sequence = torch.tensor([[*prompt, *expected]], device=model.device)
        truth = twin(sequence, use_cache=False).logits
        ours, swapped = model(sequence), dropped(sequence, use_cache=False).logits
    return [
        _agree(_OWN, tokens, expected, ours, truth),
        _agree(_DROP_IN, theirs, expected, swapped, truth),
    ]


def _twin(model: DeepseekV4ForCausalLM) -> Any:
    return transformers_twin(model).to(model.device)


def _drop_in(path: Path, device: torch.device) -> tuple[Any, str]:
    from dsv4.integrations.transformers import from_pretrained

    model = from_pretrained(path, device=device, dtype=torch.float32, progress=False)
    return model, "transformers' model with this package's layers, from the checkpoint"


def _greedy(twin: Any, ids: torch.Tensor) -> list[int]:
    """Rerun the whole sequence for every token, without a cache."""
    start = ids.shape[1]
    for _ in range(NEW):
        last = twin(ids, use_cache=False).logits[:, -1]
        ids = torch.cat((ids, last.argmax(-1, keepdim=True)), 1)
    return ids[0, start:].tolist()


def _generate(model: Any, ids: torch.Tensor) -> list[int]:
    # No stop ids, as in the others.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    return out[0, ids.shape[1] :].tolist()


def _agree(
    name: str, tokens: list[int], expected: list[int], logits: torch.Tensor, truth: torch.Tensor
) -> Check:
    """Print and return whether tokens and logits are those of the independent model."""
    error = float((logits.double() - truth.double()).norm() / truth.double().norm())
    good = tokens == expected and error <= TOLERANCE
    differ = sum(a != b for a, b in zip(tokens, expected, strict=False))
    differ += abs(len(tokens) - len(expected))
    words = (
        f"{differ} of {len(expected)} tokens differ" if differ else f"{len(expected)} tokens equal"
    )
    words += f", logits {error:.1e} off"
    print(
        f"{'compare':<11}{'ok' if good else 'WRONG':>7}  {name}: {words} "
        f"(relative; allowed {TOLERANCE:.0e})",
        flush=True,
    )
    if differ:
        print(f"{'found':>18}  {tokens}\n{'expected':>18}  {expected}", flush=True)
    return Check(_KIND, name, good, words)


def operators(options: Options, rates: Rates, rows: list[Row]) -> None:
    """Measure every operator at tiny sizes into ``rows``."""
    for op in MAKERS:
        for case in cases(op, "tiny", TOKENS):
            if case.brief:
                rows.append(attempt(case, options, rates))
