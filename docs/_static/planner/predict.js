// The formulas of tools/predict.py, where their sources are, for the page with sliders.
// tests/test_planner.py compares both on random layouts: bytes are equal, times agree to
// 1e-9. Names are those of the Python code. A formula is edited there first.

export const RECOMPUTE = ["none", "selective", "full"];
export const ATTENTION = ["flash", "math"];
const GB = 1e9;
// Phases that come once per step; all others come with each micro-batch.
const ONCE = ["tp sum", "dp sum", "tied", "norm", "update"];
const LINKS = { copy: "tp", embed: "pp" }; // groups within a line of the mesh

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

export function makeLayout(sizes, more) {
  const layout = {
    gated: false, biases: "all", tie: false, schedule: "1f1b", zero: 0,
    recompute: "none", attention: "math", pp: 1, dp: 1, tp: 1, cp: 1, micro_batch: 1,
    ...sizes, ...more,
  };
  layout.ffn = layout.ffn || 4 * layout.hidden;
  layout.microbatches = floorDiv(layout.batch_size, layout.dp * layout.micro_batch);
  return layout;
}

// What a rank holds

const replicas = (a) => a.dp * a.cp;
function layersOf(a, stage) {
  return floorDiv(a.layers, a.pp) + (stage < a.layers % a.pp ? 1 : 0);
}
function kvWidth(a) {
  return floorDiv(a.hidden, a.heads) * Math.max(a.kv_heads, a.tp);
}
function layerWeights(a) {
  const attention = a.hidden * (2 * a.hidden + 2 * kvWidth(a));
  return attention + (a.gated ? 3 : 2) * a.hidden * a.ffn;
}
function layerParameters(a) {
  let sharded = layerWeights(a);
  let replicated = 2 * a.hidden;
  if (a.biases !== "none") sharded += a.hidden + 2 * kvWidth(a);
  if (a.biases === "all") {
    sharded += a.ffn * (a.gated ? 2 : 1);
    replicated += 4 * a.hidden;
  }
  return { sharded, replicated };
}
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
  const held = floorDiv(layers * layer.sharded, a.tp) + replicated + vocabulary;
  const trained = a.tie && isLast && !isFirst ? held - matrix : held;
  return { held, trained, replicated };
}

export function layerBytes(a, e = 2, stats = 4, masks = false, sp = true) {
  const b = a.micro_batch;
  const S = floorDiv(a.seq_len, a.cp);
  const s = sp ? floorDiv(S, a.tp) : S;
  if (a.recompute === "full") return e * b * s * a.hidden;
  const norms = 2 * normStats(a) * stats;
  const outside = b * s * (a.hidden * (4 * e + (masks ? 2 : 0)) + norms);
  const inside = 2 * a.hidden + a.ffn * (a.gated ? 4 : 2);
  const tokens = b * S;
  const coreInputs = floorDiv(e * tokens * (inside + 2 * kvWidth(a)), a.tp);
  if (a.recompute === "selective") return outside + coreInputs;
  if (a.attention === "flash") {
    return outside + coreInputs + floorDiv(4 * tokens * a.heads, a.tp);
  }
  const scores = floorDiv(b * a.heads * S * S, a.tp) * (e + (masks ? 1 + e : 0));
  return outside + floorDiv(e * tokens * (inside + 2 * a.hidden), a.tp) + scores;
}

export function savedBytes(a, stage, e = 2, stats = 4) {
  const tokens = floorDiv(a.micro_batch * a.seq_len, a.cp);
  let saved = layersOf(a, stage) * layerBytes(a, e, stats);
  if (stage === 0) saved += tokens * (8 + 1);
  if (stage === a.pp - 1) {
    saved += floorDiv(tokens, a.tp) * (2 * e * a.hidden + normStats(a) * stats);
    saved += tokens * (Math.max(4, e) * vocabRows(a) + 8 + 1 + 1) + vocabRows(a);
  }
  return saved;
}

export function inFlight(kind, stage, P, M) {
  return kind === "gpipe" ? M : Math.min(P - stage, M);
}

export function memory(a, stage) {
  const { held, trained } = parameters(a, stage);
  const shard = Math.ceil(held / replicas(a));
  let activations = inFlight(a.schedule, stage, a.pp, a.microbatches);
  activations *= savedBytes(a, stage);
  if (a.recompute !== "none") {
    activations += layerBytes({ ...a, recompute: "none" }) - layerBytes(a);
  }
  const { sharded, replicated } = layerParameters(a);
  const layer = floorDiv(sharded, a.tp) + replicated;
  const largest = Math.max(layer, vocabRows(a) * a.hidden);
  const part = Math.ceil(trained / replicas(a));
  return {
    parameters: 2 * (a.zero >= 3 ? shard : held),
    gradients: 2 * (a.zero >= 2 ? shard : held),
    optimizer: 12 * (a.zero ? part : part * replicas(a)),
    activations,
    unsharded: replicas(a) > 1 && a.zero >= 2 ? (a.zero === 3 ? 4 : 2) * largest : 0,
  };
}

// What it sends, and how long a step takes

