"""A save that fails or dies at any point leaves the whole old checkpoint or the whole new one."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4.checkpoint import Checkpoint, CheckpointError, load, recover, save, transaction, write
from dsv4.checkpoint.shard_writer import ShardWriter
from dsv4.config import ModelConfig
from tests.checkpoint.cases import SMALL, make_model, raw, state

# Operations on files that a save asks the system for; each may fail, or be the last.
OPERATIONS = ("open", "fdopen", "mkdir", "rename", "unlink", "rmdir", "fsync", "close", "listdir")
FILE_METHODS = ("write", "flush", "close", "seek")
NAMES = ("model.norm.weight", "model.embed_tokens.weight", "lm_head.weight")


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch):
    """No power is cut here: what a file system remembers after that is not tested."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


class Dead(BaseException):
    """The process is gone: no operation after it has an effect."""


class Faults:
    """Stands in for ``os`` where a save uses it, and fails the operation of a number.

    ``error`` is raised there; with ``dead`` every later operation fails, too, as if the process had
    been killed between two operations.
    """

    def __init__(self, number: int, error: Callable[[], BaseException], dead: bool) -> None:
        self.number, self.error, self.dead = number, error, dead
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        value = getattr(os, name)
        if name not in OPERATIONS:
            return value

        def call(*args: Any, **options: Any) -> Any:
            self.step()
            out = value(*args, **options)
            return _File(out, self) if name == "fdopen" else out

        return call

    def step(self) -> None:
        self.count += 1
        if self.count == self.number or (self.dead and self.count > self.number):
            raise self.error()


class _File:
    """A file whose operations are counted."""

    def __init__(self, file: Any, faults: Faults) -> None:
        self._file, self._faults = file, faults

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._file, name)

        def call(*args: Any) -> Any:
            self._faults.step()
            return value(*args)

        return call if name in FILE_METHODS else value


def no_space() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def items(value: float) -> list[tuple[str, torch.Tensor, None]]:
    return [(name, torch.full((64,), value), None) for name in NAMES]


def put(folder: Path, value: float, shards: int, **options: Any) -> None:
    """A checkpoint of one value, whose configuration tells it, too."""
    config = SMALL.replace(routed_scaling_factor=value)
    limit = {1: 1 << 20, 2: 512, 3: 256}[shards]
    options = {"max_shard_bytes": limit, "plain_dtype": None, **options}
    write(items(value), folder, config=config, layout="bf16", **options)


def contents(folder: Path) -> float | None:
    """The one value of a checkpoint; None if it is refused. A mixture fails the test."""
    try:
        with Checkpoint.open(folder) as checkpoint:
            assert set(checkpoint.entries) == set(NAMES)
            values = {checkpoint.config().routed_scaling_factor}
            for name in NAMES:
                values.update(checkpoint.read(name).tolist())
    except CheckpointError:
        return None
    assert len(values) == 1, values
    return values.pop()


def attempt(folder: Path, shards: int, faults: Faults, overwrite: bool = True) -> bool:
    """Return whether a save with faults reports success."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transaction, "os", faults)
        try:
            put(folder, 2.0, shards, overwrite=overwrite)
        except (OSError, Dead, KeyboardInterrupt):
            return False
        return True


def unlock(folder: Path) -> None:
    """A dead process keeps no lock, but a save that "died" in this one left its folder open."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if entry.readlink() == folder:
                os.close(int(entry.name))
        except OSError:
            continue


def others(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("adapter.safetensors", "notes.txt")}


def stranger(folder: Path) -> dict[str, bytes]:
    (folder / "adapter.safetensors").write_bytes(b"a stranger's")
    (folder / "notes.txt").write_bytes(b"notes")
    (folder / "sub.safetensors").mkdir()
    return others(folder)


KINDS = {
    "no space": (no_space, False),
    "no space from there on": (no_space, True),
    "interrupt": (KeyboardInterrupt, False),
    "killed": (Dead, True),
}
linux = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="reads /proc")


