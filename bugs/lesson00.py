"""Bugs of lesson 00: edits of a few lines that people have shipped."""

BUGS = {
    "skip": dict(
        what="the last rank skips its all-reduce, which is under an `if` on the rank",
        old="""\
    dist.all_reduce(out, op, group=group)
""",
        new="""\
    if group.rank() != group.size() - 1:
        dist.all_reduce(out, op, group=group)
""",
        ranks=4,
        symptom="no error at first: the others block until the timeout aborts the job",
        why="no rank can complete an all-reduce before all ranks have called it. (If "
        "the last rank's next call has the same type and size, it is matched with the "
        "skipped one: silently wrong sums.)",
        reported="github.com/pytorch/pytorch/issues/115964, …/97191",
    ),
    "order": dict(
        what="the last rank calls two all-reduces in the other order",
        old="""\
    sum_x = all_reduce(x, group)
    sum_y = all_reduce(y, group)
""",
        new="""\
    last = group.rank() == group.size() - 1
    sum_y = all_reduce(y, group) if last else None
    sum_x = all_reduce(x, group)
    sum_y = sum_y if last else all_reduce(y, group)
""",
        symptom="no error, no hang: one rank's x was added to the others' y",
        why="calls are matched by their order only, not by the names of variables",
        reported="github.com/pytorch/pytorch/issues/109401",
    ),
    "shapes": dict(
        what="the last rank passes in a longer tensor than the others",
        old="""\
    # PyTorch's call works in place, and only on contiguous memory: x may be a view.
    out = x.detach().clone(memory_format=torch.contiguous_format)
""",
        new="""\
    # PyTorch's call works in place, and only on contiguous memory: x may be a view.
    more = 2 if group.rank() == group.size() - 1 else 0
    out = torch.cat([x.flatten(), x.new_zeros(more)])
""",
        symptom="gloo aborts a process, or all wait, or some ranks get wrong sums",
        why="no rank tells the others its shape: each assumes that all have its own",
        reported="github.com/pytorch/pytorch/issues/97191",
    ),
    "view": dict(
        what="an in-place all-reduce of a view that is not contiguous",
        old="""\
    out = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, op, group=group)
""",
        new="""\
    out = x.detach().clone()
    dist.all_reduce(out.contiguous(), op, group=group)
""",
        symptom="contiguous tensors are summed; a transposed one stays as it was",
        why="`.contiguous()` of such a view is a copy: the sum goes into the copy, "
        "and the copy is dropped",
        reported="github.com/NVIDIA/Megatron-LM/issues/5337",
    ),
    "wait": dict(
        what="the result of an async all-reduce is used before work.wait()",
        old="""\
    other_work()  # must neither read nor write `out`
""",
        new="""\
    out = out.clone()
    other_work()
""",
        symptom="no error: a rank computes with its own x, or with a part of the sum. "
        "In most programs it happens only now and then, because it is a race",
        why="async_op=True only starts the sum; until wait() returns, the tensor may "
        "hold anything",
        reported="github.com/OpenNMT/OpenNMT-py/issues/2295",
    ),
}
