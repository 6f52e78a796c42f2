"""Compile or load a model's kernels before its first step, or on another machine."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dsv4 import _steps, fragments
from dsv4.config import ModelConfig
from dsv4.cute import _images, gemm_fp8, gemm_nvfp4, grouped_nvfp4
from dsv4.cute import attention as cute_attention
from dsv4.cute import gemm as cute_gemm
from dsv4.cute import grouped_gemm as cute_grouped
from dsv4.cute._architectures import ARCHITECTURES, HOPPER
from dsv4.cute.sm90 import index_scores_plan
from dsv4.cute.sm90.attention_plan import DIMS, ROPE
from dsv4.cute.sm90.grouped_plan import Experts
from dsv4.formats import FP8_BLOCK, FRAGMENTS, LINEAR, NVFP4, SWIZZLED
from dsv4.integrations._swap import OutputHead
from dsv4.layers._pooling import PoolingModule
from dsv4.layers.attention import DeepseekV4Attention
from dsv4.layers.experts import DeepseekV4Experts
from dsv4.layers.linear import Linear
from dsv4.model import DeepseekV4ForCausalLM


@dataclass(frozen=True)
class Operator:
    """What runs an operator of a step.

    Attributes:
        name: Of the operator; ``"fragments"`` for the packing of weights.
        implementation: Which one dispatch chooses there.
        kernels: Names of its Triton kernels, which are compiled now.
        refused: Implementations that come first elsewhere, and why they do not run there.
    """

    name: str
    implementation: str
    kernels: tuple[str, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        kernels = f": {', '.join(self.kernels)}" if self.kernels else ""
        reasons = "".join(f"; not {name}: {why}" for name, why in self.refused)
        return f"{self.name:<26}{self.implementation}{kernels}{reasons}"


@dataclass(frozen=True)
class Warmup:
    """What ``warmup`` did; ``print`` shows all of it.

    Attributes:
        kernels: How many CuTeDSL kernels the products and attention need.
        compiled: How many of them were not on disk.
        seconds: How long it took.
        triton: How many Triton kernels the steps need, every specialisation counted.
        operators: What runs each operator of the steps; empty where they were not looked at.
        skipped: Why they were not.
    """

    kernels: int
    compiled: int
    seconds: float
    triton: int = 0
    operators: tuple[Operator, ...] = ()
    skipped: str = ""

    def __str__(self) -> str:
        lines = [
            f"{self.kernels} CuTeDSL kernels, {self.compiled} of them compiled now; "
            f"{self.triton} Triton kernels; {self.seconds:.1f} s"
        ]
        if self.skipped:
            lines.append(f"Triton kernels were left out: {self.skipped}")
        first = [operator for operator in self.operators if not operator.refused]
        others = [operator for operator in self.operators if operator.refused]
        for title, some in (("compiled", first), ("no kernel of its own", others)):
            if some:
                lines += [f"{title}:", *(f"  {operator}" for operator in some)]
        return "\n".join(lines)


@dataclass(frozen=True)
class Product:
    """What the kernels of a packed product depend on.

    Attributes:
        rows: N, of all groups.
        columns: K.
        groups: Groups of rows with an input each.
        activation: ``"bf16"`` or ``"nvfp4"``.
        out_dtype: Of the result.
        swiglu: Whether the result is the SwiGLU of gate and up rows in turn.
        layout: Of the weight.
    """

    rows: int
    columns: int
    groups: int
    activation: str
    out_dtype: torch.dtype
    swiglu: bool = False
    layout: str = FRAGMENTS

    def plans(self, max_tokens: int, arch: str = HOPPER) -> list[Any]:
        """Configurations of all kernels for up to that many tokens."""
        if self.layout == SWIZZLED:
            if arch == HOPPER or self.activation != "nvfp4":
                return []
            return gemm_nvfp4.plans(
                self.rows,
                self.columns,
                self.groups,
                self.out_dtype,
                max_tokens,
                swiglu=self.swiglu,
            )
        return cute_gemm.plans(
            self.rows,
            self.columns,
            self.groups,
            self.activation,
            self.out_dtype,
            max_tokens,
            swiglu=self.swiglu,
            arch=arch,
        )


@dataclass(frozen=True)
class Fp8Product:
    """What the kernels of a product with an FP8 weight depend on; see ``Product``."""

    rows: int
    columns: int
    groups: int
    activation: str
    out_dtype: torch.dtype
    scale_dtype: torch.dtype

    def plans(self, max_tokens: int, arch: str = HOPPER) -> list[Any]:
        """Configurations of all kernels for up to that many tokens."""
        if arch != HOPPER:
            return []
        kind = (self.activation, self.out_dtype, self.scale_dtype)
        return gemm_fp8.plans(self.rows, self.columns, self.groups, *kind, max_tokens)


@dataclass(frozen=True)
class GroupedProduct:
    """The same of packed routed experts.

    Attributes:
        experts: Sizes and kind.
        top_k: Rows of each token.
        layout: Of the weights.
    """

    experts: Experts
    top_k: int
    layout: str = FRAGMENTS

    def plans(self, max_tokens: int, arch: str = HOPPER) -> list[Any]:
        """Configurations of all kernels for up to that many tokens, whatever their experts."""
        if self.layout == SWIZZLED:
            if arch == HOPPER or not self.experts.row_scaled:
                return []
            return list(grouped_nvfp4.plans(self.experts, max_tokens * self.top_k))
        return cute_grouped.plans(self.experts, max_tokens * self.top_k, arch)


@dataclass(frozen=True)
class Attention:
    """Sparse attention over FP8 entries of the kernel's size.

    Attributes:
        heads: Of a token.
    """

    heads: int

    def plans(self, max_tokens: int, arch: str = HOPPER) -> list[Any]:
        """All of Hopper's: how tokens are dealt out follows from the width of the page tables."""
        return [] if arch != HOPPER else cute_attention.plans()


