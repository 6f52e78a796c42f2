"""Plans of whole decoder layers, for steps of few tokens that no CUDA graph holds.

A layer of a decode step launches about 29 kernels. With a plan per operator (``dsv4.ops._plans``)
each launch costs the host 24 us on an H100's machine, 6 of which are the launch: the rest is the
operator's key and guards, and the layers' Python around it. A step of Flash took 46 ms. So a
layer's plan checks everything once per layer: the first call with some metadata runs normally, the
second is recorded, later ones replay one tape.

A layer's result follows from tensors and from Python values. Tensors are arguments of the tape:
hidden states, what the layer before made for this one, token ids, the batch, what layers share in a
step, the layer's cache, its weights, and those of the next layer that it runs (``Seam``).
Their metadata and alignment are compared as those of an operator's arguments are. Python values
are what modules hold, which ``Structure`` compares, and formats of the cache, which are part of a
plan's key. Values that a step memoises are made before the call: the tape neither makes nor keeps
them.

No plan is used where somebody watches or changes calls: hooks, tracers, modes, subclasses of the
layers, an implementation requested by name, a capture (which uses more streams).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from dsv4.config import ModelConfig
from dsv4.kv_cache.batch import CacheStep
from dsv4.kv_cache.layer_cache import LayerCache
from dsv4.layers.hyper_connection import PreResult
from dsv4.layers.rotary import DeepseekV4RotaryEmbedding
from dsv4.layers.seam import Seam
from dsv4.ops import _library, _plans
from dsv4.ops._guards import Guards, guards_of
from dsv4.overlap import is_launch_bound
from dsv4.parallel.context import ParallelContext
from dsv4.parallel.expert_exchange import ExpertExchange
from dsv4.plans.recorded import WholeOperator
from dsv4.plans.recorder import Recorder
from dsv4.plans.tape import Again, tape_of
from dsv4.quant.formats import Format

Result = tuple[torch.Tensor, PreResult | None]  # of a layer's ``run_joined``
Run = Callable[[torch.Tensor, torch.Tensor | None, Mapping[str, Any], Seam], Result]
_ATTRIBUTE = "_plans"
_MOST, _MOST_OF_KEY = 64, 4  # keys of a layer: steps of 1 to 64 tokens; plans of each
_PATIENCE, _LONGEST = (
    4,
    256,
)  # failures in a row before calls are not looked at, and the most such calls
_ATTEMPTS = 4  # recordings of a call in which something was compiled
_OPTIONS = frozenset({"position_embeddings", "position_ids", "attention_mask", "past_key_values"})

# Dictionaries of a module: those whose content is compared, and hooks, which must be empty.
_TABLES = ("_modules", "_parameters", "_buffers")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_WATCHED = (*_TABLES, *_HOOKS, "training")
# Other attributes of every module, values that an object keeps for the next call, and counts that
# are reported and decide nothing.
_IGNORED = frozenset((*nn.Module().__dict__, "_kept", "exactness", _ATTRIBUTE))
_GLOBAL_HOOKS = [getattr(nn_module, f"_global{name}") for name in _HOOKS]
_forward = attrgetter("forward")
# Types of attributes that nobody changes in place.
_CONSTANTS = (
    *(type(None), bool, int, float, str, torch.dtype, Format, ModelConfig),
    ParallelContext,  # the group of an operator's sum, by its name
    ExpertExchange,
)
# The only attributes of other types: the last is a table, the others change with it.
_FREQUENCIES = "_frequencies"
_ROTARY = frozenset({"parameters_of", "_own_values", _FREQUENCIES})
_CHANGED = (AttributeError, KeyError, RuntimeError, TypeError, ValueError)


class Structure:
    """A snapshot of the modules that a layer runs: classes, tree, attributes and tensors.

    It keeps dictionaries of the modules below the layer, to compare what is in them, until one of
    these modules is gone. So it keeps no module and no tensor alive.
    """

    def __init__(self, layer: nn.Module, others: Sequence[nn.Module] = ()) -> None:
        """Take the snapshot of a layer and of ``others``, modules of the next layer.

        Raises:
            TypeError: if a module is not of this package, or has an attribute that may change in
                place.
        """
        self._others = list(map(weakref.ref, others))
        modules = [part for module in (layer, *others) for part in module.modules()]
        for module in modules:
            _check(module)
        # The layer's own dictionary is left out, because it holds this object.
        self._dicts = [module.__dict__ for module in modules[1:]]
        dicts = [layer.__dict__, *self._dicts]
        self._types = list(map(type, modules))
        self._classes = list(dict.fromkeys(self._types))
        self._forwards = list(map(_forward, self._classes))
        self._sizes = list(map(len, dicts))
        self._getters = [
            itemgetter(*[name for name in d if name not in _IGNORED], *_WATCHED) for d in dicts
        ]
        self._attributes = [get(d) for get, d in zip(self._getters, dicts, strict=True)]
        self._hooks = [d[name] for d in dicts for name in _HOOKS]
        tables = [d[name] for name in _TABLES for d in dicts]
        tables += [d[_FREQUENCIES] for d in dicts if _FREQUENCIES in d]
        self._lengths = list(map(len, tables))
        self._tables, self._full = tables, [table for table in tables if table]
        values = self._values()
        self._ids = list(map(id, values))
        indices = [i for i, value in enumerate(values) if isinstance(value, torch.Tensor)]
        self._pick = _getter(indices)
        lists = (self._dicts, self._attributes, self._hooks, self._tables, self._full)
        self._refs = [weakref.ref(module, partial(_forget, lists)) for module in modules]

    def _values(self) -> list[Any]:
        """Submodules, parameters, buffers and rotary frequencies, or None in place of one."""
        return list(chain.from_iterable(map(dict.values, self._full)))

    def tensors(
        self, layer: nn.Module, others: Sequence[nn.Module] = ()
    ) -> Sequence[torch.Tensor] | None:
        """Return the modules' tensors; None if anything has changed, or there are hooks."""
        modules = [ref() for ref in self._refs]
        if modules[0] is not layer or [ref() for ref in self._others] != list(others):
            return None
        dicts = [layer.__dict__, *self._dicts]
        try:
            if (
                list(map(type, modules)) != self._types
                or list(map(_forward, self._classes)) != self._forwards
                or list(map(len, dicts)) != self._sizes
                or [get(d) for get, d in zip(self._getters, dicts, strict=True)] != self._attributes
                or any(self._hooks)
                or list(map(len, self._tables)) != self._lengths
            ):
                return None
            values = self._values()
        except _CHANGED:  # an attribute is gone or cannot be compared, or a thread changes tables
            return None
        return self._pick(values) if list(map(id, values)) == self._ids else None


