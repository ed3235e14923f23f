"""The player of recorded runs shows what the recordings hold, and they are fresh."""

import json
import math
import re
import sys
from collections import Counter
from itertools import combinations, pairwise

import jobs
import pytest
import torch
from pictures import ARROWS, contrast, draw, walk

lesson_00 = jobs.load("00_collectives")
sys.path.append(str(jobs.ROOT / "docs"))
record = jobs.load("record")
record_schedules = jobs.load("record_schedules")
PATHS = record.FOLDER.glob("*.json")
RECORDED = {path.stem: json.loads(path.read_text("utf-8")) for path in PATHS}


def test_every_scene_is_recorded():
    assert set(RECORDED) == set(record.SCENES)


def test_the_bytes_are_those_of_the_lessons_formula():
    for name, recording in RECORDED.items():
        ledger = recording["ledger"]
        off = {x["row"] for x in ledger if x["bytes"] != x["predicted"]}
        expected = {"backward all-reduce over tp"} if "break" in name else set()
        assert ledger and off == expected, name
        assert (record.FOLDER / f"{name}.json").stat().st_size <= 31_000, name


def test_bytes_are_payload_or_sent_by_a_rank():
    """A caption says which; each step and the ledger agree with the lesson's rule."""
    for recording in RECORDED.values():
        check_bytes(recording)


def check_bytes(recording: dict) -> None:
    for event in recording["events"]:
        for found in re.finditer(r"\d+ bytes", event["says"]):
            after = event["says"][found.end() :]
            assert found[0] == "0 bytes" or after.startswith(" of payload"), event[
                "says"
            ]
        if "call" not in event:
            continue
        size = len(event["call"]["groups"][0])
        for part in event["ranks"]:
            payload = sum(part["bytes"].values())
            sends = lesson_00.ring(event["call"]["collective"], payload, size)
            if event["call"].get("uneven"):  # its payload is what leaves the rank
                width = part["makes"][0]["shape"][1]
                rank = event["ranks"].index(part)
                sends = 4 * width * (sum(part["splits"]) - part["splits"][rank])
                assert payload == sends
            assert part["sends"] == sends > 0
    for rank in range(recording["ranks"]):
        parts = [event["ranks"][rank] for event in recording["events"]]
        ring = [x["ring"] for x in recording["ledger"] if x["rank"] == rank]
        if "time" not in recording:  # its messages are of two runs
            assert sum(part.get("sends", 0) for part in parts) == sum(ring)


def check_ring(recording: dict) -> None:
    """In each of 2(T − 1) steps every rank gets exactly one chunk, from its left
    neighbor: that neighbor's chunk of the step before, alone or added to its own."""
    T = recording["ranks"]
    steps = [event for event in recording["events"] if event["kind"] == "send"]
    assert len(steps) == 2 * (T - 1)
    chunks = [event["makes"][0] for event in recording["events"][0]["ranks"]]
    for number, event in enumerate(steps):
        made = [part["makes"][0] for part in event["ranks"]]
        for rank, part in enumerate(event["ranks"]):
            left = (rank - 1) % T
            assert part["from"] == left and part["to"] == (rank + 1) % T
            (chunk,) = part["moved"]
            arrived = chunks[left]["values"][chunk]
            adds = number < T - 1
            own = chunks[rank]["values"][chunk] if adds else 0
            assert made[rank]["values"][chunk] == own + arrived
            who = chunks[rank]["who"][chunk] if adds else 0
            assert made[rank]["who"][chunk] == chunks[left]["who"][chunk] | who
            for other in set(range(T)) - {chunk}:
                assert made[rank]["values"][other] == chunks[rank]["values"][other]
        chunks = made
    assert all(who == 2**T - 1 for part in chunks for who in part["who"])


def made_by(recording: dict, rank: int) -> dict:
    """name → the values of every tensor of that name that a rank made, in order."""
    tensors = {}
    for event in recording["events"]:
        for made in event["ranks"][rank].get("makes", []):
            if "values" in made and "−∞" not in made["values"]:
                values = torch.tensor(made["values"]).view(made["shape"])
                tensors.setdefault(made["name"], []).append(values)
    return tensors


@pytest.mark.parametrize("whole", ["y_BSD", "dL/dx_BSD"])
def test_sums_are_right_as_shown(whole):
    """With two decimals: 0.04 + 0.07 is not to give 0.10."""
    ranks = [made_by(RECORDED["mlp"], rank) for rank in range(2)]
    partial = [made[f"partial_{whole}"][0].flatten().tolist() for made in ranks]
    total = ranks[0][whole][0].flatten().tolist()
    for *terms, result in zip(*partial, total):
        shown = sum(float(f"{term:.2f}") for term in terms)
        assert f"{shown:.2f}" == f"{result:.2f}"


