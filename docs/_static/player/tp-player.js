// <tp-player src="ring.json"></tp-player>: plays a recording of a run, step by step.
//
// Recordings are written by docs/record.py from live ranks. Nothing here knows a
// result: what a rank holds, sends and counts at a step is read from the recording.
// Keys: → or Page Down next, ← or Page Up back, Space play or pause, Home, End.
// Attributes: src, and step (the step to begin with, from 1).

import { STYLE } from "./style.js";

// By rank, as in every picture of the course (notebooks/draw.py): black can be read on it.
const COLORS = ["#56B4E9", "#E69F00", "#009E73", "#CC79A7"];
const EVERYONE = "#E6E6E6"; // what every rank holds alike
const PAUSE = 2600; // ms that a step stands while playing
const FLIGHT = 700; // ms that numbers take from one rank to another

/** An element with attributes and children; text is never read as HTML. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** The ranks in a set: 5 → [0, 2]. */
const bits = (who) => COLORS.map((_, r) => r).filter((r) => (who >> r) & 1);
const up_to = (n) => [...Array(n).keys()];
const commas = (n) => n.toLocaleString("en");
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
const total = (part) => sum(Object.values(part.bytes ?? {}));
const percent = (x) => `${(100 * x).toFixed(3)}%`;

/** All numbers of a tensor in one form: whole, or with two decimals. */
function texts(values) {
  const whole = values.every((v) => typeof v === "string" || Number.isInteger(v));
  const text = (v) => (typeof v === "string" || whole ? String(v) : v.toFixed(2));
  return values.map((v) => text(v).replace("-", "−"));
}

/** The colours of these ranks, one after the other. */
function bands(held, angle) {
  const stops = held.map((r, i) =>
    `${COLORS[r]} ${percent(i / held.length)} ${percent((i + 1) / held.length)}`);
  return `linear-gradient(${angle}, ${stops})`;
}

/** A background in the colours of the ranks that hold it; grey if all of them do. */
function paint(who, ranks) {
  return bits(who).length === ranks ? EVERYONE : bands(bits(who), "135deg");
}

/** A number that is the sum of several ranks' numbers has a strip of their colours. */
function strip(who) {
  if (bits(who).length === 1) return COLORS[Math.log2(who)];
  return `${bands(bits(who), "90deg")} bottom / 100% .4em no-repeat #fff`;
}

class TPPlayer extends HTMLElement {
  connectedCallback() {
    if (!this.shadowRoot) this.attachShadow({ mode: "open" });
    this.theme = new MutationObserver(() => this.dress());
    const options = { attributes: true, attributeFilter: ["data-theme"] };
    this.theme.observe(document.documentElement, options);
    this.load();
  }

  disconnectedCallback() {
    this.theme.disconnect();
    this.pause();
  }

  async load() {
    this.pause();
    try {
      const answer = await fetch(this.getAttribute("src"));
      if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
      this.recording = await answer.json();
    } catch (error) {
      const words = `${this.getAttribute("src")} could not be loaded: ${error.message}.`;
      return this.shadowRoot.replaceChildren(make("p", { role: "alert" }, words));
    }
    this.events = this.recording.events;
    this.build();
    this.go(Number(this.getAttribute("step") ?? 1) - 1, false);
    this.dispatchEvent(new CustomEvent("ready"));
  }

