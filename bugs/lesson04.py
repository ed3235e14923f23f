"""Bugs of lesson 04: edits of a few lines that people have shipped."""

BUGS = {
    "norms": dict(
        what="gradients of LayerNorms and row-parallel biases are not summed",
        old="""\
    flat = all_reduce(partial_flat, tp_group)
""",
        new="""\
    flat = partial_flat
""",
        symptom="step 1's loss is correct; then replicas diverge, and losses drift",
        why="they are replicated, but each rank applied them to its own positions only",
        reported="github.com/NVIDIA/Megatron-LM/issues/443, 474, 1446; apex 1686",
        audit="gradient sum",
    ),
    "row-bias": dict(
        what="the row-parallel bias is added before the reduce-scatter",
        old="""\
        partial_y_BSD = F.linear(x_BSf, self.weight)
""",
        new="""\
        partial_y_BSD = F.linear(x_BSf, self.weight, self.bias)
        return self.reduce(partial_y_BSD, self.tp_group)
""",
        symptom="the loss of TP and of TP + SP is wrong from step 1 on; with biases "
        "of zero it is correct, but under SP their gradients are T times too large",
        why="the sum over ranks adds the bias T times instead of once",
        reported="github.com/huggingface/text-generation-inference/issues/1036",
        audit="forward bias",
    ),
    "length": dict(
        what="a batch whose length T does not divide is not padded",
        old="""\
    missing = -tokens_BS.shape[1] % ranks
""",
        new="""\
    missing = 0
""",
        symptom="nothing fails until such a length occurs; then an error about sizes",
        why="a reduce-scatter requires slices of the same size on all ranks",
        reported="github.com/pytorch/torchtitan/issues/1306, DeepSpeed issue 5177",
    ),
    "rotary": dict(
        what="rotary positions are counted from the start of each slice",
        old="""\
    model.embed_tokens.reduce = reduce_scatter_sequence
""",
        new="""\
    model.embed_tokens.reduce = reduce_scatter_sequence
    s = full.config.seq_len // tp_group.size()
    position_S = torch.arange(len(model.cos), device=model.cos.device) % s
    model.cos, model.sin = model.cos[position_S], model.sin[position_S]
""",
        symptom="no error; the loss differs slightly with random weights, and by more "
        "with trained ones",
        why="the first token of rank t has the position t·s in the sequence, not 0",
        reported="github.com/NVIDIA/Megatron-LM/issues/560 (of context parallelism)",
        audit="buffer",
    ),
    "mask": dict(
        what="all slices of the sequence use the same dropout mask",
        old="""\
    # The layer drops elements of a [B, s, D]: each rank must use its slice of the mask.
    layer.dropout = ShardedDropout(layer.dropout.p, 1, tp_group)
""",
        new="""\
    # The layer drops elements of a [B, s, D]: each rank must use its slice of the mask.
    layer.dropout = Dropout(layer.dropout.p)
""",
        symptom="it trains, but gradients and losses differ from the reference",
        why="all ranks have one seed, so each must slice the mask of all positions",
        reported="github.com/NVIDIA/Megatron-LM/issues/206",
        audit="dropout same",
    ),
    "split": dict(
        what="the backward of the gather takes a slice without summing first",
        old="""\
        grad_BsD = reduce_scatter(partial_grad_BSD, 1, ctx.tp_group)
""",
        new="""\
        grad_BsD = shard(partial_grad_BSD, 1, ctx.tp_group)
""",
        symptom="the loss of step 1 and the gradients of lm_head are correct, the "
        "other gradients are not",
        why="each rank used the gathered x with its own columns of W, so it has a "
        "partial dL/dx for every position",
        reported="github.com/NVIDIA/Megatron-LM/issues/1635, pytorch issue 153016",
        audit="backward slice",
    ),
    "product": dict(
        what="backward of down_proj gathers dL/dy · W, not dL/dy",
        old="""\
    layer.mlp.down_proj.reduce = reduce_scatter_sequence
""",
        new="""\
    layer.mlp.down_proj.reduce = reduce_scatter_sequence

    def gather_the_product(linear, grads_of_x, grads_of_y):
        return (all_gather(grads_of_y[0] @ linear.weight, 1, tp_group),)

    layer.mlp.down_proj.register_full_backward_hook(gather_the_product)
""",
        symptom="losses drift from step 2 on: gradients of the last up_proj and of all "
        "before it are wrong; step 1's loss is right, and replicas agree",
        why="a rank needs dL/dy of all positions times its own columns of W. Here each "
        "position was multiplied by the columns of the rank that holds it: all ranks "
        "get the same dL/dx, right at a rank's own positions only",
        reported="github.com/huggingface/nanotron/issues/46 and pull 172",
    ),
    "keywords": dict(
        what="PyTorch's plan sets layouts of positional inputs; the call uses keywords",
        old="""\
        input_kwarg_layouts={keyword: Shard(1)},
        desired_input_kwarg_layouts={keyword: Replicate()},
""",
        new="""\
        input_layouts=Shard(1), desired_input_layouts=Replicate()
""",
        symptom="an error in the first forward: inputs and input_layouts do not match",
        why="a module that is called with keywords only has no positional inputs",
        reported="github.com/pytorch/pytorch/pull/124114 (added input_kwarg_layouts)",
    ),
    "dtensor-loss": dict(
        what="PyTorch's plan: dist.all_reduce of a loss that is a DTensor",
        old="""\
    return mean_loss(logits, target_BS).full_tensor()
""",
        new="""\
    loss = mean_loss(logits, target_BS)
    dist.all_reduce(loss)
    return loss
""",
        symptom="an error: no sharding strategy for it (older PyTorch: no DeviceMesh)",
        why="a DTensor knows what is left to sum, and .full_tensor() does it; after "
        ".to_local() an all-reduce would count a replicated loss T times",
        reported="github.com/pytorch/pytorch/issues/152712, torchtitan pull 779",
    ),
    "tiled": dict(
        what="PyTorch's plan: SequenceParallel gets a replicated tensor",
        old="""\
        input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=local
""",
        new="""\
        input_layouts=Replicate(), output_layouts=Replicate(), use_local_output=local
""",
        symptom="x is T·S long after the first norm: an error about sizes follows",
        why="SequenceParallel treats a plain tensor as this rank's slice",
        reported="github.com/pytorch/pytorch/issues/129355, examples issue 1271",
    ),
}
