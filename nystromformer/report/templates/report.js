
"use strict";
// The point of a chart that is nearest to the pointer says its value: its own title, shown at once and beside it.
const reach = 40, tip = document.getElementById("tip");
let near = null;
function show(point, chart) {
  if (near !== null) near.classList.remove("near");
  near = point;
  tip.hidden = point === null;
  if (point === null) return;
  point.classList.add("near");
  tip.textContent = point.dataset.tip;
  const box = point.getBoundingClientRect(), wide = document.documentElement.clientWidth;
  tip.style.left = tip.style.top = "0";
  const left = Math.min(Math.max(box.left + box.width / 2 - tip.offsetWidth / 2, 4), wide - tip.offsetWidth - 4);
  const above = box.top - tip.offsetHeight - 8;
  tip.style.left = `${left + window.scrollX}px`;
  tip.style.top = `${(above > 0 ? above : box.bottom + 8) + window.scrollY}px`;
}
for (const chart of document.querySelectorAll(".plot svg")) {
  const points = [...chart.querySelectorAll(".point")];
  for (const point of points) {  // the browser's own, slower tip would cover ours
    const title = point.querySelector("title");
    point.dataset.tip = title.textContent;
    title.remove();
  }
  chart.addEventListener("pointermove", event => {
    let best = null, least = reach;
    for (const point of points) {
      const box = point.getBoundingClientRect();
      const far = Math.hypot(box.left + box.width / 2 - event.clientX, box.top + box.height / 2 - event.clientY);
      if (far < least) [best, least] = [point, far];
    }
    show(best, chart);
  });
  chart.addEventListener("pointerleave", () => show(null, chart));
}

// Attention of real heads: weights of one token over all words, exact and approximated, below one another.
for (const explorer of document.querySelectorAll(".explorer")) {
  const { words, layers, names, heads, levels } = JSON.parse(explorer.dataset.maps);
  const bytes = Uint8Array.from(atob(levels), letter => letter.charCodeAt(0)), n = words.length;
  const rows = explorer.querySelector(".rows"), choice = name => explorer.querySelector(`select[name=${name}]`);
  const choices = { layer: layers, head: [...Array(heads).keys()], token: words.map((word, i) => `${i}: ${word}`) };
  for (const [name, texts] of Object.entries(choices))
    choice(name).append(...texts.map((text, i) => new Option(text, i)));
  function draw() {
    const [layer, head, token] = ["layer", "head", "token"].map(name => Number(choice(name).value));
    rows.replaceChildren(...names.map((name, place) => {
      const row = document.createElement("p"), label = document.createElement("b");
      label.textContent = name;
      row.append(label);
      const start = (((layer * names.length + place) * heads + head) * n + token) * n;
      words.forEach((word, key) => {
        const root = bytes[start + key] / 255, shown = document.createElement("span");
        shown.textContent = word;
        shown.title = `${word}: ${(100 * root * root).toFixed(1)} %`;
        shown.style.setProperty("--weight", `${Math.round(100 * root)}%`);
        if (key === token) shown.className = "chosen";
        shown.addEventListener("click", () => { choice("token").value = key; draw(); });
        row.append(shown);
      });
      return row;
    }));
  }
  explorer.addEventListener("change", draw);
  if (n > 0 && names.length > 0 && layers.length > 0) { draw(); explorer.hidden = false; }
}
