"""Bugs of lesson 02: edits of a few lines that people have shipped."""

BUGS = {
    "seed": dict(
        what="each rank initializes its own shards, and all ranks have the same seed",
        old="""\
        full = shard(full, dim, group)
""",
        new="""\
        torch.manual_seed(0)
        full = shard(full, dim, group).normal_(0, 0.1)
""",
        symptom="it trains a different model: each head and MLP column exists T times",
        why="equal shards get nearly equal gradients, so 1/T of the model is left",
        reported="github.com/modelscope/ms-swift/issues/7944; allenai/OLMo-core, 307",
        audit="not a piece",
    ),
    "qkv": dict(
        what="q, k and v are stacked, then sharded like one weight",
        old="""\
    T = tp_group.size()
""",
        new="""\
    T = tp_group.size()
    linears = [attn.q_proj, attn.k_proj, attn.v_proj]
    fused = torch.cat([linear.weight for linear in linears])
    sizes = [len(linear.weight) // T for linear in linears]
    slices = [piece.split(sizes) for piece in fused.chunk(T)]
    for i, linear in enumerate(linears):
        linear.weight.data = torch.cat([piece[i] for piece in slices])
""",
        symptom="all shapes are right and no error is raised; step 1's loss is wrong",
        why="rank 0's slice has too many rows of q; it uses the surplus as k or v",
        reported="github.com/deepspeedai/DeepSpeed/pull/3844",
        audit="wrong parameter",
    ),
    "mask-heads": dict(
        what="all ranks use the same dropout mask for their different heads",
        old="""\
    attn.core.dropout = ShardedDropout(attn.core.dropout.p, 1, tp_group)
""",
        new="",
        symptom="no error; losses are close to the correct ones, but never equal",
        why="with one seed, heads on different ranks drop the same elements",
        reported="github.com/NVIDIA/Megatron-LM/issues/206",
        audit="dropout same",
    ),
    "mask-residual": dict(
        what="each rank has its own dropout mask for the replicated block outputs",
        old="""\
    layer.mlp = tp_mlp(layer.mlp, tp_group)
""",
        new="""\
    layer.mlp = tp_mlp(layer.mlp, tp_group)
    layer.dropout = ShardedDropout(layer.dropout.p, 2, tp_group)
""",
        symptom="losses differ between ranks; replicated parameters drift apart",
        why="all ranks hold the same tensor, so all must drop the same elements",
        reported="github.com/NVIDIA/Megatron-LM/issues/206",
        audit="dropout differs",
    ),
    "clip": dict(
        what="gradients are clipped by each rank's own norm",
        old="""\
    return math.sqrt(all_reduce(total, tp_group))
""",
        new="""\
    return math.sqrt(total)
""",
        symptom="gradients are right, norms are wrong; losses diverge from step 2 on",
        why="a rank has only the squares of its own shards, not those of other ranks",
        reported="github.com/pytorch/torchtune/issues/2420; pytorch/torchtitan, 596",
        audit="norm",
    ),
    "data": dict(
        what="each rank of the TP group reads its own batch",
        old="""\
    for step, (tokens_BS, target_BS) in enumerate(batches, 1):
""",
        new="""\
    if tp_group is not None:
        batches = batches[tp_group.rank() :] + batches[: tp_group.rank()]
    for step, (tokens_BS, target_BS) in enumerate(batches, 1):
""",
        symptom="losses are wrong from step 1 on and differ between ranks; no error",
        why="an all-reduce adds partial sums, which must belong to the same tokens",
        reported="github.com/deepspeedai/DeepSpeed/issues/7199",
    ),
    "drift": dict(
        what="one rank loses the gradient of the last LayerNorm",
        old="""\
            optimizer.step()
""",
        new="""\
            if tp_group is not None and tp_group.rank() == 1:
                model.norm.zero_grad(set_to_none=False)
            optimizer.step()
""",
        symptom="step 1 is right; then replicas differ and losses slowly diverge",
        why="only equal starts, gradients and updates keep replicated parameters equal",
        reported="github.com/NVIDIA/Megatron-LM/issues/1446",
    ),
}