@dataclass(frozen=True)
class Indexer:
    """The choice from long rows of index scores, and scores of MXFP4 keys of the kernel's size."""

    def plans(self, max_tokens: int, arch: str = HOPPER) -> list[Any]:
        """All of Hopper's: which is taken follows from the width of the page tables."""
        return [] if arch != HOPPER else index_scores_plan.plans()


Call = Product | Fp8Product | GroupedProduct | Attention | Indexer


def warmup(
    model: Any,
    device: torch.device | str | int | None = None,
    arch: str | None = None,
    max_tokens: int = 8192,
    *,
    progress: bool = True,
) -> Warmup:
    """Compile every CuTeDSL kernel that a model would launch, or load it from disk.

    With ``arch`` and a configuration or a ``DeepseekV4ForCausalLM``, also every Triton kernel that
    steps of decoding and one of prefill would launch on such a GPU; ``Warmup.operators`` names them
    and says what runs where there is none. They stay in Triton's own cache, where the same version
    of Triton finds them. Without ``arch`` Triton kernels are compiled as they are first launched.

    Without it the first call of each shape compiles its kernel, for one to eight seconds, and
    inside the capture of a CUDA graph, too. Kernels stay on disk, in ``$DSV4_CACHE_DIR`` or
    ``~/.cache/dsv4/kernels``; those of another machine's GPU can be made by naming ``arch``.

    Of a model, the NVFP4 layers count that are packed or can be, on Hopper also those with FP8
    weights, and none if its dtype is not bfloat16; of a configuration, every linear layer and all
    routed experts that can be packed, as if all were NVFP4 in a bfloat16 model. What is not packed
    yet counts as packed for the GPU: with swizzled scales for Blackwell where activations are
    quantised, else in fragments. Attention counts on Hopper if its cache holds FP8 entries by
    default, as DeepSeek's numerics want, of 512 dims with 64 rotated.

    Args:
        model: A module, a ``ModelConfig`` or transformers' configuration.
        device: The GPU to load the kernels on. By default that of the model or the current one;
            with ``arch``, none: the kernels are only compiled.
        arch: ``"sm_90a"``, ``"sm_100a"`` or ``"sm_103a"``; by default that of the GPU.
        max_tokens: Most tokens of a product. Above 8192 there are no further kernels. A model needs
            about 40 for up to 64 tokens, to which a decoding batch may be bound, and 80 for all.
        progress: Whether to show progress on stderr, as a bar if rich is installed.

    Returns:
        Counts, all 0 on a GPU that these kernels are not for, and what runs each operator.

    Raises:
        ValueError: if ``arch`` is not one there are kernels for or not that of ``device``,
            ``device`` is no GPU, or ``max_tokens`` is below 1.
        RuntimeError: if there is no GPU and no ``arch``, or a kernel has to be compiled and
            nvidia-cutlass-dsl is not installed.
    """
    start = time.perf_counter()
    if max_tokens < 1:
        raise ValueError(f"warmup: max_tokens is {max_tokens}, wanted at least 1")
    gpu = _gpu(model, device, arch)
    chosen = _architecture(gpu, arch)
    plans = [] if chosen is None else kernel_plans(every_call(model, chosen), max_tokens, chosen)
    compiled = 0
    with _progress(len(plans), progress) as advance:
        for plan in plans:
            assert chosen is not None
            missing = _images.stored(plan, chosen) is None
            compiled += missing
            if gpu is not None:
                cute_gemm.warmup([plan], gpu)
            elif missing:
                _images.compile_and_store(plan, chosen)
            advance()
    done = Warmup(len(plans), compiled, 0.0)
    if arch is not None and gpu is None:
        done = _with_steps(done, model, arch, max_tokens, progress)
    return replace(done, seconds=time.perf_counter() - start)


