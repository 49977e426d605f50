// The page: reads the form, runs the lanes, and shows what they say.

import { ApiError, getJson, stream } from "./api.js";
import { element, Lane } from "./lane.js";
import { forgetAll, showMemory } from "./memory.js";
import { SAMPLES } from "./samples.js";
import { describe, inOrder, sourceClass } from "./sources.js";
import { Verdict } from "./verdict.js";

const PLAIN = "autoregressive";
const ABOUT = {
  auto: "all sources in one tree of drafts",
  llma: "copies from documents and prompt",
  trie: "frequent branches of prompt and past outputs",
  ngrammys: "n-grams of the context, then the model's bigrams",
  jacobi: "the model's own parallel guesses",
  suffix: "what followed the longest match",
  recycling: "what the model ranked next before",
  prompt_lookup: "what followed the last tokens before",
};
const byId = (id) => document.getElementById(id);
const state = { model: null, lossless: new Set(), lanes: [], verdict: new Verdict(), running: null, dirty: false, reports: true };

const key = () => byId("key").value.trim();

function notice(message) {
  byId("notice").textContent = message;
  byId("notice").hidden = !message;
}

async function loadModel() {
  try {
    const [card] = (await getJson("v1/models", key())).data;
    state.model = card.id;
    state.lossless = new Set(card.lossless_strategies);
    byId("model").textContent = `${card.id}, ${card.max_model_len.toLocaleString("en")} tokens of context`;
    byId("dot").dataset.state = "up";
    showStrategies(card.strategies.filter((name) => name !== PLAIN));
    notice("");
    await showMemory(key());
    byId("version").textContent = `Outrider ${(await getJson("version")).version}`;
  } catch (error) {
    state.model = null;
    byId("model").textContent = "no model";
    byId("dot").dataset.state = "down";
    if (error.status === 401) byId("more").open = true;
    notice(error.message);
  }
}

function showStrategies(names) {
  const chosen = new Set(chosenStrategies());
  byId("strategies").replaceChildren(
    ...names.map((name, index) => {
      const box = element("input", { type: "checkbox", name: "strategy", value: name });
      box.checked = chosen.size ? chosen.has(name) : index === 0;
      const mark = state.lossless.has(name) ? "" : " (lossy)";
      const label = element("label", { class: "chip" }, box, element("span", {}, name + mark));
      if (ABOUT[name]) label.title = ABOUT[name];
      return label;
    }),
  );
}

const chosenStrategies = () => [...document.querySelectorAll("input[name=strategy]:checked")].map((box) => box.value);

function requestBody(form, strategy) {
  const documents = form.documents.trim();
  const messages = [{ role: "user", content: form.question }];
  if (documents) messages.unshift({ role: "system", content: `### Documents\n${documents}` });
  const body = {
    model: state.model,
    messages,
    max_tokens: form.maxTokens,
    temperature: form.temperature,
    seed: form.seed,
    stream: true,
    stream_options: { include_usage: true },
    speculation: { strategy, ...(state.reports ? { report: true } : {}) },
  };
  if (documents) body.reference_documents = [documents];
  return body;
}

function readForm() {
  const seed = byId("seed").value.trim();
  return {
    documents: byId("documents").value,
    question: byId("question").value,
    maxTokens: Number(byId("max-tokens").value),
    temperature: Number(byId("temperature").value),
    seed: seed ? Number(seed) : Math.floor(Math.random() * 2 ** 31), // one for all lanes
    atOnce: document.querySelector("input[name=mode]:checked").value === "once",
  };
}

// Has the server read the prompt, so that no lane finds it read by the one before. A refusal is told by the lanes.
async function readPrompt(form, signal) {
  try {
    const body = { ...requestBody(form, PLAIN), max_tokens: 1, speculation: { strategy: PLAIN } };
    for await (const _ of stream("v1/chat/completions", body, key(), signal)) state.dirty = true;
  } catch (error) {
    if (!(error instanceof ApiError) && !signal.aborted) throw error;
  }
}

async function runLane(lane, form, signal) {
  lane.begin(performance.now());
  try {
    for await (const chunk of stream("v1/chat/completions", requestBody(form, lane.strategy), key(), signal)) {
      if (lane.push(chunk, performance.now())) state.dirty = true;
    }
    lane.finish();
  } catch (error) {
    if (error.param?.startsWith("speculation.report") && state.reports) {
      state.reports = false; // a server that hides its steps (server.stream_guard): the race goes on without colours
      await runLane(lane, form, signal);
    } else if (signal.aborted) {
      lane.stop();
    } else if (error instanceof ApiError) {
      lane.fail(error.message);
    } else {
      lane.fail(`This page failed: ${error.message}`);
      throw error;
    }
  } finally {
    state.dirty = true;
  }
}

