"""Bugs of lesson 01: edits of a few lines that people have shipped, or ask about."""

BUGS = {
    "f": dict(
        what="f without its all-reduce in backward",
        old="""\
        return all_reduce(partial_grad, ctx.tp_group), None
""",
        new="""\
        return partial_grad, None
""",
        symptom="in step 1 the loss and the gradients of Megatron's weights are "
        "correct, but dL/dx is wrong, so the losses drift from step 2 on, Megatron's "
        "by so little that a falling loss does not show it; in the naive split the "
        "gradients of up_proj are wrong as well",
        why="each rank computed dL/dx from its slice of W only, which is one of T "
        "partial sums",
        reported="github.com/NovaSky-AI/SkyRL/pull/1886; why f sums at all is asked in "
        "NVIDIA/Megatron-LM, issue 19",
        audit="gradient sum",
    ),
    "g": dict(
        what="g also all-reduces in backward, like PyTorch's differentiable all_reduce",
        old="""\
        y_BSD = self.reduce(partial_y_BSD, self.tp_group)
""",
        new="""\
        partial_y_BSD = CopyToTP.apply(partial_y_BSD, self.tp_group)
        y_BSD = self.reduce(partial_y_BSD, self.tp_group)
""",
        symptom="the loss of step 1 is correct; gradients of all that precedes g are "
        "T times too large",
        why="each rank already has the full dL/dy, because all compute the same loss; "
        "PyTorch's all_reduce is for ranks with different losses",
        reported="github.com/pytorch/pytorch/issues/58005; NVIDIA/Megatron-LM, 559",
        audit="gradient factor",
    ),
    "bias": dict(
        what="the row-parallel bias is added on every rank, before the sum",
        old="""\
        partial_y_BSD = F.linear(x_BSf, self.weight)
""",
        new="""\
        partial_y_BSD = F.linear(x_BSf, self.weight, self.bias)
        return self.reduce(partial_y_BSD, self.tp_group)
""",
        symptom="the loss is wrong from step 1 on, slightly while the bias is small",
        why="the all-reduce adds T biases: only one partial sum may contain it",
        reported="github.com/huggingface/text-generation-inference/issues/1036",
        audit="forward bias",
    ),
    "average": dict(
        what="gradients are summed over the slices of the batch and not averaged",
        old="""\
            p.grad = all_reduce(p.grad, dp_group) / dp_group.size()
""",
        new="""\
            p.grad = all_reduce(p.grad, dp_group)
""",
        symptom="the loss of step 1 is correct; gradients of DP are T times too large",
        why="the mean over all samples is the mean of the slices' means, not their sum",
        reported="arXiv:1910.02054; docs.pytorch.org, FSDP's gradient reduction",
    ),
}
