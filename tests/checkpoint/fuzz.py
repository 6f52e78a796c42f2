"""Checkpoints with random damage, the same for the same number, and what loading may make of them.

A damaged checkpoint loads, or is refused by one ValueError (CheckpointError is one) whose message
names a file, a tensor or a field. Anything else is a defect.
"""

from __future__ import annotations

import copy
import json
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsv4.checkpoint import load, names, save
from dsv4.model import DeepseekV4ForCausalLM
from tests.checkpoint.cases import SMALL, make_model

TARGETS = ("config", "index", "header", "data")
CONFIG = SMALL.replace(n_routed_experts=2)
_LONG = "@long integer@"  # Python refuses to write 5000 digits
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 64, 128, 255, 256, 10**6, 10**9, 2**31, 2**63, 2**64),
    *(10**30, _LONG, 0.0, -0.0, 0.5, 1.5, -1.0, 1e-300, 1e300, float("nan"), float("inf")),
    *("", "x", "0", "64", "null", "\x00", "\ud800", "é" * 300, "../x", "model.safetensors"),
    *("deepseek_v41", "yarn", "linear", "F32", "BF16", "F8_E8M0", "I64", "BOOL", "F4"),
    *([], {}, [[]], [{}], {"": ""}, {"a": 1}, [0], [1, 2], [-1], [None], ["x"], [2**40], [[0]] * 9),
)


@dataclass
class Subject:
    """A sound checkpoint of one layout, which is damaged and mended file by file."""

    folder: Path
    layout: str
    files: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    def make(cls, folder: Path, layout: str) -> Subject:
        """Write it, in several shards."""
        save(make_model(CONFIG), folder, layout=layout, max_shard_bytes=150_000)
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        return cls(folder, layout, files)

    def words(self) -> set[str]:
        """Names of files, fields and tensors, one of which a message must have."""
        index = json.loads(self.files["model.safetensors.index.json"])
        fields = json.loads(self.files["config.json"])
        stored = list(index["weight_map"])
        return {*self.files, *fields, *stored, *filter(None, map(names.canonical, stored))}

    def file_of(self, target: str, rng: random.Random) -> str:
        """The file that a target damages."""
        shards = sorted(name for name in self.files if name.endswith(".safetensors"))
        return {"config": "config.json", "index": "model.safetensors.index.json"}.get(
            target, rng.choice(shards)
        )

    def case(self, target: str, number: int) -> str | None:
        """Return what is wrong with how a damaged checkpoint is handled, or None."""
        rng = random.Random(f"{self.layout} {target} {number}")
        name = self.file_of(target, rng)
        path = self.folder / name
        path.write_bytes(damage(self.files[name], target, rng))
        try:
            return self.outcome(rng)
        finally:
            path.write_bytes(self.files[name])

    def outcome(self, rng: random.Random) -> str | None:
        """Load what is in the folder."""
        mxfp4 = rng.choice(["keep", "lossless", "nvfp4"])
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = load(self.folder, mxfp4=mxfp4, progress=False)
        except ValueError as error:
            text = str(error)
            if len(text) > 8000:
                return f"a message of {len(text)} characters: {text[:200]}"
            if not any(word in text for word in self.words()):
                return f"names neither file nor field: {type(error).__name__}: {text}"
            return None
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
        if not isinstance(model, DeepseekV4ForCausalLM):
            return f"loaded a {type(model).__name__}"
        tensors = (*model.parameters(), *model.buffers())
        return "parts are not filled" if any(tensor.is_meta for tensor in tensors) else None


def damage(data: bytes, target: str, rng: random.Random) -> bytes:
    """The bytes of a file with one to three random errors."""
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if target == "data":
            data = _damaged_data(data, rng)
        elif rng.random() < 0.3:
            length = _header_bytes(data) if target == "header" else len(data)
            data = _damaged_bytes(data, length, rng)
        elif target == "header":
            data = _damaged_header(data, rng)
        else:
            data = _damaged_json(data, rng)
    return data


def _header_bytes(data: bytes) -> int:
    text = data[8 : 8 + int.from_bytes(data[:8], "little")]
    return min(8 + len(text.rstrip(b" ")), len(data))


def _damaged_bytes(data: bytes, length: int, rng: random.Random) -> bytes:
    """Bytes changed, lost, added or doubled in the first ``room``."""
    if length == 0:
        return bytes(rng.randrange(256) for _ in range(8))
    start = rng.randrange(length)
    stop = min(length, start + rng.choice([1, 1, 2, 8, 64]))
    odd = bytes(rng.choice(b'\x00\xff\x7f\x80{}[]",:0189.eE-+ nft\\') for _ in range(stop - start))
    kinds = {
        "change": data[:start] + odd + data[stop:],
        "lose": data[:start] + data[stop:],
        "add": data[:start] + odd + data[start:],
        "double": data[:stop] + data[start:],
        "cut": data[:start],
    }
    return kinds[rng.choice(sorted(kinds))]


def _damaged_data(data: bytes, rng: random.Random) -> bytes:
    """Values changed behind the header; now and then bytes lost or added."""
    begin = 8 + int.from_bytes(data[:8], "little")
    if begin >= len(data) or rng.random() < 0.2:
        return data[: rng.randrange(len(data) + 1)] + bytes(rng.choice([0, 0, 1, 8]))
    values = bytearray(data)
    for _ in range(rng.choice([1, 4, 64])):
        position = rng.randrange(begin, len(data))
        size = rng.choice([1, 2, 4, 8])
        values[position : position + size] = rng.choice([b"\x00", b"\xff", b"\x7f", b"\x80"]) * size
    return bytes(values[: len(data)])


def _damaged_header(data: bytes, rng: random.Random) -> bytes:
    length = min(int.from_bytes(data[:8], "little"), len(data))
    text = _damaged_json(data[8 : 8 + length].rstrip(b" "), rng)
    if rng.random() < 0.8:
        text = text.ljust(length)
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def _damaged_json(data: bytes, rng: random.Random) -> bytes:
    """One value of a JSON text changed, lost, added, renamed, or given twice."""
    try:
        values = json.loads(data)
    except ValueError:
        return _damaged_bytes(data, len(data), rng)
    positions = list(_items(values))
    if not positions:
        return json.dumps(rng.choice(ODD)).encode()
    holder, key = rng.choice(positions)
    action = rng.choice(["set", "set", "set", "lose", "add", "rename", "copy", "nest"])
    if action == "set":
        holder[key] = copy.deepcopy(rng.choice(ODD))
    elif action == "lose":
        del holder[key]
    elif action == "copy":
        other, name = rng.choice(positions)
        holder[key] = copy.deepcopy(other[name])
    elif action == "nest":
        holder[key] = rng.choice([[holder[key]], {"a": holder[key]}])
    elif isinstance(holder, list):
        holder.insert(key, copy.deepcopy(rng.choice(ODD)))
    else:
        value = holder[key] if action == "add" else holder.pop(key)
        holder[rng.choice([key + "x", key[:-1], "hidden_size", "note", ""])] = value
    text = json.dumps(values)
    if rng.random() < 0.05:
        text = text.replace("{", '{"hidden_size": 64, ', 1)
    return text.replace(f'"{_LONG}"', "9" * 5000).encode("utf-8", "surrogatepass")


def _items(values: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a JSON value with each of its keys."""
    keys = values if isinstance(values, dict) else range(len(values))
    for key in keys if isinstance(values, (dict, list)) else ():
        yield values, key
        if isinstance(values[key], (dict, list)):
            yield from _items(values[key])
