"""Bugs of lesson 03: edits of a few lines that people have shipped."""

BUGS = {
    "ignored": dict(
        what="the gradient rows of ignored positions are not set to zero",
        old="""\
        grad_BSv = grad_BSv.where(valid_BS.unsqueeze(-1), 0)
""",
        new="",
        symptom="the loss of step 1 is correct, because an ignored position has loss "
        "0; its gradient is not 0, so the losses diverge from step 2 on",
        why="dloss/dx = softmax − onehot is not zero where the loss was masked to zero",
        reported="docs.pytorch.org, torch.nn.functional.cross_entropy, ignore_index",
        audit="loss backward",
    ),
    "mean": dict(
        what="the mean is taken over all positions, also those without a target",
        old="""\
    return loss_BS.sum() / (target_BS != IGNORE).sum()
""",
        new="""\
    return loss_BS.mean()
""",
        symptom="loss and gradients are too small by the share of ignored positions; "
        "clipping to a norm hides this in the parameters, and AdamW most of it",
        why="an ignored position adds 0 to the sum but must not add 1 to the count",
        reported="docs.pytorch.org, torch.nn.functional.cross_entropy, reduction",
        audit="loss",
    ),
    "gathered": dict(
        what="gathered logits are passed to the loss that requires sharded ones",
        old="""\
    check_tokens(target_BS[target_BS != ignore_index], vocab_size)
""",
        new="""\
    check_tokens(target_BS[target_BS != ignore_index], vocab_size)
    last = logits_BSv.dim() - 1
    logits_BSv = GatherFromTP.apply(logits_BSv, last, tp_group)
    vocab_size = logits_BSv.shape[-1] * tp_group.size()
""",
        symptom="the loss is too large by log T at least, whatever the model does; "
        "spare columns add a little to it, and get gradients",
        why="every rank passes in all of Σ exp, so the sum over ranks is T times too "
        "large; V is read off the shape, so no column is treated as spare",
        reported="github.com/NVIDIA/Megatron-LM/issues/7452",
        audit="loss",
    ),
    "spare": dict(
        what="spare columns of the logits take part in the softmax",
        old="""\
        spare_v = token_v >= vocab_size  # columns that are no token
""",
        new="""\
        spare_v = torch.zeros_like(token_v, dtype=torch.bool)
""",
        symptom="the loss is slightly too large (less with a larger vocabulary), and "
        "the head's spare rows get gradients",
        why="a spare column has the logit 0, not −∞: each sum has an extra term",
        reported="github.com/mirage-project/mirage/issues/751, vllm-project/vllm 1399",
        audit="loss",
    ),
    "max": dict(
        what="the largest logit is not subtracted",
        old="""\
        max_BS = all_reduce(x_BSv.amax(-1), tp_group, dist.ReduceOp.MAX)
""",
        new="""\
        max_BS = torch.zeros_like(x_BSv[..., 0])
""",
        symptom="losses are correct while logits are small; large logits give inf or "
        "nan, and the loss makes two all-reduces instead of three",
        why="exp(x) overflows float32 above x = 88; exp(x − max) is at most 1",
        reported="Megatron-LM, arXiv:1909.08053, sec. 3: the first of its all-reduces",
    ),
    "exponentials": dict(
        what="the exponentials are saved for backward instead of the softmax",
        old="""\
        softmax_BSv = exp_BSv / sum_BS.unsqueeze(-1)
""",
        new="""\
        softmax_BSv = exp_BSv
""",
        symptom="the loss of step 1 is correct, but the gradients are too large by a "
        "factor of about Σ exp, which grows with the vocabulary",
        why="the gradient is softmax − onehot, and exp is Σ exp times the softmax",
        reported="github.com/xrsrke/pipegoose",
        audit="loss backward",
    ),
    "tie": dict(
        what="tied weights are two parameters with one storage (--tie is set as well)",
        old="""\
        # One parameter with two uses: autograd adds up the gradients of both.
        model.lm_head.weight = model.embed_tokens.weight
""",
        new="""\
        # One parameter with two uses: autograd adds up the gradients of both.
        model.lm_head.weight.data = model.embed_tokens.weight.data
""",
        flags="--tie",
        symptom="the loss of step 1 is correct; the embedding's gradient lacks the "
        "contribution of the head, and there is one parameter too many",
        why="one parameter with two uses gets the sum of both gradients; two "
        "parameters with one storage get one gradient and one update each",
        reported="github.com/pytorch/torchtitan/issues/1524; NVIDIA/Megatron-LM, 844",
        audit="gradient tied",
    ),
    "loss-parallel": dict(
        what="with PyTorch's loss_parallel, backward is called outside the context",
        old="""\
            with parallel.loss_parallel():
                runs["DTensor"] = train("DTensor", model, loss_of=reference)
""",
        new="""\

            def loss_within(logits, target_BS):
                with parallel.loss_parallel():
                    return reference(logits, target_BS)

            runs["DTensor"] = train("DTensor", model, loss_of=loss_within)
""",
        symptom="backward raises an error from deep inside PyTorch",
        why="the context replaces the kernels of log-softmax and of the loss by ones "
        "for sharded logits, also in backward; outside it the ordinary ones run",
        reported="github.com/pytorch/pytorch/issues/190746",
    ),
}
