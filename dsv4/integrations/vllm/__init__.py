"""DeepSeek-V4 under vLLM, on this package's kernels.

vLLM finds ``register`` by its entry point ``vllm.general_plugins`` and calls it in every process.
Nothing else in this package imports this folder, and this module does not import vLLM.

Two designs, chosen by the environment variable ``DSV4_VLLM``:

- *parts*: vLLM's model, scheduler, cache and parallelism; this package's kernels in its layers.
- *model*: this package's model under vLLM's scheduler, block tables and API server.
"""

from __future__ import annotations


def register() -> None:
    """Tell vLLM's model registry which class serves DeepSeek-V4; the entry point of the plugin.

    Does nothing with ``DSV4_VLLM=off``, or where this vLLM is not one that the plugin knows: then
    one sentence is logged and vLLM runs its own code.

    Raises:
        RuntimeError: if this vLLM is not known and ``DSV4_VLLM_STRICT=1``.
        ValueError: if an environment variable has an unknown value.
    """
    from dsv4.integrations.vllm.plugin import register_models

    register_models()
