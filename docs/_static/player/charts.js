// Schedules in time: a bar for each forward and backward pass on each stage.

import { COLORS, make, percent, up_to } from "./parts.js";

/** Who computed what when: all until the next step's time, a chart for each run. */
export function charts(player, event) {
  const { ranks, time } = player.recording;
  const spans = player.events.flatMap((e, i) => e.ranks.flatMap((part, rank) =>
    (part.spans ?? []).map((span) => ({ ...span, rank, i }))));
  const length = Math.max(...spans.map((span) => span.end));
  const until = player.events[player.step + 1]?.time ?? length;
  const bar = ({ what, microbatch, start, end, rank, i }) => {
    const width = Math.min(end, until) - start; // its number is in what is shown of it
    const place = `left:${percent(start / length)};width:${percent(width / length)}`;
    const kind = `bar ${what}${i === player.step ? " new" : ""}`;
    const style = `${place};background-color:${COLORS[rank]}`;
    return make("span", { class: kind, style }, make("b", {}, microbatch + 1));
  };
  /** Micro-batches that a stage holds: forward begun, backward not over. */
  const kept = (run, rank) => {
    const of_stage = spans.filter((span) => span.run === run && span.rank === rank);
    const begun = of_stage.filter(({ what, i }) => what === "forward" && i <= player.step);
    const over = of_stage.filter(({ what, end }) => what === "backward" && end <= until);
    return begun.length - over.length;
  };
  const tick = (i) => make("span", { style: `left:${percent(i / 4)}` },
    `${Math.round((length * i) / 4)} ${time.unit}`);
  return time.runs.map((run) => {
    const begun = spans.filter((span) => span.run === run && span.i <= player.step);
    const tracks = up_to(ranks).map((rank) => {
      const bars = begun.filter((span) => span.rank === rank).map(bar);
      const veil = make("span", { class: "veil", style: `left:${percent(until / length)}` });
      const keeps = event.most ? ` at most ${event.kept[run][rank]}` : ` keeps ${kept(run, rank)}`;
      const words = make("span", { class: "keeps" }, keeps, make("i", {}, " micro-batches"));
      return make("div", { class: "track", style: `--rank:${COLORS[rank]}` },
        make("span", {}, make("b", {}, `stage ${rank}`), words),
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
