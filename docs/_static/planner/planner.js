// The page with sliders: reads the form, asks predict.js, draws, and keeps the state in
// the address. It has no formula of its own.
import { ATTENTION, RECOMPUTE, divisors, makeLayout, predict, search, usable, whyNot } from "./predict.js";

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
    kv_heads: { label: "key/value heads" }, ffn: { label: "MLP width" },
    vocab_size: { label: "vocabulary" }, seq_len: { label: "sequence length" },
    batch_size: { label: "sequences per step" },
  },
  Machine: {
    machine: { label: "machine", options: Object.keys(presets.machines) },
    node: { label: "GPUs per node", list: [1, 2, 4, 8, 16, 32, 72] },
    nodes: { label: "nodes", list: [1, 2, 3, 4, ...powers(8, 256), 384, 512] },
    gpu_memory: { label: "memory, GB" }, reserve: { label: "reserve, %", scale: 0.01 },
    gpu_flops: { label: "peak, TFLOP/s", scale: 1e12 },
    inside: { label: "NVLink, GB/s", scale: GB },
    between: { label: "network, GB/s", scale: GB },
  },
  Layout: {
    tp: { label: "tp", list: [] }, pp: { label: "pp", list: [] },
    cp: { label: "cp (ring)", list: [] },
    micro_batch: { label: "micro-batch", list: [] },
    recompute: { label: "recompute", options: RECOMPUTE },
    attention: { label: "attention", options: ATTENTION },
    zero: { label: "ZeRO stage", options: [0, 1, 2, 3] },
  },
};
const FIELDS = Object.assign({}, ...Object.values(GROUPS));
const NUMBERS = Object.keys(FIELDS).filter((name) => !FIELDS[name].options && !FIELDS[name].list);
const KINDS = { // of memory and of time: color, label
  parameters: ["#56B4E9", "weights"], gradients: ["#E69F00", "gradients"],
  optimizer: ["#009E73", "AdamW"], activations: ["#CC79A7", "activations"],
  unsharded: ["#F0E442", "one layer, unsharded"],
  arithmetic: ["#56B4E9", "computing"], tp: ["#E69F00", "tp"], dp: ["#009E73", "dp"],
  send: ["#CC79A7", "pp"], bubble: ["#F0E442", "bubble"], cp: ["#D55E00", "cp"],
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
    input = make("input", { id: name, type: "number", min: name === "reserve" ? 0 : 1, step: "any" });
  }
  input.addEventListener("input", () => changed(name));
  row.append(input);
  if (field.list) row.append(make("output", { for: name, id: `${name}-value` }));
  return [row];
}

function read(name) {
  const field = FIELDS[name];
  if (field.list) return field.list[+$(name).value];
  if (name === "zero") return +$(name).value;
  if (field.options) return $(name).value;
  return +$(name).value * (field.scale || 1);
}

function changed(name) {
  const value = read(name);
  if (NUMBERS.includes(name) && !(value > 0 || (name === "reserve" && value === 0))) return;
  state[name] = value;
  if (name === "model") Object.assign(state, modelOf(value));
  if (name === "machine") Object.assign(state, machineOf(value));
  update();
}

function modelOf(name) {
  const { gpus, published, measured, ...sizes } = presets.models[name];
  return sizes;
}
function machineOf(name) {
  return { ...presets.machines[name] };
}

