"""The faults that the audit knows, one definition each.

To add one: choose the subject that shows it (subjects.py), write a test that is true of
this fault alone, and put the definition before the more general ones, because a subject
gets the first fault whose test is true. Then give tests/audit_models.py a model with
this bug: it must be red without the new definition, and no right model may turn red.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .compare import Kind
from .subjects import (
    Accumulated,
    Buffer,
    Dropped,
    Flow,
    Gradient,
    Loss,
    Missing,
    Optimizer,
    OtherBatch,
    Output,
    Parameter,
    Recomputed,
    Start,
    State,
    Step,
    TrainBuffer,
    TrainLoss,
    TrainMode,
    TwoPasses,
    Update,
)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault: what it is, how it is recognized, and what to do."""

    of: type  # what the test looks at
    key: str
    test: Callable  # of a subject; true, or what was seen in words
    what: str  # is wrong
    change: str  # the line to look at; {modules} are those that return a wrong gradient
    where: str  # the course explains it
    change_alone: str = ""  # the line to look at, if no such modules are known


NAN = (
    "A rank whose part has no element divides 0 by 0 (no target, no token, a mask of "
    "nothing): sum over the ranks what is divided and the counts, then divide."
)

WAIT = (
    "Call wait() on what all_reduce(…, async_op=True) returns before its result is "
    "read, also in backward. Otherwise look for what is stored from one pass to the "
    "next: a buffer, a cache, a hook."
)


def kind(wanted: Kind) -> Callable:
    """A test: is the subject related to the full model in this way?"""
    return lambda subject: subject.kind is wanted


