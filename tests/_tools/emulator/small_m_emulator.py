"""Runs the source of Hopper's grouped kernels for few rows on the CPU, all CTAs at a time.

Every thread of the grid is a Python thread. mbarriers count arrivals and bytes as the hardware's
do; a wait that does not end is an error. Products are float32 sums in the order of the K steps, so
kernels with equal K splits give equal bits. Weights are decoded by a rule of this module, not by
the layout of ``dsv4.quant.fragments``: results of two kernels are comparable, not with other
numbers.
"""

from __future__ import annotations

import builtins
import random
import threading
import time
import types
from pathlib import Path

import numpy as np

import dsv4
from tests._tools.emulator.blackwell_emulator import Kinds, Number, bfloat16

PATIENCE = 60.0  # seconds that a thread waits for others
SHARED_BYTES = 1 << 18
_HERE = threading.local()
_ROOT = Path(dsv4.__file__).parent
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_ELEMENTS = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
EXECUTED = {
    f"dsv4.cute.{name}"
    for name in (
        "device.epilogue",
        "device.expert_scheduler",
        "device.kernel",
        "device.quantize",
        "sm90.expert_mlp",
        "sm90.grouped_gemm_small_m",
        "sm90.grouped_gemm_small_m_segments",
        "sm90.small_m_tile",
    )
}


