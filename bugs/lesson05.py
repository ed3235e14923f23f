"""Bugs of lesson 05: edits of a few lines that people have shipped."""

BUGS = {
    "order": dict(
        what="a stage waits for each of its messages to be received",
        old="""\
    return message
""",
        new="""\
    wait_for(message)
    message.works.clear()  # nothing is left to wait for
    return message
""",
        symptom="two neighbors wait for each other until the timeout; not with gpipe",
        why="activation and gradient cross, and neither stage gets to its receive",
        reported="github.com/pytorch/pytorch/issues/109401, NVIDIA/nccl issue 479",
    ),
    "mixed-up": dict(
        what="the last stage takes its micro-batches in another order than the others",
        old="""\
        actions += [("forward", warm_up + i), ("backward", i)]
""",
        new="""\
        # the last stage has no stage after it, so it may begin anywhere
        first = M - 1 - i if warm_up == 0 else warm_up + i
        actions += [("forward", first), ("backward", first - warm_up)]
""",
        symptom="a stage gets another micro-batch than its next action is about",
        why="messages arrive in the order in which they were sent, whatever is in them",
        reported="github.com/NVIDIA/Megatron-LM/pull/1451",
    ),
    "shape": dict(
        what="TP receivers guess the shape of the batch (--ragged is on)",
        old="""\
        shape = broadcast(shape, 0, groups["tp"]).tolist()
""",
        new="""\
        rows = args.batch_size // args.dp // args.microbatches
        shape = [2, rows, args.seq_len]
""",
        flags="--tp 2 --ragged",
        symptom="memory behind rows is read as tokens; or an abort, or a rank waits",
        why="one rank sends the trimmed batch, the others receive into larger buffers",
        reported="github.com/NVIDIA/Megatron-LM/pull/4103",
    ),
    "data": dict(
        what="each rank of a TP group shuffles its batch for itself",
        old="""\
    return received
""",
        new="""\
    return [x.roll(groups["tp"].rank(), 1) for x in received]
""",
        flags="--tp 2",
        symptom="no error; loss and gradients of step 1 are already wrong",
        why="a TP group is one model: its sums mix partial results of different rows",
        reported="github.com/deepspeedai/DeepSpeed/issues/7199",
    ),
    "micro": dict(
        what="micro-batch losses are averaged, whatever number of targets each has",
        old="""\
        return part_of_mean(loss_bS, self.batch_targets)
""",
        new="""\
        parts = self.args.microbatches * self.groups["dp"].size()
        return loss_bS.sum() / (target_bS != IGNORE).sum() / parts
""",
        symptom="loss and gradients are slightly off; right without padding",
        why="in a mean of means a token counts more where there is much padding",
        reported="github.com/meta-pytorch/torchtune/pull/1875, torchtitan issue 2972",
    ),
    "norm": dict(
        what="the global norm counts replicated parameters once per TP rank",
        old="""\
        if not sharding_of(p):
            squares /= tp_group.size()  # all T ranks add the same squares
""",
        new="",
        flags="--tp 2",
        symptom="loss and gradients of step 1 are right; the norm is too large",
        why="the sum over tp contains the squares of replicated elements T times",
        reported="github.com/ROCm/TransformerEngine/pull/715, NVIDIA-NeMo/RL pull 3788",
    ),
    "tied": dict(
        what="gradients of a weight tied over two stages are not summed",
        file="beyond/tied_stages.py",
        script="beyond/tied_stages.py",
        old="""\
            grad = lesson00.all_reduce(self.tied.grad, self.groups["embedding"])
            self.tied.grad = grad
""",
        new="",
        symptom="the first loss is right; the embedding's gradient lacks the head's",
        why="a weight with two uses gets the sum of two gradients, wherever they arise",
        reported="github.com/uw-syfi/piper/issues/13",
    ),
    "replicas": dict(
        what="gradients are averaged over replicas with different numbers of targets",
        old="""\
    return all_reduce(targets, dp_group).item()
""",
        new="""\
    return targets.item() * dp_group.size()
""",
        flags="--dp 2",
        symptom="loss and gradients are slightly off, by another factor in each step",
        why="each replica divides by its own targets, so all replicas weigh the same",
        reported="github.com/pytorch/torchtitan/pull/2206",
    ),
    "group": dict(
        what="gradients are summed over tp instead of dp",
        old="""\
        all_reduce_gradients(self.stage_module, self.groups["dp"])
""",
        new="""\
        all_reduce_gradients(self.stage_module, self.groups["tp"])
""",
        flags="--dp 2",
        symptom="the loss of step 1 is right, every gradient wrong; replicas diverge",
        why="over dp gradients stay partial; over tp different slices are added up",
        reported="github.com/ooples/AiDotNet/pull/393",
    ),
}
