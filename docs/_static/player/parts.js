// Colors, elements and places that the other files draw with.

// By rank, as in every picture of the course (notebooks/draw.py): black can be read on it.
export const COLORS = ["#56B4E9", "#E69F00", "#009E73", "#CC79A7",
  "#F0E442", "#D55E00", "#0072B2", "#BBBBBB"];
export const EVERYONE = "#E6E6E6"; // what every rank holds alike
/** Of a rank's second chunk. */
export const pale = (color) => `color-mix(in srgb, ${color} 45%, #fff)`;

/** An element with attributes and children; text is never read as HTML. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** The ranks in a set: 5 → [0, 2]. */
export const bits = (who) => COLORS.map((_, r) => r).filter((r) => (who >> r) & 1);
export const up_to = (n) => [...Array(n).keys()];
export const commas = (n) => n.toLocaleString("en");
export const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
export const total = (part) => sum(Object.values(part.bytes ?? {}));
export const still = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
export const percent = (x) => `${(100 * x).toFixed(3)}%`;

/** All numbers of a tensor in one form: whole, or with two decimals. */
export function texts(values) {
  const whole = values.every((v) => typeof v === "string" || Number.isInteger(v));
  const text = (v) => (typeof v === "string" || whole ? String(v) : v.toFixed(2));
  return values.map((v) => text(v).replace(/^-0\.00$/, "0.00").replace("-", "−"));
}

/** Does this recording begin with tokens, shown as letters? */
export const hasLetters = ({ events }) => events[0].ranks.some(({ makes }) =>
  makes?.some(({ values }) => values?.some((v) => /^[a-z]$/.test(v))));

/** The colors of these ranks, one after the other, from left to right. */
export function bands(held) {
  const stops = held.map((r, i) =>
    `${COLORS[r]} ${percent(i / held.length)} ${percent((i + 1) / held.length)}`);
  return `linear-gradient(90deg, ${stops})`;
}

/** A background: the color of the rank that holds it, gray if all do. What some hold is
 * gray with a bar in their colors at its left edge. */
export function paint(who, ranks) {
  const held = bits(who);
  if (held.length === 1 && ranks > 1) return COLORS[held[0]];
  if (held.length === ranks) return EVERYONE;
  return `${bands(held)} left / .7rem 100% no-repeat ${EVERYONE}`;
}

/** Below a number: the colors of the ranks whose numbers are in it. */
export const strip = (who) => `${bands(bits(who))} bottom / 100% 40% no-repeat #fff`;

/** The smallest rectangle around these elements, as seen from `home`, in its pixels. */
export function around(elements, home) {
  const boxes = elements.map((element) => element.getBoundingClientRect());
  const edge = (most, side) => most(...boxes.map((box) => box[side]));
  const [left, top] = [edge(Math.min, "left"), edge(Math.min, "top")];
  const width = (edge(Math.max, "right") - left) / home.scale;
  const height = (edge(Math.max, "bottom") - top) / home.scale;
  const [x, y] = [left - home.left, top - home.top].map((px) => px / home.scale);
  return { left: x, top: y, width, height };
}

/** Where each number stands: three dims are blocks below each other, four beside each
 * other; a vector of more than 8 numbers has rows of 6. */
export function layout({ shape, values }) {
  const across = shape.length > 1 ? shape.at(-1) : values.length > 8 ? 6 : values.length;
  const block = shape.length > 1 ? across * shape.at(-2) : values.length;
  const beside = shape.length === 4 ? values.length / block : 1;
  const place = (i) => {
    const [number, line, column] = [i / block, (i % block) / across, i % across].map(Math.floor);
    const edges = [];
    if (number && beside > 1 && column === 0) edges.push("beside");
    if (number && beside === 1 && line === 0) edges.push("below");
    const row = line + (beside > 1 ? 0 : number * (block / across));
    return { row, column: column + (beside > 1 ? number * across : 0), edges };
  };
  return { wide: beside * across, place };
}

/** Ranks on a ring: two columns of lanes, clockwise from rank 0 at the top left. */
export function onRing(rank, ranks) {
  const right = rank > 0 && rank <= ranks / 2;
  const row = rank === 0 ? 1 : right ? rank : ranks - rank + 1;
  return `--row:${row};--side:${right ? 2 : 1}`;
}

/** Ranks on a mesh of two columns: the outer axis from top to bottom. */
export const onMesh = (rank) => `--row:${Math.floor(rank / 2) + 1};--side:${(rank % 2) + 1}`;
