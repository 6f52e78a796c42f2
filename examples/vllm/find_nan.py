"""Break a weight of a served model, and let DSV4_VLLM_CHECK=1 say where the NaN came from.

    python examples/vllm/find_nan.py small4 --random 4 16

Two engines start, with CUDA graphs: one whose boundaries are watched, one as it
is. The first serves requests as they are (nothing may be logged), with one row of the embedding
that is NaN (the log must name the one request that has the token, and its position), and with a
weight of a layer that is NaN (the log must name the layer, the part and a request). Then both are
timed. ``--random LAYERS EXPERTS`` first writes a checkpoint of Flash's widths with random weights.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compare import engine_options
from compare_processes import PROGRAM, Engine

REQUESTS, LENGTH, NEW = 8, 48, 6
WHO, WHERE = 5, 17  # the request, and the position in it, that have the token that is NaN
TOKEN = 7


@dataclass(frozen=True)
class Names:
    """Names in a design's model.

    Attributes:
        embedding: A parameter with a row for each token.
        norm: A parameter of a layer, ``{}`` for its number.
        part: The part of the layer that must be named.
    """

    embedding: str
    norm: str
    part: str


DESIGNS = {
    "parts": Names(
        "model.embed_tokens.weight",
        "model.layers.{}.attn.q_norm.weight",
        "model.layers.{}.attn",
    ),
    "model": Names(
        "model.model.embed_tokens.weight",
        "model.model.layers.{}.self_attn.q_a_norm.weight",
        "model.model.layers.{}.self_attn",
    ),
}


def prompts(vocabulary: int) -> list[list[int]]:
    """Return random prompts, of which one has ``TOKEN``, once."""
    draw = random.Random(3)
    made = [[draw.randrange(TOKEN + 1, vocabulary) for _ in range(LENGTH)] for _ in range(REQUESTS)]
    made[WHO][WHERE] = TOKEN
    return made


def wrong_token(answer: dict[str, Any]) -> str:
    """Return what is wrong with the incidents of a NaN in the embedding; empty: nothing."""
    lines, name = answer["incidents"], answer["requests"][WHO]
    if len(lines) != 1:
        return f"{len(lines)} incidents, expected one: {lines}"
    if f"request {name}" not in lines[0] or not _at(lines[0], WHERE):
        return f"expected request {name} at position {WHERE}: {lines[0]}"
    return ""


def _at(line: str, position: int) -> bool:
    return f"at position {position}" in line.replace(".", " ").split("The ")[0]


def wrong_layer(answer: dict[str, Any], part: str) -> str:
    """Return what is wrong with the incidents of a NaN in a layer; empty: nothing."""
    lines = answer["incidents"]
    if not lines:
        return "no incident, expected one for each request that is named"
    for line in lines:
        if part not in line.split(". The ")[0]:
            return f"expected {part}: {line}"
        if not any(f"request {name}" in line for name in answer["requests"]):
            return f"expected one of the requests {answer['requests']}: {line}"
        if "at position" not in line:
            return f"expected a position: {line}"
    return ""


@dataclass
class Hunt:
    """The engines, and what was wrong so far.

    Attributes:
        watched: The engine with ``DSV4_VLLM_CHECK=1``.
        plain: The other one.
        deadline: Reading of ``time.perf_counter`` until which answers are waited for.
        problems: Sentences.
    """

    watched: Engine
    plain: Engine
    deadline: float
    problems: list[str]

    def ask(self, engine: Engine, call: str, **arguments: Any) -> dict[str, Any]:
        """Let an engine do something."""
        return engine.ask(call, self.deadline - time.perf_counter(), **arguments)

    def check(self, what: str, answer: dict[str, Any], problem: str) -> None:
        """Print a verdict and what was logged."""
        print(f"{what}: {problem or 'as expected'}", flush=True)
        for line in answer["incidents"][:3]:
            print(f"  {line}", flush=True)
        if problem:
            self.problems.append(f"{what}: {problem}")

    def run(self, names: Names, layer: int, vocabulary: int) -> None:
        """Break one weight after the other."""
        options = {"prompts": prompts(vocabulary), "new": NEW}
        answer = self.ask(self.watched, "poisoned", weight="", row=None, **options)
        healthy = f"{len(answer['incidents'])} incidents" if answer["incidents"] else ""
        self.check("no weight is NaN", answer, healthy)
        answer = self.ask(self.watched, "poisoned", weight=names.embedding, row=TOKEN, **options)
        self.check(f"row {TOKEN} of {names.embedding} is NaN", answer, wrong_token(answer))
        weight = names.norm.format(layer)
        answer = self.ask(self.watched, "poisoned", weight=weight, row=None, **options)
        part = names.part.format(layer)
        self.check(f"{weight} is NaN", answer, wrong_layer(answer, part))

    def times(self, scale: int, steps: int) -> None:
        """Time a decode step of 1 and of 8 requests, watched and not, two times each."""
        for requests in (1, 8):
            options = {"requests": requests, "context": 1024 // scale, "steps": steps}
            least = {
                engine.name: min(
                    self.ask(engine, "decode", profile=False, **options)["ms"] for _ in range(2)
                )
                for engine in (self.plain, self.watched)
            }
            plain, watched = least[self.plain.name], least[self.watched.name]
            print(
                f"decode step of {requests}: {plain:.2f} ms, watched {watched:.2f} ms "
                f"({watched / plain:.2f})",
                flush=True,
            )


def run(
    options: argparse.Namespace, device: str = "cuda", scale: int = 1, program: str = PROGRAM
) -> int:
    """Write the checkpoint if requested, start the engines, break weights and take times.

    Args:
        options: The options.
        device: Where random weights are drawn.
        scale: Divides the numbers of tokens, for small models.
        program: See ``Engine.launch``.
    """
    begin = time.perf_counter()
    if options.random is not None and not (options.folder / "config.json").exists():
        from compare_weights import flash_config, random_checkpoint

        random_checkpoint(options.folder, flash_config(*options.random), device)
        print(f"{options.folder} is written, {time.perf_counter() - begin:.1f} s", flush=True)
    config = json.loads((options.folder / "config.json").read_text())
    engines = []
    for name in (f"{options.design}-checked", options.design):
        values = engine_options(0, device == "cuda", scale)
        own = dict(pair.partition("=")[::2] for pair in options.option)
        values |= {key: json.loads(value) for key, value in own.items()}
        request = {"folder": str(options.folder), "options": values, "drafts": 0}
        engines.append(
            Engine.launch(name, request, options.out.with_suffix(f".{name}.log"), program)
        )
    hunt = Hunt(*engines, begin + options.seconds, [])
    try:
        for engine in engines:
            seconds = engine.answer("start", options.seconds)["seconds"]
            print(f"{engine.name}: started in {seconds:.0f} s", flush=True)
        layer = config["num_hidden_layers"] // 2
        hunt.run(DESIGNS[options.design], layer, config["vocab_size"])
        hunt.times(scale, options.steps)
    finally:
        for engine in engines:
            engine.close()
    print("\n".join(hunt.problems) or "every NaN was found where it was made")
    print(f"{time.perf_counter() - begin:.0f} s in all")
    return int(bool(hunt.problems))


def main() -> int:
    """Run it as a program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a checkpoint, or where to write one")
    parser.add_argument("--random", type=int, nargs=2, metavar=("LAYERS", "EXPERTS"))
    parser.add_argument("--design", choices=list(DESIGNS), default="parts")
    parser.add_argument("--seconds", type=float, default=300, help="answers are waited for so long")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("vllm_find_nan"), help="stem of the logs")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=JSON")
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
