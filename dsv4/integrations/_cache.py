"""A paged cache in the shape of transformers' cache objects. Imports transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from dsv4.kv_cache.page_tables import to_device
from dsv4.kv_cache.paged_cache import Batch, CacheStep, PagedCache
from dsv4.layers._mask import check_shape, is_bias, shown_by, window_band
from dsv4.layers.attention import DeepseekV4Attention


@dataclass(frozen=True, eq=False)
class PackedRows:
    """The tokens of a ``[B, S]`` batch that are no padding, as one flat batch.

    Attributes:
        step: The paged cache and the flat batch.
        real_tokens: Which of the ``B * S`` tokens those are, ``[T]``; None: all.
    """

    step: CacheStep
    real_tokens: torch.Tensor | None

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, S, H]`` to ``[1, T, H]``."""
        flat = x.reshape(1, -1, x.shape[-1])
        return flat if self.real_tokens is None else flat[:, self.real_tokens]

    def unpack(self, y: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """``[1, T, H]`` to the shape of ``like``, zeros for padding."""
        if self.real_tokens is None:
            return y.view(*like.shape[:2], -1)
        out = y.new_zeros(like.shape[0] * like.shape[1], y.shape[-1])
        out[self.real_tokens] = y[0]
        return out.view(*like.shape[:2], -1)


class _Layer(CacheLayerMixin):
    """Methods that transformers calls on a layer's cache; each answers for all layers."""

    is_sliding = True
    is_croppable = True
    supports_early_init = False

    def __init__(self, owner: PagedTransformersCache) -> None:
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, *args: Any) -> None:
        """Do nothing, because nothing is left to do."""

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise, because only this package's attention writes to a paged cache."""
        raise TypeError(
            "dsv4's paged cache in an attention that is not dsv4's, wanted "
            "dsv4.integrations.transformers.apply with 'attention' among its parts"
        )

    def activate_past_recording(self) -> None:
        """Do nothing, because the latest tokens can be taken back in any case."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return a mask over the new tokens alone, which only says which of them are padding."""
        return query_length, self.get_seq_length()

    def get_seq_length(self) -> int:
        """Tokens of a row so far, padding included."""
        return self.owner.columns

    def get_max_length(self) -> int:
        """Tokens that a row has room for."""
        return self.owner.paged.max_tokens


