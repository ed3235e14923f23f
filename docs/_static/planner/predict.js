// The formulas of tools/predict.py, where their sources are, for the page with sliders.
// tests/test_planner.py compares both on random layouts: bytes are equal, times agree to
// 1e-9. Names are those of the Python code. A formula is edited there first.

export const RECOMPUTE = ["none", "selective", "half", "full"];
export const ATTENTION = ["flash", "math"];
export const SCHEDULES = ["1f1b", "zb-h1"];
export const SCORES = ["half", "all"]; // what attention computes of S × S
// Bytes per logit that a loss saves, and that it holds in forward and in backward.
export const LOSSES = {
  plain: [4, 14, 12], torch: [4, 10, 12], fused: [2, 4, 4], pieces: [0, 14, 14],
};
const LOSS_PARALLEL = [4, 14, 16];
const PIECES = 16;
const SHORTEST_IN_A_RING = 4096;
const GB = 1e9;
// Phases that come once per step; all others come with each micro-batch.
const ONCE = ["sums", "norm", "update"];
const LINKS = { copy: "tp", embed: "pp", edp: "dp" }; // groups within a line of the mesh

// Python's a // b, and its round(): halves go to the even neighbor.
const floorDiv = (a, b) => Math.floor(a / b);
function round(x) {
  const low = Math.floor(x);
  if (x - low === 0.5) return low % 2 ? low + 1 : low;
  return Math.round(x);
}
function gcd(a, b) {
  return b ? gcd(b, a % b) : a;
}

const sum = (values) => Object.values(values).reduce((total, x) => total + x, 0);
const most = (rows, value) => rows.reduce((a, b) => (value(b) > value(a) ? b : a));

export function makeLayout(sizes, more) {
  const layout = {
    gated: false, biases: "all", tie: false, qk_norm: false, experts: 0, top_k: 0,
    expert_ffn: 0, schedule: "1f1b", zero: 0, recompute: "none", attention: "math",
    virtual: 1, light_ends: false, grad_bytes: 2, imbalance: 1, overlap_dp: false,
    loss: "plain", pp: 1, dp: 1, tp: 1, cp: 1, ep: 1, micro_batch: 1,
    ...sizes, ...more,
  };
  layout.ffn ??= 4 * layout.hidden;
  layout.head_dim ??= floorDiv(layout.hidden, layout.heads);
  layout.mlp_saves ??= layout.gated ? 3 : 2;
  layout.scores ??= layout.attention === "flash" ? "half" : "all";
  layout.microbatches = floorDiv(layout.batch_size, layout.dp * layout.micro_batch);
  return layout;
}

// What a rank holds

const replicas = (a) => a.dp * a.cp;
const expertReplicas = (a) => floorDiv(a.tp * a.cp * a.dp, a.ep);

export function hasLightEnds(layers, pp, virtual = 1) {
  const chunks = pp * virtual;
  return pp > 1 && layers % chunks > 0 && (layers + 2) % chunks === 0;
}
function layersOf(a, stage) {
  if (a.light_ends) {
    return floorDiv(a.layers + 2, a.pp) - (stage === 0 || stage === a.pp - 1 ? 1 : 0);
  }
  return floorDiv(a.layers, a.pp) + (stage < a.layers % a.pp ? 1 : 0);
}
const qWidth = (a) => a.head_dim * a.heads;
const kvWidth = (a) => a.head_dim * Math.max(a.kv_heads, a.tp);
const matrices = (a) => (a.gated ? 3 : 2);

function layerWeights(a) {
  const attention = a.hidden * (2 * qWidth(a) + 2 * kvWidth(a));
  return attention + matrices(a) * a.hidden * a.ffn;
}
function layerParameters(a) {
  let sharded = layerWeights(a);
  let replicated = 2 * a.hidden;
  if (a.biases !== "none") sharded += qWidth(a) + 2 * kvWidth(a);
  if (a.biases === "all") {
    sharded += a.ffn * (a.gated ? 2 : 1);
    replicated += 4 * a.hidden;
  }
  if (a.qk_norm) replicated += 2 * a.head_dim;
  return { sharded, replicated: replicated + a.hidden * a.experts };
}
const oneExpert = (a) => matrices(a) * a.hidden * a.expert_ffn;
const expertsOfLayer = (a) => floorDiv(a.experts, a.ep) * oneExpert(a);
const expertsOfStage = (a, stage) => layersOf(a, stage) * expertsOfLayer(a);
const vocabRows = (a) => Math.ceil(a.vocab_size / a.tp);
const normStats = (a) => (a.biases === "all" ? 2 : 1);

