"""``python -m dsv4 generate``: text in, a stream of text out."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv4.commands.ranks import Process, joined_process
from dsv4.parallel import processes
from dsv4.parallel.context import TENSOR

if TYPE_CHECKING:
    from dsv4.serving import Runner, SamplingOptions
    from dsv4.text import Answer, EffortTable, TextGenerator, Tokenizer
    from dsv4.text.generate import ChatRequest, TextRequest

_DESCRIPTION = """\
Continue a text, or answer a message or a conversation.

The answer goes to stdout as it comes, reasoning to stderr, calls of tools to stdout, each a line of
JSON. Without --temperature and --top-p the checkpoint's generation_config.json decides; without
that file both are 1."""
_EXAMPLES = """\
examples:
  python -m dsv4 generate DeepSeek-V4-Flash-NVFP4 --prompt "The capital of France is"
  python -m dsv4 generate DeepSeek-V4-Flash-NVFP4 --chat "Why is the sky blue?" --effort max
  python -m dsv4 generate DeepSeek-V4-Flash-NVFP4 --chat conversation.json --no-thinking --stats
  torchrun --nproc-per-node 4 -m dsv4 generate DeepSeek-V4-Flash-NVFP4 --prompt "On 4 GPUs"

A conversation is a JSON list of messages in OpenAI's form, or a table with messages, tools and
response_format."""
_FILE_KEYS = ("messages", "tools", "response_format")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the options."""
    parser = commands.add_parser(
        "generate",
        help="continue a text or answer a conversation",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = parser.add_argument
    option("path", metavar="PATH", help="folder of a checkpoint, with its tokenizer.json")
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--prompt", metavar="TEXT", help="beginning of a text to continue")
    text.add_argument("--chat", metavar="TEXT|FILE.json", help="a message, or a conversation")
    option("--system", metavar="TEXT", help="system message before --chat TEXT")
    option(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        help="whether the model reasons before it answers --chat (it does)",
    )
    option("--effort", metavar="NAME", help="of reasoning, by the checkpoint's table (high)")
    option(
        "--effort-table",
        choices=("original", "0731"),
        help="for a checkpoint without encoding/encoding_dsv4.py",
    )
    option("--max-new-tokens", type=int, default=1024, metavar="N", help="at most (1024)")
    option("--temperature", type=float, metavar="T", help="0: the most probable token")
    option("--top-p", type=float, metavar="P", help="probability to choose from")
    option("--seed", type=int, metavar="N", help="of random numbers")
    option("--stop", action="append", default=[], metavar="TEXT", help="ends the answer; repeats")
    option(
        "--speculate",
        choices=("auto", "mtp", "dspark", "none"),
        default="auto",
        help="draft tokens by the checkpoint's draft layers, if it has any (auto), or by these",
    )
    option(
        "--draft-tokens",
        type=int,
        metavar="N",
        help="drafts per step (default: 2 of MTP, all of DSpark, 1 with experts in host memory)",
    )
    option(
        "--confidence-threshold",
        type=float,
        metavar="P",
        help="verify DSpark drafts that are accepted with at least this probability (by costs)",
    )
    option("--device", metavar="NAME", help="where the model runs (cuda if there is a GPU, or cpu)")
    option(
        "--parallel",
        choices=("tp", "dp"),
        help="how several processes share the model (tp); dp is for many sequences",
    )
    option(
        "--host-experts",
        type=_host_experts,
        metavar="auto|BYTES",
        help="routed experts in host memory: as few as free memory allows, or that many bytes",
    )
    option("--stats", action="store_true", help="print counts and times to stderr")


def _host_experts(text: str) -> str | int:
    if text == "auto":
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor a number of bytes")
    return int(text)


@dataclass(frozen=True)
class Task:
    """Request for text, checked before the model is read.

    Attributes:
        tokenizer: Of the checkpoint.
        efforts: Its table; None: it has none.
        options: How tokens are chosen.
        prompt: A text to continue; None: a chat.
        chat: Arguments of ``TextGenerator.chat``.
        prompt_tokens: Number of tokens of the prompt.
    """

    tokenizer: Tokenizer
    efforts: EffortTable | None
    options: SamplingOptions
    prompt: str | None
    chat: Mapping[str, Any] = field(default_factory=dict)
    prompt_tokens: int = 0


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    try:
        task = _task(options)
    except TypeError as error:  # of a field in a file of messages
        raise ValueError(str(error)) from error
    for name in ("draft_tokens", "confidence_threshold"):
        if getattr(options, name) is not None and options.speculate == "none":
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} is given and --speculate none, wanted a draft")
    if options.parallel is not None and processes.launched() is None:
        raise ValueError(
            f"--parallel is {options.parallel!r} in one process, wanted several, which torchrun "
            "starts"
        )
    with joined_process(_device(options.device), options.parallel or TENSOR) as process:
        _generate(options, task, process)
    return 0


