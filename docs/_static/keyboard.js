// Lets the keyboard reach tables and code that are wider than the page, and names what the theme leaves without a name.
document.addEventListener("DOMContentLoaded", () => {
  for (const each of document.querySelectorAll(".table-wrapper, article pre, .cell_output .output")) each.tabIndex = 0;
  for (const each of document.querySelectorAll("[role=heading]:not([aria-level])")) each.setAttribute("aria-level", "2");
  document.querySelector(".sidebar-drawer")?.setAttribute("aria-label", "Pages");
  document.querySelector(".toc-drawer")?.setAttribute("aria-label", "On this page");
});
