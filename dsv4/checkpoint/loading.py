"""Build a model from a checkpoint folder."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dsv4.checkpoint import rank_loading
from dsv4.checkpoint.filling import FillRequest, check_module, fill_module
from dsv4.checkpoint.host_experts import hosting_of
from dsv4.checkpoint.load_request import LoadRequest
from dsv4.checkpoint.preparing import make_ready
from dsv4.checkpoint.reader import Checkpoint
from dsv4.checkpoint.report import draft_of, ignored_drafts, report_of
from dsv4.config import ModelConfig
from dsv4.layers.host_experts import HostExperts
from dsv4.parallel.agreement import reported
from dsv4.parallel.context import ParallelContext

if TYPE_CHECKING:
    from dsv4.compilation.ahead import KernelsAhead
    from dsv4.model import DeepseekV4ForCausalLM


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
    reserve_tokens: int | None = None,
    input_scales: str = "stored",
    prepare: bool | str = True,
    progress: bool = True,
    device_mesh: Any = None,
    parallel: str | None = None,
    host_experts: str | int | HostExperts | torch.Tensor | None = None,
) -> DeepseekV4ForCausalLM:
    """Load a model from a checkpoint folder, ready to run on its device.

    Each weight has the format it is stored in, but for MXFP4 (``mxfp4``). NVFP4 weights are packed
    for the device's tensor cores (``pack``), each layer as soon as it is read; no value changes.
    Memory holds the model and less than one layer more: for a GPU, threads read a sixteenth of a
    layer ahead.

    ``save`` and ``state_dict`` write a packed model as an unpacked one. MXFP4 weights that were
    converted are written as NVFP4 with the same values, and as MXFP4 by ``save`` with
    ``layout="deepseek"`` (with ``"nvidia"``, those of draft layers).

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
        activation: ``"bf16"``, ``"nvfp4"`` or ``"fp8"``: what quantised weights multiply. With
            ``"fp8"`` activations are rounded to FP8, as DeepSeek's own code rounds them; weights
            that are exact in FP8 lose nothing then on FP8 tensor cores, where there are kernels for
            them (``load_report.packing.fp8``, and ``dsv4.explain`` of a GEMM). When that is so and
            another activation was requested, one line says so: in the log, or on stderr if the
            log drops INFO and ``progress`` is true.
        dtype: Dtype of plain weights, or its name; None keeps the checkpoint's. Weights of norms,
            sinks, hyper-connections and biases are not rounded to it.
        mtp: Draft layers: those of multi-token prediction, or the stages of a DSpark draft, which
            has their place. None loads those whose tensors are there, whatever config.json says of
            their number; a DSpark draft without its fields in config.json is left out. True demands
            a draft, and as many MTP layers as config.json says. False leaves them out.
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
            Larger steps get more when they come. 0: none. None: tokens of a step by default, 4096;
            16384 with experts in host memory and a buffer for long prompts, or 8192 or 4096 where
            memory does not hold such a step.
        input_scales: ``"stored"``: with ``activation="nvfp4"``, routed experts in NVFP4 need the
            calibrated input scales of the checkpoint. ``"token"``: stored input scales are left
            out, every NVFP4 layer makes a scale per token; ``dsv4.layers.calibrate`` can fix them
            later.
        prepare: On a GPU, preparations after which the first prompt compiles, captures and imports
            nothing. True: the kernels of all steps are compiled, in parallel processes that run
            while weights are read, or loaded if they were compiled before or are in a bundle
            (``dsv4.warmup``); then the runner of ``generate`` is made for one sequence of twice the
            tokens of a step by default (8192, with a buffer for long prompts 32768), its CUDA
            graphs are captured, and calls of ``generate`` are rehearsed (``dsv4.serving.prepare``,
            which says what memory that holds until ``dsv4.serving.release``). ``"kernels"``: the
            kernels alone, for a ``dsv4.serving.Runner`` of your own, whose ``warm_up`` captures its
            graphs. False: nothing; kernels are compiled at their first launch. Without memory for
            it, or where a capture fails, a warning says so, and the first ``generate`` does it.
        progress: Whether to show progress on stderr; on several ranks rank 0 does.
        device_mesh: For a model on several GPUs or processes, a ``DeviceMesh`` of
            ``torch.distributed``, a ``ProcessGroup``, or a ``ParallelContext`` with your own group.
            It needs ``parallel``. A mesh has one dimension, or the dimensions ``"dp"`` and
            ``"tp"``. In the second case ``parallel="tp"`` gives each row a model of its own, which
            the ranks of the row share. Each rank calls ``load`` with the same arguments, and reads
            and holds its share alone.
        parallel: ``"tp"``: attention is split by heads, the routed experts in ranges, the shared
            expert by its intermediate size, embedding and head by the vocabulary
            (``dsv4.parallel.split``); the KV cache is on every rank. ``"dp"``: each rank has
            sequences of its own, a range of the routed experts, to which the ranks send their
            tokens, and the whole of everything else.
        host_experts: Routed experts in host memory, for a model that is larger than its GPU. Of
            each layer some experts are static, on the GPU alone; the others lie in pinned host
            memory, and slots on the GPU are a cache for them. ``"auto"``: as few as free memory
            allows, none if the model fits. Counts of use (``dsv4.layers.expert_counts``): as
            ``"auto"``, with the most used experts static. A number: bytes of experts that lie there
            at least. A
            ``dsv4.layers.HostExperts`` says how many are static, how many slots there are, which
            experts are used most, and how large the buffer for the experts of long prompts is.
            None: all experts are on the device. One GPU of compute capability 9.0, or a CPU, in one
            process. Results do not change; draft layers stay on the GPU; ``save`` works,
            ``state_dict`` raises.

    Raises:
        CheckpointError: if the checkpoint is damaged or contradicts its configuration, or lacks the
            required layers or scales.
        FileNotFoundError: if there is no such folder, or no config.json in it.
        MemoryError: if host memory for experts does not suffice, or cannot be locked; the message
            says how much there is.
        TypeError: if ``device`` is neither a device nor a name, ``mtp`` neither None nor a bool, or
            ``reserve_tokens`` neither an integer nor None.
        RankError: if another rank failed.
        torch.OutOfMemoryError: if the device has no room for the model and a step.
        ValueError: if an option is unknown, there is no such device, ``dtype`` is not a floating
            torch.dtype, the model cannot be split over that many ranks, the ranks differ in
            configuration, options or version, or config.json is not a configuration this package
            implements.
    """
    from dsv4.compilation.ahead import KernelsAhead

    with rank_loading.arguments_checked(device_mesh, parallel):
        request = LoadRequest(
            path=path,
            values=FillRequest.of_new_model(
                device,
                dtype,
                activation,
                mxfp4=mxfp4,
                pack=pack,
                input_scales=input_scales,
                progress=progress,
            ),
            numerics=numerics,
            mtp=mtp,
            reserve_tokens=reserve_tokens,
            prepare=prepare,
            host_experts=host_experts,
        )
        request.check()
    context = rank_loading.context_of(request, device_mesh, parallel)
    request = rank_loading.request_of_rank(request, context)
    with reported(context), KernelsAhead() as ahead:
        model = _filled(request, context, ahead)
        make_ready(model, request, context, ahead)
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
        request = FillRequest(ignore=ignored_drafts(config), progress=progress)
        return check_module(_on_meta(config), checkpoint, request)


def _filled(
    request: LoadRequest, context: ParallelContext | None, ahead: KernelsAhead
) -> DeepseekV4ForCausalLM:
    """Build the model and fill it, while its kernels are compiled ahead.

    Its ``load_report`` says what was left out.
    """
    from dsv4.checkpoint.kernels_ahead import begin_kernels

    values = request.values
    with Checkpoint.open(request.path) as checkpoint:
        mtp = rank_loading.drafts_of_ranks(checkpoint, request.mtp, context)
        config = _configuration(checkpoint, request.numerics, values.activation, mtp)
        if context is not None:
            rank_loading.split_checkpoint(checkpoint, config, values, context)
        hosting = hosting_of(request.host_experts, checkpoint, config, values)
        model = _on_meta(config, context)
        values = replace(values, ignore=ignored_drafts(config))
        begin = None  # where experts in host memory will be is not known yet
        if hosting is None:
            begin = functools.partial(begin_kernels, ahead, model, checkpoint, request)
        filled = fill_module(model, checkpoint, values, hosting, before_reading=begin)
        model.load_report = report_of(checkpoint, config, values.input_scales, filled)
    return model


def _configuration(
    checkpoint: Checkpoint, numerics: str, activation: str, mtp: bool | None
) -> ModelConfig:
    """Return the configuration of the model to build, no larger than the checkpoint's tensors.

    Raises:
        CheckpointError: if the tensors are fewer, or the MTP layers that ``mtp`` demands missing.
    """
    config = checkpoint.config(numerics=numerics, activation=activation)
    config = draft_of(checkpoint, config, mtp)
    checkpoint.check_size(config)
    return config


def _on_meta(config: ModelConfig, context: ParallelContext | None = None) -> DeepseekV4ForCausalLM:
    """Build a model without memory."""
    from dsv4.model import DeepseekV4ForCausalLM

    with torch.device("meta"):
        return DeepseekV4ForCausalLM(config, parallel=context)
