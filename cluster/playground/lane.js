// One answer, a lane of the race: its text as it comes, coloured by who drafted it, its figures and its plot.

import { Run } from "./run.js";
import { describe, sourceClass } from "./sources.js";

const HEIGHT = 72; // of a plot
const TOP = 12; // room above the highest bar
const number = (value, digits) => (value === null ? "–" : value.toFixed(digits));

export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export class Lane {
  // strategy: as the API names it. title, about: what people read.
  constructor(strategy, title, about) {
    this.strategy = strategy;
    this.title = title;
    this.run = new Run(strategy);
    this.failure = null;
    this.state = element("span", { class: "state" }, "waits");
    this.text = element("div", { class: "text", tabindex: "0", role: "region", "aria-label": `Text of ${title}` });
    this.figures = {};
    const canvas = element("canvas", { class: "chart", role: "img", "aria-label": `Tokens of each step of ${title}` });
    this.canvas = canvas;
    this.chart = new Chart(canvas);
    const list = element("dl", { class: "numbers" });
    for (const [key, name] of [["speed", "tokens/s"], ["first", "first token"], ["steps", "steps"], ["total", "in all"]]) {
      this.figures[key] = element("dd", {}, "–");
      list.append(element("div", {}, element("dt", {}, name), this.figures[key]));
    }
    this.detail = element("p", { class: "detail" }, about);
    const heading = element("h2", {}, title);
    this.node = element("article", { class: "lane card", "data-strategy": strategy, "aria-label": title });
    this.node.append(element("header", {}, heading, this.state), this.text, list, canvas, this.detail);
  }

  begin(now) {
    this.run.begin(now);
    this.node.dataset.state = "runs";
    this.state.textContent = "decodes";
  }

  // Takes a chunk; true where it added text.
  push(chunk, now) {
    const tokens = this.run.push(chunk, now);
    const piece = document.createDocumentFragment();
    for (const token of tokens) piece.append(this.#token(token));
    this.text.append(piece);
    return tokens.length > 0;
  }

  #token({ text, source, step, drafted, accepted }) {
    if (source === null) return document.createTextNode(text);
    const span = element("span", { class: `t ${sourceClass(source)}`, "data-source": source }, text);
    span.title = `${describe(source).name}, step ${step}: ${accepted} of ${drafted} drafted tokens held`;
    return span;
  }

  finish() {
    const { run } = this;
    const prompt = run.usage?.prompt_tokens;
    const reused = run.usage?.prompt_tokens_details?.cached_tokens ?? 0;
    const why = { stop: "ended by itself", length: "cut at max tokens" }[run.reason] ?? run.reason;
    const known = reused ? `, ${reused} of them not computed again` : "";
    this.#settle("done", "done");
    this.detail.textContent = `${run.tokens} tokens, ${why}; the prompt had ${prompt}${known}.${run.cut ? ` ${run.cut}.` : ""}`;
  }

  stop() {
    this.#settle("stopped", "stopped");
    this.detail.textContent = this.run.began === null ? "Stopped before it began." : "Stopped: the server frees its slot.";
  }

  fail(message) {
    this.failure = message;
    this.#settle("failed", "failed");
    this.detail.textContent = message;
  }

  #settle(state, word) {
    this.run.ended ??= performance.now();
    this.node.dataset.state = state;
    this.state.textContent = word;
  }

  get done() {
    return this.node.dataset.state === "done";
  }

  // widest, highest: see Chart. afresh: also what has not changed.
  draw(now, widest, highest, afresh) {
    const { run, figures } = this;
    if (run.began !== null) {
      figures.speed.textContent = number(run.speed(now), 0);
      figures.first.textContent = run.untilFirst === null ? "–" : `${number(run.untilFirst * 1000, 0)} ms`;
      figures.steps.textContent = run.steps.length || "–";
      figures.total.textContent = `${number(run.seconds(now), 2)} s`;
    }
    const shown = `${run.text.length} ${run.steps.length} ${widest} ${highest}`;
    if (shown === this.shown && !afresh) return;
    this.shown = shown;
    this.text.scrollTop = this.text.scrollHeight;
    this.chart.draw(run.steps, widest, highest);
    if (run.perStep !== null) {
      this.canvas.setAttribute("aria-label", `${this.title}: ${run.tokens} tokens in ${run.steps.length} steps`);
    }
  }
}

// Tokens of each step as a running bar plot: a bar a step, stacked by who drafted, with the mean as a dashed line.
class Chart {
  constructor(canvas) {
    this.canvas = canvas;
  }

  // steps: of this lane. widest, highest: steps of the longest lane and tokens of the best step, so that lanes compare.
  draw(steps, widest, highest) {
    const { canvas } = this;
    const width = canvas.clientWidth;
    if (!width) return;
    const scale = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(HEIGHT * scale);
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    const style = getComputedStyle(canvas);
    const colour = (name) => style.getPropertyValue(name).trim();
    const unit = (HEIGHT - TOP - 1) / Math.max(highest, 4);
    this.#frame(pen, width, steps, colour);
    const pitch = Math.min(12, width / Math.max(widest, 1));
    const seam = unit > 4 ? 0.75 : 0; // between the tokens of a step
    const gap = pitch >= 4 ? 1.5 : pitch >= 2 ? 0.5 : 0;
    steps.forEach((step, index) => {
      let y = HEIGHT - 1;
      for (const token of step.tokens) {
        const size = Math.max(unit, 1.5); // a single token shows beside a step of many
        pen.fillStyle = colour(`--c-${token.source}`) || colour("--c-other");
        pen.fillRect(index * pitch, y - size + seam, Math.max(pitch - gap, 0.5), size - seam);
        y -= size;
      }
    });
    if (steps.length) this.#mean(pen, steps, { end: steps.length * pitch, width, unit, colour });
  }

  #frame(pen, width, steps, colour) {
    const most = Math.max(0, ...steps.map((step) => step.tokens.length));
    pen.strokeStyle = colour("--line");
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(0, HEIGHT - 0.5);
    pen.lineTo(width, HEIGHT - 0.5);
    pen.stroke();
    pen.fillStyle = colour("--muted");
    pen.font = `11px ${colour("--sans")}`;
    pen.textAlign = "right";
    pen.fillText(most ? `tokens of each step, at most ${most}` : "tokens of each step", width, 10);
  }

  #mean(pen, steps, { end, width, unit, colour }) {
    const mean = steps.reduce((sum, step) => sum + step.tokens.length, 0) / steps.length;
    const y = HEIGHT - 1 - mean * unit;
    pen.strokeStyle = colour("--ink");
    pen.setLineDash([3, 3]);
    pen.beginPath();
    pen.moveTo(0, y);
    pen.lineTo(Math.min(end + 6, width), y);
    pen.stroke();
    pen.setLineDash([]);
    const beside = end + 80 < width; // else above the line
    pen.textAlign = beside ? "left" : "right";
    pen.fillStyle = colour("--ink");
    pen.fillText(`mean ${mean.toFixed(1)}`, beside ? end + 10 : width, beside ? Math.min(y + 4, HEIGHT - 4) : y - 6);
  }
}
