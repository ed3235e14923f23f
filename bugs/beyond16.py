"""Bugs of script 16: edits of a few lines that people have shipped."""

BUGS = {
    "no-backward": dict(
        what="rows travel by a plain all-to-all, which autograd does not track",
        old="""\
        self.exchange = AllToAllRows.apply
""",
        new="""\
        self.exchange = all_to_all_rows
""",
        symptom="the loss of step 1 is right, and it falls; experts have no gradient",
        why="what arrives is a new tensor without history. Embedding, attention and "
        "shared experts still learn, which is enough for a loss that falls",
        reported="github.com/facebookresearch/fairscale/pull/137 (adds the backward); "
        "pytorch/torchtitan, 989",
    ),
    "router": dict(
        what="with EP the weights of the experts' outputs have no history",
        old="""\
        weights_tk = probs_tk / probs_tk.sum(-1, keepdim=True)
""",
        new="""\
        weights_tk = probs_tk / probs_tk.sum(-1, keepdim=True)
        if self.batch_groups:
            weights_tk = weights_tk.detach()
""",
        symptom="the loss of step 1 is right; the router's gradient is too small",
        why="the choice of experts has no gradient, so only the weights connect the "
        "router with the loss; what is left is the balance loss",
        reported="github.com/NVIDIA-NeMo/Automodel/pull/2995, point 2 (probabilities "
        "were gathered by a plain all-gather); huggingface/transformers, 48687",
    ),
    "balance": dict(
        what="the balance loss uses the shares of this rank's rows",
        file="beyond/expert_balance.py",
        old="""\
    share_E = all_counts_E.to(probs_tE.dtype) / rows
""",
        new="""\
    share_E = counts_E.to(probs_tE.dtype) / counts_E.sum()
""",
        symptom="the loss is slightly too large, and the router's gradient is wrong",
        why="each rank is pushed to spread its own tokens evenly, although the batch "
        "may be balanced; a mean of products is not the product of means",
        reported="arXiv:2501.11873 (the usual implementation); "
        "github.com/pytorch/torchtitan/pull/4772",
    ),
    "divided": dict(
        what="gradients of experts are divided by the number of ep ranks",
        old="""\
    for axis in ("ep", "dp"):
        to_sum = nn.ParameterList()  # it has parameters(), like a model
""",
        new="""\
    for p in model.parameters():
        if is_sharded_over(p, groups["ep"]):
            p.grad /= groups["ep"].size()
    for axis in ("ep", "dp"):
        to_sum = nn.ParameterList()  # it has parameters(), like a model
""",
        symptom="step 1's loss is right; gradients of experts are not",
        why="the division is right if each rank's loss is the mean of its own tokens "
        "and all other gradients are averaged; here the loss is divided by all tokens",
        reported="github.com/pytorch/pytorch/issues/160285 (a factor of R); "
        "databricks/megablocks, 86; NVIDIA/Megatron-LM, 5956",
    ),
    "all": dict(
        what="all gradients are summed over ep, as plain data parallelism does",
        old="""\
            is_complete = is_sharded_over(p, groups[axis])
""",
        new="""\
            is_complete = False
""",
        symptom="the loss of step 1 is right; experts get each other's gradients",
        why="the ranks of ep hold different experts under the same name and shape, so "
        "nothing complains",
        reported="github.com/NVIDIA/Megatron-LM/pull/5916 (gradients mix)",
    ),
    "replicas": dict(
        what="replicas of an expert on several dp ranks keep their own gradients",
        old="""\
            is_complete = is_sharded_over(p, groups[axis])
""",
        new="""\
            is_complete = is_sharded_over(p, groups["ep"])
""",
        flags="--ep 1",
        symptom="the loss of step 1 is right; then replicas of experts differ",
        why="if ep is smaller than the ranks that split the batch, several ranks hold "
        "the same expert, and each has the gradient of its own ep group's tokens",
        reported="github.com/NVIDIA-NeMo/Automodel/pull/3135; "
        "facebookresearch/fairseq, 4220",
    ),
    "shared": dict(
        what="experts are found by name, and shared_expert has the word in its name",
        old="""\
        for p in model.parameters():
            is_complete = is_sharded_over(p, groups[axis])
""",
        new="""\
        for name, p in model.named_parameters():
            is_complete = "expert" in name
""",
        symptom="the loss of step 1 is right; replicas of the shared expert diverge",
        why="a shared expert is replicated on all ranks of ep, and each applies it to "
        "its own tokens, so its gradient has to be summed",
        reported="github.com/NVIDIA-NeMo/Automodel/pull/3817 (experts by name); "
        "alibaba/Pai-Megatron-Patch, 397 (a shared expert's gate)",
    ),
    "twice": dict(
        what="under TP the output of the shared expert is summed over tp a second time",
        old="""\
    return moe
""",
        new="""\
    moe.shared_expert.register_forward_hook(
        lambda mlp, x, y: lesson01.ReduceFromTP.apply(y, groups["tp"])
    )
    return moe
""",
        flags="--tp 2",
        symptom="the loss of step 1 is wrong: the shared expert counts T times",
        why="its down_proj has summed the partial outputs already, so all ranks of tp "
        "hold the complete output",
        reported="github.com/RBLN-SW/vllm-rbln/pull/960",
    ),
    "inverse": dict(
        what="rows are sorted a second time by `order`, instead of by its inverse",
        old="""\
        y = undo_sort(y, order)
""",
        new="""\
        y = y[order]
""",
        symptom="no error; losses are wrong: tokens get the outputs of other tokens",
        why="y[order] undoes a sort only if order is its own inverse. With one expert "
        "per rank nothing is sorted, so a small test passes",
        reported="github.com/tile-ai/TileOPs/pull/640",
    ),
    "empty": dict(
        what="a rank whose experts get no rows returns a new, empty tensor",
        old="""\
        y = lesson01.ReduceFromTP.apply(partial_y, self.tp_group)  # g
""",
        new="""\
        y = lesson01.ReduceFromTP.apply(partial_y, self.tp_group)  # g
        if len(y) == 0:
            y = y.new_empty(y.shape)
""",
        symptom="training works until a rank gets no rows; then backward hangs",
        why="the new tensor has no history, so this rank does not call the "
        "all-to-alls of backward, and the others wait for it",
        reported="github.com/PaddlePaddle/PaddleFormers/pull/3010; "
        "NVIDIA/Megatron-LM, 4851",
    ),
    "norm": dict(
        what="squares are not summed over ep: a norm lacks a part of the gradient",
        file="beyond/expert_norm.py",
        old="""\
    for axis in ("ep", "tp"):
        total = lesson00.all_reduce(total, groups[axis])
""",
        new="""\
    total = lesson00.all_reduce(total, groups["tp"])
""",
        symptom="gradients are right; norms differ between ranks, so replicas diverge",
        why="the squares of an expert's gradient are on its owner, and those of a "
        "replicated one are divided by R on each rank: the sum over ep completes both",
        reported="github.com/NVIDIA-NeMo/Automodel/pull/3817; NVIDIA/Megatron-LM, 5916",
    ),
}
