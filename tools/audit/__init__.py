"""Is my tensor-parallel model right? The package behind `python tools/audit.py`.

command.py starts the ranks and prints, rank.py is one rank, record.py what it records.
compare.py relates tensors to the full model's. pieces.py knows which piece each rank
holds, tensors.py what modules pass on, case.py the gradients of parameters. faults.py
defines the faults, by subjects (subjects.py); findings.py looks for them.
"""

from .command import groups_of
from .rank import Run, audit_here
from .shards import from_full

__all__ = ["Run", "audit_here", "from_full", "groups_of"]
