// Ways for arrows: around everything that is to be read.

const TRACK = 5; // px from one track to the next
const CLEAR = 5; // px between an arrow and what is to be read, at least
const TURN = 6; // a turn is as long as so many tracks
const ON_LINE = 5; // and so is a place on a line that should stay in sight,
const TAKEN = 20; // one where there is an arrow already,
const BESIDE = 3; // beside one,
const AT_TIP = 12; // or near the tip of one, which is to stay in sight
export const TIP = 12; // px: how long the tip of an arrow is
const DETOUR = 20; // tracks, to a side where no arrow lies below the tip
const APART = 14; // px between two tips, so that none lies on another
const SIDES = [[1, 0], [0, 1], [-1, 0], [0, -1]]; // right, down, left, up

/** The tracks of a stage. Those that would cross one of these boxes are closed, and those
 * on one of these lines cost more. */
export function tracksOf({ width, height }, boxes, lines) {
  const [across, down] = [width, height].map((px) => Math.ceil(px / TRACK) + 1);
  const cost = new Uint8Array(across * down).fill(1); // 0: closed
  const fill = ({ left, top, width: wide, height: high }, price) => {
    const [x0, y0] = [left, top].map((px) => Math.ceil((px - CLEAR) / TRACK));
    const x1 = Math.min(across - 1, Math.floor((left + wide + CLEAR) / TRACK));
    const y1 = Math.min(down - 1, Math.floor((top + high + CLEAR) / TRACK));
    for (let y = Math.max(0, y0); y <= y1; y++)
      for (let x = Math.max(0, x0); x <= x1; x++) cost[y * across + x] = price;
  };
  for (const line of lines) fill(line, 1 + ON_LINE);
  for (const x of [0, across - 1]) fill({ left: x * TRACK, top: 0, width: 0, height }, 0);
  for (const box of boxes) fill(box, 0);
  return { across, down, cost, tips: [] };
}

/** Where arrow i of n leaves or reaches each side of a box: the point on its edge, and
 * the track outside of it, so many px away at least. */
function ports({ left, top, width, height }, [i, n], away) {
  const share = (i + 1) / (n + 1);
  return SIDES.map(([dx, dy], side) => {
    const edge = [left + width * (dx ? (dx + 1) / 2 : share),
      top + height * (dy ? (dy + 1) / 2 : share)];
    const steps = edge.map((px, axis) => {
      const sign = axis ? dy : dx;
      if (!sign) return Math.round(px / TRACK);
      return sign * Math.ceil((sign * px + away) / TRACK);
    });
    edge[dx ? 1 : 0] = steps[dx ? 1 : 0] * TRACK; // so that its end is straight
    return { side, edge, steps };
  });
}

/** The shortest way from box a to box b: its corners in px, and from which side it comes.
 * `leaves` and `reaches`: which arrow of how many it is there. */
export function findWay(tracks, a, b, leaves, reaches) {
  const { across, down, cost } = tracks;
  const at = ([x, y]) => (x < 0 || y < 0 || x >= across || y >= down ? -1 : y * across + x);
  // State → where it came from. A state is a place, a direction, and if it has just turned:
  // one that turned twice at a place would lie on itself.
  const best = new Map();
  const queue = []; // by length: the states that are reached
  const reach = (length, place, side, from, turned = 0) => {
    if (place >= 0 && cost[place])
      (queue[length] ??= []).push([place * 8 + side * 2 + turned, from]);
  };
  const starts = ports(a, leaves, CLEAR + 1);
  for (const { side, steps } of starts) reach(0, at(steps), side);
  const far = ({ edge }) => tracks.tips.every(([x, y]) =>
    Math.hypot(edge[0] - x, edge[1] - y) >= APART);
  const isFree = ({ side, steps: [x, y] }) => [0, 1, 2].every((i) => // below the tip
    cost[at([x - i * SIDES[side][0], y - i * SIDES[side][1]])] !== 1 + TAKEN);
  const all = ports(b, reaches, TIP + 2);
  const goals = new Map((all.some(far) ? all.filter(far) : all).map((port) =>
    [at(port.steps) * 4 + ((port.side + 2) % 4), port])); // by place and direction
  let way; // the best one so far, which a free one that is a little longer is better than
  let most = Infinity;
  for (let length = 0; length < Math.min(queue.length, most); length++) {
    for (const [state, from] of queue[length] ?? []) {
      if (best.has(state)) continue;
      best.set(state, from);
      const goal = goals.get(Math.floor(state / 2));
      if (goal) {
        const found = corners(tracks, best, state, starts, goal);
        const knot = turnsBack(found.points);
        if (!knot && isFree(goal)) return take(tracks, found);
        if (!way || (turnsBack(way.points) && !knot)) way = found;
        if (!knot) most = Math.min(most, length + DETOUR);
        goals.delete(Math.floor(state / 2)); // another side may do without
      }
      const [place, side] = placeOf(state);
      const next = SIDES[side][0] + SIDES[side][1] * across;
      const [x, y] = [place % across + SIDES[side][0], Math.floor(place / across) + SIDES[side][1]];
      const there = at([x, y]);
      if (there === place + next) reach(length + (cost[there] || 1), there, side, state);
      if (state % 2 === 0)
        for (const turn of [1, 3]) reach(length + TURN, place, (side + turn) % 4, state, 1);
    }
    delete queue[length];
  }
  return way && take(tracks, way);
}

