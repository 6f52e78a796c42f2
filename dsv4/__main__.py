"""The command line: ``python -m dsv4``."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # PyTorch says so when it is imported; no command needs NumPy
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)

from dsv4 import commands as command_modules
from dsv4.compilation.versions import Versions
from dsv4.config import ACTIVATIONS, ModelConfig
from dsv4.cute.runtime.architectures import EVERY_ARCHITECTURE
from dsv4.parallel import processes
from dsv4.parallel.context import MODES, TENSOR, Ranks

_PRESETS = ("flash", "pro")
_BOTH = ("bf16", "nvfp4")
_WARMUP = """\
Compile all kernels of a model for a GPU that need not be there.

They stay on disk, where this user's processes find them. With --out they also go into one file, a
bundle; a process uses it if $DSV4_KERNELS names it, for the same versions of dsv4, Triton and
CuTeDSL."""
_EXAMPLES = """\
examples:
  python -m dsv4 warmup --arch sm_90a --preset flash
  python -m dsv4 warmup --arch sm_90a --preset flash --ranks 4
  python -m dsv4 warmup --arch sm_90a --preset both --out sm_90a.dsv4
  python -m dsv4 warmup --arch sm_100a --config DeepSeek-V4-Flash --activation nvfp4"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    if options.command in command_modules.NAMES:
        return command_modules.run(options)
    return command_modules.guarded(options.command, lambda: _warmup(options))


def version() -> str:
    """Versions of this package and of what compiles its kernels."""
    versions = Versions.current()
    compilers = {"Triton": versions.triton, "CuTeDSL": versions.cutedsl}
    said = ", ".join(f"{name} {number or 'not installed'}" for name, number in compilers.items())
    return f"dsv4 {versions.dsv4} ({said}; kernels {versions.sources[:12]})"


class _Version(argparse.Action):
    """Prints the versions, which are looked up only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(version())
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m dsv4", description="DeepSeek-V4 in NVFP4.", formatter_class=raw
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print versions and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    warmup = commands.add_parser(
        "warmup",
        help="compile all kernels of a model, for a GPU that need not be there",
        description=_WARMUP,
        epilog=_EXAMPLES,
        formatter_class=raw,
    )
    add = warmup.add_argument
    add("--arch", required=True, choices=tuple(EVERY_ARCHITECTURE.values()), help="of the GPU")
    model = warmup.add_mutually_exclusive_group()
    model.add_argument("--preset", choices=(*_PRESETS, "both"), help="published models (both)")
    model.add_argument("--config", metavar="PATH", help="a config.json, or the folder of one")
    add(
        "--activation",
        choices=(*ACTIVATIONS, "both"),
        default="both",
        help="inputs of NVFP4 layers (both: bf16 and nvfp4)",
    )
    add("--ranks", type=_positive, default=1, metavar="N", help="of one of N GPUs (1)")
    add("--parallel", choices=MODES, help="how they share the model (tp)")
    add("--max-tokens", type=_positive, default=8192, metavar="N", help="of a step (8192)")
    add("--workers", type=_positive, metavar="N", help="processes (as many as processors)")
    add("--out", metavar="FILE", help="write a bundle")
    add("--quiet", action="store_true", help="print neither progress nor what was done")
    command_modules.add(commands)
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"is {text!r}, wanted an integer above 0")
    return int(text)


def configurations(options: argparse.Namespace) -> dict[str, ModelConfig]:
    """Return the requested models by their names in messages."""
    both = _BOTH if options.activation == "both" else (options.activation,)
    models: dict[str, ModelConfig] = {}
    for activation in both:
        if options.config is not None:
            if not Path(options.config).exists():
                raise FileNotFoundError(
                    f"--config is {options.config!r}, wanted a config.json or the folder of one"
                )
            config = ModelConfig.from_path(options.config, activation=activation)
            models[f"{options.config}, {activation} activations"] = config
            continue
        asked = _PRESETS if options.preset in (None, "both") else (options.preset,)
        for preset in asked:
            config = getattr(ModelConfig, preset)(activation=activation)
            models[f"{preset}, {activation} activations"] = config
    return models


def _warmup(options: argparse.Namespace) -> int:
    from dsv4.compilation import bundle, launch_recorder
    from dsv4.compilation.warmup import compile_model

    reason = launch_recorder.impossible()
    if reason is not None:
        raise RuntimeError(f"Triton kernels cannot be compiled: {reason}")
    if options.out is not None and not Path(options.out).absolute().parent.is_dir():
        raise ValueError(f"--out is {options.out!r}, and {Path(options.out).parent} is no folder")
    if options.parallel is not None and options.ranks == 1:
        raise ValueError(f"--parallel is {options.parallel!r} and --ranks is 1, wanted 2 or more")
    images: list[bundle.Compiled] = []
    failed: dict[str, str] = {}
    for name, config in configurations(options).items():
        done, outcome = compile_model(
            config,
            options.arch,
            options.max_tokens,
            progress=not options.quiet,
            workers=options.workers,
            use_list=options.out is None,
            ranks=Ranks(options.ranks, options.parallel or TENSOR),
        )
        if not options.quiet:
            print(f"{name}: {str(done).partition(chr(10))[0]}")
        if done.skipped:
            raise RuntimeError(f"{name}: Triton kernels were left out: {done.skipped}")
        images += outcome.images()
        failed |= outcome.failed
    for kernel, why in failed.items():
        print(f"failed: {kernel}: {why}", file=sys.stderr)
    if failed:
        return 1
    if options.out is not None:
        content = bundle.encode(options.arch, images, Versions.current())
        bundle.write(options.out, content)
        if not options.quiet:
            count = len({image.key for image in images})
            print(f"{options.out}: {count} kernels, {len(content) / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    processes.run(main)
