// The map of layers x experts: how much each is used, and which are in memory.

const LEAST_CELL = 4;
const MOST_CELL = 22;

export class ExpertMap {
  // `tell(text)` describes the cell that the pointer or the keys are on.
  constructor(canvas, tell) {
    this.canvas = canvas;
    this.tell = tell;
    this.layers = [];
    this.row = 0;
    this.column = 0;
    this.chosen = false;
    canvas.addEventListener("pointermove", (event) => {
      this.row = Math.floor(event.offsetY / this.cell);
      this.column = Math.floor(event.offsetX / this.cell);
      this.choose();
    });
    canvas.addEventListener("keydown", (event) => this.onKey(event));
    window.addEventListener("resize", () => this.draw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  update(layers) {
    this.layers = layers;
    this.draw();
    if (this.chosen) this.describe();
    else this.tell(this.summary());
  }

  get columns() {
    return Math.max(1, ...this.layers.map((layer) => layer.uses.length));
  }

  summary() {
    if (!this.layers.length) return "no experts yet";
    const all = this.layers.reduce((sum, layer) => sum + layer.uses.length, 0);
    const resident = this.layers.reduce((sum, layer) => sum + layer.resident.reduce((a, b) => a + b, 0), 0);
    return `${resident} of ${all} experts are in memory`;
  }

  onKey(event) {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    if (this.chosen) {
      this.row += step[0];
      this.column += step[1];
    }
    this.choose();
  }

  choose() {
    if (!this.layers.length) return;
    this.row = Math.min(Math.max(this.row, 0), this.layers.length - 1);
    this.column = Math.min(Math.max(this.column, 0), this.layers[this.row].uses.length - 1);
    this.chosen = true;
    this.draw();
    this.describe();
  }

  describe() {
    const layer = this.layers[this.row];
    if (!layer || this.column >= layer.uses.length) return;
    const where = layer.resident[this.column] ? "in memory" : "on disk";
    this.tell(`layer ${layer.layer}, expert ${this.column}: used by ${layer.uses[this.column]} tokens, ${where}`);
  }

  draw() {
    const room = this.canvas.parentElement.clientWidth;
    this.cell = Math.max(LEAST_CELL, Math.min(MOST_CELL, Math.floor(room / this.columns)));
    const width = this.cell * this.columns;
    const height = this.cell * Math.max(this.layers.length, 1);
    const scale = window.devicePixelRatio || 1;
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    const context = this.canvas.getContext("2d");
    context.scale(scale, scale);
    const style = getComputedStyle(this.canvas);
    const accent = style.color;
    const line = style.getPropertyValue("--line");
    this.layers.forEach((layer, y) => {
      const most = Math.log1p(Math.max(1, ...layer.uses));
      layer.uses.forEach((uses, x) => {
        const [left, top, size] = [x * this.cell, y * this.cell, this.cell - 1];
        context.globalAlpha = 1;
        context.fillStyle = line;
        context.fillRect(left, top, size, size);
        context.globalAlpha = Math.log1p(uses) / most;
        context.fillStyle = accent;
        context.fillRect(left, top, size, size);
        if (layer.resident[x]) {
          context.globalAlpha = 1;
          context.strokeStyle = style.getPropertyValue("--text");
          context.strokeRect(left + 0.5, top + 0.5, size - 1, size - 1);
        }
      });
    });
    if (this.chosen && this.layers.length) {
      context.globalAlpha = 1;
      context.lineWidth = 2;
      context.strokeStyle = style.getPropertyValue("--bad");
      context.strokeRect(this.column * this.cell, this.row * this.cell, this.cell - 1, this.cell - 1);
    }
  }
}
