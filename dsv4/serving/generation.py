"""Run the requests of one call of ``generate`` by a runner, which a model on a GPU keeps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from dsv4.model import DeepseekV4ForCausalLM
from dsv4.parallel.agreement import agree, digest, reported
from dsv4.parallel.context import ParallelContext, has_own_tokens
from dsv4.serving.arguments import check_choice
from dsv4.serving.drafting import AUTO, drafting_of
from dsv4.serving.kept_runner import Capacity, Kind, Lease, lease
from dsv4.serving.options import SamplingOptions
from dsv4.serving.request import LogitsError, Request
from dsv4.serving.sampler import FAILED
from dsv4.serving.sampling import Sampler


def generate(
    model: DeepseekV4ForCausalLM,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    sampler: Sampler | None = None,
    stop_ids: Iterable[int] | None = None,
    chunk: int | None = None,
    speculate: str | None = AUTO,
    draft_tokens: int | None = None,
    confidence_threshold: float | None = None,
) -> list[list[int]]:
    """Continue prompts; see ``DeepseekV4ForCausalLM.generate``.

    Args:
        model: The model, on its device.
        prompts: Token ids per sequence, at least one each; of this rank where each has its own.
        max_new_tokens: Most tokens to add, at least 1; 0 where each rank has its own prompts.
        sampler: Sampler, whose generator draws one seed for each prompt; greedy if None.
        stop_ids: Tokens that end a sequence; None: ``eos_token_id`` of the configuration.
        chunk: Most prompt tokens per step; None: the runner's own.
        speculate: See ``Runner``.
        draft_tokens: See ``Runner``.
        confidence_threshold: See ``Runner``.

    Raises:
        RuntimeError: if logits are not finite, naming the prompt.
        TypeError: if ``sampler`` is no sampler.
        ValueError: if ``speculate`` names drafts that cannot be used.
    """
    shares = has_own_tokens(model.parallel)
    if not prompts and not shares:
        return []
    stops = None if stop_ids is None else tuple(stop_ids)
    # Ranks with prompts of their own may have other arguments, and know nothing of these.
    own = model.parallel if shares else None
    with reported(own):
        sampler = Sampler() if sampler is None else sampler
        if not isinstance(sampler, Sampler):
            kind = type(sampler).__name__
            raise TypeError(f"generate: sampler is {kind}, wanted a Sampler of dsv4.serving")
    if model.parallel is not None and not shares:
        with reported(model.parallel):
            values = {"max_new_tokens": max_new_tokens, "stop_ids": stops, "chunk": chunk}
            drafts = {
                "speculate": speculate,
                "draft_tokens": draft_tokens,
                "confidence_threshold": confidence_threshold,
            }
            sampling = {"temperature": sampler.temperature, "top_p": sampler.top_p}
            lengths = {"lengths of prompts": [len(prompt) for prompt in prompts]}
            tokens = {"a hash of the prompts": digest([list(prompt) for prompt in prompts])}
            agree(model.parallel, {**lengths, **tokens, **values, **drafts, **sampling})
    with reported(own):
        plan = drafting_of(model, speculate, draft_tokens, threshold=confidence_threshold).plan
    asked = prompts if max_new_tokens else []  # a rank without a request takes part all the same
    seeds = _seeds(sampler, len(asked), model.device)
    options = [
        SamplingOptions(
            temperature=sampler.temperature,
            top_p=sampler.top_p,
            seed=seed,
            stop_ids=stops,
            max_new_tokens=max_new_tokens,
        )
        for seed in seeds
    ]
    need = Capacity.of_prompts(asked, max_new_tokens)
    if model.parallel is not None and shares:
        need = _need_of_all(model.parallel, need, chunk)
        if need.sequences == 0:
            return [[] for _ in prompts]
    kind = Kind(chunk, plan)
    with lease(model, need, kind) as held:
        answers = _answers(held, asked, options)
        if answers is None:
            held.renew(need, kind)
            answers = _answers(held, asked, options)
        assert answers is not None
        return answers or [[] for _ in prompts]


def _need_of_all(context: ParallelContext, own: Capacity, chunk: int | None) -> Capacity:
    """Return the largest capacity that a rank needs: the runners of all have one size."""
    with reported(context):
        agree(context, {"chunk": chunk})
        needs: list[Capacity] = context.group.exchange(own)
    return Capacity(
        max(need.sequences for need in needs),
        max(need.tokens for need in needs),
        max(need.pool for need in needs),
    )


def _answers(
    held: Lease, prompts: Sequence[Sequence[int]], options: Sequence[SamplingOptions]
) -> list[list[int]] | None:
    """Return all answers; None if the runner was made for other weights."""
    requests: list[Request] = []
    try:
        for prompt, chosen in zip(prompts, options, strict=True):
            requests.append(held.runner.add(prompt, chosen))
        held.runner.step()
        # The GPU works on that step meanwhile, so the comparison costs no time.
        if not held.is_current():
            return None
        if has_own_tokens(held.runner.model.parallel):
            held.runner.run()  # until the requests of all ranks have ended
        return [_result(i, request) for i, request in enumerate(requests)]
    finally:
        for request in requests:
            request.cancel()  # requests that an error has left open


def _result(prompt: int, request: Request) -> list[int]:
    try:
        return request.result()
    except LogitsError:
        check_choice("generate", [FAILED], [prompt], len(request.tokens) + 1)
        raise


def _seeds(sampler: Sampler, count: int, device: torch.device) -> list[int]:
    if sampler.temperature == 0:
        return [0] * count
    generator = sampler.generator
    where = device if generator is None else generator.device
    seeds = torch.randint(2**63 - 1, (count,), generator=generator, dtype=torch.int64, device=where)
    return seeds.tolist()