class PagedTransformersCache(Cache):
    """``past_key_values`` of a swapped model that lives in the pages of a ``PagedCache``.

    Rows are sequences of the paged cache, packed without padding: a left-padded prompt gives the
    same results as alone. Positions are those of the cache, and a mask only says which new tokens
    are padding; other masks and positions raise. A single new token is not checked on a GPU,
    because reading its mask and position would wait for the GPU.

    Attributes:
        paged: The cache.
        columns: Tokens of a row so far, padding included.
    """

    def __init__(self, paged: PagedCache) -> None:
        super().__init__(layers=[_Layer(self) for _ in range(paged.config.num_hidden_layers)])
        self.paged = paged
        self.columns = 0
        self._rows: list[int] = []
        self._rows_there: torch.Tensor | None = None
        self._all_begun = False
        self._packed: PackedRows | None = None
        self._before = (0, False)  # columns and whether all had begun, before this forward

    def packed_rows(
        self,
        layer_idx: int,
        hidden_states: torch.Tensor,
        mask: torch.Tensor | None,
        position_ids: torch.Tensor | None = None,
    ) -> PackedRows:
        """The flat batch of a forward; its first layer makes it, and makes room for it.

        An earlier forward that did not complete its last attention is undone here.

        Raises:
            CacheFullError: if the cache has no room for the batch; nothing is changed then.
            RuntimeError: if the forward before cannot be undone, because rows changed since.
            ValueError: if the batch is of another size than before, or too long, or the mask or
                the positions are not those of a padded batch.
        """
        if layer_idx == 0:
            self._undo()
            self._before = self.columns, self._all_begun
            rows, tokens = hidden_states.shape[:2]
            try:
                self._packed = self._begin(rows, tokens, mask, position_ids)
            except BaseException:
                self.paged.undo()
                self._all_begun = self._before[1]
                if self.columns == 0:
                    self.reset()
                raise
        if self._packed is None:
            raise RuntimeError(
                f"dsv4's paged cache: the first layer of a forward is {layer_idx}, wanted 0"
            )
        return self._packed

    def finished(self, layer_idx: int, hidden_states: torch.Tensor) -> None:
        """Note that a layer is done; after the last one its tokens count."""
        if layer_idx == len(self.layers) - 1 and self._packed is not None:
            self.paged.advance(self._packed.step.batch)
            self.columns = self._before[0] + hidden_states.shape[1]
            self._packed = None

    def _undo(self) -> None:
        """Undo a forward that was not completed."""
        if self._packed is None:
            return
        if not self.paged.undo(self._packed.step.batch):
            raise RuntimeError(
                "dsv4's paged cache: the forward before did not come to its end, and rows of the "
                "cache changed since, which leaves layers of different lengths; reset() the cache"
            )
        self.columns, self._all_begun = self._before
        self._packed = None
        if self.columns == 0:
            self.reset()

    def _begin(
        self,
        rows: int,
        tokens: int,
        mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
    ) -> PackedRows:
        if tokens == 0:
            raise ValueError(
                f"dsv4's paged cache: there is no new token, and a row has {self.columns} already, "
                "wanted a longer prompt, or reset() before another batch"
            )
        there = self._take_rows(rows)
        lengths, real_tokens = [tokens] * rows, None
        # Padding is on the left: once every row has begun, a single token is no padding.
        is_read = tokens > 1 or not self._all_begun or there.device.type == "cpu"
        if is_read and not there.is_meta:
            real = self._real(rows, tokens, mask, there.device)
            self._check(real, mask, position_ids, self.paged.lengths[there])
            lengths = real.sum(1).tolist()
            if tokens == 1 and self._all_begun and not all(lengths):
                raise ValueError(
                    "dsv4's paged cache: attention_mask calls a single token padding after every "
                    "row has begun, wanted 1"
                )
            if sum(lengths) < rows * tokens:
                real_tokens = real.reshape(-1).nonzero().squeeze(1)
        self.paged.prepare(self._rows, lengths)
        starts = self.paged.lengths[there]
        if tokens == 1 and real_tokens is None:
            batch = Batch.decode(starts, there)
        else:
            batch = Batch.from_lengths(lengths, starts, there)
        self._all_begun = self._all_begun or all(lengths)
        return PackedRows(CacheStep(self.paged, batch), real_tokens)

    @staticmethod
    def _real(
        rows: int, tokens: int, mask: torch.Tensor | None, device: torch.device
    ) -> torch.Tensor:
        """Return which new tokens are no padding, ``[B, S]``."""
        if mask is None:
            return torch.ones(rows, tokens, dtype=torch.bool, device=device)
        check_shape(mask, rows, tokens, tokens)
        return shown_by(mask[:, 0].diagonal(dim1=-2, dim2=-1)).expand(rows, tokens)

    def _check(
        self,
        real: torch.Tensor,
        mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        starts: torch.Tensor,
    ) -> None:
        """Raise for a mask or positions that a padded batch would not have."""
        good = torch.ones((), dtype=torch.bool, device=real.device)
        masked = placed = good
        tokens = real.shape[1]
        if mask is not None:
            band = window_band(tokens, tokens, self.paged.config.sliding_window, real.device)
            allowed = band & real.unsqueeze(1)
            # It does not matter what a padding token sees.
            same = (shown_by(mask[:, 0]) == allowed) | ~real.unsqueeze(2)
            masked = same.all() & ~is_bias(mask)
        if position_ids is not None:
            shape = tuple(position_ids.shape)
            if shape not in (tuple(real.shape), (1, tokens)):
                raise ValueError(
                    f"dsv4's paged cache: position_ids has shape {list(shape)}, wanted "
                    f"{list(real.shape)} or [1, {tokens}]"
                )
            columns = torch.arange(tokens, device=real.device) + self.columns
            packed = starts.unsqueeze(1) + real.long().cumsum(1) - 1
            in_columns = (position_ids == columns).all()
            placed = in_columns | ((position_ids == packed) | ~real).all()
        mask_is_good, positions_are_good = torch.stack((masked, placed)).tolist()
        if not mask_is_good:
            raise ValueError(
                "dsv4's paged cache: attention_mask shows other keys than the window before each "
                "token, wanted [B, S] with 1 for tokens and 0 for padding"
            )
        if not positions_are_good:
            raise ValueError(
                "dsv4's paged cache: position_ids are not those that follow the cache's tokens, "
                "wanted None"
            )

    def _take_rows(self, count: int) -> torch.Tensor:
        if self._rows_there is not None:
            if count != len(self._rows):
                raise ValueError(
                    f"dsv4's paged cache: batch of {count}, wanted {len(self._rows)} as before; "
                    "reset() the cache for another batch"
                )
            return self._rows_there
        if count > self.paged.max_sequences:
            raise ValueError(
                f"dsv4's paged cache: batch of {count}, wanted at most max_sequences "
                f"({self.paged.max_sequences})"
            )
        while len(self._rows) < count:
            self._rows.append(self.paged.allocate())
        self._rows_there = to_device(self._rows, self.paged.lengths.device)
        return self._rows_there

    def reset(self) -> None:
        """Forget all tokens."""
        for row in self._rows:
            self.paged.free(row)
        self._rows, self._rows_there, self._packed = [], None, None
        self.columns, self._all_begun = 0, False

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last ``-tokens_to_remove`` tokens of every row (``PagedCache.roll_back``).

        Raises:
            ValueError: if the number is positive, or more tokens than can be taken back; nothing is
                changed.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"dsv4's paged cache: crop({tokens_to_remove}), wanted 0 or minus a number of "
                "tokens"
            )
        self._undo()
        if tokens_to_remove == 0:
            return
        there = self._rows_there
        held = [] if there is None else self.paged.lengths[there].tolist()
        self.paged.roll_back(self._rows, [max(-1, tokens + tokens_to_remove) for tokens in held])
        self.columns += tokens_to_remove

    def reorder_cache(self, beam_idx: torch.Tensor) -> NoReturn:
        """Raise, because beam search is not supported."""
        raise NotImplementedError(
            "dsv4's paged cache: beam search reorders rows, wanted num_beams=1. Without "
            "past_key_values transformers' own cache serves"
        )

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        """Raise, because repeating rows is not supported."""
        raise NotImplementedError(
            "dsv4's paged cache: rows cannot be repeated, wanted a batch of its final size"
        )

    def batch_select_indices(self, indices: torch.Tensor) -> NoReturn:
        """Raise, because dropping rows is not supported."""
        raise NotImplementedError(
            "dsv4's paged cache: rows cannot be dropped, wanted a batch of its final size"
        )


