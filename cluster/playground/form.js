// The form: what is asked, with which documents, by which strategies.

import { upload } from "./api.js";
import { element } from "./lane.js";
import { SAMPLES } from "./samples.js";

export const PLAIN = "autoregressive";
export const ABOUT = {
  auto: "all sources in one tree of drafts",
  llma: "copies from documents and prompt",
  trie: "frequent branches of prompt and past outputs",
  ngrammys: "n-grams of the context, then the model's bigrams",
  jacobi: "the model's own parallel guesses",
  suffix: "what followed the longest match",
  recycling: "what the model ranked next before",
  prompt_lookup: "what followed the last tokens before",
};
export const byId = (id) => document.getElementById(id);
export const key = () => byId("key").value.trim();
export const talks = () => document.querySelector("input[name=kind]:checked").value === "conversation";
export const chosenStrategies = () => [...document.querySelectorAll("input[name=strategy]:checked")].map((box) => box.value);

export function notice(message) {
  byId("notice").textContent = message;
  byId("notice").hidden = !message;
}

// lossless: those that change no text.
export function showStrategies(names, lossless) {
  const chosen = new Set(chosenStrategies());
  byId("strategies").replaceChildren(
    ...names.map((name, index) => {
      const box = element("input", { type: "checkbox", name: "strategy", value: name });
      box.checked = chosen.size ? chosen.has(name) : index === 0;
      const mark = lossless.has(name) ? "" : " (lossy)";
      const label = element("label", { class: "chip" }, box, element("span", {}, name + mark));
      if (ABOUT[name]) label.title = ABOUT[name];
      return label;
    }),
  );
}

// Options by strategy, of a text such as "jacobi: window=15, guesses=15; trie: layout=parallel".
export function readOptions(text) {
  const value = (word) => (/^-?\d+(\.\d+)?$|^(true|false)$/.test(word) ? JSON.parse(word) : word);
  const found = {};
  for (const part of text.split(";").filter((each) => each.trim())) {
    const [name, ...rest] = part.split(":");
    const pairs = rest.join(":").split(",").map((pair) => pair.split("=").map((word) => word.trim()));
    found[name.trim()] = Object.fromEntries(pairs.filter(([option]) => option).map(([option, word]) => [option, value(word ?? "")]));
  }
  return found;
}

export function readForm() {
  const seed = byId("seed").value.trim();
  return {
    documents: byId("documents").value.trim(),
    question: byId("question").value,
    maxTokens: Number(byId("max-tokens").value),
    temperature: Number(byId("temperature").value),
    seed: seed ? Number(seed) : Math.floor(Math.random() * 2 ** 31), // one for all lanes
    options: readOptions(byId("options").value),
    asPublished: byId("as-published").checked,
    atOnce: document.querySelector("input[name=mode]:checked").value === "once",
  };
}

// turns: messages before the question. strategy: empty for the server's own.
export function requestBody(form, { model, turns, strategy, reports }) {
  const messages = [...turns, { role: "user", content: form.question }];
  if (form.documents) {
    messages[0] = { role: "user", content: `Context:\n${form.documents}\n\nQuestion: ${messages[0].content}` };
  }
  const body = {
    model,
    messages,
    max_tokens: form.maxTokens,
    temperature: form.temperature,
    seed: form.seed,
    stream: true,
    stream_options: { include_usage: true },
    speculation: {
      ...(strategy ? { strategy } : {}),
      ...(form.options[strategy] ? { options: form.options[strategy] } : {}),
      ...(form.asPublished && strategy !== PLAIN ? { as_published: true } : {}),
      ...(reports ? { report: true } : {}),
    },
  };
  if (form.documents) body.reference_documents = [form.documents];
  return body;
}

// Puts the text of files below the documents that are there; the server reads what is no plain text.
async function addFiles(files) {
  notice("");
  const box = byId("documents");
  for (const file of files) {
    byId("status").textContent = `Reading ${file.name}.`;
    try {
      const { text } = await upload("v1/documents/text", file, key());
      box.value = [box.value.trim(), `[${file.name}]\n${text}`].filter(Boolean).join("\n\n");
      byId("status").textContent = `${file.name} is added, ${text.length.toLocaleString("en")} characters.`;
    } catch (error) {
      notice(`${file.name}: ${error.message}`);
    }
  }
  box.scrollTop = box.scrollHeight;
}

function listenToFiles() {
  const field = byId("documents-field");
  const holdsFiles = (event) => event.dataTransfer?.types.includes("Files");
  const over = (event, is) => {
    if (!holdsFiles(event)) return; // a text that is dragged goes where it is dropped
    event.preventDefault();
    field.classList.toggle("over", is);
  };
  field.addEventListener("dragover", (event) => over(event, true));
  field.addEventListener("dragleave", (event) => over(event, false));
  field.addEventListener("drop", (event) => {
    over(event, false);
    if (holdsFiles(event)) addFiles([...event.dataTransfer.files]);
  });
  byId("files").addEventListener("change", async ({ target }) => {
    await addFiles([...target.files]);
    target.value = ""; // the same file may be chosen again
  });
}

function choose(index) {
  byId("documents").value = SAMPLES[index].documents;
  byId("question").value = SAMPLES[index].question;
  [...byId("samples").children].forEach((chip, at) => chip.setAttribute("aria-pressed", String(at === index)));
}

export function setUpForm() {
  SAMPLES.forEach(({ name }, index) => {
    const chip = element("button", { type: "button", class: "chip", "aria-pressed": "false" }, name);
    chip.addEventListener("click", () => choose(index));
    byId("samples").append(chip);
  });
  choose(0);
  listenToFiles();
}
