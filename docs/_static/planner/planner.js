// The page with sliders: reads the form, asks predict.js, draws, and keeps the state in
// the address. It has no formula of its own.
import {
  ATTENTION, LOSSES, RECOMPUTE, SCHEDULES, SCORES, divisors, layoutOptions, makeLayout, predict,
  rings, search, usable, waysToRecompute, whyNot,
} from "./predict.js";

const presets = await (await fetch("presets.json")).json();
const GB = 1e9;
const powers = (first, last) => {
  const found = [];
  for (let n = first; n <= last; n *= 2) found.push(n);
  return found;
};
// A field: its label; `list` makes a slider over these values, `options` a menu, otherwise
// it is a number. `scale`: the form's unit in the unit of predict.js.
const GROUPS = {
  Model: {
    model: { label: "model", options: [...Object.keys(presets.models)] },
    layers: { label: "layers" }, hidden: { label: "hidden size" }, heads: { label: "heads" },
    kv_heads: { label: "key/value heads" }, head_dim: { label: "head size" },
    ffn: { label: "MLP width", least: 0 },
    experts: { label: "experts", least: 0 }, top_k: { label: "experts per token", least: 0 },
    expert_ffn: { label: "expert width", least: 0 },
    vocab_size: { label: "vocabulary" }, seq_len: { label: "sequence length" },
    batch_size: { label: "sequences per step" },
  },
  Machine: {
    machine: { label: "machine", options: Object.keys(presets.machines) },
    node: { label: "GPUs per node", list: [1, 2, 4, 8, 16, 32, 72] },
    nodes: { label: "nodes", list: [1, 2, 3, 4, ...powers(8, 256), 384, 512, 1024, 2048] },
    gpu_memory: { label: "memory, GB", any: true },
    reserve: { label: "reserve, %", scale: 0.01, any: true, least: 0, below: 100 },
    gpu_flops: { label: "peak, TFLOP/s", scale: 1e12, any: true },
    inside: { label: "in the node, GB/s", scale: GB, any: true },
    between: { label: "network, GB/s", scale: GB, any: true },
  },
  Layout: {
    tp: { label: "tp", list: [] }, pp: { label: "pp", list: [] },
    virtual: { label: "chunks per stage", list: [] },
    cp: { label: "cp (ring)", list: [] }, ep: { label: "ep (experts)", list: [] },
    micro_batch: { label: "micro-batch", list: [] },
    recompute: { label: "recompute", options: RECOMPUTE },
    attention: { label: "attention", options: ATTENTION },
    scores: { label: "S × S scores", options: SCORES },
    zero: { label: "ZeRO stage", options: [0, 1, 2, 3] },
    loss: { label: "loss", options: Object.keys(LOSSES) },
    grad_bytes: { label: "bytes per gradient", options: [2, 4] },
    schedule: { label: "schedule", options: SCHEDULES },
    overlap_dp: { label: "dp overlapped", options: ["no", "yes"] },
    imbalance: { label: "expert imbalance", any: true, least: 1 },
  },
};
const AS_NUMBERS = ["zero", "grad_bytes"]; // menus whose values are numbers
const LARGEST = 2 ** 31 - 1; // what the command takes
const FIELDS = Object.assign({}, ...Object.values(GROUPS));
const NUMBERS = Object.keys(FIELDS).filter((name) => !FIELDS[name].options && !FIELDS[name].list);
const KINDS = { // of memory and of time: color, label
  parameters: ["#56B4E9", "weights"], gradients: ["#E69F00", "gradients"],
  optimizer: ["#009E73", "AdamW"], activations: ["#CC79A7", "activations"],
  unsharded: ["#F0E442", "unsharded for a while"], loss: ["#D55E00", "logits and loss"],
  arithmetic: ["#56B4E9", "computing"], tp: ["#E69F00", "tp"], dp: ["#009E73", "dp"],
  send: ["#CC79A7", "pp"], bubble: ["#F0E442", "bubble"], cp: ["#D55E00", "cp"],
  ep: ["#0072B2", "ep"],
};
const $ = (id) => document.getElementById(id);
const state = {};

function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// The form

function buildForm() {
  for (const [title, fields] of Object.entries(GROUPS)) {
    const group = make("fieldset", {}, make("legend", {}, title));
    for (const [name, field] of Object.entries(fields)) group.append(...build(name, field));
    $("form").append(group);
  }
  $("form").addEventListener("submit", (event) => event.preventDefault());
}

