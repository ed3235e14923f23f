"""Wrong answers to the exercises of notebook 08, and what they are told."""

LOOP = "    for term in terms[1:]:\n        total = total + term\n    return total"

WRONG = [  # number of the exercise, edits of the solution, what the check says
    (1, {"all_gather(x[None], 0, group)": "all_reduce(x, group)[None]"},
     "['all-reduce']: who decides the order there?"),
    (1, {LOOP: "    return total"}, "that is not the sum"),
    (1, {LOOP: "    return terms.double().sum(0)"}, "its bits are not"),
    (1, {LOOP: "    return lesson00.all_reduce(x, group)"}, "2 collectives, not 1"),
    (2, {"2 * (T - 1) * n * e // T": "(T - 1) * n * e // T"},
     "n 16, e 4, T 2: bytes_sent gives ("),
    (2, {"2 * (T - 1) * n * e // T, (T - 1) * n * e": "64, 64"},
     "n 24, e 8, T 2: bytes_sent gives (64, 64); counted were (192, 192)"),
    (2, {", (T - 1) * n * e": ""}, "bytes_sent gives 64: return two numbers"),
    (3, {"tree_sum(list(local_rows))": "local_rows.sum(0)"}, "its bits depend on T"),
    (3, {"tree_all_reduce(tree_sum(list(local_rows)), group)":
         "tree_sum(list(local_rows))"}, "T = 2: that is not the mean"),
    (3, {" / 8": " / len(local_rows)"}, "T = 2: that is not the mean"),
]  # fmt: skip
