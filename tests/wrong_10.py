"""Wrong answers to the exercises of notebook 10, and what they are told."""

WRONG = [  # number of the exercise, an answer or edits of the solution, what it is told
    (1, {"elements > 0": "elements >= 0"}, "all is there, but it returned ['b', 'w']"),
    (1, {"sorted(name for": "list(name for"}, "columns of u and rows of a are missing"),
    (1, {'math.prod(part["shape"])': 'part["shape"][0]'}, "all is there, but it ret"),
    (1, {'math.prod(part["full"])': 'part["full"][0]',
         'math.prod(part["shape"])': 'part["shape"][0]'},
     "columns of u and rows of a are missing: ['a']"),
    (2, {"math.ceil(V / T)": "V // T"}, "not each row once"),
    (2, {"min(held, V - first)": "held"}, "V 257, T 2: [(0, 129), (129, 129)], not"),
    (2, {"first = min(V, tp_rank * held)": "first = tp_rank * held",
         "min(held, V - first)": "max(0, min(held, V - first))"},
     "V 5, T 4: no rows is (5, 0)"),
    (3, {"all_gather(x, 0, dp_group), 0, tp_group":
         "all_gather(x, 0, tp_group), 0, dp_group"},
     "rows in the order [0, "),
    (3, {"all_gather(lesson00.all_gather(x, 0, dp_group), 0, tp_group)":
         "all_gather(x, 0, dp_group)"}, "shape ["),
]  # fmt: skip
