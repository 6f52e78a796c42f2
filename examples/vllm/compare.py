"""Compare vLLM as it is with vLLM on dsv4's kernels: times, kernels, tokens, NaN.

    python examples/vllm/compare.py nvidia/DeepSeek-V4-Flash-NVFP4
    python examples/vllm/compare.py small --random 12 32 --engines stock parts drafts

``--random LAYERS EXPERTS`` first writes a checkpoint of Flash's widths with random weights, which
fits one GPU. Engines: ``stock`` is vLLM alone, ``parts`` has dsv4's kernels in vLLM's model,
``model`` is dsv4's model under vLLM's engine, ``drafts`` is ``parts`` with vLLM's MTP proposer.

Each engine is a process. All start at the same time, then one at a time works, so that no time
contains another engine's work. After every phase the results so far are printed and written to
``--out``; an engine that fails or is late is left out from there on.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ENGINES: dict[str, dict[str, str]] = {
    "stock": {"DSV4_VLLM": "off"},
    "parts": {"DSV4_VLLM": "all"},
    "model": {"DSV4_VLLM": "model"},
    "drafts": {"DSV4_VLLM": "all"},
}
DRAFTING = {"drafts"}
DECODES = ((1, 1024), (8, 1024), (64, 512))  # requests, tokens of each before the steps
PROMPT = 4096
# Names of kernels of the libraries that the engines on dsv4's kernels should not need.
FOREIGN = re.compile(
    r"humming|marlin|deep_?gemm|flash_?mla|splitkv_mla|tilelang|mhc_|sparse_attn_(de|pre)", re.I
)
# Log-probabilities of one text, computed in steps of other sizes, differ by rounding. Where two
# tokens are closer than this, either may be the greedy one.
NEAR_TIE = 0.75
_ANSWER = "ANSWER "


class EngineError(RuntimeError):
    """An engine that failed, ended, or did not answer in time."""


# The engine's process: everything below that touches vLLM.


class Worker:
    """One engine of vLLM, in this process.

    Args:
        folder: The checkpoint.
        options: Options of ``vllm.LLM`` beside those below.
        drafts: Tokens that vLLM's MTP proposer drafts per step; 0: none.
    """

    def __init__(self, folder: str, options: dict[str, Any], drafts: int) -> None:
        import vllm

        begin = time.perf_counter()
        if drafts:
            options["speculative_config"] = {"method": "mtp", "num_speculative_tokens": drafts}
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
            ms = _milliseconds(lambda: [self._step(tokens) for _ in range(steps)])
            answer = {"ms": ms / steps}
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
    events = recorded.profiler.kineto_results.events()
    spans = [
        (event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if str(event.device_type()).endswith("CUDA") and not event.name().startswith("Mem")
    ]
    return Kernels(spans)


def serve(request: dict[str, Any]) -> None:
    """Start an engine, then answer a call on each line of standard input."""
    from dsv4.integrations import vllm as plugin

    plugin.register()  # again, or the first time where dsv4 is not installed with its entry points
    worker = Worker(request["folder"], request["options"], request["drafts"])
    _say(worker.start())
    for line in sys.stdin:
        call = json.loads(line)
        _say(getattr(worker, call["call"])(**call["arguments"]))


def _say(answer: dict[str, Any]) -> None:
    print(f"\n{_ANSWER}{json.dumps(answer)}", flush=True)


# The process that compares.


@dataclass
class Engine:
    """An engine in a process of its own.

    Attributes:
        name: Key of ``ENGINES``.
        failed: Why it is not used any more; empty: it is.
    """

    name: str
    process: subprocess.Popen[str]
    log: Path
    failed: str = ""
    _answers: queue.Queue[str | None] = field(default_factory=queue.Queue)

    @classmethod
    def launch(
        cls, name: str, request: dict[str, Any], log: Path, program: str = __file__
    ) -> Engine:
        """Start the process; ``answer`` waits until the engine is ready.

        Args:
            name: Key of ``ENGINES``.
            request: Argument of ``serve``.
            log: File for what the engine prints.
            program: Program that calls ``serve``.
        """
        usual = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine steps when this program says so
            "VLLM_DEEP_GEMM_WARMUP": "skip",  # of sizes that are not timed
            "VLLM_PLUGINS": "dsv4",
        }
        environment = {**usual, **os.environ, **ENGINES[name]}
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, program, "--engine", json.dumps(request)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            )
        engine = cls(name, process, log)
        threading.Thread(target=engine._listen, daemon=True).start()
        return engine

    def _listen(self) -> None:
        assert self.process.stdout is not None
        with self.log.open("a") as output:
            for line in self.process.stdout:
                if line.startswith(_ANSWER):
                    self._answers.put(line.removeprefix(_ANSWER))
                else:
                    output.write(line)
        self._answers.put(None)

    def ask(self, call: str, seconds: float, **arguments: Any) -> dict[str, Any]:
        """Let the engine do something; see ``answer``."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"call": call, "arguments": arguments}) + "\n")
            self.process.stdin.flush()
        except OSError as error:
            raise EngineError(f"{self.name}: {error}: {self._last_lines()}") from error
        return self.answer(call, seconds)

    def answer(self, call: str, seconds: float) -> dict[str, Any]:
        """Wait for an answer.

        Raises:
            EngineError: if it does not come in time, or the process has ended.
        """
        try:
            line = self._answers.get(timeout=max(0.0, seconds))
        except queue.Empty:
            raise EngineError(f"{self.name}: {call} took more than {seconds:.0f} s") from None
        if line is None:
            raise EngineError(f"{self.name} ended in {call}: {self._last_lines()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_lines(self) -> str:
        errors = [line for line in self.log.read_text().splitlines() if "Error" in line]
        return " | ".join(errors[-3:])[-800:] or f"see {self.log}"

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()


@dataclass
class Comparison:
    """Runs phases on the engines that are left, and keeps what they answered.

    Attributes:
        engines: The engines.
        deadline: Reading of ``time.perf_counter`` after which no phase begins.
        out: File for the results.
        results: Answers by phase and engine.
    """

    engines: list[Engine]
    deadline: float
    out: Path
    results: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.deadline - time.perf_counter()

    def phase(self, name: str, call: str, names: Sequence[str] = (), **arguments: Any) -> None:
        """Let each engine do the same, one after another.

        Args:
            name: Key of the results.
            call: Method of ``Worker``.
            names: Engines that take part; empty: all.
            **arguments: Its arguments.
        """
        for engine in self.engines:
            if engine.failed or (names and engine.name not in names):
                continue
            if self.left < 1:
                print(f"{name}, {engine.name}: left out, no time is left", flush=True)
                continue
            begin = time.perf_counter()
            try:
                if call == "start":
                    answer = engine.answer(call, self.left)
                else:
                    answer = engine.ask(call, self.left, **arguments)
            except EngineError as error:
                engine.failed = str(error)
                answer = {"error": str(error)}
                engine.close()
            self.results.setdefault(name, {})[engine.name] = answer
            print(f"{name}, {engine.name}: {_short(answer, begin)}", flush=True)
            self.out.write_text(json.dumps(self.results, indent=1))


def _short(answer: dict[str, Any], begin: float) -> str:
    numbers = {key: value for key, value in answer.items() if isinstance(value, (int, float, str))}
    words = ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in numbers.items()
    )
    return f"{words} ({time.perf_counter() - begin:.1f} s)"