def _with_steps(done: Warmup, model: Any, arch: str, max_tokens: int, progress: bool) -> Warmup:
    """With what the steps of a whole model launch."""
    if isinstance(model, nn.Module) and not isinstance(model, DeepseekV4ForCausalLM):
        return replace(done, skipped=f"{type(model).__name__} is not a whole model of this package")
    skipped = _steps.impossible()
    if skipped:
        return replace(done, skipped=skipped)
    config = ModelConfig.of(model.config if isinstance(model, nn.Module) else model)
    with _progress(None, progress, "Triton kernels") as advance:
        found = _steps.compile_steps(config, arch, max_tokens, advance)
    operators = tuple(
        Operator(name, implementation, tuple(sorted(ran.kernels)), tuple(ran.objections.items()))
        for (name, implementation), ran in found.ran.items()
    )
    return replace(done, triton=found.compiled, operators=operators)


def kernel_plans(found: Sequence[Call], max_tokens: int, arch: str = HOPPER) -> list[Any]:
    """The configurations of all kernels of these calls, each once."""
    return list(dict.fromkeys(plan for p in found for plan in p.plans(max_tokens, arch)))


def every_call(model: Any, arch: str = HOPPER) -> list[Call]:
    """Products of linear layers and of routed experts, the indexer, and attention."""
    dense, grouped = products(model, arch), grouped_products(model, arch)
    return [*dense, *fp8_products(model), *grouped, *indexers(model), *attentions(model)]


def layout_of(layer: Linear | DeepseekV4Experts, arch: str) -> str:
    """The layout of a packed layer; of another one that which it would be packed to."""
    if layer.layout != LINEAR:
        return layer.layout
    return _steps.layout_for(layer.activation, arch)


def products(model: Any, arch: str = HOPPER) -> list[Product]:
    """The products of packed weights, each shape once; see ``warmup`` for which layers count."""
    if isinstance(model, nn.Module):
        if _not_bfloat16(model):
            return []
        return _products(model, arch, lambda layer: layer.format == NVFP4)
    return _products(_empty(model), arch, lambda layer: True)


def fp8_products(model: Any) -> list[Fp8Product]:
    """The products of a module's FP8 weights, each shape once; none of a configuration."""
    if not isinstance(model, nn.Module) or _not_bfloat16(model):
        return []
    wide = {layer for parent in model.modules() for layer in _float32_results(parent)}
    return list(
        dict.fromkeys(
            Fp8Product(
                layer.out_features,
                layer.in_features,
                layer.groups,
                layer.activation,
                torch.float32 if layer in wide or isinstance(layer, OutputHead) else torch.bfloat16,
                _scale_dtype(layer),
            )
            for layer in model.modules()
            if isinstance(layer, Linear) and layer.format == FP8_BLOCK
        )
    )


