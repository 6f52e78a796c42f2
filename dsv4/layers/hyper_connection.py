"""Manifold-constrained hyper-connections around a sublayer, and the head that ends them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dsv4.config import ModelConfig
from dsv4.layers._module import FixedDtypeModule, empty_weight, hooked, wide_dtype
from dsv4.layers._routed_rows import RoutedRows
from dsv4.layers.norm import DeepseekV4RMSNorm, DeepseekV4UnweightedRMSNorm
from dsv4.ops.all_reduce import hc_reduce_post, hc_reduce_post_pre_norm
from dsv4.ops.hyper_connection import hc_head, hc_post, hc_post_pre_norm, hc_pre, hc_pre_norm
from dsv4.ops.hyper_connection_combine import hc_combine_post, hc_combine_post_pre_norm
from dsv4.parallel.context import ParallelContext
from dsv4.parallel.reduce import all_reduce, by_operator

PreResult = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class DeepseekV4HyperConnection(FixedDtypeModule):
    """A hyper-connection: collapses the residual streams before a sublayer, writes back after it.

    All arithmetic is in float32 (specification, section 3).
    """

    wide = frozenset({"fn", "base", "scale"})

    def __init__(self, config: Any) -> None:
        super().__init__()
        config = ModelConfig.of(config)
        n = config.hc_mult
        self.hc_mult = n
        self.hc_sinkhorn_iters = config.hc_sinkhorn_iters
        self.hc_eps = config.hc_eps
        self.norm_eps = config.rms_norm_eps
        self.numerics = config.numerics
        self.fn = empty_weight((2 + n) * n, n * config.hidden_size, dtype=wide_dtype())
        self.base = nn.Parameter(torch.zeros((2 + n) * n, dtype=wide_dtype()))
        self.scale = nn.Parameter(torch.ones(3, dtype=wide_dtype()))

    def forward(
        self, hidden_streams: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Collapse the streams to the sublayer's input, and compute the coefficients for ``post``.

        Args:
            hidden_streams: ``[B, S, n, H]``.

        Returns:
            post ``[B, S, n]`` and comb ``[B, S, n, n]`` in float32, collapsed ``[B, S, H]`` in the
            input's dtype. Note the order.
        """
        pre, post, comb = hc_pre(
            hidden_streams,
            self.fn,
            self.scale,
            self.base,
            **self._settings(),
        )
        return post, comb, pre

    def pre(self, streams: torch.Tensor, norm: DeepseekV4RMSNorm) -> PreResult:
        """Run ``forward`` and the norm that follows: post, comb and ``norm(collapsed)``."""
        if norm.variance_epsilon != self.norm_eps or hooked(self, norm):
            post, comb, sublayer_input = self(streams)
            return post, comb, norm(sublayer_input)
        normed, post, comb = hc_pre_norm(
            streams, self.fn, self.scale, self.base, norm.weight, **self._settings()
        )
        return post, comb, normed

    def post_pre(
        self,
        output: torch.Tensor | RoutedRows,
        streams: torch.Tensor,
        post: torch.Tensor,
        comb: torch.Tensor,
        following: DeepseekV4HyperConnection,
        norm: DeepseekV4RMSNorm,
        parallel: ParallelContext | None = None,
    ) -> tuple[torch.Tensor, PreResult]:
        """Run ``post``, then ``following.pre``; return the new streams and its results.

        With ``parallel``, ``output`` is this rank's part of what is written back, see ``post``,
        also for rows as ``output``.
        """
        if norm.variance_epsilon != following.norm_eps or hooked(following, norm):
            streams = self.post(output, streams, post, comb, parallel)
            return streams, following.pre(streams, norm)
        post, comb = self._rounded(streams, post, comb)
        parameters = following.fn, following.scale, following.base, norm.weight
        arguments = (streams, post, comb, *parameters)
        if isinstance(output, RoutedRows):
            assert parallel is None, "ranks add up sums"
            streams, normed, post, comb = hc_combine_post_pre_norm(
                *output, *arguments, **following._settings()
            )
        elif parallel is not None and by_operator(parallel, output):
            streams, normed, post, comb = hc_reduce_post_pre_norm(
                output, *arguments, **following._settings(), group=parallel.group.name
            )
        else:
            streams, normed, post, comb = hc_post_pre_norm(
                all_reduce(parallel, output), *arguments, **following._settings()
            )
        return streams, (post, comb, normed)

    def _settings(self) -> dict[str, Any]:
        return {
            "norm_eps": self.norm_eps,
            "hc_eps": self.hc_eps,
            "iterations": self.hc_sinkhorn_iters,
        }

    def _rounded(
        self, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.numerics == "transformers":
            return post.to(streams.dtype), comb.to(streams.dtype)
        return post, comb

    def post(
        self,
        output: torch.Tensor | RoutedRows,
        streams: torch.Tensor,
        post: torch.Tensor,
        comb: torch.Tensor,
        parallel: ParallelContext | None = None,
    ) -> torch.Tensor:
        """Write a sublayer's output back: ``X'_k = post_k y + sum_j comb_jk X_j``.

        transformers' numerics round post and comb to the dtype of the streams first. With
        ``parallel``, ``output`` is this rank's part of y, and y the sum over the ranks, rounded
        once: the same bits as ``all_reduce`` before. Without, y may be rows of experts, whose sums
        are written back: the same bits as ``RoutedRows.combined`` before.
        """
        post, comb = self._rounded(streams, post, comb)
        if isinstance(output, RoutedRows):
            assert parallel is None, "ranks add up sums"
            return hc_combine_post(*output, streams, post, comb)
        if parallel is not None and by_operator(parallel, output):
            return hc_reduce_post(output, streams, post, comb, group=parallel.group.name)
        return hc_post(all_reduce(parallel, output), streams, post, comb)


class DeepseekV4HyperHead(FixedDtypeModule):
    """The last collapse, before the final norm (specification, section 3.4)."""

    wide = frozenset({"hc_fn", "hc_base", "hc_scale"})

    def __init__(self, config: Any) -> None:
        super().__init__()
        config = ModelConfig.of(config)
        n = config.hc_mult
        self.hc_mult = n
        self.eps = config.hc_eps
        self.input_norm = DeepseekV4UnweightedRMSNorm(config.rms_norm_eps)
        self.hc_fn = empty_weight(n, n * config.hidden_size, dtype=wide_dtype())
        self.hc_base = nn.Parameter(torch.zeros(n, dtype=wide_dtype()))
        self.hc_scale = nn.Parameter(torch.ones(1, dtype=wide_dtype()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Collapse ``[B, S, n, H]`` to ``[B, S, H]`` in the same dtype."""
        return hc_head(
            x,
            self.hc_fn,
            self.hc_scale,
            self.hc_base,
            norm_eps=self.input_norm.eps,
            hc_eps=self.eps,
        )