  /** What stays from step to step. */
  build() {
    const { title, lesson, ranks } = this.recording;
    const last = this.events.length - 1;
    const button = (name, label, what, kind = "") => {
      const about = { type: "button", class: kind, title: name };
      const element = make("button", kind ? about : { ...about, "aria-label": name }, label);
      element.addEventListener("click", what);
      return element;
    };
    this.first = button("first step (Home)", "«", () => this.go(0));
    this.back = button("step back (←)", "‹", () => this.go(this.step - 1));
    this.play = button("play or pause (Space)", "play", () => this.toggle(), "play");
    this.next = button("next step (→)", "›", () => this.go(this.step + 1));
    this.end = button("last step (End)", "»", () => this.go(last));
    this.slider = make("input", { type: "range", min: 1, max: last + 1, "aria-label": "step" });
    this.slider.addEventListener("input", () => this.go(this.slider.value - 1));
    this.count = make("span", { class: "count" });
    this.caption = make("p", { class: "caption", "aria-live": "polite", "aria-atomic": "true" });
    this.stage = make("div", { class: "stage" });
    this.stage.addEventListener("click", () => {
      if (getSelection().isCollapsed) this.go(this.step + 1);
    });
    const group = { tabindex: 0, role: "group" };
    this.totals = make("div", { ...group, class: "totals", "aria-label": "bytes" });
    const source = `lesson ${lesson.slice(0, 2)}, ${ranks} ranks, a recorded run`;
    const buttons = [this.first, this.back, this.play, this.next, this.end];
    this.box = make("div", { ...group, class: "player", "aria-label": `player: ${title}` },
      make("div", { class: "head" }, make("b", {}, title), make("span", {}, source)),
      make("div", { class: "controls" }, ...buttons, this.slider, this.count),
      this.caption, this.stage, this.legend(), this.totals);
    this.box.addEventListener("keydown", (event) => this.key(event));
    this.dress();
    this.shadowRoot.replaceChildren(make("style", {}, STYLE), this.box);
  }

  /** Dark or light as the page says, or else as the system does. */
  dress() {
    this.box?.setAttribute("data-theme", document.documentElement.dataset.theme ?? "");
  }

  legend() {
    const entry = (style, text) => make("span", {}, make("i", { style }), text);
    const { ranks, time } = this.recording;
    const entries = up_to(ranks).map((r) => entry(`background:${COLORS[r]}`, `rank ${r}`));
    const made = this.events.flatMap((event) => event.ranks[0].makes ?? []);
    if (time) {
      const hatched = make("span", {}, make("i", { class: "backward" }), "backward");
      entries.push(entry("", "forward"), hatched);
    } else if (made.some((x) => Array.isArray(x.who))) {
      entries.push(entry(`background:${strip(3)}`, "a sum of these ranks' numbers"));
    } else {
      entries.push(entry(`background:${EVERYONE}`, "the same on every rank"));
      const partial = made.some((x) => x.name.startsWith("partial"));
      if (partial) entries.push(entry("border-style:dashed", "one term of a sum"));
    }
    return make("div", { class: "legend" }, ...entries);
  }

  // Moving through the steps

  key(event) {
    const steps = {
      ArrowRight: this.step + 1, PageDown: this.step + 1, ArrowLeft: this.step - 1,
      PageUp: this.step - 1, Home: 0, End: this.events.length - 1,
    };
    const focused = event.composedPath()[0];
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key === " " && focused.tagName !== "BUTTON") this.toggle();
    // At either end a key is the page's again: slides go on from there.
    else if (steps[event.key] in this.events) this.go(steps[event.key]);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  toggle() {
    if (this.timer) return this.pause();
    if (this.step === this.events.length - 1) this.go(0);
    const pause = this.recording.time ? PAUSE / 3 : PAUSE;
    this.timer = setInterval(() => this.go(this.step + 1, true, true), pause);
    this.play.textContent = "pause";
  }

  pause() {
    clearInterval(this.timer);
    this.timer = undefined;
    if (this.play) this.play.textContent = "play";
  }

  /** Go to a step, from 0; playing on only if it is the player that asks. */
  go(step, move = true, playing = false) {
    const last = this.events.length - 1;
    if (!playing || step >= last) this.pause();
    step = Math.max(0, Math.min(step || 0, last));
    const forward = step === this.step + 1;
    this.step = step;
    this.render();
    if (move && forward && !matchMedia("(prefers-reduced-motion: reduce)").matches) this.fly();
  }

