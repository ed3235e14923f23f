// Schedules in time: a bar for each forward and backward pass on each stage.

import { COLORS, make, pale, percent, up_to } from "./parts.js";

const NUMBER = 0.018; // of the time that is shown: a narrower bar has no room for its number

/** Who computed what when: all until the next step's time, a chart for each run. */
export function charts(player, event) {
  const { ranks, time } = player.recording;
  const spans = player.events.flatMap((e, i) => e.ranks.flatMap((part, rank) =>
    (part.spans ?? []).map((span) => ({ ...span, rank, i }))));
  const length = Math.max(...spans.map((span) => span.end));
  const until = player.events[player.step + 1]?.time ?? length;
  const bar = ({ what, microbatch, chunk, start, end, rank, i }) => {
    const width = Math.min(end, until) - start; // its number is in what is shown of it
    const place = `left:${percent(start / length)};width:${percent(width / length)}`;
    const narrow = width < NUMBER * length;
    const kind = `bar ${what}${narrow ? " narrow" : i === player.step ? " new" : ""}`;
    const color = chunk ? pale(COLORS[rank]) : COLORS[rank];
    const style = `${place};background-color:${color}`;
    const number = narrow ? "" : make("b", {}, microbatch + 1);
    return make("span", { class: kind, style }, number);
  };
  /** Micro-batches that a stage holds at the caption's time: forward begun; backward, or the
   * weight pass if there is one, not over. A chunk of a stage holds a part of them. */
  const kept = (run, rank) => {
    const of_stage = spans.filter((span) => span.run === run && span.rank === rank);
    const last = of_stage.some(({ what }) => what === "weight") ? "weight" : "backward";
    const middle = (event.time + until) / 2;
    const begun = of_stage.filter(({ what, start, i }) =>
      what === "forward" && start <= middle && i <= player.step);
    const over = of_stage.filter(({ what, end }) => what === last && end <= middle);
    return (begun.length - over.length) / (time.chunks?.[run] ?? 1);
  };
  /** An arrow, when it is sent, from the row of the sender to that of the receiver. Of two
   * at nearly the same time, up and down, the first one is at the left. */
  const message = ({ rank, to, at }, _, all) => {
    const isUp = (x) => x.to < x.rank;
    const other = all.find((x) => isUp(x) !== isUp({ rank, to }) &&
      Math.abs(x.at - at) < NUMBER * length);
    const isRight = other && other.at !== at ? other.at < at : to < rank;
    const [top, rows] = [Math.min(rank, to) + 1, Math.abs(rank - to) - 1];
    const style = `left:${percent(at / length)};--rank:${COLORS[rank]};--top:${top};` +
      `--rows:${rows}`;
    const kind = `message ${to > rank ? "down" : "up"} ${isRight ? "right" : ""}`;
    const about = { class: kind, style };
    return make("span", { ...about, "data-from": rank, "data-to": to });
  };
  const tick = (i) => make("span", { style: `left:${percent(i / 4)}` },
    `${Math.round((length * i) / 4)} ${time.unit}`);
  return time.runs.map((run) => {
    const begun = spans.filter((span) => span.run === run && span.i <= player.step);
    const tracks = up_to(ranks).map((rank) => {
      const bars = begun.filter((span) => span.rank === rank).map(bar);
      const veil = make("span", { class: "veil", style: `left:${percent(until / length)}` });
      const n = event.most ? event.kept[run][rank] : kept(run, rank);
      const keeps = ` ${event.most ? "at most" : "keeps"} ${n}`;
      const unit = n === 1 ? " micro-batch" : " micro-batches";
      const words = make("span", { class: "keeps" }, keeps, make("i", {}, unit));
      return make("div", { class: "track", style: `--rank:${COLORS[rank]}` },
        make("span", {}, make("b", {}, `rank ${rank}`), words),
        make("div", { class: "bars", "aria-hidden": "true" }, ...bars, veil));
    });
    const axis = make("div", { class: "axis", "aria-hidden": "true" }, ...up_to(5).map(tick));
    const about = { class: "chart", tabindex: 0, role: "group", "aria-label": `${run} in time` };
    const foot = make("div", { class: "track" }, make("span"), axis);
    const sent = event.ranks.flatMap(({ messages = [] }, rank) =>
      messages.filter((x) => x.run === run).map(({ to, at }) => ({ rank, to, at })));
    const over = make("div", { class: "track over", "aria-hidden": "true" },
      make("span"), make("div", { class: "messages" }, ...sent.map(message)));
    const chart = make("div", about, ...tracks, foot, over);
    requestAnimationFrame(() => {
      chart.scrollLeft = (chart.scrollWidth * until) / length - chart.clientWidth / 2;
    });
    return make("div", {}, make("b", {}, run), chart);
  });
}
