"""Bugs of script 08: edits of a few lines that people have shipped."""

BUGS = {
    "tree": dict(
        what="terms are added one after the other, in rank order, not as a tree",
        old="""\
    return tree_sum(terms[:half]) + tree_sum(terms[half:])
""",
        new="""\
    return sum(terms)
""",
        symptom="sums are right, but their last bits depend on the number of ranks",
        why="each rank adds its own terms first, so another T pairs other terms",
        reported="github.com/NVIDIA/Megatron-LM/issues/1736",
    ),
    "library": dict(
        what="the sum over ranks is left to the library's all-reduce",
        old="""\
    return tree_sum(list(lesson00.all_gather(x[None], 0, group)))
""",
        new="""\
    return lesson00.all_reduce(x, group)
""",
        ranks=4,
        symptom="on 2 ranks all bits are right; on 4 and more the last ones differ",
        why="a library chooses its order by T and by the size of the message. On 2 "
        "ranks there is only one order, because a + b = b + a",
        reported="github.com/vllm-project/vllm/issues/51290",
    ),
    "blocks": dict(
        what="each rank computes its slice of a row-parallel weight as one product",
        old="""\
    blocks = BLOCKS // linear.tp_group.size()
""",
        new="""\
    blocks = 1
""",
        symptom="the sum over ranks is a tree, and yet its last bits depend on T",
        why="the sum inside a product has D/T terms on a rank, in the library's "
        "order: another T puts other terms into one product",
        reported="github.com/sgl-project/sglang/pull/15041",
    ),
    "accumulate": dict(
        what="backward adds the gradients of a rank's blocks one by one, not as a tree",
        old="""\
        return tree_all_reduce(tree_sum(list(partial_grads)), ctx.tp_group), None
""",
        new="""\
        return tree_all_reduce(sum(partial_grads), ctx.tp_group), None
""",
        symptom="forward and step 1's loss are bitwise identical; gradients are not",
        why="backward has sums that forward does not have: their order matters as well",
        reported="github.com/NVIDIA-NeMo/Automodel/pull/3392",
    ),
}