@linux
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (1, 3),
        (3, 1),
        *(pytest.param(*x, marks=pytest.mark.nightly) for x in ((2, 2), (1, 1), (3, 2))),
    ],
)
def test_every_operation_may_fail(tmp_path, kind, old, new):
    error, dead = KINDS[kind]
    folder = (tmp_path / "f").resolve()
    number, finished = 0, False
    while not finished:
        number += 1
        shutil.rmtree(folder, ignore_errors=True)
        put(folder, 1.0, old)
        theirs = stranger(folder)
        before = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
        faults = Faults(number, error, dead)
        success = attempt(folder, new, faults)
        finished = faults.count < number
        unlock(folder)
        # Read as it is: the old one or the new one, and what a success promised.
        actual = contents(folder)
        assert actual in ((2.0,) if success else (1.0, 2.0)), number
        if actual == 1.0:
            assert {n: (folder / n).read_bytes() for n in before} == before
        _others_find_one(folder, actual)
        assert others(folder) == theirs
        # The next save needs no help, and cleans up.
        put(folder, 3.0, old, overwrite=True)
        assert contents(folder) == 3.0
        assert not [p.name for p in folder.iterdir() if p.name.startswith(".")]
        assert others(folder) == theirs
        assert (folder / "sub.safetensors").is_dir()
        expected = {"config.json", "adapter.safetensors", "notes.txt", "sub.safetensors"}
        assert len({p.name for p in folder.iterdir()} - expected) == (1 if old == 1 else old + 1)
    assert number > 25


def _others_find_one(folder: Path, value: float) -> None:
    """A tool that knows nothing of interrupted saves finds no config.json, or what dsv4 reads."""
    if not (folder / "config.json").exists():
        return
    values = json.loads((folder / "config.json").read_text())
    if (folder / transaction.COMMITTED).exists() and values["routed_scaling_factor"] != value:
        # The rename is done and nothing else: all of the old checkpoint is still there.
        value = values["routed_scaling_factor"]
    assert values["routed_scaling_factor"] == value
    index = folder / "model.safetensors.index.json"
    shards = {"model.safetensors"}
    if index.exists():
        shards = set(json.loads(index.read_text())["weight_map"].values())
    for shard in shards:
        result = transaction_values(folder / shard)
        assert result == {value}, (shard, result)


def transaction_values(path: Path) -> set[float]:
    from safetensors.torch import load_file

    return {x for tensor in load_file(path).values() for x in tensor.tolist()}


@linux
@pytest.mark.parametrize("kind", KINDS)
def test_every_operation_of_a_first_save_may_fail(tmp_path, kind):
    error, dead = KINDS[kind]
    folder = (tmp_path / "f").resolve()
    number, finished = 0, False
    while not finished:
        number += 1
        shutil.rmtree(folder, ignore_errors=True)
        faults = Faults(number, error, dead)
        success = attempt(folder, 2, faults, overwrite=False)
        finished = faults.count < number
        unlock(folder)
        result = contents(folder)
        assert result == 2.0 if success else result in (None, 2.0)
        put(folder, 3.0, 1, overwrite=result is not None)
        assert contents(folder) == 3.0


@linux
@given(
    first=st.integers(1, 60),
    second=st.integers(1, 60),
    old=st.integers(1, 3),
    new=st.integers(1, 3),
    kinds=st.tuples(st.sampled_from(sorted(KINDS)), st.sampled_from(sorted(KINDS))),
)
@example(first=50, second=1, old=2, new=3, kinds=("killed", "killed"))
def test_a_save_that_fails_after_one_that_failed(tmp_path_factory, first, second, old, new, kinds):
    folder = tmp_path_factory.mktemp("f").resolve()
    put(folder, 1.0, old)
    theirs = stranger(folder)
    for number, kind in zip((first, second), kinds, strict=True):
        error, dead = KINDS[kind]
        success = attempt(folder, new, Faults(number, error, dead))
        unlock(folder)
        assert contents(folder) in ((2.0,) if success else (1.0, 2.0))
        assert others(folder) == theirs
    recover(folder)
    assert contents(folder) in (1.0, 2.0)
    shutil.rmtree(folder)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("share", [0.3, 0.6, 0.8, 0.9, 1.0])
