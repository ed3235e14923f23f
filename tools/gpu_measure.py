"""What `make gpu-report` measures: steps of an MLP and of a layer, and an all-reduce.

torchrun starts it on T ranks, with NCCL if each has a GPU. Rank 0 writes a row into the
file --rows as soon as it is known, so what a later failure leaves is kept. For each
size and each of three ways (one process, by hand, DTensor):

- first parity: output and all gradients in float64, of few tokens, against one process;
  no time is measured of a way that differs;
- then a step, forward and backward, in bfloat16 (on CPU float32): the median of the
  rounds, of the slowest rank; and its collectives without the rest, one after the
  other. One process is rank 0 only, the others wait for it;
- the bytes that a step allocates at most, beyond parameters and input (GPU only).
"""

import argparse
import copy
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "beyond"))
from course import lesson00, lesson01, lesson02, lesson04

# Hidden sizes, batch, positions, head size; bytes of the all-reduces; rounds.
ON_GPU = ([1024, 2048, 4096, 8192], 4, 1024, 64, [2**20, 2**24, 2**28], 20)
ON_CPU = ([16, 32, 48, 64], 2, 16, 8, [2**12, 2**16], 3)
COPIES = 6  # of all parameters in float64 that parity needs at most, on one GPU
ONE, HAND, DTENSOR = "one process", "by hand", "DTensor"
MLP, LAYER = "MLP of lesson 01", "layer of lesson 04"


class Way(NamedTuple):
    """One way to compute the same module on this rank."""

    module: nn.Module
    forward: Callable  # x → y
    dim: int | None  # along which x and y are sharded; None: they are replicated
    sum_up: Callable  # makes gradients of replicated parameters full, after backward


def mlp_ways(hidden: int, seq_len: int, head: int, dtype, device, group) -> dict:
    """Lesson 01's MLP, split Megatron's way."""
    full = lesson01.MLP(hidden, 4 * hidden).to(device, dtype)
    nothing = lambda: None
    modules = {ONE: full, HAND: lesson01.tp_mlp(full, group)}
    modules[DTENSOR] = lesson01.dtensor_mlp(full, group)
    return {way: Way(mlp, mlp, None, nothing) for way, mlp in modules.items()}


def layer_ways(hidden: int, seq_len: int, head: int, dtype, device, group) -> dict:
    """Lesson 04's layer under TP + SP."""
    heads = hidden // head
    config = lesson02.Config(256, hidden, heads, heads, 1, seq_len, 0.0)
    model = lesson02.Transformer(config).to(device, dtype)
    tables = (model.cos, model.sin, model.future)
    full = model.layers[0]
    hand = copy.deepcopy(full)
    lesson02.parallelize_layer(hand, group)
    lesson04.split_sequence(hand, group)
    planned = lesson04.planned_transformer(model, group).layers[0]
    sum_by_hand = lambda: lesson04.all_reduce_replicated_gradients(hand, group)
    sum_dtensors = lambda: sum_partials(planned)
    return {
        ONE: Way(full, lambda x: full(x, tables), None, lambda: None),
        HAND: Way(hand, lambda x: hand(x, tables), 1, sum_by_hand),
        DTENSOR: Way(planned, lambda x: planned(x, tables), 1, sum_dtensors),
    }


def sum_partials(module: nn.Module) -> None:
    """What all_reduce_replicated_gradients does, of DTensors."""
    for p in module.parameters():
        p.grad = lesson02.sum_partial(p.grad)


MODULES = {MLP: mlp_ways, LAYER: layer_ways}


