"""How many bytes leave a rank in an all-to-all of uneven splits.

A helper of beyond/16_expert_parallel.py, no script.
"""

from course import lesson00
from torch.utils._python_dispatch import TorchDispatchMode


class CountLeaving(TorchDispatchMode):
    """Within `with`: of an all-to-all, METER counts what leaves this rank.

    If splits are uneven, ranks send different amounts, and no payload is that of all.
    These calls are named all-to-all-v, as in MPI.
    """

    def __init__(self):
        super().__init__()
        self.calls = {}  # as METER's

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        label = lesson00.METER.label
        if func._schema.name == "c10d::alltoall_base_" and label:
            _, x, _, _, rows_by_rank, *_ = args  # no rows_by_rank: as many for each
            _, group = lesson00.collective_of(func, args)
            own = rows_by_rank[group.rank()] if rows_by_rank else 0
            call = (*label, "all-to-all-v", group.group_desc)
            if group.size() > 1:
                self.calls.setdefault(call, []).append(x[own:].nbytes)
        return func(*args, **(kwargs or {}))

    def __exit__(self, kind, error, trace):
        for run, phase, _, axis in self.calls:
            lesson00.METER.calls.pop((run, phase, "all-to-all", axis), None)
        lesson00.METER.calls.update(self.calls)
        return super().__exit__(kind, error, trace)