async function race(event) {
  event?.preventDefault();
  if (state.running || !byId("form").reportValidity()) return;
  if (!state.model) await loadModel();
  if (!state.model) return;
  const names = chosenStrategies();
  if (!names.length) {
    notice("Choose at least one strategy that plain decoding races against.");
    return;
  }
  notice("");
  const form = readForm();
  const plain = new Lane(PLAIN, "Plain decoding", "one token a step");
  const others = names.map((name) => new Lane(name, name, ABOUT[name] ?? "drafts, and has the model check"));
  await start([plain, ...others], form);
  const stopped = state.lanes.some((lane) => lane.node.dataset.state === "stopped");
  byId("status").textContent = "";
  byId("status").textContent = stopped ? "Stopped." : state.verdict.conclude(plain, others, state.lossless);
  if (stopped) byId("summary").textContent = "Stopped before the end.";
  await showMemory(key());
}

async function start(lanes, form) {
  state.lanes = lanes;
  byId("lanes").replaceChildren(...lanes.map((lane) => lane.node));
  state.verdict.reset(lanes);
  state.running = new AbortController();
  const { signal } = state.running;
  working(true);
  byId("status").textContent = `Racing: ${lanes.length} lanes ${form.atOnce ? "at once" : "one after the other"}.`;
  requestAnimationFrame(frame);
  try {
    await readPrompt(form, signal);
    const run = (lane) => (signal.aborted ? lane.stop() : runLane(lane, form, signal));
    if (form.atOnce) await Promise.all(lanes.map(run));
    else for (const lane of lanes) await run(lane);
  } finally {
    state.running = null;
    working(false);
    draw();
  }
}

function working(runs) {
  byId("stop").disabled = !runs;
  byId("run").disabled = runs;
  document.body.classList.toggle("racing", runs);
}

function frame() {
  if (!state.running) return;
  draw();
  requestAnimationFrame(frame);
}

function draw(afresh = false) {
  const now = performance.now();
  const widest = Math.max(1, ...state.lanes.map((lane) => lane.run.steps.length));
  const highest = Math.max(0, ...state.lanes.flatMap((lane) => lane.run.steps.map((step) => step.tokens.length)));
  for (const lane of state.lanes) lane.draw(now, widest, highest, afresh);
  if (state.lanes.length) state.verdict.draw(state.lanes, now);
  if (state.dirty) showLegend();
  state.dirty = false;
}

function showLegend() {
  const counts = new Map();
  for (const lane of state.lanes.slice(1)) {
    for (const step of lane.run.steps) for (const { source } of step.tokens) counts.set(source, (counts.get(source) ?? 0) + 1);
  }
  const chosen = document.body.dataset.only;
  const items = inOrder(counts.keys()).map((source) => {
    const { letter, name, meaning } = describe(source);
    const swatch = element("b", { class: `t ${sourceClass(source)}`, "aria-hidden": "true" }, letter);
    const count = element("span", { class: "count" }, String(counts.get(source)));
    const item = element("button", { type: "button", title: meaning, "data-only": source, "aria-pressed": String(source === chosen) });
    item.append(swatch, name, count);
    return item;
  });
  byId("legend").replaceChildren(...items);
  byId("legend").hidden = !items.length;
}

function singleOut(source) {
  const same = document.body.dataset.only === source;
  if (same) delete document.body.dataset.only;
  else document.body.dataset.only = source;
  for (const item of byId("legend").children) item.setAttribute("aria-pressed", String(!same && item.dataset.only === source));
  for (const token of document.querySelectorAll(".text .t")) token.classList.toggle("dim", !same && token.dataset.source !== source);
}

function choose(index) {
  byId("documents").value = SAMPLES[index].documents;
  byId("question").value = SAMPLES[index].question;
  [...byId("samples").children].forEach((chip, at) => chip.setAttribute("aria-pressed", String(at === index)));
}

function listen() {
  byId("form").addEventListener("submit", race);
  byId("stop").addEventListener("click", () => state.running?.abort());
  byId("forget").addEventListener("click", () => forgetAll(key(), notice));
  byId("key").addEventListener("change", loadModel);
  byId("legend").addEventListener("click", (event) => {
    const item = event.target.closest("[data-only]");
    if (item) singleOut(item.dataset.only);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) race(event);
    if (event.key === "Escape") state.running?.abort();
  });
  window.addEventListener("resize", () => draw(true));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(true));
}

SAMPLES.forEach(({ name }, index) => {
  const chip = element("button", { type: "button", class: "chip", "aria-pressed": "false" }, name);
  chip.addEventListener("click", () => choose(index));
  byId("samples").append(chip);
});
choose(0);
listen();
loadModel();
