"""Results of ``python -m dsv4.bench model``, and the file they are written to."""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from dsv4.bench.environment import slug
from dsv4.bench.results import file_name, machine, text_of
from dsv4.bench.suites.model.profile import OperatorTime, Profile
from dsv4.parallel.context import TENSOR

SCHEMA = "dsv4.bench.model/1"
# Fields that older files do not have.
_ADDED = frozenset(
    {"ranks", "emulated", "parallel", "activation", "expected"}
    | {"verified", "threshold"}
    | {"drawn", "single_ms", "expert_ms", "verify_experts", "verify_over_single", "pass_ms"}
    | {"host_bytes", "static_bytes", "slot_bytes", "buffer_bytes", "gather_bytes", "gather_rate"}
    | {"early_layers", "placement", "waves", "hit_rates", "loaded"}
)


@dataclass(frozen=True)
class Named:
    """The model that a row is about.

    Attributes:
        preset: Published model.
        experts: Routed experts of a layer.
        experts_of_model: Routed experts of a layer of the published model.
        layers: Decoder layers.
        layers_of_model: Layers of the published model.
        weights: ``"random"``, ``"mxfp4-cast"`` or ``"checkpoint"``.
        recipe: Which matrices have which format: ``"nvfp4"``, ``"nvidia"`` or ``"checkpoint"``.
        routing: Whose router weights choose experts: ``"random"`` or ``"checkpoint"``.
        ranks: GPUs or processes that share the model; figures are rank 0's.
        emulated: Whether the other ranks are emulated on rank 0's GPU, without NVLink.
        parallel: How several ranks share the model, ``"tp"`` or ``"dp"``; of one ``"tp"``.
        activation: What quantised weights multiply: ``"bf16"``, ``"nvfp4"`` or ``"fp8"``.
    """

    preset: str
    experts: int
    experts_of_model: int
    layers: int
    layers_of_model: int
    weights: str
    recipe: str
    routing: str
    ranks: int = 1
    emulated: bool = False
    parallel: str = TENSOR
    activation: str = "bf16"


@dataclass
class Measured:
    """A row with figures that may be missing.

    Attributes:
        model: Which model it is about.
        missing: Why a figure is None, by the figure's name.
        failed: Figures whose measurement raised or was wrong.
    """

    model: Named
    missing: dict[str, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)


@dataclass
class DecodeRow(Measured):
    """Decode steps of some sequences at one context. Times are per step.

    Attributes:
        tokens: Sequences, each of which gets one token per step; with ``parallel="dp"`` of each
            rank.
        context: Tokens of each before the step.
        fill: How the captured step's cache was filled.
        runner_fill: How the runner's cache was filled.
        experts_read: Distinct experts of a layer that a step chose, averaged over layers.
        experts_uniform: The same for uniform routing, expected.
        bytes: Least bytes of a step: weights, chosen experts, KV cache.
        flops: Least operations of a step.
        bytes_ms: What memory needs for the bytes at its measured rate.
        flops_ms: What bfloat16 tensor cores need for the operations at their measured rate.
        kernels_ms: Sum of the captured step's kernels.
        launches: How many kernels.
        step_ms: Captured step, median replay; choosing the tokens is not part of it.
        runner_ms: ``Runner.step`` while all sequences decode greedily.
        generate_ms: Between the decode steps of one call of ``generate``.
        deterministic_ms: ``Runner.step`` of a deterministic runner.
        eager_ms: The step without a CUDA graph, between synchronisations.
        capture_s: ``Runner.warm_up``: seconds for one bucket of decode steps, the prompts' graphs
            and a long prompt, compiling what was not.
    """

    tokens: int = 0
    context: int = 0
    fill: str = ""
    runner_fill: str = ""
    experts_read: float | None = None
    experts_uniform: float = 0.0
    bytes: int = 0
    flops: int = 0
    bytes_ms: float | None = None
    flops_ms: float | None = None
    kernels_ms: float | None = None
    launches: float | None = None
    step_ms: float | None = None
    runner_ms: float | None = None
    generate_ms: float | None = None
    deterministic_ms: float | None = None
    eager_ms: float | None = None
    capture_s: float | None = None

    @property
    def bound_ms(self) -> float | None:
        """Roofline bound: the slower of memory and tensor cores."""
        if self.bytes_ms is None or self.flops_ms is None:
            return None
        return max(self.bytes_ms, self.flops_ms)

    def over_step(self, ms: float | None) -> float | None:
        """A time over the captured step's; None without both."""
        return ms / self.step_ms if ms is not None and self.step_ms else None


