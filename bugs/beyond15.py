"""Bugs of script 15: edits of a few lines that people have shipped."""

BUGS = {
    "last": dict(
        what="the sum of a micro-batch replaces that of the micro-batches before",
        old="""\
            self.shard.grad += self.sum_gradients()
""",
        new="""\
            self.shard.grad = self.sum_gradients()
""",
        symptom="no error; losses of step 1 are right. In ZeRO-2 and 3 gradients are "
        "those of the last micro-batch; ZeRO-1 adds up in p.grad, so it is right",
        why="ZeRO-2 sums once per micro-batch, and p.grad is freed after each sum",
        reported="github.com/allenai/open-instruct/pull/1498 (DeepSpeed, ZeRO-2)",
    ),
    "norm": dict(
        what="elements that all TP ranks hold count fully on each of them",
        file="beyond/flat_vector.py",
        old="""\
        weight = 1.0 if lesson01.sharding_of(p) else 1 / tp_group.size()
""",
        new="""\
        weight = 1.0
""",
        flags="--tp 2",
        ranks=4,
        symptom="gradients of step 1 are right, norms too large: clipping scales too "
        "much, and losses diverge from step 2 on",
        why="the sum over tp then has the squares of replicated elements T times",
        reported="github.com/ROCm/TransformerEngine/pull/715, NVIDIA-NeMo/RL pull 3788",
    ),
    "shards": dict(
        what="each replica takes the norm of its own shard for that of the gradient",
        old="""\
        squares = lesson00.all_reduce(squares, self.groups["shard"])
""",
        new="",
        ranks=4,
        symptom="norms are too small and differ between replicas, each of which clips "
        "its shards by another factor. Plain DP is right",
        why="a shard has 1/DP of the elements: their squares have to be summed",
        reported="github.com/pytorch/torchtitan/issues/766, pytorch/xla pull 4796",
    ),
    "hybrid": dict(
        what="the norm is summed over all replicas, also over those with one shard",
        old="""\
        squares = lesson00.all_reduce(squares, self.groups["shard"])
""",
        new="""\
        squares = lesson00.all_reduce(squares, self.groups["data"])
""",
        ranks=4,
        symptom="right in ZeRO; in plain DP and in HSDP norms are too large, by the "
        "root of the number of ranks that hold the same shard",
        why="ranks over `replicate` have equal gradients after their all-reduce, and "
        "each element counts once for each of them",
        reported="github.com/ByteDance-Seed/VeOmni/issues/184",
    ),
    "group": dict(
        what="shards of gradients are summed over tp instead of over replicas",
        old="""\
                unit.shard.grad = lesson00.all_reduce(grad, self.groups["replicate"])
""",
        new="""\
                unit.shard.grad = lesson00.all_reduce(grad, self.groups["tp"])
""",
        ranks=4,
        symptom="losses of step 1 are right, gradients are not: with TP in all runs, "
        "without TP in plain DP and HSDP, where each replica keeps its own rows' sum",
        why="TP ranks have different slices of a matrix, or equal copies; what is "
        "partial is the gradient of each replica",
        reported="github.com/ooples/AiDotNet/pull/393",
    ),
    "freed": dict(
        what="nothing gathers a unit's parameters before its backward pass",
        old="""\
        return UnshardInBackward.apply(y, self)
""",
        new="""\
        return y
""",
        symptom="an error about a storage of size 0 in ZeRO-3; not if they are kept",
        why="autograd has saved views of a vector whose memory was freed after forward",
        reported="github.com/pytorch/pytorch/issues/181832 (FSDP2's hook was dropped)",
    ),
    "average": dict(
        what="losses are parts of a mean over all replicas, and fully_shard averages",
        old="""\
        return loss * self.args.dp
""",
        new="""\
        return loss
""",
        symptom="gradients and norms of fully_shard are DP times too small; clipping "
        "and AdamW hide that in the losses",
        why="fully_shard divides the sum over dp by DP, as if each replica had a mean",
        reported="github.com/meta-pytorch/torchtune/pull/2172, "
        "verl-project/verl-SpeCo pull 29",
    ),
}
