// <tp-widget kind="all-reduce">, "memory" or "bubble": small calculators next to a lesson.
// Bytes and times come from predict.js. The address keeps the state.
import { allReduceWays, bubble, divisors, layerBytes, layersInFlight, makeLayout } from "./predict.js";

const here = new URL(".", import.meta.url);
const powers = (first, last) => {
  const found = [];
  for (let n = first; n <= last; n *= 2) found.push(n);
  return found;
};
// Lesson 04's flags: dropout's masks count, and its norms save 2 bytes per statistic.
const LESSON_04 = { layers: 2, hidden: 64, heads: 8, kv_heads: 8, ffn: 256, batch_size: 4,
  seq_len: 32, vocab_size: 257 };

function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}
const size = (n) => {
  for (const [unit, scale] of [["GB", 1e9], ["MB", 1e6]]) {
    if (n >= scale) return `${(n / scale).toPrecision(4)} ${unit}`;
  }
  return `${Math.round(n).toLocaleString("en")} B`;
};
const time = (s) => (s >= 1e-3 ? `${(1e3 * s).toPrecision(3)} ms` : `${(1e6 * s).toPrecision(3)} µs`);

// Each kind: its title, its fields (label, values, first value, text), its table.
const KINDS = {
  "all-reduce": {
    title: "Choose T: an all-reduce as a ring, as a tree, in one shot",
    fields: {
      T: { label: "ranks T", list: powers(2, 1024), first: 4 },
      n: { label: "payload", list: powers(1024, 2 ** 32), first: 2 ** 24, text: size },
      alpha: { label: "α, per message", list: [1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4], first: 1e-5, text: time },
      beta: { label: "β, per rank", list: [1, 12.5, 25, 50, 100, 300, 450], first: 50, text: (x) => `${x} GB/s` },
    },
    rows({ T, n, alpha, beta }) {
      const ways = Object.entries(allReduceWays(n, T, alpha, beta * 1e9));
      const least = Math.min(...ways.map(([, way]) => way.seconds));
      return [["way", "rounds", "a rank sends at most", "α · rounds + bytes/β", "fastest"],
        ...ways.map(([name, way]) => [name, `${way.rounds}`, size(way.bytes), time(way.seconds),
          way.seconds === least ? "✓" : ""])];
    },
    says: () => "Ring: 2(T − 1) rounds of n/T bytes. Tree: sums go up to rank 0 and the total comes "
      + "down, 2⌈log₂ T⌉ rounds of n bytes. One shot: each rank sends n bytes to all others at once. Predicted.",
  },
  memory: {
    title: "Bytes that a layer saves for backward",
    fields: {
      model: { label: "model", list: ["lesson 04"], first: "lesson 04" },
      T: { label: "ranks T", list: [1, 2, 4, 8], first: 2 },
      S: { label: "sequence S", list: powers(32, 131072), first: 32 },
    },
    rows({ model, T, S }, presets) {
      const lesson = model === "lesson 04";
      const sizes = { ...(lesson ? LESSON_04 : presets.models[model]), seq_len: S };
      const b = lesson ? sizes.batch_size : 1;
      const bytes = (recompute, tp, sp, attention = "math") => {
        const layout = makeLayout(sizes, { tp, recompute, attention, micro_batch: b });
        return size(layerBytes(layout, 2, lesson ? 2 : 4, lesson, sp));
      };
      const line = (name, ...more) => {
        const [recompute, attention] = more;
        const cells = [[1, true], [T, false], [T, true]];
        return [name, ...cells.map(([tp, sp]) => bytes(recompute, tp, sp, attention))];
      };
      const all = [["recomputation", "without TP", "TP", "TP + SP"], line("none", "none"),
        line("selective", "selective"), line("full", "full")];
      if (!lesson) all.push(line("none, FlashAttention", "none", "flash"));
      return all;
    },
    says: ({ model }) => (model === "lesson 04"
      ? "Four sequences in bfloat16, with dropout's masks: with S = 32, the numbers of lesson 04's table."
      : "One sequence in bfloat16, no dropout. Predicted."),
  },
  bubble: {
    title: "The bubble, with P stages and M micro-batches",
    fields: {
      P: { label: "stages P", list: [1, 2, 3, 4, 6, 8, 12, 16, 32, 64], first: 4 },
      M: { label: "micro-batches M", list: [1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256], first: 8 },
      v: { label: "chunks v", list: [1, 2, 3, 4, 6, 8], first: 2 },
    },
    rows({ P, M, v }) {
      const percent = (x) => `${(100 * x).toFixed(1)} %`;
      const layout = { pp: P, microbatches: M, recompute: "none", layers: P * v, light_ends: false };
      const kinds = { GPipe: ["gpipe", 1], "1F1B": ["1f1b", 1], interleaved: ["1f1b", v], "ZB-H1": ["zb-h1", 1] };
      const all = Object.values(kinds).map(([schedule, virtual]) => ({ ...layout, schedule, virtual }));
      const held = (each) => +(layersInFlight(each, 0) / v).toPrecision(3);
      const wholes = M % P === 0;
      const show = (each, text) => (each.virtual > 1 && !wholes ? "–" : text);
      return [["schedule", ...Object.keys(kinds)],
        ["waiting over computing", ...all.map((each) => show(each, percent(bubble(each))))],
        ["micro-batches in flight on stage 0", ...all.map((each) => show(each, `${held(each)}`))]];
    },
    says: ({ P, M }) => "Waiting: GPipe and 1F1B (P − 1)·(F + B + W), interleaved one v-th of that, ZB-H1 (P − 1)·(F + B − W); "
      + "computing: M·(F + B + W). F: forward; B: dL/dx alone; W: dL/dW; here equally long. "
      + (M % P ? "Interleaving needs M to be a multiple of P." : ""),
  },
};

