"""Bugs of script 18: edits of a few lines that people have shipped."""

BUGS = {
    "pieces": dict(
        what="a piece is the next 1/Q of the sequence, and is scattered over the ranks",
        old="""\
            x = parts[rank * pieces + i]
""",
        new="""\
            x = parts[i * T + rank]
""",
        symptom="all shapes are right; positions are mixed up, so losses are wrong",
        why="each rank gets a part of every piece, and these are 1/Q of the sequence "
        "apart; its x has neighbors, so its output belongs to other positions",
        reported="github.com/THUDM/slime/issues/1871 (of context parallelism)",
    ),
    "partial": dict(
        what="head and loss in pieces: a partial dL/dh is passed on as complete",
        old="""\
    grad_BSD = lesson00.all_reduce(leaf_BSD.grad, tp_group)
""",
        new="""\
    grad_BSD = leaf_BSD.grad
""",
        symptom="the loss and the head's gradients are right; all other gradients "
        "lack what the other ranks' columns contribute",
        why="the pieces' gradients were collected in a buffer that was taken to be "
        "replicated, as h is; each rank's is one of T partial sums",
        reported="github.com/pytorch/torchtitan/pull/3412",
    ),
}
