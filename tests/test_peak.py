"""tools/peak.py counts what is allocated; and tools/predict.py predicts it by phase."""

from types import SimpleNamespace

import jobs
import llama
import peak
import predict
import pytest
import torch
from torch import nn

pytestmark = pytest.mark.timeout(900)
LLAMA_8B = predict.MODELS["llama-3-8b"] | dict(layers=4, kv_heads=32)
LLAMA_70B = predict.MODELS["llama-3-70b"] | dict(layers=4)


class OneKernelAdamW:
    """AdamW of 16-bit parameters: two moments and a copy of the weight in float32. In
    pieces, as a kernel that needs no tensor of its own."""

    def __init__(self, parameters):
        self.parameters = list(parameters)
        self.states = []
        for p in self.parameters:
            moments = [torch.zeros_like(p, dtype=torch.float32) for _ in range(2)]
            self.states.append([p.detach().float(), *moments])

    @torch.no_grad()
    def step(self):
        for p, state in zip(self.parameters, self.states):
            n = max(1, p.numel() // 64)
            views = [x.view(-1).split(n) for x in (p, p.grad, *state)]
            for weight, grad, copy, mean, square in zip(*views):
                mean.mul_(0.9).add_(grad, alpha=0.1)
                square.mul_(0.95).addcmul_(grad.float(), grad.float(), value=0.05)
                copy.addcdiv_(mean, square.sqrt().add_(1e-8), value=-1e-3)
                weight.copy_(copy)

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None


class Stage(nn.Module):
    """The first stage of two: embedding and layers, two micro-batches in flight."""

    def __init__(self, sizes: dict, recompute: str):
        super().__init__()
        self.inner = llama.Llama(sizes, recompute)
        self.layers = self.inner.layers
        self.inner.norm = nn.Identity()
        self.inner.lm_head = nn.Identity()

    def forward(self, tokens):
        return [self.inner(each) for each in tokens.chunk(2)]


class Accumulated(OneKernelAdamW):
    """Gradients stay, as those of the micro-batches before."""

    def zero_grad(self):
        pass


def case_of(sizes: dict, layout, marks: list) -> SimpleNamespace:
    """Without replicas: 16-bit weights and OneKernelAdamW instead of fully_shard."""
    is_sharded = layout.dp > 1
    is_stage = layout.pp > 1

    def build():
        if is_sharded:
            return llama.Llama(sizes, layout.recompute)
        kind = Stage if is_stage else llama.Llama
        return kind(sizes, layout.recompute).bfloat16()

    def parallelize(model, group):
        if is_sharded:
            llama.parallelize(model, group)
        model.layers[-1].register_forward_hook(mark_backward)
        return model

    def mark_backward(module, args, out):
        if out.requires_grad:
            out.register_hook(lambda grad: marks[0].start("layer"))

    def batch(step):
        shape = 2, layout.micro_batch * layout.pp, layout.seq_len
        return torch.randint(sizes["vocab_size"], shape).unbind()

    kind = Accumulated if is_stage else OneKernelAdamW
    return SimpleNamespace(
        build=build,
        parallelize=parallelize,
        batch=batch,
        optimizer=llama.optimizer if is_sharded else kind,
        loss=(lambda out, target: sum(out).sum()) if is_stage else llama.loss,
    )


def measured(sizes: dict, layout, monkeypatch) -> peak.Live:
    monkeypatch.setenv("TP", str(layout.tp))
    marks = []
    begin = peak.Live.__enter__

    def enter(live):
        marks.append(live)
        return begin(live)

    monkeypatch.setattr(peak.Live, "__enter__", enter)
    case = case_of(sizes, layout, marks)
    ranks = layout.tp * layout.dp
    return peak.measure(case, ranks, says_where=False)


LAYOUTS = [  # model; dp, tp, pp; sequences, positions; what is recomputed
    (LLAMA_8B, (8, 1, 1), (1, 8192), "full"),
    (LLAMA_8B, (8, 1, 1), (1, 8192), "half"),
    (LLAMA_8B, (8, 1, 1), (1, 8192), "none"),
    (LLAMA_8B, (128, 1, 1), (1, 32768), "full"),
    (LLAMA_8B, (4, 2, 1), (1, 32768), "full"),
    (LLAMA_8B, (8, 4, 1), (4, 8192), "full"),
    (LLAMA_70B, (32, 8, 1), (16, 8192), "full"),
    (LLAMA_8B, (1, 1, 1), (1, 8192), "none"),
    (LLAMA_8B, (1, 1, 1), (1, 8192), "full"),
    (LLAMA_8B, (1, 1, 2), (1, 8192), "none"),
]


@pytest.mark.parametrize("sizes, mesh, shape, recompute", LAYOUTS)
def test_each_phase_is_predicted_within_2_percent(
    sizes, mesh, shape, recompute, monkeypatch
):
    """Next to what PyTorch allocates: fully_shard, DTensor's TP + SP, loss_parallel,
    checkpoints; without replicas 16-bit weights; and a stage of a pipeline."""
    dp, tp, pp = mesh
    b, S = shape
    M = 4 if pp > 1 else 1
    sizes = sizes | dict(seq_len=S, batch_size=dp * b * M, layers=4)
    options = dict(dp=dp, tp=tp, pp=pp, micro_batch=b, recompute=recompute)
    options.update(zero=3 if dp > 1 else 0, attention="flash", loss="torch")
    layout = predict.make_layout(sizes | dict(layers=4 * pp), mlp_saves=4, **options)
    try:
        found = measured(sizes, layout, monkeypatch).peaks
    finally:
        if tp > 1:  # llama.parallelize has left it on
            torch.distributed.tensor.parallel.loss._disable_custom_loss_ops()
    phases = predict.phases(layout, 0)
    names = {"forward": "forward", "layer": "layer", "optimizer": "optimizer"}
    if pp == 1:
        names.update(loss="loss", head="backward")
    for phase, name in names.items():
        predicted = sum(phases[phase].values())
        assert predicted == pytest.approx(found[name][0], rel=0.02), phase
    assert predict.memory(layout, 0) in phases.values()


TINY = predict.model(3, 64, 4, 4, 512, 128, 8, 160, gated=True, biases="none")


@pytest.mark.parametrize("dp, recompute", [(4, "full"), (1, "none")])
def test_fake_tensors_have_the_bytes_of_real_ones(dp, recompute, monkeypatch):
    """The same tracker, with tensors that are really allocated: equal at the peak of
    each phase and at its end."""
    monkeypatch.setenv("TP", "1")
    options = dict(dp=dp, recompute=recompute, attention="flash")
    layout = predict.make_layout(TINY, **options)
    found = []
    for is_fake in (True, False):
        case = case_of(TINY, layout, [SimpleNamespace(start=lambda phase: None)])
        live = peak.measure(case, dp, is_fake=is_fake, says_where=False)
        peaks = {phase: nbytes for phase, (nbytes, _) in live.peaks.items()}
        found.append((peaks, live.held))
    assert found[0] == found[1]
    count = predict.parameters(layout, 0)[0]
    assert found[0][1]["between steps"] >= 12 * count // dp


def test_the_command(capsys, monkeypatch, tmp_path):
    """What it prints; and a model that reads a value, a wrong flag, no file."""
    for name, value in dict(LAYERS=2, TP=2, B=1, S=8192, MODEL="llama-3-8b").items():
        monkeypatch.setenv(name, str(value))
    path = str(jobs.ROOT / "tools" / "llama.py")
    try:
        assert peak.main([path, "--ranks", "8"]) == 0
    finally:
        torch.distributed.tensor.parallel.loss._disable_custom_loss_ops()
    out = capsys.readouterr().out
    assert out.startswith("Rank 0 of 8") and max(map(len, out.splitlines())) <= 88
    assert "llama.py:" in out and "between two steps" in out
    for letter in "flb":
        assert f"|{letter}" in out or f"{letter}{letter}" in out
    wrong = tmp_path / "wrong.py"
    text = "from llama import build, parallelize\nfrom llama import batch as other\n"
    text += "def batch(step):\n    x = other(step)\n    print(x[0].sum().item())\n"
    wrong.write_text(text)
    for words, said in (
        ([str(wrong), "--ranks", "2"], "reads a tensor's value"),
        ([path, "--ranks", "0"], "--ranks 0: must be from 1"),
        ([str(tmp_path / "none.py")], "no such file"),
    ):
        assert peak.main(words) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: ") and said in err and err.count("\n") == 1