export function traffic(a, stage, e = 2) {
  const [M, T, D, dp] = [a.microbatches, a.tp, a.hidden, a.dp];
  const tokens = floorDiv(floorDiv(a.batch_size, dp) * a.seq_len, a.cp);
  const { trained, replicated } = parameters(a, stage);
  const rows = floorDiv(floorDiv(a.batch_size, dp), M);
  const S = tokens / (rows * M);
  const l = layersOf(a, stage);
  const X = (e * tokens * D) / M;
  const n = trained + ((replicas(a) - (trained % replicas(a))) % replicas(a));
  const isFirst = stage === 0;
  const isLast = stage === a.pp - 1;
  const embedding = isFirst ? 1 : 0;
  const head = isLast ? 1 : 0;
  const found = [];
  const add = (phase, collective, axis, calls, nbytes) => {
    if (calls) found.push({ phase, collective, axis, calls, nbytes: round(calls * nbytes) });
  };
  add("forward", "all-gather", "tp", M * (2 * l + head), X);
  add("forward", "reduce-scatter", "tp", M * (2 * l + embedding), X);
  add("backward", "all-gather", "tp", M * (4 * l + embedding + head), X);
  add("backward", "reduce-scatter", "tp", M * (2 * l + head), X);
  add("tp sum", "all-reduce", "tp", 1, e * replicated);
  add("norm", "all-reduce", "tp", 1, 8);
  add("norm", "all-reduce", "pp", 1, 8);
  if (a.zero) add("norm", "all-reduce", "dp", 1, 8);
  if (a.zero === 0) add("dp sum", "all-reduce", "dp", 1, e * n);
  if (a.zero === 1) add("dp sum", "reduce-scatter", "dp", 1, e * n);
  if (a.zero >= 2) add("backward", "reduce-scatter", "dp", M, e * n);
  if (a.zero === 1 || a.zero === 2) add("update", "all-gather", "dp", 1, e * n);
  if (a.zero === 3) {
    add("forward", "all-gather", "dp", M, e * n);
    add("backward", "all-gather", "dp", M, e * n);
  }
  if (isFirst || isLast) {
    add("shapes", "broadcast", "tp", M, 24);
    add("batch", "broadcast", "tp", M, 2 * 8 * rows * S);
    if (a.tie) {
      add("tied", "all-reduce", "embed", 1, e * vocabRows(a) * D);
      add("update", "broadcast", "embed", 1, e * vocabRows(a) * D);
    }
  }
  if (!isLast) {
    add("shapes", "send/recv", "pp", M, 24);
    add("forward", "send/recv", "pp", M, X / T);
  }
  if (!isFirst) add("backward", "send/recv", "pp", M, X / T);
  if (isLast) {
    add("batch", "all-reduce", "dp", 1, 8);
    add("loss", "all-reduce", "tp", 3 * M, Math.max(4, e) * rows * S);
  }
  if (a.recompute === "full") {
    add("backward", "all-gather", "tp", 2 * M * l, X);
    add("backward", "reduce-scatter", "tp", M * l, X);
  }
  if (a.cp > 1) {
    const kv = (2 * e * tokens * kvWidth(a)) / (T * M);
    add("forward", "send/recv", "cp", M * l * (a.cp - 1), kv);
    add("backward", "send/recv", "cp", M * l * (2 * a.cp - 1), kv);
    if (a.recompute !== "none") add("backward", "send/recv", "cp", M * l * (a.cp - 1), kv);
  }
  if (T > a.kv_heads) {
    const H = floorDiv(D, a.heads);
    if (a.biases === "none") add("backward", "all-reduce", "copy", 2 * M * l, e * H * D);
    else add("backward", "all-reduce", "copy", 4 * M * l, (e * H * (D + 1)) / 2);
  }
  return found;
}

function ranksAlong(a, axis) {
  if (axis === "copy") return Math.max(1, floorDiv(a.tp, a.kv_heads));
  if (axis === "embed") return Math.min(2, a.pp);
  if (axis === "dp") return replicas(a);
  return a[axis];
}

