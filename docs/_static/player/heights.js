// While one steps, nothing changes its height: neither a lane nor the words around them.

import { table } from "./ledger.js";
import { up_to } from "./parts.js";

/** On a slide and on paper each step is as high as it is. */
const changes = ({ slide, box }) => slide || box.classList.contains("paper");

const tall = (element) => element.getBoundingClientRect().height; // not rounded

/** The caption, and the table of bytes, as high as their highest step. */
export function keepWords(player) {
  const { events, step, caption, totals, box } = player;
  const [high, elements] = [[0, 0], [caption, totals]];
  for (const element of elements) element.style.minHeight = "";
  if (changes(player)) return;
  if (player.words_measured?.width !== box.clientWidth) {
    events.forEach((event, each) => {
      player.step = each; // the table is that of the player's step
      caption.replaceChildren(...player.words(event));
      totals.replaceChildren(table(player));
      elements.forEach((element, i) => { high[i] = Math.max(high[i], tall(element)); });
    });
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
  const { events, step, stage, box } = player;
  if (changes(player)) return;
  const all = () => up_to(player.recording.ranks).map((rank) => player.lane(rank));
  if (player.lanes_measured?.width !== box.clientWidth) {
    const high = all().map(() => 0);
    events.forEach((_, each) => {
      player.step = each;
      const lanes = all();
      stage.replaceChildren(...lanes);
      lanes.forEach((lane, i) => { high[i] = Math.max(high[i], tall(lane)); });
    });
    player.step = step;
    stage.replaceChildren(...all());
    player.lanes_measured = { width: box.clientWidth, high };
  }
  [...stage.querySelectorAll(".lane")].forEach((lane, rank) => {
    lane.style.minHeight = `${player.lanes_measured.high[rank]}px`;
  });
}
