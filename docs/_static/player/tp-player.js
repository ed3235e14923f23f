// <tp-player src="ring.json"></tp-player>: plays a recording of a run, step by step.
//
// Recordings are written by docs/record.py from live ranks. Nothing here knows a
// result: what a rank holds, sends and counts at a step is read from the recording.
// Keys: → or Page Down next, ← or Page Up back, Space play or pause, Home, End.
// Attributes: src, and step (the step to begin with, from 1).

// The colour of a rank, as in every picture of the course (notebooks/draw.py), and an
// ink that can be read on it.
const COLORS = ["#56B4E9", "#E69F00", "#009E73", "#CC79A7"];
const EVERYONE = "#E6E6E6"; // held alike by every rank
const INK = "#000";
const PAUSE = 2600; // ms that a step stands while playing
const FLIGHT = 700; // ms that numbers take from one rank to another

const STYLE = `
  :host { display: block; container-type: inline-size; }
  * { box-sizing: border-box; }
  .player {
    color-scheme: light dark;
    --back: light-dark(#fff, #14181e); --ink: light-dark(#14181e, #f0f2f5);
    --soft: light-dark(#f3f4f6, #222831); --line: light-dark(#6b7280, #9aa4b2);
    --good: light-dark(#006644, #5fe0ae); --bad: light-dark(#b00020, #ff9a9a);
    background: var(--back); color: var(--ink); border: 1px solid var(--line);
    border-radius: 8px; padding: .8em 1em; line-height: 1.4;
    font-family: system-ui, "Segoe UI", "DejaVu Sans", sans-serif;
    font-size: clamp(15px, 11px + .75cqi, 21px);
  }
  .player[data-theme=light] { color-scheme: light; }
  .player[data-theme=dark] { color-scheme: dark; }
  .player:focus-visible, button:focus-visible, input:focus-visible,
  .chart:focus-visible { outline: 3px solid var(--ink); outline-offset: 2px; }
  h2 { font-size: 1.15em; margin: 0; }
  .head, .controls, .badges { display: flex; flex-wrap: wrap; align-items: center; gap: .3em .6em; }
  .head { justify-content: space-between; }
  .head span, .shape, .where, .chip, .legend { font-size: .85em; }
  .controls { margin: .5em 0; }
  button {
    font: inherit; min-width: 2.6em; min-height: 2.2em; color: var(--ink);
    background: var(--soft); border: 1px solid var(--line); border-radius: 6px; cursor: pointer;
  }
  button:disabled { opacity: .5; cursor: default; }
  input { flex: 1 1 6em; min-width: 5em; height: 2.2em; accent-color: var(--ink); }
  .count { min-width: 4.5em; text-align: right; font-variant-numeric: tabular-nums; }
  .caption { font-size: 1.2em; min-height: 4.2em; margin: .3em 0; max-width: 62em; }
  .badges { min-height: 1.9em; }
  .badge { font-weight: 700; padding: .1em .6em; border-radius: 1em; border: 2px solid var(--ink); }
  .badge.moves { background: var(--ink); color: var(--back); }
  .stage { position: relative; cursor: pointer; }
  .lane {
    display: grid; grid-template-columns: 7.2em 1fr; gap: .6em; align-items: center;
    border-left: 10px solid var(--rank); background: var(--soft);
    margin: .5em 0; padding: .5em .6em; min-height: 5em; border-radius: 4px;
  }
  .who { font-weight: 700; }
  .chip { display: block; font-weight: 400; line-height: 1.25; }
  .boxes { display: flex; flex-wrap: wrap; gap: .6em .8em; align-items: center; min-width: 0; }
  .boxes .arrow { font-size: 1.6em; font-weight: 700; }
  .box { margin: 0; padding: .15em; border-radius: 5px; max-width: 100%; }
  .box figcaption { font-family: ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; line-height: 1.2; margin-bottom: .15em; font-weight: 700; font-size: .9em; }
  .shape { font-weight: 400; white-space: nowrap; }
  .cells { display: grid; width: max-content; max-width: 100%; border: 1.5px solid ${INK}; color: ${INK}; }
  .cell {
    min-width: 2.5em; padding: .08em .2em; text-align: center; font-size: .92em;
    border: .5px solid #0006; font-variant-numeric: tabular-nums;
  }
  .cell.letter { min-width: 1.5em; font-family: ui-monospace, monospace; }
  .cell.block { border-top: 3px solid ${INK}; }
  .cell.moved { outline: 3px solid ${INK}; outline-offset: -3px; font-weight: 700; }
  .cells.closed { padding: .5em 1em; }
  .term .cells { border: 3px dashed ${INK}; }
  .new { outline: 3px solid var(--ink); }
  .source { opacity: .75; }
  .mark { font-size: .85em; font-weight: 700; }
  .mark.good { color: var(--good); } .mark.bad { color: var(--bad); }
  .wrong .cells { outline: 4px solid var(--bad); }
  .ghost { position: absolute; z-index: 2; pointer-events: none; margin: 0; }
  .legend { display: flex; flex-wrap: wrap; gap: .2em 1.1em; margin: .3em 0; }
  .legend i { display: inline-block; width: 1.5em; height: 1em; vertical-align: -.12em; margin-right: .35em; border: 1.5px solid ${INK}; }
  .scroll { overflow-x: auto; }
  table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92em; }
  caption { text-align: left; font-weight: 700; }
  th, td { padding: .1em .7em .1em 0; text-align: right; }
  th:first-child { text-align: left; font-weight: 400; }
  td.formula { text-align: left; }
  td.now { font-weight: 700; text-decoration: underline; }
  .run h3 { font-size: 1em; margin: .6em 0 .2em; }
  .chart { overflow-x: auto; padding: 3px; }
  .track { display: grid; grid-template-columns: 9.5em minmax(520px, 1fr); align-items: center; margin-bottom: 3px; }
  .bars { position: relative; height: 1.75em; background: var(--soft); overflow: hidden; }
  .bar { position: absolute; top: 0; bottom: 0; border: 1px solid ${INK}; color: ${INK}; font-size: .85em; text-align: center; overflow: hidden; }
  .bar.backward { background-image: repeating-linear-gradient(45deg, #0005 0 2px, transparent 2px 7px); }
  .bar b { background: var(--rank); padding: 0 .15em; }
  .bar.new { outline: 3px solid var(--ink); outline-offset: -3px; }
  .veil { position: absolute; top: 0; bottom: 0; right: 0; background: var(--soft); border-left: 3px solid var(--ink); }
  .axis { position: relative; height: 1.4em; font-size: .85em; }
  .axis span { position: absolute; transform: translateX(-50%); }
  .axis span:first-child { transform: none; } .axis span:last-child { transform: translateX(-100%); }
  @container (max-width: 600px) {
    .player { padding: .6em .5em; }
    .lane { grid-template-columns: 1fr; border-left-width: 6px; padding: .4em; }
    .chip { display: inline; margin-left: .6em; }
    .caption { min-height: 7em; }
    .cell { min-width: 2.15em; font-size: .82em; padding: .05em; }
    .cell.letter { min-width: 1.3em; }
    .track { grid-template-columns: 7.5em minmax(640px, 1fr); }
    .track > :first-child { position: sticky; left: 0; background: var(--back); z-index: 1; }
    th, td { padding-right: .45em; }
  }
`;