function build(name, field) {
  const label = make("label", { for: name }, field.label);
  let input;
  const row = make("div", { class: "field" }, label);
  if (field.options) {
    input = make("select", { id: name });
    for (const value of field.options) input.append(make("option", { value }, `${value}`));
  } else if (field.list) {
    input = make("input", { id: name, type: "range", min: 0, step: 1 });
  } else {
    const least = field.least ?? (field.any ? "any" : 1);
    input = make("input", { id: name, type: "number", min: least, step: field.any ? "any" : 1 });
  }
  input.addEventListener("input", () => changed(name));
  row.append(input);
  if (field.list) row.append(make("output", { for: name, id: `${name}-value` }));
  return [row];
}

function read(name) {
  const field = FIELDS[name];
  if (field.list) return field.list[+$(name).value];
  if (AS_NUMBERS.includes(name)) return +$(name).value;
  if (field.options) return $(name).value;
  const text = $(name).value.trim();
  return text === "" ? NaN : Number(text) * (field.scale || 1);
}

function changed(name) {
  state[name] = read(name);
  if (name === "model") Object.assign(state, modelOf(state.model));
  if (name === "model" && !state.experts) state.imbalance = 1;
  if (name === "model" && state.experts && state.recompute === "half") state.recompute = "selective";
  if (name === "machine") Object.assign(state, machineOf(state.machine));
  if (name === "attention") state.scores = usualScores();
  if (name === "hidden" || name === "heads") state.head_dim = state.hidden / state.heads;
  update();
}

// Why the numbers of the form are no model or machine, or "": what the command refuses.
function problem() {
  for (const name of NUMBERS) {
    const { label, scale = 1, any, least, below } = FIELDS[name];
    const value = +(state[name] / scale).toPrecision(12);
    if (name === "head_dim" && !Number.isInteger(value)) continue; // see hidden, below
    const enough = least === undefined ? value > 0 : value >= least;
    const whole = any || Number.isInteger(value);
    const small = value < (below ?? Infinity) && (any || value <= LARGEST);
    if (enough && whole && small) continue;
    const what = any ? "a number" : "a whole number";
    const from = least === undefined ? "above 0" : `from ${least} on`;
    const to = below ? `, below ${below}` : whole && enough && !any ? `, up to ${LARGEST}` : "";
    return `${label}: ${Number.isNaN(value) ? "nothing" : value} is not ${what} ${from}${to}`;
  }
  const { hidden, heads, kv_heads, head_dim, experts, top_k, expert_ffn, imbalance } = state;
  const pairs = "rotary embedding turns pairs";
  if (hidden % heads) return `hidden size ${hidden} is not a multiple of ${heads} heads`;
  if (head_dim % 2) return `head size ${head_dim} is odd: ${pairs}`;
  if (heads % kv_heads) return `heads: ${heads} is not a multiple of ${kv_heads} key/value heads`;
  if (top_k > experts) return `experts per token: ${top_k}, but there are ${experts} experts`;
  if (imbalance > 1 && !experts) return `expert imbalance: ${imbalance}, but there are no experts`;
  if (experts && !(top_k && expert_ffn)) return "experts: how many per token, and how wide?";
  if (!experts && !state.ffn) return "MLP width: 0, and there are no experts";
  if (state.schedule !== "1f1b" && state.virtual > 1) return "chunks per stage: only with 1f1b";
  if (state.attention === "math" && state.scores === "half") {
    return "scores: attention that is written out computes all";
  }
  if (!waysToRecompute(state, state.attention).includes(state.recompute)) {
    return "recompute: half, only with attention flash and without experts";
  }
  return "";
}

function modelOf(name) {
  const { gpus, published, measured, ...sizes } = presets.models[name];
  return sizes;
}
function machineOf(name) {
  return { ...presets.machines[name] };
}

// Sliders have the values that are possible now; the form shows the state.
function fillForm(sizes, gpus) {
  // A ring saves no scores, so it is not for attention that is written out.
  const splits = (cp) => cp === 1 || (state.attention === "flash" && state.seq_len % (2 * cp) === 0);
  FIELDS.cp.list = divisors(gpus).filter(splits);
  gpus /= nearest("cp");
  FIELDS.tp.list = divisors(gpus).filter((tp) => state.heads % tp === 0);
  FIELDS.pp.list = divisors(gpus / nearest("tp")).filter((pp) => pp <= state.layers);
  const pp = nearest("pp");
  const most = pp > 1 ? Math.ceil(state.layers / pp) : 1;
  FIELDS.virtual.list = Array.from({ length: most }, (_, i) => i + 1)
    .filter((virtual) => !whyNot(sizes, { pp, virtual }));
  nearest("virtual");
  const dp = gpus / state.tp / pp;
  const ranks = dp * state.tp * state.cp;
  FIELDS.ep.list = (state.experts ? divisors(state.experts) : [1]).filter((ep) => ranks % ep === 0);
  FIELDS.micro_batch.list = state.batch_size % dp ? [1] : divisors(state.batch_size / dp);
}

