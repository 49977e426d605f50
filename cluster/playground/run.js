// What one lane has measured so far. All times are milliseconds of performance.now(), as the browser saw them.

export class Run {
  constructor(strategy) {
    this.strategy = strategy;
    this.began = null; // the request was sent
    this.first = null; // the first token came
    this.ended = null;
    this.steps = []; // {tokens: [{text, source}], drafted, accepted}
    this.text = "";
    this.reason = null; // why it ended
    this.usage = null;
    this.cut = null; // that fewer rows were drafted than the options ask for, and why
  }

  begin(now) {
    this.began = now;
  }

  // Takes a chunk of the stream, and returns the tokens it adds, with the number of their step: [{text, source, step}].
  push(chunk, now) {
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return [];
    const added = choice.delta?.content ?? "";
    const steps = choice.speculation?.steps ?? [];
    this.cut = choice.speculation?.cut ?? this.cut;
    this.text += added;
    const shown = [];
    for (const step of steps) {
      this.steps.push(step);
      for (const token of step.tokens) shown.push({ ...token, step: this.steps.length, drafted: step.drafted, accepted: step.accepted });
    }
    const text = (choice.delta?.reasoning ?? "") + added; // without reports of steps
    if (!steps.length && text) shown.push({ text, source: null, step: null });
    if (shown.length && this.first === null) this.first = now;
    if (choice.finish_reason) {
      this.reason = choice.finish_reason;
      this.ended = now;
    }
    return shown;
  }

  get tokens() {
    return this.usage?.completion_tokens ?? this.steps.reduce((sum, step) => sum + step.tokens.length, 0);
  }

  get perStep() {
    return this.steps.length ? this.tokens / this.steps.length : null;
  }

  seconds(now) {
    return this.began === null ? 0 : ((this.ended ?? now) - this.began) / 1000;
  }

  get untilFirst() {
    return this.first === null ? null : (this.first - this.began) / 1000;
  }

  // Tokens a second from the request on, the wait for the first one included: what came in one piece has no other speed.
  speed(now) {
    const seconds = this.seconds(now);
    return this.first === null || seconds === 0 ? null : this.tokens / seconds;
  }
}

// Where two texts part: the index of the first character that differs, null where they are equal.
export function parting(one, other) {
  if (one === other) return null;
  let at = 0;
  while (at < one.length && one[at] === other[at]) at += 1;
  return at;
}
