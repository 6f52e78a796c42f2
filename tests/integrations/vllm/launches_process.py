"""What vLLM's DeepSeek-V4 with this package's modules launches on a GPU, listed on a CPU.

``python -m tests.integrations.vllm.launches_process PORT FOLDER`` answers lines of standard input,
each an engine and a step. It builds vLLM's model or draft with the widths of Flash on the meta
device, where modules compute shapes alone, and lists what the plugin's warm-up launches. The
answer, a line that begins with ``ANSWER``, names the kernels that the step would compile then.

Triton is not interpreted in this process, and CuTeDSL's kernels are not listed: the plugin compiles
those of every number of tokens.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

ANSWER = "ANSWER "
MAIN, MTP, DSPARK = "main", "mtp", "dspark"
DRAFTED = {MTP: 1, DSPARK: 5}
WINDOW_BLOCK = 64
LAYERS, EXPERTS = 5, 32


@dataclass(frozen=True)
class Setting:
    """An engine.

    Attributes:
        model: ``"main"`` or a draft.
        drafts: Draft that the engine has beside the main model; empty: none.
        max_len: Tokens of the longest sequence.
        max_tokens: Most tokens of a step.
        max_sequences: Most sequences of a step.
        ranks: Tensor-parallel ranks; the model is the first one's.
    """

    model: str = MAIN
    drafts: str = ""
    max_len: int = 8192
    max_tokens: int = 4096
    max_sequences: int = 64
    ranks: int = 1


@dataclass(frozen=True)
class Step:
    """A step, whole or what stays eager between pieces of a captured graph.

    Attributes:
        tokens: Tokens that attend.
        longest: Longest context.
        padding: Tokens behind them.
        captured: Whether a graph is being captured.
        pieces: Whether the indexer's queries come from a captured piece.
        prefilled: How many of the tokens vLLM takes for tokens of prompts.
    """

    tokens: int
    longest: int
    padding: int = 0
    captured: bool = False
    pieces: bool = False
    prefilled: int = 0


def write_config(folder: Path, setting: Setting) -> None:
    """Write the JSON files of a checkpoint of NVIDIA's layout, without weights."""
    from dsv4.checkpoint import layouts
    from dsv4.config import DSparkConfig, ModelConfig

    whole = ModelConfig.flash()
    config = whole.replace(
        num_hidden_layers=LAYERS,
        layer_types=whole.layer_types[:LAYERS],
        mlp_layer_types=whole.mlp_layer_types[:LAYERS],
        n_routed_experts=EXPERTS,
        vocab_size=16384,
    )
    if DSPARK in (setting.model, setting.drafts):
        layers = tuple(range(LAYERS)[-3:])
        dspark = DSparkConfig(
            block_size=5, noise_token_id=9, target_layer_ids=layers, markov_rank=256
        )
        config = config.replace(num_nextn_predict_layers=0, dspark=dspark)
    layout = layouts.Layout("nvidia", lambda name: False, torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    for name, body in layouts.documents(layout, config, {}).items():
        (folder / name).write_text(json.dumps(body))


class Engine:
    """A model on the meta device with the caches that vLLM would bind.

    Attributes:
        model: vLLM's, with this package's modules.
        warm: Keys of the kernels that the warm-up launches.
    """

    def __init__(self, folder: Path, setting: Setting) -> None:
        from dsv4.integrations.vllm import deepseek, draft

        self.setting = setting
        write_config(folder, setting)
        self.config = engine_config(folder, setting)
        classes = {MAIN: deepseek.DeepseekV4ForCausalLM, MTP: draft.DeepSeekV4MTP}
        classes[DSPARK] = draft.DSparkDeepseekV4ForCausalLM
        with built_on_meta(self.config), first_of(setting.ranks):
            self.model: Any = classes[setting.model](vllm_config=self.config).to("meta")
        for module in self.model.modules():
            complete(module, self.config)
        with on_cpu():
            self.warm = self._listed()

    def late(self, call: Any) -> list[str]:
        """Describe the kernels that ``call`` launches and the warm-up does not."""
        kernels = self._keys(call)
        return sorted(text for key, text in kernels.items() if key not in self.warm)

    def _keys(self, call: Any) -> dict[bytes, str]:
        from dsv4.compilation.launch_recorder import launches_of
        from dsv4.compilation.target import Target

        with on_cpu():
            steps = launches_of(call, Target("sm_90a"))
        return {key: described(request) for key, request in steps.requests.items()}

    def _listed(self) -> dict[bytes, str]:
        """What the plugin lists before its warm-up."""
        from dsv4.compilation.target import Target
        from dsv4.integrations.vllm import warm
        from dsv4.integrations.vllm.listed import Listed

        context = self.model.dsv4
        pieces = functools.partial(warm.pieces, self.model, warm.most_tokens(context))
        listed, kernels = Listed(self.model, context, pieces), {}
        for steps in listed.parts(Target("sm_90a")):
            kernels |= {key: described(request) for key, request in steps.requests.items()}
        assert not listed.problems, listed.problems
        return kernels

    def run(self, step: Step) -> None:
        """Run a step of the main model, or of a draft with as many tokens."""
        count = step.tokens + step.padding
        positions = meta(count)
        with in_step(self, step, positions):
            if self.setting.model == MAIN:
                self.model(meta(count), positions)
            elif self.setting.model == MTP:
                self._run_mtp(count, positions)
            else:
                self._run_dspark(count, positions)

    def _run_mtp(self, count: int, positions: torch.Tensor) -> None:
        layer = next(iter(self.model.model.layers.values()))
        width = layer.hc_mult * layer.config.hidden_size
        streams = meta(count, width, dtype=torch.bfloat16)
        streams = self.model(meta(count), positions, streams)
        self.model.compute_logits(streams[: min(count, self.setting.max_sequences)])

    def _run_dspark(self, count: int, positions: torch.Tensor) -> None:
        model = self.model.model
        wide = meta(count, len(model.target_layer_ids) * model.hidden_size, dtype=torch.bfloat16)
        slots = [meta(count) for _ in model.layers]
        main_x = self.model.combine_hidden_states(wide)
        self.model.precompute_and_store_context_kv(main_x, positions, slots)
        hidden = self.model(meta(count), positions)
        self.model.compute_logits(hidden)


def meta(*size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """An empty tensor on the meta device."""
    return torch.empty(size, dtype=dtype, device="meta")


def described(request: Any) -> str:
    """Name of a kernel, with the constants and assumptions that it was compiled for."""
    names = list(request.signature)
    constants = {names[path[0]]: value for path, value in request.constants.items()}
    exact = [names[path[0]] for path, value in request.attrs.items() if value]
    return f"{request.name} {constants}, multiples of 16: {exact}, {request.signature}"


def engine_config(folder: Path, setting: Setting) -> Any:
    """Return vLLM's configuration."""
    from vllm.config import VllmConfig

    from tests.integrations.vllm import build

    options: dict[str, Any] = {}
    drafts = setting.drafts or (setting.model if setting.model != MAIN else "")
    if drafts:
        options["speculative_config"] = {
            "method": drafts,
            "num_speculative_tokens": DRAFTED[drafts],
        }
    with mock.patch.object(VllmConfig, "use_v2_model_runner", True):
        config = build.engine_config(folder, **options)
    config.model_config.max_model_len = setting.max_len
    config.scheduler_config.max_num_seqs = setting.max_sequences
    config.scheduler_config.max_num_batched_tokens = setting.max_tokens
    config.parallel_config.tensor_parallel_size = setting.ranks
    return config


@contextmanager
def first_of(ranks: int) -> Iterator[None]:
    """Be the first rank of a tensor-parallel group, which exchanges by operators as on a GPU."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    with (
        mock.patch.object(group, "world_size", ranks),
        mock.patch.object(group, "use_custom_op_call", True),
    ):
        yield


@contextmanager
def built_on_meta(config: Any) -> Iterator[None]:
    """Build modules as on a GPU, without memory."""
    from dsv4.cute import supports
    from tests.integrations.vllm import build

    with (
        build.hopper(config),
        torch.device("meta"),
        mock.patch.object(supports, "no_packed_weights", return_value=None),
    ):
        yield


def complete(module: nn.Module, config: Any) -> None:
    """Give a module what loading, streams and caches would have given it."""
    from dsv4.compilation.recipe import Weight
    from dsv4.integrations.vllm import attention, experts, shared_expert

    method: Any = getattr(module, "quant_method", None)
    source = getattr(method, "dsv4_source", None)
    if isinstance(method, experts._Experts):
        with mock.patch.object(experts.DeepseekV4Experts, "set_stacks"):
            held = experts.built_experts(module, SimpleNamespace(gate_up=None, down=None))
        Weight("nvfp4").declare(held, "sm_90a")
        module.dsv4_experts = held  # type: ignore[assignment]
        shared_expert.adopt(source.runner)
    elif source is not None:
        method.process_weights_after_loading(module)
    elif method is not None and hasattr(module, "weight"):
        method.apply = lambda layer, x, bias=None: nn.functional.linear(x, layer.weight)
    if isinstance(module, attention.Attention):
        bind(module, config)


def bind(module: Any, config: Any) -> None:
    """Give a layer the caches that vLLM's runner binds, and no streams."""
    from dsv4.integrations.vllm import attention_warm

    module.aux_stream_list = None
    block = attention_warm.block_tokens(module, config)
    module.swa_cache_layer.kv_cache = pages(WINDOW_BLOCK, 584)
    if module.compressor is None:
        return
    module.kv_cache = pages(block // module.compress_ratio, 584)
    compressors = [module.compressor]
    if module.indexer is not None:
        module.indexer.aux_stream = None
        module.indexer.k_cache.kv_cache = pages(block // 4, 132)
        compressors.append(module.indexer.compressor)
    for cache in (compressor.state_cache for compressor in compressors):
        size = (9, cache.block_size, cache.state_dim)
        cache.kv_cache = meta(*size, dtype=torch.float32)


def pages(entries: int, entry_bytes: int) -> torch.Tensor:
    """Pages in blocks that hold those of several layers."""
    stride = 3 * (-(-entries * entry_bytes // 576) * 576)
    memory = meta(9 * stride, dtype=torch.uint8)
    return memory.as_strided((9, entries, entry_bytes), (stride, entry_bytes, 1))


@contextmanager
def on_cpu() -> Iterator[None]:
    """Replace what vLLM runs in kernels that the meta device does not have."""
    from vllm.model_executor.layers.fused_moe.router import base_router, gate_linear

    mm = torch.mm

    def product(a: Any, b: Any, out_dtype: Any = None) -> Any:
        return mm(a, b).to(out_dtype or a.dtype)

    def routing(self: Any, hidden_states: Any, **_: Any) -> Any:
        size = (hidden_states.shape[0], 6)
        return meta(*size, dtype=torch.float32), meta(*size, dtype=torch.int32)

    def gate(self: Any, x: Any) -> Any:
        return x.float() @ self.weight.float().T, None

    with ExitStack() as stack:
        for owner, name, value in (
            (torch, "mm", product),
            (base_router.BaseRouter, "select_experts", routing),
            (gate_linear.GateLinear, "forward", gate),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


@contextmanager
def in_step(engine: Engine, step: Step, positions: torch.Tensor) -> Iterator[None]:
    """Set vLLM's forward context for a step."""
    from vllm.forward_context import get_forward_context, set_forward_context

    from dsv4.integrations.vllm import attention_step, indexer

    with ExitStack() as stack:
        stack.enter_context(set_forward_context({}, engine.config))
        context = get_forward_context()
        for module in engine.model.modules():
            if hasattr(module, "swa_cache_layer"):
                context.attn_metadata |= metadata(engine, module, step, positions)
        if step.captured:
            for module in (attention_step, indexer):
                stack.enter_context(mock.patch.object(module, "capturing", return_value=True))
        if step.pieces:
            patch = mock.patch.object(indexer.Indexer, "takes_all", return_value=False)
            stack.enter_context(patch)
        yield


def metadata(
    engine: Engine, module: Any, step: Step, positions: torch.Tensor
) -> dict[str, SimpleNamespace]:
    """Make what vLLM's builders would, those of this package where they are used."""
    from vllm.v1.worker.block_table import get_block_table_width

    setting, count, padded = engine.setting, step.tokens, positions.shape[0]
    own = module.dsv4_state.has_own_metadata
    block = module.dsv4_state.limits.block_tokens

    def table(size: int) -> torch.Tensor:
        width = get_block_table_width(-(-setting.max_len // size), size)
        return meta(setting.max_sequences, width, dtype=torch.int32)

    def seen(number: int, width: int) -> torch.Tensor | None:
        return meta(number, 1, width, dtype=torch.int32) if number and not own else None

    rows = meta(count, dtype=torch.int32)
    width = 192 if setting.model == DSPARK else module.window_size
    made = {
        module.swa_cache_layer.prefix: SimpleNamespace(
            slot_mapping=meta(padded),
            block_table=table(WINDOW_BLOCK),
            block_size=WINDOW_BLOCK,
            is_valid_token=None if own else meta(padded, dtype=torch.bool),
            token_to_req_indices=rows,
            decode_swa_indices=seen(count - step.prefilled, width),
            prefill_swa_indices=seen(step.prefilled, module.window_size),
            num_decode_tokens=count if own else count - step.prefilled,
            num_prefill_tokens=0 if own else step.prefilled,
        )
    }
    if module.compressor is None:
        return made
    entries = {
        "max_seq_len": step.longest,
        "block_table": table(block),
        "slot_mapping": None if own else meta(count),
    }
    made[module.prefix] = SimpleNamespace(**entries)
    compressors = [module.compressor]
    if module.indexer is not None:
        keys = {**entries, "slot_mapping": None}
        made[module.indexer.k_cache.prefix] = SimpleNamespace(**keys)
        compressors.append(module.indexer.compressor)
    for compressor in compressors:
        size = compressor.state_cache.block_size
        made[compressor.state_cache.prefix] = SimpleNamespace(
            slot_mapping=meta(padded), token_to_req_indices=rows, block_table=table(size)
        )
    return made


def main(port: int, folder: Path) -> None:
    """Answer steps."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    engines: dict[Setting, Engine] = {}
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
        initialize_model_parallel(1, 1)
        for line in sys.stdin:
            request = json.loads(line)
            setting = Setting(**request["setting"])
            if setting not in engines:
                engines[setting] = Engine(folder / str(len(engines)), setting)
            step = Step(**request["step"])
            engine = engines[setting]
            late = engine.late(lambda engine=engine, step=step: engine.run(step))
            print(f"\n{ANSWER}{json.dumps({'late': late, 'warm': len(engine.warm)})}", flush=True)


def asked(setting: Setting, step: Step) -> str:
    """Return the line that asks for a step."""
    return json.dumps({"setting": asdict(setting), "step": asdict(step)})


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
