// Where tensors stand in a lane: each keeps its place for as long as it is shown.

import { bits, hasLetters, layout, sum, up_to } from "./parts.js";

const PADDING = 1; // half cells around the numbers of a box
const NAME = 4; // half cells that a name needs at least
const ARROW = 1; // half cells between a tensor and what is made of it,
const OF_SMALL = 2; // and where cells are small
const MORE = 8; // half cells, at most, so that what follows stands to the right (not where
// lanes are beside each other),
const WIDE = 52; // as long as there are no more than this

/** All tensors that are shown at a step, on any rank: name → the widest of that name. */
function shownAt(player, step) {
  const shown = new Map();
  const wide = (tensor) => halves(tensor, player.recording.ranks);
  player.events[step].ranks.forEach((part, rank) => {
    // What is given comes first, for a source is placed before what is made of it.
    const all = [...(part.given ?? []), ...player.held(rank, step + 1).values()];
    const { takes } = player.events[step];
    for (const name of [takes, ...(player.events[step].drops ?? [])]) // its sources
      if (player.held(rank, step).has(name)) all.push(player.held(rank, step).get(name));
    for (const tensor of all) {
      const other = shown.get(tensor.name);
      if (!other || wide(tensor) > wide(other)) shown.set(tensor.name, tensor);
    }
  });
  return shown;
}

/** How wide a box is, in half cells; what some ranks hold has a bar at its left. */
const halves = (tensor, ranks) => {
  const bar = !Array.isArray(tensor.who) && ![1, ranks].includes(bits(tensor.who).length);
  return Math.max(2 * layout(tensor).wide + (tensor.rows || bar ? 1 : 0), NAME) + PADDING;
};

/** Every time that a name is shown without a pause: its steps, its width, its source. */
function lives(player) {
  const all = [];
  let [open, last] = [new Map(), undefined];
  player.events.forEach((event, step) => {
    const next = new Map();
    const names = (key) => event.ranks.flatMap((part) => part[key] ?? []).map(({ name }) => name);
    const made = names("makes");
    const sources = new Set([...open.keys(), ...names("given")]);
    for (const [name, tensor] of shownAt(player, step)) {
      if (!tensor.values) continue; // without numbers: the first column
      let life = open.get(name);
      if (!life) {
        const others = [event.takes, ...(event.drops ?? []), last].filter((x) => x !== name);
        const after = made.includes(name) ? others.find((x) => sources.has(x)) : undefined;
        all.push(life = { name, from: step, wide: 0, after, under: tensor.under });
      }
      life.to = step;
      life.wide = Math.max(life.wide, halves(tensor, player.recording.ranks));
      next.set(name, life);
    }
    open = next;
    last = made.at(-1) ?? last;
  });
  return all;
}

/** First fit: the leftmost free place from `start` on. */
function free(life, placed, start) {
  const others = placed.filter((x) => x.from <= life.to && life.from <= x.to);
  const starts = [start, ...others.map((x) => x.place + x.wide).filter((x) => x >= start)];
  return Math.min(...starts.filter((place) => others.every((x) =>
    place + life.wide <= x.place || x.place + x.wide <= place)));
}

/** Places within `most` half cells, where that can be: a result right of its source. */
function placeAll(all, most, arrow) {
  const placed = [];
  const at = (name, step) => placed.find((x) =>
    x.name === name && x.from <= step && step <= x.to);
  for (const life of all.filter((x) => !x.under)) {
    for (const below of all.filter((x) => x.under === life.name && x.from === life.from))
      life.wide = Math.max(life.wide, below.wide);
    const source = life.after && at(life.after, life.from);
    life.source = source;
    life.place = free(life, placed, source ? source.place + source.wide + arrow : 0);
    if (life.place + life.wide > most) life.place = free(life, placed, 0);
    placed.push(life);
  }
  for (const below of all.filter((x) => x.under))
    below.place = at(below.under, below.from).place;
  return Math.max(0, ...all.map((life) => life.place + life.wide));
}

/** How many results stand left of what they are made of; where they are sent, arrows have
 * to go back, which is worse. */
const leftOfSource = (all, events) => sum(all.map(({ place, source, from }) =>
  (source && place < source.place ? (events[from].call ? 3 : 1) : 0)));

/** For each step: name → its first half cell, its width and the step that made it; and how
 * many half cells there are. */
export function findPlaces(player) {
  const { events, recording } = player;
  const arrow = hasLetters(recording) ? OF_SMALL : ARROW;
  const tryWithin = (most) => {
    const all = lives(player);
    const halves = placeAll(all, most, arrow);
    return { all, halves, cost: leftOfSource(all, events) };
  };
  const least = tryWithin(0).halves;
  const more = recording.layout?.startsWith("mesh") ? 0 : MORE;
  const most = Math.max(least, Math.min(least + more, WIDE));
  const tried = up_to(most - least + 1).map((i) => tryWithin(least + i));
  const { all, halves } = tried.reduce((a, b) =>
    (b.cost < a.cost && b.halves <= most ? b : a));
  const steps = events.map((_, step) => new Map(all
    .filter((life) => life.from <= step && step <= life.to)
    .map(({ name, place, wide, from }) => [name, { place, wide, from }])));
  return { steps, halves };
}
