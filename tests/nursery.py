"""Ranks that need not import torch anew: torchrun's own agent, with a fork server.

jobs.py runs this. A line of JSON on stdin is a job, a line on stdout says how it ended.
Agent, rendezvous, error files and restarts are torchrun's; what ranks print goes to
files in the job's folder.
"""

import gc
import json
import logging
import multiprocessing
import os
import runpy
import sys
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

PRELOAD = [
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.utils.flop_counter",
]


def rank(path: str, flags: list[str], env: dict[str, str]) -> None:
    """What each rank runs: a script, as `python script flags` would."""
    os.environ.update(env)
    gc.freeze()  # a collection would copy all that this process shares with others
    end_at_once = os._exit  # but the agent waits for what a good rank returns
    os._exit = lambda code: end_at_once(code) if code else sys.exit(0)
    sys.argv = [path, *flags]
    sys.path.insert(0, str(Path(path).parent))
    try:
        runpy.run_path(path, run_name="__main__")
    finally:
        os._exit = end_at_once  # so ends a child of the fork server, without tidying up


def rank_of_the_audit(path: str, env: dict[str, str], log: str) -> None:
    """What tools/audit.py starts once per rank, which ends with its parent."""
    options = json.loads(env["AUDIT"]) | {"parent": os.getppid()}
    os.environ.clear()
    os.environ.update(env, AUDIT=json.dumps(options))
    file = os.open(log, os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    gc.freeze()
    sys.argv = [path]
    sys.path[:0] = [str(Path(path).parent), *env["PYTHONPATH"].split(os.pathsep)]
    runpy.run_path(path, run_name="__main__")


def run(job: dict) -> tuple[int, str]:
    """The job's exit code, and torchrun's closing report if it is not 0."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=job["ranks"],
        run_id="job",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        start_method="forkserver",
        monitor_interval=0.05,
        max_restarts=int(job["env"].get("PET_MAX_RESTARTS", 0)),
        logs_specs=DefaultLogsSpecs(log_dir=job["folder"], redirects=Std.ALL),
    )
    try:
        elastic_launch(config, rank)(job["script"], job["flags"], job["env"])
    except ChildFailedError as error:
        return 1, str(error)
    return 0, ""


if __name__ == "__main__":
    os.nice(10)  # what waits for ranks comes first: the tests, and the browser
    logging.disable()  # else torch's log imports torch._dynamo to show an exception
    multiprocessing.set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()
    resource_tracker.ensure_running()
    import torch  # noqa: F401  while the fork server does, too

    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