def _generate(options: argparse.Namespace, task: Task, process: Process) -> None:
    """Load the model and print the answer; other processes than the first only take part."""
    import dsv4
    from dsv4.serving import Runner
    from dsv4.text import TextGenerator

    began = time.perf_counter()
    speculate = None if options.speculate == "none" else options.speculate
    # The runner below has graphs of its own.
    model = dsv4.load(
        options.path,
        prepare="kernels",
        mtp=None if speculate else False,
        progress=sys.stderr.isatty(),
        host_experts=options.host_experts,
        **process.load_options,
    )
    loaded = time.perf_counter() - began
    tokens = max(task.prompt_tokens + task.options.max_new_tokens, 2)
    with Runner(
        model,
        max_sequences=1,
        max_tokens=tokens,
        prefix_sequences=0,
        speculate=speculate,
        draft_tokens=options.draft_tokens,
        confidence_threshold=options.confidence_threshold,
    ) as runner:
        if not process.leads:
            runner.follow()
            return
        generator = TextGenerator(runner, task.tokenizer, efforts=task.efforts)
        request, times = _stream(generator, task, options.stop)
        drafts = _drafts(runner)
    if options.stats:
        print(_statistics(request, times, loaded, process.device), file=sys.stderr)
        print(drafts, file=sys.stderr)


def _drafts(runner: Runner) -> str:
    """What the drafts brought, or why there were none."""
    if runner.drafting.plan is None:
        return str(runner.drafting)
    return f"{runner.drafting}: {runner.draft_counts}"


def _task(options: argparse.Namespace) -> Task:
    """Everything but the model.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if an option does not fit the others or the checkpoint.
    """
    from dsv4.text import EffortTable, Tokenizer, chat_prompt, completion_prompt
    from dsv4.text.defaults import sampling_defaults
    from dsv4.text.effort import TABLES

    folder = Path(options.path)
    if not folder.is_dir():
        raise ValueError(f"PATH is {options.path!r}, wanted the folder of a checkpoint")
    tokenizer = Tokenizer.from_path(folder)
    changes = {
        name: getattr(options, name)
        for name in ("temperature", "top_p", "seed", "max_new_tokens")
        if getattr(options, name) is not None
    }
    sampling = dataclasses.replace(sampling_defaults(folder), **changes)
    efforts = TABLES.get(options.effort_table) or EffortTable.from_path(folder)
    if options.prompt is not None:
        _refuse_chat_options(options)
        prompt = completion_prompt(options.prompt)
        chat: dict[str, Any] = {}
    else:
        chat = _chat(options)
        if chat["thinking"] and efforts is None:
            raise ValueError(
                f"{folder} has no encoding/encoding_dsv4.py, wanted --effort-table or --no-thinking"
            )
        if not chat["thinking"] and options.effort_table is not None:
            raise ValueError("--effort-table is given and --no-thinking, wanted one of the two")
        prompt = chat_prompt(**chat, efforts=efforts)
    number = len(prompt.ids(tokenizer))
    _check_length(folder, number, sampling.max_new_tokens)
    return Task(tokenizer, efforts, sampling, options.prompt, chat, number)


def _check_length(folder: Path, prompt: int, new: int) -> None:
    """Raise if the model's positions are too few, before its weights are read."""
    from dsv4.config import ModelConfig

    if not (folder / "config.json").is_file():  # ``load`` says what is missing
        return
    most = ModelConfig.from_path(folder).max_position_embeddings
    if prompt + new > most:
        raise ValueError(
            f"--max-new-tokens is {new} and the prompt has {prompt} tokens, wanted at most {most} "
            "together (max_position_embeddings)"
        )


def _refuse_chat_options(options: argparse.Namespace) -> None:
    for name in ("system", "thinking", "effort", "effort_table"):
        if getattr(options, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} is for --chat, and --prompt is given")


