// Below the lanes: what colors, lines and letters mean.

import { COLORS, EVERYONE, bands, bits, make, paint, pale, strip, up_to } from "./parts.js";

// Letters of shapes and formulas; in a name a small one is a rank's slice.
const LETTERS = {
  B: "batch", S: "positions", D: "features", N: "heads", K: "key/value heads",
  H: "features of a head", F: "width of the MLP", V: "vocabulary", T: "ranks", C: "ranks",
  M: "micro-batches", b: "sequences in one of them", s: "positions of a rank",
  n: "numbers of a rank", e: "bytes per number", outer: "and inner: ranks of that axis",
};
const OF_A_BATCH = { ...LETTERS, n: "positions of all micro-batches" };

/** What the letters of a recording mean: those of its formulas and its names. */
function key({ ledger, lesson }, names) {
  const shapes = names.flatMap((name) => /_([BSDFNVbsdfnv]+)$/.exec(name)?.[1] ?? []).join("");
  const formulas = ledger.flatMap(({ formula }) => formula.match(/[A-Za-z]+/g) ?? []);
  const used = new Set([...shapes.toUpperCase(), ...formulas]);
  const meanings = lesson.startsWith("05") ? OF_A_BATCH : LETTERS;
  const words = Object.entries(meanings).filter(([letter]) => used.has(letter))
    .map((pair) => pair.join(" ")).join(", ");
  return /[a-z]/.test(shapes) ? `${words}; in a name a small letter: this rank's slice` : words;
}

export function legend({ recording, events }) {
  const entry = (style, text) => make("span", {}, make("i", { style }), text);
  const rule = (text) => make("span", { class: "rule" }, text);
  const { ranks, time, layout } = recording;
  const paper = "outline:1px solid var(--line);background:";
  const entries = up_to(ranks).map((r) => entry(`background:${COLORS[r]}`, `rank ${r}`));
  const made = events.flatMap((event) => event.ranks[0].makes ?? []);
  if (time) {
    const hatched = (kind, text = kind) => make("span", {}, make("i", { class: kind }), text);
    const spans = events.flatMap((event) => event.ranks.flatMap((x) => x.spans ?? []));
    entries.push(entry("background:#fff", "forward"), hatched("backward"));
    if (spans.some(({ what }) => what === "weight")) entries.push(hatched("weight", "dL/dW apart"));
    if (time.chunks) entries.push(entry(`background:${pale(COLORS[0])}`, "second chunk"));
    entries.push(entry("background:#888;width:5px", "a message, in the color of its sender"));
    entries.push(rule("thick border: begins in this step; the line: its end; " +
      "keeps: micro-batches whose activations a rank has at the caption's time"));
    entries.push(rule(`P stages, ${key(recording, [])}; a header of 40 bytes`));
  } else if (layout === "rows") {
    entries.push(make("span", {}, "a color: whose token, or expert; e0: for expert 0; r0: from " +
      "rank 0; t tokens of a rank, k experts per token, r rows, m rows that leave it (mean), " +
      "E experts (e: of a rank; in formulas bytes per element), D features, F width"));
  } else if (made.some((x) => Array.isArray(x.who))) {
    const scores = made.some((x) => x.marked);
    entries.push(entry(`background:${scores ? strip(1) : bands([0, 1])}`,
      scores ? "whose key and value" : "these ranks' numbers are in it"));
    const cell = (line) => `border:3px ${line} #000;${paper}#fff`; // as in the picture
    entries.push(entry(cell("dotted"), "is sent"));
    entries.push(entry(cell("solid"), `has arrived${scores ? "" : "; +2: and is added"}`));
    if (scores) entries.push(entry("background:#fff", "a score computed in this step"));
    entries.push(rule(key(recording, made.map(({ name }) => name))));
  } else {
    const tensors = events.flatMap((e) => e.ranks.flatMap((part) =>
      [...(part.makes ?? []), ...(part.given ?? [])]));
    const some = (find) => tensors.some(find);
    if (some((x) => bits(x.who).length === ranks))
      entries.push(entry(`background:${EVERYONE}`, "the same on every rank"));
    if (some((x) => ![1, ranks].includes(bits(x.who).length)))
      entries.push(entry(`background:${paint(3, 4)}`, "the same on these ranks"));
    if (some((x) => x.term))
      entries.push(entry(`border:3px dashed #000;${paper}#fff`, "one term of a sum"));
    if (some((x) => x.marked))
      entries.push(entry(`box-shadow:inset 0 0 0 3px #000;${paper}#fff`, "the target"));
    entries.push(rule(key(recording, tensors.map(({ name }) => name))));
    const rounded = (v) => typeof v === "number" && v !== Number(v.toFixed(2));
    const sums = events.some(({ call }) => call?.collective.includes("reduce"));
    if (sums && some(({ values }) => values?.some(rounded)))
      entries.push(rule("numbers are rounded: a sum can differ by 0.01 from what is shown"));
  }
  if (!time) entries.push(rule("faded: used or sent in this step, or not kept after it"));
  if (events.some((event) => event.ranks[0].marks)) {
    const reference = layout === "ring" ? "as PyTorch's all-reduce" : "as in one process";
    entries.push(rule(`✓ same ${reference}; ✗ wrong by: largest difference / largest number`));
  }
  return make("div", { class: "legend" }, ...entries);
}