  /** What a rank holds after so many events: name → tensor. */
  held(rank, count) {
    const tensors = new Map();
    for (const { ranks, drops } of this.events.slice(0, count)) {
      for (const name of drops ?? []) tensors.delete(name);
      for (const tensor of ranks[rank].makes ?? []) tensors.set(tensor.name, tensor);
    }
    return tensors;
  }

  // Drawing

  render() {
    const { step, events, recording } = this;
    const event = events[step];
    this.slider.value = step + 1;
    this.slider.setAttribute("aria-valuetext", `step ${step + 1} of ${events.length}`);
    this.count.textContent = `${step + 1} / ${events.length}`;
    this.first.disabled = this.back.disabled = step === 0;
    this.next.disabled = this.end.disabled = step === events.length - 1;
    this.caption.replaceChildren(this.badge(event), event.says);
    const lanes = () => up_to(recording.ranks).map((rank) => this.lane(rank));
    this.stage.replaceChildren(...(recording.time ? this.charts(event) : lanes()));
    this.totals.replaceChildren(this.table());
  }

  badge(event) {
    const words = { hold: "start", check: "check", time: "compute and send" };
    const payload = [...new Set(event.ranks.map(total))].filter(Boolean);
    // A step of a timed recording is of several runs: no one message has all the bytes.
    if (!payload.length || words[event.kind])
      return make("span", { class: "badge" }, words[event.kind] ?? "compute");
    const text = event.call
      ? `${event.call.collective}, payload ${payload.map(commas).join(" or ")} bytes`
      : `send/recv, each rank sends ${payload.map(commas).join(" or ")} bytes`;
    return make("span", { class: "badge moves" }, text);
  }

  /** What a rank holds; from what it had, an arrow points to what it has now. */
  lane(rank) {
    const { ranks, takes } = this.events[this.step];
    const { makes = [], given = [], marks = [] } = ranks[rank];
    const made = new Set(makes.map((tensor) => tensor.name));
    const before = this.held(rank, this.step);
    const source = given[0] ?? (made.has(takes) ? undefined : before.get(takes));
    const stays = [...this.held(rank, this.step + 1).values()];
    const arrow = make("span", { class: "arrow", "aria-hidden": "true" }, "→");
    const boxes = stays.filter(({ name }) => !made.has(name) && name !== source?.name)
      .map((tensor) => this.tensor(tensor, "", marks.find(({ name }) => name === tensor.name)));
    if (source) boxes.push(this.tensor(source, "source"), arrow);
    boxes.push(...makes.map((tensor) => this.tensor(tensor, "new", undefined, ranks[rank].moved)));
    const chips = this.moves(rank).map((text) => make("span", { class: "chip" }, text));
    const [name, style] = [`rank ${rank}`, `--rank:${COLORS[rank]}`];
    return make("div", { class: "lane", role: "group", "aria-label": name, style },
      make("div", { class: "who" }, name, ...chips), make("div", { class: "boxes" }, ...boxes));
  }

  /** In words: how many bytes this rank sends in this step, to whom. */
  moves(rank) {
    const { ranks, call } = this.events[this.step];
    const { to, from, sends } = ranks[rank];
    if (to !== undefined) return [`sends ${commas(sends)} bytes → rank ${to}`, `← rank ${from}`];
    if (!sends) return [];
    if (from !== undefined) return [`← rank ${from}`];
    const others = call.groups.find((group) => group.includes(rank)).filter((r) => r !== rank);
    const names = `rank ${others.join(", ")}`;
    if (call.collective === "broadcast") return [`→ ${names}`];
    return [`sends ${commas(sends)} bytes → ${names}`];
  }

