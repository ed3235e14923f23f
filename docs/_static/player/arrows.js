// What is sent in a step: arrows that stay, and a flight from sender to receiver.

import { COLORS, around, make, total } from "./parts.js";

const FLIGHT = 900; // ms that numbers take from one rank to another
const SVG = "http://www.w3.org/2000/svg";

/** The cells of part i of n of a box along a dim; without a dim, all of them. */
function sliceOf(box, tensor, dim, i, n) {
  const cells = [...box.querySelectorAll(".cell")];
  if (dim === undefined || dim === null || !cells.length) return cells.length ? cells : [box];
  const inner = tensor.shape.slice(dim + 1).reduce((a, b) => a * b, 1);
  const long = tensor.shape[dim];
  return cells.filter((_, k) => Math.floor(((Math.floor(k / inner) % long) * n) / long) === i);
}

/** Every message of this step: who sends, and the cells that it leaves and reaches. */
function messages(player) {
  const { ranks, takes, call } = player.events[player.step];
  const lanes = [...player.stage.querySelectorAll(".lane")];
  const find = (rank, name) =>
    lanes[rank]?.querySelector(`[data-name="${CSS.escape(name)}"] .cells`);
  const held = (rank, name) => player.held(rank, player.step).get(name) ??
    (ranks[rank].given ?? []).find((x) => x.name === name);
  return ranks.flatMap((part, rank) => {
    const made = part.makes?.[0];
    const target = made && find(rank, made.name);
    if (!takes || !target || !total(part)) return [];
    if (part.moved) {
      const cells = (r) => [...find(r, made.name).querySelectorAll(".cell")]
        .filter((_, i) => part.moved.includes(i));
      return [{ sender: part.from, rank, from: cells(part.from), to: cells(rank) }];
    }
    const group = call.groups.find((members) => members.includes(rank));
    const senders = call.collective === "broadcast" ? [part.from] : group;
    return senders.filter((r) => r !== undefined && find(r, takes)).map((sender) => {
      const [from, to] = [find(sender, takes), target];
      const [mine, theirs] = [group.indexOf(rank), group.indexOf(sender)];
      const scatters = call.collective === "reduce-scatter";
      const gathers = call.collective === "all-gather";
      const leaves = sliceOf(from, held(sender, takes), scatters ? call.dim : null,
        mine, group.length);
      const reaches = sliceOf(to, made, gathers ? call.dim : null, theirs, group.length);
      return { sender, rank, from: leaves, to: reaches };
    });
  });
}

/** From one box to another, so that it crosses no numbers: below them within a lane, above
 * them to a lane beside, from edge to edge to a lane above or below. */
function curve(a, b, own) {
  const [x, y] = [a.left + a.width / 2, b.left + b.width / 2];
  if (own) {
    const [start, end] = [a.top + a.height, b.top + b.height];
    const low = Math.max(start, end) + 22;
    const aside = y - 18; // where the others do not arrive
    return { path: [[x, start], [x, low], [aside, low], [aside, end]], angle: -90 };
  }
  if (Math.abs(a.top - b.top) < 4) {
    const high = a.top - 50;
    return { path: [[x, a.top], [x, high], [y, high], [y, b.top]], angle: 90 };
  }
  const down = b.top > a.top;
  const [start, end] = down ? [a.top + a.height, b.top] : [a.top, b.top + b.height];
  const middle = (start + end) / 2;
  return { path: [[x, start], [x, middle], [y, middle], [y, end]], angle: down ? 90 : -90 };
}

/** They stay for the whole step. */
export function drawArrows(player) {
  player.stage.querySelector("svg")?.remove();
  const home = player.stage.getBoundingClientRect();
  const size = { width: home.width, height: home.height, "aria-hidden": "true" };
  const element = (name, about) => {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(about)) made.setAttribute(key, value);
    return made;
  };
  const svg = element("svg", size);
  for (const { sender, rank, from, to } of messages(player)) {
    const [a, b] = [around(from, home), around(to, home)];
    const { path, angle } = curve(a, b, sender === rank);
    const d = `M ${path[0]} C ${path.slice(1).join(" ")}`;
    const color = COLORS[sender];
    svg.append(element("path", { d, class: "back" }),
      element("path", { d, stroke: color }),
      element("path", { d: "M 1 0 L -11 -7 L -11 7 Z", fill: color, class: "tip",
        transform: `translate(${path.at(-1)}) rotate(${angle})` }));
  }
  if (svg.childElementCount) player.stage.append(svg);
}

/** What is sent flies in the color of its sender; results appear on its arrival. */
export function fly(player) {
  const all = messages(player);
  for (const message of all) {
    if (message.sender === message.rank) continue;
    for (const cell of message.to) cell.classList.add("pending");
    ghost(player, message);
  }
}

function ghost(player, { sender, from, to }) {
  const home = player.stage.getBoundingClientRect();
  const [a, b] = [around(from, home), around(to, home)];
  const ghost = make("div", { class: "ghost", "data-sender": sender });
  for (const [side, length] of Object.entries(a)) ghost.style[side] = `${length}px`;
  for (const cell of from) {
    const copy = cell.cloneNode(true);
    const place = around([cell], home);
    copy.className = "cell";
    copy.style.cssText = `position:absolute;background:${COLORS[sender]};
      left:${place.left - a.left}px;top:${place.top - a.top}px;
      width:${place.width}px;height:${place.height}px`;
    ghost.append(copy);
  }
  player.stage.append(ghost);
  const transform = `translate(${b.left - a.left}px, ${b.top - a.top}px)`;
  const frames = [{ transform: "none" }, { transform }];
  const flight = ghost.animate(frames, { duration: FLIGHT, easing: "ease-in-out" });
  flight.onfinish = () => {
    ghost.remove();
    for (const cell of to) cell.classList.remove("pending");
  };
}