def step(way: Way, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Forward and backward: the output, and dL/dx."""
    way.module.zero_grad()
    x = x.detach().requires_grad_()
    y = way.forward(x)
    y.backward(dy)
    way.sum_up()
    return y, x.grad


def inputs_of(way: Way, x: Tensor, dy: Tensor, group) -> tuple[Tensor, Tensor]:
    """This rank's part of the input, and of the gradient that comes from above."""
    if way.dim is None:
        return x, dy
    return lesson00.shard(x, way.dim, group), lesson00.shard(dy, way.dim, group)


def results(way: Way, x: Tensor, dy: Tensor, group) -> dict[str, Tensor]:
    """Output and all gradients, unsharded."""
    found = dict(zip(("y", "x"), step(way, *inputs_of(way, x, dy, group))))
    if way.dim is not None:
        for name, part in found.items():
            found[name] = lesson00.all_gather(part, way.dim, group)
    found.update(lesson02.unshard_model(way.module, "grad"))
    return found


def parity(name: str, hidden: int, head: int, device, group) -> dict[str, float]:
    """Way → the largest relative difference from one process, on any rank."""
    torch.manual_seed(1)
    seq_len = 8 * group.size()
    ways = MODULES[name](hidden, seq_len, head, torch.float64, device, group)
    x, dy = torch.randn(2, 1, seq_len, hidden, dtype=torch.float64).to(device)
    expected = results(ways.pop(ONE), x, dy, group)
    diffs = {}
    for run, way in ways.items():
        found = results(way, x, dy, group)
        least = lesson00.LEAST["gradients"]
        worst = [lesson00.rel_diff(found[key], expected[key], least) for key in found]
        diffs[run] = max(lesson00.of_all_ranks(max(worst), group))
    return diffs


# ---- Times


def wait_for(device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds_of(function: Callable, rounds: int, device, group) -> float:
    """The median over the rounds, of the slowest rank."""
    times = []
    for number in range(rounds + 2):
        dist.barrier(group)  # one start for all
        wait_for(device)
        start = time.perf_counter()
        function()
        wait_for(device)
        if number > 1:  # two rounds to warm up
            times.append(time.perf_counter() - start)
    return max(lesson00.of_all_ranks(statistics.median(times), group))


def calls_of(way: Way, x: Tensor, dy: Tensor) -> list[tuple[str, int]]:
    """The collectives of a step, as lesson 00's METER counts them, with their bytes."""
    meter = lesson00.METER
    meter.calls.clear()
    with meter.phase("step", "all"):
        step(way, x, dy)
    found = []
    for (_, _, collective, _), payloads in meter.calls.items():
        found += [(collective, payload) for payload in payloads]
    return found


def call(collective: str, x: Tensor, group) -> Tensor:
    if collective == "all-reduce":
        return lesson00.all_reduce(x, group)
    if collective == "all-gather":
        return lesson00.all_gather(x.chunk(group.size())[group.rank()], 0, group)
    if collective == "reduce-scatter":
        return lesson00.reduce_scatter(x, 0, group)
    raise ValueError(f"a step has no {collective}")


def seconds_of_calls(calls: list, dtype, rounds: int, device, group) -> float:
    """The same collectives without the rest of the step."""
    tensors = []
    for collective, payload in calls:
        elements = payload // dtype.itemsize
        elements += -elements % group.size()
        tensors.append((collective, torch.ones(elements, dtype=dtype, device=device)))

    def all_calls():
        for collective, x in tensors:
            call(collective, x, group)

    return seconds_of(all_calls, rounds, device, group)


def peak_of(way: Way, x: Tensor, dy: Tensor, device, group) -> int | None:
    """Bytes that a step allocates at most, on any rank; None on CPU."""
    if device.type != "cuda":
        return None
    way.module.zero_grad()
    wait_for(device)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(way, x, dy)
    peak = torch.cuda.max_memory_allocated() - before
    return max(lesson00.of_all_ranks(peak, group))


def time_way(run: str, way: Way, x: Tensor, dy: Tensor, rounds: int, group) -> dict:
    """Seconds of a step and of its collectives, and bytes at the peak."""
    x, dy = inputs_of(way, x, dy, group)
    device, dtype = x.device, x.dtype
    if run == ONE and group.rank():
        own = lambda: None
    else:
        own = lambda: step(way, x, dy)
    found = {"seconds": seconds_of(own, rounds, device, group)}
    calls = [] if run == ONE else calls_of(way, x, dy)
    if calls:
        found["in calls"] = seconds_of_calls(calls, dtype, rounds, device, group)
    found["peak"] = peak_of(way, x, dy, device, group)
    return found


def measure(name: str, hidden: int, batch: int, seq_len: int, head: int, rounds, run):
    """Rows of one module at one size: parity, then times."""
    device, group = run.device, run.group
    multiple = head * group.size()
    hidden = multiple * math.ceil(hidden / multiple)
    seq_len = group.size() * math.ceil(seq_len / group.size())
    size = dict(what=name, hidden=hidden, batch=batch, seq_len=seq_len)
    size["ranks"] = group.size()
    need = COPIES * 8 * 12 * hidden**2
    if device.type == "cuda" and need > run.free():
        text = f"not measured: parity needs {need / 1e9:.0f} GB of free memory"
        run.write(dict(size, result=text))
        return
    diffs = parity(name, hidden, head, device, group)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    ways = MODULES[name](hidden, seq_len, head, dtype, device, group)
    x, dy = torch.randn(2, batch, seq_len, hidden).to(device, dtype)
    for kind, way in ways.items():
        row = dict(size, way=kind, dtype=str(dtype).partition(".")[2])
        row["diff"] = diffs.get(kind, 0.0)
        is_right = row["diff"] <= lesson00.ALLOWED["float64"]
        row["result"] = "PASS" if is_right else f"FAIL off by {row['diff']:.1e}"
        if kind == ONE:
            row["result"] = "reference"
        if is_right:
            row.update(time_way(kind, way, x, dy, rounds, group))
        run.write(row)


def measure_all_reduce(nbytes: int, rounds: int, run) -> None:
    """Bus bandwidth: what a rank of a ring sends, 2(T − 1)/T of the bytes, per second.

    So do NVIDIA's nccl-tests define it; it can be compared with a link's rate.
    """
    x = torch.ones(nbytes // 4, device=run.device)
    T = run.group.size()
    dist.all_reduce(x, group=run.group)
    off = lesson00.rel_diff(x, torch.full_like(x, T))
    call = lambda: dist.all_reduce(x, group=run.group)
    row = dict(what="all-reduce", bytes=nbytes, ranks=T)
    row["result"] = "PASS" if off == 0 else f"FAIL off by {off:.1e}"
    x.zero_()  # sums of ones would overflow
    row["seconds"] = seconds_of(call, rounds, run.device, run.group)
    row["bus bytes/s"] = nbytes * 2 * (T - 1) / T / row["seconds"]
    run.write(row)


class Run:
    """Where it runs, and the file of rows."""

    def __init__(self, path: Path, device: torch.device, timeout: int):
        limit = timedelta(seconds=timeout)
        self.path = path
        self.device = device
        self.rows = []
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", None, limit
        )
        self.group = dist.new_group(timeout=limit, group_desc="tp")

    def write(self, row: dict) -> None:
        self.rows.append(row)
        if dist.get_rank() == 0:
            self.path.write_text(json.dumps(self.rows))

    def free(self) -> int:
        """Bytes that the fullest GPU has left."""
        torch.cuda.empty_cache()
        return min(lesson00.of_all_ranks(torch.cuda.mem_get_info()[0], self.group))


def measure_all(run: Run) -> None:
    """First what is fast, so that a failure leaves most of the rows."""
    sizes = ON_GPU if run.device.type == "cuda" else ON_CPU
    hidden, batch, seq_len, head, nbytes, rounds = sizes
    if run.group.size() > 1:
        for size in nbytes:
            measure_all_reduce(size, rounds, run)
    for name in MODULES:
        for size in hidden:
            measure(name, size, batch, seq_len, head, rounds, run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--timeout", type=int, default=60)
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu") if args.cpu else torch.device("cuda", rank)
    try:
        measure_all(Run(args.rows, device, args.timeout))
        dist.barrier()
    except Exception as error:  # gpu_report.py looks for this line
        said = f"rank {rank} raised {type(error).__name__}: {error}"
        print(said.partition("\n")[0], file=sys.stderr, flush=True)
        raise
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold groups


if __name__ == "__main__":
    main()
