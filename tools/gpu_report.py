"""`make gpu-report`: what this machine's GPUs make of the course, in one table to send.

It takes 2 to 8 GPUs (one, if there is only one) and at most ten minutes. It runs
tools/check.py; measures lesson 01's MLP, lesson 04's layer and an all-reduce
(tools/gpu_measure.py says how); and runs every lesson and script with NCCL. The results
are gpu-report.md and gpu-report.json, without names of machines, people or folders.

`make gpu-report ARGS=--cpu` does the same with two ranks on CPU, gloo and small sizes.
"""

import argparse
import getpass
import json
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from check import ROOT, Parser, run
from lessons import TORCHRUN, judge, scripts_of

MINUTES = 10  # of all; what does not fit is named as not run
MEASURE = 240  # seconds, at most
SCRIPT = 100  # seconds of a lesson, at most
MOST_RANKS = 8
MEASURED = Path(__file__).with_name("gpu_measure.py")
# What torch calls a GPU → its machine in tools/presets.py, by the maker's data sheet.
# PCIe cards and GH200 have other links, so they have no row there.
SHEETS = {
    "GB200": "gb200-nvl72",
    "B200": "dgx-b200",
    "H200": "dgx-h200",
    "H100": "dgx-h100",
    "A100": "dgx-a100",
    "MI300X": "mi300x",
}
COLUMNS = "what", "ranks", "result", "step, ms", "calls alone", "predicted, ms"
COLUMNS += ("GB/s", "data sheet", "peak, MB", "predicted, MB")
LEGEND = """\
By hand and DTensor have passed parity with one process in float64 (PASS: output and all
gradients within 1e-12) before they were timed: forward and backward in bfloat16 (on CPU
float32), median of the slowest rank; these values are not compared. calls alone: calls
of the step's kinds and sizes, made by lesson 00's functions, as a share of the step
(over 100 %: something else used the machine while they were made).
predicted: tools/predict.py, arithmetic at the peak and messages at the data sheet's
rate. GB/s: bus bandwidth of an all-reduce. peak: what a step allocates beyond
parameters and input."""
SEND = """\
wrote {0}.md and {0}.json
Please send both: open an issue with the template "GPU report" at the repository from
which you have this course, and paste {0}.md; or reply to whoever teaches it."""


def without_names(text: str) -> str:
    """A text without folders, the machine's and the user's name, and addresses."""
    text = re.sub(r"(?:~|\B)/(?:[^\s/:'\"]+/)*", "", text)
    text = re.sub(r"\b\d{1,3}(?:\.\d{1,3}){3}\b(?::\d+)?", "ADDRESS", text)
    for name, word in ((socket.gethostname(), "HOST"), (user(), "USER")):
        if name:
            text = re.sub(rf"\b{re.escape(name)}\b", word, text)
    return text


def user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no such user: in a container
        return ""


def environment(ranks: int, on_cpu: bool) -> dict:
    """Versions, and the GPUs by the names that torch gives them."""
    import torch

    found = {"ranks": ranks, "backend": "gloo" if on_cpu else "nccl"}
    found["python"] = platform.python_version()
    found["torch"] = torch.__version__
    if not on_cpu:
        names = [torch.cuda.get_device_name(i) for i in range(ranks)]
        found["gpus"] = names
        found["cuda"] = torch.version.cuda or torch.version.hip
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        peers = [
            torch.cuda.can_device_access_peer(0, other) for other in range(1, ranks)
        ]
        found["peer access"] = all(peers)
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True)
    found["course"] = done.stdout.strip() if done.returncode == 0 else "no commit"
    return found


def sheet_of(gpus: list[str]) -> dict | None:
    """The data sheet of the GPUs, if all are of one kind that tools/presets.py has."""
    from presets import MACHINES

    if len(set(gpus)) != 1 or re.search("PCIe|NVL|GH200", gpus[0], re.I):
        return None
    kinds = [kind for kind in SHEETS if kind in gpus[0]]
    return MACHINES[SHEETS[kinds[0]]] if kinds else None


# ---- What the planner predicts


