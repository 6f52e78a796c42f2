"""An engine of vLLM in a process of its own, for compare.py: it does what standard input says.

Each line is a call of a method of ``Worker``; its answer is a line that begins with ``ANSWER``.
"""

from __future__ import annotations

import json
import logging
import math
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# Names of kernels of the libraries that the engines on dsv4's kernels should not need.
FOREIGN = re.compile(
    r"humming|marlin|deep_?gemm|flash_?mla|splitkv_mla|tilelang|mhc_|sparse_attn_(de|pre)", re.I
)
ANSWER = "ANSWER "


class Worker:
    """One engine of vLLM, in this process.

    Args:
        folder: The checkpoint.
        options: Options of ``vllm.LLM`` beside those below.
        drafts: Tokens that vLLM's proposer drafts per step; 0: none.
        draft: The proposer, ``"mtp"`` or ``"dspark"``.
    """

    def __init__(
        self, folder: str, options: dict[str, Any], drafts: int, draft: str = "mtp"
    ) -> None:
        import vllm

        begin = time.perf_counter()
        if drafts:
            options["speculative_config"] = {"method": draft, "num_speculative_tokens": drafts}
        self.vllm, self.drafts = vllm, drafts
        self.llm = vllm.LLM(model=folder, skip_tokenizer_init=True, **options)
        self.engine = self.llm.llm_engine
        self.vocabulary = self.llm.model_config.get_vocab_size()
        self.started = time.perf_counter() - begin
        self._number = 0

    def start(self) -> dict[str, Any]:
        """Tell how long the start took, and what was replaced."""
        return {"seconds": self.started, "replaced": _replaced()}

    def decode(self, requests: int, context: int, steps: int, profile: bool) -> dict[str, Any]:
        """Time steps of some requests that all decode; milliseconds, or kernels by name."""
        new = (steps + 40) * (1 + self.drafts)
        names = self._add(self._prompts([context] * requests, context), new)
        tokens = dict.fromkeys(names, 0)
        while min(tokens.values()) < 2:
            self._step(tokens)
        for _ in range(8):
            self._step(tokens)
        before = sum(tokens.values())
        if profile:
            kernels = profiled(lambda: [self._step(tokens) for _ in range(steps)])
            answer: dict[str, Any] = kernels.summary(steps)
        else:
            every: list[float] = []
            ms = _milliseconds(
                lambda: every.extend(_seconds(self._step, tokens) for _ in range(steps))
            )
            answer = {"ms": ms / steps, **spread(every)}
        answer["tokens"] = (sum(tokens.values()) - before) / steps / requests
        self.engine.abort_request(names)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return answer

    def prompt(self, tokens: int, profile: bool) -> dict[str, Any]:
        """Time the first token of a prompt that no cache holds."""
        times = []
        for seed in range(1 if profile else 4):
            self._number += 1
            prompts = self._prompts([tokens], 1000 + self._number + seed)
            if profile:
                self._texts(prompts, [1])
                kernels = profiled(lambda prompts=prompts: self._texts(prompts, [1]))
                return kernels.summary(1)
            times.append(_milliseconds(lambda prompts=prompts: self._texts(prompts, [1])))
        return {"ms": statistics.median(times[1:])}

    def texts(self, lengths: list[int], new: list[int], seed: int, alone: bool) -> dict[str, Any]:
        """Answer random prompts greedily, with the log-probabilities of the tokens."""
        prompts = self._prompts(lengths, seed)
        if alone:
            outputs = [self._texts([p], [n], 2)[0] for p, n in zip(prompts, new, strict=True)]
        else:
            outputs = self._texts(prompts, new, 2)
        return {"texts": outputs, "drafts": self._draft_counts()}

    def score(self, lengths: list[int], seed: int) -> dict[str, Any]:
        """Return the log-probabilities of the tokens of random prompts."""
        parameters = self.vllm.SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False
        )
        prompts = [{"prompt_token_ids": ids} for ids in self._prompts(lengths, seed)]
        outputs = self.llm.generate(prompts, parameters, use_tqdm=False)
        return {
            "logprobs": [
                row[token].logprob
                for output in outputs
                for row, token in zip(output.prompt_logprobs, output.prompt_token_ids, strict=True)
                if row is not None
            ]
        }

    def poisoned(
        self, weight: str, row: int | None, prompts: list[list[int]], new: int
    ) -> dict[str, Any]:
        """Answer prompts while a weight is NaN, and return what ``DSV4_VLLM_CHECK=1`` logged.

        Args:
            weight: Name of a parameter of the model; empty: none is changed.
            row: The row that is NaN; None: all of it.
            prompts: Their tokens.
            new: Tokens of each answer.
        """
        with listening() as lines, self._nan(weight, row):
            names = self._add(prompts, new)
            while self.engine.has_unfinished_requests():
                self.engine.step()
        # Marks of the last step are examined when another begins.
        with listening() as late:
            self._texts(self._prompts([3], 1), [2])
        return {"requests": names, "incidents": lines + late}

    @contextmanager
    def _nan(self, weight: str, row: int | None) -> Iterator[None]:
        if not weight:
            yield
            return
        worker = self.engine.engine_core.engine_core.model_executor.driver_worker
        values = worker.get_model().get_parameter(weight).data
        import torch

        with torch.inference_mode():  # in which vLLM may have made the parameter
            values = values if row is None else values[row]
            stored = values.clone()
            values.fill_(math.nan)
        try:
            yield
        finally:
            with torch.inference_mode():
                values.copy_(stored)

    def _add(self, prompts: list[list[int]], new: int) -> list[str]:
        parameters = self.vllm.SamplingParams(
            temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False
        )
        names = []
        for prompt in prompts:
            self._number += 1
            names.append(f"compare-{self._number}")
            self.engine.add_request(names[-1], {"prompt_token_ids": prompt}, parameters)
        return names

    def _step(self, tokens: dict[str, int]) -> None:
        for output in self.engine.step():
            tokens[output.request_id] = len(output.outputs[0].token_ids)

    def _texts(
        self, prompts: list[list[int]], new: Sequence[int], logprobs: int | None = None
    ) -> list[dict[str, Any]]:
        parameters = [
            self.vllm.SamplingParams(
                temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False, logprobs=logprobs
            )
            for n in new
        ]
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = self.llm.generate(inputs, parameters, use_tqdm=False)
        return [_text(output.outputs[0]) for output in outputs]

    def _prompts(self, lengths: Iterable[int], seed: int) -> list[list[int]]:
        import torch

        generator = torch.Generator().manual_seed(seed)
        return [
            torch.randint(2, self.vocabulary, (n,), generator=generator).tolist() for n in lengths
        ]

    def _draft_counts(self) -> dict[str, float]:
        counts = {}
        for metric in self.llm.get_metrics():
            if metric.name.startswith("vllm:spec_decode_num") and hasattr(metric, "value"):
                counts[metric.name.removeprefix("vllm:spec_decode_num_")] = float(metric.value)
        return counts


