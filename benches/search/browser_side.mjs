// Times and frames per second of the page in Chromium. `src/page/browser.rs` starts this script
// with its input as JSON: {url, tools, chromium, namespace, id}.

import { base, browse, check, drawn, noFaults, query, visit } from '../../tests/browser/page.mjs';

// Loads of each view.
const LOADS = 5;
// Time of each gesture, in ms.
const GESTURE = 3000;

const print = (name, text) => console.log(`${name.padEnd(44)} ${text}`);
const milliseconds = (time) => `${time.toFixed(0).padStart(8)} ms`;

/** Loads a view. Returns when the first pixels and all plots in sight were drawn, in ms. */
async function load(page, path) {
  await visit(page, path);
  const times = await page.evaluate(async () => {
    const { hosts } = await import('/assets/host.js');
    const frame = () => new Promise((resolve) => { requestAnimationFrame(resolve); });
    // Plots start when the browser reports that they are in sight, after a frame.
    await frame();
    await frame();
    await Promise.all([...hosts.values()].map((host) => host.starting));
    await frame();
    const plots = performance.now();
    const [paint] = performance.getEntriesByName('first-contentful-paint');
    return { first: paint?.startTime ?? NaN, plots };
  });
  check(await page.locator('.plot-error').count() === 0, `a plot of ${path} failed`);
  return times;
}

async function loads(page, name, path) {
  const times = [];
  for (let i = 0; i < LOADS; i += 1) times.push(await load(page, path));
  for (const [what, key] of [['first paint', 'first'], ['plots drawn', 'plots']]) {
    const sorted = times.map((one) => one[key]).sort((a, b) => a - b);
    const [median, most] = [sorted[Math.floor(LOADS / 2)], sorted.at(-1)];
    print(`${name}, ${what}`, `${milliseconds(median)}, at most ${most.toFixed(0)} ms`);
  }
}

/** Counts frames while `gesture(step)` moves the mouse, step by step. */
async function frames(page, name, gesture) {
  await page.evaluate(() => {
    window.frameTimes = [];
    const count = (time) => {
      window.frameTimes.push(time);
      window.frameRequest = requestAnimationFrame(count);
    };
    window.frameRequest = requestAnimationFrame(count);
  });
  const end = Date.now() + GESTURE;
  for (let step = 0; Date.now() < end; step += 1) await gesture(step);
  const times = await page.evaluate(() => {
    cancelAnimationFrame(window.frameRequest);
    return window.frameTimes;
  });
  const gaps = times.slice(1).map((time, i) => time - times[i]);
  const rate = (gaps.length * 1000) / (times.at(-1) - times[0]);
  print(name, `${rate.toFixed(0).padStart(8)} frames/s, longest frame `
    + `${Math.max(...gaps).toFixed(0)} ms`);
}

/** A place that moves up and down a range, one step of 3 px at a time. */
const swing = (step, length) => {
  const at = (step * 3) % (2 * length);
  return at < length ? at : 2 * length - at;
};

async function brush(page) {
  await visit(page, base());
  await drawn(page, 'parallel');
  const plot = page.locator('[data-plot=parallel]');
  const { x, y, height } = await plot.boundingBox();
  const [axis, top, length] = [x + 48, y + 46, height - 80];
  await page.mouse.move(axis, top + 0.1 * length);
  await page.mouse.down();
  await frames(page, 'brush on parallel coordinates', (step) =>
    page.mouse.move(axis, top + 0.2 * length + swing(step, 0.7 * length)));
  await page.mouse.up();
  await page.evaluate(async () => (await import('/assets/state.js')).state.flush());
  check(query(page, 'brush'), 'the mouse has not brushed');
}

async function scroll(page, name, path) {
  await visit(page, path);
  await page.mouse.move(700, 500);
  await frames(page, name, async (step) => {
    await page.mouse.wheel(0, step % 40 < 20 ? 120 : -120);
    await page.evaluate(() => new Promise((resolve) => { requestAnimationFrame(resolve); }));
  });
}

await browse(async (open) => {
  const page = await open();
  await loads(page, 'overview', base());
  await loads(page, 'trials', `${base()}/trials`);
  await brush(page);
  await scroll(page, 'scrolling the overview', base());
  await scroll(page, 'scrolling the trials', `${base()}/trials`);
  noFaults(page);
});
