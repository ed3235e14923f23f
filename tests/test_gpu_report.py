"""`make gpu-report` on CPU: the table, what is measured only after parity, and a rank
that raises or hangs. Lessons and tools/check.py are not run here: other tests do.
"""

import json
import re
import socket
from pathlib import Path

import gpu_measure
import gpu_report
import jobs
import predict
import pytest
from presets import MACHINES

ENDS = {  # of a lesson, by its number and its ranks: exit code and output
    ("00", 2): (0, "PASS  00_collectives  fine\n"),
    ("01", 2): (1, f"FAIL  01 wrong, see {Path.home()}/course/01.py on 10.1.2.3:29400"),
    ("02", 2): (1, "error: --heads 3: 3 % 2 ranks = 1, not 0; take --heads 4"),
    ("02", 1): (0, "PASS  02_transformer_tp  fine\n"),
    ("03", 2): (None, "no verdict"),
}
GOOD = [gpu_measure.ONE, gpu_measure.HAND, gpu_measure.DTENSOR]
# A file that measures as gpu_measure.py does, but tp_mlp forgets g, and in the layer
# one rank does not come to its end.
FAULTY = """
import sys, time
sys.path.append({tools!r})
import gpu_measure

def layer_ways(*args, right=gpu_measure.layer_ways):
    if args[-1].rank() == 1:
        {line}
    return right(*args)

def tp_mlp(full, group, right=gpu_measure.lesson01.tp_mlp):
    mlp = right(full, group)
    mlp.down_proj.reduce = lambda x, group: x
    return mlp

gpu_measure.MODULES[gpu_measure.LAYER] = layer_ways
gpu_measure.lesson01.tp_mlp = tp_mlp
gpu_measure.main()
"""