export function parameters(a, stage) {
  const isFirst = stage === 0;
  const isLast = stage === a.pp - 1;
  const layers = layersOf(a, stage);
  const layer = layerParameters(a);
  let replicated = layer.replicated * layers;
  const matrix = vocabRows(a) * a.hidden;
  let vocabulary = 0;
  if (isFirst) vocabulary += matrix;
  if (isLast && !(a.tie && isFirst)) vocabulary += matrix;
  if (isLast) replicated += a.hidden;
  if (isLast && a.biases === "all") {
    replicated += a.hidden;
    vocabulary += vocabRows(a);
  }
  let held = floorDiv(layers * layer.sharded, a.tp) + replicated + vocabulary;
  held += expertsOfStage(a, stage);
  const trained = a.tie && isLast && !isFirst ? held - matrix : held;
  return { held, trained, replicated };
}

export function layerBytes(a, e = 2, stats = 4, masks = false, sp = true) {
  const b = a.micro_batch;
  const S = floorDiv(a.seq_len, a.cp);
  const s = sp ? floorDiv(S, a.tp) : S;
  if (a.recompute === "full") return e * b * s * a.hidden;
  if (a.recompute === "half") {
    const outer = b * s * a.hidden * (a.gated ? 2 : 1);
    const inner = floorDiv(b * S * (2 * qWidth(a) + kvWidth(a) + a.ffn), a.tp);
    return e * (outer + inner) + floorDiv(4 * b * a.heads * S, a.tp);
  }
  const cheap = a.recompute === "selective" && a.attention === "flash" ? 1 : 0;
  const norms = 2 * normStats(a) * stats;
  const inputs = cheap ? 2 : 4;
  const outside = b * s * (a.hidden * (inputs * e + (masks ? 2 : 0)) + norms);
  const inside = 2 * qWidth(a) + (a.mlp_saves - cheap) * a.ffn;
  const tokens = b * S;
  const coreInputs = floorDiv(e * tokens * (inside + 2 * kvWidth(a)), a.tp);
  const routed = routedBytes(a, b * s, e, a.mlp_saves - cheap);
  if (a.recompute === "selective" && a.attention === "math") return outside + coreInputs + routed;
  if (a.attention === "flash") {
    return outside + coreInputs + floorDiv(4 * tokens * a.heads, a.tp) + routed;
  }
  const scores = floorDiv(b * a.heads * S * S, a.tp) * (e + (masks ? 1 + e : 0));
  return outside + floorDiv(e * tokens * (inside + 2 * qWidth(a)), a.tp) + scores + routed;
}

const routedRows = (a, tokens) => Math.ceil(a.top_k * tokens * a.imbalance);
function routedBytes(a, tokens, e, mlpSaves) {
  if (!a.experts) return 0;
  const row = e * (2 * a.hidden + mlpSaves * a.expert_ffn);
  return routedRows(a, tokens) * row + 4 * a.experts * tokens;
}

function endBytes(a, stage, e = 2, stats = 4) {
  const tokens = floorDiv(a.micro_batch * a.seq_len, a.cp);
  let saved = 0;
  if (stage === 0) saved += tokens * (8 + 1);
  if (stage === a.pp - 1) {
    saved += floorDiv(tokens, a.tp) * (2 * e * a.hidden + normStats(a) * stats);
    if (a.loss === "pieces") return saved + floorDiv(tokens, a.tp) * e * a.hidden;
    const logit = a.loss === "fused" ? e : Math.max(4, e);
    saved += tokens * (logit * vocabRows(a) + 8 + 1 + 1) + vocabRows(a);
    if (a.loss === "torch" && a.tp > 1) saved += tokens * e * a.hidden;
  }
  return saved;
}