/** An element with attributes and children; text is never read as HTML. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== undefined && child !== ""));
  return element;
}

/** The ranks in a set: 5 → [0, 2]. */
const bits = (who) => COLORS.map((_, r) => r).filter((r) => (who >> r) & 1);
const color = (rank) => COLORS[rank % COLORS.length];
const bytes = (n) => `${n.toLocaleString("en")} ${n === 1 ? "byte" : "bytes"}`;
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
const total = (part) => sum(Object.values(part.bytes ?? {}));
const percent = (x) => `${(100 * x).toFixed(3)}%`;
const minus = (value) => String(value).replace("-", "−");

/** A background in the colours of these ranks, in bands if there are several. */
function paint(who, ranks) {
  const held = bits(who);
  if (held.length === ranks) return EVERYONE;
  const stops = held.map((r, i) =>
    `${color(r)} ${percent(i / held.length)} ${percent((i + 1) / held.length)}`);
  return held.length === 1 ? color(held[0]) : `linear-gradient(135deg, ${stops})`;
}

/** A number into which several ranks' values went: on white, a strip of colours below. */
function strip(who) {
  const held = bits(who);
  const stops = held.map((r, i) =>
    `${color(r)} ${percent(i / held.length)} ${percent((i + 1) / held.length)}`);
  return `linear-gradient(90deg, ${stops}) bottom / 100% .4em no-repeat #fff`;
}

