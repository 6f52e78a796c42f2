"""An engine of vLLM in a process of its own: ``python -m tests.integrations.vllm.engine_process``.

Reads a request as JSON from its standard input and writes the answer as the last line of its
standard output. vLLM reads its environment when it is imported, so every engine has a process.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions that workers run
    "VLLM_PLUGINS": "",
    "DSV4_VLLM": "model",
    "DSV4_VLLM_STRICT": "1",
    "DSV4_VLLM_CHECK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
FLOAT32 = {"dsv4": {"dtype": "float32"}}  # so that tokens do not depend on the shape of a step


def register() -> None:
    """Register the model as the plugin does, and let vLLM serve on this CPU as on a GPU.

    Where a CPU has no AMX, vLLM turns off chunked prefill, because its own model's kernels need it.
    """
    import torch

    from dsv4.integrations import vllm as plugin

    torch.cpu._is_amx_tile_supported = lambda: True
    plugin.register()


def environment(runner: str) -> dict[str, str]:
    """Environment of a process with Model Runner V1 or V2.

    V2 is written in Triton. Without a driver vLLM takes Triton for absent, unless no GPU is
    visible; Triton's interpreter then runs its kernels.
    """
    values = dict(os.environ) | ENVIRONMENT | {"VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "V2"))}
    values.pop("TRITON_INTERPRET", None)
    if runner == "V2":
        values |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    return values


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Run batches of prompts, and tell tokens, preemptions and what is free afterwards."""
    import vllm

    register()
    llm = vllm.LLM(
        model=request["model"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        disable_log_stats=False,
        additional_config={"dsv4": FLOAT32["dsv4"] | request.get("dsv4", {})},
        **request["options"],
    )
    if request["options"].get("tensor_parallel_size", 1) > 1:
        tokens = [_generate(vllm, llm, batch) for batch in request["batches"]]
        return {"tokens": tokens, "ranks": llm.apply_model(_rank)}
    core = llm.llm_engine.engine_core.engine_core
    model = core.model_executor.driver_worker.get_model()
    said = _listen()
    checks: list[bool] = []
    _watch(model, checks)
    free = _free(core)
    tokens = []
    for batch in request["batches"]:
        # What a page, a state row or a table holds before a request must not matter.
        _poison(model)
        tokens.append(_generate(vllm, llm, batch))
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    finite, steps, free_after = all(checks), len(checks), _free(core)
    assert not said, said
    _incidents(vllm, llm, model)
    return {
        "tokens": tokens,
        "incidents": said,
        "preemptions": metrics["vllm:num_preemptions"].value,
        "free": free,
        "free_after": free_after,
        "finite": finite,
        "activation": model.model.config.activation,
        "steps": steps,
        "runner": type(core.model_executor.driver_worker.worker.model_runner).__module__,
        "prefix_caching": core.vllm_config.cache_config.enable_prefix_caching,
        "chunk": core.vllm_config.scheduler_config.max_num_batched_tokens,
    }


def _generate(vllm: Any, llm: Any, batch: dict[str, Any]) -> list[list[int]]:
    options = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    parameters = [vllm.SamplingParams(max_tokens=n, **options) for n in batch["new"]]
    prompts = [{"prompt_token_ids": ids} for ids in batch["prompts"]]
    outputs = llm.generate(prompts, parameters, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def _watch(model: Any, checks: list[bool]) -> None:
    logits_of = model.compute_logits

    def compute_logits(hidden: Any) -> Any:
        logits = logits_of(hidden)
        checks.append(bool(logits.isfinite().all()))
        return logits

    model.compute_logits = compute_logits


def _poison(model: Any) -> None:
    for module in model.cache.modules.values():
        module.kv_cache.fill_(0xFF)
    for state in model.cache.states.values():
        state.fill_(float("nan"))
    for table in model.cache.tables.values():
        table.fill_(-1)


def _rank(model: Any) -> list[int]:
    """Return number and size of a worker's rank; runs there."""
    context = model.model.parallel
    assert model.model.model.layers[0].mlp.experts.num_local_experts * context.size == (
        model.model.config.n_routed_experts
    )
    return [context.rank, context.size]


def _listen() -> list[str]:
    """What ``DSV4_VLLM_CHECK`` logs from now on."""
    said: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("vllm.plugins.dsv4").addHandler(handler)
    return said


def _incidents(vllm: Any, llm: Any, model: Any) -> None:
    """Break a weight for two requests; the next step logs what became of it."""
    weight = model.model.model.layers[1].self_attn.q_a_norm.weight
    stored = weight.data.clone()
    batch = {"prompts": [[5, 6, 7], [8, 9]], "new": [2, 2]}
    for values in (stored * float("nan"), stored):
        weight.data.copy_(values)
        _generate(vllm, llm, batch)


def _free(core: Any) -> list[int]:
    """Free blocks of vLLM's pool, and free rows."""
    manager = core.scheduler.kv_cache_manager
    rows = manager.coordinator.single_type_managers[-1]
    return [manager.block_pool.get_num_free_blocks(), len(rows._free_rows)]


if __name__ == "__main__":
    print(json.dumps(answer(json.load(sys.stdin))))
