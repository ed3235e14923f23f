// <tp-player src="ring.json"></tp-player>: plays a recording of a run, step by step.
//
// Recordings are written by docs/record.py from live ranks. Nothing here knows a
// result: what a rank holds, sends and counts at a step is read from the recording.
// Keys: → or Page Down next, ← or Page Up back, Space play or pause, Home, End.
// Attributes: src, and step (the step to begin with, from 1).

import { findPlaces } from "./places.js";
import { cellOfBrief } from "./brief.js";
import { charts } from "./charts.js";
import { freeLanes, keepLanes, keepWords } from "./heights.js";
import { table } from "./ledger.js";
import { legend } from "./legend.js";
import { drawArrows, fly } from "./arrows.js";
import {
  COLORS, make, bands, bits, up_to, commas, total, still, texts, paint, strip,
  hasLetters, layout, onMesh, onRing,
} from "./parts.js";
import { STYLE } from "./style.js";

const PAUSE = 2600; // ms that a step stands while playing, at least
const PER_WORD = 300; // ms to read a word
const LEAST = 28; // px: how wide a cell is at least
const READABLE = [31, 44]; // px: a cell with an integer of 13 px, or with −0.12

class TPPlayer extends HTMLElement {
  connectedCallback() {
    if (!this.shadowRoot) this.attachShadow({ mode: "open" });
    this.theme = new MutationObserver(() => this.dress());
    const options = { attributes: true, attributeFilter: ["data-theme"] };
    this.theme.observe(document.documentElement, options);
    this.sizes = new ResizeObserver(() => this.fit());
    this.sizes.observe(this);
    this.printing = [["beforeprint", () => this.printSteps()],
      ["afterprint", () => this.printed()]];
    for (const [name, react] of this.printing) addEventListener(name, react);
    this.slide = this.closest(".reveal section"); // its fragments are the steps
    if (this.slide) this.classList.add("on-slide");
    this.load();
  }