@contextmanager
def listening() -> Iterator[list[str]]:
    """Collect the errors that dsv4 logs in the block."""
    lines: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.plugins.dsv4")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def _text(completion: Any) -> dict[str, Any]:
    tokens, rows = list(completion.token_ids), completion.logprobs or []
    chosen = [row[token].logprob for row, token in zip(rows, tokens, strict=False)]
    others = [
        max((p.logprob for t, p in row.items() if t != token), default=-math.inf)
        for row, token in zip(rows, tokens, strict=False)
    ]
    return {"tokens": tokens, "logprobs": chosen, "margins": _less(chosen, others)}


def _less(left: Sequence[float], right: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(left, right, strict=True)]


def _replaced() -> str:
    from dsv4.integrations.vllm import report

    lines = []
    for stage in (0, report.DRAFT):
        path = report.path_of_stage(stage, 1)
        if path is not None and path.exists():
            lines += [f"{path.name}:", str(report.Report.read(path))]
    return "\n".join(lines)


def _milliseconds(call: Callable[[], object]) -> float:
    import torch

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    if on_gpu:
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin)


def _seconds(call: Callable[..., object], *arguments: Any) -> float:
    begin = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - begin


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return the median and the longest of a series of steps, and which one that was.

    One long step among even ones is a compilation or a capture; even ones that are all long are
    the host's or the GPU's.
    """
    longest = max(seconds)
    return {
        "median_ms": 1e3 * statistics.median(seconds),
        "longest_ms": 1e3 * longest,
        "longest_step": seconds.index(longest),
    }


class Compilations:
    """Kernels that this process compiles.

    Attributes:
        others: Triton kernels that are compiled, or loaded from a disk, at their first launch by
            Triton itself: vLLM's.
        late: This package's kernels, with the constants that they were compiled for.
    """

    def __init__(self) -> None:
        from dsv4.compilation.counts import of_this_process

        self._own = of_this_process()
        self._own_before = self._own.copy()
        self.others: list[str] = []
        self.late: list[str] = []

    def listen(self) -> None:
        """Note from now on what is compiled, also kernels of this package that lie on a disk.

        While somebody listens, its Triton kernels are compiled at their first launch.
        """
        from dsv4.cute.runtime import cubin_cache

        compile_image = cubin_cache.compile_image

        def noted(plan: Any, arch: str) -> Any:
            self.late.append(repr(plan))
            return compile_image(plan, arch)

        cubin_cache.compile_image = noted
        try:
            from triton import knobs
        except ImportError:
            return
        before = knobs.runtime.jit_post_compile_hook

        def note(*arguments: Any, **named: Any) -> Any:
            self._note(named.get("fn"), named.get("compile") or {})
            return None if before is None else before(*arguments, **named)

        knobs.runtime.jit_post_compile_hook = note

    def _note(self, function: Any, compiled: dict[str, Any]) -> None:
        name = str(getattr(function, "name", "a kernel"))
        if str(getattr(function, "module", "")).startswith("dsv4."):
            self.late.append(specialisation(name, compiled))
        else:
            self.others.append(name)

    def since_last(self) -> dict[str, Any]:
        """Return what was compiled since the last call: dsv4's and others, by name."""
        own = self._own.copy()
        new = own - self._own_before
        answer = {
            "compiled": new.total(),
            "compiled_names": dict(new),
            "late": self.late,
            "first_launches": dict(Counter(self.others)),
        }
        self._own_before, self.others, self.late = own, [], []
        return answer