function lossBytes(a, stage) {
  if (stage < a.pp - 1) return { saved: 0, forward: 0, loss: 0, head: 0 };
  let logits = floorDiv(a.micro_batch * a.seq_len, a.cp) * vocabRows(a);
  if (a.loss === "pieces") logits = Math.ceil(logits / PIECES);
  const isParallel = a.loss === "torch" && a.tp > 1;
  const [saved, forward, backward] = isParallel ? LOSS_PARALLEL : LOSSES[a.loss];
  const made = a.loss === "pieces" ? 0 : 2;
  return { saved: saved * logits, forward: made * logits, loss: forward * logits, head: backward * logits };
}

export function savedBytes(a, stage, e = 2, stats = 4) {
  return layersOf(a, stage) * layerBytes(a, e, stats) + endBytes(a, stage, e, stats);
}

export function inFlight(kind, stage, P, M) {
  return kind === "gpipe" ? M : Math.min(P - stage, M);
}

function putOffBytes(a, stage, e = 2) {
  if (a.schedule !== "zb-h1") return 0;
  const [P, M, T, D] = [a.pp, a.microbatches, a.tp, a.hidden];
  const tokens = floorDiv(a.micro_batch * a.seq_len, a.cp);
  const own = floorDiv(tokens, T);
  const inside = 2 * qWidth(a) + 2 * kvWidth(a) + matrices(a) * a.ffn;
  let layer = e * (4 * own * D + floorDiv(tokens * inside, T));
  layer += e * routedRows(a, own) * (2 * D + matrices(a) * a.expert_ffn);
  let held = layersOf(a, stage) * layer;
  if (stage === P - 1) held += e * (own * D + tokens * vocabRows(a));
  return (Math.min(P, M) - inFlight(a.schedule, stage, P, M)) * held;
}

export function layersInFlight(a, stage) {
  const [P, M, v] = [a.pp, a.microbatches, a.virtual];
  if (v === 1) return inFlight(a.schedule, stage, P, M) * layersOf(a, stage);
  const passes = Math.min(2 * (P - stage - 1) + (v - 1) * P + 1, v * M);
  if (!a.light_ends) return passes * floorDiv(a.layers, P * v);
  let layers = passes * floorDiv(a.layers + 2, P * v);
  if (stage === 0) layers -= Math.min(2 * P - 1, M);
  if (stage === P - 1) layers -= 1;
  return layers;
}

function activations(a, stage) {
  const flying = inFlight(a.schedule, stage, a.pp, a.microbatches) * endBytes(a, stage);
  return flying + layersInFlight(a, stage) * layerBytes(a) + putOffBytes(a, stage);
}

function layerInForward(a, e = 2) {
  const tokens = floorDiv(a.micro_batch * a.seq_len, a.cp);
  let elements = 4 * floorDiv(tokens, a.tp) * a.hidden;
  if (a.tp > 1) elements += 3 * tokens * a.hidden;
  if (a.recompute === "half" || a.recompute === "full") elements += floorDiv(tokens * a.ffn, a.tp);
  return e * elements;
}

function layerInBackward(a, saved, e = 2) {
  const tokens = floorDiv(a.micro_batch * a.seq_len, a.cp);
  const outside = tokens * a.hidden * (a.tp > 1 ? 3 : 1);
  const inside = floorDiv((a.tp > 1 ? 1 : 2) * tokens * a.ffn, a.tp);
  const rows = routedRows(a, floorDiv(tokens, a.tp));
  const again = a.recompute === "none" ? 0 : layerBytes({ ...a, recompute: "none" }) - saved;
  return again + e * (outside + inside + 2 * rows * a.expert_ffn);
}

const heldBy = (state, gradients, activations, unsharded, loss) => ({
  parameters: state.parameters, gradients, optimizer: state.optimizer, activations, unsharded, loss,
});
const fuller = (moments) => most(moments, sum);

