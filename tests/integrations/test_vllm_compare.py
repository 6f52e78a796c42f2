"""examples/vllm/compare.py without vLLM: its processes, its verdicts and its random weights."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from dsv4.bench.suites.random_model import Weights, random_model
from dsv4.compilation.counts import of_this_process
from dsv4.config import CSA, HCA, SLIDING, DSparkConfig, ModelConfig
from dsv4.cute.runtime import cubin_cache
from dsv4.cute.sm90.attention_plan import MergePlan
from dsv4.serving import Runner
from tests.integrations.vllm import compare_process

CPU = torch.device("cpu")

compare, processes, engine, weights, find_nan, load = map(
    compare_process.load,
    (
        *("compare", "compare_processes", "compare_engine", "compare_weights"),
        *("find_nan", "serve_load"),
    ),
)

# An engine without vLLM. It answers as ``Worker`` does, and notes when it works in a file.
ENGINE = """
import json, os, sys, time

request = json.loads(sys.argv[1])
name, folder = os.environ["DSV4_VLLM"], request["folder"]
drafts = request["drafts"]

def say(answer):
    print("vLLM prints, too")
    print("\\nANSWER " + json.dumps(answer), flush=True)

def texts(count, new):
    return [{"tokens": [i] * new[i], "logprobs": [-1.0] * new[i], "margins": [2.0] * new[i]}
            for i in range(count)]

say({"seconds": 0.1, "replaced": "everything" if name != "off" else ""})
for line in sys.stdin:
    call = json.loads(line)
    begin, own = time.time(), call["arguments"]
    time.sleep(0.01)
    if request["options"].get("fails") == call["call"] and name == "all":
        print("ValueError: it broke", file=sys.stderr)
        for number in range(3):
            print(f"WARNING {number}: no module x (ImportError)", file=sys.stderr)
        sys.exit(3)
    if request["options"].get("hangs") == call["call"] and name == "all":
        time.sleep(60)
    if call["call"] == "score":
        answer = {"logprobs": [-1.0 - 0.5 * (name == "off")] * 9}
    elif call["call"] == "texts":
        new = own["new"]
        answer = {"texts": texts(len(new), new), "drafts": {"drafts": 3.0} if drafts else {}}
    elif own["profile"]:
        foreign = {"humming": 1.0} if name == "off" else {}
        answer = {"busy_ms": 1.0, "launches": 2.0, "kernels": {}, "foreign": foreign}
    else:
        answer = {"ms": 4.0 if name == "off" else 2.0, "tokens": 1.0}
    with open(os.path.join(folder, "times"), "a") as file:
        file.write(json.dumps([name + str(drafts), begin, time.time()]) + "\\n")
    say(answer)
