"""Use this package's layers inside transformers' DeepSeek-V4.

``apply`` swaps the modules of a loaded model, ``from_pretrained`` loads an NVFP4 checkpoint, which
transformers alone cannot. Both change one model instance; no class is patched, and importing this
module imports neither transformers nor anything that needs it.

What differs from transformers' own modules:

* Inference only: a backward pass through a swapped module raises.
* ``output_attentions=True`` raises where the attention was swapped, because the weights are never
  materialised. ``output_hidden_states`` and ``output_router_logits`` work.
* Masks: attention chooses keys. An additive mask with 4 dimensions is obeyed if its entries are 0
  and at most -1e4, also outside the window; one that adds other numbers, or is bool, raises.
* ``attn_implementation`` other than ``"eager"`` raises where the attention was swapped.
* Keyword arguments that transformers would pass down and ignore raise ``TypeError``, but for those
  known to have no effect (``dsv4.integrations._arguments.WITHOUT_EFFECT``).
* ``save_pretrained`` works while all weights are plain, and raises while one is quantised.
* The experts ignore ``config._experts_implementation``; ``set_experts_implementation`` is harmless.
  Where they were not swapped, ``experts_implementation="dsv4"`` runs transformers' own experts on
  this package's operators, see ``register_experts``.
* Left-padded batches: prompts of different lengths in one batch give each other's positions to the
  compressors, in transformers as here, because a compressed entry covers slots of the padded row.
  Prefill equals transformers'. In decode, transformers shows all entries of a heavily compressed
  layer, and these modules show those that prefill would show. Neither equals the unpadded prompt,
  as soon as a compressor has closed a window: batch prompts of equal length, or generate with
  ``past_key_values=paged_cache(model, ...)``, which packs prompts of any lengths without padding,
  as ``dsv4.DeepseekV4ForCausalLM.generate`` does.
* With ``paged_cache`` attention reads this package's pages instead of growing tensors. Beam search
  raises. So do masks that say more than which new tokens are padding, and positions that are not
  the cache's. ``crop`` takes back up to ``rollback`` tokens. transformers refuses assisted
  generation of a model whose cache cannot, as its own cannot: call ``generate_assisted``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from dsv4.integrations import _expert_parallel
from dsv4.integrations._applying import modeling_module, swap_modules
from dsv4.integrations._configs import config_of, with_modes
from dsv4.integrations._experts import EXPERTS_IMPLEMENTATION, register_forward
from dsv4.integrations._report import NotReplaced, Replaced, Report
from dsv4.integrations._swap import PARTS
from dsv4.kv_cache.layer_cache import ROLLBACK

__all__ = [
    "EXPERTS_IMPLEMENTATION",
    "PARTS",
    "NotReplaced",
    "Replaced",
    "Report",
    "apply",
    "from_pretrained",
    "generate_assisted",
    "paged_cache",
    "register_expert_parallel",
    "register_experts",
]


def __getattr__(name: str) -> Any:
    """The former name of ``NotReplaced``, with a warning."""
    if name == "Kept":
        message = "Kept is now NotReplaced; the old name goes with the next release"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return NotReplaced
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register_experts() -> None:
    """Make ``experts_implementation="dsv4"`` known to transformers; ``apply`` does so, too.

    ``from_pretrained(..., experts_implementation="dsv4")`` of transformers and
    ``model.set_experts_implementation("dsv4")`` then run the experts of a stock DeepSeek-V4, plain
    stacked weights, on this package's operators. For inference only: a backward pass raises. Other
    models' experts (with bias, transposed weights, another activation or gate) raise when they are
    called.

    Raises:
        ImportError: if transformers is not installed.
    """
    modeling_module()
    register_forward()


def register_expert_parallel() -> None:
    """Make ``DistributedConfig(ep_implementation="dsv4")`` known to transformers.

    For stock DeepSeek-V4 experts that transformers distributes; ``from_pretrained`` of this module
    does so for packed ones. Each rank runs its experts on the batch that all ranks share, and
    ``dsv4.ops.all_reduce`` sums the results, with the same bits on all ranks.

    Raises:
        ImportError: if transformers is not installed or older than 5.24.
    """
    modeling_module()
    _expert_parallel.register()


def apply(
    model: Any,
    *,
    parts: Iterable[str] | None = None,
    numerics: str = "transformers",
    activation: str = "bf16",
) -> Report:
    """Swap modules of a loaded transformers model in place by this package's.

    The new modules hold the same parameters and buffers: nothing is copied, and the keys of
    ``state_dict`` do not change. A module stays, and the report says why, where it is not of the
    expected class, holds other tensors than expected (adapters, quantisers), was hooked or patched
    by something else, or is this package's already. Applying twice therefore replaces nothing.

    Args:
        model: transformers' ``DeepseekV4ForCausalLM`` or ``DeepseekV4Model``.
        parts: Which parts to swap, of ``PARTS``; None for all.

            ====================  ==========================================================
            ``attention``         attention with compressors, indexer, its norms, rotary tables
            ``experts``           routed experts and the block that adds the shared expert
            ``router``            both kinds of router
            ``mlp``               the shared expert
            ``hyper_connection``  hyper-connections, decoder layers around them, head collapse
            ``norm``              the RMS norms that remain
            ``lm_head``           the output head
            ====================  ==========================================================
        numerics: ``"transformers"``, or ``"deepseek"`` for the reference behaviour, which a model
            has entirely only if all parts are swapped.
        activation: ``"bf16"``, or ``"nvfp4"`` or ``"fp8"`` to quantise what quantised weights
            multiply.

    Returns:
        The report of replaced modules and of others; ``report.undo()`` undoes the swap.

    Raises:
        ImportError: if transformers is not installed.
        TypeError: if ``model`` is not one of the two classes, or a forward of the installed
            transformers has arguments that its replacement does not know. Nothing is changed then.
        ValueError: if a part, the numerics or the activation is unknown, the model's configuration
            is not one this package implements, or its rotary tables differ from each other. Nothing
            is changed then.
    """
    modeling = modeling_module()
    if not isinstance(model, (modeling.DeepseekV4ForCausalLM, modeling.DeepseekV4Model)):
        raise TypeError(
            f"apply: model is a {type(model).__module__}.{type(model).__qualname__}, wanted "
            "transformers' DeepseekV4ForCausalLM or DeepseekV4Model"
        )
    config = with_modes(config_of(model.config), numerics, activation)
    return swap_modules(model, modeling, config, _chosen(parts))


def from_pretrained(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str | None = None,
    numerics: str = "transformers",
    activation: str = "bf16",
    parts: Iterable[str] | None = None,
    mxfp4: str | None = None,
    pack: bool | str = True,
    reserve_tokens: int | None = None,
    input_scales: str = "stored",
    compile_kernels: bool = True,
    progress: bool = True,
    distributed_config: Any = None,
) -> Any:
    """Load a transformers ``DeepseekV4ForCausalLM`` from a checkpoint of any layout.

    Quantised weights stay quantised in the parts that are swapped, and are dequantised in the
    others. NVFP4 weights are packed as ``dsv4.load`` packs them. transformers has no
    multi-token-prediction layers: the checkpoint's are left out, which is logged as a warning and
    listed in ``model.dsv4_report.left_out``.

    Args:
        path: Folder with config.json and safetensors, see ``dsv4.checkpoint``.
        device: Device of the model.
        dtype: Dtype of plain weights, or its name; None keeps the checkpoint's. What the installed
            transformers keeps in float32 (norms, sinks, hyper-connections, biases) is never
            narrower, except for norms that are left to transformers up to 5.17, which cannot run
            them so.
        numerics: See ``apply``.
        activation: See ``apply``.
        parts: See ``apply``.
        mxfp4: See ``dsv4.load``.
        pack: See ``dsv4.load``.
        reserve_tokens: See ``dsv4.load``.
        input_scales: See ``dsv4.load``.
        compile_kernels: On a GPU, whether the kernels of prompts and decode steps are compiled now,
            in parallel processes while weights are read, or loaded if they were compiled before or
            are in a bundle, see ``dsv4.warmup``. With ``distributed_config`` Triton's are compiled
            at their first launch.
        progress: Whether to show progress on stderr.
        distributed_config: transformers' ``DistributedConfig(tp_size=N, ep_size=N, tp_plan={},
            ep_implementation="dsv4")`` in each of N processes (``torchrun``): each reads and holds
            the experts of its rank, and everything else whole. None: this process alone.

    Returns:
        The model in evaluation mode, with generation_config.json of the folder, or else begin and
        end tokens of the configuration. Its ``dsv4_report`` says what was replaced; the swap cannot
        be undone. Save it with ``dsv4.save``: ``model.save_pretrained`` raises while a weight is
        quantised, because transformers could not read it.

    Raises:
        ImportError: if transformers is not installed, or, with ``distributed_config``, older than
            5.24.
        CheckpointError: if the checkpoint is damaged or contradicts its configuration.
        TypeError: if transformers' forwards have arguments that are not known here, or ``device``
            is neither a device nor a name.
        ValueError: if an option is unknown, there is no such device, or config.json is not a
            configuration this package implements.
    """
    from dsv4.checkpoint.arguments import check_reserve
    from dsv4.checkpoint.filling import FillRequest
    from dsv4.integrations._loading import PretrainedRequest, load_pretrained

    modeling = modeling_module()
    request = PretrainedRequest(
        path=path,
        parts=_chosen(parts),
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
        reserve_tokens=reserve_tokens,
        compile_kernels=compile_kernels,
        distributed_config=distributed_config,
    )
    check_reserve(reserve_tokens)
    return load_pretrained(request, modeling)


def paged_cache(
    model: Any,
    *,
    max_tokens: int,
    max_sequences: int = 1,
    max_chunk: int | None = None,
    index_format: str = "plain",
    pool_tokens: int | None = None,
    window_pages: int | None = None,
    rollback: int = ROLLBACK,
) -> Any:
    """Make a paged cache for ``model.generate(..., past_key_values=cache)``.

    The model's attention has to be this package's, see ``apply``. Each row of the batch is a
    sequence; its padding is left out, so that left-padded prompts give what they give alone, and
    ``position_ids`` are those of the cache. ``cache.reset()`` makes it empty for another batch.

    Args:
        model: transformers' ``DeepseekV4ForCausalLM`` or ``DeepseekV4Model``, swapped.
        max_tokens: Most tokens of a row, prompt and new ones.
        max_sequences: Most rows.
        max_chunk: Most tokens of a row in one forward; a longer prompt needs ``prefill_chunk_size``
            of generate. None: ``max_tokens``.
        index_format: See ``dsv4.PagedCache``.
        pool_tokens: See ``dsv4.PagedCache``.
        window_pages: See ``dsv4.PagedCache``.
        rollback: Tokens of a row that ``crop`` can take back: most tokens of a guess.

    Returns:
        A transformers ``Cache``; its ``paged`` is the ``dsv4.PagedCache``.

    Raises:
        ImportError: if transformers is not installed.
        TypeError: if the attention of a layer is not this package's.
        ValueError: if a number is below 1 or the format unknown.
    """
    modeling_module()
    from dsv4.integrations._cache import paged_cache_for

    return paged_cache_for(
        model,
        max_tokens=max_tokens,
        max_sequences=max_sequences,
        max_chunk=max_chunk,
        index_format=index_format,
        pool_tokens=pool_tokens,
        window_pages=window_pages,
        rollback=rollback,
    )


def generate_assisted(model: Any, *args: Any, **options: Any) -> Any:
    """Call ``model.generate`` for assisted generation: prompt lookup or a draft model.

    transformers refuses that of DeepSeek-V4, because its own cache cannot go back. A
    ``paged_cache`` can, by ``rollback`` tokens; so guesses are at most as long.

    Args:
        model: Swapped, see ``apply``.
        args: Of ``model.generate``.
        options: Of ``model.generate``; ``past_key_values`` is a ``paged_cache`` of this model, and
            ``prompt_lookup_num_tokens`` or ``assistant_model`` says where guesses come from.

    Returns:
        What ``model.generate`` returns.

    Raises:
        ImportError: if transformers is not installed.
        TypeError: if ``past_key_values`` is not a ``paged_cache``.
        ValueError: if a guess is longer than what can be taken back.
    """
    modeling_module()
    from dsv4.integrations import _cache

    return _cache.generate_assisted(model, args, options)


def _chosen(parts: Iterable[str] | None) -> tuple[str, ...]:
    if parts is None:
        return PARTS
    if isinstance(parts, str):
        raise TypeError(f"parts is the string {parts!r}, wanted a sequence such as ({parts!r},)")
    requested = tuple(parts)
    unknown = [part for part in requested if part not in PARTS]
    if unknown or not requested:
        raise ValueError(f"parts is {requested}, wanted some of {', '.join(PARTS)}")
    return requested
