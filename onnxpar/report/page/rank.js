
// Shows the texts of the chosen rank: elements with `data-of` name a list, which has a text for each.
(() => {
  const form = document.querySelector(".onnxpar .rank");
  const lists = JSON.parse(document.querySelector(".onnxpar .texts").textContent);
  const varying = [...document.querySelectorAll(".onnxpar [data-of]")];
  const choice = form.querySelector("select");
  const show = () => {
    for (const each of varying) each.textContent = lists[each.dataset.of][choice.value];
  };
  choice.addEventListener("change", show);
  form.addEventListener("submit", event => event.preventDefault());
  form.hidden = false;
  show();
})();