  tensor(tensor, kind, mark, moved) {
    const { name, shape, values, who } = tensor;
    const size = `[${shape.join(", ")}]`;
    const verdict = !mark ? "" : !mark.ok ? `✗ wrong by ${Math.round(100 * mark.diff)} %`
      : `✓ as in one process${mark.diff ? ` (${mark.diff})` : ""}`;
    const term = /^(partial|own)_/.test(name) ? "term" : "";
    const kinds = `box ${kind} ${term} ${mark?.ok === false ? "wrong" : ""}`;
    const numbers = values ? texts(values).join(" ") : "";
    const label = `${kind} ${name} ${size} on ranks ${bits(who).join(", ")}: ${numbers} ${verdict}`;
    return make("figure", { class: kinds, role: "img", "aria-label": label, "data-name": name },
      make("figcaption", {}, name, " ", make("span", { class: "shape" }, size)),
      this.cells(tensor, moved),
      make("span", { class: `mark ${mark?.ok ? "good" : "bad"}` }, verdict));
  }

  /** The numbers, in rows and columns: blocks of three dims below each other, of four
   * beside each other. */
  cells({ shape, values, who }, moved) {
    const cells = make("div", { class: "cells" });
    if (!Array.isArray(who)) cells.style.background = paint(who, this.recording.ranks);
    if (!values) {
      cells.classList.add("closed");
      cells.append(`${shape.join(" × ")} numbers`);
      return cells;
    }
    const across = shape.length > 1 ? shape.at(-1) : Math.min(values.length, 6);
    const block = shape.length > 1 ? across * shape.at(-2) : values.length;
    const beside = shape.length === 4 ? values.length / block : 1;
    const letters = values.some((v) => /^[a-z·]$/i.test(v));
    cells.style.gridTemplateColumns = `repeat(${beside * across}, auto)`;
    texts(values).forEach((text, i) => {
      const cell = make("span", { class: letters ? "cell letter" : "cell" }, text);
      const [number, row, column] = [i / block, (i % block) / across, i % across].map(Math.floor);
      cell.style.gridRow = 1 + row + (beside > 1 ? 0 : number * (block / across));
      cell.style.gridColumn = 1 + column + (beside > 1 ? number * across : 0);
      if (number && beside > 1 && column === 0) cell.classList.add("beside");
      if (number && beside === 1 && row === 0) cell.classList.add("below");
      if (moved?.includes(i)) cell.classList.add("moved");
      if (Array.isArray(who)) cell.style.background = strip(who[i]);
      cells.append(cell);
    });
    return cells;
  }

  /** Who computed what when: all until the next step's time, a chart for each run. */
  charts(event) {
    const { ranks, time } = this.recording;
    const spans = this.events.flatMap((e, i) => e.ranks.flatMap((part, rank) =>
      (part.spans ?? []).map((span) => ({ ...span, rank, i }))));
    const length = Math.max(...spans.map((span) => span.end));
    const until = this.events[this.step + 1]?.time ?? length;
    const bar = ({ what, microbatch, start, end, rank, i }) => {
      const place = `left:${percent(start / length)};width:${percent((end - start) / length)}`;
      const kind = `bar ${what}${i === this.step ? " new" : ""}`;
      const style = `${place};background-color:${COLORS[rank]}`;
      return make("span", { class: kind, style }, make("b", {}, microbatch + 1));
    };
    const tick = (i) => make("span", { style: `left:${percent(i / 4)}` },
      `${Math.round((length * i) / 4)} ${time.unit}`);
    return time.runs.map((run) => {
      const begun = spans.filter((span) => span.run === run && span.i <= this.step);
      const tracks = up_to(ranks).map((rank) => {
        const bars = begun.filter((span) => span.rank === rank).map(bar);
        const veil = make("span", { class: "veil", style: `left:${percent(until / length)}` });
        const kept = make("span", { class: "kept" }, ` keeps ${event.kept[run][rank]}`);
        return make("div", { class: "track", style: `--rank:${COLORS[rank]}` },
          make("span", {}, make("b", {}, `stage ${rank}`), kept),
          make("div", { class: "bars", "aria-hidden": "true" }, ...bars, veil));
      });
      const axis = make("div", { class: "axis", "aria-hidden": "true" }, ...up_to(5).map(tick));
      const about = { class: "chart", tabindex: 0, role: "group", "aria-label": `${run} in time` };
      const foot = make("div", { class: "track" }, make("span"), axis);
      const chart = make("div", about, ...tracks, foot);
      requestAnimationFrame(() => {
        chart.scrollLeft = (chart.scrollWidth * until) / length - chart.clientWidth / 2;
      });
      return make("div", {}, make("b", {}, run), chart);
    });
  }