def _scale_dtype(layer: Linear) -> torch.dtype:
    assert layer.weight_scale is not None
    return layer.weight_scale.dtype


def grouped_products(model: Any, arch: str = HOPPER) -> list[GroupedProduct]:
    """The same of packed routed experts."""
    if isinstance(model, nn.Module):
        layers = [] if _not_bfloat16(model) else _experts_of(model)
        layers = [layer for layer in layers if layer.format == NVFP4]
    else:
        layers = _experts_of(_empty(model))
    return list(dict.fromkeys(p for layer in layers for p in _of_experts(layer, arch)))


def attentions(model: Any) -> list[Attention]:
    """Sparse attention of each number of heads once; see ``warmup`` for which layers count."""
    return list(
        dict.fromkeys(
            Attention(config.num_attention_heads)
            for config in _configs(model)
            if (config.head_dim, config.qk_rope_head_dim) == (DIMS, ROPE)
            and config.numerics == "deepseek"
        )
    )


def indexers(model: Any) -> list[Indexer]:
    """The indexer, if there is one and its keys are of the kernel's size."""
    sizes = {config.index_head_dim for config in _configs(model)}
    return [Indexer()] if index_scores_plan.DIMS in sizes else []


def _configs(model: Any) -> list[ModelConfig]:
    """Of each layer of attention, or the one given."""
    if not isinstance(model, nn.Module):
        return [ModelConfig.of(model)]
    found = [m.config for m in model.modules() if isinstance(m, DeepseekV4Attention)]
    return [] if _not_bfloat16(model) else found


def _not_bfloat16(model: nn.Module) -> bool:
    return bool(getattr(model, "dtype", torch.bfloat16) != torch.bfloat16)


def _empty(config: Any) -> DeepseekV4ForCausalLM:
    with torch.device("meta"):
        return DeepseekV4ForCausalLM(ModelConfig.of(config))


def _experts_of(model: nn.Module) -> list[DeepseekV4Experts]:
    return [module for module in model.modules() if isinstance(module, DeepseekV4Experts)]


def _of_experts(layer: DeepseekV4Experts, arch: str) -> list[GroupedProduct]:
    """Of gate and up, and of down; none if the layer cannot be packed.

    Quantised results of the first are the second's rows where their scales are known; whether they
    will be is not known of a layer without a format yet.
    """
    inner, hidden, layout = layer.intermediate_dim, layer.hidden_dim, layout_of(layer, arch)
    if not (packs(2 * inner, hidden, layout) and packs(hidden, inner, layout)):
        return []
    quantises, weighs = layer.activation == "nvfp4", layer.numerics == "deepseek"
    known = quantises and layer.down_proj_input_scale is not None
    first = Experts(2 * inner, hidden, layer.num_local_experts, False, quantises, True, weighs)
    second = Experts(hidden, inner, layer.num_local_experts, False, quantises)
    found = [first._replace(quantized_out=known), second]
    if quantises and layer.format is None:
        found.append(first._replace(quantized_out=True))
    return [GroupedProduct(experts, layer.num_experts_per_tok, layout) for experts in found]


def _products(model: nn.Module, arch: str, nvfp4: Callable[[Linear], bool]) -> list[Product]:
    modules = list(model.modules())
    linear = {
        m: torch.float32 if isinstance(m, OutputHead) else torch.bfloat16
        for m in modules
        if isinstance(m, Linear) and nvfp4(m)
    }
    found: list[Product] = []
    for parent in modules:
        for layer in _float32_results(parent):
            if layer in linear:
                linear[layer] = torch.float32
        for how in ("joined", "joined_in_turn"):
            for names in getattr(parent, how, ()):
                layers = [getattr(parent, name) for name in names]
                if all(m in linear for m in layers) and len({m.activation for m in layers}) == 1:
                    in_turn = how == "joined_in_turn"
                    found += _product(layers, linear.pop(layers[0]), arch, swiglu=in_turn)
                    for layer in layers[1:]:
                        del linear[layer]
    for layer, dtype in linear.items():
        found += _product([layer], dtype, arch)
    return list(dict.fromkeys(found))


