// Writes SVG through the part of the canvas API that our plots use, so that one drawing
// function serves screen, PNG and SVG.

const escapeXml = (text) => String(text)
  // XML 1.0 does not allow control characters.
  .replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/g, '')
  .replace(/&/g, '&amp;').replace(/</g, '&lt;').replace(/>/g, '&gt;').replace(/"/g, '&quot;');

const n = (value) => String(+value.toFixed(2));
const ANCHORS = { left: 'start', start: 'start', center: 'middle', right: 'end', end: 'end' };
const SHIFTS = { middle: 0.35, top: 0.8, hanging: 0.8, bottom: -0.2, alphabetic: 0 };

let measure = null;

/** Canvas-like context that records SVG elements. */
export class SvgContext {
  #parts = [];
  #stack = [];
  #path = '';
  #clips = 0;

  constructor(width, height) {
    this.width = width;
    this.height = height;
    this.state = { strokeStyle: '#000', fillStyle: '#000', lineWidth: 1, globalAlpha: 1,
      font: '12px sans-serif', textAlign: 'left', textBaseline: 'alphabetic', lineJoin: 'miter',
      lineCap: 'butt', dash: [], clip: '', x: 0, y: 0, turn: 0 };
    for (const key of ['strokeStyle', 'fillStyle', 'lineWidth', 'globalAlpha', 'font',
      'textAlign', 'textBaseline', 'lineJoin', 'lineCap']) {
      Object.defineProperty(this, key, { get: () => this.state[key],
        set: (value) => {
          this.state[key] = value;
        } });
    }
  }

  save() {
    this.#stack.push({ ...this.state });
  }

  restore() {
    if (this.#stack.length) this.state = this.#stack.pop();
  }

  translate(x, y) {
    this.state.x += x;
    this.state.y += y;
  }

  rotate(angle) {
    this.state.turn += (angle * 180) / Math.PI;
  }

  setLineDash(dash) {
    this.state.dash = dash;
  }

  beginPath() {
    this.#path = '';
  }

  moveTo(x, y) {
    this.#path += `M${n(x)} ${n(y)}`;
  }

  lineTo(x, y) {
    this.#path += `L${n(x)} ${n(y)}`;
  }

  bezierCurveTo(a, b, c, d, x, y) {
    this.#path += `C${n(a)} ${n(b)} ${n(c)} ${n(d)} ${n(x)} ${n(y)}`;
  }

  rect(x, y, width, height) {
    this.#path += `M${n(x)} ${n(y)}h${n(width)}v${n(height)}h${n(-width)}z`;
  }

  /** Draws full circles only; our plots need no other arcs. */
  arc(x, y, radius) {
    const r = n(radius);
    this.#path += `M${n(x - radius)} ${n(y)}a${r} ${r} 0 1 0 ${n(radius * 2)} 0`
      + `a${r} ${r} 0 1 0 ${n(-radius * 2)} 0`;
  }

  closePath() {
    this.#path += 'z';
  }

  clip() {
    this.#clips += 1;
    this.#parts.push(`<clipPath id="c${this.#clips}"><path d="${this.#path}"/></clipPath>`);
    this.state.clip = `c${this.#clips}`;
  }

  #shared() {
    const { globalAlpha, clip, x, y, turn } = this.state;
    return (globalAlpha < 1 ? ` opacity="${n(globalAlpha)}"` : '')
      + (clip ? ` clip-path="url(#${clip})"` : '')
      + (x || y ? ` transform="translate(${n(x)} ${n(y)}) rotate(${n(turn)})"` : '');
  }

  #strokes() {
    const { strokeStyle, lineWidth, dash, lineJoin, lineCap } = this.state;
    return ` stroke="${escapeXml(strokeStyle)}" stroke-width="${n(lineWidth)}"`
      + (dash.length ? ` stroke-dasharray="${dash.map(n).join(' ')}"` : '')
      + ` stroke-linejoin="${lineJoin}" stroke-linecap="${lineCap}"`;
  }

  stroke() {
    if (!this.#path) return;
    this.#parts.push(`<path fill="none"${this.#strokes()}${this.#shared()} d="${this.#path}"/>`);
  }

  fill() {
    if (!this.#path) return;
    const fill = escapeXml(this.state.fillStyle);
    this.#parts.push(`<path fill="${fill}"${this.#shared()} d="${this.#path}"/>`);
  }

  fillRect(x, y, width, height) {
    const fill = escapeXml(this.state.fillStyle);
    this.#parts.push(`<rect x="${n(x)}" y="${n(y)}" width="${n(width)}" height="${n(height)}"`
      + ` fill="${fill}"${this.#shared()}/>`);
  }

  clearRect() {}

  drawImage() {}

  measureText(text) {
    measure ||= document.createElement('canvas').getContext('2d');
    measure.font = this.state.font;
    return measure.measureText(text);
  }

  #text(text, x, y, paint) {
    const { font, textAlign, textBaseline } = this.state;
    const size = +(font.match(/([\d.]+)px/) || [0, 12])[1];
    const weight = (font.match(/\b([1-9]00|bold)\b/) || [0, 400])[1];
    const family = font.replace(/^.*?px(\/\S+)?\s*/, '') || 'sans-serif';
    const shift = (SHIFTS[textBaseline] ?? 0) * size;
    this.#parts.push(`<text x="${n(x)}" y="${n(y + shift)}" font-size="${n(size)}"`
      + ` font-weight="${weight}" font-family="${escapeXml(family)}"`
      + ` text-anchor="${ANCHORS[textAlign] || 'start'}"${paint}${this.#shared()}>`
      + `${escapeXml(text)}</text>`);
  }

  fillText(text, x, y) {
    this.#text(text, x, y, ` fill="${escapeXml(this.state.fillStyle)}"`);
  }

  strokeText(text, x, y) {
    this.#text(text, x, y, ` fill="none"${this.#strokes()}`);
  }

  /** Returns the drawing as an SVG document. */
  toString() {
    return `<svg xmlns="http://www.w3.org/2000/svg" width="${this.width}" height="${this.height}"`
      + ` viewBox="0 0 ${this.width} ${this.height}">${this.#parts.join('')}</svg>`;
  }
}
