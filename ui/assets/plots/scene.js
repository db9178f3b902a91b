// Draws a scene of lines, dots, bands and labels. Coordinates are CSS pixels; `view` maps data.

import { alpha, colors, FONT } from '../theme.js';

/** Draws everything that stands behind the lines: band, vertical and horizontal lines. */
export function drawGround(ctx, scene, view) {
  const { left, top, width, height } = view.box;
  const tokens = colors();
  ctx.save();
  ctx.beginPath();
  ctx.rect(left, top, width, height);
  ctx.clip();
  if (scene.band?.x.length > 1) drawBand(ctx, scene.band, view, alpha(tokens.text3, 0.16));
  for (const { x, label, color } of scene.verticals || []) {
    const at = Math.round(view.x(x)) + 0.5;
    if (!(at >= left && at <= left + width)) continue;
    stroke(ctx, color || tokens.line2, 1, [4, 3], () => {
      ctx.moveTo(at, top);
      ctx.lineTo(at, top + height);
    });
    if (label) text(ctx, label, at - 4, top + 8, { align: 'right', color: tokens.text2 });
  }
  for (const { y, label } of scene.horizontals || []) {
    const at = Math.round(view.y(y)) + 0.5;
    stroke(ctx, tokens.text3, 1, [4, 3], () => {
      ctx.moveTo(left, at);
      ctx.lineTo(left + width, at);
    });
    if (label) text(ctx, label, left + 4, at - 8, { color: tokens.text3 });
  }
  ctx.restore();
}

function drawBand(ctx, band, view, color) {
  ctx.beginPath();
  band.x.forEach((x, i) => ctx[i ? 'lineTo' : 'moveTo'](view.x(x), view.y(band.high[i])));
  for (let i = band.x.length - 1; i >= 0; i -= 1) {
    ctx.lineTo(view.x(band.x[i]), view.y(band.low[i]));
  }
  ctx.closePath();
  ctx.fillStyle = color;
  ctx.fill();
}

function stroke(ctx, color, width, dash, path) {
  ctx.strokeStyle = color;
  ctx.lineWidth = width;
  ctx.setLineDash(dash);
  ctx.beginPath();
  path();
  ctx.stroke();
  ctx.setLineDash([]);
}

/** Adds one line to the current path. Null values leave gaps. */
export function tracePath(ctx, line, view) {
  const { x, y, step } = line;
  let isDown = false;
  let last = 0;
  for (let i = 0; i < x.length; i += 1) {
    const value = y[i];
    const px = view.x(x[i]);
    const py = value === null ? NaN : view.y(value);
    if (!Number.isFinite(px) || !Number.isFinite(py)) {
      isDown = false;
    } else if (isDown) {
      if (step) ctx.lineTo(px, last);
      ctx.lineTo(px, py);
      last = py;
    } else {
      ctx.moveTo(px, py);
      isDown = true;
      last = py;
    }
  }
}

/** Returns the indexes of points without a neighbor: a line of one point has no length. */
function lonePoints(line, view) {
  const isDrawn = (i) => i < line.x.length && line.y[i] !== null
    && Number.isFinite(view.x(line.x[i])) && Number.isFinite(view.y(line.y[i]));
  const lone = [];
  let before = false;
  let here = isDrawn(0);
  for (let i = 0; i < line.x.length; i += 1) {
    const after = isDrawn(i + 1);
    if (here && !before && !after) lone.push(i);
    [before, here] = [here, after];
  }
  return lone;
}

/** Draws one line in its style; `thicker` is added to its width. */
export function drawLine(ctx, line, view, thicker = 0) {
  const opacity = thicker ? 1 : line.alpha ?? 1;
  ctx.globalAlpha = opacity;
  if (line.fill) drawFill(ctx, line, view);
  else {
    ctx.lineJoin = 'round';
    stroke(ctx, line.color, (line.width || 1.5) + thicker, line.dash || [], () =>
      tracePath(ctx, line, view));
  }
  ctx.globalAlpha = 1;
  const r = (line.x.length > 1 ? 2 : 3) + thicker / 2;
  for (const i of lonePoints(line, view)) {
    drawDot(ctx, { x: line.x[i], y: line.y[i], r, color: line.color, alpha: opacity }, view);
  }
}

function drawFill(ctx, line, view) {
  const base = line.base || line.y.map(() => 0);
  ctx.beginPath();
  line.x.forEach((x, i) => ctx[i ? 'lineTo' : 'moveTo'](view.x(x), view.y(line.y[i] ?? 0)));
  for (let i = line.x.length - 1; i >= 0; i -= 1) {
    ctx.lineTo(view.x(line.x[i]), view.y(base[i]));
  }
  ctx.closePath();
  ctx.fillStyle = line.color;
  ctx.fill();
}

/** Draws lines, dots, marks of non-finite values and labels. */
export function drawScene(ctx, scene, view) {
  const { left, top, width, height } = view.box;
  ctx.save();
  ctx.beginPath();
  ctx.rect(left, top, width, height);
  ctx.clip();
  for (const line of scene.lines) drawLine(ctx, line, view);
  for (const dot of scene.dots || []) drawDot(ctx, dot, view);
  ctx.restore();
  const bottom = top + height;
  for (const line of scene.lines) {
    drawNonfinite(ctx, line, view);
    if (line.endMark) drawEnd(ctx, line, view);
  }
  drawLabels(ctx, scene.lines, view, bottom);
}

