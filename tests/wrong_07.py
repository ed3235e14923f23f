"""Wrong answers to the exercises of notebook 07, and what they are told."""

WRONG = [  # number of the exercise, an answer or edits of the solution, what it is told
    (1, {"predict.ring(call.collective, layout.tp) * nbytes": "nbytes"},
     "{'tp': 8}, {}, none: 1.812, should be 1.585 s"),
    (1, {'call.axis == "tp"': "True"}, "{'tp': 8}, {}, none: "),
    (1, {"return sent / rate": "return sent / machine.inside"},
     "{'tp': 16}, {}, none: 3.397, should be 5.096 s"),
    (2, {"fitting = length": "fitting = 2 * length"},
     "dp 8 · pp 1 · tp 8, none, 80 GB: "),
    (2, {"(0, layout.pp - 1)": "(0,)"}, "dp 8 · pp 8 · tp 1, full, 80 GB: "),
    (2, {"while True:": "while length < 10**9:",
         "longer = argparse": "longer, layout.seq_len = layout, length;"
         " argparse"}, "the layout itself was changed"),
    (3, {"<= times * eight": "<= eight"}, "at most 1.5 times: "),
    (3, {"for rate in rates": "for rate in rates[::-1]"}, "times: "),
    (3, {"faster = argparse.Namespace(**vars(machine) | {\"between\": rate})":
         "faster = machine\n        machine.between = rate"}, "was changed"),
]  # fmt: skip
