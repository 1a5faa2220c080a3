// Wide tables and code scroll inside the page: a keyboard must be able to reach what scrolls, and a screen reader to name it.
document.addEventListener("DOMContentLoaded", () => {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap, .md-sidebar__scrollwrap, .highlight-ipynb")) {
    box.tabIndex = 0;
  }
  document.querySelectorAll(".md-code__nav").forEach((nav, index) => nav.setAttribute("aria-label", `Code ${index + 1}`));
  document.querySelectorAll("[role=dialog]:not([aria-label])").forEach((box) => box.setAttribute("aria-label", "Search"));
});