  /** Payload so far, as each rank's counter had it, the lesson's formula, and what a rank
   * of a ring sends for it. At the end a number that is not the formula's is marked. */
  table() {
    const { ledger, ranks } = this.recording;
    const events = this.events.slice(0, this.step + 1);
    const ended = events.length === this.events.length;
    const head = (text) => make("th", { scope: "col" }, text);
    const each = (entries, key) =>
      [...new Set(entries.map((x) => x[key]))].map(commas).join(" or ");
    const rows = [...new Set(ledger.map((entry) => entry.row))].map((row) => {
      const mine = ledger.filter((entry) => entry.row === row);
      const cells = up_to(ranks).map((rank) => {
        const bytes = events.map((event) => event.ranks[rank].bytes?.[row] ?? 0);
        const entry = mine.find((x) => x.rank === rank);
        const off = ended && entry && entry.predicted !== sum(bytes);
        const kind = off ? "off" : bytes.at(-1) ? "now" : "";
        const sent = commas(sum(bytes));
        const about = { class: kind, "data-rank": rank, "data-row": row };
        about["data-bytes"] = sum(bytes);
        return make("td", about, off ? `✗ ${sent} of ${commas(entry.predicted)}` : sent);
      });
      const predicted = each(mine, "predicted");
      const formula = mine[0].formula === predicted ? "" : `${mine[0].formula}: `;
      return make("tr", {}, make("th", { scope: "row" }, row), ...cells,
        make("td", {}, `${formula}${predicted}`), make("td", {}, each(mine, "ring")));
    });
    const names = up_to(ranks).map((rank) => `rank ${rank}`);
    const heads = ["payload so far, bytes", ...names, "in total, by formula", "ring: one rank sends"];
    const head_row = make("thead", {}, make("tr", {}, ...heads.map(head)));
    return make("table", {}, head_row, make("tbody", {}, ...rows));
  }

  /** Let what was sent in this step fly from its rank to where it is now. */
  fly() {
    const { ranks, takes, call } = this.events[this.step];
    const lanes = [...this.stage.querySelectorAll(".lane")];
    const find = (rank, name) =>
      lanes[rank].querySelector(`[data-name="${CSS.escape(name)}"] .cells`);
    ranks.forEach((part, rank) => {
      const name = part.makes?.[0]?.name;
      if (!takes || !name || !total(part)) return;
      const group = call?.collective === "broadcast" ? []
        : call?.groups.find((members) => members.includes(rank));
      for (const other of part.from !== undefined ? [part.from] : group) {
        let [from, to] = [find(other, takes), find(rank, name)];
        if (part.moved) [from, to] = [from, to].map((box) => box.children[part.moved[0]]);
        if (from && to && other !== rank) this.ghost(from, to);
      }
    });
  }

  ghost(source, target) {
    const home = this.stage.getBoundingClientRect();
    const [from, to] = [source, target].map((x) => x.getBoundingClientRect());
    const ghost = source.cloneNode(true);
    ghost.classList.add("ghost");
    const place = { left: from.left - home.left, top: from.top - home.top, width: from.width };
    for (const [side, length] of Object.entries(place)) ghost.style[side] = `${length}px`;
    this.stage.append(ghost);
    const transform = `translate(${to.left - from.left}px, ${to.top - from.top}px)`;
    const frames = [{ transform: "none" }, { transform, opacity: 0.3 }];
    const flight = ghost.animate(frames, { duration: FLIGHT, easing: "ease-in-out" });
    flight.onfinish = () => ghost.remove();
  }
}

customElements.define("tp-player", TPPlayer);
