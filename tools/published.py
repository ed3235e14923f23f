"""What other people measured, next to what tools/predict.py says of the same layout.

    python tools/published.py
    python tools/published.py --page > docs/_static/planner/presets.json

A row is a run: model, machine, layout, and a step's time, in the unit that was
published. `ratio` is measured over predicted seconds. Each row has a source that can be
opened; a row of which only the result is known, and not the layout, is not here.

A published MFU counts all S × S scores: so do arXiv:2204.02311 (which defined it),
2104.04473 and 2205.05198, llm-foundry and torchtitan (its count of FLOPs ignores that
the mask is causal); arXiv:2407.21783 does not say. Times and MFU that are printed here
count half of them where a causal kernel computes half (--scores of tools/plan.py).
"""

import argparse
import json
import sys
from typing import NamedTuple

import predict
from presets import MACHINES, MODELS, llama, model

MEGATRON = "arXiv:2104.04473, Table 1"
RECOMPUTATION = "arXiv:2205.05198, Table 5"
LLAMA = "arXiv:2407.21783, Table 4"
TITAN = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
TITAN_A100 = "pytorch/torchtitan, docs/performance.md"
FOUNDRY = "mosaicml/llm-foundry, scripts/train/benchmarking/README.md"
DGXC = "NVIDIA/dgxc-benchmarking, nemotron4-340b/README.md"
# The repository's tag belongs to the source: later ones measured other versions.
RECIPES = "NVIDIA/dgxc-benchmarking"
LLAMA_RECIPE = RECIPES + ", v24.11.1, llama3.1/README_{}.md"
GPT_RECIPE = RECIPES + ", v25.03, nemo_megatron/README_175b.md"
NEMOTRON_RECIPE = RECIPES + ", v25.03, nemotron/README_15b.md"
MAXTEXT_RECIPE = RECIPES + ", v24.11.1, maxtext/README_70b.md"
GROK_RECIPE = RECIPES + ", v24.11.1, grok1/README_314b.md"
QWEN_RECIPE = RECIPES + ", v25.12, qwen3/pretrain/README.md"
BRIDGE = "NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary-archive.md"
# Kinds of runs, and how many times longer than predicted they took: what the command,
# the page and notebook 07 say. A test compares these with the rows.
PIPELINE_2021 = "pipelines of 2021, A100, full recomputation"
SP_2022 = "TP + SP of 2022, A100, selective recomputation"
FSDP = "FSDP, with and without tp"
INTERLEAVED = "interleaved pipelines with tp 4 or 8, H100"
REPLICAS = "ZeRO-1 without a pipeline, H100"
EXPERTS = "experts, interleaved pipelines, H100 and GB200"
LONG = "sequences of 65,536 and more, H100"
BANDS = {
    PIPELINE_2021: (1.5, 2.2),
    SP_2022: (1.3, 1.8),
    FSDP: (1.5, 2.6),
    REPLICAS: (1.5, 1.8),
    INTERLEAVED: (1.2, 1.6),
    EXPERTS: (1.4, 2.0),
    LONG: (2.2, 3.9),
}


class Row(NamedTuple):
    """unit of `measured`: "mfu"; "seconds" per step; "tokens" per second and GPU;
    "hfu": FLOP/s per GPU, where what is recomputed counts as work."""

    name: str
    kind: str
    source: str
    sizes: dict
    machine: argparse.Namespace
    layout: dict
    unit: str
    measured: float


def gpus_of(name: str, layout: dict, **more) -> argparse.Namespace:
    """A machine of the run's size. It ran, so no part of the memory stays free."""
    gpus = 1
    for axis in ("dp", "pp", "tp", "cp"):
        gpus *= layout.get(axis, 1)
    return argparse.Namespace(**{**MACHINES[name], "gpus": gpus, "reserve": 0, **more})


def gpt(layers, hidden, heads, batch_size, vocab_size=51200) -> dict:
    sizes = (layers, hidden, heads, heads, vocab_size, 2048, batch_size)
    return model(*sizes, tie=True)