@dataclass
class PromptRow(Measured):
    """Time to the first token of one prompt.

    Attributes:
        prompt: Tokens.
        flops: Operations, with the output head for the last token alone.
        flops_ms: What bfloat16 tensor cores need for them at their measured rate.
        first_ms: First call of ``generate`` after ``dsv4.serving.prepare``, as after ``dsv4.load``.
        generate_ms: Later calls, with other prompts, median.
        runner_ms: ``Runner.add`` until the token is there, median.
    """

    prompt: int = 0
    flops: int = 0
    flops_ms: float | None = None
    first_ms: float | None = None
    generate_ms: float | None = None
    runner_ms: float | None = None


@dataclass
class SpeculationRow(Measured):
    """Steps of a runner that drafts tokens. Times of steps are of all sequences together.

    Attributes:
        tokens: Sequences.
        context: Tokens of each before the steps.
        method: ``"mtp"`` or ``"dspark"``.
        drafts: Drafts of a sequence per step.
        drawn: Distribution of the experts that were drawn, afresh for each step, in place of the
            routers' choice: ``"uniform"``, ``"zipf 1"``, or, with experts in host memory,
            ``"zipf 0.7"``; empty: the routers chose.
        forced: Whether drafts counted as right by a seed, and not as the model verified them.
        share: The share of drafts that was to be accepted, if it was forced.
        steps: Timed steps.
        drafted: Drafts that were made in them.
        verified: Drafts that were verified; the others had too little confidence.
        threshold: Least probability of acceptance of a verified draft, or ``"by costs"``; empty:
            the draft has no confidence.
        accepted: Drafts that were accepted in them.
        length: Tokens of a sequence per step.
        plain_ms: ``Runner.step`` without drafts, in which each sequence gets a token.
        step_ms: ``Runner.step`` with drafts.
        token_ms: The time per token of each sequence, with drafts.
        draft_ms: The draft alone: on a GPU a replay.
        pass_ms: Time of a pass of the draft (one draft of MTP, or a block of DSpark), by its head:
            ``"model"``, or ``"nvfp4"``, a copy that only drafts use.
        single_ms: The model's step of one token of each sequence, without the stores for a draft;
            on a GPU a replay; 0: not measured.
        verify_ms: The main model's part of a step, by the number of tokens of each sequence, with
            what the draft stores of them: on a GPU a replay.
        verify_experts: Average number of distinct experts of a layer that these steps choose; on
            several ranks only the experts of this rank count.
        expert_ms: Time to read one expert of each layer at the measured rate of the memory; 0:
            unknown.
        verify_over_single: Ratio of ``verify_ms`` to ``single_ms``, without the time of the experts
            that a step of one token does not read; none with experts in host memory.
        placement: With experts in host memory, static experts and slots of a main layer, as
            ``"156+64"``; empty: all experts are on the device.
        waves: Steps that were planned on the host and run eagerly, because the slots cannot hold
            all experts that they may choose; named as in ``hit_rates``.
        hit_rates: Share of a step's distinct experts of main layers that were in a slot, by step:
            ``"plain"`` and ``"drafts"`` of the runner, ``"single"``, and the numbers of tokens of
            ``verify_ms``. Empty without experts in host memory.
        loaded: Bytes that such a step loaded from host memory, average.
    """

    tokens: int = 0
    context: int = 0
    method: str = ""
    drafts: int = 0
    drawn: str = ""
    forced: bool = False
    share: float = 0.0
    steps: int = 0
    drafted: int = 0
    verified: int = 0
    threshold: str = ""
    accepted: int = 0
    length: float | None = None
    plain_ms: float | None = None
    step_ms: float | None = None
    token_ms: float | None = None
    draft_ms: float | None = None
    pass_ms: dict[str, float] = field(default_factory=dict)
    single_ms: float = 0.0
    verify_ms: dict[str, float] = field(default_factory=dict)
    verify_experts: dict[str, float] = field(default_factory=dict)
    expert_ms: float = 0.0
    verify_over_single: dict[str, float] = field(default_factory=dict)
    placement: str = ""
    waves: list[str] = field(default_factory=list)
    hit_rates: dict[str, float] = field(default_factory=dict)
    loaded: dict[str, float] = field(default_factory=dict)

    def times(self) -> dict[str, float | None]:
        """Return the milliseconds of the steps that ``hit_rates`` names."""
        runner = {"plain": self.plain_ms, "drafts": self.step_ms}
        return {**runner, "single": self.single_ms, **self.verify_ms}

    def loaded_per_token(self, step: str) -> float | None:
        """Return the bytes that a runner's step loaded for each token that it brought.

        Args:
            step: ``"plain"`` or ``"drafts"``; of others, None is returned.
        """
        length = {"plain": 1.0, "drafts": self.length}.get(step)
        if length is None or step not in self.loaded:
            return None
        return self.loaded[step] / (self.tokens * length)

    @property
    def gain(self) -> float | None:
        """How many times as many tokens per second there are as without drafts."""
        if self.plain_ms is None or self.token_ms is None:
            return None
        return self.plain_ms / self.token_ms

    def more_experts_ms(self, tokens: str) -> float:
        """Return the time of the experts that a step of one token does not read."""
        return (self.verify_experts[tokens] - self.verify_experts["1"]) * self.expert_ms