def test_a_killed_process_leaves_one_checkpoint_and_no_lock(tmp_path, share):
    counting = Faults(-1, no_space, dead=False)
    put(tmp_path, 1.0, 2)
    attempt(tmp_path, 3, counting)
    put(tmp_path, 1.0, 2, overwrite=True)
    child = os.fork()
    if child == 0:  # pragma: no cover
        number = max(1, int(share * counting.count))
        faults = Faults(number, lambda: os.kill(os.getpid(), signal.SIGKILL), dead=False)
        transaction.os = faults  # type: ignore[attr-defined]
        put(tmp_path, 2.0, 3, overwrite=True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert contents(tmp_path) in (1.0, 2.0)
    put(tmp_path, 3.0, 1, overwrite=True)
    assert contents(tmp_path) == 3.0


def test_of_two_saves_at_once_one_is_refused(tmp_path):
    put(tmp_path, 1.0, 1)
    with ShardWriter(tmp_path, overwrite=True) as writer:
        writer.add("model.norm.weight", torch.ones(64))
        with pytest.raises(BlockingIOError, match=r"another save into .* is under way"):
            put(tmp_path, 3.0, 1, overwrite=True)
        with pytest.raises(BlockingIOError, match="is under way"):
            recover(tmp_path)
    assert contents(tmp_path) == 1.0
    put(tmp_path, 3.0, 1, overwrite=True)
    assert contents(tmp_path) == 3.0


def test_saves_of_several_threads_never_mix(tmp_path):
    put(tmp_path, 1.0, 1)
    done: list[float] = []

    def run(value: float) -> None:
        for _ in range(5):
            try:
                put(tmp_path, value, int(value) % 3 + 1, overwrite=True)
                done.append(value)
            except BlockingIOError:
                continue

    threads = [threading.Thread(target=run, args=(float(n),)) for n in range(2, 6)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        contents(tmp_path)  # fails on a mixture
    for thread in threads:
        thread.join()
    assert contents(tmp_path) == done[-1]


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "no locks here")

    monkeypatch.setattr(transaction.fcntl, "flock", no_locks)
    put(tmp_path, 1.0, 1)
    with ShardWriter(tmp_path, overwrite=True) as slow:
        slow.add("model.norm.weight", torch.full((64,), 2.0))
        put(tmp_path, 3.0, 2, overwrite=True)
        with pytest.raises(FileExistsError, match="has changed since this save began"):
            slow.finish({"config.json": {}})
    assert contents(tmp_path) == 3.0


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "hf_quant_config.json"])
def test_a_folder_in_the_way_is_refused_before_anything_is_written(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "inside").write_text("x")
    with pytest.raises(FileExistsError, match=rf"{name} is a folder, wanted a file"):
        put(tmp_path, 2.0, 1, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_what_no_index_names_stays(tmp_path):
    """T-save: only files of the old checkpoint are replaced."""
    put(tmp_path, 1.0, 3)
    theirs = stranger(tmp_path)
    put(tmp_path, 2.0, 2, overwrite=True)
    assert others(tmp_path) == theirs
    assert contents(tmp_path) == 2.0
    extra = tmp_path / "model-00002-of-00009.safetensors"
    extra.write_bytes(b"somebody's")
    with pytest.raises(FileExistsError, match="is a shard that no index there names"):
        put(tmp_path, 3.0, 1, overwrite=True)
    assert contents(tmp_path) == 2.0
    extra.unlink()
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(FileExistsError, match="which shards belong to the checkpoint"):
        put(tmp_path, 3.0, 1, overwrite=True)


def test_an_index_cannot_name_what_is_no_shard(tmp_path):
    put(tmp_path, 1.0, 2)
    outside = tmp_path.parent / "outside.safetensors"
    outside.write_bytes(b"far")
    (tmp_path / "notes.txt").write_bytes(b"near")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"].update(a="../outside.safetensors", b="notes.txt", c=str(outside))
    path.write_text(json.dumps(index))
    put(tmp_path, 2.0, 1, overwrite=True)
    assert outside.read_bytes() == b"far"
    assert (tmp_path / "notes.txt").read_bytes() == b"near"
    assert contents(tmp_path) == 2.0


def test_links_are_replaced_and_never_followed(tmp_path, monkeypatch):
    """Files of a hub's cache are links to blobs; a link may also be planted at a temporary name."""
    blobs, folder, victim = tmp_path / "blobs", tmp_path / "f", tmp_path / "victim"
    put(blobs, 1.0, 1)
    victim.write_text("mine")
    folder.mkdir()
    for file in blobs.iterdir():
        (folder / file.name).symlink_to(file)
    assert contents(folder) == 1.0
    put(folder, 2.0, 1, overwrite=True)
    assert (contents(folder), contents(blobs)) == (2.0, 1.0)
    monkeypatch.setattr(transaction.secrets, "token_hex", lambda size: "known")
    (folder / ".dsv4-writing-known").symlink_to(tmp_path)
    with pytest.raises(FileExistsError):
        put(folder, 3.0, 1, overwrite=True)
    (folder / ".dsv4-writing-known").unlink()
    with ShardWriter(folder, overwrite=True) as writer:
        (folder / ".dsv4-writing-known" / "shard-00000").symlink_to(victim)
        with pytest.raises(FileExistsError):
            writer.add("model.norm.weight", torch.ones(64))
    assert victim.read_text() == "mine"
    (folder / transaction.COMMITTED).symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match="is a symbolic link"):
        Checkpoint.open(folder)