def megatron_2021() -> list[Row]:
    measured = {
        "gpt-1.7b": 137, "gpt-3.6b": 138, "gpt-7.5b": 142, "gpt-18.4b": 135,
        "gpt-39.1b": 138, "gpt-76.1b": 140, "gpt-145.6b": 148, "gpt-310.1b": 155,
        "gpt-529.6b": 163, "gpt-1008b": 163,
    }  # fmt: skip
    rows = []
    for name, tera in measured.items():
        sizes = MODELS[name]
        dp, pp, tp = sizes["published"]
        layout = dict(dp=dp, pp=pp, tp=tp, recompute="full", attention="math")
        machine = gpus_of("dgx-a100", layout)
        run = (sizes, machine, layout, "hfu", tera * 1e12)
        rows.append(Row(name, PIPELINE_2021, MEGATRON, *run))
    return rows


def recomputation_2022() -> list[Row]:
    rows = []
    for name, sizes, pp, dp, mfu in (
        ("22B", gpt(48, 6144, 64, 4), 1, 1, 0.415),
        ("175B", gpt(96, 12288, 96, 64), 8, 1, 0.514),
        ("530B", gpt(105, 20480, 128, 280), 35, 1, 0.560),
        ("1T", gpt(128, 25600, 160, 512), 64, 1, 0.563),
        ("530B, 8 replicas", gpt(105, 20480, 128, 2240), 35, 8, 0.542),
    ):
        layout = dict(dp=dp, pp=pp, tp=8, recompute="selective", attention="math")
        machine = gpus_of("dgx-a100", layout)
        run = (sizes, machine, layout, "mfu", mfu)
        rows.append(Row(f"GPT {name}", SP_2022, RECOMPUTATION, *run))
    return rows


def llama_405b() -> list[Row]:
    """tp 8, pp 16, interleaved, a layer less on the first and the last stage. How many
    chunks a stage has is not in the table: 8, of one layer, is assumed. The planner may
    recompute; the paper did not have to."""
    rows = []
    for dp, cp, seq_len, batch_size, mfu in (
        (64, 1, 8192, 2048, 0.43),
        (128, 1, 8192, 2048, 0.41),
        (8, 16, 131072, 128, 0.38),
    ):
        sizes = MODELS["llama-3-405b"] | dict(seq_len=seq_len, batch_size=batch_size)
        layout = dict(dp=dp, pp=16, tp=8, cp=cp, virtual=8, zero=1)
        layout.update(micro_batch=1, attention="flash")
        machine = gpus_of("dgx-h100", layout)
        name = f"Llama 3 405B, {machine.gpus:,} GPUs, cp {cp}"
        kind = LONG if cp > 1 else INTERLEAVED
        rows.append(Row(name, kind, LLAMA, sizes, machine, layout, "mfu", mfu))
    return rows


def nemotron() -> list[Row]:
    sizes = model(96, 18432, 96, 8, 256000, 4096, 64, biases="none")
    layout = dict(dp=4, pp=8, tp=8, virtual=12, zero=1, micro_batch=1)
    layout.update(attention="flash")
    machine = gpus_of("dgx-h100", layout)
    run = (sizes, machine, layout, "seconds", 4.31)
    return [Row("Nemotron-4 340B, 256 GPUs", INTERLEAVED, DGXC, *run)]