export function memory(a, stage) {
  return fuller(Object.values(phases(a, stage)));
}

export function phases(a, stage) {
  const state = stateBytes(a, stage);
  const before = a.microbatches > 1 ? state.gradients : 0;
  const ofLoss = lossBytes(a, stage);
  let flying = activations(a, stage);
  const unsharded = unshardedBytes(a, stage);
  const found = {};
  for (const phase of ["forward", "loss", "head"]) {
    found[phase] = heldBy(state, before, flying - ofLoss.saved, unsharded[phase], ofLoss[phase]);
  }
  if (stage === a.pp - 1) flying -= endBytes({ ...a, pp: 2 }, 1);
  const layer = heldBy(state, before, flying + layerInForward(a), unsharded.in_layer, 0);
  found.forward = fuller([found.forward, layer]);
  found.layer = layerPhase(a, stage, state, before, flying);
  found.optimizer = heldBy(state, state.gradients, 0, 0, 0);
  return found;
}

function layerPhase(a, stage, state, before, flying) {
  const layers = layersOf(a, stage);
  const saved = layerBytes(a);
  const again = layerInBackward(a, saved);
  const unsharded = unshardedBytes(a, stage);
  const [ofLayer, ofHead] = gradientsOneByOne(a, stage);
  const found = [0, Math.min(1, layers - 1), Math.max(0, layers - 2)].map((done) => {
    const gradients = before || ofHead + done * ofLayer;
    return heldBy(state, gradients, flying - done * saved + again, unsharded[done ? "layer" : "first"], 0);
  });
  return fuller(found);
}

function gradientsOneByOne(a, stage) {
  const layer = a.zero >= 2 ? shard(a, oneLayer(a), expertsOfLayer(a)) : oneLayer(a);
  const e = a.zero === 3 ? 4 : a.grad_bytes;
  let head = stage === a.pp - 1 ? vocabRows(a) * a.hidden : 0;
  if (a.zero >= 2) head = a.zero === 3 ? 0 : shard(a, head, 0);
  return [e * layer, e * head];
}

function oneLayer(a) {
  const { sharded, replicated } = layerParameters(a);
  return floorDiv(sharded, a.tp) + replicated + expertsOfLayer(a);
}

function shard(a, count, ofExperts) {
  return Math.ceil((count - ofExperts) / replicas(a)) + Math.ceil(ofExperts / expertReplicas(a));
}

function stateBytes(a, stage) {
  const { held, trained } = parameters(a, stage);
  const ofExperts = expertsOfStage(a, stage);
  const kept = shard(a, held, ofExperts);
  if (a.zero === 3) return { parameters: 4 * kept, optimizer: 8 * kept, gradients: 4 * kept };
  return {
    parameters: 2 * held,
    optimizer: 12 * (a.zero ? shard(a, trained, ofExperts) : trained),
    gradients: a.grad_bytes * (a.zero === 2 ? kept : held),
  };
}

function unshardedBytes(a, stage) {
  const found = { in_layer: 0, forward: 0, loss: 0, head: 0, first: 0, layer: 0 };
  const layer = oneLayer(a);
  const matrix = vocabRows(a) * a.hidden;
  if (replicas(a) === 1 || a.zero < 2) return found;
  if (a.zero === 2) {
    const largest = a.grad_bytes * Math.max(layer, matrix);
    return { ...found, head: largest, first: largest, layer: largest };
  }
  const last = stage === a.pp - 1 ? 1 : 0;
  const both = (stage === 0 ? 1 : 0) + last;
  const weights = 2 * (a.tie ? Math.min(1, both) : both) * matrix;
  const gradient = 2 * last * matrix;
  return {
    in_layer: weights + 4 * layer, forward: weights + 2 * layer, loss: weights, head: weights,
    first: weights + gradient + floorDiv(9 * layer, 2), layer: weights + gradient + floorDiv(17 * layer, 2),
  };
}

// What it sends, and how long a step takes