function showForm(invalid) {
  for (const [name, field] of Object.entries(FIELDS)) {
    if (field.list) {
      if (!invalid) nearest(name);
      $(name).max = field.list.length - 1;
      $(name).value = field.list.indexOf(state[name]);
      $(name).setAttribute("aria-valuetext", `${state[name]}`);
      $(`${name}-value`).value = state[name];
    } else if (field.options) {
      $(name).value = state[name];
    } else if (document.activeElement !== $(name)) {
      const value = +(state[name] / (field.scale || 1)).toPrecision(12);
      $(name).value = Number.isFinite(value) ? value : "";
    }
  }
}

// The state's value, or the largest possible one below it.
function nearest(name) {
  const { list } = FIELDS[name];
  if (!list.includes(state[name])) {
    state[name] = list.filter((value) => value <= state[name]).pop() || list[0];
  }
  return state[name];
}

// The address

function readAddress() {
  const query = new URLSearchParams(location.search);
  const known = (list, name, first) => (Object.hasOwn(list, name ?? "") ? name : first);
  state.model = known(presets.models, query.get("model"), "gpt-18.4b");
  state.machine = known(presets.machines, query.get("machine"), "dgx-a100");
  Object.assign(state, modelOf(state.model), machineOf(state.machine));
  Object.assign(state, { nodes: 32, tp: 8, pp: 1, cp: 1, ep: 1, virtual: 1, micro_batch: 1 });
  Object.assign(state, { recompute: "none", attention: "flash", zero: 0, loss: "plain" });
  Object.assign(state, { grad_bytes: 2, schedule: "1f1b", overlap_dp: "no", imbalance: 1 });
  for (const [name, field] of Object.entries(FIELDS)) {
    const text = query.get(name);
    if (text === null || name === "model" || name === "machine") continue;
    if (field.options) {
      if (field.options.map(String).includes(text)) state[name] = AS_NUMBERS.includes(name) ? +text : text;
    } else {
      state[name] = text.trim() === "" ? NaN : Number(text) * (field.scale || 1);
    }
  }
  if (query.get("scores") === null) state.scores = usualScores();
  const own = query.get("head_dim") !== null;
  if (!own && (query.get("hidden") || query.get("heads"))) state.head_dim = state.hidden / state.heads;
}

// What a kernel computes of the scores: half, if it is causal.
const usualScores = () => (state.attention === "flash" ? "half" : "all");
const USUAL = { cp: 1, ep: 1, virtual: 1, loss: "plain", grad_bytes: 2, schedule: "1f1b", overlap_dp: "no", imbalance: 1 };

function writeAddress() {
  const query = new URLSearchParams();
  for (const [name, field] of Object.entries(FIELDS)) {
    const preset = { ...modelOf(state.model), ...machineOf(state.machine) }[name];
    if (Object.is(state[name], preset) || state[name] === USUAL[name]) continue;
    if (name === "scores" && state.scores === usualScores()) continue;
    const value = field.scale ? +(state[name] / field.scale).toPrecision(12) : state[name];
    query.set(name, value);
  }
  history.replaceState(null, "", `?${query}`);
}

// What is shown

const gigabytes = (n) => (n / GB).toFixed(1);

function bars(target, list, parts, whole, show) {
  $(target).replaceChildren();
  $(list).replaceChildren();
  for (const [kind, value] of Object.entries(parts)) {
    if (!value) continue;
    const [color, label] = KINDS[kind];
    const piece = make("i", { style: `width:${(100 * value) / whole}%;background:${color}` });
    $(target).append(piece);
    const term = make("dt", { style: `--kind:${color}` }, label);
    const [number, note] = show(kind, value);
    $(list).append(term, make("dd", {}, number), make("dd", {}, note));
  }
}

function showMemory(row, machine) {
  const limit = usable(machine);
  const whole = Math.max(row.memory, machine.gpu_memory * GB);
  bars("memory", "memory-parts", row.bytes, whole, (kind, value) => [`${gigabytes(value)} GB`, ""]);
  $("memory").dataset.value = row.memory;
  $("limit").style.left = `${(100 * limit) / whole}%`;
  const fits = row.memory <= limit;
  const share = `${gigabytes(limit)} of ${machine.gpu_memory} GB`;
  const holds = `${gigabytes(row.memory)} GB`;
  const held = Object.entries(row.bytes).filter(([, value]) => value);
  const terms = held.map(([kind, value]) => `${KINDS[kind][1]} ${gigabytes(value)}`).join(" + ");
  $("fits").className = fits ? "yes" : "no";
  $("fits").textContent = fits
    ? `It fits: ${holds} at the peak, of the ${share} that may be used.`
    : `It does not fit: ${terms} = ${holds} at the peak, and ${share} may be used. `
      + `A parameter takes ${14 + state.grad_bytes} bytes (2 + ${state.grad_bytes} + 12) over tp · pp ranks; `
      + "ZeRO shards them over dp as well.";
}