def recipes() -> list[Row]:
    """NVIDIA's recipes in 16 bits, the smallest and the largest run of each: two
    numbers of GPUs, and seconds per step on each. One sequence per micro-batch."""
    nemotron_15b = model(32, 6144, 48, 8, 256000, 4096, 64, biases="none")
    rows = []
    for name, kind, source, sizes, batch_size, mesh, runs in (
        ("Llama 3.1 405B", INTERLEAVED, LLAMA_RECIPE.format("405b"),
         MODELS["llama-3-405b"], 252, dict(tp=8, pp=9, cp=2, virtual=7),
         {576: 17.20, 2304: 17.62}),
        ("Llama 3.1 70B", INTERLEAVED, LLAMA_RECIPE.format("70b"),
         MODELS["llama-3-70b"], 128, dict(tp=4, pp=4, cp=2, virtual=5),
         {64: 14.72, 1024: 14.92}),
        ("GPT-3 175B", INTERLEAVED, GPT_RECIPE, MODELS["gpt3"], 256,
         dict(tp=4, pp=8, virtual=12), {128: 8.309, 2048: 8.49}),
        ("Llama 3.1 8B", REPLICAS, LLAMA_RECIPE.format("8b"), MODELS["llama-3-8b"],
         128, dict(cp=2), {8: 12.91, 128: 13.10}),
        ("Nemotron-4 15B", REPLICAS, NEMOTRON_RECIPE, nemotron_15b, 64,
         dict(tp=4, micro_batch=4), {16: 2.812, 2048: 2.887}),
    ):  # fmt: skip
        sizes = sizes | dict(batch_size=batch_size)
        rows += of_recipe(name, kind, source, sizes, mesh, runs)
    return rows


def of_recipe(name, kind, source, sizes, mesh, runs, machine="dgx-h100") -> list[Row]:
    """runs: GPUs → seconds per step. The batch is that of the first run and grows with
    the GPUs. ZeRO-1 (mcore_distributed_optim); messages of dp overlap."""
    of = "GB200" if machine == "gb200-nvl72" else "H100"
    rows = []
    for gpus, seconds in runs.items():
        layout = dict(pp=1, tp=1, cp=1, virtual=1, micro_batch=1, zero=1) | mesh
        layout.update(attention="flash", overlap_dp=True)
        layout["dp"] = gpus // (layout["pp"] * layout["tp"] * layout["cp"])
        batch = sizes["batch_size"] * gpus // min(runs)
        run = (sizes | dict(batch_size=batch), gpus_of(machine, layout), layout)
        row = Row(f"{name}, {gpus:,} {of}", kind, source, *run, "seconds", seconds)
        rows.append(row)
    return rows


def maxtext() -> list[Row]:
    """FSDP over 64 GPUs; the second over 128 in four replicas, here over all 512. What
    it recomputes is not in the README, so the planner chooses."""
    sizes = llama(80, 8192, 64, 28672, 128) | dict(vocab_size=32000, seq_len=4096)
    mesh = dict(zero=3, micro_batch=2)
    runs = {64: 6.999, 512: 7.091}
    return of_recipe("Llama 2 70B", FSDP, MAXTEXT_RECIPE, sizes, mesh, runs)


def experts() -> list[Row]:
    """Grok-1's sizes: grok1_314b.yaml next to the README. A token that finds its expert
    full is dropped (capacity factor 1), so no expert has more than the mean."""
    grok = (64, 6144, 48, 8, 128256, 8192, 1024, 0)
    more = dict(experts=8, top_k=2, expert_ffn=32768)
    grok = model(*grok, gated=True, biases="none", **more)
    qwen = MODELS["qwen3-235b-a22b"]
    rows = of_recipe(
        "Grok-1 314B", EXPERTS, GROK_RECIPE, grok,
        dict(tp=4, pp=8, cp=2, ep=8, virtual=8), {512: 20.83, 2048: 21.09},
    )  # fmt: skip
    rows += of_recipe(
        "Qwen3 235B", EXPERTS, QWEN_RECIPE, qwen | dict(batch_size=2048),
        dict(tp=2, pp=8, ep=32, virtual=4), {256: 25.532},
    )  # fmt: skip
    rows += of_recipe(
        "Qwen3 235B", EXPERTS, BRIDGE, qwen | dict(batch_size=8192),
        dict(pp=8, ep=32, virtual=3), {256: 8192 * 4096 / (256 * 4916)}, "gb200-nvl72",
    )  # fmt: skip
    return rows