def run(command: list[str], limit: float) -> tuple[int | None, str]:
    """Instead of tools/check.py's: measures in a nursery, lessons as in ENDS."""
    if command[1].endswith("check.py"):
        return 1, "ok  python\n✗   host name  it does not resolve\n   → a hint"
    number, script = command[4], Path(command[5])
    ranks = int(number.removeprefix("--nproc_per_node="))
    if script.parent == Path(gpu_measure.__file__).parent or script.stem == "faulty":
        done = jobs.launch(script, ranks, *command[6:])
        assert done.left == []
        return done.code, done.text
    return ENDS.get((script.stem[:2], ranks), (0, f"PASS  {script.stem}  fine"))


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Exit code, screen, Markdown and JSON of one report on two ranks."""
    folder = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_report, "run", run)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        argv = ["gpu_report.py", "--cpu", "--folder", str(folder)]
        patch.setattr("sys.argv", argv)
        code = gpu_report.main()
    text = (folder / "gpu-report.md").read_text("utf-8")
    return code, text, json.loads((folder / "gpu-report.json").read_text("utf-8"))


def test_it_measures_each_module_at_four_sizes_in_three_ways(report):
    code, _, data = report
    rows = [row for row in data["rows"] if "way" in row]
    for name in (gpu_measure.MLP, gpu_measure.LAYER):
        for hidden in gpu_measure.ON_CPU[0]:
            found = [r for r in rows if (r["what"], r["hidden"]) == (name, hidden)]
            assert [row["way"] for row in found] == GOOD
            assert [row["result"] for row in found] == ["reference", "PASS", "PASS"]
            assert all(row["seconds"] > 0 for row in found)
            assert [row["diff"] < 1e-12 for row in found] == [True] * 3
            assert found[1]["in calls"] > 0 and found[2]["in calls"] > 0
            assert "in calls" not in found[0], "one process sends nothing"
    assert max(row["diff"] for row in rows) > 0, "they were compared"
    assert code == 1, "a lesson failed"


def test_the_bus_bandwidth_is_that_of_nccl_tests(report):
    rows = [row for row in report[2]["rows"] if row["what"] == "all-reduce"]
    assert [row["bytes"] for row in rows] == gpu_measure.ON_CPU[4]
    for row in rows:  # two ranks send each byte once: 2 (T − 1) / T = 1
        assert row["bus bytes/s"] == pytest.approx(row["bytes"] / row["seconds"])


def test_the_table_has_every_lesson_and_no_name(report):
    _, text, data = report
    table = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert tuple(cells[0]) == gpu_report.COLUMNS
    assert {len(row) for row in cells} == {len(gpu_report.COLUMNS)}
    assert len(cells) == len(data["rows"]) + 2
    results = {row[0]: row[1:3] for row in cells}
    assert results["tools/check.py"][1] == "FAIL host name  it does not resolve"
    assert results["00_collectives"] == ["2", "PASS"]
    assert results["02_transformer_tp"] == ["1", "PASS"], "two ranks were refused"
    assert results["03_vocab_parallel"][1] == "FAIL stopped after 100 s"
    sizes = [f"all-reduce of {size // 1024} KiB" for size in gpu_measure.ON_CPU[4]]
    assert set(sizes) <= set(results)
    assert results["01_naive_mlp_tp"][1] == (
        "FAIL exit code 1; FAIL  01 wrong, see 01.py on ADDRESS"
    )
    assert set(jobs.LESSONS + jobs.BEYOND) <= set(results)
    everything = text + json.dumps(data)
    assert str(Path.home()) not in everything and str(jobs.ROOT) not in everything
    assert not re.search(rf"\b{re.escape(socket.gethostname())}\b", everything)


def measured_with(line: str, folder: Path, monkeypatch) -> list[dict]:
    script = folder / "faulty.py"
    tools = str(Path(gpu_measure.__file__).parent)
    script.write_text(FAULTY.format(line=line, tools=tools))
    monkeypatch.setattr(gpu_report, "run", run)
    monkeypatch.setattr(gpu_report, "MEASURED", script)
    return gpu_report.run_measured(2, True, 600, timeout=5)


@pytest.mark.parametrize("line, says", [
    ("raise ValueError(f'no luck in {__file__}')", "rank 1 raised ValueError: no luck"),
    ("time.sleep(3600)", r"rank 0 raised .*(?:[Tt]imed out|[Tt]imeout)"),
])  # fmt: skip
def test_a_rank_that_fails_or_hangs_leaves_what_was_measured(
    line, says, tmp_path, monkeypatch
):
    """And a way that differs from one process has no time."""
    rows = measured_with(line, tmp_path, monkeypatch)
    whole = len(gpu_measure.ON_CPU[4]) + 3 * len(gpu_measure.ON_CPU[0])
    assert len(rows) == whole + 1
    assert re.match(rf"FAIL after {whole} rows: {says}", rows[-1]["result"]), rows[-1]
    assert str(tmp_path) not in rows[-1]["result"]
    for row in rows[:-1]:
        is_wrong = row.get("way") == gpu_measure.HAND
        is_right = row["result"] in ("PASS", "reference")
        assert is_right or row["result"].startswith("FAIL off by")
        assert is_right is not is_wrong
        assert ("seconds" in row) is not is_wrong


def test_a_machine_without_gpus_says_so_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpu_report.py"])
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert gpu_report.main() == 2
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "make gpu-report ARGS=--cpu" in said


def test_when_ten_minutes_are_over_the_rest_is_named(monkeypatch):
    monkeypatch.setattr(gpu_report, "run", run)
    rows = gpu_report.run_scripts(2, until=0)
    assert {row["result"] for row in rows} == {"not run: 10 minutes are over"}
    assert len(rows) == len(jobs.LESSONS + jobs.BEYOND)


@pytest.mark.parametrize("limit, result", [
    (12.0, "not finished: 10 minutes are over"),
    (gpu_report.SCRIPT, "FAIL stopped after 100 s"),
])  # fmt: skip
def test_what_the_ten_minutes_stop_has_not_failed(limit, result, monkeypatch):
    monkeypatch.setattr(gpu_report, "run", run)
    row = gpu_report.run_script(jobs.PATHS["03_vocab_parallel"], 2, limit)
    assert row["result"] == result


# What is predicted, for eight H100.

SIZE = {"hidden": 8192, "batch": 4, "seq_len": 1024, "ranks": 8, "result": "PASS"}


def test_the_prediction_is_arithmetic_and_messages():
    machine = MACHINES["dgx-h100"]
    flops = 3 * 2 * 4096 * (2 * 8192 * 4 * 8192)
    row = SIZE | {"what": gpu_measure.MLP, "way": gpu_measure.ONE}
    one = gpu_report.predicted_seconds(row, machine)
    assert one == pytest.approx(flops / 989e12)
    x = 2 * 4096 * 8192
    sent = 2 * (x * 2 * 7 / 8 / 450e9 + 14 * 2e-6)  # two all-reduces, of 14 steps
    row["way"] = gpu_measure.HAND
    found = gpu_report.predicted_seconds(row, machine)
    assert found == pytest.approx(flops / 8 / 989e12 + sent)

    row |= {"what": gpu_measure.LAYER}
    scores = 4 * 1024 * 8192  # per token and pass
    flops = 3 * 4096 * (2 * 12 * 8192**2 + scores)
    sent = 10 * (x * 7 / 8 / 450e9 + 7 * 2e-6)  # ten half all-reduces (lesson 04)
    found = gpu_report.predicted_seconds(row, machine)
    assert found == pytest.approx(flops / 8 / 989e12 + sent)


def test_the_predicted_peak_is_the_planners():
    """34·X + 5·A of the paper, without dropout's masks, and what backward needs."""
    row = SIZE | {"what": gpu_measure.LAYER, "way": gpu_measure.ONE}
    X, scores = 4096 * 8192, 4 * 128 * 1024**2
    saved = 32 * X + 2 * scores + 4 * 4096 * 4
    assert gpu_report.predicted_peak(row) == saved + 2 * (2 * 4 + 1) * X
    row["way"] = gpu_measure.HAND
    layout = gpu_report.layout_of(row, 8)
    most = predict.layer_bytes(layout) + predict.layer_in_forward(layout)
    assert gpu_report.predicted_peak(row) >= most