function showTime(row) {
  const { pp, ...parts } = row.parts;
  const shown = { ...parts, send: pp - row.waiting, bubble: row.waiting };
  const axes = { tp: "tp", dp: "dp", send: "pp", cp: "cp", ep: "ep" };
  bars("seconds", "time-parts", shown, row.seconds, (kind, value) => {
    const axis = axes[kind];
    const rate = axis && `a rank sends ${gigabytes(row.sent[axis])} GB at ${gigabytes(row.rate[axis])} GB/s`;
    const chunks = row.virtual > 1 ? `/(${row.virtual} · ${row.microbatches})` : `/${row.microbatches}`;
    const plain = row.schedule === "1f1b";
    const bubble = kind === "bubble" && `${row.bubble.toPrecision(2)} of computing`
      + (plain ? ` = (pp − 1)/${row.virtual > 1 ? "(v · M)" : "M"} = ${row.pp - 1}${chunks}` : "");
    return [`${value.toPrecision(3)} s`, rate || bubble || ""];
  });
  $("seconds").dataset.value = row.seconds;
  const cp = row.cp > 1 ? ` × cp ${row.cp}` : "";
  const ep = row.ep > 1 ? `, ep ${row.ep}` : "";
  const leaves = row.tp_leaves_node ? " The tp group spans nodes: it waits for the network ten times per layer." : "";
  $("summary").textContent = `dp ${row.dp} × pp ${row.pp} × tp ${row.tp}${cp}${ep}: ${row.seconds.toPrecision(3)} s, `
    + `MFU ${(100 * row.mfu).toFixed(0)} %, M = ${row.microbatches} micro-batches. Predicted.${leaves}`;
}

// From dark blue to yellow, as in notebook 07.
function fill(mfu) {
  const light = Math.round(22 + 68 * mfu);
  return { color: `hsl(${mfu > 0.5 ? 48 : 215} ${mfu > 0.5 ? 60 : 35}% ${light}%)`, on: light > 48 ? "#000" : "#fff" };
}

function showMap(best) {
  const meshes = [...best.keys()].map((key) => key.split(",").map(Number));
  const tps = [...new Set(meshes.map(([tp]) => tp))].sort((a, b) => a - b);
  const pps = [...new Set(meshes.map(([, pp]) => pp))].sort((a, b) => a - b);
  const rows = [...best.values()].filter(Boolean);
  const fastest = rows.length ? rows.reduce((a, b) => (b.seconds < a.seconds ? b : a)) : null;
  const head = make("tr", {}, make("th", { scope: "col" }, "tp ↓ pp →"));
  for (const pp of pps) head.append(make("th", { scope: "col" }, `${pp}`));
  const lines = [head];
  for (const tp of tps) {
    const line = make("tr", {}, make("th", { scope: "row" }, `${tp}`));
    for (const pp of pps) line.append(make("td", {}, ...field(best, tp, pp, fastest)));
    lines.push(line);
  }
  $("map").replaceChildren(...lines);
}

function field(best, tp, pp, fastest) {
  const key = `${tp},${pp}`;
  if (!best.has(key)) return [];
  const row = best.get(key);
  const here = state.tp === tp && state.pp === pp;
  const leaves = tp > 1 && state.node % tp && state.node * state.nodes > state.node;
  const value = row ? `${(100 * row.mfu).toFixed(0)}` : "–";
  const text = (row ? `MFU ${value} %` : "no layout fits") + (leaves ? ", tp spans nodes" : "");
  const button = make("button", { type: "button", "data-mesh": key, "aria-pressed": here,
    "aria-label": `tp ${tp}, pp ${pp}: ${text}${row && row === fastest ? ", the best" : ""}` }, leaves ? `${value}*` : value);
  if (row) {
    const { color, on } = fill(row.mfu);
    button.style.cssText = `--fill:${color};--on:${on}`;
    if (row === fastest) button.className = "best";
  } else {
    button.className = "no";
  }
  button.addEventListener("click", () => {
    Object.assign(state, { tp, pp });
    if (row) {
      const { cp, ep, micro_batch, recompute } = row;
      Object.assign(state, { cp, ep, micro_batch, recompute });
    }
    update();
    document.querySelector(`[data-mesh="${key}"]`).focus();
  });
  return [button];
}

