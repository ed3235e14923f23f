"""Four ranks train models with fewer key/value heads than ranks, beside the full one.

    torchrun --nproc_per_node=4 drive_shared_heads.py FOLDER

Every rank also trains the full model in one process, cuts out what it should hold, and
compares that with what the parallel model of beyond/09 has (in_ranks.Twins).
"""

from functools import partial
from types import SimpleNamespace

import torch
from in_ranks import MODELS, Twins, is_ours, load, random_sizes, run

lesson = load("09_shared_heads")
lesson04 = lesson.lesson04  # with all that it carries over from earlier lessons
# Groups of 2 ranks that are not neighbors, of all 4, and of 2 neighbors.
MESHES = {"tp": 2, "x": 2}, {"tp": 4}, {"x": 2, "tp": 2}


def make_groups(mesh: dict[str, int], kv_heads: int) -> dict:
    """This rank's groups "tp", "kv" and "replica" on a mesh with another axis."""
    sizes = {}
    for axis, ranks in mesh.items():
        if axis == "tp":
            sizes["kv"] = kv_heads
            sizes["replica"] = ranks // kv_heads
        else:
            sizes[axis] = ranks
    groups = lesson04.mesh_groups(sizes, 30)
    groups["tp"] = lesson04.mesh_groups(mesh, 30)["tp"]
    return groups


def same_on_all(p: torch.Tensor, group) -> bool:
    replicas = lesson04.all_gather(p[None], 0, group)
    return all(torch.equal(replica, replicas[0]) for replica in replicas)


# What Twins looks up in a lesson; the norm is the one that knows replicated heads.
names = dict(vars(lesson04), global_norm=lesson.global_norm_shared)
names["broadcast"] = lambda p, src, group: lesson04.all_gather(p[None], 0, group)[src]
lesson_of_twins = SimpleNamespace(**names)


def try_model(number: int, groups: dict, with_sp: bool) -> dict:
    tp_group = groups["tp"]
    parallelize = lesson04.sp_transformer if with_sp else lesson04.tp_transformer

    def split(full, group):
        return lesson.shared_heads_transformer(full, parallelize, groups)

    twins = Twins(
        lesson_of_twins, number, tp_group, split, by_rows=with_sp, pads=with_sp,
        shared_heads=True,
    )  # fmt: skip
    if with_sp:
        V = twins.config.vocab_size
        loss_of = partial(lesson04.sharded_loss, tp_group=tp_group, vocab_size=V)
        sum_up = partial(lesson04.all_reduce_replicated_gradients, tp_group=tp_group)
        result = twins.train(loss_of, sum_up)
    else:
        result = twins.train(lesson04.mean_loss)
    heads = [p for p in twins.split.parameters() if hasattr(p, "replica_group")]
    equal = [same_on_all(p, p.replica_group) for p in heads]
    return result | dict(with_sp=with_sp, heads=len(heads), equal=sum(equal))


def main() -> dict:
    # Of 20 numbers in a row, 4 have fewer key/value heads than ranks (random_sizes).
    numbers = [n for n in range(2 * MODELS) if n // 4 % 5 == 3 and n % 4 != 0]
    groups = {}
    for place, mesh in enumerate(MESHES, 1):
        for kv_heads in {2: (1,), 4: (1, 2)}[mesh["tp"]]:  # all ranks make all groups
            groups[place, kv_heads] = make_groups(mesh, kv_heads)
    models = []
    for number in numbers:
        config, _, _ = random_sizes(
            lesson04, number, MESHES[number % 4 - 1]["tp"], True
        )
        ours = groups[number % 4, config.kv_heads]
        if is_ours(number, ours["tp"]):
            models.append(try_model(number, ours, with_sp=number % 8 < 4))
            models.append(try_model(number, ours, with_sp=number % 8 >= 4))
    return dict(models=models)


if __name__ == "__main__":
    run(main, seconds=60)