export function traffic(a, stage, e = 2) {
  const [M, T, D, v] = [a.microbatches, a.tp, a.hidden, a.virtual];
  const tokens = floorDiv(floorDiv(a.batch_size, a.dp) * a.seq_len, a.cp);
  const { trained, replicated } = parameters(a, stage);
  const ofExperts = expertsOfStage(a, stage);
  const rows = floorDiv(floorDiv(a.batch_size, a.dp), M);
  const positions = floorDiv(rows * a.seq_len, a.cp);
  const l = layersOf(a, stage);
  const X = (e * tokens * D) / M;
  const g = Math.max(e, a.grad_bytes);
  const isFirst = stage === 0;
  const isLast = stage === a.pp - 1;
  const first = isFirst ? 1 : 0;
  const last = isLast ? 1 : 0;
  const found = [];
  const add = (phase, collective, axis, calls, nbytes) => {
    if (calls) found.push({ phase, collective, axis, calls, nbytes: round(calls * nbytes) });
  };
  // Layers
  const blocks = a.experts && !a.ffn ? l : 2 * l;
  add("forward", "all-gather", "tp", M * (blocks + last), X);
  add("forward", "reduce-scatter", "tp", M * (blocks + first), X);
  add("backward", "all-gather", "tp", M * (2 * blocks + first + last), X);
  add("backward", "reduce-scatter", "tp", M * (blocks + last), X);
  if (["half", "full"].includes(a.recompute)) {
    add("backward", "all-gather", "tp", M * blocks, X);
    add("backward", "reduce-scatter", "tp", M * l, X);
  }
  // Gradients
  add("sums", "all-reduce", "tp", 1, g * replicated);
  for (const axis of a.zero ? ["tp", "pp", "dp"] : ["tp", "pp"]) add("norm", "all-reduce", axis, 1, 8);
  const upTo = (n, parts) => (a.zero ? n + ((parts - (n % parts)) % parts) : n);
  const counts = { dp: upTo(trained - ofExperts, replicas(a)), edp: upTo(ofExperts, expertReplicas(a)) };
  for (const [axis, n] of Object.entries(counts)) {
    if (!n) continue;
    if (a.zero === 0) add("sums", "all-reduce", axis, 1, g * n);
    else if (a.zero === 1) add("sums", "reduce-scatter", axis, 1, g * n);
    else add("backward", "reduce-scatter", axis, M, g * n);
    if (a.zero === 1 || a.zero === 2) add("update", "all-gather", axis, 1, e * n);
    if (a.zero === 3) {
      add("forward", "all-gather", axis, M, e * n);
      add("backward", "all-gather", axis, M, e * n);
    }
  }
  // Stages, and both ends
  if (isFirst || isLast) {
    add("load", "broadcast", "tp", M, 24);
    add("load", "broadcast", "tp", M, 2 * 8 * positions);
    if (a.tie) {
      add("sums", "all-reduce", "embed", 1, g * vocabRows(a) * D);
      add("update", "broadcast", "embed", 1, e * vocabRows(a) * D);
    }
  }
  const messages = { forward: isLast ? v - 1 : v, backward: isFirst ? v - 1 : v };
  for (const [phase, count] of Object.entries(messages)) {
    add(phase, "send/recv", "pp", M * count, 40);
    add(phase, "send/recv", "pp", M * count, X / T);
  }
  if (isLast) {
    add("load", "all-reduce", "dp", 1, 8);
    add("forward", "all-reduce", "tp", 3 * M, Math.max(4, e) * positions);
  }
  // Attention
  if (a.cp > 1) {
    const kv = (2 * e * tokens * kvWidth(a)) / (T * M);
    add("forward", "send/recv", "cp", M * l * (a.cp - 1), kv);
    add("backward", "send/recv", "cp", M * l * (2 * a.cp - 1), kv);
    if (a.recompute === "full") add("backward", "send/recv", "cp", M * l * (a.cp - 1), kv);
  }
  if (T > a.kv_heads) {
    const H = a.head_dim;
    if (a.biases === "none") add("backward", "all-reduce", "copy", 2 * M * l, e * H * D);
    else add("backward", "all-reduce", "copy", 4 * M * l, (e * H * (D + 1)) / 2);
  }
  // Experts
  if (a.experts) {
    const own = floorDiv(floorDiv(a.micro_batch * a.seq_len, a.cp), T);
    const nbytes = e * routedRows(a, own) * D;
    add("forward", "all-to-all", "ep", 2 * M * l, nbytes);
    add("backward", "all-to-all", "ep", (a.recompute === "full" ? 4 : 2) * M * l, nbytes);
  }
  return found;
}