class TPPlayer extends HTMLElement {
  static observedAttributes = ["src"];

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

  attributeChangedCallback() {
    if (this.isConnected && this.shadowRoot) this.load();
  }

  async load() {
    this.pause();
    const source = this.getAttribute("src");
    try {
      const answer = await fetch(source);
      if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
      this.recording = await answer.json();
    } catch (error) {
      const words = `The recording ${source} could not be loaded: ${error.message}.`;
      const style = make("style", {}, STYLE);
      const box = make("div", { class: "player", role: "alert" }, words);
      this.shadowRoot.replaceChildren(style, box);
      return;
    }
    if (source !== this.getAttribute("src")) return; // another one was asked for since
    this.events = this.recording.events;
    this.build();
    this.go(Number(this.getAttribute("step") ?? 1) - 1, false);
    this.dispatchEvent(new CustomEvent("ready"));
  }

  /** What stays from step to step. */
  build() {
    const { title, lesson, ranks } = this.recording;
    const button = (name, label, what) => {
      const element = make("button", { type: "button", "aria-label": name, title: name }, label);
      element.addEventListener("click", what);
      return element;
    };
    const last = this.events.length - 1;
    this.first = button("first step (Home)", "⏮", () => this.go(0));
    this.back = button("step back (←)", "◀", () => this.go(this.step - 1));
    this.play = button("play (Space)", "⏵", () => this.toggle());
    this.next = button("next step (→)", "▶", () => this.go(this.step + 1));
    this.end = button("last step (End)", "⏭", () => this.go(last));
    this.slider = make("input", { type: "range", min: 1, max: last + 1, "aria-label": "step" });
    this.slider.addEventListener("input", () => this.go(this.slider.value - 1));
    this.count = make("span", { class: "count" });
    this.caption = make("p", { class: "caption", "aria-live": "polite", "aria-atomic": "true" });
    this.badges = make("div", { class: "badges" });
    this.stage = make("div", { class: "stage" });
    this.stage.addEventListener("click", () => {
      if (getSelection().isCollapsed) this.go(this.step + 1);
    });
    this.totals = make("div", { class: "scroll totals" });
    const about = `lesson ${lesson.slice(0, 2)}, ${ranks} ranks, a recorded run`;
    this.box = make("div",
      { class: "player", tabindex: 0, role: "group", "aria-label": `${title}: player` },
      make("div", { class: "head" }, make("h2", {}, title), make("span", {}, about)),
      make("div", { class: "controls" }, this.first, this.back, this.play, this.next,
        this.end, this.slider, this.count),
      this.caption, this.badges, this.stage, this.legend(), this.totals);
    this.box.addEventListener("keydown", (event) => this.key(event));
    this.dress();
    this.shadowRoot.replaceChildren(make("style", {}, STYLE), this.box);
  }

  /** Dark or light as the page says, or else as the system does. */
  dress() {
    const theme = document.documentElement.dataset.theme;
    if (this.box) this.box.dataset.theme = theme ?? "";
  }

  legend() {
    const entry = (style, text) => make("span", {}, make("i", { style }), text);
    const entries = [...Array(this.recording.ranks).keys()].map((r) =>
      entry(`background:${color(r)}`, `rank ${r}`));
    if (this.recording.time) {
      const hatch = "repeating-linear-gradient(45deg,#0005 0 2px,#fff 2px 7px)";
      entries.push(entry("background:#fff", "forward"), entry(`background:${hatch}`, "backward"));
    } else {
      entries.push(entry(`background:${EVERYONE}`, "the same on every rank"));
      const names = this.events.flatMap((e) => e.ranks[0].makes ?? []).map((x) => x.name);
      if (names.some((name) => name.startsWith("partial"))) {
        entries.push(entry("background:#fff;border-style:dashed", "one term of a sum"));
      }
    }
    return make("div", { class: "legend" }, ...entries);
  }

