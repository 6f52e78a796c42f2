"""Small files that ask for much: refused at once, in little memory, with file and field."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dsv4.checkpoint import (
    Checkpoint,
    CheckpointError,
    MissingCheckpointError,
    fill,
    load,
    save,
)
from dsv4.config import ModelConfig, json_file
from tests.checkpoint.cases import SMALL, edit, make_model

SECONDS = 5  # a bomb takes 20 s and more; the refusal takes milliseconds, but machines are shared
BYTES = 200 << 20


@contextmanager
def small_and_quick() -> Iterator[None]:
    """Python's memory and the time of a block, bounded; tensors on meta have no memory."""
    torch.empty(1)
    tracemalloc.start()
    start = time.process_time()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.process_time() - start < SECONDS
    assert peak < BYTES


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    save(make_model(), folder, layout="bf16")
    return folder


@pytest.fixture
def folder(sound, tmp_path) -> Path:
    shutil.copytree(sound, tmp_path / "f")
    return tmp_path / "f"


def refused(folder: Path, *words: str) -> None:
    with small_and_quick(), pytest.raises((CheckpointError, ValueError)) as caught:
        load(folder, progress=False)
    assert len(str(caught.value)) < 4000
    for word in words:
        assert word in str(caught.value)


def change(folder: Path, **fields) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize("style", ["deepseek", "transformers"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("n_routed_experts", 10**6),
        ("vocab_size", 2**31 - 1),
        ("vocab_size", 10**17),
        ("hidden_size", 2**31 - 1),
        ("head_dim", 2**31 - 2),
        ("q_lora_rank", 10**9),
        ("moe_intermediate_size", 10**9),
        ("index_n_heads", 10**9),
        ("hc_mult", 10**9),
        ("num_attention_heads", 10**9),
        ("o_lora_rank", 10**9),
        ("index_head_dim", 2**30),
    ],
)
def test_a_count_that_no_tensor_has(folder, style, field, value):
    if style == "transformers":
        values = {**SMALL.to_transformers_dict(), "num_nextn_predict_layers": 1}
        (folder / "config.json").write_text(json.dumps(values))
    more = {}
    if field == "head_dim" and style == "transformers":
        more = {"partial_rotary_factor": 16 / value, "rope_parameters": None, "rope_theta": 1e4}
    change(folder, **{field: value}, **more)
    refused(folder, "config.json", field)


def test_a_count_of_mtp_layers_that_nobody_stored(folder):
    """The headers say how many there are; to demand what config.json says is refused."""
    values = {**SMALL.to_transformers_dict(), "num_nextn_predict_layers": 10**9}
    (folder / "config.json").write_text(json.dumps(values))
    with small_and_quick():
        assert len(load(folder, progress=False).mtp) == 1
    with small_and_quick(), pytest.raises(CheckpointError, match="num_nextn_predict_layers"):
        load(folder, mtp=True, progress=False)


def test_schedules_of_great_length(folder):
    count = 300_000
    change(
        folder,
        num_hidden_layers=count,
        compress_ratios=[0] * (count + 1),
        num_hash_layers=count,
    )
    refused(folder, "config.json", f"num_hidden_layers is {count}", "3 layers")


def test_a_dimension_of_tensors_without_values_counts_for_nothing(folder):
    edit(folder, lambda tensors: tensors.update(bomb=torch.empty(10**9, 0)))
    change(folder, hidden_size=10**9)
    refused(folder, "hidden_size is 1000000000", "no tensor has a dimension of more than")


DIGITS = "9" * 5000
TEXTS = {
    "long integer": ('{"hidden_size": %s}' % DIGITS, "an integer of 5000 digits"),  # noqa: UP031
    "deep list": ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested more than 32 levels"),
    "deep table": ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested more than 32 levels"),
    "deep but parsed": ('{"a": ' + "[" * 200 + "]" * 200 + "}", "nested more than 32 levels"),
    "many values": ('{"a": [' + "0," * 600_000 + "0]}", "values, wanted at most 500000"),
    "many tables": ('{"a": [' + "{}," * 500_001 + "{}]}", "values, wanted at most 500000"),
    "infinity": ('{"hc_eps": Infinity}', "is not JSON: it holds Infinity"),
    "a field twice": ('{"hidden_size": 64, "hidden_size": 128}', "'hidden_size' twice"),
    "no table": ("[1, 2]", "holds list, wanted a table"),
    "no text": ("\x00\xff", "is not JSON"),
    "empty": ("", "is not JSON"),
}


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("case", TEXTS)
def test_json_of_odd_size_or_depth(folder, file, case):
    text, words = TEXTS[case]
    (folder / file).write_bytes(text.encode("latin-1"))
    refused(folder, file, words)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_a_long_file_is_not_read(folder, file):
    with (folder / file).open("wb") as out:
        out.truncate(10 << 30)  # a hole, not on the disk
    refused(folder, file, f"bytes, wanted at most {json_file.MAX_BYTES}")


