"""Registration of this package's model classes with vLLM."""

from __future__ import annotations

import importlib.metadata

from dsv4.integrations.vllm import cpu_ops, places
from dsv4.integrations.vllm._log import logger
from dsv4.integrations.vllm.switches import Switches

ARCHITECTURE = "DeepseekV4ForCausalLM"
PARTS_CLASS = "dsv4.integrations.vllm.deepseek:DeepseekV4ForCausalLM"
# Drafts that vLLM's own proposers build, by the names of vLLM's registry.
DRAFT_CLASSES = {
    "DeepSeekV4MTPModel": "dsv4.integrations.vllm.draft:DeepSeekV4MTP",
    "DSparkDraftModel": "dsv4.integrations.vllm.draft:DSparkDeepseekV4ForCausalLM",
}
MODEL_CLASS = "dsv4.integrations.vllm.engine.model:Dsv4ForCausalLM"
MINIMUM_CAPABILITY = 90


def register_models(switches: Switches | None = None) -> None:
    """Register the classes that serve DeepSeek-V4 and its drafts; may be called again.

    A class is registered by name and is imported by the processes that build the model. There
    the signatures of what it calls are compared, too.

    Args:
        switches: What to register; None reads the environment.

    Raises:
        RuntimeError: if this vLLM or this device is not supported and ``DSV4_VLLM_STRICT=1``.
        ValueError: if an environment variable has an unknown value.
    """
    switches = Switches.of() if switches is None else switches
    if switches.off:
        return
    reason = unsupported_reason(switches)
    if reason:
        _leave(reason, switches)
        return
    from vllm import ModelRegistry

    if switches.model:
        cpu_ops.provide()
        ModelRegistry.register_model(ARCHITECTURE, MODEL_CLASS)
        return
    for architecture, name in {ARCHITECTURE: PARTS_CLASS, **DRAFT_CLASSES}.items():
        ModelRegistry.register_model(architecture, name)


def unsupported_reason(switches: Switches) -> str:
    """Say why nothing is registered in this process; empty if something is."""
    version = importlib.metadata.version("vllm")
    if not places.is_supported(version):
        return f"vLLM {version} is not among the releases it knows ({', '.join(places.VERSIONS)})"
    return "" if switches.model else _unsupported_platform()


def _unsupported_platform() -> str:
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return f"its kernels need an NVIDIA GPU, and vLLM runs on {current_platform.device_name}"
    if not current_platform.has_device_capability(MINIMUM_CAPABILITY):
        capability = current_platform.get_device_capability()
        actual = "unknown" if capability is None else capability.as_version_str()
        return f"its kernels need compute capability 9.0 or newer, and this GPU's is {actual}"
    return ""


def _leave(reason: str, switches: Switches) -> None:
    sentence = f"dsv4 leaves vLLM's DeepSeek-V4 untouched: {reason}."
    if switches.strict:
        raise RuntimeError(f"{sentence} DSV4_VLLM_STRICT=1 makes this an error.")
    logger().warning_once(sentence, scope="process")  # type: ignore[attr-defined]