function drawDot(ctx, dot, view) {
  const x = view.x(dot.x);
  const y = view.y(dot.y);
  if (!Number.isFinite(x) || !Number.isFinite(y)) return;
  ctx.globalAlpha = dot.alpha ?? 1;
  ctx.beginPath();
  ctx.arc(x, y, dot.r || 3, 0, 2 * Math.PI);
  ctx.fillStyle = dot.open ? colors().surface : dot.color;
  ctx.fill();
  if (dot.open) {
    ctx.strokeStyle = dot.color;
    ctx.lineWidth = dot.width || 1.2;
    ctx.stroke();
  }
  ctx.globalAlpha = 1;
}

/** Draws × where values are NaN or infinite, at the height of the last finite value. */
function drawNonfinite(ctx, line, view) {
  const { left, top, width, height } = view.box;
  let at = -1;
  let next = 0;
  // Both lists of x ascend.
  for (const x of line.nonfinite || []) {
    for (; next < line.x.length && line.x[next] <= x; next += 1) {
      if (line.y[next] !== null) at = next;
    }
    const px = view.x(x);
    if (!(px >= left - 1 && px <= left + width + 1)) continue;
    const raw = at < 0 ? top + height - 6 : view.y(line.y[at]);
    const py = Math.max(top + 5, Math.min(top + height - 5, raw));
    ctx.globalAlpha = line.alpha ?? 1;
    drawCross(ctx, px, py, line.crossColor || colors().fail);
    ctx.globalAlpha = 1;
  }
}

export function drawCross(ctx, x, y, color, size = 3.5) {
  stroke(ctx, color, 1.5, [], () => {
    ctx.moveTo(x - size, y - size);
    ctx.lineTo(x + size, y + size);
    ctx.moveTo(x + size, y - size);
    ctx.lineTo(x - size, y + size);
  });
}

/** Returns the index of the last finite point within the plot, or -1. */
function lastPoint(line, view) {
  const { left, top, width, height } = view.box;
  for (let i = line.x.length - 1; i >= 0; i -= 1) {
    if (line.y[i] === null) continue;
    const x = view.x(line.x[i]);
    if (x > left + width + 1) continue;
    const y = view.y(line.y[i]);
    return x >= left && y >= top - 1 && y <= top + height + 1 ? i : -1;
  }
  return -1;
}

function drawEnd(ctx, line, view) {
  const i = lastPoint(line, view);
  if (i < 0) return;
  const open = line.endMark === 'ring';
  drawDot(ctx, { x: line.x[i], y: line.y[i], color: line.color, r: open ? 3.5 : 4, open,
    width: 2, alpha: line.alpha }, view);
}

export function text(ctx, string, x, y, options = {}) {
  ctx.font = `${options.weight || 400} ${options.size || 11.5}px ${FONT}`;
  ctx.textAlign = options.align || 'left';
  ctx.textBaseline = 'middle';
  if (options.halo) {
    ctx.strokeStyle = colors().surface;
    ctx.lineWidth = 4;
    ctx.lineJoin = 'round';
    ctx.setLineDash([]);
    ctx.strokeText(string, x, y);
  }
  ctx.fillStyle = options.color || colors().text2;
  ctx.fillText(string, x, y);
}

/** Draws labels at the ends of lines. A label that finds no free place is left out. */
function drawLabels(ctx, lines, view, bottom) {
  const placed = [];
  const labeled = lines.filter((line) => line.label).sort((a, b) =>
    (b.priority || 0) - (a.priority || 0));
  for (const line of labeled.slice(0, 24)) {
    const i = lastPoint(line, view);
    if (i < 0) continue;
    const weight = line.labelWeight || 500;
    ctx.font = `${weight} 11.5px ${FONT}`;
    const width = ctx.measureText(line.label).width;
    const x = Math.min(view.x(line.x[i]) + 8, view.width - width - 2);
    const y = view.y(line.y[i]);
    const spot = [0, 12, -12, 20, -20].map((shift) => y + shift).find((middle) =>
      middle > view.box.top + 4 && middle < bottom - 4 && !placed.some((other) =>
        x < other.x + other.width + 4 && x + width + 4 > other.x
        && Math.abs(middle - other.y) < 13));
    if (spot === undefined) continue;
    placed.push({ x, y: spot, width });
    text(ctx, line.label, x, spot, { weight, halo: true,
      color: line.labelColor || colors().text2 });
  }
}

/** Draws grid, ticks and axis titles, for exports of uPlot plots. */
export function drawAxes(ctx, scene, view, ticks) {
  const { left, top, width, height } = view.box;
  const tokens = colors();
  ticks.y.values.forEach((value, i) => {
    const y = Math.round(view.y(value)) + 0.5;
    stroke(ctx, tokens.line, 1, [], () => {
      ctx.moveTo(left, y);
      ctx.lineTo(left + width, y);
    });
    text(ctx, ticks.y.labels[i], left - 8, y, { align: 'right', color: tokens.text3 });
  });
  ticks.x.values.forEach((value, i) => {
    const x = Math.round(view.x(value)) + 0.5;
    stroke(ctx, tokens.line, 1, [], () => {
      ctx.moveTo(x, top);
      ctx.lineTo(x, top + height);
    });
    text(ctx, ticks.x.labels[i], x, top + height + 14, { align: 'center', color: tokens.text3 });
  });
  if (scene.x.label) {
    text(ctx, scene.x.label, left + width / 2, top + height + 34,
      { align: 'center', color: tokens.text3 });
  }
}
