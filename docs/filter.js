// The box above a long page: only entries with all the words in it are shown, and their groups open.
(() => {
  const box = document.querySelector(".filter");
  if (!box) return;
  const input = box.querySelector("input");
  const status = box.querySelector("[role=status]");
  const groups = [...document.querySelectorAll("details.group")].map((group) => ({
    group,
    heading: group.previousElementSibling?.matches("h2") ? group.previousElementSibling : null,
    entries: [...group.querySelectorAll("tbody tr, :scope > ul > li")].map((entry) => ({
      entry,
      text: entry.textContent.toLowerCase(),
    })),
  }));
  const total = groups.reduce((sum, { entries }) => sum + entries.length, 0);

  function filter() {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let found = 0;
    for (const { group, heading, entries } of groups) {
      let count = 0;
      for (const { entry, text } of entries) {
        entry.hidden = !words.every((word) => text.includes(word));
        count += !entry.hidden;
      }
      group.hidden = !count;
      if (heading) heading.hidden = !count;
      group.open = words.length > 0;
      found += count;
    }
    status.textContent = words.length ? `${found} of ${total}` : "";
  }

  input.addEventListener("input", filter);
  box.hidden = false;
  if (input.value) filter(); // a browser may keep it when a page is loaded again
})();
