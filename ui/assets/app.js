// Entry of the page's scripts. Each part starts alone, so that one failure leaves the others.

import { startExport } from './export.js';
import { startPlots } from './host.js';
import { startKeyboard } from './keyboard.js';
import { startLive } from './live.js';
import { startLogs } from './logs.js';
import { startOptions } from './options.js';
import { startSelection } from './select.js';
import { state } from './state.js';
import { startTheme } from './theme.js';
import { startTimes } from './times.js';

for (const start of [startTheme, startOptions, startTimes, startSelection, startPlots,
  startExport, startKeyboard, startLogs, startLive]) {
  try {
    start();
  } catch (error) {
    console.error(error);
  }
}
// Rows that htmx swaps need their marks again.
for (const event of ['htmx:afterSwap', 'htmx:after:swap']) {
  document.addEventListener(event, () => {
    document.dispatchEvent(new CustomEvent('stoker:replaced'));
    // The URL that htmx pushes has the filter, but neither selection nor brush.
    setTimeout(() => state.flush(), 50);
  });
}
// A replaced part may have a plot where it had a sentence before.
document.addEventListener('stoker:replaced', () => startPlots());
document.documentElement.dataset.scripts = 'on';
