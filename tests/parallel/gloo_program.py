"""What each of two processes does for ``test_gloo.py``.

``RANK=r WORLD_SIZE=2 ... python -m tests.parallel.gloo_program CHECKPOINT FOLDER``. Results go to
``<folder>/<rank>.pt``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dsv4 import explain, ops
from dsv4.bench import cli as bench
from dsv4.parallel import groups
from tests.parallel.exchange_cases import exchange


def partial_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A rank's part of a sum."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def between_sublayers(hidden: int) -> dict[str, torch.Tensor]:
    """Arguments of ``hc_reduce_post_pre_norm`` besides the partial sum, in float64."""
    sizes = {
        "streams": (3, 4, hidden),
        "post": (3, 4),
        "comb": (3, 4, 4),
        "fn": (24, 4 * hidden),
        "scale": (3,),
        "base": (24,),
        "norm_weight": (hidden,),
    }
    return {n: partial_of(10 + i, s, torch.float64) for i, (n, s) in enumerate(sizes.items())}


def message_of(action: Any) -> str:
    """The message of the error that an action raises."""
    try:
        action()
    except (ValueError, NotImplementedError, ImportError) as error:
        return str(error)
    return ""


def sums(rank: int) -> dict[str, Any]:
    """Sums over both ranks, and what is chosen."""
    group = dist.group.WORLD.group_name
    result: dict[str, Any] = {}
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        partial = partial_of(rank, (3, 64), dtype)
        result[f"sum {dtype}"] = ops.all_reduce(partial, group)
        result[f"strided sum {dtype}"] = ops.all_reduce(partial[:, ::2], group, backend="gloo")
    fields = between_sublayers(8)
    options: Any = {"norm_eps": 1e-6, "hc_eps": 1e-6, "iterations": 3}
    partial = partial_of(rank, (3, 8), torch.float64)
    result["fused"] = ops.hc_reduce_post_pre_norm(partial, **fields, **options, group=group)
    result["size"], result["rank"] = groups.size(group), groups.rank(group)
    result["chosen"] = explain(ops.all_reduce, partial, group).chosen
    result["nccl"] = message_of(lambda: ops.all_reduce(partial, group, backend="nccl"))
    result["unknown"] = message_of(lambda: ops.all_reduce(partial, "no such group"))
    return result


def exchanged(rank: int) -> dict[str, Any]:
    """Tokens to the ranks of their experts and back, and what is chosen."""
    group, case = dist.group.WORLD.group_name, exchange(2, 3, 8, seed=5)
    args, back = case.sent[rank], case.returning(rank)
    received = ops.moe_send(args.x, args.ids, args.weights, args.num_experts, group)
    total = ops.moe_return(
        back.y, received[1], args.ids, args.num_experts, group, shared=back.shared
    )
    refused = message_of(
        lambda: ops.moe_send(args.x, args.ids, args.weights, 4, group, backend="push")
    )
    uneven = message_of(lambda: ops.moe_send(args.x, args.ids, args.weights, 5, group))
    chosen = explain(ops.moe_send, args.x, args.ids, args.weights, 4, group).chosen
    return {
        "received": received,
        "total": total,
        "push": refused,
        "uneven": uneven,
        "chosen": chosen,
    }


def transformers_model(folder: Path) -> dict[str, Any]:
    """A quantised model whose experts transformers distributes over both ranks."""
    from transformers.distributed import DistributedConfig

    from dsv4.checkpoint import save
    from dsv4.integrations.transformers import from_pretrained, register_expert_parallel
    from dsv4.layers import DeepseekV4Experts

    shared: Any = {"tp_size": 2, "ep_size": 2, "tp_plan": {}}
    distributed = DistributedConfig(**shared, ep_implementation="dsv4")
    options: Any = {"dtype": "float64", "pack": "fragments_16x64", "progress": False}
    model = from_pretrained(folder, **options, distributed_config=distributed)
    experts = [m for m in model.modules() if isinstance(m, DeepseekV4Experts)]
    ids = torch.arange(2, 26).view(2, 12)
    with torch.no_grad():
        result: dict[str, Any] = {
            "logits": model(ids).logits,
            "ranges": [(e.first_expert, e.num_local_experts) for e in experts],
            "layouts": [e.layout for e in experts],
            "bytes": sum(p.nbytes for e in experts for p in e.parameters()),
            "tokens": model.generate(ids, max_new_tokens=3, do_sample=False),
        }
    for name in ("auto", "all_to_all", "all_reduce"):
        other = DistributedConfig(**shared, ep_implementation=name)
        result[name] = message_of(
            lambda other=other: from_pretrained(folder, progress=False, distributed_config=other)
        )
    register_expert_parallel()
    result["save"] = message_of(lambda: save(model, folder.parent / f"rank {dist.get_rank()}"))
    return result


def other_configuration(folder: Path) -> str:
    """The message on a rank whose config.json is not that of the other."""
    from dsv4.integrations.transformers import from_pretrained

    other = folder.parent / f"rank {dist.get_rank()} config"
    other.mkdir()
    for file in folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    values = json.loads((folder / "config.json").read_text())
    values["swiglu_limit"] = 3.0 + dist.get_rank()
    (other / "config.json").write_text(json.dumps(values))
    distributed = {"tp_size": 2, "ep_size": 2, "tp_plan": {}, "ep_implementation": "dsv4"}
    return message_of(
        lambda: from_pretrained(other, progress=False, distributed_config=distributed)
    )


def plain_experts(rank: int) -> dict[str, Any]:
    """transformers' own experts with ``ep_implementation="dsv4"``: ids are made local."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.expert_parallel import EPImplementationInterface

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    seen: list[torch.Tensor] = []

    class Experts(torch.nn.Module):
        num_experts = 2

        def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Any:
            seen.extend((ids, weights))
            return x * weights.sum(1, keepdim=True)

    implementation = EPImplementationInterface()["dsv4"](Experts(), mesh, mesh)
    ids = torch.tensor([[0, 3], [1, 2]])
    weights = torch.tensor([[0.5, 0.25], [1.0, 2.0]])
    total = implementation(torch.ones(2, 4), ids, weights)
    return {"total": total, "ids": seen[0], "weights": seen[1]}


def main(checkpoint: Path, folder: Path) -> None:
    """Run everything and write the results."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    result = {
        "sums": sums(rank),
        "exchanged": exchanged(rank),
        "model": transformers_model(checkpoint),
        "other configuration": other_configuration(checkpoint),
        "plain": plain_experts(rank),
        "bench": bench.main(
            ["run", "all_reduce", "--bytes", "8192", "--repeat", "2", "--json", f"{folder}/b.json"]
        ),
    }
    torch.save(result, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
