"""MTP drafts with a cache are those over whole sequences; greedy text does not depend on drafts."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import pytest
import torch

from dsv4.config import CSA, HCA, SLIDING, ModelConfig
from dsv4.kv_cache.paged_cache import Batch, CacheStep, PagedCache
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.serving.sampler import Variant
from dsv4.speculation.mtp import MtpDraft, latest
from dsv4.speculation.verify import NO_DRAFT, probabilities, verify_greedy
from dsv4.testing.models import random_model
from tests.speculation.test_verify import request

EXACT = 1e-10
PROMPTS = (3, 8, 17)


@cache
def model() -> DeepseekV4ForCausalLM:
    """Windows of 8, 4 and 8 tokens, so that a short text crosses all borders."""
    config = ModelConfig.tiny(
        layer_types=(SLIDING, CSA, HCA), num_nextn_predict_layers=1, sliding_window=8,
        numerics="transformers",
    )  # fmt: skip
    return random_model(config, 4, torch.float64, mtp=True)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    vocab = model().config.vocab_size
    return [torch.randint(vocab, (n,), generator=generator).tolist() for n in PROMPTS]


@dataclass
class Speculation:
    """Sequences that go on by verified drafts; the host knows all numbers."""

    paged: PagedCache
    drafter: MtpDraft
    texts: list[list[int]]
    rows: torch.Tensor
    drafts: torch.Tensor
    counts: list[int] = field(default_factory=list)

    @classmethod
    def begin(cls, count: int, **sizes: int) -> Speculation:
        texts = [list(prompt) for prompt in prompts()]
        paged = model().new_cache(len(texts), 120, max_chunk=24, **sizes)
        rows = torch.tensor([paged.allocate() for _ in texts])
        self = cls(paged, MtpDraft(model()), texts, rows, torch.zeros(len(texts), 0).long())
        lengths = [len(text) for text in texts]
        logits, streams, step = self._step(texts, lengths)
        paged.advance(step.batch)
        last = torch.tensor(lengths).cumsum(0) - 1
        anchors = logits[0, last].argmax(-1)
        following = [
            token for text, anchor in zip(texts, anchors, strict=True)
            for token in (*text[1:], int(anchor))
        ]  # fmt: skip
        window = latest(lengths, 8, rows.device)
        self.drafter.write(torch.tensor(following), streams, step, window)
        for text, anchor in zip(texts, anchors.tolist(), strict=True):
            text.append(anchor)
        self._draft(streams[0, last], count)
        return self

    def _step(
        self, pieces: list[list[int]], certain: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor, CacheStep]:
        lengths = [len(piece) for piece in pieces]
        self.paged.prepare(self.rows.tolist(), lengths, certain=certain)
        batch = Batch.from_lengths(lengths, self.paged.lengths[self.rows], self.rows)
        step = CacheStep(self.paged, batch)
        ids = torch.tensor([[token for piece in pieces for token in piece]])
        with torch.no_grad():
            hidden, streams = model().model(ids, past_key_values=step)
            return model().logits(hidden), streams, step

    def _draft(self, streams: torch.Tensor, count: int) -> None:
        anchors = torch.tensor([text[-1] for text in self.texts])
        positions = self.paged.lengths[self.rows] - 1
        with torch.no_grad():
            self.drafts = self.drafter.draft(
                anchors, streams, self.paged, self.rows, positions, count
            ).tokens

    def go_on(self, drafts: torch.Tensor, count: int) -> None:
        """Verify drafts, accept, write the rows of all tokens, draft again."""
        pieces = [
            [text[-1], *(max(0, d) for d in row)]
            for text, row in zip(self.texts, drafts.tolist(), strict=True)
        ]
        logits, streams, step = self._step(pieces, [1] * len(pieces))
        size = drafts.shape[1] + 1
        verified = verify_greedy(logits.view(len(pieces), size, -1), drafts)
        self.paged.advance(step.batch, verified.accepted + 1)
        if size > 1:
            self.paged.confirm(self.rows.tolist(), self.paged.lengths[self.rows].tolist())
        with torch.no_grad():
            self.drafter.write(verified.tokens.clamp(min=0).flatten(), streams, step)
        for text, row in zip(self.texts, verified.tokens.tolist(), strict=True):
            text.extend(token for token in row if token != NO_DRAFT)
        self.counts.extend(verified.accepted.tolist())
        by_row = streams.view(len(pieces), size, *streams.shape[2:])
        self._draft(by_row[torch.arange(len(pieces)), verified.accepted], count)


@cache
def plain(steps: int) -> list[list[int]]:
    """Greedy texts without drafts, from whole sequences without a cache."""
    texts = [list(prompt) for prompt in prompts()]
    with torch.no_grad():
        for text in texts:
            for _ in range(steps):
                text.append(int(model()(torch.tensor([text]))[0, -1].argmax()))
    return texts


def expected_drafts(text: list[int], count: int) -> list[int]:
    """Drafts after ``text``, whose last token is the anchor, over whole sequences."""
    out: list[int] = []
    with torch.no_grad():
        _, streams = model().model(torch.tensor([text[:-1]]))
        ids = text[1:]
        for _ in range(count):
            logits, drafted = model().draft(torch.tensor([ids]), streams)
            out.append(int(logits[0, -1].argmax()))
            streams, ids = torch.cat((streams, drafted[:, -1:]), 1), [*ids, out[-1]]
    return out


@pytest.mark.parametrize("sizes", [{}, {"pool_tokens": 800}], ids=["rings", "pools"])
@pytest.mark.parametrize("count", [1, 3])
def test_drafts_are_those_of_whole_sequences(sizes: dict, count: int) -> None:
    """After any accepted and rejected ones, over the borders of all windows."""
    story = Speculation.begin(count, **sizes)
    for _ in range(7):
        for text, drafts in zip(story.texts, story.drafts.tolist(), strict=True):
            assert drafts == expected_drafts(text, count)
        story.go_on(story.drafts, count)


@pytest.mark.parametrize("how", ["true", "wrong", "mixed", "mtp"])
def test_text_does_not_depend_on_drafts(how: str) -> None:
    """True continuations are accepted, all of them; wrong ones never; mixed ones up to there."""
    whole, count = plain(40), 4
    story = Speculation.begin(count, pool_tokens=800)
    generator, forced = torch.Generator().manual_seed(1), []
    while min(len(t) - n for t, n in zip(story.texts, PROMPTS, strict=True)) < 24:
        true = torch.tensor(
            [w[len(t) : len(t) + count] for w, t in zip(whole, story.texts, strict=True)]
        )
        right = {
            "true": torch.ones_like(true), "wrong": torch.zeros_like(true), "mtp": true,
            "mixed": (torch.rand(true.shape, generator=generator) < 0.7).long(),
        }[how].bool()  # fmt: skip
        wrong = (true + 1) % model().config.vocab_size
        drafts = story.drafts if how == "mtp" else torch.where(right, true, wrong)
        forced.extend(right.long().cumprod(1).sum(1).tolist())
        story.go_on(drafts, count)
        if max(len(t) - n for t, n in zip(story.texts, PROMPTS, strict=True)) > 35:
            break
    for text, expected in zip(story.texts, whole, strict=True):
        assert text[: len(expected)] == expected[: len(text)]
    if how != "mtp":
        assert story.counts == forced


def test_drawn_drafts_say_what_they_were_drawn_from() -> None:
    story = Speculation.begin(1)
    variant, vocab = Variant(draw=True), model().config.vocab_size
    parameters = request(3)._replace(top_k=torch.full((3,), vocab))
    text = story.texts[1]
    with torch.no_grad():
        _, streams = model().model(torch.tensor([text[:-1]]))
        drafts = story.drafter.draft(
            torch.tensor([0, text[-1], 0]),
            streams[:, -1].expand(3, -1, -1),
            story.paged,
            torch.tensor([-1, 1, -1]),
            story.paged.lengths - 1,
            2,
            parameters,
            variant,
        )
        logits, _ = model().draft(torch.tensor([text[1:]]), streams)
    assert drafts.probabilities is not None
    assert drafts.probabilities.shape == (3, 2, vocab)
    expected = probabilities(logits[0, -1:], request(1), variant)[0]
    assert float((drafts.probabilities[1, 0] - expected).abs().max()) < EXACT
    assert bool((drafts.probabilities.gather(2, drafts.tokens.unsqueeze(2)) > 0).all())


def test_a_model_without_an_mtp_layer_is_refused() -> None:
    config = ModelConfig.tiny(num_nextn_predict_layers=0)
    with pytest.raises(ValueError, match="holds 0 MTP layers, wanted 1"):
        MtpDraft(random_model(config))
    compressed = model().model.layers[1].self_attn
    with pytest.raises(ValueError, match=r"write_window: layer 1 is .*, wanted sliding_attention"):
        compressed.write_window(torch.zeros(1, 64), None)
    assert latest([3, 0, 5], 2, torch.device("cpu")).tolist() == [1, 2, 6, 7]
