"""Bugs of script 14: edits of a few lines that people have shipped."""

BUGS = {
    "leak": dict(
        what="the graph of a micro-batch is kept after its backward pass",
        file="05_3d_parallel.py",
        old="""\
        y.backward(grad)
""",
        new="""\
        y.backward(grad, retain_graph=True)
        vars(self).setdefault("kept", []).append(y)  # to look at it later
""",
        symptom="all losses and gradients are right; 1F1B holds as much as GPipe",
        why="autograd frees what it saved when no graph needs it; 1F1B relies on that",
        reported="github.com/verl-project/verl/pull/7874, pytorch/pytorch pull 138119",
    ),
    "early": dict(
        what="weight passes follow forward passes: on rank 0, W comes before its B",
        old="""\
        if phase == "backward" and i >= rank:
""",
        new="""\
        if phase == "forward" and i >= rank:
""",
        symptom="an error before the run: an action needs another that comes after it",
        why="dL/dW needs dL/dy, which the backward pass receives",
        reported="github.com/sail-sg/zero-bubble-pipeline-parallelism/issues/72",
    ),
    "chunks": dict(
        what="the last rank takes chunks in another order than they are sent",
        old="""\
    actions = [("forward", which) for which in order[:warm_up]]
""",
        new="""\
    if rank == P - 1:  # the next chunk's first one could be there
        order[P - 1 : P + 1] = [order[P], order[P - 1]]
    actions = [("forward", which) for which in order[:warm_up]]
""",
        symptom="an error that names two messages; without the check, wrong gradients",
        why="two ranks have one queue per direction, for the messages of all chunks",
        reported="github.com/NVIDIA/Megatron-LM/issues/1450, pytorch/PiPPy pull 1088",
    ),
    "newest": dict(
        what="a weight pass takes the newest micro-batch instead of its own",
        old="""\
        for linear, x, grad_y in self.later.pop(which):
""",
        new="""\
        for linear, x, grad_y in self.later[max(self.later)]:  # the newest
""",
        symptom="the loss and dL/dx are right; weights of all ranks but 0 are wrong",
        why="on rank r the last one counts r + 1 times, the first r not at all",
        reported="github.com/pytorch/pytorch/pull/130210 (a review)",
    ),
    "forgotten": dict(
        what="the weight passes that were put off are never run",
        old="""\
    return actions + [("weight", (0, i)) for i in put_off]
""",
        new="""\
    return actions
""",
        symptom="the loss is right; weight gradients of all ranks but 0 lack a part",
        why="no other action needs a weight gradient, so nothing waits for it",
        reported="github.com/deepspeedai/Megatron-DeepSpeed/issues/442",
    ),
    "history": dict(
        what="what a weight pass needs is kept with its history",
        old="""\
        SplitLinear.for_weight_pass.append((ctx.linear, x.detach(), grad_y))
""",
        new="""\
        SplitLinear.for_weight_pass.append((ctx.linear, x, grad_y))
""",
        symptom="all gradients are right; the memory of zero bubble grows with M",
        why="p.grad is computed from x: with the history of x it becomes the end of a "
        "graph, which keeps what the weight passes of all micro-batches used",
        reported="github.com/pytorch/pytorch/issues/3818",
    ),
}
