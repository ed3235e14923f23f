"""Bugs of script 11: edits of a few lines that people have shipped."""

BUGS = {
    "stale": dict(
        what="in backward every step uses this rank's own keys and values",
        old="""\
            if step < C - 1:
                kv = pass_on(kv, ctx.cp_group)
""",
        new="",
        symptom="the loss of step 1 is right, later ones are off by 1e-4 at first; "
        "gradients of q_proj and k_proj are off by about their own size",
        why="a block of another rank's keys needs these keys in backward, so they "
        "have to travel again. The loss hides it: it is computed forward, and most of "
        "the update is right, because q and k get a small part of all gradients at "
        "first",
        reported="github.com/huggingface/diffusers/issues/14265",
        audit="backward of a module",
    ),
    "home": dict(
        what="a rank drops the gradients of keys and values of other ranks",
        old="""\
                grad_kv[:, :, :, block.keys] += to_kv
""",
        new="""\
                if owner == rank:
                    grad_kv[:, :, :, block.keys] += to_kv
""",
        symptom="step 1's loss and dL/dq are right; dL/dk and dL/dv are too small, "
        "most of all at early positions",
        why="a key is used by the queries of all later ranks: its gradient is a sum "
        "over ranks",
        reported="github.com/NVIDIA/TransformerEngine/issues/1557 (wrong dQ, dK, dV)",
        audit="backward of a module",
    ),
    "lse": dict(
        what="backward normalizes the weights of each block by that block only",
        old="""\
    weights_BNij = (scores_BNij - lse).exp()
""",
        new="""\
    weights_BNij = scores_BNij.softmax(-1)
""",
        symptom="the loss of step 1 is right; gradients are too large: of q on all "
        "ranks that see more than one block, of k and v on all ranks",
        why="the weights of a block sum to 1 then, instead of to its share of Σ exp",
        reported="github.com/meta-pytorch/attention-gym/pull/200 (lse in wrong units)",
        audit="backward of a module",
    ),
    "positions": dict(
        what="each rank counts its rotary positions from 0",
        old="""\
    cos_sH = tables[0][here]
    sin_sH = tables[1][here]
""",
        new="""\
    cos_sH = tables[0][: q.shape[1]]
    sin_sH = tables[1][: q.shape[1]]
""",
        symptom="no error; the loss of step 1 differs slightly: distances between "
        "tokens of different ranks are wrong. Ulysses is right",
        why="the angle of a key depends on its position in the full sequence",
        reported="github.com/NVIDIA/Megatron-LM/issues/560",
        audit="forward right on",
    ),
    "count": dict(
        what="each rank divides its loss by its own number of targets",
        old="""\
    targets = lesson00.all_reduce((target_Bs != lesson02.IGNORE).sum(), cp_group)
""",
        new="""\
    targets = (target_Bs != lesson02.IGNORE).sum() * cp_group.size()
""",
        symptom="the loss is wrong, and nan if a rank has no target",
        why="the mean of means is another number: ranks with few targets would count "
        "as much as ranks with many",
        reported="github.com/verl-project/verl/pull/6049",
        audit="loss",
    ),
    "sum": dict(
        what="gradients are not summed over CP ranks",
        old="""\
    lesson05.all_reduce_gradients(model, cp_group)
""",
        new="",
        symptom="step 1's loss is right; then replicas of all parameters differ",
        why="each rank has the gradient from its own positions only",
        reported="github.com/EleutherAI/gpt-neox/pull/1299 (adds the sum over cp)",
        audit="gradient sum",
    ),
    "average": dict(
        what="gradients are averaged over CP ranks, as data parallelism does",
        old="""\
    lesson05.all_reduce_gradients(model, cp_group)
""",
        new="""\
    lesson05.all_reduce_gradients(model, cp_group)
    for p in model.parameters():
        p.grad /= cp_group.size()
""",
        symptom="all gradients are C times too small; clipping and AdamW hide most of "
        "that in the losses",
        why="cp_loss divided by the number of all targets already: 1/C comes twice",
        reported="github.com/NVIDIA/Megatron-LM/issues/673",
        audit="gradient factor",
    ),
    "shift": dict(
        what="targets are shifted after the sequence was split",
        old="""\
    return tokens_BS[:, here], target_BS[:, here]
""",
        new="""\
    tokens_Bs = tokens_BS[:, here]
    target_Bs = tokens_Bs.roll(-1, 1)
    is_padding = target_Bs == lesson02.PAD
    return tokens_Bs, target_Bs.masked_fill(is_padding, lesson02.IGNORE)
""",
        symptom="the loss is slightly wrong: each chunk's last target is a wrong token",
        why="the token that follows a chunk is on another rank",
        reported="github.com/NVIDIA-BioNeMo/bionemo-recipes/pull/1449",
        audit="loss",
    ),
}
