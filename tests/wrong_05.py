"""Wrong answers to the exercises of notebook 05, and what they are told."""

COUNT_LINES = """def count_lines(micro_batches, dp_group):
    here = sum((target != IGNORE).any(1).sum() for _, target in micro_batches)
    return all_reduce(here, dp_group)
"""
COUNTED = """def parameters_of_model(parameters, groups):
    share = lambda p: 1 if getattr(p, "cuts", ()) else 1 / groups["tp"].size()
    mine = dict(parameters)
    if groups["pp"].rank() > 0:
        mine.pop("embed_tokens.weight", None)  # a copy
    n = torch.tensor(sum(share(p) * p.numel() for p in mine.values()))
"""

WRONG = [  # number of the exercise, what someone filled in, what the check says
    (1, "limited = lambda r, P, M, most: schedule('1f1b', r, P, M)",
     "stage 0 of 4, M 8, most 2: it keeps 4 at most, and should keep 2"),
    (1, "limited = lambda r, P, M, most: schedule('gpipe', r, P, M)",
     "stage 0 of 4, M 8, most 4: it keeps 8 at most, and should keep 4"),
    (1, "limited = lambda r, P, M, most: "
        "[(w, i) for i in range(M) for w in ('forward', 'backward')]",
     "it keeps 1 at most, and should keep 4"),
    (1, "def limited(r, P, M, most):\n    k = min(P - r, M, most)\n"
        "    return [(w, i) for first in range(0, M, k) for w in "
        "('forward', 'backward')\n            for i in range(M)[first:first + k]]",
     "before backward 1 it has done 4 of 8 forwards; here it should be 5"),
    (1, "def limited(r, P, M, most):\n    k = min(P - r, M, most)\n"
        "    steps = [(w, i) for i in range(M - k) for w in "
        "('forward', 'backward')]\n    return steps + [(w, i) for w in "
        "('forward', 'backward') for i in range(M - k, M)]",
     "before backward 0 it has done 1 of 8 forwards; here it should be 4"),
    (1, "limited = lambda r, P, M, most: "
        "schedule('1f1b', r, P, M)[:-1]", "these are not 8 backwards in order"),
    (1, "limited = lambda r, P, M, most: schedule('1f1b', r, P, M)[::-1]",
     "these are not 8 forwards in order"),
    (1, "limited = lambda r, P, M, most: [(w, i) for i in range(M) "
        "for w in ('backward', 'forward')]", "comes before forward 0"),
    (2, "count_lines = lambda parts, g: all_reduce(torch.tensor("
        "sum(p.shape[1] for p in parts)), g)\npart_by_lines = None",
     "count_lines gives 16; 14 have a target"),
    (2, "count_lines = lambda parts, g: sum((t != IGNORE).any(1).sum() "
        "for _, t in parts)\npart_by_lines = None",
     "count_lines gives 3; 14 have a target"),
    (2, "count_lines = lambda parts, g: all_reduce(sum((t != IGNORE).any(1).sum()"
        ".item() for _, t in parts), g)\npart_by_lines = None",
     "'int' object has no attribute 'detach'; all_reduce takes a tensor"),
    (2, COUNT_LINES + "part_by_lines = lambda loss, target, n: "
        "loss.mean(1).sum().item() / int(n)", "no tensor, no gradient"),
    (2, COUNT_LINES + "part_by_lines = lambda loss, target, n: loss.mean(1).sum()"
        " / n", "all parts add up to"),
    (2, COUNT_LINES + "part_by_lines = lambda loss, target, n: "
        "(loss.sum(1) / (target != IGNORE).sum(1)).sum() / n",
     ": 0/0? A line may have no target"),
    (2, COUNT_LINES + "part_by_lines = lambda loss, target, n: loss.sum() / "
        "(target != IGNORE).sum().clamp(1) * len(loss) / n", "all parts add up to"),
    (3, "def parameters_of_model(parameters, groups):\n"
        "    n = torch.tensor(sum(p.numel() for p in parameters.values()))\n"
        "    return all_reduce(all_reduce(n, groups['tp']), groups['pp'])",
     "{'tp': 2, 'dp': 2}: "),
    (3, COUNTED + "    return all_reduce(n.item(), groups['tp'])",
     "'float' object has no attribute 'detach'; all_reduce takes a tensor"),
    (3, COUNTED + "    for axis in ('tp', 'pp', 'dp'):\n"
        "        n = all_reduce(n, groups[axis])\n    return n.item()",
     "{'dp': 4}: 28004.0, but one process has 7001"),
    (3, COUNTED + "    return all_reduce(all_reduce(n, groups['tp']), "
        "groups['pp']).item()", "{'tp': 2, 'dp': 2}: 7018.0, but one"),
    (3, "def parameters_of_model(parameters, groups):\n"
        "    T, n = groups['tp'].size(), 0\n"
        "    for p in parameters.values():\n"
        "        n += p.numel() * (1 if getattr(p, 'cuts', ()) else 1 / T)\n"
        "        if hasattr(p, 'rows'):\n"
        "            n -= (T * len(p) - p.rows) * p[0].numel() / T\n"
        "    n = all_reduce(torch.tensor(n), groups['tp'])\n"
        "    return all_reduce(n, groups['pp']).item()",
     "{'pp': 2, 'dp': 2, 'tie': True}: 7001.0, but one process has 4945"),
]  # fmt: skip
