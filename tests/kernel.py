"""Kernels that do not lose their ports, for tests and for a program that starts some.

    python tests/kernel.py pytest ARGUMENTS                 a module, as by python -m
    python tests/kernel.py tools/submission.py ARGUMENTS    or a file

Jupyter finds five free ports and lets go of them; the kernel binds them a second later.
If another program has been given its `iopub` port by then, the kernel lives on and
nothing that it says arrives.
"""

import contextlib
import runpy
import sys
from unittest import mock

from jobs import held_port
from jupyter_client.provisioning.local_provisioner import LocalPortCache


@contextlib.contextmanager
def held_ports():
    """Until the end, nobody else is given a port of the kernels started here; yields
    the list of these ports."""
    ports = []
    with contextlib.ExitStack() as held:

        def find(_cache, _ip: str) -> int:
            ports.append(held.enter_context(held_port()))
            return ports[-1]

        with mock.patch.object(LocalPortCache, "find_available_port", find):
            yield ports


def tell_of_stderr() -> None:
    """nbval says that there was an output on stderr, and not what it was."""
    from nbval.plugin import IPyNbCell

    compare = IPyNbCell.compare_outputs

    def and_tell(cell, test, ref, skip_compare=None):
        is_same = compare(cell, test, ref, skip_compare)
        for output in [] if is_same else test:
            if output.get("name") == "stderr":
                cell.comparison_traceback.append(f"stderr: {output['text']}")
        return is_same

    IPyNbCell.compare_outputs = and_tell


if __name__ == "__main__":
    # jsonschema does without this, of which the import takes 3 seconds.
    sys.modules["rfc3987_syntax"] = None
    del sys.argv[0]
    run = runpy.run_path if sys.argv[0].endswith(".py") else runpy.run_module
    if "--nbval" in sys.argv:
        tell_of_stderr()
    with held_ports():
        run(sys.argv[0], run_name="__main__")