@pytest.mark.parametrize("name", ["mlp", "mlp-break-f"])
def test_the_formula_of_the_first_caption_gives_the_recorded_numbers(name):
    """y = GELU(x · W₁ + b₁) · W₂ + b₂, on the recorded x, weights and biases."""
    recording = RECORDED[name]
    formula = recording["events"][0]["says"].partition(". ")[0]
    formula = formula.removeprefix("y = ").replace("GELU", "gelu").replace("·", "@")
    product, _, last = formula.rpartition(" + ")
    ranks = [made_by(recording, rank) for rank in range(recording["ranks"])]
    total = 0
    for made in ranks:
        names = ("x_BSD", "W₁_Df", "b₁_f", "W₂_fD", "b₂_D")
        values = {name.partition("_")[0]: made[name][0] for name in names}
        values["gelu"] = torch.nn.functional.gelu
        values = {ascii_name(name): value for name, value in values.items()}
        partial = eval(ascii_name(product), values)
        assert torch.allclose(partial, made["partial_y_BSD"][0], atol=1e-3)
        total = total + partial
    for made in ranks:
        expected = total + values[ascii_name(last)]
        assert torch.allclose(expected, made["y_BSD"][-1], atol=1e-3)


def attention_weights(q, k, rotary=True, root=True, causal=True):
    """Of [B, heads, S, H]; each of the three can be left out."""
    lesson = jobs.load("02_transformer_tp")
    S, H = q.shape[2:]
    if rotary:
        table = lesson.rotary_table(S, H)
        q, k = lesson.rotate(q, *table), lesson.rotate(k, *table)
    scores = q @ k.transpose(-1, -2)
    if root:
        scores = scores / H**0.5
    if causal:
        later = torch.ones(S, S).triu(1).bool()
        scores = scores.masked_fill(later, float("-inf"))
    return scores.softmax(-1)


def test_attention_weights_are_what_their_caption_says():
    """softmax(rotary(q) · rotary(k) / √2) over earlier positions, of the frame's own q
    and k. Without one of the three the numbers are others."""
    recording = RECORDED["attention"]
    (caption,) = [e["says"] for e in recording["events"] if "softmax" in e["says"]]
    assert "softmax(rotary(q) · rotary(k) / √2) over earlier positions" in caption
    for rank in range(recording["ranks"]):
        made = made_by(recording, rank)
        weights = made["softmax_BnSS"][0]
        heads, S = weights.shape[1:3]
        q, k = (
            made[name][0].view(1, S, heads, -1).transpose(1, 2)
            for name in ("q_BSd", "k_BSd")
        )
        assert q.shape[-1] == 2  # the root's number in the caption
        assert torch.allclose(attention_weights(q, k), weights, atol=2e-4)
        for name in ("rotary", "root", "causal"):
            other = attention_weights(q, k, **{name: False})
            assert not torch.allclose(other, weights, atol=2e-3), name


def test_y_is_the_output_alone():
    """The output of the first product has another letter."""
    suffixes = {}
    for event in RECORDED["mlp"]["events"] + RECORDED["mlp-break-f"]["events"]:
        for part in event["ranks"]:
            for made in part.get("makes", []):
                letter, _, suffix = made["name"].rpartition("_")
                suffixes.setdefault(letter, set()).add(suffix)
    assert suffixes["y"] == {"BSD"} and suffixes["a"] == {"BSf"}


def ascii_name(text: str) -> str:
    return text.translate(str.maketrans("₁₂", "12"))


def test_the_loss_is_what_its_caption_says():
    made = made_by(RECORDED["vocab-loss"], 0)
    says = " ".join(event["says"] for event in RECORDED["vocab-loss"]["events"])
    assert "loss = log(sum) − shifted[target]," in says
    loss = made["sum_BS"][0].log() - made["shifted[target]_BS"][0]
    assert torch.allclose(loss, made["loss_BS"][0], atol=1e-3)


def test_captions_are_short():
    for recording in RECORDED.values():
        for event in recording["events"]:
            words = re.findall(r"[\w₁₂/∂]+", event["says"])
            limit = 30 if "time" in recording else 24  # names in formulas are words
            assert len(words) <= limit, (len(words), event["says"])


def test_every_step_of_a_ring():
    for name in ("ring-2", "ring", "ring-8"):
        check_ring(RECORDED[name])


def last_of(recording: dict, rank: int, name: str, before=None) -> dict:
    """The tensor of that name that a rank made last, before an event."""
    for event in reversed(recording["events"][:before]):
        for made in event["ranks"][rank].get("makes", []):
            if made["name"] == name:
                return made
    raise LookupError(name)