  disconnectedCallback() {
    this.theme.disconnect();
    this.sizes.disconnect();
    for (const [name, react] of this.printing) removeEventListener(name, react);
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
    this.places = findPlaces(this);
    this.build();
    const begin = Number(this.getAttribute("step") ?? 1) - 1;
    this.go(this.slide ? this.shownFragments() : begin, false);
    if (this.hasAttribute("autoplay") && !still()) this.toggle();
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
      if (!getSelection().isCollapsed) return;
      if (this.slide) window.Reveal?.next();
      else this.go(this.step + 1);
    });
    const group = { role: "group", ...(this.slide ? {} : { tabindex: 0 }) };
    this.totals = make("div", { ...group, class: "totals", "aria-label": "bytes" });
    const source = `lesson ${lesson.slice(0, 2)}, ${ranks} ranks, a recorded run`;
    const words = title.split(/(--\w+ \w+)/).map((part) => // an option is one word
      (part.startsWith("--") ? make("i", {}, part) : part));
    const buttons = [this.first, this.back, this.play, this.next, this.end];
    this.brief = this.slide || this.recording.layout === "brief"; // see brief in style.js
    const kinds = [this.slide && "slide", this.brief && "brief",
      hasLetters(this.recording) && "letters", this.recording.layout,
      this.getAttribute("src").match(/attention/)?.[0]];
    const kind = ["player", ...kinds.filter(Boolean)].join(" ");
    this.box = make("div", { ...group, class: kind, "aria-label": `player: ${title}` },
      make("div", { class: "head" }, make("b", {}, ...words), make("span", {}, source)),
      make("div", { class: "controls" }, ...buttons, this.slider, this.count),
      this.caption, this.stage, legend(this), this.totals);
    this.box.addEventListener("keydown", (event) => this.key(event));
    this.dress();
    this.shadowRoot.replaceChildren(make("style", {}, STYLE), this.box);
  }

  /** Dark or light as the page says, or else as the system does; slides are white. */
  dress() {
    const theme = this.slide ? "light" : document.documentElement.dataset.theme ?? "";
    this.box?.setAttribute("data-theme", theme);
  }

  // Moving through the steps

  key(event) {
    const steps = {
      ArrowRight: this.step + 1, PageDown: this.step + 1, ArrowLeft: this.step - 1,
      PageUp: this.step - 1, Home: 0, End: this.events.length - 1,
    };
    const focused = event.composedPath()[0];
    if (event.altKey || event.ctrlKey || event.metaKey || this.slide) return;
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
    this.playOn();
    this.play.textContent = "pause";
  }

  /** A step stands as long as it takes to read it. */
  playOn() {
    const words = this.events[this.step].says.split(" ").length;
    const pause = this.recording.time ? PAUSE / 2 : Math.max(PAUSE, PER_WORD * words);
    this.timer = setTimeout(() => {
      this.go(this.step + 1, true, true);
      if (this.timer) this.playOn();
    }, pause);
  }

  pause() {
    clearTimeout(this.timer);
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
    if (move && forward && !still()) fly(this);
  }

  /** The steps to stop at on a slide: all, or those that `steps` names ("1,3,7"). */
  stops() {
    const named = this.getAttribute("steps")?.split(",").map((stop) => stop - 1);
    return named ?? up_to(this.events.length);
  }

  /** On a slide each stop is a fragment: reveal.js shows them, the player follows. */
  shownFragments() {
    const shown = this.slide.querySelectorAll(".fragment.visible").length;
    return this.stops()[Math.min(shown, this.stops().length - 1)];
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
    this.caption.replaceChildren(...this.words(event));
    const lanes = () => up_to(recording.ranks).map((rank) => this.lane(rank));
    this.stage.replaceChildren(...(recording.time ? charts(this, event) : lanes()));
    this.totals.replaceChildren(table(this));
    this.fit();
  }

  /** Letters of the longest name or shape that is shown without numbers. */
  closedLetters() {
    const made = this.events.flatMap((event) => event.ranks.flatMap((part) => part.makes ?? []));
    return Math.max(0, ...made.filter((x) => !x.values).map(({ name, shape }) =>
      Math.max(name.length + 1, shape.join(" × ").length + 2)));
  }

  /** On a narrow screen boxes may stand below each other: the widest one is to fit. */
  widestCells() {
    const made = this.events.flatMap((event) => event.ranks.flatMap((part) => part.makes ?? []));
    return Math.max(1, ...made.filter((x) => x.values).map((x) => layout(x).wide));
  }

  /** Cells as large as the lane allows; then the arrows, which depend on it. */
  fit() {
    const boxes = this.stage?.querySelector(".boxes");
    if (this.stage?.clientWidth) keepWords(this);
    if (!boxes?.clientWidth) return; // in print the stage is hidden: its copies stay as they are
    const style = getComputedStyle(this.box);
    const [most, font] = [Number(style.getPropertyValue("--cell-max")), parseFloat(style.fontSize)];
    const closed = this.closedLetters() * 0.46 * font;
    const narrow = this.box.clientWidth < 620;
    const room = boxes.clientWidth - 8;
    this.chooseBrief(narrow, (2 * (room - closed)) / this.places.halves);
    const least = this.brief && !this.slide ? this.readable() : LEAST; // boxes may wrap
    const fits = this.brief && !narrow ? cellOfBrief(this, room, font)
      : narrow ? room / this.widestCells() - 2
      : (2 * (room - closed)) / this.places.halves;
    const enough = parseFloat(style.getPropertyValue("--cell-min")) || least;
    let cell = Math.floor(Math.max(enough, Math.min(most, fits)));
    this.box.style.setProperty("--closed", `${closed}px`);
    this.box.style.setProperty("--halves", this.places.halves);
    do {
      this.box.style.setProperty("--cell", `${cell}px`);
      keepLanes(this);
      cell -= 2;
    } while (this.isTooHigh() && cell >= enough);
    if (this.isTooHigh()) freeLanes(this);
    for (const lane of this.stage.querySelectorAll(".boxes")) { // keys reach what scrolls
      if (lane.scrollWidth > lane.clientWidth) lane.tabIndex = 0;
      else lane.removeAttribute("tabindex");
    }
    drawArrows(this);
  }

  /** Where numbers would be too small to read, what is not used any more is a name. */
  chooseBrief(narrow, cell) {
    if (this.slide || this.recording.layout) return; // decided by build
    this.brief = !narrow && !this.box.matches(".paper") && cell < this.readable();
    for (const kind of ["brief", "chosen"]) this.box.classList.toggle(kind, this.brief);
  }

  /** How wide a cell has to be for its numbers. */
  readable() {
    const made = this.events.flatMap(({ ranks }) => ranks.flatMap((part) => part.makes ?? []));
    const points = made.some(({ values }) => values && texts(values).join().includes("."));
    return READABLE[Number(points)];
  }

  /** On a slide there is nothing below the player's last line. */
  isTooHigh() {
    return this.slide && this.scrollHeight > this.clientHeight;
  }

  /** On paper, below each other: the start, every step that sends something, every check. */
  printSteps() {
    if (this.slide || !this.events || this.box.querySelector(".printed")) return;
    this.box.classList.add("paper"); // as wide as a page, and so all places as on it
    this.style.width = "680px";
    const shown = this.step;
    const pages = this.events.map((event, step) => {
      if (["compute", "time"].includes(event.kind)) return "";
      this.step = step;
      this.render();
      const parts = [this.caption, this.stage].map((part) => part.cloneNode(true));
      return make("div", { class: "printed" }, ...parts);
    });
    const last = table(this); // all bytes
    this.step = shown;
    this.render();
    this.totals.replaceChildren(last);
    this.stage.after(...pages);
  }

  printed() {
    for (const page of this.box?.querySelectorAll(".printed") ?? []) page.remove();
    this.box?.classList.remove("paper");
    this.style.width = "";
    if (this.events) this.render();
  }

  words(event) {
    return [this.badge(event), event.says];
  }

  badge(event) {
    const words = { hold: "start", check: "check", time: "compute" };
    const payload = [...new Set(event.ranks.map(total))].filter(Boolean);
    if (event.kind === "time" && payload.length) {
      const each = event.ranks.flatMap((part) => Object.values(part.bytes ?? {}));
      const sizes = [...new Set(each)].map(commas).join(" or ");
      return make("span", { class: "badge moves" }, `compute; an arrow: ${sizes} bytes`);
    }
    if (!payload.length || words[event.kind])
      return make("span", { class: "badge" }, words[event.kind] ?? "compute");
    if (event.call?.uneven) // its payload is what leaves a rank
      return make("span", { class: "badge moves" }, `${event.call.collective}, ranks send ` +
        `${event.ranks.map(total).map(commas).join(" and ")} bytes to others`);
    const text = event.call
      ? `${event.call.collective}, payload ${payload.map(commas).join(" or ")} bytes`
      : `send/recv, each rank sends ${payload.map(commas).join(" or ")} bytes`;
    return make("span", { class: "badge moves" }, text);
  }

  /** What a rank holds; from what it had, an arrow points to what it has now. */
  lane(rank) {
    const { ranks, takes, drops } = this.events[this.step];
    const { makes = [], given = [], marks = [] } = ranks[rank];
    const mark_of = (tensor) => marks.find(({ name }) => name === tensor.name);
    const made = new Set(makes.map((tensor) => tensor.name));
    const before = this.held(rank, this.step);
    const source = given[0] ?? (made.has(takes) ? undefined : before.get(takes));
    const stays = [...this.held(rank, this.step + 1).values()];
    const leaves = (drops ?? []).filter((name) => name !== source?.name && !made.has(name))
      .map((name) => before.get(name)).filter(Boolean);
    const boxes = stays.filter(({ name }) => !made.has(name) && name !== source?.name)
      .map((tensor) => this.tensor(tensor, "", mark_of(tensor)));
    if (source) boxes.push(this.tensor(source, "source"));
    for (const tensor of leaves) {
      boxes.push(this.tensor(tensor, "source"));
      if (source || (this.slide && leaves.length > 2)) // what is sent matters more
        boxes.at(-1).classList.add("aside");
    }
    const { moved } = ranks[rank];
    for (const tensor of makes) {
      const earlier = before.get(tensor.name);
      const same = !moved && earlier && String(earlier.values) === String(tensor.values);
      const box = this.tensor(tensor, same ? "kept" : "new", mark_of(tensor), moved);
      if (moved && earlier) this.showAdded(box, tensor, ranks[rank]);
      boxes.push(box);
    }
    const column = (box) => box.style.gridColumn;
    const since = (box) => this.places.steps[this.step].get(box.dataset.name)?.from ?? 0;
    boxes.sort((a, b) => parseInt(column(a)) - parseInt(column(b)) || since(a) - since(b));
    if (this.brief && !this.slide) // what has just been made may be used now
      for (const box of boxes)
        if (this.step > 1 && since(box) === this.step - 1) box.classList.remove("aside");
    const asides = boxes.filter((box) => this.brief && box.classList.contains("aside"))
      .sort((a, b) => since(a) - since(b));
    const others = boxes.filter((box) => !asides.includes(box));
    const columns = [...new Set(others.map(column))].map((place) => {
      const same = others.filter((box) => column(box) === place);
      const aside = same.every((box) => box.classList.contains("aside"));
      const about = { class: aside ? "aside" : "", style: `grid-column:${place}` };
      return same.length === 1 ? same[0] : make("div", about, ...same);
    });
    if (asides.length) columns.unshift(make("div", { class: "aside names" }, ...asides));
    columns.push(make("span", { class: "break" })); // on a narrow screen
    if (moved) {
      const cells = boxes.find((box) => box.dataset.name === takes).querySelectorAll(".cell");
      for (const i of ranks[ranks[rank].to].moved) cells[i].classList.add("leaves");
    }
    const chips = this.moves(rank).map((text) => make("span", { class: "chip" }, text));
    const [name, style] = [`rank ${rank}`, `--rank:${COLORS[rank]}`];
    const where = { ring: onRing, mesh: onMesh }[this.recording.layout?.split(" ")[0]];
    const place = where ? `;${where(rank, ranks.length)}` : "";
    const at = this.recording.at?.[rank]; // its place on a mesh
    const lane = { class: "lane", role: "group", "aria-label": name, style: style + place };
    return make("div", lane,
      make("div", { class: "who" }, name, at ? make("span", { class: "at" }, at) : "", ...chips),
      make("div", { class: "boxes" }, ...columns));
  }

  /** Above a sum: the number that arrived and was added. */
  showAdded(box, { name, who }, { moved, from }) {
    const arrived = this.held(from, this.step).get(name);
    const cells = box.querySelectorAll(".cell");
    for (const i of moved)
      if (arrived.who[i] !== who[i])
        cells[i].querySelector("small").append(`+${arrived.values[i]}`);
  }

  /** In words: how many bytes this rank sends in this step, to whom. */
  moves(rank) {
    const { ranks, call } = this.events[this.step];
    const { to, from, sends } = ranks[rank];
    if (to !== undefined)
      return [`sends ${commas(sends)} bytes → rank ${to}`, `← rank ${from}`];
    if (!sends) return [];
    if (from !== undefined) return [`← rank ${from}`];
    const others = call.groups.find((group) => group.includes(rank)).filter((r) => r !== rank);
    const names = `rank ${others.join(", ")}`;
    if (call.collective === "broadcast") // of two ranks: what is recorded is their mean
      return [`sends ${commas(total(ranks[rank]))} bytes → ${names}`];
    return [`sends ${commas(sends)} bytes → ${names}`];
  }

  tensor(tensor, kind, mark, moved) {
    const { name, shape, values, who } = tensor;
    const size = `[${shape.join(", ")}]`;
    const share = mark && Math.round(100 * mark.diff);
    const verdict = !mark ? "" : !mark.ok ? `✗ wrong by\u00a0${share}\u00a0%` :
      `✓\u00a0same${mark.diff ? ` (${mark.diff.toExponential(0).replace("-", "−")})` : ""}`;
    const term = tensor.term ? "term" : "";
    const open = values ? "" : "closed";
    const aside = kind || mark ? "" : "aside"; // on a narrow screen without its numbers
    const kinds = `box ${kind} ${open} ${aside} ${term} ${mark?.ok === false ? "wrong" : ""}`;
    const numbers = values ? texts(values).join(" ") : "";
    const label = `${kind} ${name} ${size} on ranks ${bits(who).join(", ")}: ${numbers} ${verdict}`;
    const at = this.places.steps[this.step].get(name) ?? { place: -1, wide: 1 };
    const style = `grid-column:${2 + at.place} / span ${at.wide}`;
    const about = { class: kinds, role: "img", "aria-label": label, "data-name": name, style };
    return make("figure", about,
      make("figcaption", {}, name.replace(/_(?!\w{1,4}$)|^dL\/d|(?=\[)/g, "$&\u200b"), " ",
        make("span", { class: "shape" }, size)),
      this.cells(tensor, kind, moved),
      make("span", { class: `mark ${mark?.ok ? "good" : "bad"}` }, verdict));
  }

  /** The numbers, in rows and columns, with the numbers of columns where they matter. */
  cells(tensor, kind, moved) {
    const { shape, values, who, columns, rows, marked } = tensor;
    const cells = make("div", { class: "cells" });
    const held = Array.isArray(who) ? 0 : bits(who).length;
    cells.style.background = held ? paint(who, this.recording.ranks)
      : bands([...new Set(who.flatMap(bits))]);
    if (held > 1 && held < this.recording.ranks) cells.classList.add("banded");
    if (!values) {
      cells.append(shape.join(" × "));
      return cells;
    }
    const { wide, place } = layout(tensor);
    const letters = values.some((v) => /^[a-z·]$/i.test(v));
    const [head, side] = [columns ? 1 : 0, rows ? 1 : 0];
    const first = rows ? "calc(var(--cell) / 2) " : "";
    cells.style.gridTemplateColumns = `${first}repeat(${wide}, var(--cell))`;
    const title = (text, row, column) => cells.append(
      make("span", { class: "column", style: `grid-area: ${row} / ${column}` }, text));
    if (head && side) title("", 1, 1);
    (columns ?? []).forEach((text, i) => title(text, 1, 1 + side + i));
    (rows ?? []).forEach((text, i) => title(text, 1 + head + i, 1));
    const lengths = texts(values).map((text) => (text.includes(".") ? 5 : text.length));
    cells.style.setProperty("--letters", Math.max(...lengths)); // −0.12 has five
    texts(values).forEach((text, i) => {
      const cell = make("span", { class: letters ? "cell letter" : "cell" }, text);
      const { row, column, edges } = place(i);
      cell.style.gridArea = `${1 + row + head} / ${1 + column + side}`;
      cell.classList.add(...edges);
      if (moved?.includes(i)) cell.classList.add("moved");
      if (marked?.includes(i) && (kind === "new" || !this.recording.layout))
        cell.classList.add("marked");
      if (this.recording.layout === "rows" && Array.isArray(who)) {
        cell.style.background = COLORS[bits(who[i])[0]];
      } else if (Array.isArray(who)) {
        cell.style.background = strip(who[i]);
        cell.classList.add("striped");
        if (shape.length === 1) cell.prepend(make("small")); // for what is added
      }
      cells.append(cell);
    });
    return cells;
  }
}

/** On slides: the player of the slide that a fragment is on shows the step after it. */
function follow() {
  for (const player of document.querySelectorAll("tp-player"))
    if (player.slide && player.events) {
      const step = player.shownFragments();
      if (step !== player.step) player.go(step);
    }
}
for (const name of ["fragmentshown", "fragmenthidden", "slidechanged"])
  document.addEventListener(name, follow);

customElements.define("tp-player", TPPlayer);
