"""Wrong answers to the exercises of notebook 11, and what they are told."""

WRONG = [  # number of the exercise, an answer or edits of the solution, what it is told
    (1, {"torch.logaddexp(lse1, lse2)": "torch.maximum(lse1, lse2)"}, "lse is wrong"),
    (1, {"torch.logaddexp(lse1, lse2)": "(lse1.exp() + lse2.exp()).log()"},
     "lse is wrong with scores of about 1000"),
    (1, {"y1 * (lse1 - lse).exp() + y2 * (lse2 - lse).exp()": "(y1 + y2) / 2"},
     "y is wrong with scores of about 1"),
    (1, {".exp(), lse": ".exp()"}, "return y and lse"),
    (2, {"(q @ k.mT * scale - lse).exp()": "(q @ k.mT * scale).softmax(-1)"},
     "dL/dv is wrong"),
    (2, {" - delta": ""}, "dL/dk is wrong"),
    (2, {"(grad_y * y)": "(grad_y @ v.mT * weights)"}, "dL/dk is wrong"),
    (2, {"return grad_scores @ k,": "return grad_scores @ k * scale,"},
     "the sum of dL/dq over blocks is wrong"),
    (3, {"[rank, 2 * T - 1 - rank]": "[2 * rank, 2 * rank + 1]"},
     "ranks compute [3, 7, 11, 15] blocks"),
    (3, {"2 * T - 1 - rank": "7 - rank"}, "not every chunk is on one rank, T = 1"),
    (4, {"(T - 1) * 2": "T * 2"}, "ring, "),
    (4, {" * (T - 1) // T": ""}, "Ulysses, "),
    (4, {"2 * s * K": "2 * s * N"}, "N 12, K 4"),
]  # fmt: skip
