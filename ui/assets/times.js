// Times of the server, which are in UTC, as local time. A shadow root covers the text of the
// server, which stays in the document: live updates compare it.

import { moment } from './format.js';

function show() {
  for (const place of document.querySelectorAll('time[datetime] > span')) {
    const at = new Date(place.parentElement.dateTime);
    if (Number.isNaN(at.getTime())) continue;
    const text = moment(at.getTime() / 1000);
    const root = place.shadowRoot || place.attachShadow({ mode: 'open' });
    if (root.textContent !== text) root.textContent = text;
  }
}

export function startTimes() {
  show();
  document.addEventListener('stoker:replaced', show);
  // The day may have changed.
  document.addEventListener('visibilitychange', show);
}