// Sliders have the values that are possible now; the form shows the state.
function fillForm(gpus) {
  // A ring saves no scores, so it is not for attention that is written out.
  const splits = (cp) => cp === 1 || (state.attention === "flash" && state.seq_len % (2 * cp) === 0);
  FIELDS.cp.list = divisors(gpus).filter(splits);
  gpus /= nearest("cp");
  FIELDS.tp.list = divisors(gpus).filter((tp) => state.heads % tp === 0);
  FIELDS.pp.list = divisors(gpus / nearest("tp")).filter((pp) => pp <= state.layers);
  nearest("pp");
  const dp = gpus / state.tp / state.pp;
  FIELDS.micro_batch.list = state.batch_size % dp ? [1] : divisors(state.batch_size / dp);
  for (const [name, field] of Object.entries(FIELDS)) {
    if (field.list) {
      $(name).max = field.list.length - 1;
      $(name).value = field.list.indexOf(nearest(name));
      $(name).setAttribute("aria-valuetext", `${state[name]}`);
      $(`${name}-value`).value = state[name];
    } else if (field.options) {
      $(name).value = state[name];
    } else if (document.activeElement !== $(name)) {
      $(name).value = +(state[name] / (field.scale || 1)).toPrecision(12);
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
  state.model = query.get("model") in presets.models ? query.get("model") : "gpt-18.4b";
  const machine = query.get("machine");
  state.machine = machine in presets.machines ? machine : "dgx-a100";
  Object.assign(state, modelOf(state.model), machineOf(state.machine));
  Object.assign(state, { nodes: 32, tp: 8, pp: 1, cp: 1, micro_batch: 1 });
  Object.assign(state, { recompute: "none", attention: "flash", zero: 0 });
  for (const [name, field] of Object.entries(FIELDS)) {
    const text = query.get(name);
    if (text === null || name === "model" || name === "machine") continue;
    const value = Number(text) * (field.scale || 1);
    if (!field.options && value >= 0) state[name] = value;
    if (field.options?.map(String).includes(text)) state[name] = name === "zero" ? +text : text;
  }
}

function writeAddress() {
  const query = new URLSearchParams();
  for (const [name, field] of Object.entries(FIELDS)) {
    const preset = { ...modelOf(state.model), ...machineOf(state.machine) }[name];
    if (state[name] === preset || (name === "cp" && state.cp === 1)) continue;
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
    ? `It fits: ${holds} of the ${share} that may be used.`
    : `It does not fit: ${terms} = ${holds}, and ${share} may be used. `
      + "A parameter takes 16 bytes (2 + 2 + 12) over tp · pp ranks; ZeRO shards them over dp as well.";
}

function showTime(row) {
  const { pp, ...parts } = row.parts;
  const shown = { ...parts, send: pp - row.waiting, bubble: row.waiting };
  const axes = { tp: "tp", dp: "dp", send: "pp", cp: "cp" };
  bars("seconds", "time-parts", shown, row.seconds, (kind, value) => {
    const axis = axes[kind];
    const rate = axis && `a rank sends ${gigabytes(row.sent[axis])} GB at ${gigabytes(row.rate[axis])} GB/s`;
    const bubble = kind === "bubble" && `(pp − 1)/M = ${row.pp - 1}/${row.microbatches}`;
    return [`${value.toPrecision(3)} s`, rate || bubble || ""];
  });
  $("seconds").dataset.value = row.seconds;
  const cp = row.cp > 1 ? ` × cp ${row.cp}` : "";
  $("summary").textContent = `dp ${row.dp} × pp ${row.pp} × tp ${row.tp}${cp}: ${row.seconds.toPrecision(3)} s, `
    + `MFU ${(100 * row.mfu).toFixed(0)} %, M = ${row.microbatches} micro-batches. Predicted.`;
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
  const value = row ? `${(100 * row.mfu).toFixed(0)}` : "–";
  const text = row ? `MFU ${value} %` : "no layout fits";
  const button = make("button", { type: "button", "data-mesh": key, "aria-pressed": here,
    "aria-label": `tp ${tp}, pp ${pp}: ${text}${row && row === fastest ? ", the best" : ""}` }, value);
  if (row) {
    const { color, on } = fill(row.mfu);
    button.style.cssText = `--fill:${color};--on:${on}`;
    if (row === fastest) button.className = "best";
  } else {
    button.className = "no";
  }
  button.addEventListener("click", () => {
    Object.assign(state, { tp, pp });
    if (row) Object.assign(state, { micro_batch: row.micro_batch, recompute: row.recompute });
    update();
    document.querySelector(`[data-mesh="${key}"]`).focus();
  });
  return [button];
}

/** The words of the command, each in a span: a line may break only between them. */
function command(machine, layout) {
  const words = ["python tools/plan.py", `--model ${state.model}`, `--machine ${state.machine}`];
  const preset = { ...modelOf(state.model), ...machineOf(state.machine) };
  for (const name of [...NUMBERS, "node"]) {
    if (state[name] !== preset[name]) words.push(`--${name.replace("_", "-")} ${state[name]}`);
  }
  words.push(`--gpus ${machine.gpus}`);
  if (layout.cp > 1) words.push(`--cp ${layout.cp}`);
  for (const name of ["dp", "pp", "tp", "micro_batch", "recompute", "attention", "zero"]) {
    words.push(`--${name.replace("_", "-")} ${layout[name]}`);
  }
  return words.flatMap((word) => [make("span", {}, word), " "]);
}

function update() {
  const sizes = { ...modelOf(state.model) };
  for (const name of Object.keys(sizes)) sizes[name] = state[name];
  const machine = { ...machineOf(state.machine), node: state.node, gpus: state.node * state.nodes };
  for (const name of Object.keys(machineOf(state.machine))) machine[name] = state[name];
  fillForm(machine.gpus);
  writeAddress();
  const { attention, zero, tp, pp, cp } = state;
  if (attention === "flash" && state.recompute === "selective") state.recompute = "none";
  const mesh = { tp, pp, cp, dp: machine.gpus / tp / pp / cp };
  const reason = whyNot(sizes, mesh);
  showMap(search(sizes, machine, { attention, zero, cp }));
  const { micro_batch, recompute } = state;
  const layout = makeLayout(sizes, { ...mesh, micro_batch, recompute, attention, zero });
  $("command").replaceChildren(...command(machine, layout));
  if (reason) {
    $("fits").className = "no";
    $("fits").textContent = `Not possible: dp ${mesh.dp} × pp ${pp} × tp ${tp}: ${reason}`;
    for (const id of ["memory", "memory-parts", "seconds", "time-parts", "summary"]) $(id).replaceChildren();
    return;
  }
  const row = predict(layout, machine);
  showMemory(row, machine);
  showTime(row);
}

buildForm();
readAddress();
update();
