"""Mutants in hyper-connections, SwiGLU, routing and the MTP block."""

from __future__ import annotations

from .mutant import LAYERS, REFERENCE, Mutant

LOOPS = "tests/ops/test_hyper_connection.py::test_pitfall_8_pre_against_explicit_loops"
POST_LOOPS = "tests/ops/test_hyper_connection.py::test_pitfall_7_post_against_explicit_loops"
TRANSPOSE = "tests/layers/test_layers.py::test_pitfall_7_the_layer_mixes_streams_by_the_transpose"
SWIGLU = "tests/ops/test_swiglu.py::test_pitfall_9_by_hand"
SHARED = "tests/layers/test_layers.py::test_pitfall_9_the_shared_expert_clamps_too"
ROUTER = "tests/ops/test_router.py::"
STABLE = ROUTER + "test_pitfall_10_scores_are_stable_from_minus_1000_to_1000"
OTHERS = ROUTER + "test_pitfall_11_other_scorings_choose_other_experts"
DRAFT = "tests/test_model.py::test_the_draft_layer_is_its_formula"

MUTANTS = (
    Mutant(
        "pitfall 7",
        "comb not transposed",
        REFERENCE + "hyper_connection:hc_post",
        "args.comb.to(wide).transpose(-1, -2)",
        "args.comb.to(wide)",
        POST_LOOPS,
    ),
    Mutant(
        "pitfall 7",
        "comb not transposed, seen at the layer",
        REFERENCE + "hyper_connection:hc_post",
        "args.comb.to(wide).transpose(-1, -2)",
        "args.comb.to(wide)",
        TRANSPOSE,
    ),
    Mutant(
        "pitfall 7",
        "comb transposed twice",
        LAYERS + "hyper_connection:DeepseekV4HyperConnection._rounded",
        "(post, comb)",
        "(post, comb.transpose(-1, -2))",
        TRANSPOSE,
    ),
    Mutant(
        "pitfall 8",
        "exponential instead of softmax",
        REFERENCE + "hyper_connection:_sinkhorn",
        "logits.softmax(-1)",
        "logits.exp()",
        LOOPS,
    ),
    Mutant(
        "pitfall 8",
        "no eps after the softmax",
        REFERENCE + "hyper_connection:_sinkhorn",
        "logits.softmax(-1) + eps",
        "logits.softmax(-1)",
        LOOPS,
    ),
    Mutant(
        "pitfall 8",
        "no eps in a denominator",
        REFERENCE + "hyper_connection:_sinkhorn",
        "comb.sum(-1, keepdim=True) + eps",
        "comb.sum(-1, keepdim=True)",
        LOOPS,
    ),
    Mutant(
        "pitfall 8",
        "softmax over columns",
        REFERENCE + "hyper_connection:_sinkhorn",
        "logits.softmax(-1)",
        "logits.softmax(-2)",
        LOOPS,
    ),
    Mutant(
        "pitfall 8",
        "rows normalised first",
        REFERENCE + "hyper_connection:_sinkhorn",
        "comb = logits.softmax(-1) + eps\n"
        "comb = comb / (comb.sum(-2, keepdim=True) + eps)\n"
        "for _ in range(iterations - 1):\n"
        "    comb = comb / (comb.sum(-1, keepdim=True) + eps)\n"
        "    comb = comb / (comb.sum(-2, keepdim=True) + eps)",
        "comb = logits.softmax(-1) + eps\n"
        "comb = comb / (comb.sum(-1, keepdim=True) + eps)\n"
        "for _ in range(iterations - 1):\n"
        "    comb = comb / (comb.sum(-1, keepdim=True) + eps)\n"
        "    comb = comb / (comb.sum(-2, keepdim=True) + eps)",
        LOOPS,
    ),
    Mutant(
        "pitfall 8",
        "one iteration more",
        REFERENCE + "hyper_connection:_sinkhorn",
        "iterations - 1",
        "iterations",
        LOOPS,
    ),
    Mutant(
        "pitfall 8",
        "no eps on pre",
        REFERENCE + "hyper_connection:hc_pre",
        "torch.sigmoid(mixes[..., :n] * scale[0] + base[:n]) + args.hc_eps",
        "torch.sigmoid(mixes[..., :n] * scale[0] + base[:n])",
        LOOPS,
    ),
    Mutant(
        "pitfall 8",
        "eps on post",
        REFERENCE + "hyper_connection:hc_pre",
        "2 * torch.sigmoid(mixes[..., n:2 * n] * scale[1] + base[n:2 * n])",
        "args.hc_eps + 2 * torch.sigmoid(mixes[..., n:2 * n] * scale[1] + base[n:2 * n])",
        LOOPS,
    ),
    Mutant(
        "pitfall 8",
        "post without its factor 2",
        REFERENCE + "hyper_connection:hc_pre",
        "2 * torch.sigmoid(mixes[..., n:2 * n] * scale[1] + base[n:2 * n])",
        "torch.sigmoid(mixes[..., n:2 * n] * scale[1] + base[n:2 * n])",
        LOOPS,
    ),
    Mutant(
        "pitfall 9",
        "gate clamped below as well",
        REFERENCE + "swiglu:swiglu",
        "gate.clamp(max=args.limit)",
        "gate.clamp(-args.limit, args.limit)",
        SWIGLU,
    ),
    Mutant(
        "pitfall 9",
        "gate not clamped",
        REFERENCE + "swiglu:swiglu",
        "gate, up = (gate.clamp(max=args.limit), up.clamp(-args.limit, args.limit))",
        "up = up.clamp(-args.limit, args.limit)",
        SWIGLU,
    ),
    Mutant(
        "pitfall 9",
        "up clamped above only",
        REFERENCE + "swiglu:swiglu",
        "up.clamp(-args.limit, args.limit)",
        "up.clamp(max=args.limit)",
        SWIGLU,
    ),
    Mutant(
        "pitfall 9",
        "up not clamped",
        REFERENCE + "swiglu:swiglu",
        "gate, up = (gate.clamp(max=args.limit), up.clamp(-args.limit, args.limit))",
        "gate = gate.clamp(max=args.limit)",
        SWIGLU,
    ),
    Mutant(
        "pitfall 9",
        "gate clamped after SiLU",
        REFERENCE + "swiglu:swiglu",
        "if args.limit is not None:\n"
        "    gate, up = (gate.clamp(max=args.limit), up.clamp(-args.limit, args.limit))\n"
        "out = torch.nn.functional.silu(gate) * up",
        "if args.limit is not None:\n"
        "    up = up.clamp(-args.limit, args.limit)\n"
        "out = torch.nn.functional.silu(gate).clamp(max=args.limit) * up",
        SWIGLU,
    ),
    Mutant(
        "pitfall 9",
        "the product is clamped instead",
        REFERENCE + "swiglu:swiglu",
        "if args.limit is not None:\n"
        "    gate, up = (gate.clamp(max=args.limit), up.clamp(-args.limit, args.limit))\n"
        "out = torch.nn.functional.silu(gate) * up",
        "if args.limit is not None:\n"
        "    pass\n"
        "out = (torch.nn.functional.silu(gate) * up).clamp(-args.limit, args.limit)",
        SWIGLU,
    ),
    Mutant(
        "pitfall 9",
        "the shared expert does not clamp",
        LAYERS + "mlp:DeepseekV4MLP.inner",
        "rounded_swiglu(gate_up, self.limit, self.down_proj)",
        "rounded_swiglu(gate_up, None, self.down_proj)",
        SHARED,
    ),
    Mutant(
        "pitfall 9",
        "transformers' own experts, run by these operators, do not clamp",
        "dsv4.integrations._experts:experts_forward",
        "self.limit",
        "None",
        "tests/integrations/test_transformers_experts.py::test_pitfalls_9_32_the_clamp_is_applied",
    ),
    Mutant(
        "pitfall 10",
        "log(1 + exp(x)) in float32",
        REFERENCE + "router:_sqrt_softplus",
        "torch.log1p(torch.exp(-logits.abs())) + logits.clamp(min=0)",
        "torch.log(1 + torch.exp(logits))",
        STABLE,
    ),
    Mutant(
        "pitfall 10",
        "log1p(exp(x)), which overflows",
        REFERENCE + "router:_sqrt_softplus",
        "torch.log1p(torch.exp(-logits.abs())) + logits.clamp(min=0)",
        "torch.log1p(torch.exp(logits))",
        STABLE,
    ),
    Mutant(
        "pitfall 10",
        "no floor under the sum",
        REFERENCE + "router:",
        "_SUM_FLOOR = 1e-20",
        "_SUM_FLOOR = 0.0",
        ROUTER + "test_pitfall_10_by_hand",
    ),
    Mutant(
        "pitfall 10",
        "logits in the model's dtype",
        LAYERS + "router:_Router._logits_dtype",
        "wider(x.dtype, torch.float32)",
        "x.dtype",
        "tests/integrations/test_numerics_difference.py::test_routing_logits_are_rounded_by_transformers_only",
    ),
    Mutant(
        "pitfall 11",
        "sigmoid scores",
        REFERENCE + "router:_sqrt_softplus",
        "(torch.log1p(torch.exp(-logits.abs())) + logits.clamp(min=0)).sqrt",
        "logits.sigmoid",
        OTHERS,
    ),
    Mutant(
        "pitfall 11",
        "softmax scores",
        REFERENCE + "router:_sqrt_softplus",
        "(torch.log1p(torch.exp(-logits.abs())) + logits.clamp(min=0)).sqrt()",
        "logits.softmax(-1)",
        OTHERS,
    ),
    Mutant(
        "pitfall 11",
        "softplus without the root",
        REFERENCE + "router:_sqrt_softplus",
        "(torch.log1p(torch.exp(-logits.abs())) + logits.clamp(min=0)).sqrt()",
        "torch.log1p(torch.exp(-logits.abs())) + logits.clamp(min=0)",
        OTHERS,
    ),
    Mutant(
        "pitfall 11",
        "the bias does not take part in the choice",
        REFERENCE + "router:route_topk",
        "scores if args.bias is None else scores + args.bias.to(scores.dtype)",
        "scores",
        ROUTER + "test_pitfall_11_against_the_formula",
    ),
    Mutant(
        "pitfall 11",
        "weights from biased scores",
        REFERENCE + "router:route_topk",
        "_weights(scores, ids, args.scaling_factor)",
        "_weights(biased, ids, args.scaling_factor)",
        ROUTER + "test_pitfall_11_against_the_formula",
    ),
    Mutant(
        "pitfall 12",
        "hash layers choose by score",
        REFERENCE + "router:route_hash",
        "ids, known = _look_up(args.tid2eid, args.input_ids, args.weight.shape[0])\n"
        "weights = _weights(scores, ids, args.scaling_factor)",
        "ids, known = _look_up(args.tid2eid, args.input_ids, args.weight.shape[0])\n"
        "ids = scores.topk(ids.shape[-1]).indices\n"
        "weights = _weights(scores, ids, args.scaling_factor)",
        ROUTER + "test_pitfall_12_the_choice_follows_the_ids_not_the_scores",
    ),
    Mutant(
        "pitfall 12",
        "hash layers weigh their experts equally",
        REFERENCE + "router:route_hash",
        "_weights(scores, ids, args.scaling_factor)",
        "_weights(torch.ones_like(scores), ids, args.scaling_factor)",
        ROUTER + "test_pitfall_12_experts_by_token_id_weights_by_score",
    ),
    Mutant(
        "pitfall 12",
        "token ids outside the vocabulary are clamped in silence",
        "dsv4.ops.router:check_ids",
        "_raise_unless(good, 'input_ids', input_ids, f'token ids from 0 to {vocabulary - 1}')\n"
        "ids = tid2eid[input_ids]",
        "ids = tid2eid[input_ids.clamp(0, vocabulary - 1)]",
        ROUTER + "test_token_ids_outside_the_vocabulary",
    ),
    Mutant(
        "pitfall 12",
        "missing token ids taken for token 0",
        LAYERS + "router:DeepseekV4HashRouter.forward",
        "flat = self._flat(hidden_states)\n"
        "if input_ids is None:\n"
        "    raise ValueError('DeepseekV4HashRouter: input_ids is None, wanted the token "
        "ids: hash layers choose experts by token')",
        "flat = self._flat(hidden_states)\n"
        "if input_ids is None:\n"
        "    input_ids = torch.zeros(flat.shape[0], dtype=torch.long)\n"
        "if input_ids is None:\n"
        "    raise ValueError('DeepseekV4HashRouter: input_ids is None, wanted the token "
        "ids: hash layers choose experts by token')",
        "tests/layers/test_layers.py::test_pitfall_12_hash_layers_need_token_ids",
    ),
    Mutant(
        "pitfall 40",
        "the two norms of the MTP block are exchanged",
        LAYERS + "decoder:DeepseekV4MTP.combine",
        "embedded = self.e_proj(rounded_norm(self.enorm, next_embeddings, [self.e_proj]))\n"
        "normed = rounded_norm(self.hnorm, streams, [self.h_proj])",
        "embedded = self.e_proj(rounded_norm(self.hnorm, next_embeddings, [self.e_proj]))\n"
        "normed = rounded_norm(self.enorm, streams, [self.h_proj])",
        DRAFT,
    ),
    Mutant(
        "pitfall 40",
        "the MTP block is fed collapsed streams",
        LAYERS + "decoder:DeepseekV4MTP.combine",
        "rounded_norm(self.hnorm, streams, [self.h_proj])",
        "self.hnorm(streams.mean(-2, keepdim=True).expand_as(streams))",
        DRAFT,
    ),
)