@pytest.mark.parametrize("kind", ["folder", "pipe", "device"])
@pytest.mark.parametrize(
    "file", ["config.json", "model.safetensors", "model.safetensors.index.json"]
)
def test_what_is_no_regular_file(folder, file, kind):
    path = folder / file
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    refused(folder, file, f"is a {kind}, wanted a regular file")


def _with_header(folder: Path, header: bytes, length: int | None = None) -> None:
    length = len(header) if length is None else length
    (folder / "model.safetensors").write_bytes(length.to_bytes(8, "little") + header)


HEADERS = {
    "length of 2^63": (b"{}", 2**63, "its header would have 9223372036854775808 bytes"),
    "length of 1 GB": (b"{}", 1 << 30, "its header would have"),
    "many tensors": (b"{" * 200_001, None, "its header names 200001 tensors"),
    "deep": (b'{"a":' + b"[" * 10_000, None, "not a safetensors file"),
    "long integer": (
        b'{"a":{"dtype":"U8","shape":[%s],"data_offsets":[0,1]}}' % DIGITS.encode(),
        None,
        "not a safetensors file",
    ),
    "more values than 64 bits count": (
        b'{"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}}',
        None,
        "not a safetensors file",
    ),
}


@pytest.mark.parametrize("case", HEADERS)
def test_headers_of_odd_size_or_depth(folder, case):
    header, length, words = HEADERS[case]
    _with_header(folder, header, length)
    refused(folder, "model.safetensors", words)


def test_an_index_of_many_shards_that_are_not_there(folder):
    table = {f"t{i}": f"s{i}" for i in range(20_000)}
    text = json.dumps({"weight_map": table})
    (folder / "model.safetensors.index.json").write_text(text)
    refused(folder, "s0: the shard is missing")


@pytest.mark.parametrize("shard", [3, None, ["a"], {"a": "b"}, "a\x00b", "a" * 300, ".", "a/b"])
def test_an_index_whose_values_are_no_names(folder, shard):
    index = json.dumps({"weight_map": {"norm.weight": shard}})
    (folder / "model.safetensors.index.json").write_text(index)
    refused(folder, "model.safetensors.index.json points to", "norm.weight")