function ranksAlong(a, axis) {
  if (axis === "copy") return Math.max(1, floorDiv(a.tp, a.kv_heads));
  if (axis === "embed") return Math.min(2, a.pp);
  if (axis === "edp") return expertReplicas(a);
  if (axis === "dp") return replicas(a);
  return a[axis];
}

export function ring(collective, ranks) {
  if (collective === "send/recv") return 1;
  return ((collective === "all-reduce" ? 2 : 1) * (ranks - 1)) / ranks;
}

function ringSteps(collective, ranks) {
  if (collective === "send/recv" || collective === "all-to-all") return 1;
  return (collective === "all-reduce" ? 2 : 1) * (ranks - 1);
}

// Three ways to an all-reduce: rounds, bytes that a rank sends at most, seconds.
export function allReduceWays(n, ranks, alpha, beta) {
  if (ranks === 1) return {}; // nothing is sent
  const depth = Math.ceil(Math.log2(ranks));
  const ringRounds = 2 * (ranks - 1);
  const ringBytes = n * ring("all-reduce", ranks);
  const all = n * (ranks - 1);
  return {
    ring: { rounds: ringRounds, bytes: ringBytes, seconds: ringRounds * alpha + ringBytes / beta },
    tree: { rounds: 2 * depth, bytes: depth * n, seconds: 2 * depth * (alpha + n / beta) },
    "one shot": { rounds: 1, bytes: all, seconds: alpha + all / beta },
  };
}

function spans(a) {
  const found = { tp: a.tp, dp: a.tp * replicas(a) };
  if (a.cp > 1) found.cp = a.tp * a.cp;
  if (a.experts) {
    found.ep = a.ep;
    found.edp = found.dp;
  }
  found.pp = found.dp * a.pp;
  return found;
}
const fitsInANode = (span, machine) => machine.node % span === 0 || machine.gpus <= machine.node;

export function rates(a, machine) {
  const found = {};
  for (const [axis, span] of Object.entries(spans(a))) {
    const ranks = ranksAlong(a, axis);
    if (fitsInANode(span, machine)) {
      found[axis] = machine.inside;
    } else if (axis === "cp" || axis === "pp") {
      found[axis] = machine.between;
    } else if (axis === "ep") {
      const outside = Math.max(1, ranks - machine.node);
      found[axis] = Math.min(machine.inside, (machine.between * (ranks - 1)) / outside);
    } else {
      const inner = floorDiv(span, ranks);
      const cards = machine.node % inner ? 1 : gcd(ranks, machine.node / inner);
      found[axis] = Math.min(machine.inside, machine.between * cards);
    }
  }
  return found;
}

const linearsAgain = (a) => a.hidden * (kvWidth(a) + qWidth(a) + (a.gated ? a.ffn : 0));

export function flops(a, stage) {
  const tokens = floorDiv(a.batch_size, a.dp) * a.seq_len;
  const scores = floorDiv(4 * a.seq_len * qWidth(a), a.scores === "half" ? 2 : 1);
  const active = Math.ceil(a.top_k * a.imbalance * oneExpert(a)) + a.hidden * a.experts;
  const layer = 2 * (layerWeights(a) + active) + scores;
  let again = 0;
  if (a.recompute === "full") again = layer;
  else if (a.recompute === "half") again = 2 * linearsAgain(a);
  else if (a.recompute === "selective" && a.attention === "math") again = scores;
  if (a.attention === "flash") again += floorDiv(scores, 2);
  let work = layersOf(a, stage) * (3 * layer + again);
  if (stage === a.pp - 1) work += 6 * a.hidden * a.vocab_size;
  return (tokens * work) / (a.tp * a.cp);
}

