// Tokens of each step as a running bar plot: a bar a step, stacked by who drafted, with the mean as a dashed line.

const HEIGHT = 72;
const TOP = 12; // room above the highest bar

export class Chart {
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
