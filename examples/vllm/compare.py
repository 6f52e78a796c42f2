"""Compare vLLM as it is with vLLM on dsv4's kernels: times, kernels, tokens, NaN.

    python examples/vllm/compare.py nvidia/DeepSeek-V4-Flash-NVFP4
    python examples/vllm/compare.py small --random 12 32 --engines stock parts drafts
    python examples/vllm/compare.py small_ds --random 12 32 --engines parts drafts --draft dspark

``--random LAYERS EXPERTS`` first writes a checkpoint of Flash's widths with random weights, which
fits one GPU. Engines: ``stock`` is vLLM alone, ``parts`` has dsv4's kernels in vLLM's model,
``model`` is dsv4's model under vLLM's engine, ``drafts`` is ``parts`` with vLLM's MTP proposer, or
with DSpark's (``--draft dspark``).

Each engine is a process. All start at the same time, then one at a time works, so that no time
contains another engine's work. After every phase the results so far are printed and written to
``--out``; an engine that fails or is late is left out from there on.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compare_processes import DRAFTING, ENGINES, PROGRAM, Engine, EngineError

DECODES = ((1, 1024), (8, 1024), (64, 512))  # requests, tokens of each before the steps
PROMPT = 4096
REQUESTS = 200  # of random lengths
DRAFTED = {"mtp": 1, "dspark": 5}  # tokens of a step, unless --draft-tokens says otherwise
# Log-probabilities of one text, computed in steps of other sizes, differ by rounding. Where two
# tokens are closer than this, either may be the greedy one.
NEAR_TIE = 0.75


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
    lengths_of_all, answers = mixed(max(24, REQUESTS // scale), 2000 // scale)
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
                new = mixed(REQUESTS, 2000)[1] if phase == "many requests" else None
                wrong = finite(answer, new) or "all log-probabilities finite"
                lines.append(f"{phase}, {name}: {len(answer['texts'])} texts, {wrong}")
    lines += _text_lines(results) + compilation_lines(results)
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


def compilation_lines(results: dict[str, dict[str, Any]]) -> list[str]:
    """Return what each engine compiled after its start; dsv4's kernels should all be warm by then.

    Kernels of others are those that Triton compiles at their first launch, or finds on a disk.
    """
    lines = []
    for name in results.get("start", {}):
        later = {phase: answers.get(name, {}) for phase, answers in results.items()}
        later.pop("start")
        own = {phase: a["compiled_names"] for phase, a in later.items() if a.get("compiled")}
        others = {
            phase: a["first_launches"] for phase, a in later.items() if a.get("first_launches")
        }
        count = sum(sum(names.values()) for names in own.values())
        lines.append(f"{name}: {count} kernels of dsv4 compiled after the start{_named(own)}")
        lines += [f"  {phase}: {text}" for phase, a in later.items() for text in a.get("late", ())]
        if others:
            count = sum(sum(names.values()) for names in others.values())
            lines.append(f"{name}: {count} first launches of other Triton kernels{_named(others)}")
    return lines


def _named(phases: dict[str, dict[str, int]]) -> str:
    return "".join(f"; {phase}: {', '.join(names)}" for phase, names in phases.items())


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


def engine_options(drafts: int, on_gpu: bool, scale: int) -> dict[str, Any]:
    """Return the options of ``vllm.LLM`` with which an engine is compared.

    Args:
        drafts: Tokens that it drafts per step.
        on_gpu: Whether it runs on a GPU, where steps are captured.
        scale: See ``compare``.
    """
    steps = 1 + drafts  # tokens of a request in a decode step
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
    parser.add_argument("--draft", choices=list(DRAFTED), default="mtp")
    parser.add_argument("--draft-tokens", type=int)
    parser.add_argument("--layout", choices=["nvidia", "deepseek"], default="nvidia")
    parser.add_argument("--seconds", type=float, default=900, help="no phase begins afterwards")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("vllm_compared.json"))
    parser.add_argument("--option", action="append", default=[], metavar="NAME=JSON")
    options = parser.parse_args()
    if options.folder is None:
        parser.error("name a checkpoint")
    return run(options)


def run(
    options: argparse.Namespace, device: str = "cuda", scale: int = 1, program: str = PROGRAM
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
        from compare_weights import flash_config, random_checkpoint

        config = flash_config(*options.random, options.draft)
        random_checkpoint(options.folder, config, device, options.layout)
        print(f"{options.folder} is written, {time.perf_counter() - begin:.1f} s", flush=True)
    own = dict(pair.partition("=")[::2] for pair in options.option)
    engines = []
    for name in options.engines:
        drafts = (options.draft_tokens or DRAFTED[options.draft]) if name in DRAFTING else 0
        values = engine_options(drafts, device == "cuda", scale)
        values |= {key: json.loads(value) for key, value in own.items()}
        request = {"folder": str(options.folder), "options": values}
        request |= {"drafts": drafts, "draft": options.draft}
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