_MEASURE = """
import json, resource, sys, time
from pathlib import Path
from dsv4 import checkpoint
import dsv4.model
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
checkpoint.load(sys.argv[1], progress=False)  # what torch itself loads on first use
for bomb in sys.argv[2:]:
    start, before = time.process_time(), peak()
    try:
        checkpoint.load(bomb, progress=False)
        words = "loaded"
    except ValueError as error:
        words = str(error)[:200]
    print(json.dumps([peak() - before, time.process_time() - start, words]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="units of ru_maxrss")
def test_memory_and_time_of_a_process(sound, tmp_path):
    """Memory that Python does not count is included: the package's headers, torch's tensors."""
    folders = [tmp_path / name for name in ("experts", "layers", "index", "header", "text")]
    for folder in folders:
        shutil.copytree(sound, folder)
    experts, layers, index, header, text = folders
    change(experts, n_routed_experts=10**6)
    change(layers, num_hidden_layers=150_000, compress_ratios=[0] * 150_001, num_hash_layers=3)
    table = {f"{i:0100d}": "model.safetensors" for i in range(240_000)}
    (index / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    row = '"%07d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    rows = ",".join(row % i for i in range(199_000))
    _with_header(header, f"{{{rows}}}".encode())
    (text / "config.json").write_text(json.dumps({"hidden_size": "x" * (31 << 20)}))
    command = [sys.executable, "-c", _MEASURE, str(sound), *map(str, folders)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for folder, line in zip(folders, out.splitlines(), strict=True):
        memory, seconds, words = json.loads(line)
        assert words != "loaded"
        assert memory < BYTES, (folder.name, memory, words)
        assert seconds < SECONDS, (folder.name, seconds, words)


def test_the_bounds_have_room_for_the_published_checkpoints():
    """145,116 tensors in 64 shards, each named once, of the larger model."""
    names = [
        f"layers.{layer}.ffn.experts.{expert}.{part}.{last}"
        for layer in range(61)
        for expert in range(384)
        for part in ("w1", "w2", "w3")
        for last in ("weight", "weight_scale")
    ]
    index = {"weight_map": dict.fromkeys(names, "model-00064-of-00064.safetensors")}
    text = json.dumps(index, indent=2)
    assert len(text) < json_file.MAX_BYTES / 2
    assert json_file.parse(text, "index") == index


def test_a_folder_that_is_not_there(tmp_path):
    name = "nvidia/DeepSeek-V4-Flash-NVFP4"
    with pytest.raises(FileNotFoundError, match=rf"no folder '{name}'.*download the files first"):
        load(name)
    with pytest.raises(CheckpointError, match=r"no folder '/nowhere/at/all', wanted .* files$"):
        load("/nowhere/at/all")
    with pytest.raises(MissingCheckpointError, match=r"config\.json is missing from"):
        Checkpoint.open(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="file is a file, wanted a folder"):
        load(tmp_path / "file")
    with pytest.raises(TypeError, match="path is bytes, wanted a folder"):
        load(bytes(tmp_path), progress=False)
    with pytest.raises(TypeError, match="path is int, wanted a folder"):
        load(3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="names GPUs that are not there")
def test_devices_that_are_not_there(folder):
    for device in ("cuda", "cuda:7", torch.device("cuda")):
        with pytest.raises(ValueError, match=r"device is .*cuda.*, and PyTorch finds 0 GPUs"):
            load(folder, device=device, progress=False)


def test_devices_by_name(folder):
    for device in ("cpu", "cpu:0", torch.device("cpu")):
        assert load(folder, device=device, progress=False).device.type == "cpu"
    for device in ("gpu", "", "cuda:x"):
        with pytest.raises(ValueError, match=f"device is '{device}', wanted a device such as"):
            load(folder, device=device, progress=False)
    with pytest.raises(ValueError, match="device is 'meta', which holds no values"):
        load(folder, device="meta", progress=False)
    for wrong in (None, 1.5, True, ["cpu"]):
        with pytest.raises(TypeError, match=r"device is .*, wanted a device such as"):
            load(folder, device=wrong, progress=False)
    with Checkpoint.open(folder) as checkpoint, pytest.raises(ValueError, match="device is 'gpu'"):
        fill(torch.nn.Module(), checkpoint, device="gpu", progress=False)


def test_dtypes_by_name(folder):
    left, right = (load(folder, dtype=d, progress=False) for d in ("float32", torch.float32))
    assert left.lm_head.weight.dtype == right.lm_head.weight.dtype == torch.float32
    assert load(folder, dtype="torch.bfloat16", progress=False) is not None
    for wrong in ("int4", "float8_e4m3fn", "Tensor", "", torch.int8, 16):
        with pytest.raises(ValueError, match=r"dtype is .*, wanted one of torch\.float16"):
            load(folder, dtype=wrong, progress=False)
    with pytest.raises(ValueError, match="plain_dtype is 'int4'"):
        save(make_model(), folder, overwrite=True, plain_dtype="int4")


def test_a_config_given_in_python_is_bounded_too():
    with small_and_quick(), pytest.raises(ValueError, match="hidden_size is an integer of"):
        ModelConfig.tiny(hidden_size=10**5000)
    with pytest.raises(ValueError, match="hidden_size is an integer of 16610 bits"):
        ModelConfig.from_dict({**SMALL.to_dict(), "hidden_size": 10**5000})
    for value in (10**400, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=r"routed_scaling_factor is .*, wanted a number > 0"):
            SMALL.replace(routed_scaling_factor=value)
    with pytest.raises(ValueError, match="holds list, wanted a table"):
        ModelConfig.from_dict([1])  # type: ignore[arg-type]


def test_stacks_of_experts_are_counted(tmp_path):
    values = SMALL.to_dict()
    values["n_routed_experts"] = 10**4  # a model that could be built, if it were not refused
    (tmp_path / "config.json").write_text(json.dumps(values))
    stack = {f"model.layers.{i}.mlp.experts.down_proj": torch.zeros(4, 64, 32) for i in range(3)}
    save_file(stack, tmp_path / "model.safetensors")
    refused(tmp_path, "n_routed_experts is 10000", "4 routed experts")
