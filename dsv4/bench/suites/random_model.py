"""A whole model of random weights, made on its device layer by layer: no checkpoint is needed.

The codes are uniform, the block scales vary within a factor of four, and the global scale gives
every matrix entries of variance 1 / columns, so that hidden states keep their magnitude through
all layers. Times do not depend on the values; the routing does, and it is uniform here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from dsv4.config import ModelConfig
from dsv4.layers import DeepseekV4Experts, Linear, pack_
from dsv4.layers.host_experts import Hosting
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.parallel.context import ParallelContext
from dsv4.quant.formats import FP8_BLOCK, NVFP4, Format, QuantizedTensor
from dsv4.testing.models import random_values

WEIGHTS = ("random", "mxfp4-cast")
RECIPES = ("nvfp4", "nvidia")
# E4M3 bytes of the block scales: 0.5 to 1.875 in all 16 steps, or the powers of two 0.5, 1, 2.
_ANY_SCALE = tuple(range(0x30, 0x40))
_POWERS = (0x30, 0x38, 0x40)
# Elements of one draw. A draw is float32, and memory holds it and its target: drawing Flash's
# embedding at once took 4.2 GB for the draw and 1.1 GB for the embedding.
_DRAWN_NUMBERS = 1 << 26
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Weights:
    """The storage of the matrices of a random model.

    Attributes:
        values: ``"random"``: block scales of any value. ``"mxfp4-cast"``: powers of two, as in
            checkpoints that were cast from MXFP4.
        recipe: ``"nvfp4"``: NVFP4 in all linear layers and routed experts. ``"nvidia"``: NVFP4 in
            the routed experts, FP8 128 x 128 in attention and shared experts, as NVIDIA publishes.
            Either way the output head and the compressors' and indexers' inputs stay bfloat16.
        seed: Seed of the generator.

    Raises:
        ValueError: if ``values`` or ``recipe`` is unknown.
    """

    values: str = "random"
    recipe: str = "nvfp4"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.values not in WEIGHTS:
            raise ValueError(f"weights: values is {self.values!r}, wanted one of {WEIGHTS}")
        if self.recipe not in RECIPES:
            raise ValueError(f"weights: recipe is {self.recipe!r}, wanted one of {RECIPES}")


@torch.no_grad()
def random_model(
    config: ModelConfig,
    device: torch.device,
    weights: Weights,
    *,
    pack: bool = True,
    parallel: ParallelContext | None = None,
    mtp: bool = False,
    hosting: Hosting | None = None,
) -> DeepseekV4ForCausalLM:
    """Build a bfloat16 model for inference.

    Memory holds the model and at most one unpacked layer.

    Args:
        config: The model's.
        device: Where the weights are drawn and stay.
        weights: How they are stored.
        pack: Whether to pack each layer as soon as it is drawn.
        parallel: The rank whose part is drawn; all ranks draw the same numbers, so that what is not
            split is equal on all of them.
        mtp: Whether the model has its draft layers.
        hosting: What moves experts of each main layer to host memory, once it is packed; or None.
    """
    with torch.device("meta"):
        model = DeepseekV4ForCausalLM(config, mtp=mtp, parallel=parallel).to(torch.bfloat16)
    draw = _Draw(config, device, weights)
    for name, part in _parts(model):
        _fill(part, name, draw)
        if pack:
            pack_(part)
        if hosting is not None:
            for path, module in part.named_modules(prefix=name):
                if isinstance(module, DeepseekV4Experts) and hosting.takes(path, module):
                    hosting.move(module)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def random_experts(
    config: ModelConfig, device: torch.device, weights: Weights
) -> DeepseekV4Experts:
    """Return the routed experts of one layer, not packed.

    Args:
        config: The model's.
        device: Where they are drawn and stay.
        weights: How they are stored.
    """
    with torch.device("meta"):
        experts = DeepseekV4Experts(config).to(torch.bfloat16)
    _Draw(config, device, weights).experts(experts)
    return experts.eval().requires_grad_(False)


def _parts(model: DeepseekV4ForCausalLM) -> list[tuple[str, nn.Module]]:
    """The decoder layers and draft layers one by one, then what is around them."""
    layers = [(f"model.layers.{i}", layer) for i, layer in enumerate(model.model.layers)]
    others = [
        (f"model.{name}", module)
        for name, module in model.model.named_children()
        if name != "layers"
    ]
    drafts = [(f"mtp.{i}", layer) for i, layer in enumerate(model.mtp)]
    return [*layers, *drafts, *others, ("lm_head", model.lm_head)]


def _fill(part: nn.Module, name: str, draw: _Draw) -> None:
    """Give every tensor of a part a value on the device."""
    for path, module in list(part.named_modules(prefix=name)):
        if isinstance(module, DeepseekV4Experts):
            draw.experts(module)
        elif isinstance(module, Linear) and _is_quantised(path):
            module.set_weight(draw.matrix(module.out_features, module.in_features))
    for path, module in part.named_modules(prefix=name):
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    value = draw.plain(f"{path}.{key}", tensor)
                    if tensors is module._parameters:
                        value = nn.Parameter(value, requires_grad=False)
                    tensors[key] = value


def quantised_format(name: str, module: nn.Module, weights: Weights) -> Format | None:
    """Format that a module of a random model gets; None where its weights stay bfloat16.

    Args:
        name: Name of the module in the model.
        module: Any of its modules.
        weights: How the model is stored.
    """
    if isinstance(module, DeepseekV4Experts):
        return NVFP4
    if isinstance(module, Linear) and _is_quantised(name):
        return NVFP4 if weights.recipe == "nvfp4" else FP8_BLOCK
    return None


def _is_quantised(path: str) -> bool:
    """Return whether published checkpoints quantise a linear layer."""
    if path == "lm_head" or path.endswith(("markov_w2", "confidence_head.proj")):
        return False
    return "compressor" not in path or path.endswith("q_b_proj")


class _Draw:
    """Random tensors of one model."""

    def __init__(self, config: ModelConfig, device: torch.device, weights: Weights) -> None:
        self.num_experts = config.n_routed_experts
        self.device = device
        self.weights = weights
        self.generator = torch.Generator(device).manual_seed(weights.seed)
        scales = _POWERS if weights.values == "mxfp4-cast" else _ANY_SCALE
        self._scales = torch.tensor(scales, dtype=torch.uint8, device=device)
        values = self._scales.view(torch.float8_e4m3fn).double()
        square = torch.tensor(_E2M1, dtype=torch.float64).square().mean() * values.square().mean()
        self._deviation = float(square.sqrt())

    def matrix(self, rows: int, columns: int) -> QuantizedTensor:
        """A quantised matrix of a linear layer, in the format that the recipe gives its layer."""
        if self.weights.recipe == "nvidia":
            return self._fp8(rows, columns)
        return self._nvfp4(rows, columns)

    def experts(self, module: DeepseekV4Experts) -> None:
        """Fill the routed experts of one layer, one expert after another."""
        module.to_format(NVFP4)
        module.to_empty(device=self.device)
        hidden, inner = module.hidden_dim, module.intermediate_dim
        for expert in range(module.num_local_experts):
            gate, up = self._nvfp4(inner, hidden), self._nvfp4(inner, hidden)
            module.set_expert(expert, gate, up, self._nvfp4(hidden, inner))

    def _nvfp4(self, rows: int, columns: int) -> QuantizedTensor:
        codes = self._bytes(rows, columns // 2, 256)
        choice = self._bytes(rows, columns // 16, len(self._scales))
        scales = self._scales[choice.int()].view(torch.float8_e4m3fn)
        total = columns**-0.5 / self._deviation
        if self.weights.values == "mxfp4-cast":
            total = 2.0 ** round(torch.tensor(total).log2().item())
        return QuantizedTensor(codes, scales, self._full(total), NVFP4)

    def _fp8(self, rows: int, columns: int) -> QuantizedTensor:
        values = torch.randn(rows, columns, device=self.device, generator=self.generator)
        exponent = round(torch.tensor(columns**-0.5).log2().item())
        shape = FP8_BLOCK.scales_shape((rows, columns))
        scales = torch.full(shape, 127 + exponent, dtype=torch.uint8, device=self.device)
        codes = values.to(torch.float8_e4m3fn)
        return QuantizedTensor(codes, scales.view(torch.float8_e8m0fnu), None, FP8_BLOCK)

    def _bytes(self, rows: int, columns: int, below: int) -> torch.Tensor:
        empty = torch.empty((rows, columns), dtype=torch.uint8, device=self.device)
        return empty.random_(0, below, generator=self.generator)

    def _full(self, value: float) -> torch.Tensor:
        return torch.full((1,), value, dtype=torch.float32, device=self.device)

    def plain(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """A tensor that is not quantised, of the shape and dtype of ``like``."""
        if name.endswith("tid2eid"):
            return self._expert_table(*like.shape)
        if name.endswith("e_score_correction_bias"):
            return torch.zeros(like.shape, dtype=like.dtype, device=self.device)
        assert like.is_floating_point(), name
        if like.dim() != 2 or like.numel() <= _DRAWN_NUMBERS:
            return random_values(name, like.shape, self.generator).to(like.dtype)
        value = torch.empty(like.shape, dtype=like.dtype, device=self.device)
        for part in value.split(max(1, _DRAWN_NUMBERS // like.shape[1])):
            part.copy_(random_values(name, part.shape, self.generator))
        return value

    def _expert_table(self, vocabulary: int, top_k: int) -> torch.Tensor:
        """Distinct experts for each token id, ``[vocabulary, top_k]`` int64."""
        shape = (vocabulary, self.num_experts)
        order = torch.rand(shape, device=self.device, generator=self.generator).argsort(1)
        return order[:, :top_k].contiguous()
