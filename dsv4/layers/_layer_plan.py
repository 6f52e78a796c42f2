"""Plans of whole decoder layers, for steps of few tokens that no CUDA graph holds.

A layer of a decode step launches about 29 kernels. With a plan per operator (``dsv4.ops._plans``)
each launch costs the host 24 us on an H100's machine, 6 of which are the launch: the rest is the
operator's key and guards, and the layers' Python around it. A step of Flash took 46 ms. So what is
checked before a repetition is checked once per layer: the first call with some metadata runs as it
is, the second is recorded, later ones replay one tape.

A layer's result follows from tensors and from Python values. Tensors are arguments of the tape:
hidden states, token ids, the batch, what layers share in a step, the layer's cache, its weights.
Their metadata and alignment are compared as those of an operator's arguments are. Python values
are what modules hold, which ``Structure`` compares, and formats of the cache, which are part of a
plan's key. What a step memoises is made before the call: the tape neither makes nor keeps any.

No plan is used where somebody watches or changes calls: hooks, tracers, modes, subclasses of the
layers, an implementation asked for by name, a capture (which uses more streams).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from dsv4._recorded import WholeOperator
from dsv4._recorder import Recorder
from dsv4._tape import Again, tape_of
from dsv4.batch import CacheStep
from dsv4.config import ModelConfig
from dsv4.formats import Format
from dsv4.layer_cache import LayerCache
from dsv4.layers._beside import is_few
from dsv4.layers.rotary import DeepseekV4RotaryEmbedding
from dsv4.ops import _library, _plans
from dsv4.ops._guards import Guards, guards_of

_ATTRIBUTE = "_plans"
_MOST = 64  # plans of a layer: steps of 1 to 64 tokens
_PATIENCE, _LONGEST = 4, 256  # failures in a row before calls go without a look, and at most how many
_ATTEMPTS = 4  # recordings of a call that compiled something
_OPTIONS = frozenset({"position_embeddings", "position_ids", "attention_mask", "past_key_values"})

# What every module has: its tables, whose content counts, and hooks. Besides, values that are kept
# with an object for the next call.
_TABLES = frozenset(nn.Module().__dict__) - {"training"}
_IGNORED = _TABLES | {"_kept", _ATTRIBUTE}
_hooks_of = itemgetter(
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)
_GLOBAL_HOOKS = [
    getattr(nn_module, f"_global_{name}hooks")
    for name in ("forward_", "forward_pre_", "backward_", "backward_pre_")
]
_children, _parameters, _buffers = map(itemgetter, ("_modules", "_parameters", "_buffers"))
_dict, _forward = attrgetter("__dict__"), attrgetter("forward")
_values = dict.values
# Types of attributes that nobody changes in place.
_CONSTANTS = (type(None), bool, int, float, str, tuple, frozenset, torch.dtype, Format, ModelConfig)
# The only attributes of other types: the last is a table, the others change with it.
_FREQUENCIES = "_frequencies"
_ROTARY = frozenset({"parameters_of", "_given", _FREQUENCIES})
_CHANGED = (AttributeError, KeyError, RuntimeError, TypeError, ValueError)


class Structure:
    """What the modules of a layer were at one time: their classes, tree, attributes and tensors.

    It keeps no module and no tensor: comparing takes a weak reference to each module, and numbers
    of objects that a living module holds.
    """

    def __init__(self, layer: nn.Module) -> None:
        """Look at it.

        Raises:
            TypeError: if a module is not of this package, or has an attribute that may change in
                place.
        """
        modules = list(layer.modules())
        for module in modules:
            _check(module)
        dicts = list(map(_dict, modules))
        self._refs = list(map(weakref.ref, modules))
        self._types = list(map(type, modules))
        self._classes = list(dict.fromkeys(self._types))
        self._forwards = list(map(_forward, self._classes))
        self._sizes = list(map(len, dicts))
        names = [[name for name in d if name not in _IGNORED] for d in dicts]
        self._getters = [itemgetter(*of_module, "training") for of_module in names]
        self._attributes = [get(d) for get, d in zip(self._getters, dicts, strict=True)]
        self._rotary = [i for i, d in enumerate(dicts) if _FREQUENCIES in d]
        self._submodules = list(map(id, _flat(map(_children, dicts))))
        self._tensors = list(map(id, self._tables(dicts)))

    def _tables(self, dicts: list[dict[str, Any]]) -> list[Any]:
        """All parameters, buffers and rotary frequencies, with None where there is none."""
        frequencies = [dicts[i][_FREQUENCIES] for i in self._rotary]
        return _flat((*map(_parameters, dicts), *map(_buffers, dicts), *frequencies))

    def tensors(self, layer: nn.Module) -> list[torch.Tensor] | None:
        """The layer's tensors; None if anything is not as it was, or there are hooks."""
        modules = [ref() for ref in self._refs]
        if modules[0] is not layer:
            return None
        try:
            dicts = list(map(_dict, modules))
            if (
                list(map(len, dicts)) != self._sizes
                or [get(d) for get, d in zip(self._getters, dicts, strict=True)] != self._attributes
                or list(map(id, _flat(map(_children, dicts)))) != self._submodules
                or list(map(type, modules)) != self._types
                or list(map(_forward, self._classes)) != self._forwards
            ):
                return None
            tables = self._tables(dicts)
        except _CHANGED:  # a module is gone, or an attribute, or cannot be compared
            return None
        if list(map(id, tables)) != self._tensors or any(map(any, map(_hooks_of, dicts))):
            return None
        return [tensor for tensor in tables if tensor is not None]