export function ring(collective, ranks) {
  if (collective === "send/recv") return 1;
  return ((collective === "all-reduce" ? 2 : 1) * (ranks - 1)) / ranks;
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

export function rates(a, machine) {
  const spans = { tp: a.tp, dp: a.tp * replicas(a) };
  if (a.cp > 1) spans.cp = a.tp * a.cp;
  spans.pp = spans.dp * a.pp;
  const found = {};
  for (const [axis, span] of Object.entries(spans)) {
    if (machine.node % span === 0 || machine.gpus <= machine.node) {
      found[axis] = machine.inside;
    } else if (axis === "cp" || axis === "pp") {
      found[axis] = machine.between;
    } else {
      const ranks = ranksAlong(a, axis);
      const inner = span / ranks;
      const cards = machine.node % inner ? 1 : gcd(ranks, machine.node / inner);
      found[axis] = Math.min(machine.inside, machine.between * cards);
    }
  }
  return found;
}

export function flops(a, stage) {
  const tokens = floorDiv(a.batch_size, a.dp) * a.seq_len;
  const scores = 4 * a.seq_len * a.hidden;
  const layer = 2 * layerWeights(a) + scores;
  let again = { none: 0, selective: scores, full: layer }[a.recompute];
  if (a.attention === "flash") again += floorDiv(scores, 2);
  let work = layersOf(a, stage) * (3 * layer + again);
  if (stage === a.pp - 1) work += 6 * a.hidden * a.vocab_size;
  return (tokens * work) / (a.tp * a.cp);
}

export function modelFlops(a) {
  return flops({ ...a, recompute: "none", attention: "math", pp: 1, dp: 1, tp: 1, cp: 1 }, 0);
}

function seconds(a, stage, machine, rate) {
  const took = { arithmetic: flops(a, stage) / machine.gpu_flops, once: 0 };
  const sent = {};
  for (const axis of Object.keys(rate)) sent[axis] = took[axis] = 0;
  for (const row of traffic(a, stage)) {
    const ranks = ranksAlong(a, row.axis);
    if (ranks === 1) continue; // nothing is sent
    const nbytes = row.nbytes * ring(row.collective, ranks);
    const axis = LINKS[row.axis] || row.axis;
    sent[axis] += nbytes;
    took[ONCE.includes(row.phase) ? "once" : axis] += nbytes / rate[axis];
  }
  return { took, sent };
}

const sum = (values) => Object.values(values).reduce((total, x) => total + x, 0);
function inMicroBatches(took) {
  const { once, ...rest } = took;
  return sum(rest);
}
const most = (rows, value) => rows.reduce((a, b) => (value(b) > value(a) ? b : a));

export function predict(a, machine) {
  const [P, M] = [a.pp, a.microbatches];
  const rate = rates(a, machine);
  const stages = [...new Set([0, Math.min(1, P - 1), P - 1])];
  const bytes = most(stages.map((stage) => memory(a, stage)), sum);
  const found = stages.map((stage) => seconds(a, stage, machine, rate));
  const slowest = most(found.map((each) => each.took), inMicroBatches);
  const waiting = (inMicroBatches(slowest) * (P - 1)) / M;
  const parts = {
    arithmetic: slowest.arithmetic,
    tp: slowest.tp,
    dp: Math.max(...found.map((each) => each.took.once)) + slowest.dp,
    pp: slowest.pp + waiting,
  };
  if (a.cp > 1) parts.cp = slowest.cp;
  const sent = {};
  for (const axis of Object.keys(rate)) {
    sent[axis] = Math.max(...found.map((each) => each.sent[axis]));
  }
  const total = sum(parts);
  return {
    ...a, bytes, memory: sum(bytes), sent, rate, parts, bubble: (P - 1) / M,
    waiting, seconds: total,
    mfu: modelFlops(a) / (machine.gpu_flops * machine.gpus * total),
  };
}

// All layouts of a model on a machine

export const usable = (machine) => machine.gpu_memory * GB * (1 - machine.reserve);

export function divisors(n) {
  const found = [];
  for (let i = 1; i <= n; i += 1) if (n % i === 0) found.push(i);
  return found;
}

export function whyNot(sizes, { dp, pp, tp, cp = 1 }) {
  for (const [text, parts] of [["2 · cp", 2 * cp], ["cp · tp", cp * tp]]) {
    if (cp > 1 && sizes.seq_len % parts) {
      return `seq-len % (${text}) is not 0: ${sizes.seq_len} % ${parts}`;
    }
  }
  const parts = { heads: tp, kv_heads: tp, ffn: tp, seq_len: tp, batch_size: dp };
  for (const [name, count] of Object.entries(parts)) {
    if (name === "kv_heads" && tp % sizes.kv_heads === 0) continue;
    if (sizes[name] % count) {
      const axis = name === "batch_size" ? "dp" : "tp";
      return `${name.replace("_", "-")} % ${axis} is not 0: ${sizes[name]} % ${count}`;
    }
  }
  return sizes.layers < pp ? `fewer layers than pp: ${sizes.layers} < ${pp}` : "";
}

// The best row of each tp × pp that fits, as a Map of "tp,pp"; null if none fits.
export function search(sizes, machine, options) {
  const best = new Map();
  const cp = options.cp || 1;
  const gpus = machine.gpus / cp;
  for (const tp of divisors(gpus)) {
    for (const pp of divisors(gpus / tp)) {
      const mesh = { tp, pp, dp: gpus / tp / pp, cp };
      if (whyNot(sizes, mesh)) continue;
      best.set(`${tp},${pp}`, bestOfMesh(sizes, machine, { ...mesh, ...options }));
    }
  }
  return best;
}

function bestOfMesh(sizes, machine, mesh) {
  let best = null;
  for (const micro_batch of divisors(sizes.batch_size / mesh.dp)) {
    for (const recompute of RECOMPUTE) {
      if (mesh.attention === "flash" && recompute === "selective") continue;
      const row = predict(makeLayout(sizes, { ...mesh, micro_batch, recompute }), machine);
      const fits = row.memory <= usable(machine);
      if (fits && (!best || row.seconds < best.seconds)) best = row;
    }
  }
  return best;
}