FAULTS = [
    # ---- Batch, model and parameters
    Fault(of=Start, key="batch", test=Start.other_batch,
        what="The ranks of a TP group have different batches. They compute one model "
        "together, so partial sums of different tokens are added up.",
        change="Seed the data by the data-parallel rank, or broadcast the batch in "
        "the group.",
        where="lesson 02, bug data"),
    Fault(of=Start, key="build", test=Start.other_model,
        what="build() uses random numbers that differ between ranks, so the ranks "
        "start from different models.",
        change="Build with the same seed on all ranks, or broadcast the parameters.",
        where="lesson 02, bug seed"),
    Fault(of=Parameter, key="not a piece", test=Parameter.unknown_elements,
        what="The values of this parameter are in no parameter of the full model: "
        "this rank has initialized it itself, or has combined, scaled or rounded it.",
        change="Slice the full parameter instead of initializing the shard (with "
        "random values: from_full copies the full model's into it). What every rank "
        "has in full is to be the same everywhere: broadcast it from one rank.",
        where="lesson 02, bug seed"),
    Fault(of=Missing, key="missing", test=Missing.in_words,
        what="Some elements of the full model are on no rank, and others probably "
        "twice.",
        change="Check which slice each rank takes: the group rank, the dim, the order "
        "of blocks in a fused weight, the experts of each rank.",
        where="lesson 02, bug qkv"),
    Fault(of=Parameter, key="wrong parameter", test=Parameter.foreign,
        what="This parameter holds elements that belong to another parameter of the "
        "full model.",
        change="A fused weight (q, k, v or gate, up) must be split into its parts "
        "first, and each part into T slices. An expert must be on the rank that calls "
        "it.",
        where="lesson 02, bug qkv"),
    Fault(of=Parameter, key="other rows than its weight", test=Parameter.other_rows,
        what="Two parameters of one module hold different rows of the full model: "
        "they are split in different ways.",
        change="Slice weight and bias of a module, or keys and their norm, in the same "
        "way, with the same blocks: if the weight is one slice, so is the bias. Ranks "
        "that share a key/value head hold its part of the norm.",
        where="lesson 02, bug qkv"),
    Fault(of=Buffer, key="buffer", test=Buffer.wrong,
        what="This buffer (a table of positions, a mask, a codebook) is not that of "
        "the full model, nor each rank's slice of it.",
        change="Rank t takes its own slice (a table of positions starts at its "
        "offset, not at 0). If the module gathers the sequence first, it needs the "
        "full table. A buffer that is not in the state dict (persistent=False) is "
        "neither loaded nor sent with it: each rank computes it, or rank 0 sends it.",
        where="lesson 04, bug rotary"),
    Fault(of=Parameter, key="wrong piece", test=Parameter.others_piece,
        what="A rank holds the piece of another rank.",
        change="Take the slice of the group rank, also of scales and zero points. If "
        "they are split rightly, a broadcast may overwrite them: "
        "DistributedDataParallel sends the parameters of its first rank to all "
        "others. With c ranks per key/value head, rank t holds head t // c.",
        where="notebook 12, fault 3; beyond/09, bug order"),
    # ---- Forward
    Fault(of=Output, key="forward", test=kind(Kind.NAN),
        what="This is the first tensor that is nan.",
        change=NAN,
        where="lesson 03, bug ignored"),
    Fault(of=Output, key="forward bias", test=kind(Kind.BIAS),
        what="The output of this module is right but for its bias, which was added on "
        "every rank before a sum (T times), or not at all (0 times).",
        change="Add the bias of a row-parallel linear once, after the all-reduce.",
        where="lesson 01, bug bias"),
    Fault(of=Output, key="forward partial", test=kind(Kind.PARTIAL),
        what="The sum of this tensor over the ranks is right, so each rank has only a "
        "partial sum: an all-reduce is missing.",
        change="All-reduce the output of this row-parallel module (g).",
        where="lesson 01, ReduceFromTP"),
    Fault(of=Output, key="forward factor", test=kind(Kind.FACTOR),
        what="The tensor is right up to a factor.",
        change="T times: what every rank has in full was summed over the ranks, or a "
        "sum was taken twice; reduce once, and only partial sums. 1/T: it was "
        "averaged instead of summed, or divided by a sum (a norm) that is T times too "
        "large. Another factor: a scale may depend on a local shape (a width, a "
        "number of heads or of tokens). A mean over what is sharded is divided by the "
        "number of elements of all ranks.",
        where="lesson 01, bug g; lesson 02, bug qkv"),
    Fault(of=Output, key="forward counted term", test=Output.counted_term,
        what="The tensor is right but for one of the tensors that are added in it.",
        change="T times: every rank has it in full (a residual, a shared expert), so "
        "add it after the sum over the ranks, not before, or split what has stayed in "
        "full by mistake; or it is summed twice. 0 times: this forward leaves it out. "
        "Another number: it is scaled by another factor, or is scaled and counts T "
        "times (LoRA's B).",
        where="lesson 01, bug bias"),
    Fault(of=Output, key="fused", test=Output.fused,
        what="What this module makes of the output of a fused weight is wrong. The "
        "weight may be split as if it were one matrix: rank 0 may have rows of its "
        "first part (q, gate) only.",
        change="Split it into its parts (q, k, v or gate, up) first, and each part "
        "into T slices. If its rows are in groups (q, k, v of a head, or gate and up "
        "of a unit, together), one slice is right: then read its output in the same "
        "order, and look at what else this forward does: its mask (is_causal), its "
        "scale, its positions.",
        where="lesson 02, bug qkv"),
    Fault(of=Output, key="forward of token ids", test=Output.of_ids,
        what="The model returns token ids, and they are wrong.",
        change="An argmax, a top-k or a sampling needs the columns of all ranks: "
        "gather the logits first, or reduce value and index together.",
        where="lesson 03"),
    Fault(of=Output, key="forward norm of a shard", test=Output.norm_of_shard,
        what="This norm gets a shard of its input, and may take the statistics of the "
        "shard for those of the full tensor.",
        change="GroupNorm on sharded channels: num_groups / T groups, so that a group "
        "has as many channels as in the full model. LayerNorm and RMSNorm over a "
        "sharded dim: sum the statistics over the ranks, or gather the input first.",
        where="lesson 02, bug qkv"),
    Fault(of=Output, key="buffer cut in another way", test=Output.other_cut,
        what="A buffer of this module is in full on every rank, and a tensor that it "
        "belongs to is sharded along a dim that both have.",
        change="Slice both along this dim (weights and their scales or zero points), "
        "or index the full one by the rank's offset.",
        where="lesson 02, bug qkv"),
    Fault(of=Output, key="forward in another order", test=kind(Kind.REORDERED),
        what="The ranks hold the right elements of this tensor in the wrong order or "
        "on the wrong ranks.",
        change="Check the dim and the order in which pieces are split, gathered and "
        "reshaped, and that each rank takes the piece of its own group rank.",
        where="lesson 00, section 6; lesson 02, bug qkv"),
    Fault(of=Output, key="forward right on", test=kind(Kind.SOME),
        what="This tensor is right on some ranks and wrong on others.",
        change="Look for what depends on the rank: an offset (positions, the first "
        "row of the vocabulary, a mask), an index of a slice (a table with an entry "
        "per head is sliced like the heads), the rows that a rank has of a fused "
        "weight (each of its parts is sliced), the positions of the rank before it "
        "that a convolution or a window needs, the seed of a dropout (a shard takes "
        "its part of the full mask), or a branch such as if rank == 0.",
        where="lesson 03; lesson 04, bug rotary"),
    Fault(of=Output, key="forward right but for rounding", test=kind(Kind.ROUNDED),
        what="This tensor is right but for rounding errors: the parallel model "
        "computes or sends it in a coarser format, and the full model does not.",
        change="Look for .float(), .bfloat16(), torch.float32 or a dtype in a "
        "constructor. If it is meant, let the full model do the same.",
        where="beyond/08, why the order of a sum changes last bits"),
    Fault(of=Output, key="forward of the code between", test=lambda o: o.point.is_input,
        what="The modules before return the right tensors, as far as they can be "
        "compared, and this module makes a wrong one of them.",
        change="Look at what this forward does between its modules, and at what it "
        "assumes about the shape: a mean, a scale or a number of heads may be that of "
        "the local shard. A table with an entry per head is sliced like the heads. An "
        "output of several parts (read by chunk or split) is gathered first, or each "
        "part is sharded. What every rank has in full (a bias, a shared expert) is "
        "added after a sum, not before.",
        where="lesson 02, bug qkv"),
    Fault(of=Output, key="forward of a partial sum", test=Output.partial_input,
        what="This module gets a partial sum, and what it makes of it is no part of "
        "the right sum.",
        change="All-reduce (g) what this module reads, behind the row-parallel module "
        "that returns it. If this module makes the sum itself, look at what it does "
        "before.",
        where="lesson 01, ReduceFromTP"),
    Fault(of=Output, key="forward of an embedding", test=Output.is_embedding,
        what="This embedding gets tokens and returns other rows than in the full "
        "model.",
        change="A sharded embedding gives 0 for tokens of other ranks before the sum "
        "(a mask), and its first row is rank · rows. If each rank has some of the "
        "features, gather them along the last dim. The tokens may be others, too (an "
        "argmax or a top-k over the columns of one rank).",
        where="lesson 03, section 1"),
    Fault(of=Output, key="forward", test=Output.is_same_on_all,
        what="This is the first module whose output is wrong, by as much on all ranks.",
        change="Look at what every rank adds before a sum (a bias, a shared expert), "
        "at what is done with its last tensor (a scale, a cap), at its parameters in "
        "the table (of a weight of several blocks, each block is sliced), and at what "
        "it assumes about a shape: a mean, a norm, a softmax, a number of heads or of "
        "experts (a capacity) may be that of the local shard.",
        where="lesson 01, bug bias; lesson 02, bug qkv; lesson 03, section 1"),
    Fault(of=Output, key="forward", test=lambda o: True,
        what="This is the first module whose output is wrong.",
        change="Look at its sums over the ranks (is one missing?), at which slice of "
        "its input it takes (t), at its parameters in the table (of a weight of "
        "several blocks, as of an LSTM's gates or behind a concatenation, each block "
        "is sliced), and at what it assumes about the shape of its input: a mean, a "
        "norm, a softmax, a number of heads may be that of the local shard. If it is "
        "wrong only behind the border of two ranks' slices, a convolution or a window "
        "lacks the positions of the other rank. If it is wrong at other places in each "
        "run, a result of an asynchronous collective may be used before wait().",
        where="lesson 02, bug qkv; lesson 03, section 1"),
    Fault(of=Loss, key="loss nan", test=Loss.is_nan,
        what="No compared output of a module is wrong, and the loss is nan.",
        change=NAN,
        where="lesson 03, bug ignored"),
    Fault(of=Loss, key="loss of each rank's part", test=Loss.is_part,
        what="No compared output of a module is wrong, and each rank returns the loss "
        "of its own part (of the tokens, or of the vocabulary).",
        change="Every rank is to return the loss of all: sum the parts over the ranks "
        "(g, whose backward does not sum) and divide by the number of all targets.",
        where="lesson 03; beyond/11"),
    Fault(of=Loss, key="loss of replicated logits", test=Loss.counts_columns_again,
        what="No compared output of a module is wrong, and the loss is log T too "
        "large: a loss of sharded logits gets logits that every rank has in full, so "
        "that its sum of exponentials counts every column T times.",
        change="Give it each rank's own columns, or take the plain cross entropy: is "
        "the head split by rows, or its output gathered?",
        where="lesson 03"),
    Fault(of=Loss, key="loss", test=Loss.is_same,
        what="No compared output of a module is wrong, and the loss is, by as much on "
        "all ranks.",
        change="Check by which count the loss is divided (all ranks' targets; label "
        "smoothing by all columns), whether padding of the vocabulary joins in, "
        "whether each rank looks up targets at its own offset, whether a second loss "
        "(of a router) that every rank has in full is summed or has another weight, "
        "and whether a norm of parameters (weight decay in the loss) is summed over "
        "their shards.",
        where="lesson 03"),
    Fault(of=Loss, key="loss", test=lambda loss: True,
        what="No compared output of a module is wrong, and each rank has another loss "
        "that is wrong.",
        change="A sum over the ranks is missing: of a softmax, a mean or an entropy "
        "over the vocabulary (a teacher's as well), which is over all ranks' columns; "
        "of a count; or of the logits of targets, which each rank looks up at its own "
        "offset.",
        where="lesson 03"),
    # ---- Backward
    Fault(of=Flow, key="backward nan", test=Flow.is_nan,
        what="The loss is right, and in backward this gradient is the first nan.",
        change=NAN,
        where="lesson 03, bug ignored"),
    Fault(of=Flow, key="backward slice", test=Flow.slicer,
        what="A tensor is gathered, and the gather's backward returns each rank's "
        "slice of its own partial gradient: what the other ranks computed for that "
        "slice is lost.",
        change="The backward of an all-gather in front of column-parallel linears or "
        "experts is a reduce-scatter: sum over the ranks, then slice. DTensor: "
        "full_tensor(grad_placements=[Partial()]).",
        where="lesson 04, bug split"),
    Fault(of=Flow, key="backward cut off", test=Flow.cut_off,
        what="This module gets its input without a gradient. In the full model, it "
        "returns a gradient to it.",
        change="Look in front of this module for detach(), no_grad(), or a collective "
        "that autograd does not track.",
        where="beyond/13, bug plain"),
    Fault(of=Flow, key="backward right but for rounding", test=Flow.is_rounded,
        what="The gradient that arrives here is right, and the one that is returned "
        "has rounding errors: this backward computes or sends it in a coarser format.",
        change="Look for a dtype in the collective's backward. If it is meant, let "
        "the full model do the same.",
        where="beyond/08, why the order of a sum changes last bits"),
    Fault(of=Flow, key="backward T times", test=Flow.summed_again,
        what="A gradient that every rank has in full is summed over the ranks in "
        "backward, so it counts T times: something that is not sharded reads the "
        "tensor behind f, or f is applied twice.",
        change="What every rank computes in full (a residual, a shared expert, a "
        "router) must read the tensor in front of f. Only what is sharded reads it "
        "behind f. If what reads it gathers its own output: this gather's backward "
        "takes the rank's slice and sums nothing.",
        where="lesson 01, bug g"),
    Fault(of=Flow, key="backward lost term", test=Flow.lost_term,
        what="A part of this gradient, which every rank has in full, counts 1/T times "
        "or not at all.",
        change="1/T: it is averaged over the ranks, or divided by T and not summed. "
        "0: look for detach(), no_grad(), or a backward that returns no gradient of "
        "this input.",
        where="lesson 01, the table of collectives and their backward"),
    Fault(of=Flow, key="backward of an untracked collective", test=Flow.untracked,
        what="The gradient that is returned here is wrong, and a collective in this "
        "forward gets a tensor with a gradient: autograd does not track it, so in "
        "backward it does nothing.",
        change="Write an autograd.Function with its backward. To do nothing is right "
        "for a sum of what only this rank has (g): what every rank has in full (the "
        "log of a softmax's sum) is added or subtracted after it.",
        where="beyond/13, bug plain; lesson 03"),
    Fault(of=Flow, key="backward of a module", test=Flow.backward_of,
        what="The gradient that arrives here is right, and the gradient that is "
        "returned is wrong: the fault is in this module's own backward.",
        change="Look at the backward of the functions and collectives that this "
        "module calls. What other ranks sent forward is needed again in backward; the "
        "gradient of what this rank received belongs to the rank that sent it, and is "
        "a sum over ranks (a gather in front of experts: sum, then slice; "
        "full_tensor(grad_placements=…)); the weights of a softmax over all ranks "
        "need the statistics of all; a sum of squares (a norm over a sharded dim) is "
        "all-reduced in both directions. Is a part cut off (detach(), no_grad() "
        "around the dispatch of tokens), or set to 0 under no_grad(), which backward "
        "does not see? If this module makes a second loss (of a "
        "router): one that every rank has in full reads nothing behind f and is not "
        "summed; if each rank has the one of its own tokens, counts and scales (of "
        "its gradient as well) are those of all tokens.",
        where="beyond/11, bugs stale, home and lse; lesson 01, the table of "
        "collectives and their backward"),
    Fault(of=Flow, key="loss backward", test=Flow.of_loss,
        what="The loss is right and its gradient is not: the gradient of the last "
        "module's output is wrong before any module has been through backward.",
        change="Look at the backward of the loss and of what the model does after its "
        "last module: masked positions, the division by the number of targets, what "
        "was saved for backward, a detach() of one term (of a logsumexp), a gather "
        "whose backward takes a slice without a sum, or sums what every rank has in "
        "full. The gradient of what a softmax, a mean or an entropy over sharded "
        "columns has summed is a sum over all ranks' columns. Under loss_parallel(), "
        "log_softmax has its backward in front of cross_entropy only. If each rank has "
        "the mean loss of its own data, gradients are averaged, not summed.",
        where="lesson 03, bugs ignored and exponentials"),
    Fault(of=Flow, key="backward partial", test=Flow.partial,
        what="Backward returns a partial sum to the output of this module: all or some "
        "of what reads it returns each rank's own part only.",
        change="All-reduce dL/dx in backward (f) where this output is read by "
        "{modules}.",
        change_alone="All-reduce dL/dx in the backward of what reads this output (f, "
        "in front of a column-parallel linear).",
        where="lesson 01, bug f"),
    # ---- Gradients of parameters
    Fault(of=TwoPasses, key="two passes differ", test=TwoPasses.differ,
        what="One batch has another gradient in each pass, with the same parameters: "
        "the result of an asynchronous collective may be used before wait() (a race), "
        "or the model uses something of the pass before.",
        change=WAIT,
        where="lesson 00, section 6"),
    Fault(of=Gradient, key="gradient frozen on the ranks", test=kind(Kind.NOT_TRAINED),
        what="The full model trains this parameter, and on the ranks it has "
        "requires_grad False.",
        change="Give each shard the requires_grad of the parameter that it is a piece "
        "of.",
        where="notebook 12, fault 6"),
    Fault(of=Gradient, key="gradient of a frozen parameter", test=kind(Kind.TRAINED),
        what="This parameter is frozen in the full model, and on the ranks it has a "
        "gradient.",
        change="Give each shard the requires_grad of the parameter that it is a piece "
        "of: a new nn.Parameter has True.",
        where="notebook 12, fault 6"),
    Fault(of=Gradient, key="gradient", test=kind(Kind.NAN),
        what="This gradient is nan.",
        change=NAN,
        where="lesson 03, bug ignored"),
    Fault(of=Gradient, key="gradient factor per rank", test=kind(Kind.FACTORS),
        what="Each rank's gradient is right up to a factor of its own.",
        change="Each rank divides by its own number (of tokens, of samples), or a "
        "rank's partial sum is scaled by the rank: divide by the number of all ranks.",
        where="notebook 12, fault 12"),
    Fault(of=Gradient, key="gradient factor", test=Gradient.is_scaled_after,
        what="The gradient that arrives at this parameter's module is right, and the "
        "parameter's is right up to a factor.",
        change="T: it was complete, and was summed once more: by a hook, after "
        "backward, or in the backward of a function inside of this module. 1/T: it "
        "was averaged there, or forward uses 1/T of this parameter on each rank (a "
        "bias / T) and nothing sums its gradients. 1/T for all parameters: they are "
        "divided by the tokens of all ranks, and averaged over the ranks as well.",
        where="lesson 01, bug g"),
    Fault(of=Gradient, key="gradient factor", test=kind(Kind.FACTOR),
        what="This gradient is right up to a factor.",
        change="T: summed twice, or g all-reduces in backward too, or the backward of "
        "a gather sums what every rank has in full, or other gradients are averaged "
        "over the ranks and this one is not. 1/T (or one by the number of ranks that "
        "hold the same piece): averaged instead of summed, or a bias is added as "
        "bias/T on every rank before a sum. The loss may be divided by the wrong "
        "number of targets.",
        where="lesson 01, bug g"),
    Fault(of=Gradient, key="missing sum over dp", test=Gradient.lacks_dp_sum,
        what="Ranks that hold the same piece of this parameter have different samples "
        "or tokens, and only the sum over them is right: the gradient is not summed "
        "over these ranks (dp).",
        change="Sum the gradient over the ranks that hold the same piece and have "
        "different data (the dp group), after backward. An all-reduce over tp adds up "
        "different pieces of a sharded weight.",
        where="lesson 05, MeshTraining.sum_gradients"),
    Fault(of=Gradient, key="missing average over dp", test=Gradient.lacks_dp_mean,
        what="This weight is sharded. Ranks that hold the same piece have different "
        "samples or tokens, and only the mean over them is right: the gradient is not "
        "averaged over these ranks (dp).",
        change="Average the gradient over the ranks that hold the same piece (the dp "
        "group), after backward. An average over tp mixes different pieces.",
        where="lesson 01, average_gradients; lesson 05, MeshTraining.sum_gradients"),
    Fault(of=Gradient, key="gradient sum", test=Gradient.is_shared_sum,
        what="The sum of this gradient over the ranks that hold the same piece is "
        "right, so each of them has only a partial gradient: a reduction is missing.",
        change="Sum this parameter's gradient over the ranks that hold the same piece "
        "(those that share a key/value head), not over all ranks. Of a fused weight, "
        "sum the rows that several ranks have, or use f on these rows in forward.",
        where="beyond/09"),
    Fault(of=Gradient, key="gradient sum", test=Gradient.is_left_out,
        what="The sum of this gradient over the ranks that hold the same piece is "
        "right, so each rank has only a partial gradient. Another parameter of the "
        "module has the right one.",
        change="If the other one's gradient is summed over the ranks (by a hook, after "
        "backward), sum this one in the same way. f in front of what reads the output "
        "would sum the other one's twice.",
        where="lesson 04, bug norms; beyond/09"),
    Fault(of=Gradient, key="gradient sum", test=Gradient.lacks_sum_in_tp,
        what="The sum of this gradient over ranks that have the same samples is "
        "right, so each of them has only a partial gradient: it is reduced over dp, "
        "and not over tp.",
        change="All-reduce dL/dx over the tp group in backward (f) where this output "
        "is read by {modules}.",
        change_alone="All-reduce dL/dx over the tp group in backward (f) in front of "
        "what is sharded and reads this output.",
        where="lesson 01, bug f; lesson 05, MeshTraining.sum_gradients"),
    Fault(of=Gradient, key="gradient sum", test=Gradient.is_read_without_f,
        what="The sum of this gradient over the ranks that hold the same piece is "
        "right, so each rank has only a partial gradient. A partial one arrives at "
        "this module, and no module returns it: a function or the loss does.",
        change="All-reduce dL/dx in backward (f) in what reads this output, and "
        "return the result.",
        where="lesson 01, bug f"),
    Fault(of=Gradient, key="gradient sum", test=kind(Kind.SUM),
        what="The sum of this gradient over the ranks that hold the same piece is "
        "right, so each rank has only a partial gradient: a reduction is missing.",
        change="All-reduce dL/dx in backward (f) where this output is read by "
        "{modules}.",
        change_alone="Sum the parameter's gradient over the ranks after backward (a "
        "replicated weight whose input is sharded). If dL/d(output of its module) is "
        "partial, f is missing in what reads that output.",
        where="lesson 01, bug f; lesson 04, bug norms"),
    Fault(of=Gradient, key="gradient mean", test=Gradient.lacks_mean_of_groups,
        what="The mean of this gradient over the replicas is right, and some replicas "
        "have the same gradient: it is not averaged between these groups of ranks.",
        change="Average over ranks that have different batches (dp): the first of "
        "each group together, then the second, … An average over the ranks of one "
        "group (tp) changes nothing.",
        where="notebook 12, fault 3"),
    Fault(of=Gradient, key="gradient mean", test=kind(Kind.MEAN),
        what="The mean of this gradient over the replicas is right, but they differ.",
        change="Average the gradient over the ranks that hold this parameter. Was it "
        "averaged over another group?",
        where="lesson 01, average_gradients"),
    Fault(of=Gradient, key="gradient scaled sum", test=kind(Kind.SCALED_SUM),
        what="The sum of this gradient over the ranks is right up to a factor.",
        change="A reduction is missing, and the loss or the sum is scaled.",
        where="lesson 01, bugs f and average"),
    Fault(of=Gradient, key="gradient of several pieces", test=Gradient.is_mixed_by_ddp,
        what="The ranks hold different pieces of this parameter, and their gradients "
        "were summed or averaged over the ranks.",
        change="Reduce gradients of sharded parameters over the data-parallel group "
        "only. DistributedDataParallel must get that group as process_group.",
        where="notebook 12, fault 3"),
    Fault(of=Gradient, key="gradient of several pieces", test=kind(Kind.MIXED),
        what="The ranks hold different pieces of this parameter (or different "
        "experts), and each has the sum of their gradients, or a multiple of it.",
        change="If its module's output is gathered: all ranks compute the same with "
        "it, so the gather's backward takes the rank's slice and sums nothing. "
        "Otherwise a sum after backward includes this sharded parameter.",
        where="lesson 01, GatherFromTP"),
    Fault(of=Gradient, key="gradient tied", test=kind(Kind.TIED),
        what="Two parameters hold pieces of one tied weight, and only the sum of "
        "their gradients is right: a tied weight has become two parameters.",
        change="Assign the same nn.Parameter to both modules after sharding, so name "
        "both in a plan. If they are on different ranks (a pipeline), sum the two "
        "gradients.",
        where="lesson 03, bug tie"),
    Fault(of=Gradient, key="gradient None", test=kind(Kind.NONE),
        what="Autograd did not reach this parameter: a collective that it does not "
        "track, detach(), or a copy of the parameter is used in forward.",
        change="Wrap the collective in an autograd.Function. Look for detach() and "
        "for copies in front of what uses this parameter, and for "
        "checkpoint(use_reentrant=True), which returns no gradient if none of its "
        "inputs needs one.",
        where="beyond/13, bug plain"),
    Fault(of=Gradient, key="gradient of its uses", test=kind(Kind.USES),
        what="This weight is tied: several modules use it, and their gradients are "
        "not summed with the same factor. Factors are means over the ranks that hold "
        "the same piece: 1 is complete, 1/T is a partial gradient that was not "
        "summed, T was summed twice, 0 was lost.",
        change="0: look for a detach() or a copy. 1/T: all-reduce dL/dx in the module "
        "that this use comes from (f), or sum the gradient of this use alone.",
        where="lesson 03, bug tie"),
    Fault(of=Gradient, key="gradient another rank's piece", test=kind(Kind.OTHERS),
        what="This rank has the gradient of another rank's piece.",
        change="Check the order of ranks in the group and the index of the slice in "
        "backward.",
        where="lesson 01, GatherFromTP"),
    Fault(of=Gradient, key="gradient of one row", test=Gradient.padding_row,
        what="One row of this parameter has a gradient on a rank and none in the full "
        "model, or the reverse.",
        change="padding_idx is a row of the full table. On rank t this is row "
        "padding_idx − t · rows of the shard, and only the rank that has the row has "
        "a padding_idx.",
        where="lesson 03, section 1"),
    Fault(of=Gradient, key="gradient reduced over other ranks",
        test=Gradient.is_reduced_wrongly,
        what="Ranks that hold the same piece have different gradients, although the "
        "right gradient arrives at this module, or ranks with different pieces have "
        "the same one: what is done with the gradient afterwards is wrong, or what "
        "uses the parameter outside of this module (its rows as a sharded head).",
        change="Look at the sums of gradients after backward: a sum over the wrong "
        "group (tp for dp) adds up pieces that do not belong together, and leaves "
        "replicas apart. If the loss has a derivative of the model in it (a gradient "
        "penalty), f and g are differentiated twice: each must be the other's "
        "backward.",
        where="notebook 12, fault 3"),
    Fault(of=Gradient, key="gradient differs between replicas",
        test=lambda g: g.kind is Kind.REPLICAS,
        what="Ranks that hold the same piece have different gradients, and their sum "
        "is not right either: some of what reads this module's output returns a "
        "complete gradient to it, and some a partial one.",
        change="All-reduce dL/dx in backward (f) where this output is read by "
        "{modules}.",
        change_alone="Look at what reads this parameter or its module's output: which "
        "of it has no all-reduce of dL/dx in backward (f)?",
        where="lesson 01, bug f; beyond/09, bug input"),
    Fault(of=Gradient, key="gradient unexplained", test=lambda g: True,
        what="This gradient is wrong in no simple relation to the right one.",
        change="Look at what {modules} does in backward: it is the first that returns "
        "a wrong gradient (a slice without a sum?).",
        change_alone="Look at how this module's forward, or the loss, uses the "
        "parameter (is a part of it detached?), and at the backward of the functions "
        "and collectives in it.",
        where="lesson 01, the table of collectives and their backward; lesson 04, bug "
        "split"),
    # ---- Several batches before a step
    Fault(of=OtherBatch, key="second batch", test=OtherBatch.wrong,
        what="The loss of batch(0) is right and that of batch(1) is not: the second "
        "batch takes another path through the model (by its length, its mask, its "
        "tokens), or the model still uses something of the first one.",
        change="Let batch(0) return this batch, and run the audit again: it names the "
        "place.",
        where="lesson 03, bug ignored"),
    Fault(of=Accumulated, key="accumulation reduced again",
        test=Accumulated.is_reduced_again,
        what="The gradient is right after one backward pass and wrong after two: a "
        "hook reduces the accumulated gradient again, so the first batch counts T "
        "times.",
        change="Reduce what this backward pass has added, not p.grad: all-reduce in "
        "the backward of a function on the parameter or its input, or once after the "
        "last micro-batch.",
        where="lesson 05, MeshTraining.sum_gradients"),
    Fault(of=Accumulated, key="accumulation", test=lambda a: True,
        what="The gradient is right after one backward pass and wrong after two "
        "without clearing.",
        change="Look at hooks that change p.grad, at what is stored from one backward "
        "pass to the next, and at sums of gradients that run once per micro-batch "
        "(after_each_backward).",
        where="lesson 05, MeshTraining.sum_gradients"),
    # ---- Train mode and dropout
    Fault(of=TrainBuffer, key="train buffer", test=TrainBuffer.wrong,
        what="Training changes this buffer (or number that the module keeps), and "
        "on the ranks it gets another value than in the full model: statistics of a "
        "shard may be taken for those of all.",
        change="Sum or average over the ranks what the buffer is updated with (a mean "
        "or a count, of tokens per expert, over what is sharded), with the full "
        "model's momentum.",
        where="lesson 02, bug qkv"),
    Fault(of=TrainMode, key="train mode", test=lambda t: True,
        what="This is right in eval mode and wrong in train mode, even if nothing is "
        "dropped: training takes another path through the model, and that path is "
        "wrong.",
        change="Look at what runs in train mode only: recomputation (is f inside of "
        "what is computed again? use_reentrant=True returns no gradient if no input "
        "needs one), fused functions, if self.training.",
        where="lesson 04, recomputation"),
    Fault(of=Dropped, key="dropout rate", test=Dropped.other_rate,
        what="The ranks drop with another probability than the full model.",
        change="Look at which rate is passed here (of attention, of the residual, "
        "none).",
        where="lesson 02, bug mask-residual"),
    Fault(of=Dropped, key="dropout differs",
        test=lambda d: d.relation.kind is Kind.SAME and not d.is_same,
        what="The input of this dropout is replicated, and the ranks drop different "
        "elements of it, so their replicas drift apart.",
        change="Use the same random state on all ranks of the group here.",
        where="lesson 02, bug mask-residual"),
    Fault(of=Dropped, key="dropout same",
        test=lambda d: d.relation.kind is Kind.SHARD and d.is_same,
        what="The input of this dropout is sharded, and all ranks drop the same "
        "elements.",
        change="Give each rank its own part of the mask, or its own random state.",
        where="lesson 02, bug mask-heads"),
    Fault(of=Recomputed, key="dropout recomputed", test=lambda r: True,
        what="Backward computes this dropout again (recomputation) with another mask "
        "than forward had: the gradient is that of another model.",
        change="Keep preserve_rng_state=True in torch.utils.checkpoint, and restore "
        "every generator that dropout uses.",
        where="notebook 12, fault 7"),
    Fault(of=TrainLoss, key="dropout missing", test=TrainLoss.not_dropped,
        what="The full model drops elements in train mode, and the parallel model "
        "drops none.",
        change="Look for a dropout that the parallel forward leaves out, or for a "
        "rate of 0.",
        where="lesson 02, bug mask-residual"),
    Fault(of=TrainLoss, key="dropout loss", test=TrainLoss.apart,
        what="With dropout (or other noise in train mode) the ranks of a TP group "
        "have different losses: somewhere it differs for a replicated tensor.",
        change="Use the same random state on all ranks for replicated tensors.",
        where="lesson 02, bug mask-residual"),
    # ---- Training
    Fault(of=Optimizer, key="not in the optimizer", test=lambda o: True,
        what="The optimizer does not have this parameter. Was it created before the "
        "model was made parallel?",
        change="Make the optimizer after parallelize().",
        where="notebook 12, fault 2"),
    Fault(of=Step, key="later loss", test=Step.wrong_loss,
        what="The loss is right with the first parameters, and wrong after an update: "
        "the model still uses something that was computed from the old ones, or a "
        "parameter that was not compared has a wrong update.",
        change="Compute it in forward, or again after each step (a norm that was "
        "stored, a copy or a merged form of a weight, a cache). Compare the gradients "
        "of parameters that the line “not compared” names, or give them names().",
        where="lesson 03, bug tie"),
    Fault(of=Step, key="norm", test=Step.wrong_norm,
        what="The norm of the gradient is wrong.",
        change="Sum the squares of sharded gradients over the group, and count "
        "replicated gradients once, on all ranks after the gradients are unscaled "
        "(GradScaler).",
        where="lesson 02, bug clip"),
    Fault(of=Step, key="clip", test=Step.wrong_factors,
        what="The norm is right, and clip() has not scaled the gradients by max_norm "
        "/ norm.",
        change="Scale p.grad of every parameter once, by the same number on all "
        "ranks: a function that gets gradients instead of parameters scales nothing, "
        "and a local norm gives each rank a factor of its own.",
        where="lesson 02, clip_gradients"),
    Fault(of=State, key="optimizer state", test=State.wrong,
        what="The parameters are right after all steps, and what the optimizer keeps "
        "of this one (a momentum, an average of weights) is not.",
        change="Each rank keeps the state of its own piece, with the same rates: look "
        "for a broadcast of shards, for a state that was loaded from another rank, "
        "and for a rate that depends on the rank.",
        where="notebook 12, fault 8"),
    Fault(of=Update, key="gradient of a later pass", test=Update.wrong_gradient,
        what="The gradient is right in the first pass and wrong in a later one, with "
        "right parameters: the result of an asynchronous collective may be used before "
        "wait() (a race), or backward uses something of an earlier pass.",
        change=WAIT,
        where="lesson 00, section 6"),
    Fault(of=Update, key="clip of a parameter",
        test=lambda u: u.wrong_gradient("clipped"),
        what="The gradient is right before clip() and wrong after it.",
        change="Look at the parameters that clip() gets, and at what it does with "
        "this one.",
        where="lesson 02, clip_gradients"),
    Fault(of=Update, key="update missing", test=lambda u: u.missing() and u.others,
        what="The gradients are right, and some ranks have updated other parameters, "
        "but not this one.",
        change="Look for what leaves it out on these ranks: the broadcast by the rank "
        "that updates it (ZeRO), its place in the optimizer's groups, or a gradient "
        "that is None there (an expert without tokens).",
        where="notebook 12, fault 8"),
    Fault(of=Update, key="update missing", test=Update.missing,
        what="The gradients are right, and some ranks have not updated this "
        "parameter: they skipped a step.",
        change="Ranks must decide together: all-reduce the flag (an overflow, a nan) "
        "by which a step is skipped.",
        where="notebook 12, fault 8"),
    Fault(of=Update, key="gradient not the same on replicas", test=Update.grads_apart,
        what="This parameter is no piece of the full model's, so its gradient was not "
        "compared with that. But ranks that hold the same values of it have different "
        "gradients, so its replicas drift apart: a reduction of its gradient may be "
        "missing.",
        change="All-reduce dL/dx in backward (f) in front of what is sharded and "
        "reads this parameter's output, or sum its gradient over the ranks after "
        "backward.",
        where="lesson 04, bug norms"),
    Fault(of=Update, key="update differs between replicas", test=Update.apart,
        what="The replicas of this parameter have the same gradient, and after the "
        "step they differ.",
        change="All ranks need the same flags, norms, learning rates and optimizer "
        "state.",
        where="lesson 02, bug drift; notebook 12, fault 8"),
    Fault(of=Update, key="update", test=lambda u: u.is_wrong,
        what="The gradients after clip() are right and the updated parameter is not: "
        "the optimizer may not be elementwise (it takes a norm or a matrix product of "
        "a shard), has other settings here (a learning rate, a weight decay), or "
        "something else changes the parameter.",
        change="Gather what the optimizer needs of the full parameter (its norm, its "
        "shape) and slice the result along the same dim, or use an elementwise "
        "optimizer. Compare its groups: a rule by names, shapes or dims may put a "
        "shard in another one. Look for hooks on it, and for code that assigns, sends "
        "or copies parameters. An average of weights needs the same factor, as often.",
        where="notebook 12, fault 9"),
]  # fmt: skip