export function modelFlops(a) {
  const one = { pp: 1, dp: 1, tp: 1, cp: 1, ep: 1, light_ends: false, imbalance: 1 };
  return flops({ ...a, recompute: "none", attention: "math", ...one }, 0);
}

function seconds(a, stage, machine, rate) {
  const took = { arithmetic: flops(a, stage) / machine.gpu_flops, once: 0 };
  const sent = {};
  for (const axis of Object.keys(rate)) sent[axis] = took[axis] = 0;
  const span = spans(a);
  for (const row of traffic(a, stage)) {
    const ranks = ranksAlong(a, row.axis);
    if (ranks === 1) continue; // nothing is sent
    const nbytes = row.nbytes * ring(row.collective, ranks);
    const axis = row.axis in rate ? row.axis : LINKS[row.axis];
    const alpha = fitsInANode(span[axis], machine) ? machine.alpha_inside : machine.alpha_between;
    const time = nbytes / rate[axis] + row.calls * ringSteps(row.collective, ranks) * alpha;
    sent[axis] += nbytes;
    took[ONCE.includes(row.phase) ? "once" : axis] += time;
  }
  return { took, sent };
}

export function bubble(a) {
  const [F, W] = [1, 1];
  let B = a.recompute === "full" ? 2 : 1;
  if (a.recompute === "half") B += linearsAgain(a) / layerWeights(a);
  const waits = (a.schedule === "zb-h1" ? F + B - W : F + B + W) * (a.pp - 1);
  return waits / (a.virtual * a.microbatches * (F + B + W));
}

function exposedDp(a, once, each, arithmetic) {
  if (!a.overlap_dp) return once + each;
  const left = Math.max(0, once - (arithmetic * 2) / 3 / a.microbatches);
  return left + Math.max(0, each - arithmetic);
}

function inMicroBatches(took) {
  const { once, ...rest } = took;
  return sum(rest);
}

export function predict(a, machine) {
  const P = a.pp;
  const rate = rates(a, machine);
  const stages = [...new Set([0, Math.min(1, P - 1), P - 1])];
  const more = a.schedule === "zb-h1" ? [Math.max(0, P - 2), Math.max(0, (a.layers % P) - 1)] : [];
  const fullest = [...new Set([...stages, ...more])].sort((x, y) => x - y);
  const bytes = most(fullest.map((stage) => memory(a, stage)), sum);
  const found = stages.map((stage) => seconds(a, stage, machine, rate));
  const slowest = most(found.map((each) => each.took), inMicroBatches);
  const waiting = inMicroBatches(slowest) * bubble(a);
  const once = Math.max(...found.map((each) => each.took.once));
  const parts = {
    arithmetic: slowest.arithmetic,
    tp: slowest.tp,
    dp: exposedDp(a, once, slowest.dp + (slowest.edp || 0), slowest.arithmetic),
    pp: slowest.pp + waiting,
  };
  for (const axis of ["cp", "ep"]) if (axis in slowest) parts[axis] = slowest[axis];
  const sent = {};
  for (const axis of Object.keys(rate)) {
    sent[axis] = Math.max(...found.map((each) => each.sent[axis]));
  }
  if ("edp" in sent) {
    sent.dp += sent.edp;
    delete sent.edp;
  }
  const total = sum(parts);
  return {
    ...a, bytes, memory: sum(bytes), sent, rate, parts, bubble: bubble(a), waiting,
    tp_leaves_node: !fitsInANode(a.tp, machine), seconds: total,
    mfu: modelFlops(a) / (machine.gpu_flops * machine.gpus * total),
  };
}

// All layouts of a model on a machine

export const usable = (machine) => machine.gpu_memory * GB * (1 - machine.reserve);

export function divisors(n) {
  const [small, large] = [[], []];
  for (let i = 1; i * i <= n; i += 1) {
    if (n % i) continue;
    small.push(i);
    if (i * i !== n) large.unshift(n / i);
  }
  return [...small, ...large];
}

