
// Filters the tables: shows the rows that have all words in the search box; a layout in brackets is
// one word. Expands blocks only until `enough` rows are visible, because a browser takes long to lay
// out thousands.
(() => {
  const enough = 300;
  const form = document.querySelector(".onnxpar .search");
  const input = form.querySelector("input"), count = form.querySelector("output");
  const blocks = [...document.querySelectorAll(".onnxpar .block")].map(box => ({
    box, wasOpen: box.open, rows: [...box.querySelectorAll("tbody tr")], texts: null,
    said: box.firstElementChild.appendChild(document.createElement("span")) }));
  const total = blocks.reduce((sum, block) => sum + block.rows.length, 0);
  const textOf = row => [...row.cells].map(cell => cell.textContent).join("\n").toLowerCase();
  const number = count => count.toLocaleString("en");
  const sections = [...document.querySelectorAll(".onnxpar section")];
  let words = [];

  function filter() {
    const now = input.value.toLowerCase().match(/\[[^\]]*\]?|[^\s[]+/g) || [];
    if (now.join("\n") === words.join("\n")) return;
    let shown = 0;
    for (const block of blocks) {
      if (!words.length) block.wasOpen = block.box.open;
      block.texts ||= block.rows.map(textOf);
      const fits = block.texts.map(text => now.every(word => text.includes(word)));
      block.rows.forEach((row, i) => { if (row.hidden === fits[i]) row.hidden = !fits[i]; });
      const found = fits.filter(Boolean).length;
      block.box.hidden = !found;
      block.box.open = now.length ? found > 0 && shown < enough : block.wasOpen;
      block.said.textContent = now.length ? ` (${number(found)} found)` : "";
      shown += found;
    }
    for (const section of sections)
      section.hidden = now.length > 0 && !section.querySelector(".block:not([hidden])");
    words = now;
    count.textContent = now.length ? `${number(shown)} of ${number(total)} rows` : "";
  }
  let waiting;
  input.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(filter, 100);
  });
  form.addEventListener("submit", event => { event.preventDefault(); filter(); });
  form.hidden = false;
})();
