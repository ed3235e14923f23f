"""AdamW on one vector of all parameters of a rank, for lesson 05's training on a mesh.

A helper of beyond/10_checkpoints.py and tools/dry_run.py, no script: with one vector,
the moments can be sharded over replicas in equal slices, wherever a parameter begins.
How ZeRO goes on from here is the subject of beyond/15_zero.py.
"""

import torch
from course import lesson00, lesson05
from flat_vector import flatten, norm_weights, views_of
from tied_stages import TIED, TiedTraining
from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's names for them


class FlatAdamW:
    """AdamW on a rank's parameters as one vector: one collective sums all gradients.

    AdamW treats each element separately, so the vector can be split anywhere. With
    `zero` a rank updates 1/DP of it: vector, moments and summed gradient are sharded
    over dp. ZeRO stage 1 shards the moments, stage 2 also the gradients
    (arXiv:1910.02054). This is stage 1, because p.grad is not sharded over dp, but with
    the reduce-scatter of stage 2 for the sum. The vector is a second copy of the
    parameters.

    Communication of n elements, padded so that DP divides them: one all-reduce over
        dp; with `zero` one reduce-scatter, and one all-gather after the update.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], groups, zero: bool):
        self.parameters = parameters
        self.groups = groups
        self.zero = zero
        self.vector = nn.Parameter(self.local_slice(parameters))
        # lr and eps as in lesson 02's train_transformer, which says why.
        self.adamw = torch.optim.AdamW([self.vector], lr=3e-3, eps=1e-4)
        # The norm is summed over tp: what all T ranks hold counts 1/T on each.
        weights = norm_weights(parameters.values(), groups["tp"])
        self.norm_weights = self.local_slice(dict(zip(parameters, weights)))

    def flatten(self, tensors: dict[str, Tensor]) -> Tensor:
        """One vector, padded, from one tensor per parameter."""
        in_order = [tensors[name] for name in self.parameters]
        return flatten(in_order, self.groups["dp"].size())

    def local_slice(self, tensors: dict[str, Tensor]) -> Tensor:
        """What this replica updates of the flattened tensors: with `zero` a slice."""
        flat = self.flatten(tensors)
        return lesson00.shard(flat, 0, self.groups["dp"]) if self.zero else flat

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """One tensor per parameter, from what local_slice returned on each replica."""
        flat = (
            lesson00.all_gather(vector, 0, self.groups["dp"])
            if self.zero
            else vector.detach()
        )
        return dict(zip(self.parameters, views_of(flat, self.parameters.values())))

    def sum_over_replicas(self) -> None:
        """Sum gradients over dp: each replica has a part of the batch's gradient."""
        flat = self.flatten({name: p.grad for name, p in self.parameters.items()})
        if self.zero:
            self.vector.grad = lesson00.reduce_scatter(flat, 0, self.groups["dp"])
        else:
            self.vector.grad = lesson00.all_reduce(flat, self.groups["dp"])

    def step(self) -> None:
        """Update this replica's part, and copy all parts into the parameters."""
        self.adamw.step()
        for name, x in self.unflatten(self.vector).items():
            self.parameters[name].data.copy_(x)


class FlatTraining(TiedTraining):
    """Lesson 05's training with FlatAdamW; the first stage updates a tied weight.

    groups: of make_mesh, and "embedding" (tied_stages.py).
    """

    def __init__(self, full, groups: dict, args):
        super().__init__(full, groups, args)
        if full.lm_head.weight is not full.embed_tokens.weight:
            self.tied = None
        owned = dict(self.parameters)
        if self.tied is not None and groups["pp"].rank() > 0:
            del owned[TIED]  # the last stage's copy
        self.optimizer = FlatAdamW(owned, groups, args.zero)

    def sum_gradients(self) -> None:
        """As MeshTraining's, over dp into the optimizer's vector.

        The vector gets a copy of p.grad, so p.grad has to be complete before it.
        """
        groups = self.groups
        lesson05.all_reduce_replicated_gradients(self.stage_module, groups["tp"])
        if self.tied is not None:
            grad = lesson00.all_reduce(self.tied.grad, groups["embedding"])
            self.tied.grad = grad
        self.optimizer.sum_over_replicas()

    def norm(self) -> float:
        """The norm of the whole model's gradient, the same on every rank.

        Communication: one all-reduce of one float64 per axis: tp, pp, with `zero` dp.
        """
        grad = self.optimizer.vector.grad
        squares = (grad.double().square() * self.optimizer.norm_weights).sum()
        squares = lesson00.all_reduce(squares, self.groups["tp"])
        squares = lesson00.all_reduce(squares, self.groups["pp"])
        if self.args.zero:  # otherwise every replica has the full gradient
            squares = lesson00.all_reduce(squares, self.groups["dp"])
        return squares.sqrt().item()

    def update(self) -> float:
        """Clip the gradient by its norm over the mesh, then step. Return the norm."""
        norm = self.norm()
        self.optimizer.vector.grad.mul_(min(1.0, self.args.clip / (norm + 1e-6)))
        self.optimizer.step()
        self.renew_copy()
        self.stage_module.zero_grad()
        return norm