def mpt(layers, hidden, heads, seq_len, batch_size) -> dict:
    sizes = (layers, hidden, heads, heads, 50432, seq_len, batch_size)
    return model(*sizes, tie=True)


def foundry() -> list[Row]:
    """ZeRO 3, a fused loss (llmfoundry/models/mpt/modeling_mpt.py). The table has
    micro-batches, GPUs and tokens per second and GPU."""
    rows = []
    for name, sizes, gpus, b, recompute, tokens in (
        ("MPT 7B", mpt(32, 4096, 32, 2048, 48), 8, 6, "none", 10643),
        ("MPT 13B", mpt(40, 5120, 40, 2048, 128), 64, 2, "none", 4800),
        ("MPT 30B", mpt(48, 7168, 56, 2048, 1344), 32, 14, "full", 2308),
        ("MPT 70B", mpt(80, 8192, 64, 2048, 2048), 64, 8, "full", 1039),
        ("MPT 7B, S 65,536", mpt(32, 4096, 32, 65536, 16), 8, 1, "full", 1956),
    ):
        layout = dict(dp=gpus, pp=1, tp=1, zero=3, micro_batch=b, attention="flash")
        layout.update(recompute=recompute, loss="fused", overlap_dp=True)
        machine = gpus_of("dgx-h100", layout)
        run = (sizes, machine, layout, "tokens", tokens)
        kind = LONG if sizes["seq_len"] > 2048 else FSDP
        rows.append(Row(f"{name}, {gpus} H100", kind, FOUNDRY, *run))
    return rows


def titan() -> list[Row]:
    """Rows without float8: with it a product has another peak. The peak of the H100s
    of 500 W is not known exactly. What they call selective is the planner's half."""
    rows = []
    l8b, l70b, l405b = (MODELS[f"llama-3-{size}"] for size in ("8b", "70b", "405b"))
    for name, sizes, machine, dp, tp, b, recompute, tokens in (
        ("8B, 8 H100", l8b, "dgx-h100", 8, 1, 2, "half", 6667),
        ("8B, 128 H100", l8b, "dgx-h100", 128, 1, 2, "half", 6514),
        ("8B, 64 A100", l8b, "dgx-a100", 64, 1, 1, "half", 2973),
        ("70B, 64 A100", l70b, "dgx-a100", 64, 1, 1, "full", 331),
        ("405B, 128 H100", l405b, "dgx-h100", 16, 8, 2, "full", 109),
    ):
        sizes = sizes | dict(batch_size=dp * b)
        layout = dict(dp=dp, pp=1, tp=tp, zero=3, micro_batch=b, attention="flash")
        layout.update(recompute=recompute, overlap_dp=True, loss="torch")
        more = {}
        if machine == "dgx-h100":  # of another make: 96 GB, in bytes as 80 are 85
            more["gpu_memory"] = 102.0
        machine = gpus_of(machine, layout, **more)
        source = TITAN if "H100" in name and "405B" not in name else TITAN_A100
        run = (sizes, machine, layout, "tokens", tokens)
        rows.append(Row(f"Llama 3 {name}", FSDP, source, *run))
    return rows


def rows() -> list[Row]:
    """By kind, as BANDS has them."""
    found = [*megatron_2021(), *recomputation_2022(), *llama_405b(), *nemotron()]
    kinds = list(BANDS)
    found += [*foundry(), *titan(), *recipes(), *maxtext(), *experts()]
    return sorted(found, key=lambda row: kinds.index(row.kind))


# Peak memory (TITAN, tables 1 to 4), GiB that PyTorch's allocator had reserved. Not
# here: second rows for float8; tables 5 and 6, which do not say how many micro-batches
# a step has.

# Table 2: Llama 3.1 8B, one sequence per rank, full recomputation, float8: sequence,
# FSDP × CP, measured.
PEAKS = {
    32768: (8, 1, 83.9),
    65536: (4, 2, 84.2),
    131072: (2, 4, 84.0),
    262144: (1, 8, 84.5),
}


