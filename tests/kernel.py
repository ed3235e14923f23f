"""pytest for one notebook, with a kernel that does not lose its ports.

Jupyter finds five free ports and lets go of them; the kernel binds them a second later.
If another program has been given its `iopub` port by then, the kernel lives on and
nothing that it says arrives. Here the ports are held until the end.
"""

import sys
from contextlib import ExitStack

import pytest
from jobs import held_port
from jupyter_client.provisioning.local_provisioner import LocalPortCache

# jsonschema does without this, of which the import takes 3 seconds.
sys.modules["rfc3987_syntax"] = None

with ExitStack() as held:
    ports = []

    def find(_cache, _ip: str) -> int:
        ports.append(held.enter_context(held_port()))
        return ports[-1]

    LocalPortCache.find_available_port = find
    code = pytest.main()
sys.exit(code or len(ports) != 5)
