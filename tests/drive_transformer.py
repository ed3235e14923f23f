"""Four ranks train lesson 02's split transformer on random sizes, beside the whole one.

    torchrun --nproc_per_node=4 drive_transformer.py FOLDER

Every rank trains the whole model alone, cuts out what it should hold, and compares that
with what the lesson's parallel model has (in_ranks.Twins).
"""

from in_ranks import MODELS, Twins, groups_of_4, is_ours, load, run

lesson = load("02_transformer_tp")


def try_model(number: int, group) -> dict:
    twins = Twins(lesson, number, group, lesson.tp_transformer, by_rows=())
    return twins.train(lesson.mean_loss, steps=2)


def main() -> dict:
    groups = groups_of_4(lesson) * (MODELS // 4)
    models = [try_model(n, g) for n, g in enumerate(groups) if is_ours(n, g)]
    return dict(models=models)


if __name__ == "__main__":
    run(main)
