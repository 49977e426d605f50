// What the race shows: who was how much faster, and whether the texts agree.

import { element } from "./lane.js";
import { parting } from "./run.js";

const byId = (id) => document.getElementById(id);
const list = (words) => (words.length > 1 ? `${words.slice(0, -1).join(", ")} and ${words.at(-1)}` : words[0]);

export class Verdict {
  constructor() {
    this.bars = new Map();
  }

  reset(lanes) {
    this.bars.clear();
    byId("times").replaceChildren(
      ...lanes.map((lane) => {
        const first = element("i", { class: "first" });
        const rest = element("i", { class: "rest" });
        const time = element("span", { class: "time" });
        this.bars.set(lane, { first, rest, time });
        return element("div", { class: "row" }, element("span", { class: "who" }, lane.title), element("span", { class: "track" }, first, rest), time);
      }),
      element("span", { class: "key" }, "muted: until the first token"),
    );
    for (const id of ["speedup", "per-step", "agree"]) byId(id).textContent = "–";
    delete byId("verdict").dataset.agree;
    byId("summary").textContent = "";
  }

  // The bars, to one scale; the shaded part of each is the time until its first token.
  draw(lanes, now) {
    const longest = Math.max(0.001, ...lanes.map((lane) => lane.run.seconds(now)));
    for (const lane of lanes) {
      const { first, rest, time } = this.bars.get(lane);
      const total = lane.run.seconds(now);
      const start = Math.min(lane.run.untilFirst ?? total, total);
      first.style.width = `${(100 * start) / longest}%`;
      rest.style.width = `${(100 * (total - start)) / longest}%`;
      time.textContent = lane.run.began === null ? "" : `${total.toFixed(2)} s`;
    }
  }

  // Fills in the figures when all lanes are through, and returns the sentence that sums them up.
  conclude(plain, others, lossless) {
    const done = others.filter((lane) => lane.done);
    const best = done.reduce((one, lane) => (!one || speed(lane) > speed(one) ? lane : one), null);
    if (!plain.done || !best) {
      return this.#say("The race did not come to its end, so there is nothing to compare.");
    }
    const ratio = speed(best) / speed(plain);
    if (Number.isFinite(ratio)) byId("speedup").textContent = `${ratio.toFixed(1)}×`;
    if (best.run.perStep !== null) byId("per-step").textContent = best.run.perStep.toFixed(1);
    const exact = done.filter((lane) => lossless.has(lane.strategy));
    const apart = exact.filter((lane) => parting(plain.run.text, lane.run.text) !== null || plain.run.tokens !== lane.run.tokens);
    const named = others.length > 1 ? `${best.title} was the fastest: ` : "";
    const steps = best.run.steps.length ? `${named}${best.run.tokens} tokens in ${best.run.steps.length} steps` : `${named}${best.run.tokens} tokens`;
    const helped = ratio >= 1.05 || !Number.isFinite(ratio) ? "" : ` ${misses(best.run)}`;
    const against = plain.run.steps.length ? `${steps} instead of ${plain.run.steps.length}.` : `${steps}.`;
    if (!exact.length) {
      byId("agree").textContent = "lossy";
      return this.#say(`${against} The strategies chosen change the text by design, so it is not compared.`);
    }
    byId("verdict").dataset.agree = String(!apart.length);
    byId("agree").textContent = apart.length ? "different" : "identical";
    return this.#say(apart.length ? `${against} ${difference(plain, apart)}` : `${against} The texts are equal, character for character.${helped}`);
  }

  #say(sentence) {
    byId("summary").textContent = sentence;
    return sentence;
  }
}

// Why it was not faster.
function misses({ steps }) {
  const drafted = steps.reduce((sum, step) => sum + step.drafted, 0);
  const accepted = steps.reduce((sum, step) => sum + step.accepted, 0);
  const held = drafted ? `of ${drafted} drafted tokens ${accepted} held` : "nothing was drafted";
  return `Drafts did not help here: ${held}. They do where an answer repeats its documents, its prompt or earlier answers.`;
}

const speed = (lane) => lane.run.speed(lane.run.ended) ?? 0;

function difference(plain, apart) {
  const at = parting(plain.run.text, apart[0].run.text);
  const where = at === null ? "the number of tokens differs" : `it parts at character ${at + 1}`;
  return `${list(apart.map((lane) => lane.title))} wrote another text: ${where}. In 16-bit arithmetic two tokens that are almost equally likely may change places.`;
}
