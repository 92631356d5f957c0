/* A page in a folder may not read another one, so search shows excerpts only where a server has it. */
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;

/* An option keeps its dashes; what a check says wraps; a click on a figure opens it alone, where a phone can enlarge it. */
document.addEventListener("DOMContentLoaded", () => {
  for (const word of document.querySelectorAll("code .pre"))
    if (/^--?\w.{0,22}$/.test(word.textContent)) word.classList.add("option");
  for (const printed of document.querySelectorAll(".cell_output pre"))
    if (/^\[( |x|ok)\] /.test(printed.textContent)) printed.classList.add("check");
  for (const figure of document.querySelectorAll("article img:not(a img)"))
    figure.addEventListener("click", () => { location.href = figure.src; });
});

/* A hit in a page's text leads to the section that has the words; Sphinx links the page alone. */
document.addEventListener("DOMContentLoaded", () => {
  if (typeof Search === "undefined" || !Search.makeSearchSummary) return;
  const summary = Search.makeSearchSummary;
  Search.makeSearchSummary = (page, words, anchor) => {
    const has = element => [...words].every(word => element.textContent.toLowerCase().includes(word));
    const sections = new DOMParser().parseFromString(page, "text/html")
      .querySelectorAll("[role=main] section section[id]");
    const found = anchor ? undefined : [...sections].find(
      section => has(section) && ![...section.querySelectorAll("section[id]")].some(has));
    const shown = summary(page, words, anchor || (found ? `#${CSS.escape(found.id)}` : ""));
    if (found && shown) setTimeout(() => {
      const link = shown.parentElement.querySelector("a");
      const inside = document.createElement("a");
      inside.href = `${link.getAttribute("href")}#${found.id}`;
      inside.textContent = found.querySelector("h2, h3, h4").textContent.replace(/#$/, "");
      link.after(" · ", inside);
    });
    return shown;
  };
});