def _product(
    layers: Sequence[Linear], out_dtype: torch.dtype, arch: str, *, swiglu: bool = False
) -> list[Product]:
    """One, or none if a layer cannot be packed."""
    first, rows = layers[0], [layer.out_features for layer in layers]
    layout = layout_of(first, arch)
    if layout == SWIZZLED and not swiglu and any(n % 128 for n in rows[:-1]):
        return []  # their matrices would share blocks of scales; put together they are linear
    if not all(packs(n // first.groups, first.in_features, layout, first.groups) for n in rows):
        return []
    shape = (sum(rows), first.in_features, first.groups)
    return [Product(*shape, first.activation, out_dtype, swiglu, layout)]


def packs(rows: int, columns: int, layout: str, groups: int = 1) -> bool:
    """Whether there are kernels for a matrix of ``groups`` times so many rows in a layout."""
    if layout == SWIZZLED:
        return rows % (128 if groups > 1 else 16) == columns % 32 == 0
    return fragments.fits(rows, columns)


def _float32_results(module: nn.Module) -> list[nn.Module]:
    """The linear children that are asked for float32 (specification sections 2 and 5.1)."""
    if isinstance(module, PoolingModule) and module.numerics == "deepseek":
        return [module.kv_proj, module.gate_proj]
    if isinstance(module, DeepseekV4ForCausalLM) and module.config.numerics == "deepseek":
        return [module.lm_head]
    return []


def _gpu(model: Any, device: torch.device | str | int | None, arch: str | None) -> Any:
    """Where to load the kernels, with its index; None for nowhere."""
    if device is None:
        if arch is not None:
            return None
        tensors = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
        device = next((t.device for t in tensors if t.device.type == "cuda"), "cuda")
        if not torch.cuda.is_available():
            raise RuntimeError(
                "warmup: there is no CUDA GPU; name one to compile for, e.g. arch='sm_90a'"
            )
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if found.type != "cuda":
        raise ValueError(f"warmup: device is {found}, wanted a CUDA GPU")
    index = torch.cuda.current_device() if found.index is None else found.index
    return torch.device("cuda", index)


def _architecture(gpu: torch.device | None, arch: str | None) -> str | None:
    """The name to compile for; None if there are no kernels for the GPU."""
    if arch is not None and arch not in ARCHITECTURES.values():
        wanted = ", ".join(map(repr, ARCHITECTURES.values()))
        raise ValueError(f"warmup: arch is {arch!r}, wanted one of {wanted}")
    if gpu is None:
        return arch
    found = ARCHITECTURES.get(torch.cuda.get_device_capability(gpu))
    if arch is not None and arch != found:
        raise ValueError(f"warmup: arch is {arch!r}, but {gpu} wants {found or 'none'}")
    return found


@contextmanager
def _progress(
    total: int | None, shown: bool, what: str = "kernels"
) -> Iterator[Callable[[], None]]:
    """Gives a function to call after each kernel; of None it is not known how many there are."""
    if not shown or total == 0:
        yield lambda: None
    elif importlib.util.find_spec("rich") is not None:
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True)) as bar:
            task = bar.add_task(what, total=total)
            yield lambda: bar.advance(task)
    else:
        line = _Line(total, what)
        try:
            yield line.advance
        finally:
            line.end()


class _Line:
    """Counts on a terminal in one line that is written over; elsewhere in one line at the end."""

    def __init__(self, total: int | None, what: str = "kernels") -> None:
        self.total, self.what, self.done, self.start = total, what, 0, time.perf_counter()
        self.terminal = sys.stderr.isatty()

    def advance(self) -> None:
        self.done += 1
        if self.terminal:
            self._write("\r", "")

    def end(self) -> None:
        self._write("\r" if self.terminal else "", "\n")

    def _write(self, before: str, after: str) -> None:
        seconds = time.perf_counter() - self.start
        of = "" if self.total is None else f" of {self.total}"
        sys.stderr.write(f"{before}{self.what} {self.done}{of}, {seconds:.1f} s{after}")
        sys.stderr.flush()