@dataclass
class HostedRow(Measured):
    """Decode steps with experts in host memory, under drawn routing.

    Attributes:
        tokens: Sequences.
        context: Tokens of each before the step.
        routing: How experts were drawn: ``"uniform"``, ``"zipf 0.7"`` or ``"zipf 1"``.
        static: Static experts of a layer.
        slots: Slots of a layer for the others.
        captured: Whether steps were replays of a CUDA graph.
        early_layers: Hash layers whose experts a captured step loads from its start on; files
            without this number are of steps in which there were none.
        steps: Timed steps, each with other experts.
        step_ms: Step, average.
        hit_rate: Share of a step's distinct experts that were in a slot.
        loaded_bytes: Bytes that a step loaded from host memory, average.
        host_bytes: Bytes of experts in host memory; 0, as in the next three: an older file.
        static_bytes: Bytes of static experts on the GPU.
        slot_bytes: Bytes of the other slots.
        buffer_bytes: Bytes of the buffer for long prompts, on the GPU.
        gather_bytes: Bytes that ``gather_rate`` is about: as many experts as a step loaded.
        gather_rate: GB/s of ``expert_gather`` alone, which copies these experts, layer after layer;
            on a GPU in a replay.
    """

    tokens: int = 0
    context: int = 0
    routing: str = ""
    static: int = 0
    slots: int = 0
    captured: bool = False
    early_layers: int = 0
    steps: int = 0
    step_ms: float | None = None
    hit_rate: float | None = None
    loaded_bytes: float | None = None
    host_bytes: int = 0
    static_bytes: int = 0
    slot_bytes: int = 0
    buffer_bytes: int = 0
    gather_bytes: int = 0
    gather_rate: float | None = None

    @property
    def loaded_rate(self) -> float | None:
        """GB/s of all that was loaded, over whole steps."""
        if self.step_ms is None or self.loaded_bytes is None:
            return None
        return self.loaded_bytes / self.step_ms / 1e6