def layout_of(row: dict, ranks: int):
    """A layer of lesson 04 as the second of three stages: no embedding, no head."""
    import predict
    from presets import model

    heads = row["hidden"] // 64
    sizes = (3, row["hidden"], heads, heads, 256, row["seq_len"], row["batch"])
    return predict.make_layout(model(*sizes), tp=ranks, pp=3, micro_batch=row["batch"])


def predicted_seconds(row: dict, machine: dict) -> float:
    """Arithmetic at the peak, then each message at the link's rate, with its delay."""
    import predict

    ranks = 1 if row["way"] == "one process" else row["ranks"]
    x = 2 * row["batch"] * row["seq_len"] * row["hidden"]  # bytes of an activation
    rows = predict.Rows()
    if row["what"].startswith("MLP"):
        # Two products of D × 4·D, each 2 FLOPs per element forward and 4 backward.
        flops = 6 * (x // 2) * 8 * row["hidden"] // ranks
        rows.add("all", "all-reduce", "tp", 2, x)
    else:
        layout = layout_of(row, ranks)
        flops = predict.flops(layout, 1)
        predict.of_layers(layout, 1, x, rows)
    seconds = flops / machine["gpu_flops"]
    for call, calls, nbytes in rows if ranks > 1 else []:
        seconds += nbytes * predict.ring(call.collective, ranks) / machine["inside"]
        steps = calls * predict.ring_steps(call.collective, ranks)
        seconds += steps * machine["alpha_inside"]
    return seconds


def predicted_peak(row: dict) -> int:
    """Bytes of a layer's step: the fullest of forward, backward and its end, with what
    is saved for backward and gradients."""
    import predict

    ranks = 1 if row["way"] == "one process" else row["ranks"]
    layout = layout_of(row, ranks)
    saved = predict.layer_bytes(layout)
    again = predict.layer_in_backward(layout, saved)
    gradients = 2 * predict.one_layer(layout)
    return max(
        saved + predict.layer_in_forward(layout), saved + again, gradients + again
    )


# ---- What is run


def run_check() -> dict:
    """tools/check.py: its verdict, and the checks that failed."""
    code, text = run([sys.executable, str(ROOT / "tools" / "check.py")], 200)
    bad = [line[2:].strip() for line in text.splitlines() if line.startswith("✗")]
    result = "PASS" if code == 0 else "FAIL " + "; ".join(bad or ["no end"])
    return {"what": "tools/check.py", "result": without_names(result)}


def run_measured(ranks: int, on_cpu: bool, limit: float, timeout: int) -> list[dict]:
    """The rows that tools/gpu_measure.py wrote; one more if it failed or hung.

    limit: seconds of all. timeout: of a collective that waits for a rank.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        command = [*TORCHRUN, f"--nproc_per_node={ranks}", str(MEASURED)]
        command += ["--rows", str(path), "--timeout", str(timeout)]
        if on_cpu:
            command.append("--cpu")
        code, text = run(command, limit)
        rows = json.loads(path.read_text()) if path.exists() else []
    if code != 0:
        why = f"stopped after {limit:.0f} s" if code is None else why_failed(text)
        result = f"FAIL after {len(rows)} rows: {without_names(why)}"
        rows.append({"what": MEASURED.name, "ranks": ranks, "result": result})
    return rows


def why_failed(text: str) -> str:
    """What a rank raised: one that did not only wait for another rank, if there is."""
    raised = re.findall(r"^(rank \d+ raised .*)", text, re.M)
    waits = r"ime[d ]*out|closed by peer|reset by peer"
    causes = [line for line in raised if not re.search(waits, line)]
    lines = causes or raised or ["no rank said why"]
    return lines[0][:200]


def run_script(script: Path, ranks: int, limit: float) -> dict:
    """A lesson or script on as many ranks as it accepts: all, or 8, 4, 2 or 1."""
    fewer = [n for n in (8, 4, 2, 1) if n < ranks]
    for n in [ranks, *fewer]:
        start = time.perf_counter()
        command = [*TORCHRUN, f"--nproc_per_node={n}", str(script)]
        code, text = run(command, limit)
        if code == 0 or not re.search(r"^error: ", text, re.M):
            break  # it ran; a number of ranks that does not fit is an error in one line
    verdict, why = judge(code, text)
    result = verdict if verdict == "PASS" else f"FAIL {without_names(why)}"
    if code is None and limit < SCRIPT:  # that was not its fault
        result = f"not finished: {MINUTES} minutes are over"
    elif code is None:
        result = f"FAIL stopped after {limit:.0f} s"
    seconds = time.perf_counter() - start
    return {"what": script.stem, "ranks": n, "result": result, "seconds": seconds}


def run_scripts(ranks: int, until: float) -> list[dict]:
    """All lessons and scripts, as long as there is time."""
    rows = []
    for script in scripts_of(ROOT):
        left = until - time.monotonic()
        if left < 5:
            text = f"not run: {MINUTES} minutes are over"
            rows.append({"what": script.stem, "ranks": ranks, "result": text})
            continue
        rows.append(run_script(script, ranks, min(SCRIPT, left)))
        print(f"{rows[-1]['what']:<20} {rows[-1]['result']}", flush=True)
    return rows


# ---- The table


def cells_of(row: dict, machine: dict | None) -> dict[str, str]:
    """A row of the table: measured, and next to it what is predicted."""
    cells = dict.fromkeys(COLUMNS, "")
    cells.update(ranks=str(row.get("ranks", "")), result=row["result"])
    cells["what"] = row["what"]
    if "bytes" in row:
        cells["what"] += f" of {row['bytes'] // 2**10:,} KiB"
        cells["GB/s"] = f"{row['bus bytes/s'] / 1e9:.2f}"
        cells["data sheet"] = f"{machine['inside'] / 1e9:g}" if machine else ""
    if "hidden" in row:
        cells["what"] += f", D {row['hidden']}"
    if "way" not in row:
        return cells
    cells["what"] += f", {row['way']}"
    if "seconds" in row:
        cells["step, ms"] = f"{1000 * row['seconds']:.2f}"
        if "in calls" in row:
            cells["calls alone"] = f"{100 * row['in calls'] / row['seconds']:.0f} %"
        if row["peak"] is not None:
            cells["peak, MB"] = f"{row['peak'] / 1e6:,.0f}"
    if machine:
        cells["predicted, ms"] = f"{1000 * predicted_seconds(row, machine):.2f}"
        if row["what"].startswith("layer"):
            cells["predicted, MB"] = f"{predicted_peak(row) / 1e6:,.0f}"
    return cells


def markdown(where: dict, rows: list[dict]) -> str:
    machine = sheet_of(where.get("gpus", ["CPU"]))
    facts = ", ".join(f"{name}: {value}" for name, value in where.items())
    lines = ["# GPU report", "", facts, "", " | ".join(["", *COLUMNS, ""]).strip()]
    lines.append("|---" * len(COLUMNS) + "|")
    for row in rows:
        cells = cells_of(row, machine)
        text = [cells[column].replace("|", "/") for column in COLUMNS]
        lines.append(" | ".join(["", *text, ""]).strip())
    return "\n".join([*lines, "", LEGEND, ""])


def main() -> int:
    parser = Parser(description=__doc__.partition("\n\n`")[0])
    parser.add_argument("--cpu", action="store_true", help="two ranks, gloo, no GPU")
    parser.add_argument("--folder", type=Path, default=ROOT, help=argparse.SUPPRESS)
    parser.add_argument("--timeout", type=int, default=60, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cpu:
        ranks = 2
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for the lessons
    else:
        import torch

        ranks = min(MOST_RANKS, torch.cuda.device_count())
    if ranks == 0:
        print("torch sees no GPU here; make gpu-report ARGS=--cpu runs on CPU")
        return 2
    until = time.monotonic() + 60 * MINUTES
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    where = environment(ranks, args.cpu)
    print(f"{ranks} ranks, {where['backend']}: at most {MINUTES} minutes", flush=True)
    rows = [run_check()]
    rows += run_measured(ranks, args.cpu, MEASURE, args.timeout)
    print(f"measured: {len(rows) - 1} rows", flush=True)
    rows += run_scripts(ranks, until)
    path = args.folder / "gpu-report"
    path.with_suffix(".md").write_text(markdown(where, rows), "utf-8")
    data = {"environment": where, "rows": rows}
    path.with_suffix(".json").write_text(json.dumps(data, indent=1), "utf-8")
    print(SEND.format(path.name))
    return int(any(row["result"].startswith("FAIL") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
