// Who may have drafted a token, as the API names it (`speculation.steps[].tokens[].source`), and how it is told here.

// In the order of the legend. The letter is a second cue beside the colour; style.css has the third, a kind of underline.
const KNOWN = {
  document: ["D", "Document", "copied from a document of the request"],
  prompt: ["P", "Prompt", "copied from the prompt"],
  output: ["O", "Own output", "copied from what this answer said before"],
  trie: ["T", "Past outputs", "copied from earlier answers to this tenant"],
  public: ["C", "Public corpus", "copied from the texts that the operator has loaded"],
  jacobi: ["J", "Jacobi", "formed by the model's parallel guesses"],
  recycling: ["R", "Recycling", "what the model ranked next when it last saw the token before"],
  bigram: ["B", "Bigrams", "what the model says most often after the token before"],
  unigram: ["U", "Frequent tokens", "what the model says most often"],
  draft_model: ["S", "Draft model", "written by the small model"],
  grammar: ["G", "Grammar", "the only token that the grammar allows"],
  model: ["M", "Model alone", "nobody had drafted it: the model's own token, one for each step"],
};
const ORDER = Object.keys(KNOWN);

export function describe(source) {
  const [letter, name, meaning] = KNOWN[source] ?? ["?", source, "drafted"];
  return { letter, name, meaning };
}

// Sources in the order of the legend, unknown ones last.
export function inOrder(sources) {
  const place = (source) => (ORDER.includes(source) ? ORDER.indexOf(source) : ORDER.length);
  return [...sources].sort((a, b) => place(a) - place(b) || a.localeCompare(b));
}

// The class that style.css colours.
export const sourceClass = (source) => `s-${ORDER.includes(source) ? source : "other"}`;