def _forget(lists: Sequence[list[Any]], gone: Any) -> None:
    """Empty the lists, because a module is gone."""
    for values in lists:
        values.clear()


def _getter(indices: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return a function that takes the items at these indices out of a sequence."""
    if len(indices) < 2:
        return lambda values: tuple([values[i] for i in indices])
    return itemgetter(*indices)


def _check(module: nn.Module) -> None:
    kind = type(module)
    if kind.__module__.split(".")[0] != "dsv4":
        raise TypeError(f"{kind.__name__} is not a module of this package")
    rotary = _ROTARY if kind is DeepseekV4RotaryEmbedding else frozenset()
    for name, value in module.__dict__.items():
        if not (name in _IGNORED or name in rotary or _is_constant(value)):
            raise TypeError(f"{kind.__name__}.{name} is a {type(value).__name__}")
    if any(module.__dict__[name] for name in _HOOKS):
        raise TypeError(f"{kind.__name__} has hooks")


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple | frozenset):
        return all(map(_is_constant, value))
    return isinstance(value, _CONSTANTS)


@dataclass
class _Plan:
    """A way to repeat a call with certain tensors; see ``dsv4.ops._plans.Plan``."""

    is_like: Guards
    remainders: Any
    again: Callable[[Sequence[torch.Tensor], Sequence[int]], Any] | None = None
    attempts: int = 0


@dataclass(slots=True)  # frozen, it would take a microsecond more to make
class _Call:
    """A call of a layer's ``run``."""

    function: Run
    streams: torch.Tensor
    input_ids: torch.Tensor | None
    options: Mapping[str, Any]
    seam: Seam

    def __call__(self) -> Result:
        return self.function(self.streams, self.input_ids, self.options, self.seam)


@dataclass(eq=False)
class LayerPlans:
    """Plans of one layer; a copy of the layer gets none of them.

    Attributes:
        owner: The layer.
        structure: Snapshot of its modules when the plans were made; None if there can be none.
        plans: Plans by the key that ``_arguments`` gives; calls of one key differ in metadata of
            tensors.
        failures: How often the modules were compared since a plan was used.
        left_out: Number of the next calls for which no plan is tried.
    """

    owner: weakref.ref[nn.Module] | None = None
    structure: Structure | None = None
    plans: dict[Any, list[_Plan]] = field(default_factory=dict)
    failures: int = 0
    left_out: int = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerPlans:
        return LayerPlans()

    def __reduce__(self) -> tuple[type[LayerPlans], tuple[()]]:
        return LayerPlans, ()

    def run(self, layer: nn.Module, call: _Call, step: CacheStep) -> Result:
        """Run a layer, by its plan; without one, run it and make the plan."""
        if self.left_out:
            self.left_out -= 1
            return call()
        structure, others = self.structure, call.seam.modules
        weights = None if structure is None else structure.tensors(layer, others)
        if weights is None:
            result = call()
            self._begin(layer, others)
            return result
        key, tensors = _arguments(layer, call, step, weights)
        for plan in self.plans.get(key, ()):
            if not plan.is_like(*tensors):
                continue
            addresses = list(map(_plans._data_ptr, tensors))
            if plan.remainders != _plans.remainders(addresses):
                continue
            if plan.again is not None:
                result = plan.again(tensors, addresses)
                if result is not NotImplemented:
                    self.failures = 0
                    return result
            elif plan.attempts < _ATTEMPTS:
                return _recorded(plan, tensors, call, step)
            return call()
        return self._first(key, tensors, call)

    def _begin(self, layer: nn.Module, others: Sequence[nn.Module]) -> None:
        """Take the snapshot again after a call, which may have made some of the modules' values."""
        self.failures += 1
        if self.failures > _PATIENCE:
            self.left_out = min(2 ** (self.failures - _PATIENCE), _LONGEST)
        self.plans.clear()
        try:
            self.structure = Structure(layer, others)
        except TypeError:
            self.structure = None

    def _first(self, key: Any, tensors: Sequence[torch.Tensor], call: _Call) -> Result:
        """Run a call that has no plan, and begin one."""
        result = call()
        if _plans.are_plain(tensors) and len(set(map(id, tensors))) == len(tensors):
            addresses = list(map(_plans._data_ptr, tensors))
            if len(self.plans) >= _MOST:
                self.plans.clear()
            plan = _Plan(guards_of(tensors), _plans.remainders(addresses))
            self.plans[key] = [plan, *self.plans.get(key, ())][:_MOST_OF_KEY]
        return result


def run(
    layer: nn.Module,
    function: Run,
    streams: torch.Tensor,
    input_ids: torch.Tensor | None,
    options: Mapping[str, Any],
    seam: Seam,
) -> Result:
    """Call ``function(streams, input_ids, options, seam)``, by a plan where there may be one.

    Args:
        layer: A ``DeepseekV4DecoderLayer``.
        function: Its ``run`` without plans.
        streams: See there.
        input_ids: See there.
        options: See there.
        seam: See there.
    """
    step = options.get("past_key_values")
    if torch.compiler.is_compiling() or not isinstance(step, CacheStep):
        return function(streams, input_ids, options, seam)
    call = _Call(function, streams, input_ids, options, seam)
    if not _is_plain(call):
        return call()
    plans = layer.__dict__.get(_ATTRIBUTE)
    if plans is None or plans.owner is None or plans.owner() is not layer:
        plans = layer.__dict__[_ATTRIBUTE] = LayerPlans(weakref.ref(layer))
    return plans.run(layer, call, step)


def _is_plain(call: _Call) -> bool:
    """Return whether only the layer's result is needed, for few tokens on a GPU."""
    streams, options = call.streams, call.options
    return (
        type(streams) is torch.Tensor
        and streams.dim() == 4
        and streams.shape[0] == 1
        and streams.numel() > 0
        and streams.device.type in _plans.PLANNED_DEVICES
        and is_launch_bound(streams.shape[1])
        and _plans.is_plain_call("auto")
        and _OPTIONS.issuperset(options)
        and options.get("position_ids") is None
        and options.get("attention_mask") is None
        and not any(_GLOBAL_HOOKS)
        and not (streams.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _arguments(
    layer: Any, call: _Call, step: CacheStep, weights: Sequence[torch.Tensor]
) -> tuple[Any, list[torch.Tensor]]:
    """Return all tensors that a call depends on, and, hashable, everything else.

    Batches of one token per sequence have some tensors in two places.
    """
    attention, batch, streams, ids = layer.self_attn, step.batch, call.streams, call.input_ids
    step.cache.check_model(attention.config, streams.dtype)
    cache = step.cache.layers[attention.layer_idx]
    kind = (attention.layer_type, cache.sliding_window, cache.ratio, streams.dtype)
    shared = step.once(
        ("plan", id(cache.window_table), id(cache.compressed_table), *kind),
        lambda: attention.shared_in(step, streams, call.options.get("position_embeddings")),
    )
    twice = batch.positions is batch.starts, batch.sequence_of_token is batch.sequences
    tensors = [streams, batch.cu_seqlens, batch.starts, batch.sequences]
    if not twice[0]:
        tensors.append(batch.positions)
    if not twice[1]:
        tensors.append(batch.sequence_of_token)
    tensors += [tensor for tensor in (ids, step.routed) if tensor is not None]
    tensors += call.seam.tensors
    formats = _add_cache(tensors, cache)
    tensors += shared
    tensors += weights
    modes = (
        _plans._is_grad_enabled(),
        _plans._interpreting(),
        torch.is_autocast_enabled(streams.device.type),
    )
    absent = ids is None, step.routed is None, call.seam.opened is None
    key = (streams.shape, batch.starts.shape, *absent, *twice, *modes, *formats)
    return key, tensors


def _add_cache(tensors: list[torch.Tensor], cache: LayerCache) -> list[Any]:
    """Add the tensors of a layer's cache; return how they are to be read."""
    formats: list[Any] = [cache.sliding_window, cache.ratio]
    for pages in (cache.window, cache.compressed, cache.indexer_pages):
        if pages is not None:
            tensors.append(pages.data)
            formats += (pages.page_size, pages.entry_format, pages.head_dim, pages.rope_dim)
    for tensor in (cache.compressed_table, cache.state, cache.indexer_state):
        if tensor is not None:
            tensors.append(tensor)
    return formats


def _recorded(plan: _Plan, tensors: Sequence[torch.Tensor], call: _Call, step: CacheStep) -> Result:
    """Run a call, and complete its plan."""
    plan.attempts += 1
    recorder = Recorder(
        tensors, lambda name, args: _library.OPERATIONS[name].run(args), composite=True
    )
    shared = len(step._shared)
    with recorder.watching():
        result = call()
    if len(step._shared) != shared:  # a replay would not make values that other layers read
        plan.attempts = _ATTEMPTS
    elif recorder.is_repeatable or plan.attempts == _ATTEMPTS:
        plan.attempts = _ATTEMPTS
        tape = tape_of(recorder, result, _operator_again)
        if tape is not None:
            is_native = tape.is_native and tape.launches
            plan.again = _plans.Replay(tape) if is_native else _plans.Interpreted(tape)
    return result


def _operator_again(recorded: WholeOperator) -> Again:
    """Return a function that repeats an operator by the implementation that it chose."""
    operation = _library.OPERATIONS[recorded.name]
    implementation = operation.implementation(recorded.args)
    return lambda args: operation.run_with(implementation, args)
