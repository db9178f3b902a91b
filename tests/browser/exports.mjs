// Exports: the trials as CSV and JSON equal the record, and plots have PNG, SVG, CSV and JSON.

import { readFileSync } from 'node:fs';
import { address, base, browse, check, drawn, equal, noFaults, record, visit } from './page.mjs';

/** Returns the facts of the record that an exported row must have. */
function expected(trial) {
  const { spec, status } = trial;
  return { trial: spec.index, attempts: status.attempts.length,
    hidden: spec.hyperparameters.hidden, learning_rate: spec.hyperparameters.learning_rate,
    validation_loss: Number(status.bestMetric) };
}

const pick = (row, keys) => Object.fromEntries(keys.map((key) => [key, Number(row[key])]));

/** Parses CSV without line breaks in cells. */
function parse(text) {
  const cells = (line) => [...line.matchAll(/(?:^|,)(?:"((?:[^"]|"")*)"|([^,]*))/g)]
    .map(([, quoted, plain]) => (quoted === undefined ? plain : quoted.replaceAll('""', '"')));
  const [head, ...rows] = text.trimEnd().split('\n').map(cells);
  return rows.map((row) => Object.fromEntries(head.map((name, i) => [name, row[i]])));
}

async function trials(page) {
  const wanted = [...record().values()].map(expected)
    .sort((a, b) => a.trial - b.trial);
  const keys = Object.keys(wanted[0]);
  const get = async (path) => (await page.request.get(address(base() + path))).text();
  const sorted = (rows) => rows.map((row) => pick(row, keys)).sort((a, b) => a.trial - b.trial);
  equal(sorted(JSON.parse(await get('/trials.json'))), wanted, 'trials.json');
  equal(sorted(parse(await get('/trials.csv'))), wanted, 'trials.csv');
}

/** Exports the plot of a card, and returns the bytes of the file. */
async function save(page, card, kind) {
  const tools = page.locator(`#${card} .tools`);
  await tools.locator('summary').click();
  const [download] = await Promise.all([page.waitForEvent('download'),
    tools.locator(`[data-export=${kind}]`).click()]);
  await page.keyboard.press('Escape');
  if (await tools.locator('details[open]').count()) await tools.locator('summary').click();
  const failure = await download.failure();
  check(failure === null, `the export ${kind} of ${card} failed: ${failure}`);
  const bytes = readFileSync(await download.path());
  check(bytes.length > 100, `the export ${kind} of ${card} has ${bytes.length} bytes`);
  return bytes;
}

async function plot(page, card, name) {
  await drawn(page, name);
  const png = await save(page, card, 'png');
  equal(png.subarray(1, 4).toString(), 'PNG', `first bytes of the picture of ${card}`);
  const [width, height] = [png.readUInt32BE(16), png.readUInt32BE(20)];
  check(width > 500 && height > 300, `the picture of ${card} has ${width} x ${height} pixels`);
  check(png.length > 8000, `the picture of ${card} is blank: ${png.length} bytes`);
  const svg = (await save(page, card, 'svg')).toString();
  check(/^<svg [^]*<\/svg>$/.test(svg.trim()), `the SVG of ${card} is ${svg.slice(0, 80)}`);
  const shapes = (svg.match(/<(path|circle|polyline|line|rect) /g) || []).length;
  check(shapes > 10, `the SVG of ${card} has ${shapes} shapes`);
  for (const text of [new Date().toISOString().slice(0, 10), base()]) {
    check(svg.includes(text), `the SVG of ${card} lacks ${text}`);
  }
  const rows = parse((await save(page, card, 'csv')).toString());
  check(rows.length > 2, `the CSV of ${card} has ${rows.length} rows`);
  JSON.parse((await save(page, card, 'json')).toString());
  return rows;
}

/** Runs in the browser: draws a curve with gaps, and returns its SVG and its moving average. */
async function gaps() {
  const [{ drawScene }, { ema }, { SvgContext }] = await Promise.all(['scene', 'curves', 'svg']
    .map((name) => import(`/assets/plots/${name}.js`)));
  const line = { x: [0, 1, 2, 3, 4, 5, 6], y: [1, 3, null, 5, null, 7, 9], color: '#000' };
  const ctx = new SvgContext(10, 10);
  drawScene(ctx, { lines: [line] }, { x: (x) => x, y: (y) => y, width: 10,
    box: { left: 0, top: 0, width: 10, height: 10 } });
  return { svg: ctx.toString(), average: ema(line.y, 0.5) };
}

/** Runs in the browser: labels the end of the profiler's axis for a time in 1970 and for now. */
async function endLabels() {
  const { endLabel } = await import('/assets/plots/profiler.js');
  return [endLabel(86_400), endLabel(Date.now() / 1000)];
}

await browse(async (open) => {
  const page = await open(base());
  const [past, now] = await page.evaluate(endLabels);
  equal(past, '1970-01-02', 'end of the axis of an old profiler');
  check(/^\d\d:\d\d:\d\d$/.test(now), `end of the axis of a profiler of today: ${now}`);
  const { svg, average } = await page.evaluate(gaps);
  check(svg.includes('d="M0 1L1 3M3 5M5 7L6 9"'), `a line has no gaps: ${svg}`);
  equal(svg.match(/d="M[\d.]+ [\d.]+a/g), ['d="M1 5a'], 'dots of a line with gaps');
  equal(average, [1, 2, null, 5, null, 7, 8], 'average of a line with gaps');
  await trials(page);
  await plot(page, 'curves', 'curves');
  await plot(page, 'parallel', 'parallel');
  await visit(page, `${base()}/rungs`);
  await plot(page, 'ladder', 'ladder');
  await visit(page, `${base()}/hyperparameters`);
  await plot(page, 'scatter', 'scatter');
  await page.selectOption('#heatmap [data-pair=view]', 'trials');
  const points = await plot(page, 'heatmap', 'heatmap');
  const trialOf = (row) => Number(Object.values(row)[2]);
  equal(points.map(trialOf).sort((a, b) => a - b), [...record().keys()].sort((a, b) => a - b),
    'trials of the plot of a pair');
  noFaults(page);
});
