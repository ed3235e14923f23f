// The table below the lanes: bytes, counted and by formula.

import { commas, make, sum, up_to } from "./parts.js";

/** Payload so far, as each rank's counter had it, the lesson's formula, and what ranks
 * of a ring have sent for it. At the end a number that is not the formula's is marked. */
export function table(player) {
  const { ledger, ranks } = player.recording;
  const events = player.events.slice(0, player.step + 1);
  const ended = events.length === player.events.length;
  const head = (text) => make("th", { scope: "col" }, text);
  const names = up_to(ranks).map((rank) => `rank\u00a0${rank}`);
  const words = ["in total, by formula", "sent so far: mean per rank"];
  const rows = [...new Set(ledger.map((entry) => entry.row))].map((row) => {
    const mine = ledger.filter((entry) => entry.row === row);
    const cells = up_to(ranks).map((rank) => {
      const bytes = events.map((event) => event.ranks[rank].bytes?.[row] ?? 0);
      const entry = mine.find((x) => x.rank === rank);
      const off = ended && entry && entry.predicted !== sum(bytes);
      const kind = off ? "off" : bytes.at(-1) ? "now" : "";
      const payload = commas(sum(bytes));
      const about = { class: kind, "data-rank": rank, "data-row": row, "data-head": names[rank] };
      about["data-bytes"] = sum(bytes);
      return make("td", about, off ? `✗ ${payload} of ${commas(entry.predicted)}` : payload);
    });
    const sent = events.flatMap((event) => event.ranks.map(({ bytes, sends }) =>
      (bytes?.[row] ? sends ?? bytes[row] : 0)));
    const formulas = mine.map(({ formula, predicted }) =>
      (formula === commas(predicted) ? formula : `${formula}: ${commas(predicted)}`));
    const pieces = [...new Set(formulas)].flatMap((text, i) =>
      [...(i ? [make("br"), "or "] : []), make("span", {}, text)]);
    return make("tr", {}, make("th", { scope: "row" }, row), ...cells,
      make("td", { "data-head": words[0] }, ...pieces),
      make("td", { class: "sent", "data-head": words[1] }, commas(sum(sent) / ranks)));
  });
  const rule = player.recording.layout === "rows" ? "; of rows: to other ranks" : "";
  const heads = [`payload so far, bytes${rule}`, ...names, ...words];
  const head_row = make("thead", {}, make("tr", {}, ...heads.map(head)));
  return make("table", {}, head_row, make("tbody", {}, ...rows));
}
