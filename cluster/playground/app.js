// The page: has the server answer, in lanes of a race or in turns of a conversation, and shows what it says.

import { ApiError, getJson, stream } from "./api.js";
import { ABOUT, byId, chosenStrategies, key, notice, PLAIN, readForm, requestBody, setUpForm, showStrategies, talks } from "./form.js";
import { element, Lane } from "./lane.js";
import { forgetAll, showMemory } from "./memory.js";
import { describe, inOrder, sourceClass } from "./sources.js";
import { Verdict } from "./verdict.js";

const state = { model: null, lossless: new Set(), lanes: [], turns: [], verdict: new Verdict(), running: null, dirty: false, reports: true };

async function loadModel() {
  try {
    const [card] = (await getJson("v1/models", key())).data;
    state.model = card.id;
    state.lossless = new Set(card.lossless_strategies);
    byId("model").textContent = `${card.id}, ${card.max_model_len.toLocaleString("en")} tokens of context`;
    byId("dot").dataset.state = "up";
    showStrategies(card.strategies.filter((name) => name !== PLAIN), state.lossless);
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

const body = (form, strategy) => requestBody(form, { model: state.model, turns: state.turns, strategy, reports: state.reports });

// Has the server read the prompt, so that no lane finds it read by the one before. A refusal is told by the lanes.
async function readPrompt(form, signal) {
  try {
    const short = { ...body(form, PLAIN), max_tokens: 1, speculation: { strategy: PLAIN } };
    for await (const _ of stream("v1/chat/completions", short, key(), signal)) state.dirty = true;
  } catch (error) {
    if (!(error instanceof ApiError) && !signal.aborted) throw error;
  }
}

async function runLane(lane, form, signal) {
  lane.begin(performance.now());
  try {
    for await (const chunk of stream("v1/chat/completions", body(form, lane.strategy), key(), signal)) {
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

async function submit(event) {
  event?.preventDefault();
  if (state.running || !byId("form").reportValidity()) return;
  if (!state.model) await loadModel();
  if (!state.model) return;
  notice("");
  await (talks() ? ask(readForm()) : race(readForm()));
  await showMemory(key());
}

async function race(form) {
  const names = chosenStrategies();
  if (!names.length) {
    notice("Choose at least one strategy that plain decoding races against.");
    return;
  }
  const plain = new Lane(PLAIN, "Plain decoding", "one token a step");
  const others = names.map((name) => new Lane(name, name, ABOUT[name] ?? "drafts, and has the model check"));
  state.lanes = [plain, ...others];
  byId("lanes").replaceChildren(...state.lanes.map((lane) => lane.node));
  state.verdict.reset(state.lanes);
  await run(`Racing: ${state.lanes.length} lanes ${form.atOnce ? "at once" : "one after the other"}.`, async (signal) => {
    await readPrompt(form, signal);
    const one = (lane) => (signal.aborted ? lane.stop() : runLane(lane, form, signal));
    if (form.atOnce) await Promise.all(state.lanes.map(one));
    else for (const lane of state.lanes) await one(lane);
  });
  const stopped = state.lanes.some((lane) => lane.node.dataset.state === "stopped");
  byId("status").textContent = "";
  byId("status").textContent = stopped ? "Stopped." : state.verdict.conclude(plain, others, state.lossless);
  if (stopped) byId("summary").textContent = "Stopped before the end.";
}

// The next turn of the conversation. A stopped answer belongs to it, too: it was read.
async function ask(form) {
  const lane = new Lane("", state.model, "");
  const asked = element("p", { class: "asked card" }, form.question);
  state.lanes.push(lane);
  byId("lanes").append(asked, lane.node);
  byId("question").value = "";
  asked.scrollIntoView({ block: "start" });
  await run("Answering.", (signal) => runLane(lane, form, signal));
  byId("status").textContent = lane.run.text || lane.failure || "Stopped.";
  if (lane.run.text) {
    state.turns.push({ role: "user", content: form.question }, { role: "assistant", content: lane.run.text });
  } else if (!byId("question").value) {
    byId("question").value = form.question; // to be asked again
  }
}

// Has the lanes written to until the work is done, or stopped.
async function run(announcement, work) {
  state.running = new AbortController();
  working(true);
  byId("status").textContent = announcement;
  requestAnimationFrame(frame);
  try {
    await work(state.running.signal);
  } finally {
    state.running = null;
    working(false);
    draw();
  }
}

// Empties the results; what was said is not sent any more.
function begin() {
  state.running?.abort();
  Object.assign(state, { lanes: [], turns: [], dirty: true });
  byId("lanes").replaceChildren();
  document.body.classList.toggle("talks", talks());
  byId("verdict").hidden = byId("against").hidden = byId("order").hidden = talks();
  byId("fresh").hidden = !talks();
  byId("run").firstChild.textContent = talks() ? "Ask " : "Race ";
  state.verdict.reset([]);
  draw();
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
  if (state.lanes.length && !talks()) state.verdict.draw(state.lanes, now);
  if (state.dirty) showLegend();
  state.dirty = false;
}

function showLegend() {
  const counts = new Map();
  for (const lane of state.lanes.filter(({ strategy }) => strategy !== PLAIN)) {
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

function listen() {
  byId("form").addEventListener("submit", submit);
  byId("fresh").addEventListener("click", begin);
  for (const kind of document.querySelectorAll("input[name=kind]")) kind.addEventListener("change", begin);
  byId("stop").addEventListener("click", () => state.running?.abort());
  byId("forget").addEventListener("click", () => forgetAll(key(), notice));
  byId("key").addEventListener("change", loadModel);
  byId("legend").addEventListener("click", (event) => {
    const item = event.target.closest("[data-only]");
    if (item) singleOut(item.dataset.only);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) submit(event);
    if (event.key === "Escape") state.running?.abort();
  });
  window.addEventListener("resize", () => draw(true));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(true));
}

setUpForm();
listen();
loadModel();