@dataclass
class Start:
    """Seconds until the model could be used.

    Attributes:
        process_s: From the start of the process to the command: Python, PyTorch, this package.
        weights_s: Weights drawn on the device and packed, or read from a checkpoint.
        weight_bytes: Memory of the weights.
        peak_bytes: Most memory on the GPU until then; 0 on a CPU.
        source: Where they come from.
        kernels: Kernels that were compiled or loaded ahead.
        kernels_compiled: How many of them were neither on disk nor in a bundle.
        kernels_s: Seconds that took.
        prepare_s: Seconds of ``dsv4.serving.prepare``, the first time; None if it did nothing.
        prepare_bytes: Memory that PyTorch's allocator got for it.
        compiled_later: Names of kernels that were compiled after ``kernels_s``, and how often.
    """

    process_s: float | None = None
    weights_s: float = 0.0
    weight_bytes: int = 0
    peak_bytes: int = 0
    source: str = ""
    kernels: int = 0
    kernels_compiled: int = 0
    kernels_s: float = 0.0
    prepare_s: float | None = None
    prepare_bytes: int = 0
    compiled_later: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ProfileRow:
    """Kernels of one row's captured step by operator."""

    model: Named
    tokens: int
    context: int
    profile: Profile


@dataclass(frozen=True)
class ExpectedRow:
    """A step of one sequence on several ranks by the model of ``dsv4.parallel.planner``, in ms.

    Attributes:
        model: The model.
        context: Tokens before the step.
        latency: What does not shrink with bytes; an H100's.
        bytes: What memory needs for the row's bytes, at its measured rate.
        sums: Sums over ranks, planned from published figures.
        total: All three.
    """

    model: Named
    context: int
    latency: float
    bytes: float
    sums: float
    total: float


@dataclass
class ModelResults:
    """All that one command measured.

    Attributes:
        start: Load and start times.
        rows: Decode steps.
        prompts: Times to the first token.
        profiles: Kernels by operator.
        expected: Computed steps, on several ranks.
        speculation: Steps with drafts.
        hosted: Steps with experts in host memory.
        stopped: Why the command ended early; empty if it did not.
    """

    start: Start = field(default_factory=Start)
    rows: list[DecodeRow] = field(default_factory=list)
    prompts: list[PromptRow] = field(default_factory=list)
    profiles: list[ProfileRow] = field(default_factory=list)
    expected: list[ExpectedRow] = field(default_factory=list)
    speculation: list[SpeculationRow] = field(default_factory=list)
    hosted: list[HostedRow] = field(default_factory=list)
    stopped: str = ""


def document(header: dict[str, Any], results: ModelResults) -> dict[str, Any]:
    """Return the content of the file."""
    return {"schema": SCHEMA, "header": dict(header), **asdict(results)}


def validate(content: Any) -> None:
    """Check a document against the schema.

    Raises:
        ValueError: naming the first field that is missing or unknown, and a figure that is None
            without a reason.
    """
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ValueError(f"results: wanted a file of {SCHEMA}")
    content = _whole(content)
    _fields("results", content, {"schema", "header", *_names(ModelResults)})
    for i, row in enumerate(content.get("expected", ())):
        _fields(f"expected[{i}]", row, _names(ExpectedRow))
        _fields(f"expected[{i}].model", row["model"], _names(Named))
    _fields("start", content["start"], _names(Start))
    kinds: dict[str, type] = {"rows": DecodeRow, "prompts": PromptRow}
    kinds |= {"speculation": SpeculationRow, "hosted": HostedRow, "profiles": ProfileRow}
    for name, kind in kinds.items():
        for i, row in enumerate(content[name]):
            where = f"{name}[{i}]"
            _fields(where, row, _names(kind))
            _fields(f"{where}.model", row["model"], _names(Named))
            for figure in _figures(kind):
                if figure not in row:  # an older file
                    continue
                value, reason = row[figure], row["missing"].get(figure)
                if value is None and reason is None:
                    raise ValueError(f"results: {where}.{figure} is None, wanted why in missing")
                if value is not None and reason is not None:
                    raise ValueError(
                        f"results: {where}.{figure} is {value}, and missing has it: {reason}"
                    )


