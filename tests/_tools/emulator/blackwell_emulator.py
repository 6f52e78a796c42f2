"""Runs the source of the ``tcgen05`` kernels on the CPU, emulating what the PTX manual says.

Every thread of a cluster that does something of its own is a Python thread: those of the epilogue,
scale and clear warps, and one each of the copy and the MMA warp. TMA copies end in any order, MMAs
some time after they were issued. mbarriers count arrivals and bytes as the hardware's do, and a
wait that does not end is an error. So a wrong coordinate, swizzle, column, parity or count gives a
wrong result or none.
"""

from __future__ import annotations

import builtins
import collections
import itertools
import random
import threading
import time
import types
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import numpy as np

import dsv4
from dsv4.cute.sm100 import gemm_plan, mma_descriptors
from tests._tools.ptx import machine as ptx_machine

SLOWNESS = 0.02  # seconds that a load takes
PATIENCE = 60.0  # seconds that a barrier is waited for
_HERE = threading.local()
# Of counts that several threads raise: numpy lets go of Python's lock while it adds.
_COUNTING = threading.Lock()
_ROOT = Path(dsv4.__file__).parent
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_ELEMENTS = np.concatenate([_MAGNITUDES, -_MAGNITUDES])


def e4m3(byte):
    """float32 of unsigned E4M3 bytes."""
    byte = byte.astype(np.int32)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    value = np.where(exponent == 0, mantissa / 512, (8 + mantissa) * 2.0 ** (exponent - 10))
    return np.where(byte & 127 == 127, np.nan, value).astype(np.float32)


class Barrier:
    """A shared-memory barrier: a phase ends with its arrivals and the bytes they announced."""

    def __init__(self, lock, count):
        self.changed, self.count, self.pending, self.bytes, self.phase = lock, count, count, 0, 0

    def arrive(self, announced=0):
        with self.changed:
            assert self.pending > 0, "more arrivals than the barrier counts"
            self.pending -= 1
            self.bytes += announced
            self._end()

    def complete(self, count):
        with self.changed:
            self.bytes -= count
            self._end()

    def _end(self):
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count
            self.changed.notify_all()

    def wait(self, parity):
        with self.changed:
            ended = self.changed.wait_for(
                lambda: self.phase % 2 != parity or _HERE.cluster.failed, PATIENCE
            )
            assert ended, f"deadlock: phase {self.phase} never ended, {self.pending} are missing"
            _HERE.cluster.check()


class Meeting:
    """A ``threading.Barrier`` that wakes each thread once.

    Python's own wakes all and then hands its lock from each to the next, which took half of the
    time of an emulated kernel.
    """

    def __init__(self, parties):
        self.parties, self.lock, self.waiting, self.broken = parties, threading.Lock(), [], False

    def wait(self):
        with self.lock:
            if self.broken:
                raise threading.BrokenBarrierError
            if len(self.waiting) == self.parties - 1:
                self._wake()
                return
            own = threading.Lock()
            own.acquire()
            self.waiting.append(own)
        own.acquire()
        if self.broken:
            raise threading.BrokenBarrierError

    def abort(self):
        with self.lock:
            self.broken = True
            self._wake()

    def _wake(self):
        for lock in self.waiting:
            lock.release()
        self.waiting = []


class Engine(threading.Thread):
    """Executes jobs asynchronously: in order, or any of the pending ones first."""

    def __init__(self, cluster, ordered):
        super().__init__(daemon=True)
        self.cluster, self.ordered, self.jobs = cluster, ordered, []
        self.changed, self.ends, self.random = threading.Condition(), False, random.Random(0)

    def issue(self, job):
        with self.changed:
            self.jobs.append(job)
            self.changed.notify()

    def end(self):
        with self.changed:
            self.ends = True
            self.changed.notify()

    def run(self):
        _HERE.cluster = self.cluster
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.jobs or self.ends)
                if not self.jobs:
                    return
                number = 0 if self.ordered else self.random.randrange(len(self.jobs))
                job = self.jobs.pop(number)
            try:
                job()
            except BaseException as error:
                self.cluster.fail(error)
                return