def _flat(tables: Any) -> list[Any]:
    return list(chain.from_iterable(map(_values, tables)))


def _check(module: nn.Module) -> None:
    kind = type(module)
    if kind.__module__.split(".")[0] != "dsv4":
        raise TypeError(f"{kind.__name__} is not a module of this package")
    rotary = _ROTARY if kind is DeepseekV4RotaryEmbedding else frozenset()
    for name, value in module.__dict__.items():
        if name not in _IGNORED and name not in rotary and not isinstance(value, _CONSTANTS):
            raise TypeError(f"{kind.__name__}.{name} is a {type(value).__name__}")
    if any(_hooks_of(module.__dict__)):
        raise TypeError(f"{kind.__name__} has hooks")


@dataclass
class _Plan:
    """How to repeat a call with certain tensors; see ``dsv4.ops._plans.Plan``."""

    is_like: Guards
    remainders: Any
    again: Callable[[Sequence[torch.Tensor], Sequence[int]], Any] | None = None
    attempts: int = 0


@dataclass(frozen=True)
class _Call:
    """A call of a layer's ``run``."""

    function: Callable[[torch.Tensor, torch.Tensor | None, Mapping[str, Any]], torch.Tensor]
    streams: torch.Tensor
    input_ids: torch.Tensor | None
    options: Mapping[str, Any]

    def __call__(self) -> torch.Tensor:
        return self.function(self.streams, self.input_ids, self.options)


@dataclass(eq=False)
class LayerPlans:
    """Plans of one layer; a copy of the layer gets none of them."""

    structure: Structure | None = None
    plans: dict[Any, _Plan] = field(default_factory=dict)
    failures: int = 0
    left_out: int = 0  # calls from now on that are not looked at

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerPlans:
        return LayerPlans()

    def __reduce__(self) -> tuple[type[LayerPlans], tuple[()]]:
        return LayerPlans, ()

    def run(self, layer: nn.Module, call: _Call, step: CacheStep) -> torch.Tensor:
        """Run a layer, by a plan if there is one, which is made otherwise."""
        if self.left_out:
            self.left_out -= 1
            return call()
        structure = self.structure
        weights = None if structure is None else structure.tensors(layer)
        if weights is None:
            result = call()
            self._begin(layer)
            return result
        key, tensors = _arguments(layer, call, step, weights)
        plan = self.plans.get(key)
        if plan is None or not plan.is_like(*tensors):
            return self._first(key, tensors, call)
        addresses = list(map(_plans._data_ptr, tensors))
        if plan.remainders != _plans.remainders(addresses):
            return self._first(key, tensors, call)
        if plan.again is not None:
            result = plan.again(tensors, addresses)
            if result is not NotImplemented:
                self.failures = 0
                return result
        elif plan.attempts < _ATTEMPTS:
            return _recorded(plan, tensors, call, step)
        return call()

    def _begin(self, layer: nn.Module) -> None:
        """Look at the modules anew, after a call, which may have made some of their values."""
        self.failures += 1
        if self.failures > _PATIENCE:
            self.left_out = min(2 ** (self.failures - _PATIENCE), _LONGEST)
        self.plans.clear()
        try:
            self.structure = Structure(layer)
        except TypeError:
            self.structure = None

    def _first(self, key: Any, tensors: Sequence[torch.Tensor], call: _Call) -> torch.Tensor:
        """Run a call that has no plan, and begin one."""
        result = call()
        if _plans.are_plain(tensors) and len(set(map(id, tensors))) == len(tensors):
            addresses = list(map(_plans._data_ptr, tensors))
            if len(self.plans) >= _MOST:
                self.plans.clear()
            self.plans[key] = _Plan(guards_of(tensors), _plans.remainders(addresses))
        return result