@pytest.mark.parametrize("name", ["context-ring", "context-zigzag"])
def test_context_parallelism(name):
    """Keys and values come from the left neighbor, and are those of its last step; the
    scores are q · k of the positions' owners; y is attention; captions count right."""
    recording = RECORDED[name]
    T = recording["ranks"]
    q = {}
    kv = {}
    for part in recording["events"][0]["ranks"]:
        held = {made["name"]: made for made in part["makes"]}
        size = len(held["kv_2s"]["values"]) // 2
        for i, position in enumerate(held["q_s"]["columns"]):
            q[position] = held["q_s"]["values"][i]
            values = held["kv_2s"]["values"]
            kv[position] = (values[i], values[size + i])
    sends = [i for i, e in enumerate(recording["events"]) if e["kind"] == "send"]
    assert len(sends) == T - 1 and len(q) == 2 * T
    for i in sends:
        for rank, part in enumerate(recording["events"][i]["ranks"]):
            assert part["from"] == (rank - 1) % T
            theirs = last_of(recording, part["from"], "kv_2s", i)
            assert part["makes"] == [theirs | {"name": "next_kv_2s"}]
            kept = last_of(recording, rank, "kv_2s", i + 2)  # in the step after
            assert kept == theirs
    counts = []
    for rank in range(T):
        scores = last_of(recording, rank, "scores_sS")
        y = last_of(recording, rank, "y_s")["values"]
        queries = last_of(recording, rank, "q_s")["columns"]
        rows = torch.full((len(queries), 2 * T), float("-inf"))
        computed = 0
        for i, score in enumerate(scores["values"]):
            query = queries[i // (2 * T)]
            key = scores["columns"][i % (2 * T)]
            sees = int(key) <= int(query)
            assert isinstance(score, int) == sees, (rank, query, key)
            if sees:
                assert score == q[query] * kv[key][0]
                rows[i // (2 * T), i % (2 * T)] = score
                computed += 1
        values = torch.tensor([float(kv[str(p)][1]) for p in range(2 * T)])
        assert torch.allclose(
            rows.softmax(-1) @ values, torch.tensor(y).float(), atol=1e-3
        )
        counts.append(computed)
    says = recording["events"][-1]["says"]
    told = [int(number) for number in re.findall(r"needed (\d+)", says)]
    assert told == ([counts[0], counts[-1]] if "rank 3" in says else [*set(counts)])


def test_the_wrong_gradient_is_found():
    """One check fails, on both ranks; the sum of both gradients is the right one."""
    recording = RECORDED["wrong-gradient"]
    name = "dL/dlayernorm_D"
    for rank in range(recording["ranks"]):
        parts = [event["ranks"][rank] for event in recording["events"]]
        marks = [mark for part in parts for mark in part.get("marks", [])]
        assert [mark["name"] for mark in marks if not mark["ok"]] == [name]
        assert marks[-1]["name"] == f"sum_of_{name}" and len(marks) == 5
        total = torch.tensor(last_of(recording, rank, f"sum_of_{name}")["values"])
        terms = [last_of(recording, r, name)["values"] for r in (0, 1)]
        assert torch.allclose(torch.tensor(terms).sum(0), total, atol=2e-4)


def tensor_of(recording: dict, rank: int, name: str, at: int) -> torch.Tensor:
    """The tensor of that name that a rank had after an event, made or given."""
    for event in reversed(recording["events"][: at + 1]):
        part = event["ranks"][rank]
        for x in [*part.get("makes", []), *part.get("given", [])]:
            if x["name"] == name:
                return torch.tensor(x["values"]).float().view(x["shape"])
    raise LookupError(name)


def test_the_2d_mesh():
    """What is gathered is joined, what is reduced is added, over the axis that the
    caption and the table name; products are those of the frame's own tensors."""
    recording = RECORDED["mesh-2d"]
    events = recording["events"]
    groups = {"outer": [[0, 2], [1, 3]], "inner": [[0, 1], [2, 3]]}
    assert recording["at"] == [f"outer {o}, inner {i}" for o in (0, 1) for i in (0, 1)]
    axes = []
    payload = Counter()
    for at, event in enumerate(events):
        if "call" not in event:
            continue
        call = event["call"]
        axes.append(call["axis"])
        assert call["axis"] in event["says"] and call["groups"] == groups[call["axis"]]
        payload[call["axis"]] += sum(event["ranks"][0]["bytes"].values())
        for group in call["groups"]:
            sent = [tensor_of(recording, r, event["takes"], at - 1) for r in group]
            made = [event["ranks"][r]["makes"][0] for r in group]
            made = [torch.tensor(x["values"]).float().view(x["shape"]) for x in made]
            if call["collective"] == "all-gather":
                for full in made:
                    assert torch.equal(full, torch.cat(sent, call["dim"]))
            else:
                parts = sum(sent).chunk(len(group), call["dim"])
                assert all(map(torch.equal, made, parts))
            # An arrow in the color of its rank: no two ranks' tensors look the same.
            assert not torch.equal(*sent)
    assert axes == ["outer", "inner", "inner", "outer", "outer"]
    told = re.findall(r"(inner|outer), .*?: (\d+) bytes of payload", events[-1]["says"])
    assert {axis: int(n) for axis, n in told} == payload
    by_name = {e["ranks"][0]["makes"][0]["name"]: i for i, e in enumerate(events[:-1])}
    for rank in range(4):
        x = {n: tensor_of(recording, rank, n, i) for n, i in by_name.items()}
        h = x["h_bSf"][0]
        gathered = x["W_fD"]
        assert torch.equal(x["partial_y_bSD"][0], h @ gathered)
        assert torch.equal(x["dL/dh_bSf"][0], x["dL/dy_bSD"][0] @ gathered.T)
        assert torch.equal(x["partial_dL/dW_fD"], h.T @ x["dL/dy_bSD"][0])


def test_experts():
    """Rows go to the ranks of their experts, and what the experts make comes back in
    the same order; so do gradients. A row keeps its color; captions count right."""
    recording = RECORDED["experts"]
    events = recording["events"]
    ranks = range(recording["ranks"])
    counts_at = next(i for i, e in enumerate(events) if "call" in e)
    uneven = [i for i, e in enumerate(events) if e.get("call", {}).get("uneven")]
    assert len(uneven) == 4 and counts_at < uneven[0]
    whole = lambda rank, name, at=None: last_of(recording, rank, name, at)
    for rank in ranks:  # which experts, with which weights; sorted by expert
        chosen = whole(rank, "expert_tk")["values"]
        x = tensor_of(recording, rank, "x_tD", 0)
        order = sorted(range(len(chosen)), key=lambda i: chosen[i])
        rows = whole(rank, "rows_rD")
        assert rows["rows"] == [f"e{chosen[i]}" for i in order]
        values = torch.tensor(rows["values"]).view(rows["shape"])
        assert torch.equal(values, x[[i // 2 for i in order]])
        counts = whole(rank, "counts_E")["values"]
        assert counts == [chosen.count(expert) for expert in range(4)]
        owned = whole(rank, "experts")["values"]
        arriving = whole(rank, "arriving")
        theirs = [whole(other, "counts_E")["values"] for other in ranks]
        expected = [count[expert] for count in theirs for expert in owned]
        assert arriving["values"] == expected
        splits = events[uneven[0]]["ranks"][rank]["splits"]
        owners = [[0, 1], [2, 3]]
        assert splits == [sum(counts[e] for e in of) for of in owners]
        # The sum of both rows of a token, by weight.
        back = tensor_of(recording, rank, "back_rD", uneven[1])
        weights = tensor_of(recording, rank, "weight_tk", 1)
        assert torch.allclose(weights.sum(1), torch.ones(2), atol=1e-3)
        unsorted = back[[order.index(i) for i in range(len(order))]].view(2, 2, 2)
        y = tensor_of(recording, rank, "y_tD", uneven[1] + 1)
        assert torch.allclose((unsorted * weights[..., None]).sum(1), y, atol=1e-3)
    for turn, at in enumerate(uneven):
        event = events[at]
        sent = []
        for rank in ranks:
            part = event["ranks"][rank]
            given = [x for x in part.get("given", []) if x["name"] == event["takes"]]
            sent.append(given[0] if given else whole(rank, event["takes"], at))
        for rank in ranks:
            expected = {"values": [], "who": [], "rows": []}
            for other in ranks:
                splits = event["ranks"][other]["splits"]
                begin = sum(splits[:rank])
                end = begin + splits[rank]
                for key, width in (("values", 2), ("who", 2), ("rows", 1)):
                    of_all = sent[other][key]
                    expected[key] += of_all[begin * width : end * width]
            made = event["ranks"][rank]["makes"][0]
            assert {key: made[key] for key in expected} == expected, (at, rank)
            if turn % 2:  # back: each has its own tokens' rows
                assert set(made["who"]) == {2**rank}
                assert made["rows"] == whole(rank, "rows_rD")["rows"]
    away = events[uneven[0]]["ranks"][0]["splits"]
    comes = events[uneven[0]]["ranks"][1]["splits"]
    says = events[uneven[0]]["says"]
    assert [int(n) for n in re.findall(r"\d+", says)] == [
        0, away[1], sum(away), 1, comes[0], 0
    ]  # fmt: skip
    got = [whole(rank, "sorted_rD")["shape"][0] for rank in ranks]
    says = events[uneven[0] + 1]["says"]
    assert re.findall(r"rank (\d) has (\d)", says.lower()) == [
        ("0", str(got[0])),
        ("1", str(got[1])),
    ]
    assert got[1] < got[0] and got == [away[0] + comes[0], away[1] + comes[1]]
    for rank in ranks:  # sorted by expert, then computed; in the order of arrival again
        by_expert = whole(rank, "sorted_rD")
        assert by_expert["rows"] == sorted(by_expert["rows"])
        assert whole(rank, "out_rD")["rows"] == whole(rank, "arrived_rD")["rows"]


def alike(a, b) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[k], b[k]) for k in {*a} - {"diff"})
    if isinstance(a, list):
        return len(a) == len(b) and all(map(alike, a, b))
    return abs(a - b) < 0.015 if isinstance(a, float) else a == b


def test_recorded_anew_they_are_the_same(tmp_path):
    names = "mlp-break-f", "vocab-loss"
    assert not jobs.launch(record.__file__, 2, "--folder", tmp_path, *names).code
    for name in names:
        anew = json.loads((tmp_path / f"{name}.json").read_text())
        assert alike(anew, RECORDED[name])
    marks = RECORDED["mlp-break-f"]["events"][-1]["ranks"][0]["marks"]
    assert [mark["name"] for mark in marks if not mark["ok"]] == ["dL/dx_BSD"]


def test_size_colours_and_contrast():
    paths = (jobs.ROOT / "docs/_static/player").glob("*.js")
    texts = [path.read_text() for path in paths]
    text = "\n".join(texts)
    assert max(part.count("\n") for part in texts) <= 500
    assert max(map(len, text.splitlines())) <= 100
    colors = re.findall(r'"(#\w{6})"', text.partition("COLORS = ")[2][:250])
    assert colors == [*draw.COLORS, draw.EVERYONE]
    assert min(contrast("#000", color) for color in [*colors[:4], colors[-1]]) >= 4.5
    for theme in zip(*re.findall(r"--\w+: light-dark\((\S+), (\S+)\)", text)):
        back, ink, soft, _, good, bad = theme
        for pair in ((ink, back), (ink, soft), (good, soft), (bad, soft)):
            assert contrast(*pair) >= 4.5, pair


@pytest.fixture
def open_page(open_file):
    """Opens a recording, 360 px wide."""

    def open_page(name: str, motion="reduce", width=360):
        address = f"player/index.html?play={name}"
        page = open_file(address, width, 720, reduced_motion=motion)
        page.wait_for_selector("tp-player .caption")
        return page

    return open_page


FITTED = """width => {
  const player = document.querySelector("tp-player");
  return innerWidth === width && player.words_measured.width === player.box.clientWidth;
}"""


def resize(player, width: int) -> None:
    """A window of another width, in which the player shows its first step."""
    player.page.set_viewport_size({"width": width, "height": 720})
    player.page.wait_for_function(FITTED, arg=width)
    player.evaluate("player => player.go(0, false)")


SHOWN = """player => ({
  says: player.shadowRoot.querySelector("[aria-live=polite]").lastChild.data,
  count: player.shadowRoot.querySelector(".count").textContent,
  fits: document.documentElement.scrollWidth <= innerWidth,
  bytes: [...player.shadowRoot.querySelectorAll("td[data-rank]")].map(
    cell => [cell.dataset.row, +cell.dataset.rank, +cell.dataset.bytes]),
  badge: player.shadowRoot.querySelector(".badge").textContent,
  chips: [...player.shadowRoot.querySelectorAll(".chip")].map(chip => chip.textContent),
  sent: [...player.shadowRoot.querySelectorAll("td.sent")].map(td => td.textContent),
  off: [...player.shadowRoot.querySelectorAll("td.off")].map(cell => cell.textContent),
})"""


def labels_agree(shown: dict, event: dict) -> None:
    """The badge names the payload, the chips what a rank sends: from the recording."""
    if event["kind"] == "time":  # of several runs: a size for each arrow
        parts = [part.get("bytes", {}) for part in event["ranks"]]
        sizes = {n for part in parts for n in part.values()}
        told = {int(n) for n in re.findall(r"\d+", shown["badge"])}
        assert told == sizes and shown["chips"] == []
        return
    if not any("sends" in x for x in event["ranks"]):
        assert "bytes" not in shown["badge"] and shown["chips"] == []
        return
    payload = {sum(part["bytes"].values()) for part in event["ranks"]}
    word = "payload" if "call" in event else "each rank sends"
    if event.get("call", {}).get("uneven"):
        each = [sum(part["bytes"].values()) for part in event["ranks"]]
        assert f"ranks send {' and '.join(map(str, each))} bytes" in shown["badge"]
    else:
        (numbers,) = re.findall(rf"{word} ([\d or]+) bytes", shown["badge"])
        assert {int(number) for number in numbers.split(" or ")} == payload
    sends = re.findall(r"sends (\d+) bytes", " ".join(shown["chips"]))
    expected = [str(part["sends"]) for part in event["ranks"]]
    if "broadcast" in shown["badge"]:  # only those who have it send, all of it
        parts = [part for part in event["ranks"] if "from" not in part]
        expected = [str(sum(part["bytes"].values())) for part in parts]
    assert sends == expected


def sent_by(recording: dict, row: str, steps: int) -> int:
    """What all ranks have sent in these steps, for a row of the table."""
    parts = [p for event in recording["events"][:steps] for p in event["ranks"]]
    bytes_of = [(p, p.get("bytes", {}).get(row, 0)) for p in parts]
    return sum(p.get("sends", n) for p, n in bytes_of if n)


@pytest.mark.parametrize("name", RECORDED)
def test_it_plays_to_the_end_and_back(open_page, name):
    steps = [*enumerate(RECORDED[name]["events"], 1)]
    player = open_page(name).locator("tp-player")
    check_legend(name, player.locator(".legend").inner_text())
    sent = {(x["row"], x["rank"]): x["bytes"] for x in RECORDED[name]["ledger"]}
    rows = dict.fromkeys(row for row, _ in sent)
    ranks = RECORDED[name]["ranks"]
    ledger = Counter(sent)  # a rank that has no such row has sent nothing
    for key, order in (("ArrowRight", steps), ("ArrowLeft", steps[::-1])):
        looks = walk(player, SHOWN, key)
        for (number, event), shown in zip(order, looks, strict=True):
            assert shown["says"] == event["says"] and shown["fits"]
            assert shown["count"] == f"{number} / {len(steps)}"
            labels_agree(shown, event)
            assert ("✗ 0 of 24" in shown["off"]) == (
                "break" in name and number == len(steps)
            )
            if number == len(steps):
                table = Counter({(row, rank): n for row, rank, n in shown["bytes"]})
                assert table == ledger  # the sum of all events' bytes
            so_far = [sent_by(RECORDED[name], row, number) for row in rows]
            assert shown["sent"] == [f"{n / ranks:,.0f}" for n in so_far], number


def messages_of(event: dict) -> int:
    """How many arrows a step is to have."""
    if event["kind"] == "send":
        return len(event["ranks"])
    if "call" not in event or event["kind"] == "time":
        return 0
    groups = event["call"]["groups"]
    if event["call"]["collective"] == "broadcast":  # from one to the others
        return sum(len(group) - 1 for group in groups)
    if event["call"].get("uneven"):
        return sum(n > 0 for part in event["ranks"] for n in part["splits"])
    return sum(len(group) ** 2 for group in groups)


MESSAGES = """player => [...player.shadowRoot.querySelectorAll(".chart")].map(
    chart => [...chart.querySelectorAll(".message")].map(line => {
        const rows = [...chart.querySelectorAll(".bars")].map(
            bars => bars.getBoundingClientRect());
        const {top, bottom} = line.getBoundingClientRect();
        const touched = [...rows.keys()].filter(
            r => rows[r].top < bottom && rows[r].bottom > top);
        const ends = [touched[0], touched.at(-1)];
        if (line.classList.contains("up")) ends.reverse();
        const time = line.parentElement.getBoundingClientRect();
        const box = line.getBoundingClientRect();
        return [...ends, ((box.left + box.right) / 2 - time.left) / time.width];
    }))"""
KEPT = """player => [...player.shadowRoot.querySelectorAll(".chart")].map(
    chart => [...chart.querySelectorAll(".keeps")].map(
        words => parseFloat(words.textContent.replace(/[^0-9.]/g, ""))))"""


@pytest.mark.parametrize("name", ["schedules", "schedules-2"])
def test_messages_between_stages(open_page, name):
    """Arrows lead from the row that sends to the one that receives: to the next rank
    forward, to the previous one backward, each time that bytes are counted. They stand
    where they were sent."""
    recording = RECORDED[name]
    length = max(
        span["end"]
        for event in recording["events"]
        for part in event["ranks"]
        for span in part.get("spans", [])
    )
    P = recording["ranks"]
    for event in recording["events"]:
        for rank, part in enumerate(event["ranks"]):
            sent = {(m["run"], m["to"]) for m in part.get("messages", [])}
            step = {True: 1, False: -1}
            expected = {
                (row.partition(" ")[0], (rank + step["forward" in row]) % P)
                for row in part.get("bytes", {})
            }
            assert {(run.partition(" ")[0], to) for run, to in sent} == expected
            assert len(sent) == len(
                part.get("messages", [])
            )  # else its bytes are a sum
    player = open_page(name).locator("tp-player")
    for width in (390, 1280):
        resize(player, width)
        looks = walk(player, MESSAGES)
        for event, seen in zip(recording["events"], looks, strict=True):
            for run, arrows in zip(recording["time"]["runs"], seen, strict=True):
                parts = enumerate(event["ranks"])
                expected = [
                    (rank, message["to"], message["at"] / length)
                    for rank, part in parts
                    for message in part.get("messages", [])
                    if message["run"] == run
                ]
                for (*ends, place), (rank, to, at) in zip(
                    arrows, expected, strict=True
                ):
                    assert ends == [rank, to], (width, event["says"])
                    assert abs(place - at) < 0.01, (width, event["says"])


@pytest.mark.parametrize("name", ["schedules", "schedules-2"])
def test_what_a_rank_keeps_is_that_of_the_time_in_the_caption(open_page, name):
    events = RECORDED[name]["events"]
    parts = [(rank, x) for event in events for rank, x in enumerate(event["ranks"])]
    spans = [(rank, span) for rank, part in parts for span in part.get("spans", [])]
    looks = walk(open_page(name).locator("tp-player"), KEPT)
    for (event, later), seen in zip(pairwise(events), looks):
        middle = (event["time"] + later["time"]) / 2
        for run, shown in zip(RECORDED[name]["time"]["runs"], seen, strict=True):
            kept = record_schedules.kept_at(middle, spans, run, RECORDED[name]["ranks"])
            assert shown == kept or event["kind"] == "hold", event["says"]


@pytest.mark.parametrize("name", ["schedules", "schedules-2"])
def test_a_message_is_sent_when_a_pass_ends(name):
    """Its own time, not that at which the step of the player begins."""
    events = RECORDED[name]["events"]
    parts = [(rank, x) for event in events for rank, x in enumerate(event["ranks"])]
    ends = {}
    for rank, part in parts:
        for span in part.get("spans", []):
            ends.setdefault((rank, span["run"]), []).append(span["end"])
    messages = [(rank, x) for rank, part in parts for x in part.get("messages", [])]
    late = []
    for rank, message in messages:
        before = [e for e in ends[rank, message["run"]] if e <= message["at"]]
        late.append(message["at"] - max(before))
    assert len(late) > 70
    assert max(late) < 5  # ms; a pass takes 25 at least


ROUNDED = "attention mlp mlp-break-f sp-layer vocab-loss wrong-gradient".split()
FRAME = f"""player => ({{
  height: player.box.offsetHeight,
  table: player.totals.scrollWidth - player.totals.clientWidth,
  tops: [...player.stage.querySelectorAll(".lane")].flatMap((lane, rank) =>
    [...lane.querySelectorAll(".boxes > .box")].map(box => [rank + box.dataset.name,
      box.getBoundingClientRect().top - lane.getBoundingClientRect().top])),
  columns: [...player.stage.querySelectorAll(".lane .boxes > div")].map(
    column => [...column.querySelectorAll(".box")].map(box => box.dataset.name)),
  cut: [...player.stage.querySelectorAll(".cell")].filter(cell => cell.offsetParent &&
    cell.textContent && cell.scrollWidth > cell.clientWidth).map(
    cell => cell.textContent),
  arrows: ({ARROWS})(player),
  smallest: Math.min(...[...player.stage.querySelectorAll(".boxes .cell")].filter(
    cell => cell.offsetParent && cell.textContent).map(
    cell => parseFloat(getComputedStyle(cell).fontSize)).filter(Boolean)),
  ends: [...player.stage.querySelectorAll("svg .tip")].map(tip => {{
    const {{e, f}} = tip.transform.baseVal[0].matrix;
    return [e, f];
  }}),
}})"""


def check_frames(frames: list[dict], width: int) -> None:
    """The player keeps its height, no bytes are cut off, no boxes change places (where
    they do not wrap, as in a narrow one)."""
    assert max(frame["table"] for frame in frames) <= 0, width
    heights = [frame["height"] for frame in frames]
    assert max(heights) - min(heights) <= 2, (width, heights)
    for before, after in pairwise(frames):
        tops, later = dict(before["tops"]), dict(after["tops"])
        for name in tops.keys() & later.keys() if width > 1100 else ():
            assert abs(tops[name] - later[name]) <= 1, (width, name)
        for names in before["columns"]:
            for others in after["columns"]:
                both = [name for name in names if name in others]
                assert both == [name for name in others if name in names]


def check_legend(name: str, legend: str) -> None:
    """Letters of formulas are explained."""
    formulas = " ".join(entry["formula"] for entry in RECORDED[name]["ledger"])
    for letter in set(re.findall("[A-Za-z]+", formulas)):
        assert re.search(rf"\b{letter}\b", legend), (letter, legend)
    is_rounded = "numbers are rounded" in legend
    assert is_rounded == (name in ROUNDED)


@pytest.mark.parametrize("name", RECORDED)
def test_no_number_is_cut_or_crossed_and_arrows_lead_to_their_cells(open_page, name):
    player = open_page(name).locator("tp-player")
    for width in (390, 800, 1280, 1920):
        resize(player, width)
        frames = walk(player, FRAME)
        events = enumerate(RECORDED[name]["events"], 1)
        for (number, event), frame in zip(events, frames, strict=True):
            arrows = frame["arrows"]
            about = (width, number, arrows)
            assert frame["cut"] == [], about
            if name in ROUNDED:  # which lessons and the home page show
                assert frame["smallest"] >= 13, about
            assert arrows["tips"] == messages_of(event), about
            assert arrows["astray"] == arrows["crossed"] == [], about
            for one, other in combinations(frame["ends"], 2):  # no tip hides another
                assert math.dist(one, other) >= 12, about
        check_frames(frames, width)


ENDS = """player => [...player.stage.querySelectorAll("svg .tip")].map(tip => {
    const path = tip.previousElementSibling;
    const colors = [0, path.getTotalLength()].map(at => {
        const {x, y} = path.getPointAtLength(at).matrixTransform(path.getScreenCTM());
        const off = cell => {
            const box = cell.getBoundingClientRect();
            const numbers = cell.closest(".cells");
            const first = numbers.querySelector(".cell").getBoundingClientRect().left;
            const begin = box.left === first ? numbers.getBoundingClientRect().left
                : box.left; // left of the numbers: the names of rows
            return Math.hypot(Math.max(begin - x, x - box.right, 0),
                              Math.max(box.top - y, y - box.bottom, 0));
        };
        const all = [...player.stage.querySelectorAll(".cell")];
        const nearest = all.reduce((a, b) => (off(b) < off(a) ? b : a));
        return getComputedStyle(nearest).backgroundColor;
    });
    const color = getComputedStyle(tip).fill;
    const {from, to, cells} = tip.dataset;
    return {from: +from, to: +to, cells, color, colors};
})"""


def test_arrows_of_experts_lead_from_rows_to_the_same_rows(open_page):
    """A row has the color of its token's rank at both ends of an arrow: that of the
    sender on the way to the experts, that of the receiver on the way back."""
    page = open_page("experts", width=1280)
    for number, event in enumerate(RECORDED["experts"]["events"]):
        if event.get("call", {}).get("uneven"):
            arrows = page.locator("tp-player").evaluate(ENDS)
            by_rank = {arrow["from"]: arrow["color"] for arrow in arrows}
            back = event["takes"] in ("out_rD", "dL/darrived_rD")
            for arrow in arrows:
                owner = by_rank[arrow["to" if back else "from"]]
                assert arrow["colors"] == [owner, owner], (number, arrow)
                rows = event["ranks"][arrow["from"]]["splits"][arrow["to"]]
                assert arrow["cells"] == f"{2 * rows} {2 * rows}", (number, arrow)
        page.keyboard.press("ArrowRight")


def test_arrows_on_a_scaled_slide(open_page):
    """reveal.js scales its slides: 1.5 on a projector."""
    page = open_page("mlp", width=1280)
    page.add_style_tag(content="main { transform: scale(1.5); transform-origin: 0 0 }")
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    arrows = page.locator("tp-player").evaluate(ARROWS)
    assert arrows == {"tips": 4, "astray": [], "crossed": []}


HOLD_FLIGHTS = """() => {
  const animate = Element.prototype.animate;
  Element.prototype.animate = function (...all) {
    const flight = animate.apply(this, all);
    flight.pause();
    return flight;
  };
}"""


def test_keys_clicks_slider_playing_and_theme(open_page):
    page = open_page("mlp", motion="no-preference")
    page.evaluate(HOLD_FLIGHTS)  # a busy machine would look when they have landed
    count = page.locator("tp-player .count")
    keys = dict(End=12, Home=1, PageDown=2, ArrowRight=3, ArrowLeft=2)
    for key, wanted in keys.items():
        page.keyboard.press(key)
        assert count.inner_text() == f"{wanted} / 12"
    page.locator("tp-player input").fill("4")
    page.locator("tp-player .stage").click()
    assert count.inner_text() == "5 / 12"
    flying = page.locator("tp-player .ghost .cell:first-child").all_inner_texts()
    made = [part["makes"][0] for part in RECORDED["mlp"]["events"][3]["ranks"]]
    numbers = [f"{made[rank]['values'][0]:.2f}" for rank in (1, 0)]
    assert flying == [number.replace("-", "−") for number in numbers]
    sizes = "all => [...new Set(all.map(cell => getComputedStyle(cell).fontSize))]"
    size_of = lambda cells: page.locator(f"tp-player {cells}").evaluate_all(sizes)
    assert size_of(".ghost .cell") == size_of(".source .cell") != []
    page.clock.install()
    page.get_by_role("button", name="play").click()
    page.clock.run_for(200_000)
    assert count.inner_text() == "12 / 12"
    color = "getComputedStyle(document.querySelector('tp-player').box).backgroundColor"
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(color) == "rgb(20, 24, 30)"
    page.evaluate("document.documentElement.dataset.theme = 'light'")
    assert page.evaluate(color) == "rgb(255, 255, 255)"


PRINTED = """player => [...player.shadowRoot.querySelectorAll(".printed")].map(
    page => [page.querySelector(".caption").lastChild.data,
             page.querySelectorAll("svg .tip").length])"""


@pytest.mark.parametrize("name", ["ring", "mlp"])
def test_printed_steps(open_page, name):
    """On paper: the start, the steps that send, with their arrows, and the checks."""
    page = open_page(name)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    events = RECORDED[name]["events"]
    kinds = ("hold", "send", "collective", "check")
    shown = [e for e in events if e["kind"] in kinds]
    printed = page.locator("tp-player").evaluate(PRINTED)
    assert [says for says, _ in printed] == [e["says"] for e in shown]
    sends = [event["kind"] in ("send", "collective") for event in shown]
    ranks = RECORDED[name]["ranks"]
    assert all(tips >= ranks for (_, tips), each in zip(printed, sends) if each)
    assert page.locator("tp-player .count").inner_text().startswith("1 /")
    cell = "it => it.box.style.getPropertyValue('--cell')"
    before = page.locator("tp-player").evaluate(cell)
    page.emulate_media(
        media="print"
    )  # the player is resized, the printed steps are not
    page.evaluate("new Promise(seen => setTimeout(seen, 200))")
    assert page.locator("tp-player").evaluate(cell) == before
    page.emulate_media(media="screen")
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("tp-player").evaluate(PRINTED) == []