class Cluster:
    """Memories, mbarriers, asynchronous engines and threads of one cluster."""

    def __init__(self, plan, first, clusters):
        self.plan, self.first, self.clusters = plan, first, clusters
        self.shared = [np.full(1 << 18, 0xFF, np.uint8) for _ in range(plan.ctas)]
        self.tmem = np.full((plan.ctas, 128, 512), 0xFFFFFFFF, np.uint32)
        self.lock, self.barriers, self.failed = threading.Condition(threading.RLock()), {}, []
        self.copies = [Engine(self, ordered=False) for _ in range(plan.ctas)]
        self.mmas = [Engine(self, ordered=True) for _ in range(plan.ctas)]
        self.owned = [0] * plan.ctas  # TMEM columns
        alone = (gemm_plan.MMA_WARP, gemm_plan.COPY_WARP)
        self.whole = [warp for warp in range(plan.threads // 32) if warp not in alone]
        self.lanes = [32 * warp + lane for warp in self.whole for lane in range(32)]
        self.lanes += [32 * warp for warp in alone]
        self.meeting = Meeting(len(self.lanes) * plan.ctas)
        self.named = [Meeting(128) for _ in range(plan.ctas)]
        self.warps = [{warp: Meeting(32) for warp in self.whole} for _ in range(plan.ctas)]
        self.slots = [
            {warp: [[None] * 32 for _ in range(2)] for warp in self.whole} for _ in range(plan.ctas)
        ]

    def fail(self, error):
        with self.lock:
            self.failed.append(error)
            self.lock.notify_all()
        warps = itertools.chain(*(warps.values() for warps in self.warps))
        for barrier in (self.meeting, *self.named, *warps):
            barrier.abort()

    def check(self):
        if self.failed:
            raise RuntimeError("another thread failed")

    def barrier(self, address, cta=None):
        return self.barriers[_HERE.cta if cta is None else cta, address]

    def run(self, body):
        """Run the kernel in all threads; raises what the first that failed raised."""
        engines = [*self.copies, *self.mmas]
        threads = [
            threading.Thread(target=self._thread, args=(body, cta, thread), daemon=True)
            for cta in range(self.plan.ctas)
            for thread in self.lanes
        ]
        for thread in (*engines, *threads):
            thread.start()
        for thread in threads:
            thread.join()
        for engine in engines:
            engine.end()
            engine.join()
        if self.failed:
            raise self.failed[0]
        assert not any(self.owned), "TMEM was not freed"
        assert all(b.bytes == 0 and b.pending == b.count for b in self.barriers.values())

    def _thread(self, body, cta, thread):
        _HERE.cluster, _HERE.cta, _HERE.thread = self, cta, thread
        _HERE.warp, _HERE.lane = divmod(thread, 32)
        _HERE.slot_set = 0
        try:
            body()
        except BaseException as error:
            self.fail(error)


def meet(barrier):
    try:
        barrier.wait()
    except threading.BrokenBarrierError:
        _HERE.cluster.check()
        raise


def together(value):
    """The values of all lanes of the warp."""
    cluster, cta, warp = _HERE.cluster, _HERE.cta, _HERE.warp
    # Two sets of slots, alternating: a lane that writes the next time disturbs no lane that reads.
    _HERE.slot_set ^= 1
    slots = cluster.slots[cta][warp][_HERE.slot_set]
    slots[_HERE.lane] = value
    meet(cluster.warps[cta][warp])
    return slots


class Pointer:
    """An address in shared memory that counts in elements."""

    def __init__(self, address, item):
        self.address, self.item = address, item

    def __add__(self, count):
        return Pointer(self.address + count * self.item, self.item)

    def toint(self):
        return self.address


class Allocator:
    """Shared memory of a CTA, the same for every thread."""

    def __init__(self):
        self.end = 1024

    def allocate(self, count, alignment):
        start = -(-self.end // alignment) * alignment
        self.end = start + count
        return Pointer(start, 1)

    def allocate_array(self, dtype, count):
        start = self.allocate(count * dtype.item, 16).address
        return Pointer(start, dtype.item)


class Number(int):
    """A DSL type: ``Int32(value)`` in kernels, an element size for ``Allocator``."""

    def __new__(cls, item):
        number = super().__new__(cls, item)
        number.item = item
        return number

    def __call__(self, value):
        return int(value)


class Operand:
    """The bytes that a TMA copy reads, and the box that is passed to the driver."""

    def __init__(self, content, box, multicast=False):
        self.content, self.box, self.multicast = content, box, multicast
        self.reads = np.zeros(box.sizes[::-1], np.int32)

    def take(self, shape, where):
        """A box of bytes; zeros beyond the end."""
        box = self.box
        assert tuple(shape[::-1]) == box.box, "the kernel copies another box than the map has"
        coordinates = np.indices(shape).reshape(len(shape), -1) + np.array(where)[:, None]
        sizes = np.array(box.sizes[::-1])[:, None]
        assert (coordinates >= 0).all()
        inside = (coordinates < sizes).all(0)
        strides = np.array((*box.strides[::-1], box.item_bytes))[:, None]
        start = (coordinates * strides).sum(0)[:, None] + np.arange(box.item_bytes)
        copied = np.zeros((coordinates.shape[1], box.item_bytes), np.uint8)
        copied[inside] = self.content[start[inside]]
        with _COUNTING:
            np.add.at(self.reads, tuple(coordinates[:, inside]), 1)
        return copied.reshape(-1)


class Global:
    """Global memory: arrays by address, with counts of stores and of loads of words."""

    def __init__(self):
        self.arrays, self.loads = {}, collections.Counter()

    def add(self, array):
        start = (len(self.arrays) + 1) << 40
        self.arrays[start] = (array, np.zeros(array.shape, np.int32))
        return start

    def at(self, address):
        start = address >> 40 << 40
        return (*self.arrays[start], address - start)

    def load_float(self, address):
        array, _, offset = self.at(address)
        assert array.dtype == np.float32
        return array[offset // 4]

    def load_int(self, address):
        array, _, offset = self.at(address)
        assert array.dtype == np.int32
        return int(array[offset // 4])

    def load_words(self, address, words):
        array, _, offset = self.at(address)
        with _COUNTING:
            self.loads[offset] += 1
        assert array.dtype == np.uint8
        assert offset % (4 * words) == 0
        loaded = array[offset : offset + 4 * words]
        assert loaded.size == 4 * words, "beyond the end"
        return loaded.view(np.uint32).tolist()

    def store(self, address, values):
        array, written, offset = self.at(address)
        first = offset // array.itemsize
        assert offset % (len(values) * array.itemsize) == 0, "a store that is not aligned"
        with _COUNTING:
            for i, value in enumerate(values):
                array[first + i] = value
                written[first + i] += 1


def bfloat16(value):
    """Bits of the nearest."""
    bits = int(np.float32(value).view(np.uint32))
    return 0x7FC0 if np.isnan(value) else bits + 0x7FFF + (bits >> 16 & 1) >> 16


def fake_ptx(memory):
    """``dsv4.cute.device.ptx``."""

    def shared():
        return _HERE.cluster.shared[_HERE.cta]

    def mbarrier_init(address, count):
        cluster = _HERE.cluster
        cluster.barriers[_HERE.cta, address] = Barrier(cluster.lock, count)

    def stmatrix_x2_transposed(address, low, high):
        every = together((address, (low, high)))
        for matrix in range(2):
            pair = every[_HERE.lane][1][matrix]
            for i in range(2):
                target = every[matrix * 8 + _HERE.lane % 4 * 2 + i][0] + _HERE.lane // 4 * 2
                shared()[target : target + 2].view(np.uint16)[0] = pair >> 16 * i & 0xFFFF

    def store_shared_bfloat16(address, value):
        shared()[address : address + 2].view(np.uint16)[0] = bfloat16(value)

    def swiglu(gate, up, limit):
        if not (np.isfinite(gate) and np.isfinite(up)):
            return np.float32(np.nan)
        gate, up = min(gate, limit), max(min(up, limit), -limit)
        with np.errstate(over="ignore"):
            return np.float32(gate / (1 + np.exp(-np.float64(gate))) * up)

    def load_shared(address, words):
        assert address % (4 * words) == 0
        return shared()[address : address + 4 * words].view(np.uint32).copy()

    def store_shared4(address, words, offset=0):
        assert (address + offset) % 16 == 0
        shared()[address + offset : address + offset + 16].view(np.uint32)[:] = words

    def store_shared_int(address, value):
        shared()[address : address + 4].view(np.int32)[0] = value

    def store_global4(address, words):
        array, *_ = memory.at(address)
        memory.store(address, np.array(words, np.uint32).view(array.dtype))

    def load_global_or_zero(address, words, exists, offset=0):
        return memory.load_words(address + offset, words) if exists else [0] * words

    def max_u16x2(a, b):
        a, b = int(a), int(b)
        return np.uint32(max(a >> 16, b >> 16) << 16 | max(a & 0xFFFF, b & 0xFFFF))

    def store_shared_float4(address, values):
        assert address % 16 == 0
        shared()[address : address + 16].view(np.float32)[:] = values

    def load_shared_cluster_float4(address):
        cta, start = divmod(address, 1 << 32)
        return _HERE.cluster.shared[cta][start : start + 16].view(np.float32).copy()

    return types.SimpleNamespace(
        store_shared_float4=store_shared_float4,
        load_shared_cluster_float4=load_shared_cluster_float4,
        map_to_cta=lambda address, cta: cta << 32 | address,
        mbarrier_init=mbarrier_init,
        fence_mbarrier_init=lambda: None,
        mbarrier_arrive_expect_tx=lambda address, count: _HERE.cluster.barrier(address).arrive(
            count
        ),
        mbarrier_wait=lambda address, parity: _HERE.cluster.barrier(address).wait(parity),
        mbarrier_arrive=lambda address: _HERE.cluster.barrier(address).arrive(),
        load_shared_int=lambda address: int(load_shared(address, 1)[0]),
        load_shared=load_shared,
        load_global_float=memory.load_float,
        store_global_float=lambda address, value: memory.store(address, [value]),
        store_global4=store_global4,
        store_global=lambda address, word: memory.store(
            address, np.array([word], np.uint32).view(np.uint8)
        ),
        store_global_byte=lambda address, byte: memory.store(address, [byte]),
        load_global=memory.load_int,
        load_global_or_zero=load_global_or_zero,
        store_shared4=store_shared4,
        store_shared_int=store_shared_int,
        fence_proxy_async_shared=lambda: None,
        max_u16x2=max_u16x2,
        assembly=ptx_machine.run,
        stmatrix_x2_transposed=stmatrix_x2_transposed,
        store_shared_bfloat16=store_shared_bfloat16,
        pack_bfloat16x2=lambda low, high: bfloat16(low) | bfloat16(high) << 16,
        select_float=lambda condition, yes, no: yes if condition else no,
        swiglu=swiglu,
    )


def operand_elements(shared, start, rows):
    """``[rows, 64]`` of K-major codes in rows of 128 bytes, whose 16-byte pieces are exchanged."""
    row, byte = np.meshgrid(np.arange(rows), np.arange(32), indexing="ij")
    address = start + row // 8 * 1024 + row % 8 * 128 + byte
    codes = shared[address ^ (address >> 7 & 7) << 4]
    return _ELEMENTS[np.stack((codes & 15, codes >> 4), -1).reshape(rows, 64)]


def operand_scales(tmem, column, rows):
    """``[rows, 64]``: a byte for 16 columns, in lane ``row % 32`` of column ``row // 32``."""
    row = np.arange(rows)
    copies = [tmem[row % 32 + 32 * w, column + row // 32] for w in range(4)]
    assert all((copy == copies[0]).all() for copy in copies), "the warps' copies differ"
    return np.repeat(e4m3(copies[0][:, None] >> np.array([0, 8, 16, 24]) & 0xFF), 16, 1)


def fake_tcgen05():
    """``dsv4.cute.sm100.tcgen05``."""

    def allocate(address, columns, cta_group):
        cluster = _HERE.cluster
        assert cta_group == cluster.plan.cta_group
        assert columns in (32, 64, 128, 256, 512)
        if _HERE.lane == 0:
            assert cluster.owned[_HERE.cta] == 0
            cluster.owned[_HERE.cta] = columns
            slot = cluster.shared[_HERE.cta][address : address + 4]
            slot.view(np.uint32)[0] = 512 - columns

    def free(start, columns, cta_group):
        if _HERE.lane == 0:
            assert (start, columns) == (512 - columns, _HERE.cluster.owned[_HERE.cta])
            _HERE.cluster.owned[_HERE.cta] = 0

    def copy_scales(target, address, cta_group):
        cluster, first = _HERE.cluster, _HERE.cta

        def job():
            for cta in range(first, first + cta_group):
                scales = cluster.shared[cta][address : address + 512].view(np.uint32)
                columns = cluster.tmem[cta, :, target : target + 4]
                columns[:] = np.tile(scales.reshape(32, 4), (4, 1))

        cluster.mmas[_HERE.cta].issue(job)

    def multiply(sums, left, right, left_scales, right_scales, accumulate, instruction, cta_group):
        cluster, tokens = _HERE.cluster, _HERE.cluster.plan.token_block
        assert instruction == mma_descriptors.instruction_descriptor(128 * cta_group, tokens)
        start, first = 512 - cluster.owned[0], _HERE.cta
        assert start <= sums <= 512 - tokens

        def job():
            own = tokens // cta_group
            ctas = range(first, first + cta_group)
            codes = [operand_elements(cluster.shared[b], right << 4, own) for b in ctas]
            codes = np.concatenate(codes)
            for cta in ctas:
                tmem = cluster.tmem[cta]
                a = operand_elements(cluster.shared[cta], left << 4, 128)
                a = a * operand_scales(tmem, left_scales, 128)
                b = codes * operand_scales(tmem, right_scales, tokens)
                total = tmem[:, sums : sums + tokens].view(np.float32)
                before = total.copy() if accumulate else np.float32(0)
                total[:] = before + a @ b.T

        cluster.mmas[_HERE.cta].issue(job)

    def commit(address, cta_group):
        cluster, first = _HERE.cluster, _HERE.cta

        def job():
            for cta in range(first, first + cta_group):
                cluster.barrier(address, cta).arrive()

        cluster.mmas[_HERE.cta].issue(job)

    def load(address, tiles):
        first, column = address >> 16, address & 0xFFFF
        assert first == 32 * (_HERE.warp % 4), "a warp loads its own lanes"
        time.sleep(SLOWNESS)  # the next MMAs overwrite what is loaded too late
        tmem = _HERE.cluster.tmem[_HERE.cta].view(np.float32)
        row, start = first + _HERE.lane // 4, column + _HERE.lane % 4 * 2
        return [
            [
                [tmem[row + 16 * h + 8 * (i // 2), start + 8 * n + i % 2] for i in range(4)]
                for n in range(tiles)
            ]
            for h in range(2)
        ]

    return types.SimpleNamespace(
        allocate=allocate,
        free=free,
        fence_before_sync=lambda: None,
        fence_after_sync=lambda: None,
        codes_descriptor=lambda address: address >> 4,
        copy_scales=copy_scales,
        multiply=multiply,
        commit=commit,
        arrive_leader=lambda address: _HERE.cluster.barrier(address, 0).arrive(),
        load=load,
    )


def copy(operand, source, to, tma_bar_ptr, mcast_mask):
    """A TMA copy; its bytes complete at the mbarrier of the MMA's leader."""
    cluster, cta = _HERE.cluster, _HERE.cta
    (_, where), shape = source
    (start, swizzled) = to
    assert swizzled == operand.box.swizzled
    assert start.address % (1024 if swizzled else 128) == 0

    def job():
        copied = operand.take(shape, where)
        addresses = start.address + np.arange(copied.size)
        if swizzled:
            addresses ^= (addresses >> 7 & 7) << 4
        for target in range(cluster.plan.ctas) if operand.multicast else [cta]:
            cluster.shared[target][addresses] = copied
            leader = cta // cluster.plan.cta_group * cluster.plan.cta_group
            cluster.barrier(tma_bar_ptr.address, leader).complete(copied.size)

    cluster.copies[cta].issue(job)


def shuffled(value, offset, mask_and_clamp, kind):
    """A shuffle upwards; the first lanes get what they gave."""
    assert (mask_and_clamp, kind) == (0, "up")
    values = together(value)
    return values[_HERE.lane - offset if _HERE.lane >= offset else _HERE.lane]


def fake_cutlass():
    """``cutlass``, as far as the kernel needs it; what only the compiler calls is missing."""
    arch = types.SimpleNamespace(
        thread_idx=lambda: (_HERE.thread, 0, 0),
        block_idx=lambda: (_HERE.cluster.first * _HERE.cluster.plan.ctas + _HERE.cta, 0, 0),
        grid_dim=lambda: (_HERE.cluster.clusters * _HERE.cluster.plan.ctas, 0, 0),
        make_warp_uniform=lambda value: value,
        griddepcontrol_launch_dependents=lambda: None,
        griddepcontrol_wait=lambda: None,
        cluster_arrive=lambda: None,
        cluster_wait=lambda: meet(_HERE.cluster.meeting),
        barrier=lambda barrier_id=0, number_of_threads=0: meet(
            _HERE.cluster.named[_HERE.cta] if barrier_id else _HERE.cluster.meeting
        ),
        sync_warp=lambda: together(None) if _HERE.warp in _HERE.cluster.whole else None,
        elect_one=nullcontext,
        shuffle_sync_bfly=lambda value, mask: together(value)[_HERE.lane ^ mask],
        shuffle_sync_op=shuffled,
    )
    cute = types.SimpleNamespace(
        arch=arch,
        jit=lambda function: function,
        kernel=lambda function: function,
        Tensor=None,
        CopyAtom=None,
        domain_offset=lambda where, positions: (positions, where),
        local_tile=lambda source, shape, at: (source, shape),
        recast_ptr=lambda pointer, swizzle, dtype: (pointer, swizzle is not None),
        make_swizzle=lambda *bits: bits,
        make_tensor=lambda pointer, layout: types.SimpleNamespace(to=pointer, layout=layout),
        make_ordered_layout=lambda shape, order: shape,
        make_layout=lambda shape: shape,
        rank=len,
        group_modes=lambda tensor, first, last: tensor,
        copy=copy,
    )
    cpasync = types.SimpleNamespace(
        prefetch_descriptor=lambda atom: None,
        tma_partition=lambda atom, at, layout, to, source: (to.to, source),
    )
    numbers = {"Int16": 2, "Int32": 4, "Int64": 8, "Uint8": 1, "Uint16": 2, "Uint32": 4}
    return types.SimpleNamespace(
        cute=cute,
        nvgpu=types.SimpleNamespace(cpasync=cpasync),
        const_expr=lambda value: value,
        range=lambda *limits, unroll=1: range(*limits),
        range_constexpr=range,
        min=min,
        max=max,
        memory=types.SimpleNamespace(SmemAllocator=Allocator),
        Float32=np.float32,
        Boolean=bool,
        **{name: Number(item) for name, item in numbers.items()},
    )


# Modules of device code that are executed with fakes in place of the compiler.
EXECUTED = {
    f"dsv4.cute.{name}"
    for name in (
        "device.epilogue",
        "device.expert_scheduler",
        "device.kernel",
        "device.quantize",
        "sm100.gemm",
        "sm100.gemm_copies",
        "sm100.gemm_epilogue",
        "sm100.gemm_mma",
        "sm100.gemm_pipeline",
        "sm100.grouped_gemm_scales",
    )
}


def emulated_source(memory, name="dsv4.cute.sm100.gemm"):
    """A module of device code, executed with fakes of what it imports from the compiler."""
    cutlass = fake_cutlass()
    nothing = types.SimpleNamespace(
        CUstream=None, make_fake_tensor=None, CtaGroup=types.SimpleNamespace(ONE=1, TWO=2)
    )
    ptx = types.SimpleNamespace(ptx=fake_ptx(memory))
    shuffles = types.SimpleNamespace(nvvm=types.SimpleNamespace(ShflKind=Kinds))
    stand_ins = {
        "cutlass._mlir.dialects": shuffles,
        "cutlass": cutlass,
        "cutlass.cute": cutlass,
        "cutlass.cute.nvgpu": cutlass.nvgpu,
        "cutlass.cute.nvgpu.tcgen05": nothing,
        "cutlass.cute.runtime": nothing,
        "cuda.bindings.driver": nothing,
        "dsv4.cute.device": ptx,
        "dsv4.cute.sm100": types.SimpleNamespace(tcgen05=fake_tcgen05()),
    }

    def find(name, globals=None, locals=None, fromlist=(), level=0):
        if name in stand_ins:
            return stand_ins[name]
        if name in EXECUTED:
            stand_ins[name] = _executed(name, find)
            return stand_ins[name]
        return builtins.__import__(name, globals, locals, fromlist, level)

    return _executed(name, find)


class Kinds:
    """Constants of shuffles."""

    up = "up"


def _executed(name, find):
    file = _ROOT.joinpath(*name.split(".")[1:]).with_suffix(".py")
    scope = {"__name__": name, "__builtins__": {**vars(builtins), "__import__": find}}
    exec(compile(file.read_text(), str(file), "exec", dont_inherit=True), scope)
    return types.SimpleNamespace(**scope)


class Prepared(NamedTuple):
    """The arguments that a launcher passes to ``KernelAbi.launch``.

    Attributes:
        ctas: Of the grid.
        boxes: What the TMA copies read.
        scalars: Arguments of the kernel that are no pointers, by name.
    """

    ctas: int
    boxes: tuple
    scalars: dict


def prepared(monkeypatch, launcher, abi, plan, clusters, call):
    """The launch that a launcher prepares of a call with a given plan.

    Args:
        monkeypatch: Restores what is replaced.
        launcher: ``gemm_nvfp4`` or ``grouped_nvfp4``.
        abi: The kernel's ``KernelAbi``.
        plan: The configuration.
        clusters: That the GPU holds at a time.
        call: The launcher's ``_Call``.
    """

    def launch(kernel, ctas, boxes, describe, **scalars):
        return Prepared(ctas, boxes, scalars)

    ready = types.SimpleNamespace(prepare=lambda device: clusters)
    monkeypatch.setattr(launcher, "choose", lambda *what: plan)
    monkeypatch.setattr(launcher, "loaded", lambda *what: ready)
    monkeypatch.setattr(launcher, "architecture", lambda device: "sm_100a")
    monkeypatch.setattr(abi, "launch", launch)
    return launcher._prepared.__wrapped__(call, 0)


def run(plan, launch, operands, memory, records, pointers):
    """Run the grid of a launch, one cluster after another.

    Args:
        plan: The configuration.
        launch: ``Prepared``.
        operands: Bytes of what the TMA copies read.
        memory: ``Global``, with everything else.
        records: Types of the kernel's TMA copies and of its arguments.
        pointers: Addresses in ``memory``, by the names of the arguments.

    Returns:
        The operands, with the number of times each element was read.
    """
    module, name = plan.kernel.split(":")
    kernel = getattr(emulated_source(memory, module), name)(plan)
    make = kernel._make_barriers
    # Of the copy warp one lane is run, but all lanes make barriers.
    kernel._make_barriers = lambda barriers, lane: [make(barriers, i) for i in range(32)]
    multicast = (False, False, False, plan.multicasts_scales)[: len(operands)]
    operands = [Operand(*what) for what in zip(operands, launch.boxes, multicast, strict=True)]
    tma_type, args_type = records
    tma = tma_type(*(types.SimpleNamespace(atom=operand, tensor=None) for operand in operands))
    args = args_type(**launch.scalars, **pointers)
    clusters = launch.ctas // plan.ctas
    for first in range(clusters):
        Cluster(plan, first, clusters).run(lambda: kernel.kernel(tma, args))
    return operands