@pytest.mark.parametrize("gpus, name", [
    (["NVIDIA H100 80GB HBM3"] * 8, "dgx-h100"),
    (["NVIDIA A100-SXM4-80GB"] * 2, "dgx-a100"),
    (["NVIDIA GB200"] * 4, "gb200-nvl72"),
    (["NVIDIA A100-PCIE-40GB", "NVIDIA A100-SXM4-80GB"], None),
    (["NVIDIA H100 PCIe"] * 2, None),
    (["NVIDIA A100-PCIE-40GB"] * 2, None),
    (["NVIDIA H100 NVL"] * 2, None),
    (["NVIDIA GH200 480GB"] * 2, None),
    (["NVIDIA GeForce RTX 4090"] * 2, None),
    (["CPU"], None),
])  # fmt: skip
def test_the_data_sheet_of_a_gpu(gpus, name):
    assert gpu_report.sheet_of(gpus) == (MACHINES[name] if name else None)


def test_cells_show_what_is_predicted():
    row = SIZE | {"what": gpu_measure.LAYER, "way": gpu_measure.HAND}
    row |= {"seconds": 0.004, "in calls": 0.001, "peak": 2_000_000}
    cells = gpu_report.cells_of(row, MACHINES["dgx-h100"])
    assert (cells["step, ms"], cells["calls alone"]) == ("4.00", "25 %")
    assert cells["peak, MB"] == "2" and float(cells["predicted, ms"]) > 0
    assert float(cells["predicted, MB"].replace(",", "")) > 0
    row = {"what": "all-reduce", "bytes": 2**20, "bus bytes/s": 3e11, "result": "PASS"}
    cells = gpu_report.cells_of(row, MACHINES["dgx-h100"])
    assert (cells["GB/s"], cells["data sheet"]) == ("300.00", "450")
