"""Lesson 05 with embedding and head that share one weight, on two stages.

The first stage of a pipeline has the embedding, the last one the head. If both use one
weight, each stage has a copy of it, and each copy gets a part of its gradient.

    torchrun --standalone --nproc_per_node=2 beyond/tied_stages.py

It takes lesson 05's flags, and prints what its sections 3 to 5 print: the same losses,
gradients and parameters as in one process, and two calls more, over `embed`: the first
and the last stage. The class below is all that is new.
"""

import argparse
import copy
import os
import sys
import time

import torch
import torch.distributed as dist

try:
    from course import lesson00, lesson02, lesson03, lesson04, lesson05
except ModuleNotFoundError as error:  # a copy of this file, without its repository
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(60)  # rank 0 says why, and torchrun ends all
    print(f"error: this script imports the course's lessons: {error}", file=sys.stderr)
    sys.exit(2)

TIED = "embed_tokens.weight"  # the name of the weight in the full model


def embedding_group(sizes: dict[str, int], timeout: float) -> dist.ProcessGroup:
    """The first and the last stage of this rank's pipeline. All ranks must call it.

    sizes: those of lesson 05's make_mesh. A stage between gets a group of its own,
    which sends nothing.
    """
    stages = {"stage": sizes["pp"], "rank": sizes["dp"] * sizes["tp"]}
    ranks = torch.arange(dist.get_world_size()).view(*stages.values())
    lines = [sorted({line[0], line[-1]}) for line in ranks.T.tolist()]
    lines += [[rank] for rank in ranks[1:-1].flatten().tolist()]
    limit = lesson05.timedelta(seconds=timeout)
    group, _ = dist.new_subgroups_by_enumeration(
        lines, timeout=limit, group_desc="embed"
    )
    return group


class TiedTraining(lesson05.MeshTraining):
    """Lesson 05's training with a tied weight: the first stage owns it.

    The first stage gets the sum of both gradients and updates the weight; the last
    stage's copy is renewed. (If both updated it, as in Megatron-LM, their gradients
    would have to be bitwise identical, or the two would drift apart.)

    groups: of make_mesh, and "embedding": embedding_group.
    Communication: one all-reduce of the gradient and one broadcast of the weight, v·D
        elements each, between first and last stage.
    """

    def __init__(self, full, groups: dict[str, dist.ProcessGroup], args):
        super().__init__(full, groups, args)
        # Named as in the full model, where a tied head has the embedding's name.
        self.tied = self.parameters.get(TIED)  # None between the two

    def sum_gradients(self) -> None:
        """Sum what is partial; the tied weight's gradient over its two stages first."""
        if self.tied is not None:
            grad = lesson00.all_reduce(self.tied.grad, self.groups["embedding"])
            self.tied.grad = grad
            if self.groups["pp"].rank() > 0:
                self.tied.grad = None  # AdamW, norm and sums skip the copy
        super().sum_gradients()

    def update(self) -> float:
        """Step, and renew the last stage's copy. Return the norm."""
        norm = super().update()
        self.renew_copy()
        return norm

    def renew_copy(self) -> None:
        """Give the first stage's weight to the last stage."""
        if self.tied is not None:
            weight = lesson00.broadcast(self.tied, 0, self.groups["embedding"])
            self.tied.data.copy_(weight)


# ==== RUN


def main(args, report: lesson00.Report) -> None:
    """Train one model in one process and on the mesh, then compare, as lesson 05."""
    mesh = {axis: getattr(args, axis) for axis in lesson05.AXES}
    groups = lesson05.make_mesh(mesh, args.timeout)
    groups["embedding"] = embedding_group(mesh, args.timeout)
    batches = []
    for batch in lesson02.make_batches(lesson05.__doc__, args, args.steps):
        batches.append(lesson04.pad_batch(*batch, args.tp))
    args.seq_len = report.size["S"]  # from here on T divides it
    args.tie = True
    full = lesson03.make_tied(args)

    runs = {}
    alone = copy.deepcopy(full)
    runs["one process"] = lesson02.train_transformer("alone", alone, batches, args)
    with report.guard("mesh"):
        training = TiedTraining(full, groups, args)
        phase = lesson00.METER.phase("mesh", "update")
        training.renew_copy = phase(training.renew_copy)
        lesson05.show_stages(report, training)
        runs["mesh"] = lesson05.train_on_mesh(training, batches)
    lesson05.show_training_mesh(report, runs, args)
    if "mesh" in runs:
        lesson05.show_replicas_mesh(report, training, runs["mesh"])
        if training.tied is not None and args.pp > 1:
            report.check_replicas({TIED: training.tied}, groups["embedding"])
        lesson05.show_batch(report, training, batches[-1])
    lesson05.show_gradients_mesh(report, runs, args)
    if "mesh" in runs:
        show_communication_tied(report, training, batches[-1])


def show_communication_tied(report, training: TiedTraining, batch: tuple) -> None:
    """Lesson 05's formulas, and the two calls of the tied weight."""
    size = report.size
    stage = training.pipeline.stage
    lesson05.set_letters(report, training, batch)
    formulas = lesson05.traffic(size, stage)
    if training.tied is not None and size["P"] > 1:
        for phase, call in (("sums", "all-reduce"), ("update", "broadcast")):
            formulas["mesh", phase, call, "embed"] = (1, "e·v·D")
        size["v"] = len(training.tied)
        if stage > 0:
            size["Ψ"] -= training.tied.numel()  # the copy has no gradient
    lesson05.show_communication_mesh(report, formulas)
    report.say("v: ⌈V/T⌉ rows; embed: the first and the last stage of a pipeline")


if __name__ == "__main__":
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    lesson05.add_mesh_flags(parser)
    lesson00.launch(main, lesson05.sizes_of_mesh, parser)
