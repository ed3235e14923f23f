// The search puts first the pages that answer: what is asked for → pages, the best first.
const ANSWERS = [
  [/grad/, /wrong|differ|incorrect|factor/, ["bugs", "audit", "notebooks/12_wrong_gradients"]],
  [/loss/, /wrong|differ|drift|diverge/, ["bugs", "notebooks/12_wrong_gradients", "audit"]],
  [/hang|stuck|timeout|deadlock/, /./, ["bugs", "run", "lessons/00_collectives"]],
  [/ring/, /attention/, ["notebooks/11_context_parallel", "lessons/11_context_parallel"]],
  [/memory|oom/, /out of|oom/, ["mesh", "notebooks/07_plan_a_run", "run"]],
];

// Constants of Sphinx's own scorer.
var Scorer = {
  objNameMatch: 11, objPartialMatch: 6, objPrio: { 0: 15, 1: 5, 2: -5 }, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
  score: ([page, , anchor, , score]) => {
    const asked = new URLSearchParams(location.search).get("q").toLowerCase();
    for (const [first, second, pages] of ANSWERS)
      if (first.test(asked) && second.test(asked) && pages.includes(page) && !anchor)
        return score + 100 - pages.indexOf(page);
    return score;
  },
};