"""


def compared(tmp_path, *engines, seconds=60.0, **options):
    program = tmp_path / "engine.py"
    program.write_text(ENGINE)
    (tmp_path / "config.json").write_text("{}")
    chosen = argparse.Namespace(
        folder=tmp_path,
        random=None,
        engines=list(engines),
        draft="mtp",
        draft_tokens=1,
        seconds=seconds,
        rounds=2,
        steps=3,
        out=tmp_path / "out.json",
        option=[f"{name}={json.dumps(value)}" for name, value in options.items()],
    )
    status = compare.run(chosen, "cpu", 1, str(program))
    return status, json.loads((tmp_path / "out.json").read_text())


def test_engines_work_one_at_a_time(tmp_path, capsys):
    status, results = compared(tmp_path, "stock", "parts", "drafts")
    printed = capsys.readouterr().out
    assert status == 0
    spans = [json.loads(line) for line in (tmp_path / "times").read_text().splitlines()]
    assert {name for name, *_ in spans} == {"off0", "all0", "all1"}
    spans.sort(key=lambda span: span[1])
    assert all(a[2] <= b[1] for a, b in itertools.pairwise(spans))
    assert list(results["texts alone"]) == ["parts", "drafts"]
    assert list(results["scores"]) == ["stock", "parts"]
    assert "--- parts\neverything" in printed
    assert "--- stock" not in printed
    assert "decode 64" in printed
    assert "4.00; 1.00        2.00; 1.00        2.00; 1.00   2.00" in printed
    assert "kernels 8, parts: foreign kernels none" in printed
    assert "parts and drafts, alone: right: 8 of 8 texts equal" in printed
    assert "many requests, drafts: 200 texts, all log-probabilities finite" in printed
    assert "median 0.500" in printed


def test_an_engine_that_fails_leaves_the_others(tmp_path, capsys):
    status, results = compared(tmp_path, "parts", "stock", fails="prompt")
    assert status == 1
    error = results["prompt, round 0"]["parts"]["error"]
    assert error == "parts ended in prompt: ValueError: it broke"
    assert results["prompt, round 1"] == {"stock": {"ms": 4.0, "tokens": 1.0}}
    assert "FAILED prompt, round 0, parts: parts ended in prompt" in capsys.readouterr().out


def test_an_engine_that_is_late_is_left(tmp_path, capsys):
    program = tmp_path / "engine.py"
    program.write_text(ENGINE)
    request = {"folder": str(tmp_path), "options": {"hangs": "texts"}, "drafts": 0}
    log = tmp_path / "log"
    engines = [processes.Engine.launch(name, request, log, str(program)) for name in ("parts",)]
    try:
        engines[0].answer("start", 60)
        with pytest.raises(processes.EngineError, match="parts: texts took more than 0 s"):
            engines[0].ask("texts", 0.2, new=[1])
    finally:
        engines[0].close()
    comparison = compare.Comparison(engines, time.perf_counter(), tmp_path / "out.json")
    comparison.phase("scores", "score")
    assert capsys.readouterr().out == "scores, parts: left out, no time is left\n"
    assert comparison.results == {}


def test_what_is_compiled_after_the_start_is_named():
    results = {
        "start": {"parts": {"compiled": 40, "compiled_names": {"gemm": 40}}, "stock": {}},
        "decode 1": {
            "parts": {
                "compiled": 1,
                "compiled_names": {"rope": 1},
                "late": ["rope [D=64] (x: i32)"],
            },
            "stock": {},
        },
        "scores": {"parts": {"compiled": 0, "first_launches": {"_topk": 1}}, "stock": {}},
    }
    assert compare.compilation_lines(results) == [
        "parts: 1 kernels of dsv4 compiled after the start; decode 1: rope",
        "  decode 1: rope [D=64] (x: i32)",
        "parts: 1 first launches of other Triton kernels; scores: _topk",
        "stock: 0 kernels of dsv4 compiled after the start",
    ]


def test_compilations_are_counted_call_by_call():
    counted = engine.Compilations()
    with of_this_process().compiling("a_kernel"):
        counted.others.append("another")
    answer = counted.since_last()
    assert answer["compiled_names"] == {"a_kernel": 1}
    assert (answer["compiled"], answer["first_launches"]) == (1, {"another": 1})
    assert counted.since_last()["compiled"] == 0


def test_late_kernels_are_not_among_those_of_others(monkeypatch):
    knobs = pytest.importorskip("triton").knobs
    heard = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **named: heard.append(named))
    monkeypatch.setattr(cubin_cache, "compile_image", lambda plan, arch: None)
    counted = engine.Compilations()
    counted.listen()
    compiled = {
        "signature": {"x": "*bf16", "rows": "i32", "BLOCK": "constexpr"},
        "constants": {(2,): 64},
        "configs": [{(0,): [["tt.divisibility", 16]], (1,): []}],
    }
    for module in ("dsv4.triton.norm", "vllm.ops"):
        function = SimpleNamespace(name="_norm_kernel", module=module)
        knobs.runtime.jit_post_compile_hook(fn=function, compile=compiled)
    cubin_cache.compile_image(MergePlan(), "sm_90a")
    answer = counted.since_last()
    assert len(heard) == 2
    assert answer["late"] == ["_norm_kernel [BLOCK=64] (x: *bf16 / 16, rows: i32)", "MergePlan()"]
    assert answer["first_launches"] == {"_norm_kernel": 1}
    assert counted.since_last()["late"] == []


def test_one_long_step_and_long_steps_differ():
    assert engine.spread([0.002, 0.002, 0.1, 0.002]) == {
        "median_ms": 2.0,
        "longest_ms": 100.0,
        "longest_step": 2,
    }


def choice(tokens, *logprobs):
    return {"token_ids": tokens, "logprobs": {"content": [{"logprob": x} for x in logprobs]}}


def test_answers_over_http_are_judged():
    staying, going = load.Request([1], 2), load.Request([1], 2, 0.1)
    assert load.problem(staying, choice([5, 6], -1.0, -2.0)) == ""
    assert load.problem(going, None) == ""
    assert load.problem(staying, None) == "no answer"
    assert load.problem(staying, choice([5], -1.0)) == "1 tokens, expected 2"
    for value in (math.nan, None, -9999.0):
        problem = load.problem(staying, choice([5, 6], -1.0, value))
        assert problem == "a log-probability is not finite"
    assert load.problem(staying, {"error": "status 500"}) == "status 500"


def test_half_of_the_requests_share_prefixes_and_a_fifth_hangs_up():
    made = load.requests_of(200, 100, 64)
    assert all(1 <= len(request.tokens) <= 64 for request in made)
    assert sum(request.patience is not None for request in made) == 40
    assert len({tuple(request.tokens[:32]) for request in made[1::2]}) == 4


def test_incidents_are_judged():
    requests = [f"compare-{i}" for i in range(8)]
    line = "step 2: NaN or infinity, first in the output of model.embed_tokens (Embedding): row 9, "
    right = f"{line}request compare-5 at position 17. The x, before it, was finite"
    answer = {"requests": requests, "incidents": [right]}
    assert find_nan.wrong_token(answer) == ""
    for wrong in (f"{line}request compare-4 at position 17", f"{line}request compare-5"):
        assert find_nan.wrong_token({**answer, "incidents": [wrong]})
    assert find_nan.wrong_token({**answer, "incidents": []})
    assert find_nan.wrong_layer(answer, "model.embed_tokens") == ""
    assert find_nan.wrong_layer(answer, "model.layers.2.attn").startswith("expected model.layers.2")
    assert find_nan.wrong_layer({**answer, "incidents": []}, "x").startswith("no incident")
    prompts = find_nan.prompts(100)
    assert [(i, p.index(7)) for i, p in enumerate(prompts) if 7 in p] == [(5, 17)]


SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=8)


@given(SPANS)
def test_the_gpu_is_busy_while_any_kernel_runs(spans):
    kernels = engine.Kernels([("a", begin, begin + length) for begin, length in spans])
    busy = {time for begin, length in spans for time in range(begin, begin + length)}
    assert math.isclose(kernels.busy_ms(), 1e-6 * len(busy))


def test_kernels_of_other_libraries_are_named():
    names = ["humming_gemm", "void deep_gemm::sm90_fp8", "sparse_attention_kernel", "mhc_pre_x"]
    made = engine.Kernels([(name, 0, 2_000_000) for name in names]).summary(2)
    assert list(made["foreign"]) == [names[0], names[1], names[3]]
    assert made["launches"] == 2
    assert made["kernels"][names[2]] == 1.0


def text(tokens, logprobs=None, margins=None):
    count = len(tokens)
    return {
        "tokens": tokens,
        "logprobs": logprobs or [-1.0] * count,
        "margins": margins or [3.0] * count,
    }


def test_texts_may_differ_from_a_near_tie_on():
    expected = {"texts": [text([1, 2, 3]), text([4, 5, 6], margins=[3.0, 0.2, 3.0]), text([7, 8])]}
    actual = {"texts": [text([1, 2, 3], [-1.0, -1.5, -1.0]), text([4, 9, 9]), text([7, 9])]}
    same = compare.same_texts(expected, actual)
    assert (same["equal"], same["ties"], same["wrong"]) == (1, 1, [[2, 1]])
    assert (same["median"], same["largest"]) == (0.0, 0.5)


def test_nan_and_missing_tokens_are_reported():
    answer = {"texts": [text([1, 2]), text([3], logprobs=[math.nan])]}
    assert compare.finite(answer) == "requests [1] have log-probabilities that are not finite"
    answer = {"texts": [text([1, 2]), text([3])]}
    assert compare.finite(answer, [2, 2]).startswith("requests [1] have another number of tokens")
    assert compare.finite(answer, [2, 1]) == ""


SIZES = {"hidden_size": 512, "moe_intermediate_size": 128, "vocab_size": 512}
SIZES |= {"q_lora_rank": 128, "o_lora_rank": 128, "num_nextn_predict_layers": 1}


def test_random_weights_prefer_successors():
    """Texts follow the last token, log-probabilities the context, and some drafts are right."""
    config = ModelConfig.tiny(layer_types=(SLIDING, CSA, HCA), **SIZES)
    model = random_model(config, CPU, Weights("mxfp4-cast", "nvidia"), pack=False, mtp=True)
    weights.prefer_successors(model, strength=0.4, wrong=160)
    weights.draw_mxfp4_experts([draft.layer for draft in model.mtp])
    texts, logprobs = [], []
    with Runner(model, max_sequences=1, max_tokens=64, speculate="mtp", draft_tokens=1) as runner:
        for prompt in ([5, 9, 11], [300, 11]):
            request = runner.add(prompt, max_new_tokens=16, stop_ids=(), logprobs=1)
            runner.run()
            texts.append(list(request.tokens))
            logprobs.append([row.logprob for row in request.logprobs])
        counts = runner.draft_counts
    assert texts[0] == texts[1]
    assert max(abs(a - b) for a, b in zip(*logprobs, strict=True)) > 0.01
    assert 0 < counts.accepted < counts.drafted


def test_dspark_drafts_are_right_and_wrong():
    spark = DSparkConfig(
        block_size=5, noise_token_id=511, target_layer_ids=(0, 1, 2), markov_rank=256
    )
    sizes = {**SIZES, "num_nextn_predict_layers": 0, "dspark": spark}
    config = ModelConfig.tiny(layer_types=(SLIDING, CSA, HCA), **sizes)
    model = random_model(config, CPU, Weights("mxfp4-cast", "nvidia"), pack=False, mtp=True)
    weights.prefer_successors(model, strength=0.4, wrong=160)
    with Runner(model, max_sequences=1, max_tokens=64, speculate="dspark") as runner:
        runner.add([5, 9, 11], max_new_tokens=24, stop_ids=())
        runner.run()
        counts = runner.draft_counts
    assert 0 < counts.accepted < counts.drafted


def test_a_random_checkpoint_has_nvidias_formats(tmp_path):
    """Routed experts in NVFP4, those of the draft in MXFP4, and attention in FP8."""
    config = ModelConfig.tiny(layer_types=(SLIDING,), **SIZES)
    weights.random_checkpoint(tmp_path, config, "cpu")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
        dtypes = {name: str(file.get_slice(name).get_dtype()) for name in names}
    experts = {name: dtype for name, dtype in dtypes.items() if ".ffn.experts." in name}
    stored = {(name.split(".")[0], name.split(".")[-1], dtype) for name, dtype in experts.items()}
    nvfp4 = {("weight", "U8"), ("weight_scale", "F8_E4M3"), ("weight_scale_2", "F32")}
    mxfp4 = {("weight", "I8"), ("scale", "F8_E8M0")}
    assert stored == {("layers", *part) for part in nvfp4} | {("mtp", *part) for part in mxfp4}
    for layer in ("layers.0", "mtp.0"):
        assert {f"{layer}.attn.wq_b.scale", f"{layer}.ffn.shared_experts.w2.scale"} < names
    assert {"mtp.0.e_proj.scale", "mtp.0.h_proj.scale"} < names


def test_flash_is_made_smaller():
    config = weights.flash_config(12, 32)
    assert (config.num_hidden_layers, len(config.layer_types)) == (12, 12)
    assert config.hidden_size == ModelConfig.flash().hidden_size
    drafted = weights.flash_config(12, 32, "dspark")
    assert drafted.dspark.target_layer_ids == (9, 10, 11)
    assert drafted.num_nextn_predict_layers == 0


def test_options_behind_two_dashes_are_those_of_the_server():
    """argparse refused them when an option stood between them and the folder."""
    options = load.parsed(["small", "--design", "model", "--", "--max-num-seqs", "64"])
    assert (options.design, options.own) == ("model", ["--max-num-seqs", "64"])
    assert load.parsed(["small", "--requests", "3"]).own == []
    assert load.parsed(["small", "--", "--", "x"]).own == ["--", "x"]
