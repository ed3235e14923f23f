"""Bugs of script 09: edits of a few lines that people have shipped."""

BUGS = {
    "copies": dict(
        what="ranks that hold the same key/value head do not sum its gradients",
        old="""\
        p.register_hook(sum_up)
""",
        new="",
        symptom="step 1's loss is right; gradients of k and v are not, replicas differ",
        why="each replica has the gradient from its own rank's queries: 1 of c "
        "partial gradients",
        reported="github.com/bigcode-project/Megatron-LM/pull/12 (biases differed)",
        audit="gradient sum",
    ),
    "input": dict(
        what="f is applied to the input of q only, because k and v are replicated",
        file="02_transformer_tp.py",
        old="""\
    x_BSD = CopyToTP.apply(x_BSD, linears[0].tp_group)
    return apply_each(x_BSD, *linears)
""",
        new="""\
    q_proj, k_proj, v_proj = linears
    q = q_proj(CopyToTP.apply(x_BSD, q_proj.tp_group))
    return [q, k_proj(x_BSD), v_proj(x_BSD)]
""",
        symptom="step 1's loss and the last layer's gradients of q, k and v are "
        "right; LayerNorms in front of attention get a different gradient on each "
        "rank",
        why="keys and values of a rank serve its own queries only, so dL/dx through "
        "them is partial as well",
        reported="github.com/bigcode-project/Megatron-LM/issues/35 and pull 36",
        audit="gradient differs between replicas",
    ),
    "twice": dict(
        what="gradients of key/value heads are summed over replicas a second time",
        old="""\
        p.replica_group = replica_group
""",
        new="""\
        p.replica_group = replica_group
        p.register_hook(sum_up)
""",
        symptom="replicas stay equal, but gradients of k and v are c times too large",
        why="after the first sum they are complete: another sum multiplies them by c",
        reported="github.com/inclusionAI/AReno/pull/496; NVIDIA/Megatron-LM, 6839",
        audit="gradient factor",
    ),
    "order": dict(
        what="heads are repeated as 0 1 0 1 instead of 0 0 1 1: rank t gets t % K",
        old="""\
        heads = heads.repeat_interleave(copies, 0)
""",
        new="""\
        heads = torch.cat([heads] * copies)
""",
        ranks=4,
        symptom="shapes fit; the loss is wrong from step 1 on, except with K = 1",
        why="a rank's queries attend to a key/value head that belongs to other queries",
        reported="github.com/onnx/onnx/pull/7274",
    ),
    "norm": dict(
        what="the norm has lesson 02's rule: a parameter is sharded or replicated",
        old="""\
        if lesson01.sharding_of(p):
            c //= lesson01.sharding_of(p)[1].size()
""",
        new="""\
        if lesson01.sharding_of(p):
            c = 1
""",
        symptom="gradients of step 1 are right, but norms are too large",
        why="the sum over the TP group has the squares of a key/value head c times",
        reported="github.com/ROCm/TransformerEngine/pull/715; NVIDIA-NeMo/RL, 3788",
        audit="norm",
    ),
}