class Peak(NamedTuple):
    """predicted: bytes that PyTorch allocates at the peak. measured: bytes that its
    allocator had reserved, which are more: it keeps freed blocks of other sizes."""

    name: str
    layout: argparse.Namespace
    predicted: int
    measured: float


def peak_layout(seq_len: int) -> tuple:
    """The layout of a row of PEAKS, and its measured bytes (TITAN, Table 2)."""
    dp, cp, gib = PEAKS[seq_len]
    sizes = llama(32, 4096, 32, 14336, dp) | dict(seq_len=seq_len)
    options = dict(recompute="full", attention="flash", zero=3, loss="torch")
    return predict.make_layout(sizes, dp=dp, cp=cp, **options), gib * 2**30


def peaks() -> list[Peak]:
    """All rows. compiled: torch.compile, which fuses SiLU with the product."""
    found = []
    for seq_len, (dp, cp, _) in PEAKS.items():
        layout, measured = peak_layout(seq_len)
        name = f"Llama 3 8B, FSDP {dp}, cp {cp}, S {seq_len:,}"
        found.append((name, layout, measured))
    half = dict(micro_batch=2, recompute="half")
    full = dict(micro_batch=16, recompute="full", tp=8)
    for name, size, gib, more in (
        ("FSDP 8", "8b", 82.4, dict(dp=8, mlp_saves=4, **half)),
        ("FSDP 8, compiled", "8b", 77.0, dict(dp=8, **half)),
        ("FSDP 128", "8b", 67.0, dict(dp=128, mlp_saves=4, **half)),
        ("FSDP 128, compiled", "8b", 62.0, dict(dp=128, **half)),
        ("FSDP 32, tp 8", "70b", 71.9, dict(dp=32, **full)),
        ("FSDP 32, tp 8, AsyncTP", "70b", 67.6, dict(dp=32, **full)),
    ):
        batch = dict(batch_size=more["dp"] * more["micro_batch"])
        sizes = MODELS[f"llama-3-{size}"] | batch
        more.update(attention="flash", zero=3, loss="torch")
        layout = predict.make_layout(sizes, **more)
        found.append((f"Llama 3 {size.upper()}, {name}", layout, gib * 2**30))
    return [
        Peak(name, layout, sum(predict.memory(layout, 0).values()), measured)
        for name, layout, measured in found
    ]


def reserved() -> tuple[float, float]:
    """What was reserved over what is predicted to be allocated: least, largest."""
    ratios = [peak.measured / peak.predicted for peak in peaks()]
    return min(ratios), max(ratios)


# What the planner says of a row.

FIXED = "dp", "pp", "tp", "cp", "ep", "micro_batch", "recompute"


def predicted(row: Row) -> dict:
    """The published layout; the fastest micro-batch size that fits if none is known."""
    fixed = {name: row.layout[name] for name in FIXED if name in row.layout}
    fixed.setdefault("cp", 1)
    fits, too_large, _ = predict.search(row.sizes, row.machine, fixed, **options(row))
    if fits:
        return fits[0] | {"fits": True}
    return min(too_large, key=lambda found: found["memory"]) | {"fits": False}


def options(row: Row) -> dict:
    return {name: row.layout[name] for name in row.layout if name not in FIXED}


def seconds(row: Row, found: dict) -> float:
    """Measured seconds per step."""
    fixed = {name: found[name] for name in FIXED}
    layout = predict.make_layout(row.sizes, **fixed, **options(row))
    if row.unit == "seconds":
        return row.measured
    if row.unit == "tokens":
        tokens = row.sizes["batch_size"] * row.sizes["seq_len"]
        return tokens / (row.measured * row.machine.gpus)
    if row.unit == "hfu":
        return predict.hardware_flops(layout) / (row.measured * row.machine.gpus)
    rate = row.measured * row.machine.gpu_flops * row.machine.gpus
    return predict.model_flops(predict.changed(layout, scores="all")) / rate


