"""Bugs of script 13: edits of a few lines that people have shipped."""

BUGS = {
    "plain": dict(
        what="a plain all-gather of the bias, which autograd does not track",
        old="""\
        b_f = lesson01.AllGatherWithGrad.apply(self.bias, 0, self.outer)
""",
        new="""\
        b_f = lesson00.all_gather(self.bias, 0, self.outer)
""",
        symptom="no error; up_proj.bias of FSDP and 2D has no gradient and never moves",
        why="the gathered tensor has no history; gradients still flow through the "
        "rest of the graph, so nothing reports the gap",
        reported="github.com/pytorch/pytorch/issues/190419; pytorch/pytorch, 153016; "
        "lucidrains/vector-quantize-pytorch, 158",
    ),
    "average": dict(
        what="a rank's loss is not divided by the number of slices of the batch",
        old="""\
        loss = lesson01.squared_error(y, target) / outer.size()
""",
        new="""\
        loss = lesson01.squared_error(y, target)
""",
        ranks=4,
        symptom="the loss of step 1 is correct; gradients of FSDP are T times too "
        "large, those of 2D as many times as outer has ranks",
        why="each rank's loss is a mean over its own samples, and the reduce-scatters "
        "of backward add the ranks' gradients up: they do not average",
        reported="arXiv:1910.02054; docs.pytorch.org, FSDP's gradient reduction",
    ),
}
