"""Options of ``python -m dsv4.bench model``, checked."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dsv4.bench.cases import PRESETS
from dsv4.bench.problem import UsageError
from dsv4.bench.suites.hosted_steps import SLOT_STEPS
from dsv4.bench.suites.random_model import RECIPES, WEIGHTS, Weights
from dsv4.config import ACTIVATIONS, DSparkConfig, ModelConfig
from dsv4.kv_cache.layer_cache import ROLLBACK
from dsv4.layers.host_experts import HostExperts
from dsv4.parallel.context import DATA, MODES, TENSOR, Ranks
from dsv4.parallel.mailboxes import MOST_RANKS
from dsv4.parallel.split import check_divides
from dsv4.serving.drafting import DSPARK, HOSTED_TOKENS, METHODS, MTP, MTP_TOKENS

STEP, KERNELS, RUNNER, GENERATE, EAGER = "step", "kernels", "runner", "generate", "eager"
DETERMINISTIC = "deterministic"
USUAL_COLUMNS = (STEP, KERNELS, RUNNER, GENERATE, EAGER)
COLUMNS = (*USUAL_COLUMNS, DETERMINISTIC)
ROUTING, CHECKPOINT = "random", "checkpoint"  # whose router weights decide
CHUNK = 2048  # most prompt tokens of a runner's step
WARM_STEPS = 4  # decode steps before those that are timed
NOT_BEGUN = "not begun: --limit is "
LEFT_OUT = "left out: "  # rows that do not fit
_SPARE = 2  # tokens that no sequence reaches while it is timed


@dataclass(frozen=True)
class Sizes:
    """Values of the options that were not given.

    Attributes:
        preset: Model.
        tokens: Batch sizes.
        context: Tokens before the step.
        prompts: Lengths of prompts.
        steps: Timed decode steps of a runner and of ``generate``.
    """

    preset: str
    tokens: tuple[int, ...]
    context: tuple[int, ...]
    prompts: tuple[int, ...]
    steps: int


USUAL_GPU = Sizes("flash", (1, 8, 64), (4096,), (21, 512, 4096, 32768), 32)
USUAL_CPU = Sizes("tiny", (1, 2), (64,), (5, 21), 4)


@dataclass(frozen=True)
class Budget:
    """Seconds after which no measurement begins.

    Attributes:
        seconds: None: there is no limit.
        begin: Reading of ``time.perf_counter`` that they count from.
    """

    seconds: float | None = None
    begin: float = field(default_factory=time.perf_counter)

    def spent(self) -> str | None:
        """Return why nothing more is started, or None."""
        if self.seconds is None or time.perf_counter() - self.begin < self.seconds:
            return None
        return f"{NOT_BEGUN}{self.seconds:g} s, which had passed"


@dataclass(frozen=True)
class DraftRequest:
    """Drafts that are measured.

    Attributes:
        method: ``"mtp"`` or ``"dspark"``.
        tokens: Drafts per step.
        share: Share of drafts that counts as right; None: what the model verifies.
        threshold: Least probability of acceptance of a draft that is verified, by its confidence;
            None: by costs, or there is no confidence.
    """

    method: str
    tokens: int
    share: float | None = None
    threshold: float | None = None

    @property
    def threshold_words(self) -> str:
        """How the threshold is chosen; empty: there is none."""
        if self.method != DSPARK:
            return ""
        return "by costs" if self.threshold is None else f"{self.threshold:g}"


@dataclass(frozen=True)
class ModelRequest:
    """The model, its storage, and the measurements asked for.

    Attributes:
        preset: Key of ``PRESETS``, or the name of a checkpoint's folder.
        config: Configuration, with the experts and layers that were asked for.
        weights: How the matrices are stored; of a checkpoint, the seed of the prompts alone counts.
        checkpoint: What is loaded; None: random weights are drawn.
        tokens: Batch sizes.
        contexts: Tokens of each sequence before a step.
        prompts: Lengths of prompts.
        columns: Figures to time, some of ``COLUMNS``.
        steps: Timed decode steps of a runner and of ``generate``.
        replays: Timed replays of a captured step; eager steps and prompts are timed fewer times.
        prefill_limit: Most prompt tokens that are processed to bring a batch to its context.
        budget: Seconds after which no measurement begins.
        device: Where.
        ranks: Ranks that share the model.
        emulated: Whether this process is one of them and emulates the others.
        parallel: How they share it; with ``"dp"`` each rank has ``tokens`` sequences of its own.
        drafts: Drafts to measure; None: none.
        host_experts: Which experts lie in host memory, ``"auto"`` until that is resolved; None: all
            are on the device.
        left_out: Rows (tokens, context) that are not measured, and the reasons.
        trace: File for the Chrome trace of the captured step; None: no trace.
    """

    preset: str
    config: ModelConfig
    weights: Weights
    checkpoint: Path | None
    tokens: tuple[int, ...]
    contexts: tuple[int, ...]
    prompts: tuple[int, ...]
    columns: tuple[str, ...]
    steps: int
    replays: int
    prefill_limit: int
    budget: Budget
    device: torch.device
    ranks: int = 1
    emulated: bool = False
    parallel: str = TENSOR
    drafts: DraftRequest | None = None
    host_experts: HostExperts | str | None = None
    left_out: Mapping[tuple[int, int], str] = field(default_factory=dict)
    trace: Path | None = None

    @classmethod
    def of(
        cls, options: argparse.Namespace, device: torch.device, processes: int = 1
    ) -> ModelRequest:
        """Check the command's options.

        Args:
            options: The options.
            device: Where.
            processes: Processes that ``torchrun`` started.

        Raises:
            UsageError: naming the argument, the value found and the value expected.
        """
        _check_output(options)
        usual = USUAL_GPU if device.type == "cuda" else USUAL_CPU
        source = _source(options, usual)
        ranks = _ranks(options, processes)
        request = cls(
            preset=source.preset,
            config=source.config,
            weights=source.weights,
            checkpoint=source.checkpoint,
            tokens=_distinct("--tokens", options.tokens or usual.tokens),
            contexts=_distinct("--context", options.context or usual.context),
            prompts=_prompts(options.prompts, usual),
            columns=_columns(options.columns),
            steps=options.steps or usual.steps,
            replays=getattr(options, "repeat", 50 if device.type == "cuda" else 5),
            prefill_limit=options.prefill_limit,
            budget=Budget(options.limit),
            device=device,
            ranks=ranks,
            emulated=options.emulate_peers is not None,
            parallel=_parallel(options, ranks),
            drafts=_drafts(options, source.config, options.host_experts is not None),
            host_experts=_host_experts(options, ranks),
            trace=None if options.trace is None else Path(options.trace),
        )
        request.check_positions()
        request.check_ranks()
        request.check_trace()
        if options.profile and KERNELS not in request.columns:
            columns = ",".join(request.columns)
            raise UsageError(f"--profile: --columns is {columns}, wanted kernels among them")
        return request

    @property
    def shared(self) -> Ranks:
        """The ranks that share the model."""
        return Ranks(self.ranks, self.parallel)

    @property
    def experts_of_model(self) -> int:
        """Experts that the whole model has."""
        return self._whole.n_routed_experts

    @property
    def layers_of_model(self) -> int:
        """Layers that the whole model has."""
        return self._whole.num_hidden_layers

    @property
    def _whole(self) -> ModelConfig:
        return PRESETS[self.preset]() if self.checkpoint is None else self.config

    def new_tokens(self, sequences: int, context: int) -> int:
        """Tokens of an answer, such that all sequences decode together for ``steps`` steps.

        A runner processes up to ``CHUNK`` prompt tokens per step and decodes the sequences that are
        past their prompts, so the first sequences decode while later prompts are processed.
        """
        ramp = sequences * -(-context // CHUNK)
        drafts, slots = 0, 0
        if self.drafts is not None:
            drafts, slots = self.drafts.tokens, self.slot_steps
        return (ramp + WARM_STEPS + slots + self.steps + _SPARE) * (1 + drafts)

    @property
    def slot_steps(self) -> int:
        """Steps before those that are timed, in which slots get the experts that are used most."""
        if self.host_experts is None:
            return 0
        return SLOT_STEPS if self.device.type == "cuda" else self.steps

    def too_long(self, sequences: int, context: int) -> str:
        """Return why a batch is not brought to a context."""
        total = sequences * context
        return (
            f"{sequences} prompt{'s' * (sequences > 1)} of {context} tokens are {total} tokens to "
            f"process, --prefill-limit is {self.prefill_limit}"
        )

    def check_positions(self) -> None:
        """Raise if a row needs more positions than the model has."""
        most = self.config.max_position_embeddings
        for tokens in self.tokens:
            for context in self.contexts:
                need = context + self.new_tokens(tokens, context)
                if need > most:
                    raise UsageError(
                        f"--context is {context}, which needs {need} positions with "
                        f"{tokens} sequences; wanted at most {most} (max_position_embeddings)"
                    )
        for prompt in self.prompts:
            if prompt + 2 > most:
                raise UsageError(
                    f"--prompts has {prompt}, wanted at most {most - 2} (max_position_embeddings "
                    "less two)"
                )

    def check_ranks(self) -> None:
        """Raise if the model cannot be split over the ranks, or they cannot do what is asked."""
        if self.drafts is not None and self.parallel == DATA:
            raise UsageError(
                f"--speculate is {self.drafts.method!r} with --parallel dp, wanted tp: ranks with "
                "tokens of their own draft nothing"
            )
        if self.parallel == DATA and DETERMINISTIC in self.columns:
            raise UsageError(
                "--columns has 'deterministic' with --parallel dp, whose steps have the sequences "
                "of all ranks"
            )
        try:
            check_divides(self.config, self.ranks, self.parallel)
        except ValueError as error:
            raise UsageError(f"model: {error}") from error

    def check_trace(self) -> None:
        """Raise if the step that is asked for cannot be mapped."""
        if self.trace is None:
            return
        name = f"--trace is {str(self.trace)!r}"
        if self.device.type != "cuda":
            raise UsageError(
                f"{name} on {self.device}, wanted a CUDA GPU, where steps are captured"
            )
        if self.ranks > 1 and not self.emulated:
            raise UsageError(f"{name} with {self.ranks} ranks, wanted one, or --emulate-peers")
        if self.host_experts is not None:
            raise UsageError(f"{name} with --host-experts, whose steps are not one graph")
        if self.trace.is_dir():
            raise UsageError(f"{name}, a folder, wanted a file")
        steps = len(self.tokens) * len(self.contexts)
        if steps != 1:
            raise UsageError(f"{name} with {steps} steps, wanted one --tokens and one --context")

    def named(self) -> dict[str, Any]:
        """Return the fields that say which model a row is about."""
        loaded = self.checkpoint is not None
        return {
            "preset": self.preset,
            "experts": self.config.n_routed_experts,
            "experts_of_model": self.experts_of_model,
            "layers": self.config.num_hidden_layers,
            "layers_of_model": self.layers_of_model,
            "weights": CHECKPOINT if loaded else self.weights.values,
            "recipe": CHECKPOINT if loaded else self.weights.recipe,
            "routing": CHECKPOINT if loaded else ROUTING,
            "activation": self.config.activation,
            "ranks": self.ranks,
            "emulated": self.emulated,
            "parallel": self.parallel,
        }


@dataclass(frozen=True)
class _Source:
    """The source of a model; see ``ModelRequest``."""

    preset: str
    config: ModelConfig
    weights: Weights
    checkpoint: Path | None = None


def _source(options: argparse.Namespace, usual: Sizes) -> _Source:
    seed, activation = getattr(options, "seed", 0), options.activation or ACTIVATIONS[0]
    if activation not in ACTIVATIONS:
        raise UsageError(f"--activation is {activation!r}, wanted one of {', '.join(ACTIVATIONS)}")
    if options.checkpoint is not None:
        for name in ("preset", "experts", "layers", "weights", "recipe"):
            if getattr(options, name) is not None:
                raise UsageError(f"--{name} cannot be combined with --checkpoint")
        path = Path(options.checkpoint)
        try:
            config = ModelConfig.from_path(path, activation=activation)
        except (OSError, ValueError) as error:
            raise UsageError(f"--checkpoint is {options.checkpoint!r}: {error}") from error
        if options.speculate is None:
            config = config.without_draft()
        return _Source(path.resolve().name, config, Weights(seed=seed), path)
    preset = options.preset or usual.preset
    if preset not in PRESETS:
        raise UsageError(f"--preset is {preset!r}, wanted one of {', '.join(PRESETS)}")
    config = _with_draft(_cut(preset, options.experts, options.layers), options.speculate)
    config = config.replace(activation=activation)
    values, recipe = options.weights or WEIGHTS[0], options.recipe or RECIPES[0]
    for name, value, known in (("weights", values, WEIGHTS), ("recipe", recipe, RECIPES)):
        if value not in known:
            raise UsageError(f"--{name} is {value!r}, wanted one of {', '.join(known)}")
    return _Source(preset, config, Weights(values, recipe, seed))


def _ranks(options: argparse.Namespace, processes: int) -> int:
    """Return the number of ranks: those of ``--emulate-peers``, or the processes."""
    emulated: int | None = options.emulate_peers
    if emulated is None:
        return processes
    if processes > 1:
        raise UsageError(f"--emulate-peers is {emulated} in {processes} processes, wanted one")
    if not 2 <= emulated <= MOST_RANKS:
        raise UsageError(f"--emulate-peers is {emulated}, wanted 2 to {MOST_RANKS} ranks")
    return emulated


def _parallel(options: argparse.Namespace, ranks: int) -> str:
    """Return how the ranks share the model."""
    mode: str | None = options.parallel
    if mode is None:
        return TENSOR
    if mode not in MODES:
        raise UsageError(f"--parallel is {mode!r}, wanted one of {', '.join(MODES)}")
    if ranks == 1:
        raise UsageError(
            f"--parallel is {mode!r} in one process, wanted several, which torchrun starts, or "
            "--emulate-peers"
        )
    return mode


def _with_draft(config: ModelConfig, method: str | None) -> ModelConfig:
    """The configuration with the draft layers of published checkpoints."""
    if method == MTP:
        return config.replace(num_nextn_predict_layers=1)
    if method != DSPARK:
        return config
    layers = range(config.num_hidden_layers)
    rank = min(512 if config.hidden_size > 4096 else 256, config.hidden_size)
    dspark = DSparkConfig(
        block_size=5,
        noise_token_id=config.vocab_size - 1,
        target_layer_ids=tuple(layers[-3:]),
        markov_rank=rank,
    )
    return config.replace(dspark=dspark)


def _drafts(
    options: argparse.Namespace, config: ModelConfig, hosted: bool = False
) -> DraftRequest | None:
    """Return the drafts asked for; ``hosted``: experts are in host memory."""
    method, count, share = options.speculate, options.draft_tokens, options.accept
    threshold = options.confidence_threshold
    if method is None:
        for name, value in (
            ("draft-tokens", count),
            ("accept", share),
            ("confidence-threshold", threshold),
        ):
            if value is not None:
                raise UsageError(f"--{name} is {value:g}, wanted --speculate with it")
        return None
    if method not in METHODS[1:]:
        raise UsageError(f"--speculate is {method!r}, wanted one of {', '.join(METHODS[1:])}")
    held = MTP if config.num_nextn_predict_layers == 1 else None
    held = DSPARK if config.dspark is not None else held
    if method != held:
        raise UsageError(f"--speculate is {method!r}, and the model's drafts are {held}")
    most = ROLLBACK if config.dspark is None else min(ROLLBACK, config.dspark.block_size)
    usual = most if method == DSPARK else MTP_TOKENS
    usual = HOSTED_TOKENS if hosted else usual
    if count is not None and count > most:
        raise UsageError(f"--draft-tokens is {count}, wanted 1 to {most} of {method}")
    has_confidence = config.dspark is not None and config.dspark.confidence_head
    if threshold is not None and not has_confidence:
        raise UsageError(
            f"--confidence-threshold is {threshold:g}, wanted none: the {method} draft has no "
            "confidence head"
        )
    if threshold is None and has_confidence and options.checkpoint is None:
        threshold = 0.0  # the confidence of random weights means nothing, so all are verified
    return DraftRequest(method, count or usual, share, threshold)


def _host_experts(options: argparse.Namespace, ranks: int) -> HostExperts | str | None:
    """Return the placement asked for, or ``"auto"``, or None."""
    text: str | None = options.host_experts
    if text is None:
        return None
    if options.checkpoint is not None:
        raise UsageError(
            f"--host-experts is {text!r} with --checkpoint {options.checkpoint}, wanted it "
            "without: the bench draws the weights and the routing of experts in host memory"
        )
    if ranks > 1:
        raise UsageError(
            f"--host-experts is {text!r} with {ranks} ranks, wanted one: a model on several ranks "
            "has all experts on its GPUs"
        )
    for name in ("columns", "profile"):
        if getattr(options, name):
            raise UsageError(
                f"--host-experts is {text!r} with --{name}, wanted it without: the bench does not "
                "measure these figures for experts in host memory"
            )
    if text == "auto":
        return text
    parts = text.split("+")
    if len(parts) not in (2, 3) or not all(part.isdecimal() for part in parts):
        raise UsageError(
            f"--host-experts is {text!r}, wanted auto, or static experts and slots, 150+60, or "
            "these and the experts of a half of the buffer for long prompts, 150+60+24"
        )
    static, slots, staged = map(int, (*parts, "0")[:3])
    return HostExperts(static, slots, staged=staged)


def _check_output(options: argparse.Namespace) -> None:
    for name in ("csv", "markdown"):
        if hasattr(options, name):
            raise UsageError(f"--{name} is not for model, which prints a table and writes --out")
    out = getattr(options, "json", None)
    if out is not None and not out.endswith("/") and Path(out).suffix == ".svg":
        raise UsageError(f"--out is {out!r}, wanted a JSON file or DIR/")


def _cut(preset: str, experts: int | None, layers: int | None) -> ModelConfig:
    """The preset with fewer experts and layers, without multi-token-prediction layers."""
    config = PRESETS[preset]()
    most = config.num_hidden_layers
    count = most if layers is None else layers
    if not 1 <= count <= most:
        raise UsageError(f"--layers is {count}, wanted 1 to {most}, which {preset} has")
    if experts is None:
        experts = config.n_routed_experts
    if not config.num_experts_per_tok <= experts <= config.n_routed_experts:
        raise UsageError(
            f"--experts is {experts}, wanted {config.num_experts_per_tok} (chosen per token) to "
            f"{config.n_routed_experts}, which {preset} has"
        )
    return config.replace(
        n_routed_experts=experts,
        num_hidden_layers=count,
        layer_types=config.layer_types[:count],
        mlp_layer_types=config.mlp_layer_types[:count],
        num_nextn_predict_layers=0,
    )


def _distinct(name: str, numbers: Sequence[int]) -> tuple[int, ...]:
    if len(set(numbers)) < len(numbers):
        raise UsageError(f"{name} is {','.join(map(str, numbers))}, wanted distinct numbers")
    return tuple(numbers)


def _prompts(text: str | None, usual: Sizes) -> tuple[int, ...]:
    if text is None:
        return usual.prompts
    if text == "none":
        return ()
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"--prompts is {text!r}, wanted numbers of tokens such as 21,512, or none")
    return _distinct("--prompts", sorted(int(part) for part in parts))


def _columns(names: Sequence[str] | None) -> tuple[str, ...]:
    if names is None:
        return USUAL_COLUMNS
    unknown = [name for name in names if name not in COLUMNS]
    if unknown:
        raise UsageError(f"--columns has {unknown[0]!r}, wanted some of {', '.join(COLUMNS)}")
    return tuple(name for name in COLUMNS if name in names)
