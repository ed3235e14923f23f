// What is sent in a step: arrows that stay, and a flight from sender to receiver.

import { COLORS, around, make, sum, total } from "./parts.js";
import { TIP, findWay, pathThrough, straight, tracksOf } from "./routes.js";

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

/** The rows of a box from one row up to another. */
function rowsOf(box, { shape }, [begin, end]) {
  const long = shape.slice(1).reduce((a, b) => a * b, 1);
  return [...box.querySelectorAll(".cell")].slice(begin * long, end * long);
}

/** Where part i is, if parts of these sizes are one after the other. */
function partOf(sizes, i) {
  const begin = sum(sizes.slice(0, i));
  return [begin, begin + sizes[i]];
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
      const cells = (r, name) => [...find(r, name).querySelectorAll(".cell")]
        .filter((_, i) => part.moved.includes(i));
      const from = cells(part.from, takes);
      return [{ sender: part.from, rank, from, to: cells(rank, made.name) }];
    }
    const group = call.groups.find((members) => members.includes(rank));
    const senders = call.collective === "broadcast" ? [part.from] : group;
    return senders.filter((r) => r !== undefined && find(r, takes)).map((sender) => {
      const [from, to] = [find(sender, takes), target];
      const [mine, theirs] = [group.indexOf(rank), group.indexOf(sender)];
      if (call.uneven) { // each sender says how many rows it sends to whom
        const leaves = partOf(ranks[sender].splits, mine);
        const arrives = partOf(group.map((r) => ranks[r].splits[mine]), theirs);
        return { sender, rank, from: rowsOf(from, held(sender, takes), leaves),
          to: rowsOf(to, made, arrives) };
      }
      const scatters = ["reduce-scatter", "all-to-all"].includes(call.collective);
      const gathers = ["all-gather", "all-to-all"].includes(call.collective);
      const leaves = sliceOf(from, held(sender, takes), scatters ? call.dim : null,
        mine, group.length);
      const reaches = sliceOf(to, made, gathers ? call.dim : null, theirs, group.length);
      return { sender, rank, from: leaves, to: reaches };
    }).filter(({ from }) => from.length);
  });
}

/** The stage as an origin. reveal.js scales a slide: on it a pixel is not one of the screen. */
function originOf({ stage }) {
  const { left, top, width } = stage.getBoundingClientRect();
  return { left, top, scale: width / stage.offsetWidth || 1 };
}

/** The rectangle of some cells of a tensor, with what is at the left of its numbers. */
function withLeft(cells, home) {
  const rect = around(cells, home);
  const tensor = cells[0].closest(".cells");
  const numbers = around([...tensor.querySelectorAll(".cell"), ...cells], home);
  if (rect.left > numbers.left + 1) return rect;
  const { left } = around([tensor], home);
  return { ...rect, left, width: rect.width + rect.left - left };
}

/** What an arrow may cross, but should not cover: lines around tensors, colors of lanes. */
function lines(stage, home) {
  const lanes = [...stage.querySelectorAll(".lane")].map((lane) =>
    ({ ...around([lane], home), width: lane.clientLeft }));
  return [...stage.querySelectorAll(".new, .term .cells")].map((x) => around([x], home))
    .flatMap(({ left, top, width, height }) => [
      { left, top, width, height: 0 }, { left, top: top + height, width, height: 0 },
      { left, top, width: 0, height }, { left: left + width, top, width: 0, height }])
    .concat(lanes);
}

/** Everything on the stage that is to be read. */
function readable(stage, home) {
  const all = ".cell, .column, .banded, .closed .cells, .aside .cells";
  const boxes = [...stage.querySelectorAll(all)]
    .filter((x) => x.getClientRects().length).map((x) => around([x], home));
  const words = ".who, .at, .chip, figcaption, .shape, .mark";
  for (const element of stage.querySelectorAll(words)) {
    const text = document.createRange();
    for (const node of element.childNodes) {
      if (node.nodeType !== Node.TEXT_NODE) continue;
      text.selectNode(node);
      for (const line of text.getClientRects())
        boxes.push(around([{ getBoundingClientRect: () => line }], home));
    }
  }
  return boxes;
}

/** They stay for the whole step. */
export function drawArrows(player) {
  const { stage } = player;
  stage.querySelector("svg")?.remove();
  const all = messages(player);
  if (!all.length) return;
  const home = originOf(player);
  const size = { width: stage.offsetWidth, height: stage.offsetHeight };
  const element = (name, about) => {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(about)) made.setAttribute(key, value);
    return made;
  };
  const svg = element("svg", { ...size, "aria-hidden": "true" });
  const tracks = tracksOf(size, readable(stage, home), lines(stage, home));
  const which = (message, key) => {
    const same = all.filter((other) => other[key] === message[key]);
    return [same.indexOf(message), same.length];
  };
  for (const message of all) {
    const { sender, rank, from, to } = message;
    const [a, b] = [withLeft(from, home), withLeft(to, home)];
    const way = findWay(tracks, a, b, which(message, "sender"), which(message, "rank")) ??
      straight(a, b);
    const d = pathThrough(way.points);
    const color = COLORS[sender];
    const tip = `M 0 0 L -${TIP} -7 L -${TIP} 7 Z`;
    const transform = `translate(${way.points.at(-1)}) rotate(${way.angle})`;
    svg.append(element("path", { d, class: "back" }),
      element("path", { d, stroke: color }),
      element("path", { d: tip, fill: color, class: "tip", transform, "data-from": sender,
        "data-to": rank, "data-cells": `${from.length} ${to.length}` }));
  }
  stage.append(svg);
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
  const home = originOf(player);
  const [a, b] = [around(from, home), around(to, home)];
  const ghost = make("div", { class: "ghost", "data-sender": sender });
  for (const [side, length] of Object.entries(a)) ghost.style[side] = `${length}px`;
  for (const cell of from) {
    const copy = cell.cloneNode(true);
    const place = around([cell], home);
    copy.className = "cell";
    const { fontSize } = getComputedStyle(cell); // it depends on the other numbers
    copy.style.cssText = `position:absolute;background:${COLORS[sender]};font-size:${fontSize};
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