def compare(comparison: Comparison, rounds: int, steps: int, scale: int = 1) -> None:
    """Run all phases, the most telling ones first.

    Args:
        comparison: The engines.
        rounds: How often times are taken; the shortest counts.
        steps: Timed decode steps.
        scale: Divides the numbers of tokens, for small models.
    """
    run = comparison.phase
    run("start", "start")
    lengths, new = [1, 7, 130, 300, 64, 513, 1000, 33], [48] * 8
    lengths = [max(1, n // scale) for n in lengths]
    times(comparison, 0, steps, scale)
    run("texts", "texts", lengths=lengths, new=new, seed=1, alone=False)
    run("texts alone", "texts", ["parts", "drafts"], lengths=lengths, new=new, seed=1, alone=True)
    lengths_of_all, answers = mixed(64, 2000 // scale)
    run("many requests", "texts", lengths=lengths_of_all, new=answers, seed=2, alone=False)
    for requests, context in DECODES:
        options = {"requests": requests, "context": context // scale, "steps": 10}
        run(f"kernels {requests}", "decode", profile=True, **options)
    run("kernels prompt", "prompt", tokens=PROMPT // scale, profile=True)
    plain = [name for name in ENGINES if name not in DRAFTING]
    run("scores", "score", plain, lengths=[n for n in lengths if n > 1], seed=3)
    for number in range(1, rounds):
        times(comparison, number, steps, scale)


def times(comparison: Comparison, number: int, steps: int, scale: int) -> None:
    """Take all times once.

    Args:
        comparison: The engines.
        number: How often they were taken before.
        steps: Timed decode steps.
        scale: See ``compare``.
    """
    for requests, context in DECODES:
        options = {"requests": requests, "context": context // scale, "steps": steps}
        comparison.phase(f"decode {requests}, round {number}", "decode", profile=False, **options)
    tokens = PROMPT // scale
    comparison.phase(f"prompt, round {number}", "prompt", tokens=tokens, profile=False)


def mixed(count: int, most: int) -> tuple[list[int], list[int]]:
    """Return random lengths of prompts and of answers; the latter do not depend on ``most``."""
    prompts, answers = random.Random(5), random.Random(6)
    lengths = [prompts.randint(1, most) for _ in range(count)]
    return lengths, [answers.randint(1, 40) for _ in range(count)]


def same_texts(expected: dict[str, Any], actual: dict[str, Any]) -> dict[str, Any]:
    """Compare greedy texts: equal, or different from a near tie on.

    Returns:
        ``equal`` and ``texts``, ``ties`` (texts that differ from a near tie on), ``wrong`` (number
        of the text and of the token of others), and of the equal tokens' log-probabilities the
        median and the largest difference.
    """
    equal, ties, wrong, differences = 0, 0, [], []
    for number, (first, second) in enumerate(zip(expected["texts"], actual["texts"], strict=True)):
        pairs = zip(first["tokens"], second["tokens"], strict=True)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(first["tokens"]))
        differences += [
            abs(a - b)
            for a, b in zip(first["logprobs"][:same], second["logprobs"][:same], strict=True)
        ]
        if same == len(first["tokens"]):
            equal += 1
        elif first["margins"] and first["margins"][same] < NEAR_TIE:
            ties += 1
        else:
            wrong.append([number, same])
    return {
        "texts": len(expected["texts"]),
        "equal": equal,
        "ties": ties,
        "wrong": wrong,
        "median": statistics.median(differences) if differences else 0.0,
        "largest": max(differences, default=0.0),
    }


def finite(answer: dict[str, Any], new: Sequence[int] | None = None) -> str:
    """Return what is wrong with the answers to requests, or an empty string."""
    texts = answer["texts"]
    bad = [n for n, text in enumerate(texts) if not all(map(math.isfinite, text["logprobs"]))]
    if bad:
        return f"requests {bad} have log-probabilities that are not finite"
    if new is not None:
        short = [n for n, text in enumerate(texts) if len(text["tokens"]) != new[n]]
        if short:
            return f"requests {short} have another number of tokens than they asked for"
    return ""


def summary(results: dict[str, dict[str, Any]]) -> list[str]:
    """Return the lines of the final table and of the verdicts."""
    names = list(results.get("start", {}))
    lines = [f"{'ms: wall; GPU busy':<28}" + "".join(f"{name:>18}" for name in names) + "   ratio"]
    rows = [(f"decode {n}", f"kernels {n}") for n, _ in DECODES] + [("prompt", "kernels prompt")]
    for label, kernels in rows:
        wall = {name: _least(results, f"{label}, round", name) for name in names}
        busy = {name: results.get(kernels, {}).get(name, {}).get("busy_ms") for name in names}
        cells = "".join(f"{_number(wall[n]) + '; ' + _number(busy[n]):>18}" for n in names)
        ratio = _ratio(wall.get("stock"), wall.get("parts"))
        lines.append(f"{label:<28}{cells}   {ratio}")
    for phase, answers in results.items():
        for name, answer in answers.items():
            if "error" in answer:
                lines.append(f"FAILED {phase}, {name}: {answer['error']}")
            if phase.startswith("kernels") and name != "stock" and "foreign" in answer:
                lines.append(f"{phase}, {name}: foreign kernels {answer['foreign'] or 'none'}")
            if "texts" in answer:
                new = mixed(64, 2000)[1] if phase == "many requests" else None
                wrong = finite(answer, new) or "all log-probabilities finite"
                lines.append(f"{phase}, {name}: {len(answer['texts'])} texts, {wrong}")
    lines += _text_lines(results)
    scores = results.get("scores", {})
    for first, second in (("stock", "parts"), ("stock", "model"), ("parts", "model")):
        pair = [scores.get(name, {}).get("logprobs") for name in (first, second)]
        if all(pair):
            values = sorted(abs(a - b) for a, b in zip(*pair, strict=True))
            lines.append(
                f"{first} and {second}, log-probabilities of {len(values)} given tokens: median "
                f"{statistics.median(values):.3f}, 99 % {values[int(0.99 * len(values))]:.3f}, "
                f"largest {values[-1]:.3f}"
            )
    return lines


def _text_lines(results: dict[str, dict[str, Any]]) -> list[str]:
    batch, alone = results.get("texts", {}), results.get("texts alone", {})
    pairs = [
        ("parts, in a batch and alone", batch.get("parts"), alone.get("parts")),
        ("parts and drafts, in a batch", batch.get("parts"), batch.get("drafts")),
        ("parts and drafts, alone", alone.get("parts"), alone.get("drafts")),
    ]
    lines = []
    for label, first, second in pairs:
        if first and second and "texts" in first and "texts" in second:
            same = same_texts(first, second)
            verdict = "WRONG" if same["wrong"] else "right"
            lines.append(
                f"{label}: {verdict}: {same['equal']} of {same['texts']} texts equal, "
                f"{same['ties']} differ from a near tie on, wrong {same['wrong']}; "
                f"log-probabilities differ by {same['median']:.4f}, at most {same['largest']:.3f}"
            )
    for phase in ("texts", "texts alone"):
        counts = results.get(phase, {}).get("drafts", {}).get("drafts")
        if counts:
            lines.append(f"drafts so far ({phase}): {counts}")
    return lines


def _least(results: dict[str, dict[str, Any]], prefix: str, name: str) -> float | None:
    values = [
        answers[name]["ms"]
        for phase, answers in results.items()
        if phase.startswith(prefix) and "ms" in answers.get(name, {})
    ]
    return min(values, default=None)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 20 else f"{value:.1f}"


def _ratio(stock: float | None, parts: float | None) -> str:
    return f"{stock / parts:.2f}" if stock and parts else "-"


def flash_config(layers: int, experts: int) -> Any:
    """Return the configuration of Flash with fewer layers, experts and tokens."""
    from dsv4.config import ModelConfig

    whole = ModelConfig.flash()
    return whole.replace(
        num_hidden_layers=layers,
        layer_types=whole.layer_types[:layers],
        mlp_layer_types=whole.mlp_layer_types[:layers],
        n_routed_experts=experts,
        vocab_size=16384,
    )


def random_checkpoint(folder: Path, config: Any, device: str) -> None:
    """Write random weights in NVIDIA's layout, with an MTP layer.

    The head prefers one successor of each token, so that the greedy text does not depend on
    rounding, while its log-probabilities depend on the context. The draft reads the last token
    alone and knows most successors: some drafts are right and some are wrong.
    """
    import torch

    import dsv4
    from dsv4.bench.suites.random_model import Weights, random_model

    # The draft's experts are NVFP4, too: vLLM builds no others beside NVFP4 experts of main layers.
    weights = Weights(recipe="nvidia")
    model = random_model(config, torch.device(device), weights, pack=False, mtp=True)
    prefer_successors(model)
    dsv4.save(model, folder, layout="nvidia")


def prefer_successors(model: Any, strength: float = 0.15, wrong: int = 96) -> None:
    """Change embedding, head and draft of a random model as ``random_checkpoint`` says.

    Args:
        model: Not packed; changed in place.
        strength: Share of a row of the head that is the preceding token's embedding.
        wrong: Directions of embeddings that the draft reflects: its drafts after these tokens
            are wrong.
    """
    import torch

    from dsv4.ops.quantize import quantize

    with torch.no_grad():
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        size, width = embedding.shape
        generator = torch.Generator(embedding.device).manual_seed(3)
        # Successors of the first tokens are among the first ones, so that a text stays there.
        active = min(size, 512)
        order = torch.randperm(active, generator=generator, device=embedding.device)
        successor = torch.arange(size, device=embedding.device) % active
        successor[order] = order.roll(-1)
        known = torch.nn.functional.normalize(embedding[:active].float(), dim=1)
        head.mul_((1 - strength**2) ** 0.5)
        # A row of variance 1 / width has length 1.
        head[successor[:active]] += (strength * known).to(head.dtype)
        embedding.mul_(4.0 * width**0.5 / embedding.float().norm(dim=1).mean())
        for draft in model.mtp:
            reflected = torch.eye(width, device=embedding.device)
            for direction in known[:wrong]:
                reflected -= 2 * torch.outer(direction, direction @ reflected)
            draft.e_proj.set_weight(quantize(4.0 * reflected, "fp8_block"))
            draft.h_proj.set_weight(quantize(1e-3 * reflected, "fp8_block"))


def engine_options(engine: str, on_gpu: bool, scale: int) -> dict[str, Any]:
    """Return the options of ``vllm.LLM`` with which an engine is compared."""
    steps = 2 if engine in DRAFTING else 1  # tokens of a request in a decode step
    options: dict[str, Any] = {
        "max_model_len": 2 * PROMPT // scale,
        "max_num_seqs": 64,
        "max_num_batched_tokens": max(256, PROMPT // scale),
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "gpu_memory_utilization": 0.2,
    }
    if on_gpu:
        sizes = sorted(requests * steps for requests, _ in DECODES)
        options["compilation_config"] = {"cudagraph_capture_sizes": sizes}
        options["kv_cache_memory_bytes"] = 4 << 30
    else:
        options["enforce_eager"] = True
    return options


def main() -> int:
    """Run it as a program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, help="a checkpoint, or where to write one")
    parser.add_argument("--random", type=int, nargs=2, metavar=("LAYERS", "EXPERTS"))
    parser.add_argument("--engines", nargs="+", default=["stock", "parts"], choices=ENGINES)
    parser.add_argument("--draft-tokens", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=900, help="no phase begins afterwards")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("vllm_compared.json"))
    parser.add_argument("--option", action="append", default=[], metavar="NAME=JSON")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        serve(json.loads(options.engine))
        return 0
    if options.folder is None:
        parser.error("name a checkpoint")
    return run(options)


def run(
    options: argparse.Namespace, device: str = "cuda", scale: int = 1, program: str = __file__
) -> int:
    """Write the checkpoint if requested, start the engines and compare them.

    Args:
        options: The options.
        device: Where random weights are drawn.
        scale: See ``compare``.
        program: See ``Engine.launch``.
    """
    begin = time.perf_counter()
    if options.random is not None and not (options.folder / "config.json").exists():
        random_checkpoint(options.folder, flash_config(*options.random), device)
        print(f"{options.folder} is written, {time.perf_counter() - begin:.1f} s", flush=True)
    own = dict(pair.partition("=")[::2] for pair in options.option)
    engines = []
    for name in options.engines:
        values = engine_options(name, device == "cuda", scale)
        values |= {key: json.loads(value) for key, value in own.items()}
        request = {"folder": str(options.folder), "options": values}
        request["drafts"] = options.draft_tokens if name in DRAFTING else 0
        log = options.out.with_suffix(f".{name}.log")
        engines.append(Engine.launch(name, request, log, program))
    comparison = Comparison(engines, begin + options.seconds, options.out)
    try:
        compare(comparison, options.rounds, options.steps, scale)
    finally:
        for engine in engines:
            engine.close()
    for name, answer in comparison.results.get("start", {}).items():
        if answer.get("replaced") and name != "stock":
            print(f"--- {name}\n{answer['replaced']}")
    print("\n".join(summary(comparison.results)))
    print(f"{time.perf_counter() - begin:.0f} s in all")
    return int(any(engine.failed for engine in engines))


if __name__ == "__main__":
    sys.exit(main())
