"""Put the values of a checkpoint into a module tree, while the next ones are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from dsv4.checkpoint import names
from dsv4.checkpoint.arguments import as_device, as_dtype, name_matcher
from dsv4.checkpoint.dry_run import dry_run
from dsv4.checkpoint.module_tree import slots_of
from dsv4.checkpoint.options import Options
from dsv4.checkpoint.packing import PackChoice, mxfp4_mode, report_fp8, report_packing
from dsv4.checkpoint.problems import raise_all
from dsv4.checkpoint.progress import Progress
from dsv4.checkpoint.read_ahead import Slabs
from dsv4.checkpoint.reader import Checkpoint
from dsv4.checkpoint.report import Filled, left_out
from dsv4.checkpoint.shards import Reading
from dsv4.checkpoint.slots import Slot
from dsv4.layers.host_experts import Hosting
from dsv4.layers.pack import Packer


def fill(
    model: nn.Module,
    checkpoint: Checkpoint,
    *,
    prefix: str = "",
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    activation: str = "bf16",
    mxfp4: str | None = "keep",
    pack: bool | str = False,
    input_scales: str = "stored",
    float32: Collection[str] = (),
    ignore: Sequence[str] = (),
    check_values: bool = True,
    progress: bool = True,
) -> Filled:
    """Fill a module tree that has transformers' names.

    Everything is checked before anything is written: names, shapes and dtypes from the headers,
    then, with ``check_values``, the values. Modules with ``set_weight`` and ``set_expert`` get
    quantised weights as they are; for all others quantised weights are dequantised.

    Args:
        model: Any module; parameters on meta are created, others replaced.
        checkpoint: The checkpoint to read.
        prefix: Prefix that the checkpoint's names have and the module's do not, e.g. ``"model."``.
        device: Device of the values; None keeps each parameter's device, and puts meta on the CPU.
        dtype: Dtype of plain floating tensors, or its name; None keeps the checkpoint's (bfloat16
            for what is dequantised). Tensors that are float32 by definition are never narrower, and
            weights of norms never narrower than stored.
        activation: ``"nvfp4"`` demands input scales of NVFP4 routed experts (pitfall 26);
            ``"fp8"`` has none.
        mxfp4: See ``load``.
        pack: See ``load``. Each layer is packed as soon as it has its weight.
        input_scales: ``"stored"`` takes the calibrated scales of activations from the checkpoint;
            ``"token"`` leaves them out, so that NVFP4 layers make one per token.
        float32: Canonical names of other plain tensors that are never narrower than float32.
        ignore: Shell patterns of canonical names that the model need not have, e.g. ``"mtp.*"``.
        check_values: Read all values once before writing any. Without it a bad value is found
            while filling, and what was filled before it stays.
        progress: Whether to show a progress bar on stderr, and the line that names FP8 activations
            where they could be used.

    Returns:
        The layers that were packed and converted.

    Raises:
        CheckpointError: counting what is missing, extra, mis-shaped or of the wrong dtype, with
            examples; or naming the first tensor with a bad value.
        TypeError: if ``device`` is neither a device nor a name.
        ValueError: if there is no such device, ``dtype`` is not a floating torch.dtype, or
            ``mxfp4``, ``pack`` or ``input_scales`` is unknown.
    """
    request = FillRequest(
        prefix=prefix,
        device=device,
        dtype=dtype,
        activation=activation,
        mxfp4=mxfp4,
        pack=pack,
        input_scales=input_scales,
        float32=float32,
        ignore=ignore,
        check_values=check_values,
        progress=progress,
    )
    return fill_module(model, checkpoint, request)


@dataclass(frozen=True, kw_only=True)
class FillRequest:
    """Arguments of ``fill``, unchecked, except the module and the checkpoint; see there.

    Attributes:
        read_ahead: Whether threads read files ahead of what is filled or checked; None: where
            values go to another device. On a CPU they are read to their place at once, which is
            faster than to copy them there.
    """

    prefix: str = ""
    device: torch.device | str | None = None
    dtype: torch.dtype | str | None = None
    activation: str = "bf16"
    mxfp4: str | None = "keep"
    pack: bool | str = False
    input_scales: str = "stored"
    float32: Collection[str] = ()
    ignore: Sequence[str] = ()
    check_values: bool = True
    progress: bool = True
    read_ahead: bool | None = None

    @classmethod
    def of_new_model(
        cls,
        device: torch.device | str,
        dtype: torch.dtype | str | None,
        activation: str,
        *,
        mxfp4: str | None,
        pack: bool | str,
        input_scales: str,
        progress: bool,
    ) -> FillRequest:
        """Return the request for a model that is built to be filled; see ``fill`` for arguments.

        An error drops the model, so values are checked while they are written.

        Raises:
            TypeError: if ``device`` is neither a device nor a name.
            ValueError: if there is no such device, or ``dtype`` is not a floating torch.dtype.
        """
        return cls(
            device=as_device(device),
            dtype=as_dtype(dtype),
            activation=activation,
            mxfp4=mxfp4,
            pack=pack,
            input_scales=input_scales,
            check_values=False,
            progress=progress,
        )

    def reads_ahead(self, device: torch.device) -> bool:
        """Return whether threads read ahead of values that go to a device."""
        return device.type != "cpu" if self.read_ahead is None else self.read_ahead

    def resolved(self, checkpoint: Checkpoint) -> tuple[Options, PackChoice]:
        """Check the arguments and resolve their defaults for a checkpoint.

        Raises:
            TypeError: if ``device`` is neither a device nor a name.
            ValueError: if there is no such device, ``dtype`` is not a floating torch.dtype, or
                ``mxfp4``, ``pack`` or ``input_scales`` is unknown.
        """
        dtype = as_dtype(self.dtype)
        choice = PackChoice.of(self.pack, dtype or checkpoint.dtype)
        device = None if self.device is None else as_device(self.device)
        mode = mxfp4_mode(self.mxfp4, choice, torch.device("cpu") if device is None else device)
        scales = self.input_scales
        if scales not in ("stored", "token"):
            raise ValueError(f"input_scales is {scales!r}, wanted 'stored' or 'token'")
        options = Options(device, dtype, self.activation, mode, scales, frozenset(self.float32))
        return options, choice


def fill_module(
    model: nn.Module,
    checkpoint: Checkpoint,
    request: FillRequest,
    hosting: Hosting | None = None,
    before_reading: Callable[[], None] | None = None,
) -> Filled:
    """Fill a module tree as a request says; see ``fill``, also for errors.

    Args:
        model: The module tree.
        checkpoint: The checkpoint to read.
        request: How values become those of the model. A model that is dropped on an error needs no
            ``check_values``.
        hosting: Moves experts to host memory, a layer as soon as it is packed; None: experts stay.
        before_reading: Called when headers are found right, before values are read.

    Returns:
        The layers that were packed and converted.
    """
    options, choice = request.resolved(checkpoint)
    slots = slots_of(model, request.prefix)
    filling = _Filling(slots, checkpoint, options, request, hosting)
    nbytes = filling.check_headers(request.ignore)
    if before_reading is not None:
        before_reading()
    if request.check_values:
        filling.check_values(nbytes)
    return filling.finished(model, choice, nbytes)


def check_module(model: nn.Module, checkpoint: Checkpoint, request: FillRequest) -> int:
    """Check everything that ``fill_module`` checks, and fill nothing.

    Args:
        model: The model, on meta.
        checkpoint: The checkpoint to read.
        request: How values would become those of the model.

    Returns:
        The number of bytes that were read.
    """
    options, _ = request.resolved(checkpoint)
    filling = _Filling(slots_of(model, request.prefix), checkpoint, options, request)
    nbytes = filling.check_headers(request.ignore)
    filling.check_values(nbytes)
    return nbytes


@dataclass(frozen=True)
class _Filling:
    """The passes over the slots of a module tree that one call of ``fill`` makes.

    Attributes:
        slots: The parts of the module tree.
        checkpoint: Source of the values.
        options: How values become those of the model.
        request: Whether to show progress and to read ahead.
        hosting: See ``fill_module``.
    """

    slots: Sequence[Slot]
    checkpoint: Checkpoint
    options: Options
    request: FillRequest
    hosting: Hosting | None = None

    def check_headers(self, ignore: Sequence[str]) -> int:
        """Compare names, shapes and dtypes, and log tensors without effect.

        Returns:
            The number of bytes to read.

        Raises:
            CheckpointError: listing what does not fit.
        """
        source = self.checkpoint
        ignored = name_matcher(ignore)
        plan = dry_run(self.slots, source.entries, source.stray, self.options, ignored)
        raise_all(f"{source.path} does not fit the model", plan.problems, plan.notes)
        for reason, unused in source.unused.items():
            left_out(source.path, len(unused), reason)
        return plan.nbytes

    def check_values(self, nbytes: int) -> None:
        """Read all values once."""
        entries, options = self.checkpoint.entries, self.options
        bar = Progress("checking", nbytes, self.request.progress)
        with self._reading_ahead(
            lambda slot: slot.check_readings(entries, options), torch.device("cpu")
        ):
            self._each_slot(bar, lambda slot: slot.check_values(entries, options))

    def run(self, nbytes: int, packer: Packer | None) -> None:
        """Fill every slot, and pack its layer before the next one gets memory."""
        entries, options = self.checkpoint.entries, self.options

        def fill_slot(slot: Slot) -> None:
            slot.fill(entries, options)
            if packer is not None:
                packer.pack(slot.module)
            if self.hosting is not None and self.hosting.takes(slot.name, slot.module):
                self.hosting.move(slot.module)

        with ExitStack() as stack:
            if self.hosting is not None:
                stack.enter_context(self.hosting.allocating_ahead())
            stack.enter_context(
                self._reading_ahead(lambda slot: slot.readings(entries, options), self._device())
            )
            self._each_slot(Progress("loading", nbytes, self.request.progress), fill_slot)

    def _device(self) -> torch.device:
        """Return the device of the values, where there are several the first that is no CPU."""
        if self.options.device is not None:
            return self.options.device
        devices = (p.device for slot in self.slots for p in slot.module.parameters(recurse=False))
        others = (device for device in devices if device.type not in ("cpu", "meta"))
        return next(others, torch.device("cpu"))

    def finished(self, model: nn.Module, choice: PackChoice, nbytes: int) -> Filled:
        """Fill and pack the model, and log what was converted and packed."""
        packer = choice.packer(model)
        self.run(nbytes, packer)
        self.options.conversion.report(self.checkpoint.path)
        if packer is None:
            return Filled(None, self.options.conversion)
        report_packing(self.checkpoint.path, model, packer.report)
        report_fp8(
            *(self.checkpoint.path, model, packer.report, self.options.activation),
            shown=self.request.progress,
        )
        return Filled(packer.report, self.options.conversion)

    def _each_slot(self, bar: Progress, action: Callable[[Slot], None]) -> None:
        """Pass every slot to ``action``."""
        entries = self.checkpoint.entries
        for slot in self.slots:
            action(slot)
            bar.advance(sum(entries[e.name].nbytes for e in slot.expected(entries)))
        bar.finish()

    @contextmanager
    def _reading_ahead(
        self, readings_of: Callable[[Slot], Iterator[Reading]], device: torch.device
    ) -> Iterator[None]:
        """Read ahead what a pass over the slots reads, and close the files at the end.

        Args:
            readings_of: What the pass reads of a slot.
            device: Device of the values.
        """
        try:
            if self.request.reads_ahead(device):
                plan, slabs = self._plan(readings_of)
                with self.checkpoint.reading_ahead(plan, slabs, device):
                    yield
            else:
                yield
        finally:
            self.checkpoint.close()

    def _plan(
        self, readings_of: Callable[[Slot], Iterator[Reading]]
    ) -> tuple[list[Reading], Slabs]:
        """Return what a pass over the slots reads, and memory that is a small part of a layer."""
        plan: list[Reading] = []
        layers: Counter[str] = Counter()
        for slot in self.slots:
            first = len(plan)
            plan += readings_of(slot)
            layers[names.layer_of(slot.name)] += sum(r.nbytes for r in plan[first:])
        around = layers.pop("", 0)
        return plan, Slabs.of_layer(max(layers.values(), default=around))