def test_a_program_that_writes_after_an_interrupted_save_is_not_mixed_in(tmp_path):
    put(tmp_path, 1.0, 1)
    for number in range(1, 200):
        faults = Faults(number, Dead, dead=True)
        attempt(tmp_path, 2, faults)
        unlock(tmp_path.resolve())
        if (tmp_path / transaction.COMMITTED).exists():
            break
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(SMALL.to_dict()))
    with pytest.raises(CheckpointError, match=r"config\.json was written after a save"):
        Checkpoint.open(tmp_path)
    with pytest.raises(FileExistsError, match=r"config\.json was written by another program"):
        put(tmp_path, 3.0, 1, overwrite=True)
    (tmp_path / "config.json").unlink()
    assert recover(tmp_path)
    assert not recover(tmp_path)
    assert contents(tmp_path) == 2.0


def test_reading_while_a_save_replaces_the_files_never_mixes(tmp_path):
    put(tmp_path, 1.0, 3)
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.read(NAMES[0]).tolist() == [1.0] * 64
        put(tmp_path, 2.0, 3, overwrite=True)
        checkpoint.close()
        with pytest.raises(CheckpointError, match="has changed since it was opened"):
            checkpoint.read(NAMES[1])


@pytest.mark.parametrize("layout", ["nvidia", "bf16"])
def test_a_whole_model_over_another(tmp_path, layout):
    first, second = make_model(seed=1), make_model(seed=2)
    save(first, tmp_path, layout="nvidia", max_shard_bytes=100_000)
    assert (tmp_path / "hf_quant_config.json").exists()
    save(second, tmp_path, layout=layout, overwrite=True)
    # The file about the quantisation of the old weights would mislead other tools.
    assert (tmp_path / "hf_quant_config.json").exists() == (layout == "nvidia")
    save(second, tmp_path / "alone", layout=layout)
    left, right = (state(load(f, progress=False)) for f in (tmp_path, tmp_path / "alone"))
    assert all(torch.equal(raw(left[name]), raw(right[name])) for name in right)


def test_what_is_no_model_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"source is Linear, wanted a DeepseekV4ForCausalLM"):
        save(torch.nn.Linear(2, 2), tmp_path / "a")
    with pytest.raises(ValueError, match=r"source is Linear, wanted a DeepseekV4ForCausalLM"):
        save(torch.nn.Linear(2, 2), tmp_path / "a", config=SMALL)
    for source in ("folder", {"a": torch.ones(1)}, 3):
        with pytest.raises(TypeError, match=rf"source is {type(source).__name__}, wanted a model"):
            save(source, tmp_path / "a", config=SMALL)
    with pytest.raises(TypeError, match="config is Linear, wanted a ModelConfig"):
        write([], tmp_path / "a", config=torch.nn.Linear(2, 2))
    assert not (tmp_path / "a").exists()
    assert ModelConfig.of(SMALL) is SMALL