def compare_time(row: Row) -> dict:
    """predicted: its row; ratio: measured over predicted seconds; mfu: measured, with
    the scores that the prediction counts."""
    found = predicted(row)
    ratio = seconds(row, found) / found["seconds"]
    return dict(predicted=found, ratio=ratio, mfu=found["mfu"] / ratio)


def compare(row: Row) -> dict:
    """The same, and place: of the published mesh among those that fit, the fastest
    first, and their number; first: the fastest row."""
    times = compare_time(row)
    found = times["predicted"]
    fits, _, _ = predict.search(row.sizes, row.machine, **options(row))
    meshes = [tuple(x[a] for a in ("dp", "pp", "tp", "cp")) for x in fits]
    meshes = list(dict.fromkeys(meshes))
    mesh = tuple(found[axis] for axis in ("dp", "pp", "tp", "cp"))
    place = meshes.index(mesh) + 1 if mesh in meshes else None
    return dict(**times, place=place, of=len(meshes), first=fits[0])


def bands(compared: list[tuple[Row, dict]]) -> dict[str, tuple[int, float, float]]:
    """Kind → number of rows, least and largest ratio."""
    found = {}
    for kind in BANDS:
        ratios = [each["ratio"] for row, each in compared if row.kind == kind]
        found[kind] = len(ratios), min(ratios), max(ratios)
    return found


def show_places(compared: list[tuple[Row, dict]]) -> None:
    """How many layouts are among the first three; and what is first if not."""
    others = [each for _, each in compared if (each["place"] or 9) > 3]
    near = f"{len(compared) - len(others)} of {len(compared)}"
    print(f"\n{near} published meshes are among the first three that fit.")
    more = [x["first"]["memory"] / x["predicted"]["memory"] for x in others]
    narrow = sum(x["first"]["tp"] < x["predicted"]["tp"] for x in others)
    order = predict.RECOMPUTE.index
    less = [[order(x[y]["recompute"]) for y in ("first", "predicted")] for x in others]
    print(
        f"In the {len(others)} others the first holds {min(more):.1f} to "
        f"{max(more):.1f} times as much; its tp is\nnarrower in {narrow}, and it "
        f"recomputes less in {sum(a < b for a, b in less)}."
    )


def page_data() -> str:
    """Models, machines and how wrong the predictions are, for the page with sliders."""
    data = {"models": MODELS, "machines": MACHINES, "bands": [], "peaks": []}
    for kind, (low, high) in BANDS.items():
        data["bands"].append({"kind": kind, "low": low, "high": high})
    for peak in peaks():
        row = {"run": peak.name, "predicted": peak.predicted, "measured": peak.measured}
        data["peaks"].append(row)
    return json.dumps(data, indent=1) + "\n"


def main() -> None:
    compared = [(row, compare(row)) for row in rows()]
    head = f"{'run':36} {'fits':>4} {'GB':>5} {'MFU':>5} {'measured':>8} {'ratio':>5}"
    print(f"{head}  place")
    for row, each in compared:
        found = each["predicted"]
        fits = "yes" if found["fits"] else "no"
        numbers = f"{fits:>4} {found['memory'] / 1e9:5.1f} {found['mfu']:5.0%}"
        numbers += f" {each['mfu']:8.0%} {each['ratio']:5.2f}"
        print(f"{row.name:36} {numbers}  {each['place']} of {each['of']}")
    show_places(compared)
    print("\nmeasured over predicted seconds")
    for kind, (count, low, high) in bands(compared).items():
        print(f"{kind:46} {count:2} rows: {low:.2f} to {high:.2f}")
    print(f"\n{'peak, GB':36} allocated, predicted  reserved, measured  ratio")
    for name, _, found, measured in peaks():
        numbers = f"{found / 1e9:20.1f}  {measured / 1e9:18.1f}"
        print(f"{name:36} {numbers}  {measured / found:5.2f}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--page"]:
        print(page_data(), end="")
    else:
        main()