  // Moving through the steps

  key(event) {
    const steps = {
      ArrowRight: this.step + 1, PageDown: this.step + 1, ArrowLeft: this.step - 1,
      PageUp: this.step - 1, Home: 0, End: this.events.length - 1,
    };
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const focused = event.composedPath()[0];
    if (event.key === " " && focused.tagName !== "BUTTON") this.toggle();
    else if (event.key in steps) {
      // At either end a key is the page's again: slides go on from there.
      if (!(steps[event.key] in this.events) && focused !== this.slider) return;
      this.go(steps[event.key]);
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }

  toggle() {
    if (this.timer) return this.pause();
    if (this.step === this.events.length - 1) this.go(0);
    this.timer = setInterval(() => this.go(this.step + 1, true, true), this.recording.time ? PAUSE / 3 : PAUSE);
    this.show_playing();
  }

  pause() {
    clearInterval(this.timer);
    this.timer = undefined;
    if (this.play) this.show_playing();
  }

  show_playing() {
    const name = this.timer ? "pause (Space)" : "play (Space)";
    this.play.textContent = this.timer ? "⏸" : "⏵";
    this.play.setAttribute("aria-label", name);
    this.play.title = name;
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
    this.dispatchEvent(new CustomEvent("step", { detail: step + 1 }));
  }

  /** What each rank holds after this step: name → tensor, as { tensor, now, source }. */
  held() {
    const lanes = [...Array(this.recording.ranks)].map(() => new Map());
    this.events.slice(0, this.step + 1).forEach((event, i) => {
      const now = i === this.step;
      event.ranks.forEach((part, rank) => {
        const lane = lanes[rank];
        for (const [name, entry] of lane) {
          if (entry.gone) lane.delete(name);
          else lane.set(name, { ...entry, now: false, source: name === event.takes });
        }
        for (const x of part.given ?? []) lane.set(x.name, { tensor: x, source: true, gone: true });
        for (const name of event.drops ?? []) {
          const entry = lane.get(name);
          if (entry && now && name === event.takes) lane.set(name, { ...entry, gone: true });
          else lane.delete(name);
        }
        for (const x of part.makes ?? []) {
          if (event.takes && event.takes !== x.name) lane.delete(x.name);
          lane.set(x.name, { tensor: x, now: true, moved: part.moved });
        }
        for (const mark of part.marks ?? []) lane.set(mark.name, { ...lane.get(mark.name), mark });
      });
    });
    return lanes;
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
    this.caption.textContent = event.says;
    this.badges.replaceChildren(...this.badge(event));
    const lanes = recording.time ? this.charts(event) : this.held().map((lane, r) => this.lane(lane, r, event));
    this.stage.replaceChildren(...lanes);
    this.totals.replaceChildren(this.table());
  }

  badge(event) {
    const sent = event.ranks.map(total);
    const name = event.call?.collective ?? (sum(sent) ? "send/recv" : "");
    const words = { hold: "at the start", compute: "compute, nothing is sent", check: "compared" };
    const each = [...new Set(sent)].map((n) => n.toLocaleString("en")).join(" or ");
    const text = name ? `${name}, ${each} bytes a rank` : words[event.kind];
    const badge = text && make("span", { class: sum(sent) ? "badge moves" : "badge" }, text);
    const where = event.where && make("code", { class: "where" }, event.where);
    return [badge, where].filter(Boolean);
  }

  lane(lane, rank, event) {
    const boxes = [];
    let arrow = false;
    for (const [name, entry] of lane) {
      if (entry.now && !arrow && [...lane.values()].some((x) => x.source && x !== entry)) {
        boxes.push(make("span", { class: "arrow", "aria-hidden": "true" }, "→"));
        arrow = true;
      }
      boxes.push(this.tensor(name, entry));
    }
    const chips = this.moves(rank, event).map((text) => make("span", { class: "chip" }, text));
    return make("section",
      { class: "lane", style: `--rank:${color(rank)}`, "aria-label": `rank ${rank}`, "data-rank": rank },
      make("div", { class: "who" }, `rank ${rank}`, ...chips),
      make("div", { class: "boxes" }, ...boxes));
  }

  /** In words: whom this rank meets in this step. */
  moves(rank, event) {
    const part = event.ranks[rank];
    if (part.to !== undefined) {
      return [`→ rank ${part.to}: ${bytes(total(part))}`, `← rank ${part.from}`];
    }
    if (!total(part)) return [];
    const others = event.call.groups.find((group) => group.includes(rank));
    const names = others.filter((r) => r !== rank).join(", ");
    return [`${event.call.collective} with rank ${names}`, bytes(total(part))];
  }

  tensor(name, { tensor, now, source, moved, mark }) {
    const { shape, values, who } = tensor;
    const ranks = this.recording.ranks;
    const across = shape.at(-1) ?? 1;
    const of_each = Array.isArray(who);
    const letters = values?.some((v) => typeof v === "string" && /^[^−∞]$/.test(v));
    const cells = make("div", { class: "cells", "aria-hidden": "true" });
    if (!of_each) cells.style.background = paint(who, ranks);
    if (values) {
      cells.style.gridTemplateColumns = `repeat(${across}, auto)`;
      const block = shape.length > 2 ? across * shape.at(-2) : Infinity;
      values.forEach((value, i) => {
        const cell = make("span", { class: "cell" }, minus(value));
        if (letters) cell.classList.add("letter");
        if (i && i % block < across && Math.floor(i / block) !== Math.floor((i - across) / block)) cell.classList.add("block");
        if (moved?.includes(i)) cell.classList.add("moved");
        if (of_each) cell.style.background = bits(who[i]).length > 1 ? strip(who[i]) : paint(who[i], ranks);
        cells.append(cell);
      });
    } else {
      cells.classList.add("closed");
      cells.append(`${shape.join(" × ")} numbers`);
    }
    const size = `[${shape.join(", ")}]`;
    const kinds = ["box", now && "new", source && "source", mark && !mark.ok && "wrong",
      /^(partial|own)_/.test(name) && "term"];
    const told = values ? `: ${values.slice(0, 24).map(minus).join(" ")}` : "";
    const held = of_each || bits(who).length === 1 ? "" : `, the same on ranks ${bits(who).join(", ")}`;
    const verdict = mark && (mark.ok ? `✓ as in one process (${mark.diff})` : `✗ wrong by ${percent_of(mark.diff)}`);
    const label = `${now ? "new: " : ""}${name} ${size}${held}${told}${verdict ? `, ${verdict}` : ""}`;
    return make("figure", { class: kinds.filter(Boolean).join(" "), role: "img", "aria-label": label, "data-name": name },
      make("figcaption", {}, name, " ", make("span", { class: "shape" }, size)), cells,
      verdict && make("span", { class: `mark ${mark.ok ? "good" : "bad"}` }, verdict));
  }

  /** Who computed what when: all until the next step's time, a chart for each run. */
  charts(event) {
    const { ranks, time } = this.recording;
    const spans = this.events.flatMap((e, i) =>
      e.ranks.flatMap((part, rank) => (part.spans ?? []).map((span) => ({ ...span, rank, i }))));
    const length = Math.max(...spans.map((span) => span.end));
    const until = this.events[this.step + 1]?.time ?? length;
    return time.runs.map((run) => {
      const tracks = [...Array(ranks).keys()].map((rank) => {
        const bars = spans.filter((s) => s.run === run && s.rank === rank && s.i <= this.step).map((s) => {
          const style = `left:${percent(s.start / length)};width:${percent((s.end - s.start) / length)};background-color:${color(rank)}`;
          return make("span", { class: `bar ${s.what}${s.i === this.step ? " new" : ""}`, style }, make("b", {}, String(s.microbatch + 1)));
        });
        const veil = make("span", { class: "veil", style: `left:${percent(until / length)}` });
        const kept = event.kept[run][rank];
        return make("div", { class: "track", style: `--rank:${color(rank)}` },
          make("span", {}, make("b", {}, `stage ${rank}`), ` keeps ${kept}`),
          make("div", { class: "bars", "aria-hidden": "true" }, ...bars, veil));
      });
      const ticks = [0, 1, 2, 3, 4].map((i) =>
        make("span", { style: `left:${percent(i / 4)}` }, `${Math.round(length * i / 4)} ${time.unit}`));
      const axis = make("div", { class: "track" }, make("span"), make("div", { class: "axis", "aria-hidden": "true" }, ...ticks));
      const chart = make("div", { class: "chart", tabindex: 0, role: "group", "aria-label": `${run}: bars over time` }, ...tracks, axis);
      requestAnimationFrame(() => {
        chart.scrollLeft = (chart.scrollWidth * until) / length - chart.clientWidth * 0.7;
      });
      return make("section", { class: "run" }, make("h3", {}, run), chart);
    });
  }

  /** Bytes so far, as each rank's own counter had them; and the lesson's formula. */
  table() {
    const { ledger, ranks } = this.recording;
    const each = [...Array(ranks).keys()];
    const so_far = (row, rank) => sum(this.events.slice(0, this.step + 1).map((e) => e.ranks[rank].bytes?.[row] ?? 0));
    const head = make("tr", {}, make("th", { scope: "col" }, "collective"),
      ...each.map((r) => make("th", { scope: "col" }, `rank ${r}`)),
      make("th", { scope: "col" }, "in all, by the lesson's formula"));
    const rows = [...new Set(ledger.map((x) => x.row))].map((row) => {
      const mine = ledger.filter((x) => x.row === row);
      const predicted = [...new Set(mine.map((x) => x.predicted))].map((n) => n.toLocaleString("en")).join(" or ");
      const cells = each.map((rank) => {
        const moves = this.events[this.step].ranks[rank].bytes?.[row];
        return make("td", { class: moves ? "now" : undefined, "data-rank": rank, "data-row": row }, so_far(row, rank).toLocaleString("en"));
      });
      return make("tr", {}, make("th", { scope: "row" }, row), ...cells,
        make("td", { class: "formula" }, `${mine[0].formula}: ${predicted}`));
    });
    return make("table", {}, make("caption", {}, "Bytes so far"), make("thead", {}, head), make("tbody", {}, ...rows));
  }

  /** Let what was sent in this step fly from its rank to where it is now. */
  fly() {
    const event = this.events[this.step];
    const lanes = [...this.stage.querySelectorAll(".lane")];
    const find = (rank, name) => lanes[rank].querySelector(`[data-name="${CSS.escape(name)}"] .cells`);
    event.ranks.forEach((part, rank) => {
      const name = part.makes?.[0]?.name;
      if (!event.takes || !name || (!total(part))) return;
      const group = event.call?.groups?.find((ranks) => ranks.includes(rank)) ?? [];
      const from = part.from !== undefined ? [part.from] : event.call?.src !== undefined ? [event.call.src[rank]] : group;
      for (const other of from.filter((r) => r !== rank)) {
        let source = find(other, event.takes);
        let target = find(rank, name);
        if (part.moved) [source, target] = [source, target].map((box) => box?.children[part.moved[0]]);
        if (source && target) this.ghost(source, target);
      }
    });
  }

  ghost(source, target) {
    const home = this.stage.getBoundingClientRect();
    const [from, to] = [source, target].map((x) => x.getBoundingClientRect());
    const ghost = source.cloneNode(true);
    ghost.classList.add("ghost");
    ghost.style.left = `${from.left - home.left}px`;
    ghost.style.top = `${from.top - home.top}px`;
    ghost.style.width = `${from.width}px`;
    this.stage.append(ghost);
    const move = `translate(${to.left - from.left}px, ${to.top - from.top}px)`;
    const frames = [{ transform: "none" }, { transform: move, opacity: 0.3 }];
    ghost.animate(frames, { duration: FLIGHT, easing: "ease-in-out" }).onfinish = () => ghost.remove();
  }
}

/** A relative difference, as people say it. */
const percent_of = (diff) => (diff < 10 ? `${Math.round(100 * diff)} %` : String(diff));

customElements.define("tp-player", TPPlayer);
