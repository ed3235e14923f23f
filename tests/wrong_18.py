"""Wrong answers to the exercises of notebook 18, and what each check says."""

WRONG = [  # number of the exercise, edits of the solution, what the check says
    (1, {"slower + faster / Q": "slower"}, "travel 8 s, multiply 8 s, 1 pieces"),
    (1, {"slower + faster / Q": "travel / Q + multiply"}, "travel 8 s, multiply 2 s"),
    (1, {"slower + faster / Q": "faster + slower / Q"}, "travel 2 s, multiply 8 s"),
    (2, {"(me - i) % T * s": "me * s"}, "rows are not at their positions"),
    (2, {"if i < T - 1": "if True"}, "calls: {'send/recv': "),
    (2, {"F.linear(x_BsD, weight)\n":
         "F.linear(lesson00.all_gather(x_BsD, 1, tp_group)[:, first : first + s], "
         "weight)\n"}, "rows are not at their positions"),
    (3, {"scale * loss.sum()": "loss.sum()"}, "the loss is wrong"),
    (3, {"part.backward()": "(part / scale).backward()"}, "dL/dh is wrong"),
    (3, {"lesson00.all_reduce(leaf_BSD.grad, tp_group)": "leaf_BSD.grad"},
     "dL/dh is wrong"),
    (3, {"total + part.detach()": "total + part.detach() / scale"},
     "the loss is wrong"),
]  # fmt: skip