def _chat(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of ``TextGenerator.chat``."""
    thinking = options.thinking is not False
    chat: dict[str, Any] = {"thinking": thinking, "effort": options.effort}
    if options.chat.endswith(".json"):
        if options.system is not None:
            raise ValueError("--system is for --chat TEXT, and --chat is a file")
        return {**chat, **_conversation(Path(options.chat))}
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    return {**chat, "messages": [*system, {"role": "user", "content": options.chat}]}


def _conversation(file: Path) -> dict[str, Any]:
    """Messages, tools and response format of a file."""
    import json

    from dsv4.config.json_file import read_bytes

    try:
        values = json.loads(read_bytes(file))
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {str(file)!r}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if isinstance(values, list):
        return {"messages": values}
    unknown = sorted(set(values) - set(_FILE_KEYS)) if isinstance(values, dict) else []
    if not isinstance(values, dict) or unknown or "messages" not in values:
        raise ValueError(
            f"{file} holds {', '.join(unknown) or type(values).__name__}, wanted a list of "
            f"messages, or a table with {', '.join(_FILE_KEYS)}"
        )
    return values


def _device(name: str | None) -> str:
    """The device to run on."""
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(name).type
    except RuntimeError:
        raise ValueError(f"--device is {name!r}, wanted cuda, cuda:N or cpu") from None
    if kind not in ("cuda", "cpu"):
        raise ValueError(f"--device is {name!r}, wanted cuda, cuda:N or cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device is {name!r}, and PyTorch finds no GPU")
    return name


@dataclass(frozen=True)
class _Times:
    """Seconds until the first piece and until the end."""

    first: float
    whole: float


def _stream(
    generator: TextGenerator, task: Task, stops: Sequence[str]
) -> tuple[TextRequest | ChatRequest, _Times]:
    """Print an answer as it comes."""
    began = time.perf_counter()
    request: TextRequest | ChatRequest
    if task.prompt is not None:
        request = generator.complete(task.prompt, stop=stops, options=task.options)
    else:
        request = generator.chat(**task.chat, stop=stops, options=task.options)
    printer = _Printer()
    first = None
    for piece in request:
        first = time.perf_counter() - began if first is None else first
        printer.show(piece)
    whole = time.perf_counter() - began
    printer.finish(None if task.prompt is not None else request.answer)  # type: ignore[union-attr]
    return request, _Times(whole if first is None else first, whole)


class _Printer:
    """Prints content to stdout and reasoning to stderr, each ended by a line break."""

    def __init__(self) -> None:
        self._last = {sys.stdout: "\n", sys.stderr: "\n"}
        for stream in self._last:
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")

    def show(self, piece: Any) -> None:
        """Print a piece of text or an event of a chat."""
        from dsv4.text.answer_events import ContentText, ReasoningText

        if isinstance(piece, ReasoningText):
            self._write(sys.stderr, piece.text)
        elif isinstance(piece, (str, ContentText)):
            self._end_line(sys.stderr)
            self._write(sys.stdout, piece if isinstance(piece, str) else piece.text)

    def finish(self, answer: Answer | None) -> None:
        """Print the calls of a chat."""
        import json

        self._end_line(sys.stderr)
        self._end_line(sys.stdout)
        for call in answer.calls if answer else ():
            line = {"name": call.name, "arguments": call.values()}
            self._write(sys.stdout, json.dumps(line, ensure_ascii=False) + "\n")
        for call in answer.incomplete if answer else ():
            self._write(sys.stderr, f"a call of {call.name!r} is not complete\n")

    def _write(self, stream: Any, text: str) -> None:
        if text:
            self._last[stream] = text[-1]
            stream.write(text)
            stream.flush()

    def _end_line(self, stream: Any) -> None:
        if self._last[stream] != "\n":
            self._write(stream, "\n")


def _statistics(
    request: TextRequest | ChatRequest, times: _Times, loaded: float, device: str
) -> str:
    """Counts and times in a few lines."""
    import torch

    usage = request.usage
    number = usage.completion_tokens
    reasoning = f" ({usage.reasoning_tokens} of reasoning)" if usage.reasoning_tokens else ""
    rate = (number - 1) / (times.whole - times.first) if times.whole > times.first else 0.0
    lines = [
        f"{usage.prompt_tokens} prompt tokens, {number} new ones{reasoning}, "
        f"ended by {request.finish_reason}",
        f"loaded in {loaded:.1f} s, first text after {times.first * 1e3:.0f} ms, "
        f"then {rate:.1f} tokens/s",
    ]
    if torch.device(device).type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        lines.append(f"at most {peak / 1e9:.2f} GB of GPU memory")
    return "\n".join(lines)