def generate_assisted(model: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """See ``dsv4.integrations.transformers.generate_assisted``."""
    cache = options.get("past_key_values", options.get("cache"))  # its name from 5.24 on
    if not isinstance(cache, PagedTransformersCache):
        raise TypeError(
            f"generate_assisted: past_key_values is a {type(cache).__name__}, wanted a "
            "paged_cache: transformers' own cache does not give pooled tokens back"
        )
    model._is_stateful = False  # of this instance, and during the call alone
    try:
        return model.generate(*args, **options)
    finally:
        del model._is_stateful


def paged_cache_for(model: Any, **sizes: Any) -> PagedTransformersCache:
    """See ``dsv4.integrations.transformers.paged_cache``."""
    attention = [(n, m) for n, m in model.named_modules() if n.endswith(".self_attn")]
    for name, module in attention:
        if not isinstance(module, DeepseekV4Attention):
            raise TypeError(
                f"paged_cache: {name} is a {type(module).__module__}.{type(module).__qualname__}, "
                "wanted dsv4's: apply(model) with 'attention' among its parts"
            )
    if not attention:
        raise TypeError(
            f"paged_cache: model is a {type(model).__module__}.{type(model).__qualname__}, wanted "
            "transformers' DeepseekV4ForCausalLM or DeepseekV4Model"
        )
    weight = model.get_input_embeddings().weight
    config = attention[0][1].config.without_draft()
    paged = PagedCache(config, device=weight.device, dtype=weight.dtype, **sizes)
    return PagedTransformersCache(paged)