def specialisation(name: str, compiled: dict[str, Any]) -> str:
    """Name of a Triton kernel, the constants that it was compiled for, and types of the rest.

    Args:
        name: Its name.
        compiled: Argument ``compile`` of Triton's hook.
    """
    signature, constants = compiled.get("signature", {}), compiled.get("constants", {})
    attributes = (compiled.get("configs") or [{}])[0]
    names = list(signature)
    words = [f"{names[path[0]]}={value}" for path, value in constants.items() if value is not None]
    exact = {names[path[0]] for path, value in attributes.items() if value}
    types = [
        f"{argument}: {kind}{' / 16' if argument in exact else ''}"
        for argument, kind in signature.items()
        if kind != "constexpr"
    ]
    return f"{name} [{', '.join(words)}] ({', '.join(types)})"


@dataclass(frozen=True)
class Kernels:
    """Kernels that ran: name, start and end in nanoseconds."""

    spans: Sequence[tuple[str, int, int]]

    def busy_ms(self) -> float:
        """Return the time in which at least one of them ran."""
        total, until = 0, -1
        for _, begin, end in sorted(self.spans, key=lambda span: span[1]):
            total += max(0, end - max(begin, until))
            until = max(until, end)
        return 1e-6 * total

    def summary(self, steps: int) -> dict[str, Any]:
        """Return averages over steps, and the milliseconds of each name, the longest first."""
        by_name: dict[str, float] = {}
        for name, begin, end in self.spans:
            by_name[name] = by_name.get(name, 0.0) + 1e-6 * (end - begin) / steps
        names = dict(sorted(by_name.items(), key=lambda item: -item[1]))
        return {
            "busy_ms": self.busy_ms() / steps,
            "launches": len(self.spans) / steps,
            "kernels": {name[:160]: ms for name, ms in names.items()},
            "foreign": {name[:160]: ms for name, ms in names.items() if FOREIGN.search(name)},
        }


def profiled(call: Callable[[], object]) -> Kernels:
    """Run a call and return its kernels; none without a GPU."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        call()
        return Kernels(())
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize()
    spans = [
        (event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in recorded.profiler.kineto_results.events()
        if str(event.device_type()).endswith("CUDA") and _is_kernel(event)
    ]
    return Kernels(spans)


def _is_kernel(event: Any) -> bool:
    """Return whether an event of the GPU is a kernel: no copy, no range that a program named."""
    named = getattr(event, "is_user_annotation", lambda: False)()
    return not named and not event.name().startswith("Mem")


def serve(request: dict[str, Any]) -> None:
    """Start an engine, then answer a call on each line of standard input."""
    from dsv4.integrations import vllm as plugin

    plugin.register()  # again, or the first time where dsv4 is not installed with its entry points
    compilations = Compilations()
    worker = Worker(
        request["folder"], request["options"], request["drafts"], request.get("draft", "mtp")
    )
    _say({**worker.start(), **compilations.since_last()})
    compilations.listen()
    for line in sys.stdin:
        call = json.loads(line)
        answer = getattr(worker, call["call"])(**call["arguments"])
        _say({**answer, **compilations.since_last()})


def _say(answer: dict[str, Any]) -> None:
    print(f"\n{ANSWER}{json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