class Grid:
    """Memories and barriers of a launch.

    Attributes:
        arrays: Bytes of global memory by address; addresses are multiples of 2^40.
        stores: How often each 16 bytes of them were stored.
    """

    def __init__(self):
        self.arrays, self.stores = {}, {}
        self.failed, self.random = [], random.Random(0)
        self.changed = threading.Condition(threading.RLock())

    def add(self, array):
        """Let kernels see an array, and return its address."""
        address = (len(self.arrays) + 1) << 40
        self.arrays[address] = array.reshape(-1).view(np.uint8)
        self.stores[address] = np.zeros(self.arrays[address].size // 16 + 1, np.int32)
        return address

    def bytes_at(self, address, count):
        """A view of bytes of global memory, all of one array."""
        start, offset = address >> 40 << 40, address & ((1 << 40) - 1)
        content = self.arrays[start][offset : offset + count]
        assert content.size == count, "beyond the end of an array"
        return content

    def fail(self, error):
        """Make all threads of the launch end."""
        with self.changed:
            self.failed.append(error)
            self.changed.notify_all()
        for cta in self.ctas:
            for barrier in (cta.meeting, *cta.warps):
                barrier.abort()

    def run(self, ctas, threads, body, resident=None):
        """Run a kernel in all threads of a grid; raises what the first that failed raised.

        Args:
            ctas: How many.
            threads: Threads of a CTA.
            body: What each of them calls.
            resident: Most CTAs that run at a time; None: all.
        """
        self.ctas = [Cta(self, number, threads) for number in range(ctas)]
        self.ended, self.resident = 0, ctas if resident is None else resident
        started = [
            threading.Thread(target=self._thread, args=(body, cta, thread, ctas), daemon=True)
            for cta in self.ctas
            for thread in range(threads)
        ]
        self.random.shuffle(started)
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
        if self.failed:
            raise self.failed[0]

    def _thread(self, body, cta, thread, ctas):
        _HERE.grid, _HERE.cta, _HERE.thread, _HERE.ctas = self, cta, thread, ctas
        _HERE.warp, _HERE.lane = divmod(thread, 32)
        _HERE.slot_set, _HERE.copies = 0, []
        try:
            with self.changed:  # until enough CTAs before this one have ended
                before = cta.number - self.resident
                self.changed.wait_for(lambda: self.ended > before or self.failed)
            body()
            with self.changed:
                cta.running -= 1
                self.ended += cta.running == 0
                self.changed.notify_all()
        except BaseException as error:
            self.fail(error)


class Cta:
    """Shared memory, mbarriers and meetings of a CTA's threads."""

    def __init__(self, grid, number, threads):
        self.grid, self.number, self.running = grid, number, threads
        self.shared = np.full(SHARED_BYTES, 0xFF, np.uint8)
        self.barriers = {}
        self.meeting = threading.Barrier(threads)
        self.warps = [threading.Barrier(32) for _ in range(threads // 32)]
        self.slots = [[[None] * 32 for _ in range(2)] for _ in range(threads // 32)]


class Mbarrier:
    """A phase ends with its arrivals and the bytes they announced."""

    def __init__(self, count):
        self.count, self.pending, self.bytes, self.phase = count, count, 0, 0

    def arrive(self, announced=0):
        """Arrive; how many arrivals were pending before."""
        with _HERE.grid.changed:
            assert self.pending > 0, "more arrivals than the barrier counts"
            before = self.pending
            self.pending -= 1
            self.bytes += announced
            self._end()
            return before

    def complete(self, count):
        """Take bytes off."""
        with _HERE.grid.changed:
            self.bytes -= count
            self._end()

    def _end(self):
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count
            _HERE.grid.changed.notify_all()

    def wait(self, parity):
        """Wait for the end of the phase of a parity."""
        grid = _HERE.grid
        with grid.changed:
            ended = grid.changed.wait_for(lambda: self.phase % 2 != parity or grid.failed, PATIENCE)
        assert ended, f"deadlock: phase {self.phase} never ended, {self.pending} are missing"
        if grid.failed:
            raise RuntimeError("another thread failed")


def _meet(barrier):
    barrier.wait(PATIENCE)


def _together(value):
    """The values of all lanes of the warp."""
    cta, warp = _HERE.cta, _HERE.warp
    # Two sets of slots, alternating: a lane that writes the next time disturbs no lane that reads.
    _HERE.slot_set ^= 1
    slots = cta.slots[warp][_HERE.slot_set]
    slots[_HERE.lane] = value
    _meet(cta.warps[warp])
    return slots


def _shared(address, count):
    assert 0 < address < address + count <= SHARED_BYTES
    return _HERE.cta.shared[address : address + count]


def _word(view, kind):
    return view.view(kind)[0]


def _fake_ptx():
    """``dsv4.cute.device.ptx``, as far as these kernels use it."""

    def mbarrier_init(address, count):
        _HERE.cta.barriers[address] = Mbarrier(count)

    def barrier(address):
        return _HERE.cta.barriers[address]

    def store_shared(address, values, kind):
        array = np.array(values, kind)
        assert address % array.nbytes == 0
        _shared(address, array.nbytes)[:] = array.view(np.uint8)

    def load_shared(address, words, kind=np.uint32):
        assert address % (4 * words) == 0
        return _shared(address, 4 * words).view(kind).copy()

    def load_global(address, kind):
        return _word(_HERE.grid.bytes_at(address, 4).copy(), kind)

    def load_global_nc(address, words, predicate=None, offset=0):
        if predicate is not None and not predicate:
            return [0xDEADBEEF] * words
        return _HERE.grid.bytes_at(address + offset, 4 * words).view(np.uint32).tolist()

    def store_global4(address, words):
        grid = _HERE.grid
        grid.bytes_at(address, 16)[:] = np.array(words, np.uint32).view(np.uint8)
        start, offset = address >> 40 << 40, address & ((1 << 40) - 1)
        with grid.changed:
            grid.stores[start][offset // 16] += 1

    def ldmatrix_x4(address, offset):
        every = _together(address + offset)
        lane = _HERE.lane
        content = [
            _word(_shared(every[8 * i + lane // 4] + lane % 4 * 4, 4), np.uint32) for i in range(4)
        ]
        _meet(_HERE.cta.warps[_HERE.warp])
        return tuple(int(word) for word in content)

    def mma(sums, left, right):
        every = _together((left, right))
        lane = _HERE.lane
        quad = [every[lane // 4 * 4 + t] for t in range(4)]
        a = [
            np.array([of_lane[0][h + 2 * k] for k in range(2) for of_lane in quad])
            for h in range(2)
        ]
        result = []
        for i, value in enumerate(sums):
            column = lane % 4 * 2 + i % 2
            lanes = [every[column * 4 + t][1] for t in range(4)]
            b = np.array([_halves(of_lane[k]) for k in range(2) for of_lane in lanes])
            with np.errstate(all="ignore"):
                result.append(np.float32(value + np.float32((a[i // 2] * b).sum())))
        _meet(_HERE.cta.warps[_HERE.warp])
        return result

    def bulk_copy_to_shared(to, source, count, address):
        assert to % 16 == source % 16 == count % 16 == 0
        time.sleep(_HERE.grid.random.random() * 1e-3)
        _shared(to, count)[:] = _HERE.grid.bytes_at(source, count)
        barrier(address).complete(count)

    def async_copy16(to, source, to_offset=0, offset=0):
        _HERE.copies.append((to + to_offset, source + offset))

    def arrive_on_async_copies(address):
        for to, source in _HERE.copies:
            _shared(to, 16)[:] = _HERE.grid.bytes_at(source, 16)
        _HERE.copies.clear()
        barrier(address).arrive()

    def add(address, value):
        grid = _HERE.grid
        with grid.changed:
            word = grid.bytes_at(address, 4).view(np.uint32)
            before = int(word[0])
            word[0] = (before + value) & 0xFFFFFFFF
        return before

    def load_acquire(address):
        time.sleep(1e-3)
        if _HERE.grid.failed:
            raise RuntimeError("another thread failed")
        return int(load_global(address, np.uint32))

    def swiglu(gate, up, limit):
        if not (np.isfinite(gate) and np.isfinite(up)):
            return np.float32(np.nan)
        gate, up = min(gate, limit), max(min(up, limit), -limit)
        with np.errstate(over="ignore"):
            return np.float32(gate / (1 + np.exp(-np.float64(gate))) * up)

    def store_global(address, word):
        _HERE.grid.bytes_at(address, 4).view(np.uint32)[0] = word

    return types.SimpleNamespace(
        mbarrier_init=mbarrier_init,
        fence_mbarrier_init=lambda: None,
        mbarrier_wait=lambda address, parity: barrier(address).wait(parity),
        mbarrier_arrive=lambda address: barrier(address).arrive(),
        mbarrier_arrive_pending_count=lambda address: barrier(address).arrive(),
        mbarrier_arrive_expect_tx=lambda address, count: barrier(address).arrive(count),
        mbarrier_arrive_on_async_copies=arrive_on_async_copies,
        load_shared_int=lambda address: int(load_shared(address, 1, np.int32)[0]),
        store_shared_int=lambda address, value: store_shared(address, [value], np.int32),
        store_shared_float4=lambda address, values: store_shared(address, values, np.float32),
        load_shared_float4=lambda address: list(load_shared(address, 4, np.float32)),
        store_shared_bfloat16=lambda address, value: store_shared(
            address, [bfloat16(value) & 0xFFFF], np.uint16
        ),
        load_shared=load_shared,
        load_global=lambda address: int(load_global(address, np.int32)),
        load_global_float=lambda address: load_global(address, np.float32),
        load_global_nc=load_global_nc,
        store_global=store_global,
        store_global4=store_global4,
        ldmatrix_x4=ldmatrix_x4,
        mma_m16n8k16_bf16=mma,
        bulk_copy_to_shared=bulk_copy_to_shared,
        async_copy16=async_copy16,
        atomic_add=add,
        reduce_add_release=add,
        load_acquire=load_acquire,
        abs_float=abs,
        select_float=lambda condition, yes, no: yes if condition else no,
        swiglu=swiglu,
    )


def _halves(word):
    """float32 of two bfloat16."""
    return np.array([word << 16 & 0xFFFFFFFF, word & 0xFFFF0000], np.uint32).view(np.float32)


def _scales(words, block, opaque_16):
    """The scales of two rows of a block of columns."""
    pair = words[block // 2] >> block % 2 * 16
    return [np.float32((pair >> 8 * h & 7) + 1) for h in range(2)]


def _fragment(word, scales):
    """Four pairs of weights: of both rows, then of both rows 8 columns on."""
    values = [_ELEMENTS[word >> 4 * i & 15] for i in range(8)]
    return [(values[2 * i] * scales[i % 2], values[2 * i + 1] * scales[i % 2]) for i in range(4)]


def _fake_cutlass():
    """``cutlass``, as far as the kernels need it."""

    def shuffle_up(value, offset, mask_and_clamp, kind):
        assert (mask_and_clamp, kind) == (0, "up")
        values = _together(value)
        return values[_HERE.lane - offset if _HERE.lane >= offset else _HERE.lane]

    def ballot(value):
        return sum(bool(bit) << lane for lane, bit in enumerate(_together(value)))

    arch = types.SimpleNamespace(
        thread_idx=lambda: (_HERE.thread, 0, 0),
        block_idx=lambda: (_HERE.cta.number, 0, 0),
        grid_dim=lambda: (_HERE.ctas, 0, 0),
        make_warp_uniform=lambda value: value,
        griddepcontrol_launch_dependents=lambda: None,
        griddepcontrol_wait=lambda: None,
        sync_threads=lambda: _meet(_HERE.cta.meeting),
        sync_warp=lambda: _together(None),
        shuffle_sync=lambda value, lane: _together(value)[lane],
        shuffle_sync_bfly=lambda value, mask: _together(value)[_HERE.lane ^ mask],
        shuffle_sync_op=shuffle_up,
        vote_ballot_sync=ballot,
        popc=int.bit_count,
        get_dyn_smem=lambda kind, alignment: types.SimpleNamespace(toint=lambda: 1024),
    )
    cute = types.SimpleNamespace(
        arch=arch, jit=lambda function: function, kernel=lambda function: function
    )
    numbers = {"Int32": 4, "Int64": 8, "Uint8": 1, "Uint32": 4}
    return types.SimpleNamespace(
        cute=cute,
        const_expr=lambda value: value,
        range=lambda *limits, unroll=1: range(*limits),
        range_constexpr=range,
        min=min,
        max=max,
        Constexpr=None,
        Float32=np.float32,
        Boolean=bool,
        **{name: Number(item) for name, item in numbers.items()},
    )


def source(name):
    """A module of device code, executed with fakes of what it imports from the compiler."""
    cutlass = _fake_cutlass()
    stand_ins = {
        "cutlass._mlir.dialects": types.SimpleNamespace(nvvm=types.SimpleNamespace(ShflKind=Kinds)),
        "cutlass": cutlass,
        "cutlass.cute": cutlass.cute,
        "cuda.bindings.driver": types.SimpleNamespace(CUstream=None),
        "dsv4.cute.device": types.SimpleNamespace(ptx=_fake_ptx()),
        "dsv4.cute.device.dequant": types.SimpleNamespace(
            dequantized_fragment=_fragment, scales_to_bfloat16=_scales
        ),
    }

    def find(name, globals=None, locals=None, fromlist=(), level=0):
        if name == "cutlass.cute" and not fromlist:
            return cutlass
        if name in EXECUTED and name not in stand_ins:
            stand_ins[name] = _executed(name, find)
        return stand_ins.get(name) or builtins.__import__(name, globals, locals, fromlist, level)

    return _executed(name, find)


def _executed(name, find):
    file = _ROOT.joinpath(*name.split(".")[1:]).with_suffix(".py")
    scope = {"__name__": name, "__builtins__": {**vars(builtins), "__import__": find}}
    exec(compile(file.read_text(), str(file), "exec", dont_inherit=True), scope)
    return types.SimpleNamespace(**scope)
