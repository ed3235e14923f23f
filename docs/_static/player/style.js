// How the player looks; --rank is the color of a lane's rank.

export const STYLE = `
  :host { display: block; container-type: inline-size; }
  * { box-sizing: border-box; }
  .player {
    color-scheme: light dark;
    --back: light-dark(#fff, #14181e); --ink: light-dark(#14181e, #f0f2f5);
    --soft: light-dark(#f3f4f6, #222831); --line: light-dark(#6b7280, #9aa4b2);
    --good: light-dark(#006644, #5fe0ae); --bad: light-dark(#b00020, #ff9a9a);
    --mono: ui-monospace, "DejaVu Sans Mono", monospace;
    background: var(--back); color: var(--ink); border: 1px solid var(--line);
    border-radius: 8px; padding: .6em .9em; line-height: 1.35;
    font-family: system-ui, "Segoe UI", "DejaVu Sans", sans-serif;
    font-size: clamp(15px, 10px + .7cqi, 22px);
  }
  .player[data-theme=light] { color-scheme: light; }
  .player[data-theme=dark] { color-scheme: dark; }
  :focus-visible { outline: 3px solid var(--ink); outline-offset: 2px; }
  .head, .controls { display: flex; flex-wrap: wrap; align-items: center; gap: .3em .6em; }
  .head { justify-content: space-between; } .head b { font-size: 1.15em; }
  .head i { font-style: normal; white-space: nowrap; }
  .head span, .shape, .chip, .legend, .keeps { font-size: .85em; }
  .controls { margin: .4em 0; }
  button {
    font: inherit; min-width: 2.6em; height: 2.2em; color: var(--ink); cursor: pointer;
    background: var(--soft); border: 1px solid var(--line); border-radius: 6px;
  }
  button.play { min-width: 4.6em; }
  button:disabled { opacity: .5; cursor: default; }
  input { flex: 1 1 6em; min-width: 5em; height: 2.2em; accent-color: var(--ink); }
  .count { min-width: 4.5em; text-align: right; font-variant-numeric: tabular-nums; }
  .caption { font-size: 1.2em; min-height: 2.9em; margin: .2em 0 .4em; max-width: 68em; }
  .badge {
    font-size: .85em; font-weight: 700; padding: .1em .6em; margin-right: .5em;
    border: 2px solid var(--ink); border-radius: 1em; display: inline-block;
  }
  .badge.moves { background: var(--ink); color: var(--back); }
  .stage { position: relative; cursor: pointer; }
  .player { --cell-max: 48; --cell: 40px; }
  .ring { --cell-max: 60; } .letters { --cell-max: 36; } /* a letter needs less room */
  :is(.ring, .mesh) .stage {
    display: grid; grid-template-columns: 1fr 1fr; gap: 2.2em 3em;
  }
  :is(.ring, .mesh) .lane { grid-row: var(--row); grid-column: var(--side); }
  .wide .lane { grid-template-columns: minmax(0, 1fr); gap: .2em; align-content: start; }
  .wide .chip { display: inline; margin-left: .6em; }
  .wide .stage { gap: 1.6em 2em; }
  .lane {
    display: grid; grid-template-columns: 8.5em 1fr; gap: .6em; align-items: center;
    border-left: 10px solid var(--rank); background: var(--soft); border-radius: 4px;
    margin: .4em 0; padding: .35em .6em; min-height: 4.6em;
  }
  .who { font-weight: 700; }
  .at { font-weight: 400; font-size: .85em; margin-left: .6em; }
  .chip { display: block; font-weight: 400; line-height: 1.25; }
  .boxes {
    display: grid; align-items: start; align-self: start; /* no box moves for a higher one */
    grid-template-columns: var(--closed) repeat(var(--halves), calc(var(--cell) / 2));
    min-width: 0; overflow-x: auto; padding: 4px;
  }
  .stage svg { position: absolute; inset: 0; pointer-events: none; z-index: 1; overflow: visible; }
  svg path:not(.tip) { fill: none; stroke-width: 4; }
  svg path.back { stroke: #000; stroke-width: 7; }
  svg .tip { stroke: #000; stroke-width: 1.5; }
  .box { margin: 2px 0; padding: .15em .2em; border-radius: 5px; justify-self: start; }
  .box:not(.closed) { min-width: calc(2.4 * var(--cell)); }
  .boxes > div > .box { width: max-content; }
  .player:not(.slide) .boxes > div > .box + .box { margin-top: 6px; }
  .break { height: 0; }
  figcaption {
    font: 700 .85em/1.2 var(--mono); overflow-wrap: anywhere; margin-bottom: .15em;
    width: 0; min-width: 100%;
  }
  .brief figcaption { width: min-content; overflow-wrap: break-word; }
  .mesh figcaption { font-size: .74em; line-height: 1.35; }
  .mesh .box:not(.closed) { min-width: calc(2.2 * var(--cell)); }
  .shape { font-weight: 400; line-height: 1.35; white-space: nowrap; display: block; }
  .cells {
    display: grid; width: max-content; border: 1.5px solid #000; color: #000;
  }
  .cell {
    width: var(--cell); padding: .1em 0; text-align: center; overflow: hidden;
    font-size: clamp(9px, var(--cell) * min(.42, 1.5 / var(--letters)), 24px);
    line-height: 1.5; align-content: center;
    border: .5px solid #0006; font-variant-numeric: tabular-nums;
  }
  .cell.letter { font-family: var(--mono); font-size: clamp(12px, var(--cell) * .5, 24px); }
  .cell.striped { font-size: clamp(11px, var(--cell) * .42, 24px); padding-bottom: 1.3em; }
  .cell small { display: block; height: 1.1em; font-size: clamp(9px, var(--cell) * .28, 18px);
    line-height: 1.1; }
  .cell.moved.striped {
    font-size: clamp(9px, var(--cell) * min(.42, 1.15 / var(--letters)), 24px);
  }
  .cell.leaves { outline: 3px dotted #000; outline-offset: -3px; }
  .cell.marked { box-shadow: inset 0 0 0 3px #000; }
  .cell.beside { /* a border between two parts takes room */
    font-size: clamp(9px, var(--cell) * min(.4, 1.4 / var(--letters)), 22px);
  }
  .ring .cell.marked { box-shadow: none; background: #fff; }
  .banded { padding-left: .7rem; }
  .cell.pending { color: transparent; background: var(--soft) !important; }
  .column { font-size: .8em; background: #fff; display: grid; place-content: center; }
  .cell.below { border-top: 3px solid #000; }
  .cell.beside { border-left: 3px solid #000; letter-spacing: -.02em; }
  .cell.moved { outline: 3px solid #000; outline-offset: -3px; font-weight: 700; }
  .closed .cells { padding: 0 .5em; font-size: .8em; white-space: nowrap; }
  .closed figcaption { font-size: .72em; white-space: nowrap; width: auto; min-width: 0; }
  .closed .shape { display: none; }
  .term .cells { border: 3px dashed #000; }
  .new { outline: 2.5px solid var(--ink); outline-offset: -1px; }
  .source { opacity: .8; }
  .mark { font-size: .85em; font-weight: 700; display: block; width: 0; min-width: 100%; }
  .mark.good { color: var(--good); } .mark.bad { color: var(--bad); }
  .wrong .cells { outline: 4px solid var(--bad); margin-block: 4px; }
  .ghost { position: absolute; z-index: 2; pointer-events: none; }
  .legend { display: flex; flex-wrap: wrap; gap: .2em 1.1em; margin: .3em 0; }
  .legend :is(.backward, .weight) { background-color: #fff; }
  .legend .weight { background-color: #888; }
  .legend i {
    display: inline-block; width: 1.5em; height: 1em; vertical-align: -.12em;
    margin-right: .35em; border: 1.5px solid var(--ink); background-color: var(--back);
  }
  .totals { overflow-x: auto; }
  table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92em; }
  th, td { padding: .08em .8em .08em 0; text-align: right; }
  th:first-child { text-align: left; }
  tbody th { font-weight: 400; white-space: nowrap; }
  td:nth-last-child(2) { padding-left: 1em; white-space: nowrap; } td span { white-space: nowrap; }
  thead th { vertical-align: bottom; } thead th:last-child { min-width: 9em; }
  td.now { font-weight: 700; text-decoration: underline; }
  td.off { font-weight: 700; color: var(--bad); }
  .chart { overflow-x: auto; padding: 3px; } .keeps i { font-style: normal; }
  .track { display: grid; grid-template-columns: 16em minmax(520px, 1fr); }
  .track { --gap: .7em; }
  .track:not(.over) { height: calc(var(--row) - var(--gap)); margin-bottom: var(--gap); }
  .bars { position: relative; height: 100%; background: var(--soft); overflow: hidden; }
  .bar {
    position: absolute; top: 0; bottom: 0; border: 1px solid #000; color: #000;
    font-size: .85em; line-height: 2; text-align: center; overflow: hidden;
  }
  .backward { background-image: repeating-linear-gradient(45deg, #0006 0 2px, #0000 2px 7px); }
  .bar b { background-color: inherit; padding: 0 .15em; position: relative; z-index: 2; }
  .bar.narrow { border-width: 0 0 0 1px; }
  .bar.new { outline-width: 2px; outline-offset: -2px; }
  .weight { background-image: repeating-linear-gradient(-45deg, #fffa 0 3px, #0000 3px 6px); }
  .chart { position: relative; --row: 2.45em; }
  .over { position: absolute; inset: 3px 3px auto; pointer-events: none; z-index: 1; }
  .messages { position: relative; }
  .message {
    position: absolute; top: calc(var(--top) * var(--row) - var(--gap) - 3px); width: 5px;
    height: calc(var(--rows) * var(--row) + var(--gap) + 6px); margin-left: -7px;
    background: var(--rank); border: 1px solid #000;
  }
  .message::after {
    content: ""; position: absolute; left: -4px; width: 11px; height: 8px; background: var(--ink);
    clip-path: polygon(0 0, 100% 0, 50% 100%); bottom: -3px;
  }
  .message.right { margin-left: 1px; } /* next to a message at the same time */
  .message.up::after { bottom: auto; top: -3px; transform: scaleY(-1); }
  .veil {
    position: absolute; top: 0; bottom: 0; right: 0; background: var(--soft);
    border-left: 3px solid var(--ink);
  }
  .axis { position: relative; height: 1.3em; font-size: .85em; white-space: nowrap; }
  .axis span { position: absolute; transform: translateX(-50%); }
  .axis :first-child { transform: none; } .axis :last-child { transform: translateX(-100%); }
  .slide.attention .cell { font-size: calc(var(--cell) * .3); }
  .slide.attention .names figcaption { font-size: .82em; }
  .player.slide { --cell-max: 78; --cell-min: 72; border: 0; padding: 0; font-size: 21px; }
  .player.slide.attention { --cell-max: 116; }
  .slide :is(.head, .controls, .totals, .rule) { display: none; }
  .slide .caption { font-size: 1.25em; min-height: 2.7em; }
  .slide .chart { --row: 2.05em; } .slide .track { --gap: .3em; }
  .slide .bar { font-size: 1.04em; line-height: 1.6; }
  .slide .cell.beside { font-size: calc(var(--cell) * min(.4, 1.5 / var(--letters))); }
  /* Only what is new, or leaves, has its numbers. */
  .slide .cell { line-height: 1.2; } .slide .cell small { font-size: 22px; }
  .slide .closed .cells { font-size: 22px; line-height: 1.2; }
  .brief .cell { line-height: 1.25; padding: 0; }
  .brief .cell.striped { padding-bottom: 1.3em; }
  .slide .lane { grid-template-columns: 6.6em 1fr; padding-block: .2em; min-height: 0; }
  .brief .boxes { display: flex; flex-wrap: wrap; column-gap: .4em; }
  .brief .boxes > :is(.new, :has(> .new)) { order: 3; } .brief .boxes > * { order: 2; }
  .brief .boxes > .names { order: 0; } .brief .names .box { min-width: 0; }
  .brief .names .box { display: flex; gap: .3em; align-items: center; padding: 0; }
  .brief .names .cells { font-size: 0; width: 1.6rem; height: .9rem; overflow: hidden; }
  .brief .names :is(.cell, .column, .shape, .mark) { display: none; }
  .brief .names :is(.cells, figcaption) { flex: none; } .brief .names .cells { order: -1; }
  .brief .names figcaption { font: 400 .75em/1.2 var(--mono); width: auto; min-width: 0;
    white-space: nowrap; margin: 0; }
  .brief:not(.slide, .paper, .chosen) .lane { grid-template-columns: minmax(0, 1fr); gap: .2em;
    align-content: start; }
  .brief:not(.slide, .paper, .chosen) .chip { display: inline; margin-left: .6em; }
  .slide .shape { display: inline-block; font-size: 1.15em; }
  .slide .closed .shape { display: none; }
  .paper { font-size: 15px; color-scheme: light !important; print-color-adjust: exact; }
  .printed { display: none; break-inside: avoid; }
  @media print { .player:has(.printed) { break-inside: auto; } .head { break-after: avoid; } }
  @media print {
    .controls { display: none; } .printed { display: block; }
    .player:has(.printed) > :is(.caption, .stage) { display: none; }
  }
  @container (min-width: 601px) { /* where something is sent, for the arrows */
    .brief:not(.paper) .lane:has(.chip) .boxes { column-gap: 1.5em; }
    .slide.brief .lane:has(.chip) .boxes { column-gap: 1em; }
  }
  @container (min-width: 1101px) { /* what is above the caption is one line */
    .player:not(.slide) { display: grid; grid-template-columns: fit-content(50%) 1fr; gap: 0 2em; }
    .player:not(.slide) > * { grid-column: 1 / -1; min-width: 0; }
    .player:not(.slide) > .head { grid-column: 1; display: block; line-height: 1.2; }
    .player:not(.slide) > .controls { grid-column: 2; flex-wrap: nowrap; }
    .head :is(b, span) { display: block; }
  }
  @container (max-width: 1100px) {
    .wide .stage { display: block; } .wide .lane { margin: 1em 0; }
    .lane { grid-template-columns: minmax(0, 1fr); gap: .2em; padding-inline: .35em;
      align-content: start; }
    .chip { display: inline; margin-left: .6em; }
  }
  @container (max-width: 1100px) { /* the bytes: a line per row */
    .player:not(.slide) td { text-align: left; }
    thead { display: none; } table, tbody { display: block; } td { padding: 0; }
    tr { display: flex; flex-wrap: wrap; gap: 0 1em; margin-bottom: .3em; }
    tbody th { flex: 0 0 100%; font-weight: 700; white-space: normal; }
    td:nth-last-child(2) { padding-left: 0; white-space: normal; }
    tbody th::after { content: ": payload so far, bytes"; font-weight: 400; }
    td::before { content: attr(data-head) ": "; font-weight: 400; }
  }
  @container (max-width: 900px) { /* labels of bars are short */
    .chart { --row: 3.3em; } .bar { line-height: 3; }
    .track { grid-template-columns: 5.6em 640px; width: max-content; }
    .track > :first-child { position: sticky; left: -3px; background: var(--back); z-index: 3; }
    .over > :first-child { visibility: hidden; }
    .track > :first-child { padding-left: 3px; margin-left: -3px; }
    .keeps { display: block; line-height: 1; } .keeps i { display: none; }
  }
  @container (max-width: 600px) {
    .player { padding: .5em .4em; }
    .lane { border-left-width: 6px; padding: .4em .4em .4em 1em; } /* arrows pass there */
    .boxes > div:not(.aside, .names) { display: contents; } /* each box has its turn */
    .boxes > *, .boxes > div > .box { order: 2; }
    .player:not(.slide) .boxes > div > .box + .box { margin-top: 2px; }
    .boxes > .aside, .boxes > div > .aside { order: 0; }
    .boxes > :is(.new, .kept), .boxes > div > :is(.new, .kept) { order: 3; }
    div.aside { display: flex; flex-wrap: wrap; gap: .3em 1em; }
    .boxes > .break { order: 1; flex: 0 0 100%; }
    .aside .cells { font-size: 0; width: 1.6rem; height: .9rem; overflow: hidden; }
    .aside .cell, .aside .column { display: none; } .aside .shape { display: none; }
    .aside figcaption { font-size: .75em; font-weight: 400; }
    .aside figcaption { width: auto; min-width: 0; white-space: nowrap; }
    .caption { font-size: 1.1em; min-height: 6.8em; }
    .boxes { display: flex; flex-wrap: wrap; gap: .2em .4em; }
    :is(.ring, .mesh) .stage { display: block; }
    .count { min-width: 0; }
  }
`;
