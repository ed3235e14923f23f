// On slides, where numbers have to be large: what neither is new nor leaves is a name.

import { sum, up_to } from "./parts.js";

const SWATCH = 2.6; // em: the color next to a name, and what is between boxes
const LETTER = 0.46; // em: of such a name
const GAP = 0.4; // em: between boxes,
const ARROWS = 1.5; // and where something is sent, see column-gap in style.js

/** Half cells of the boxes with numbers in a lane, em of gaps between them, and letters
 * of its longest name. */
function widths(player, step, lane) {
  const at = player.places.steps[step];
  const names = (parent) => [...parent.querySelectorAll(".box")].map((box) => box.dataset.name);
  const columns = [...lane.querySelectorAll(".boxes > :not(.names, .break)")];
  const wide = columns.map((column) => {
    const inside = column.dataset.name ? [column.dataset.name] : names(column);
    return Math.max(...inside.map((name) => at.get(name)?.wide ?? 0));
  });
  const aside = lane.querySelector(".names");
  const letters = aside ? Math.max(...names(aside).map((x) => x.length)) : 0;
  const gap = lane.querySelector(".chip") ? ARROWS : GAP;
  return { halves: sum(wide), gaps: (wide.length - 1) * gap, letters };
}

/** How wide a cell can be, so that the widest of the steps to stop at is one line. */
export function cellOfBrief(player, room, font) {
  if (!player.widths) {
    const { step } = player;
    player.widths = player.stops().flatMap((each) => {
      player.step = each;
      return up_to(player.recording.ranks).map((r) => widths(player, each, player.lane(r)));
    });
    player.step = step;
  }
  const sizes = player.widths.filter(({ halves }) => halves).map(({ halves, gaps, letters }) => {
    const names = letters ? (letters * LETTER + SWATCH) * font : 0;
    return (2 * (room - names - gaps * font)) / halves;
  });
  return Math.min(...sizes);
}