const placeOf = (state) => [Math.floor(state / 8), Math.floor(state / 2) % 4];

/** From the last state back to the first: where the way turns, and all its places. */
function corners({ across }, best, last, starts, goal) {
  const [points, places] = [[goal.edge], []];
  let first;
  for (let state = last; state !== undefined; state = best.get(state)) {
    const [place, side] = placeOf(state);
    const before = best.get(state);
    if (before === undefined || placeOf(before)[1] !== side || state === last)
      points.unshift([(place % across) * TRACK, Math.floor(place / across) * TRACK]);
    places.push(place);
    first = state;
  }
  points.unshift(starts[placeOf(first)[1]].edge);
  return { points, places, goal, angle: 90 * ((goal.side + 2) % 4) };
}

/** Does a way come back next to itself? That looks like a knot. */
function turnsBack(points) {
  const parts = [];
  for (let i = 1; i < points.length; i++) {
    const [dx, dy] = [0, 1].map((k) => points[i][k] - points[i - 1][k]);
    if (!dx && !dy) continue;
    const [side, length] = [`${Math.sign(dx)} ${Math.sign(dy)}`, Math.abs(dx + dy)];
    if (parts.at(-1)?.side === side) parts.at(-1).length += length;
    else parts.push({ side, length, back: `${-Math.sign(dx)} ${-Math.sign(dy)}` });
  }
  return parts.some(({ back }, i) => parts[i + 2]?.side === back && parts[i + 1].length < APART);
}

/** The way takes its places: later ones cost more there, beside them and at its tip. */
function take({ across, down, cost, tips }, way) {
  for (const place of way.places) {
    const column = place % across; // at an edge there is one neighbor less
    const beside = [column > 0 ? -1 : 0, column < across - 1 ? 1 : 0, across, -across];
    for (const step of beside)
      if (cost[place + step] && cost[place + step] < 1 + BESIDE) cost[place + step] = 1 + BESIDE;
    cost[place] = 1 + TAKEN;
  }
  const [x, y] = way.goal.steps;
  for (let j = Math.max(0, y - 2); j <= Math.min(down - 1, y + 2); j++)
    for (let i = Math.max(0, x - 2); i <= Math.min(across - 1, x + 2); i++)
      if (cost[j * across + i]) cost[j * across + i] = 1 + AT_TIP;
  tips.push(way.goal.edge);
  return way;
}

/** Where no way is free, as between boxes that are too close: from edge to edge. */
export function straight(a, b) {
  const along = (side, length) => {
    const [a0, b0, a1, b1] = [a[side], b[side], a[side] + a[length], b[side] + b[length]];
    if (a1 <= b0) return [a1, b0];
    return b1 <= a0 ? [a0, b1] : [(a0 + a1) / 2, (b0 + b1) / 2];
  };
  const [[x0, x1], [y0, y1]] = [along("left", "width"), along("top", "height")];
  const angle = (Math.atan2(y1 - y0, x1 - x0) * 180) / Math.PI;
  return { points: [[x0, y0], [x1, y1]], angle };
}

/** As SVG draws it, with round corners. */
export function pathThrough(points) {
  const parts = [`M ${points[0]}`];
  for (let i = 1; i < points.length - 1; i++) {
    const toward = (other) => {
      const [dx, dy] = [0, 1].map((k) => other[k] - points[i][k]);
      const length = Math.hypot(dx, dy);
      const part = length ? Math.min(9, length / 2) / length : 0;
      return [points[i][0] + dx * part, points[i][1] + dy * part];
    };
    parts.push(`L ${toward(points[i - 1])} Q ${points[i]} ${toward(points[i + 1])}`);
  }
  return `${parts.join(" ")} L ${points.at(-1)}`;
}
