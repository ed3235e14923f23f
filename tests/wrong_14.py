"""Wrong answers to the exercises of notebook 14, and what they are told."""

WRONG = [  # number of the exercise, an answer or edits of the solution, what it is told
    (1, {"for c in range(v) for i in range(M)": "for i in range(M) for c in range(v)"},
     "chunk 0 first, with all micro-batches"),
    (1, {"(v - 1 - c, i)": "(c, i)"}, "all ranks wait"),
    (1, {"for c, i in order]": "for c, i in order[1:]]"}, "backward passes, expected"),
    (2, {"has_weights = any(phase == \"weight\" for phase, _ in actions)":
         "has_weights = True"}, "1f1b, rank 0 of 4, M 8: 680, expected 400"),
    (2, {"left = kept if has_weights else 0": "left = 0"},
     "zero-bubble, rank 1 of 4, M 8: 300, expected 370"),
    (3, {"min(rank, most)": "rank"}, "most 0: rank 1 puts off 1, should put off 0"),
    (3, {"range(max(0, M - behind), M)": "range(max(0, M - behind), M - 1)"},
     "some pass is missing"),
]  # fmt: skip
