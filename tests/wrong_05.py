"""Wrong answers to the exercises of notebook 05, and what they are told."""

PART = "(loss_bS.sum(1) / counts.clamp(1)).sum() / lines"

WRONG = [  # number of the exercise, an answer or edits of the solution, what it is told
    (1, "limited = lambda r, P, M, most: schedule('1f1b', r, P, M)",
     "stage 0 of 4, M 8, most 2: it keeps 4 at most, and should keep 2"),
    (1, "def limited(r, P, M, most):\n    k = min(P - r, M, most)\n"
        "    return [(w, i) for first in range(0, M, k) for w in "
        "('forward', 'backward')\n            for i in range(M)[first:first + k]]",
     "before backward 1 it has done 4 of 8 forward passes; here it should be 5"),
    (1, {"range(M - warm_up, M)": "range(M - warm_up, M - 1)"},
     "these are not 8 backward passes in order"),
    (1, "limited = lambda r, P, M, most: schedule('1f1b', r, P, M)[::-1]",
     "these are not 8 forward passes in order"),
    (1, "limited = lambda r, P, M, most: [(w, i) for i in range(M) "
        "for w in ('backward', 'forward')]", "comes before forward 0"),
    (2, {"(target != IGNORE).any(1).sum()": "torch.tensor(len(target))"},
     "count_lines gives 16; 14 have a target"),
    (2, {".any(1).sum()": ".any(1).sum().item()"},
     "'int' object has no attribute 'detach'; all_reduce takes a tensor"),
    (2, {PART: "loss_bS.mean(1).sum().item() / int(lines)"}, "no tensor, no gradient"),
    (2, {"counts.clamp(1)": "counts"}, ": 0/0? A line may have no target"),
    (2, {PART: "loss_bS.sum() / counts.sum().clamp(1) * len(loss_bS) / lines"},
     "all parts add up to"),
    (3, {'1 if sharding_of(p) else 1 / tp.size()': "1",
         'if hasattr(p, "rows")': "if False"}, "{'tp': 2, 'dp': 2}: "),
    (3, {"torch.tensor(count, dtype=torch.float64)": "count"},
     "'float' object has no attribute 'detach'; all_reduce takes a tensor"),
    (3, {"all_reduce(count, pp)": "all_reduce(all_reduce(count, pp), groups['dp'])"},
     "{'dp': 4}: 28004, but one process has 7001"),
    (3, {'if hasattr(p, "rows")': "if False"}, "{'tp': 2, 'dp': 2}: 7018, but one"),
    (3, {"continue": "pass"},
     "{'pp': 2, 'dp': 2, 'tie': True}: 7001, but one process has 4945"),
]  # fmt: skip