const STYLE = `
  :host { display: block; margin: 1rem 0; }
  section { border: 1px solid currentColor; border-radius: 8px; padding: .6em .9em; }
  .title { font-size: 1.05em; font-weight: bold; margin: 0 0 .4em; }
  label { display: grid; grid-template-columns: 8.5em minmax(0, 1fr) 6em; gap: .5em; align-items: center; }
  output { text-align: right; }
  select { grid-column: 2 / 4; }
  input, select { font: inherit; width: 100%; min-width: 0; accent-color: currentColor; }
  :focus-visible { outline: 3px solid currentColor; outline-offset: 2px; }
  .scroll { overflow-x: auto; }
  table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .4em 0; }
  th, td { text-align: right; padding: .1em 1em .1em 0; font-weight: 400; }
  td { white-space: nowrap; }
  @media (max-width: 500px) {
    label { grid-template-columns: 7em minmax(0, 1fr) 5em; }
    table { font-size: .8em; } th, td { padding-right: .5em; }
  }
  tr > :first-child { text-align: left; } thead th { font-weight: 700; }
  p { margin: .3em 0 0; font-size: .9em; }
`;

class Widget extends HTMLElement {
  async connectedCallback() {
    this.kind = this.getAttribute("kind");
    this.about = KINDS[this.kind];
    this.fields = { ...this.about.fields };
    if (this.kind === "memory") {
      this.presets = await (await fetch(new URL("presets.json", here))).json();
      this.fields.model.list = ["lesson 04", ...Object.keys(this.presets.models)];
    }
    this.state = {};
    const query = new URLSearchParams(location.search);
    for (const [name, { list, first }] of Object.entries(this.fields)) {
      const asked = query.get(`${this.kind}-${name}`);
      this.state[name] = list.find((value) => `${value}` === asked) ?? first;
    }
    this.build();
    this.show();
  }

  build() {
    const { title } = this.about;
    // Not a heading: pages differ in the level that would be right here.
    const section = make("section", { "aria-label": title }, make("p", { class: "title" }, title));
    for (const [name, { label, list }] of Object.entries(this.fields)) {
      const menu = name === "model";
      const input = menu ? make("select", {}) : make("input", { type: "range", min: 0, step: 1 });
      if (menu) for (const value of list) input.append(make("option", { value }, value));
      input.dataset.name = name;
      input.addEventListener("input", () => {
        this.state[name] = menu ? input.value : this.fields[name].list[+input.value];
        if (menu && input.value !== "lesson 04") this.state.S = this.presets.models[input.value].seq_len;
        if (menu && input.value === "lesson 04") this.state.S = LESSON_04.seq_len;
        this.show();
        this.keep();
      });
      section.append(make("label", {}, label, input, menu ? "" : make("output", {})));
    }
    this.table = make("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "result" });
    this.words = make("p", {});
    section.append(this.table, this.words);
    this.attachShadow({ mode: "open" }).append(make("style", {}, STYLE), section);
  }

  show() {
    if (this.kind === "memory") { // T divides the heads
      const { heads } = this.state.model === "lesson 04" ? LESSON_04 : this.presets.models[this.state.model];
      this.fields.T = { ...this.fields.T, list: divisors(heads).filter((T) => this.state.S % T === 0) };
      const { list } = this.fields.T;
      if (!list.includes(this.state.T)) this.state.T = list.filter((T) => T <= this.state.T).pop();
    }
    for (const input of this.shadowRoot.querySelectorAll("input, select")) {
      const { list, text = String } = this.fields[input.dataset.name];
      const value = this.state[input.dataset.name];
      if (input.type === "range") input.max = list.length - 1;
      input.value = input.type === "range" ? list.indexOf(value) : value;
      if (input.type !== "range") continue;
      input.setAttribute("aria-valuetext", text(value));
      input.nextElementSibling.textContent = text(value);
    }
    const [head, ...rows] = this.about.rows(this.state, this.presets);
    const line = (tag, cells) => make("tr", {}, ...cells.map((cell, i) =>
      make(tag === "th" || i === 0 ? "th" : "td", { ...(tag === "th" ? { scope: "col" } : i === 0 ? { scope: "row" } : {}) }, cell)));
    this.table.replaceChildren(make("table", {}, make("thead", {}, line("th", head)),
      make("tbody", {}, ...rows.map((cells) => line("td", cells)))));
    this.words.textContent = this.about.says(this.state);
  }

  keep() {
    const query = new URLSearchParams(location.search);
    for (const [name, value] of Object.entries(this.state)) query.set(`${this.kind}-${name}`, value);
    history.replaceState(null, "", `?${query}${location.hash}`);
  }
}
customElements.define("tp-widget", Widget);