def _whole(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content with the lists that files of before 2026-11-28 have not."""
    return {"speculation": [], "hosted": [], **content}


def _names(kind: type) -> set[str]:
    return {f.name for f in fields(kind)}


def _figures(kind: type) -> list[str]:
    """Fields that may be None."""
    return [f.name for f in fields(kind) if f.default is None and f.default is not MISSING]


def _fields(where: str, content: Any, names: set[str]) -> None:
    if not isinstance(content, dict):
        raise ValueError(f"results: {where} is {type(content).__name__}, wanted named fields")
    for name in [*sorted(names - _ADDED - set(content)), *sorted(set(content) - names)]:
        kind = "missing" if name in names else "unknown"
        raise ValueError(f"results: {where}.{name} is {kind}")


def parse(content: Any) -> ModelResults:
    """Return the results of a file's content.

    Raises:
        ValueError: if the content does not fit the schema.
    """
    validate(content)
    content = _whole(content)
    rows = [DecodeRow(**{**row, "model": Named(**row["model"])}) for row in content["rows"]]
    prompts = [PromptRow(**{**row, "model": Named(**row["model"])}) for row in content["prompts"]]
    profiles = []
    for row in content["profiles"]:
        kernels = row["profile"]
        operators = tuple(OperatorTime(**operator) for operator in kernels["operators"])
        profile = Profile(kernels["ms"], kernels["launches"], operators)
        profiles.append(ProfileRow(Named(**row["model"]), row["tokens"], row["context"], profile))
    speculation = [
        # All drafts of older files were verified.
        SpeculationRow(**{"verified": row["drafted"], **row, "model": Named(**row["model"])})
        for row in content["speculation"]
    ]
    hosted = [HostedRow(**{**row, "model": Named(**row["model"])}) for row in content["hosted"]]
    start = Start(**content["start"])
    expected = [
        ExpectedRow(**{**row, "model": Named(**row["model"])})
        for row in content.get("expected", ())
    ]
    return ModelResults(
        start,
        rows,
        prompts,
        profiles,
        expected,
        speculation,
        hosted,
        stopped=content["stopped"],
    )


def output_path(
    out: str, header: dict[str, Any], model: Named, *, hosted: bool = False, drafts: str = ""
) -> Path:
    """Return the path of the file.

    Args:
        out: A file, or a folder that ends with a slash, for
            ``results/<machine>/<date>-model_<preset>_<recipe>.json``.
        header: Header of the results.
        model: What was measured.
        hosted: Whether experts were in host memory.
        drafts: Method of the drafts, which the name has then; empty: there were none.
    """
    path = Path(out)
    if not out.endswith("/"):
        return path
    base = path if path.name == "results" else path / "results"
    suite = f"model_{slug(model.preset)}_{model.recipe}"
    if hosted:
        suite += "_host_experts"
    if model.activation != "bf16":
        suite += f"_{model.activation}"
    if model.ranks > 1:
        suite += f"_{'emulated_' * model.emulated}{model.parallel}{model.ranks}"
    if drafts:
        suite += f"_{drafts}"
    return base / machine(header, gpus_of_model(model)) / file_name(header, suite)


def gpus_of_model(model: Named) -> int:
    """Return the number of GPUs that a model was measured on."""
    return 1 if model.emulated else model.ranks


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a file whose content fits the schema."""
    validate(content)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text_of(content))
