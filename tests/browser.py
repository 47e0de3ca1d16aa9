"""A real headless browser, where there is one, and what to ask it."""

from __future__ import annotations

import shutil
from pathlib import Path

NAMES = ("chromium-headless-shell", "chromium", "google-chrome")

# every text and mark that is shown, with its contrast against what is behind it (WCAG 2.2)
CONTRAST = """() => {
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const read = text => text.match(/[\\d.]+/g).map(Number);
  const behind = node => {
    for (; node; node = node.parentElement) {
      const colour = read(getComputedStyle(node).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + .05) / (y + .05); };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || node.tagName === 'title') continue;
    const style = getComputedStyle(node), drawn = node.closest('svg');
    const text = walker.currentNode.data.trim();
    found.push({kind: 'text', text, ratio: ratio(read(drawn ? style.fill : style.color), behind(drawn || node))});
  }
  for (const node of document.querySelectorAll('svg path, svg use')) {
    for (const part of ['fill', 'stroke'])
      if (node.getAttribute('style')?.match(`${part}: var[(]--(s|gate)`)) {
        const colour = read(getComputedStyle(node)[part]);
        found.push({kind: 'mark', text: node.id, ratio: ratio(colour, behind(node.closest('svg')))});
      }
  }
  return found;
}"""

# the smallest text of all figures, in pixels of the page
SMALLEST = """() => Math.min(...[...document.querySelectorAll('svg text')].map(text => {
  const matrix = text.getScreenCTM();
  return parseFloat(getComputedStyle(text).fontSize) * Math.hypot(matrix.a, matrix.b);
}))"""

# texts of one figure that touch: their boxes have some pixels of room above and below the letters, and none beside them
RUN_INTO = """() => [...document.querySelectorAll('svg')].flatMap(figure => {
  const texts = [...figure.querySelectorAll('text')].filter(text => text.textContent.trim());
  const boxes = texts.map(text => text.getBoundingClientRect());
  return boxes.flatMap((a, i) => boxes.slice(i + 1).flatMap((b, k) =>
    a.left < b.right + 3 && b.left < a.right + 3 && a.top + 3 < b.bottom - 3 && b.top + 3 < a.bottom - 3
      ? [[texts[i].textContent, texts[i + k + 1].textContent]] : []));
})"""

# texts that stick out of their figure
CUT = """() => [...document.querySelectorAll('svg')].flatMap(s => [...s.querySelectorAll('text')].filter(t => {
  const a = t.getBoundingClientRect(), b = s.getBoundingClientRect();
  return a.left < b.left - 1 || a.right > b.right + 1 || a.top < b.top - 1 || a.bottom > b.bottom + 1;
}).map(t => t.textContent))"""


def find_browser() -> str | None:
    """What tests/install_browser.sh brought, or ``playwright install chromium``."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as tools:
        own = tools.chromium.executable_path
    return next(filter(None, map(shutil.which, NAMES)), own if Path(own).exists() else None)