def run(
    layer: nn.Module,
    function: Callable[[torch.Tensor, torch.Tensor | None, Mapping[str, Any]], torch.Tensor],
    streams: torch.Tensor,
    input_ids: torch.Tensor | None,
    options: Mapping[str, Any],
) -> torch.Tensor:
    """``function(streams, input_ids, options)``, by a plan where there may be one.

    Args:
        layer: A ``DeepseekV4DecoderLayer``.
        function: Its ``run`` without plans.
        streams: See there, as all that follow.
        input_ids: See there.
        options: See there.
    """
    step = options.get("past_key_values")
    call = _Call(function, streams, input_ids, options)
    if not isinstance(step, CacheStep) or not _is_plain(call):
        return call()
    plans = layer.__dict__.get(_ATTRIBUTE)
    if plans is None:
        plans = layer.__dict__[_ATTRIBUTE] = LayerPlans()
    return plans.run(layer, call, step)


def _is_plain(call: _Call) -> bool:
    """Whether nothing but the layer's result is wanted, of few tokens on a GPU."""
    streams, options = call.streams, call.options
    return (
        not torch.compiler.is_compiling()
        and type(streams) is torch.Tensor
        and streams.dim() == 4
        and streams.shape[0] == 1
        and streams.numel() > 0
        and is_few(streams.shape[1])
        and _plans.is_worth_it(streams)
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
    """What else a call depends on, hashable, and all tensors that it depends on.

    Batches of one token per sequence have some tensors in two places.
    """
    attention, batch, streams, ids = layer.self_attn, step.batch, call.streams, call.input_ids
    step.cache.check_model(attention.config, streams.dtype)
    cache = step.cache.layers[attention.layer_idx]
    shared = attention.shared_in(step, streams, call.options.get("position_embeddings"))
    twice = batch.positions is batch.starts, batch.sequence_of_token is batch.sequences
    tensors = [streams, batch.cu_seqlens, batch.starts, batch.sequences]
    if not twice[0]:
        tensors.append(batch.positions)
    if not twice[1]:
        tensors.append(batch.sequence_of_token)
    if ids is not None:
        tensors.append(ids)
    formats = _add_cache(tensors, cache)
    tensors += shared
    tensors += weights
    modes = _plans._is_grad_enabled(), _plans._interpreting(), torch.is_autocast_enabled("cuda")
    key = (streams.shape, batch.starts.shape, ids is None, *twice, *modes, *formats)
    return key, tensors


def _add_cache(tensors: list[torch.Tensor], cache: LayerCache) -> list[Any]:
    """Add the tensors of a layer's cache; gives how they are to be read."""
    formats: list[Any] = [cache.sliding_window, cache.ratio]
    for pages in (cache.window, cache.compressed, cache.indexer_pages):
        if pages is not None:
            tensors.append(pages.data)
            formats += (pages.page_size, pages.entry_format, pages.head_dim, pages.rope_dim)
    for tensor in (cache.compressed_table, cache.state, cache.indexer_state):
        if tensor is not None:
            tensors.append(tensor)
    return formats


def _recorded(
    plan: _Plan, tensors: Sequence[torch.Tensor], call: _Call, step: CacheStep
) -> torch.Tensor:
    """Run a call, and complete its plan."""
    plan.attempts += 1
    recorder = Recorder(
        tensors, lambda name, given: _library.OPERATIONS[name].run(given), composite=True
    )
    shared = len(step._shared)
    with recorder.watching():
        result = call()
    if len(step._shared) != shared:  # a replay would not make what other layers ask for
        plan.attempts = _ATTEMPTS
    elif recorder.is_settled or plan.attempts == _ATTEMPTS:
        plan.attempts = _ATTEMPTS
        tape = tape_of(recorder, result, _operator_again)
        if tape is not None:
            is_native = tape.is_native and tape.launches
            plan.again = _plans.Replay(tape) if is_native else _plans.Interpreted(tape)
    return result


def _operator_again(recorded: WholeOperator) -> Again:
    """What calls an operator again by the implementation that it chose."""
    operation = _library.OPERATIONS[recorded.name]
    implementation = operation.implementation(recorded.args)
    return lambda args: operation.run_with(implementation, args)