export function whyNot(sizes, { dp = 1, pp = 1, tp = 1, cp = 1, ep = 1, virtual = 1 }) {
  for (const [text, parts] of [["2 · cp", 2 * cp], ["cp · tp", cp * tp]]) {
    if (cp > 1 && sizes.seq_len % parts) {
      return `seq-len % (${text}) is not 0: ${sizes.seq_len} % ${parts}`;
    }
  }
  const parts = { heads: tp, kv_heads: tp, ffn: tp, seq_len: tp, batch_size: dp, experts: ep };
  const axes = { batch_size: "dp", experts: "ep" };
  for (const [name, count] of Object.entries(parts)) {
    const size = sizes[name] ?? 0;
    if (name === "kv_heads" && tp % size === 0) continue;
    if (size % count) {
      return `${name.replace("_", "-")} % ${axes[name] || "tp"} is not 0: ${size} % ${count}`;
    }
  }
  if ((tp * cp * dp) % ep) return `tp · cp · dp % ep is not 0: ${tp * cp * dp} % ${ep}`;
  if (ep > 1 && !sizes.experts) return "ep without experts";
  if (sizes.layers < pp) return `fewer layers than pp: ${sizes.layers} < ${pp}`;
  const { layers } = sizes;
  if (pp > 1 && virtual > 1 && layers % (pp * virtual) && !hasLightEnds(layers, pp, virtual)) {
    return `layers % (pp · virtual) is not 0: ${layers} % ${pp * virtual}`;
  }
  return "";
}

// Without stages there are no chunks; ends are light if then all chunks are even.
export function layoutOptions(sizes, pp, options) {
  const virtual = pp > 1 ? options.virtual || 1 : 1;
  return { ...options, virtual, light_ends: hasLightEnds(sizes.layers, pp, virtual) };
}

// The best row of each tp × pp that fits, as a Map of "tp,pp"; null if none fits. cp is
// given, or one of rings.
export function search(sizes, machine, options, fixed = {}) {
  const best = new Map();
  for (const cp of fixed.cp ? [fixed.cp] : rings(sizes, options.attention)) {
    if (machine.gpus % cp) continue;
    const gpus = machine.gpus / cp;
    for (const tp of divisors(gpus)) {
      for (const pp of divisors(gpus / tp)) {
        const mesh = { tp, pp, dp: gpus / tp / pp, cp };
        if (whyNot(sizes, { ...mesh, virtual: options.virtual })) continue;
        const found = bestOfMesh(sizes, machine, mesh, layoutOptions(sizes, pp, options));
        const before = best.get(`${tp},${pp}`);
        if (!before || (found && found.seconds < before.seconds)) best.set(`${tp},${pp}`, found);
      }
    }
  }
  return best;
}

// Sizes of cp that are tried: powers of two that leave enough positions on a rank.
export function rings(sizes, attention) {
  const found = [1];
  while (attention === "flash" && sizes.seq_len >= 2 * found.at(-1) * SHORTEST_IN_A_RING) {
    found.push(2 * found.at(-1));
  }
  return found;
}

// What may be recomputed; half has no formula for experts and saved scores.
export function waysToRecompute(sizes, attention) {
  const half = attention === "flash" && !sizes.experts;
  return RECOMPUTE.filter((how) => how !== "half" || half);
}

function bestOfMesh(sizes, machine, mesh, options) {
  let best = null;
  for (const micro_batch of divisors(sizes.batch_size / mesh.dp)) {
    const M = sizes.batch_size / mesh.dp / micro_batch;
    if (options.virtual > 1 && M % mesh.pp) continue;
    for (const ep of sizes.experts ? divisors(sizes.experts) : [1]) {
      if (whyNot(sizes, { ...mesh, ep })) continue;
      for (const recompute of waysToRecompute(sizes, options.attention)) {
        const layout = makeLayout(sizes, { ...mesh, ...options, micro_batch, ep, recompute });
        const row = predict(layout, machine);
        if (row.memory > usable(machine)) continue;
        if (!best || row.seconds < best.seconds) best = row;
        if (options.attention === "flash" && recompute === "none") break;
      }
    }
  }
  return best;
}
