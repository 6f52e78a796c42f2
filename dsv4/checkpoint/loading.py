"""Build a model from a checkpoint folder."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dsv4.checkpoint.arguments import as_dtype, check_prepare, check_reserve
from dsv4.checkpoint.filling import FillRequest, check_all, fill_new
from dsv4.checkpoint.reader import Checkpoint
from dsv4.checkpoint.report import mtp_layers, report_of
from dsv4.config import ModelConfig
from dsv4.layers.reserve import STEP_TOKENS, warm_allocator

if TYPE_CHECKING:
    from dsv4.model import DeepseekV4ForCausalLM

_logger = logging.getLogger("dsv4.checkpoint")


def load(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    numerics: str = "deepseek",
    activation: str = "bf16",
    dtype: torch.dtype | str | None = None,
    mtp: bool | None = None,
    mxfp4: str | None = None,
    pack: bool | str = True,
    reserve_tokens: int = STEP_TOKENS,
    input_scales: str = "stored",
    prepare: bool | str = True,
    progress: bool = True,
) -> DeepseekV4ForCausalLM:
    """Load a model from a checkpoint folder, ready to run on its device.

    Each weight has the format it is stored in, but for MXFP4 (``mxfp4``). NVFP4 weights are packed
    for the device's tensor cores (``pack``), each layer as soon as it is read; no value changes.
    Memory holds the model and less than one layer more: the files are mapped a part at a time.

    ``save`` and ``state_dict`` write a packed model as an unpacked one. MXFP4 weights that were
    converted are written as NVFP4 with the same values, and as MXFP4 by ``save`` with
    ``layout="deepseek"`` (with ``"nvidia"``, those of MTP layers).

    Headers, shapes, dtypes and the sizes of files are checked, and values that no sound checkpoint
    holds (NaN, infinite weights, scales of 0) raise. safetensors has no checksum: a byte of a value
    that was changed into another finite value cannot be detected. Compare digests of the files with
    those of their publisher where that matters.

    The model's ``load_report`` lists what was found and left out; the logger ``dsv4.checkpoint``
    logs the same, with a warning for each kind of tensor that was left out.

    Args:
        path: Folder with config.json and safetensors.
        device: Device of the model.
        numerics: ``"deepseek"`` or ``"transformers"``, see ``ModelConfig``.
        activation: ``"bf16"`` or ``"nvfp4"``.
        dtype: Dtype of plain weights, or its name; None keeps the checkpoint's. Weights of norms,
            sinks, hyper-connections and biases are not rounded to it.
        mtp: Multi-token-prediction layers. None loads those whose tensors are there, whatever
            config.json says. True demands at least one, and as many as config.json says. False
            leaves them out. This package has no layers for a DSpark draft head: None and False
            leave it out, True raises.
        mxfp4: Conversion of MXFP4 weights, for which there are no packed kernels.
            ``"lossless"`` converts a matrix to NVFP4 if no value changes, which holds if the
            exponents of its block scales differ by at most 17; gate and up of an expert get one
            global scale where that changes no value. Otherwise the matrix stays MXFP4 (in an
            expert: all experts of the layer), and a warning says so. ``"nvfp4"`` converts all and
            rounds where that is needed; ``"keep"`` converts none. None: ``"lossless"`` where the
            experts are packed, else ``"keep"``.
        pack: True packs the layers for which the device has kernels that take packed weights: NVFP4
            ones of a bfloat16 model on GPUs of compute capability 9.0, 10.0 and 10.3, linear layers
            from 8.0 on. On a CPU none is packed. ``"fragments_16x64"`` or ``"swizzled_128x4"``
            packs in this layout on any device, see ``dsv4.layers.pack_``. False keeps the layout of
            the checkpoint. The logger says which layers are not packed and why.
        reserve_tokens: On a GPU, tokens of a step whose memory PyTorch's allocator gets now, see
            ``dsv4.layers.warm_allocator``: for 4096 tokens 0.5 GB in Flash and 0.86 GB in Pro.
            Larger steps get more when they come. 0: none.
        input_scales: ``"stored"``: with ``activation="nvfp4"``, routed experts in NVFP4 need the
            calibrated input scales of the checkpoint. ``"token"``: stored input scales are left
            out, every NVFP4 layer makes a scale per token; ``dsv4.layers.calibrate`` can fix them
            later.
        prepare: On a GPU, preparations after which the first prompt takes no longer than later
            ones. True: the kernels of all steps are compiled, in parallel processes, or loaded if
            they were compiled before or are in a bundle (``dsv4.warmup``); then the runner of
            ``generate`` is made for one sequence of 8192 tokens and its CUDA graphs are captured
            (``dsv4.serving.prepare``, which says what memory that holds until
            ``dsv4.serving.release``). ``"kernels"``: the kernels alone, for a
            ``dsv4.serving.Runner`` of your own, whose ``warm_up`` captures its graphs. False:
            nothing; kernels are compiled at their first launch. Without memory for it, or where a
            capture fails, a warning says so, and the first ``generate`` does it.
        progress: Whether to show progress on stderr.

    Raises:
        CheckpointError: if the checkpoint is damaged or contradicts its configuration, or lacks the
            required layers or scales.
        FileNotFoundError: if there is no such folder, or no config.json in it.
        TypeError: if ``dtype`` is not a floating torch.dtype, ``mtp`` neither None nor a bool, or
            ``reserve_tokens`` no integer.
        torch.OutOfMemoryError: if the device has no room for the model and a step.
        ValueError: if an option is unknown, or config.json is not a configuration this package
            implements.
    """
    request = FillRequest(device, as_dtype(dtype), activation, mxfp4, pack, input_scales)
    check_reserve(reserve_tokens)
    check_prepare(prepare)
    with Checkpoint.open(path) as checkpoint:
        config = _configuration(checkpoint, numerics, activation, mtp)
        model = _filled(checkpoint, config, request, progress)
    warm_allocator(model, reserve_tokens, model.dtype)
    model.eval()
    if prepare:
        _prepare(model, max(reserve_tokens, STEP_TOKENS), prepare is True, progress)
        _reserve_again(model, reserve_tokens)
    return model


def verify(path: str | Path, *, progress: bool = True) -> int:
    """Read a checkpoint once and check all that ``load`` checks, without building a model.

    Args:
        path: Folder with config.json and safetensors.
        progress: Whether to show progress on stderr.

    Returns:
        The number of bytes that were read.

    Raises:
        CheckpointError: if the checkpoint is damaged or contradicts its configuration.
        FileNotFoundError: if there is no such folder, or no config.json in it.
        ValueError: if config.json is not a configuration this package implements.
    """
    with Checkpoint.open(path) as checkpoint:
        config = _configuration(checkpoint, "deepseek", "bf16", None)
        model, ignore = _on_meta(config)
        return check_all(model, checkpoint, ignore=ignore, progress=progress)


def _configuration(
    checkpoint: Checkpoint, numerics: str, activation: str, mtp: bool | None
) -> ModelConfig:
    """Return the configuration of the model to build, no larger than the checkpoint's tensors.

    Raises:
        CheckpointError: if the tensors are fewer, or the MTP layers that ``mtp`` demands missing.
    """
    config = checkpoint.config(numerics=numerics, activation=activation)
    drafts = mtp_layers(checkpoint, config.num_nextn_predict_layers, mtp)
    config = config.replace(num_nextn_predict_layers=drafts)
    checkpoint.check_size(config)
    return config


def _filled(
    checkpoint: Checkpoint, config: ModelConfig, request: FillRequest, progress: bool
) -> DeepseekV4ForCausalLM:
    """Build the model and fill it; its ``load_report`` says what was left out."""
    model, ignore = _on_meta(config)
    filled = fill_new(model, checkpoint, request, ignore=ignore, progress=progress)
    drafts = config.num_nextn_predict_layers
    model.load_report = report_of(checkpoint, drafts, request.input_scales, filled)
    return model


def _on_meta(config: ModelConfig) -> tuple[DeepseekV4ForCausalLM, tuple[str, ...]]:
    """Build a model without memory; with it patterns of tensors that it need not have."""
    from dsv4.model import DeepseekV4ForCausalLM

    with torch.device("meta"):
        model = DeepseekV4ForCausalLM(config)
    return model, () if config.num_nextn_predict_layers else ("mtp.*", "model.mtp.*")


def _prepare(model: DeepseekV4ForCausalLM, tokens: int, generation: bool, progress: bool) -> None:
    """Load or compile the kernels of steps, and make the runner of ``generate`` if requested."""
    from dsv4 import serving
    from dsv4.compilation.warmup import warm_loaded

    warmed = warm_loaded(model, tokens, progress)
    # Without its kernels a step could raise, which is for the step's caller.
    if generation and warmed is not None and not warmed.failed:
        serving.prepare(model)


def _reserve_again(model: DeepseekV4ForCausalLM, tokens: int) -> None:
    """Get the memory of a step once more, because each capture empties the allocator's cache.

    A step of ``reserve_tokens`` is the user's; where both have no room, the graphs are released.
    """
    from dsv4 import serving

    try:
        warm_allocator(model, tokens, model.dtype)
    except torch.OutOfMemoryError as error:
        serving.release(model)
        warm_allocator(model, tokens, model.dtype)
        _logger.warning(
            "generate is not prepared, because its graphs and a step of %d tokens (reserve_tokens) "
            "do not fit together: %s; its first call tries again",
            *(tokens, str(error).partition("\n")[0]),
        )