/** The words of the command, each in a span: a line may break only between them. */
function command(machine, layout) {
  const words = ["python tools/plan.py", `--model ${state.model}`, `--machine ${state.machine}`];
  const preset = { ...modelOf(state.model), ...machineOf(state.machine) };
  // The command derives a head's size if one of these is given.
  if (state.hidden !== preset.hidden || state.heads !== preset.heads) {
    preset.head_dim = state.hidden / state.heads;
  }
  for (const name of [...NUMBERS, "node"]) {
    if (name === "imbalance" || state[name] === preset[name]) continue;
    words.push(`--${name.replaceAll("_", "-")} ${state[name]}`);
  }
  words.push(`--gpus ${machine.gpus}`);
  for (const name of ["dp", "pp", "tp", "cp", "micro_batch", "recompute", "attention", "zero"]) {
    words.push(`--${name.replace("_", "-")} ${layout[name]}`);
  }
  if (layout.experts) words.push(`--ep ${layout.ep}`, `--imbalance ${layout.imbalance}`);
  for (const name of ["virtual", "loss", "grad_bytes", "schedule"]) {
    if (layout[name] !== USUAL[name]) words.push(`--${name.replace("_", "-")} ${layout[name]}`);
  }
  if (layout.scores !== usualScores()) words.push(`--scores ${layout.scores}`);
  if (layout.overlap_dp) words.push("--overlap-dp");
  return words.flatMap((word) => [make("span", {}, word), " "]);
}

function refuse(reason) {
  $("fits").className = "no";
  $("fits").textContent = `Not possible: ${reason}`;
  for (const id of ["memory", "memory-parts", "seconds", "time-parts", "summary"]) $(id).replaceChildren();
}

function update() {
  nearest("node");
  nearest("nodes");
  const invalid = problem();
  if (invalid) {
    showForm(invalid);
    for (const id of ["map", "command"]) $(id).replaceChildren();
    refuse(invalid);
    return;
  }
  const sizes = { ...modelOf(state.model) };
  for (const name of Object.keys(sizes)) sizes[name] = state[name];
  const machine = { ...machineOf(state.machine), node: state.node, gpus: state.node * state.nodes };
  for (const name of Object.keys(machineOf(state.machine))) machine[name] = state[name];
  fillForm(sizes, machine.gpus);
  showForm();
  writeAddress();
  const { attention, scores, zero, tp, pp, cp, ep, virtual, loss, grad_bytes, schedule, imbalance } = state;
  const options = { attention, scores, zero, virtual, loss, grad_bytes, schedule, imbalance };
  options.overlap_dp = state.overlap_dp === "yes";
  const mesh = { tp, pp, cp, dp: machine.gpus / tp / pp / cp };
  showMap(search(sizes, machine, options));
  $("tried").textContent = `cp: tried up to ${rings(sizes, attention).at(-1)}.`;
  const { micro_batch, recompute } = state;
  const more = { ...layoutOptions(sizes, pp, options), micro_batch, recompute, ep };
  const layout = makeLayout(sizes, { ...mesh, ...more });
  let reason = whyNot(sizes, { ...mesh, ep, virtual });
  if (!reason && more.virtual > 1 && layout.microbatches % pp) {
    reason = `${layout.microbatches} micro-batches are not a multiple of pp, and chunks go pp at a time`;
  }
  if (reason) {
    $("command").replaceChildren();
    refuse(`dp ${mesh.dp} × pp ${pp} × tp ${tp}: ${reason}`);
    return;
  }
  $("command").replaceChildren(...command(machine, layout));
  const row = predict(layout, machine);
  showMemory(row, machine);
  showTime(row);
}

function showBands() {
  for (const { kind, low, high } of presets.bands) {
    $("bands").append(make("tr", {}, make("th", { scope: "row" }, kind), make("td", {}, `${low} to ${high}`)));
  }
}

function showPeaks() {
  const ratios = presets.peaks.map(({ predicted, measured }) => measured / predicted);
  $("reserved").textContent = `${Math.min(...ratios).toFixed(2)} to ${Math.max(...ratios).toFixed(2)}`;
  for (const { run, predicted, measured } of presets.peaks) {
    const cells = [gigabytes(predicted), gigabytes(measured), (measured / predicted).toFixed(2)];
    $("peaks").append(make("tr", {}, make("th", { scope: "row" }, run), ...cells.map((x) => make("td", {}, x))));
  }
}

buildForm();
showBands();
showPeaks();
readAddress();
update();
