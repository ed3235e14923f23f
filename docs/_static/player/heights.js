// While one steps, nothing changes its height: neither a lane nor the words around them.

import { table } from "./ledger.js";
import { up_to } from "./parts.js";

/** On paper each step is as high as it is. */
const changes = ({ box }) => box.classList.contains("paper");

/** Not rounded; on a slide, which reveal.js scales, in its own pixels. */
const tall = (element, { slide }) =>
  (slide ? element.offsetHeight : element.getBoundingClientRect().height);

/** The caption, and the table of bytes, as high as their highest step. */
export function keepWords(player) {
  const { events, step, caption, totals, box } = player;
  const [high, elements] = [[0, 0], [caption, totals]];
  for (const element of elements) element.style.minHeight = "";
  if (changes(player)) return;
  if (player.words_measured?.width !== box.clientWidth) {
    for (const each of player.stops()) {
      player.step = each; // the table is that of the player's step
      caption.replaceChildren(...player.words(events[each]));
      totals.replaceChildren(table(player));
      elements.forEach((element, i) => { high[i] = Math.max(high[i], tall(element, player)); });
    }
    player.step = step;
    caption.replaceChildren(...player.words(events[step]));
    totals.replaceChildren(table(player));
    player.words_measured = { width: box.clientWidth, high };
  }
  elements.forEach((element, i) => {
    element.style.minHeight = `${player.words_measured.high[i]}px`;
  });
}

/** Each lane, as high as its highest step. */
export function keepLanes(player) {
  const { step, stage, box } = player;
  if (changes(player)) return;
  const all = () => up_to(player.recording.ranks).map((rank) => player.lane(rank));
  const cell = box.style.getPropertyValue("--cell");
  const size = `${box.clientWidth} ${cell} ${player.brief}`;
  if (player.lanes_measured?.size !== size) {
    const high = all().map(() => 0);
    for (const each of player.stops()) {
      player.step = each;
      const lanes = all();
      stage.replaceChildren(...lanes);
      lanes.forEach((lane, i) => { high[i] = Math.max(high[i], tall(lane, player)); });
    }
    player.step = step;
    stage.replaceChildren(...all());
    player.lanes_measured = { size, high };
  }
  [...stage.querySelectorAll(".lane")].forEach((lane, rank) => {
    lane.style.minHeight = `${player.lanes_measured.high[rank]}px`;
  });
}

/** On a slide that has no room for the highest: each lane is as high as it is now. */
export function freeLanes({ stage }) {
  for (const lane of stage.querySelectorAll(".lane")) lane.style.minHeight = "";
}
