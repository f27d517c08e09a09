// Elements are built from texts, never from markup: a name of the trace cannot become an element.

type Child = Node | string | null | undefined | false;

interface Attributes {
  class?: string;
  title?: string;
  type?: string;
  role?: string;
  href?: string;
  placeholder?: string;
  hidden?: boolean;
  data?: Readonly<Record<string, string>>;
  aria?: Readonly<Record<string, string>>;
  onclick?: () => void;
}

export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Attributes = {},
  ...children: readonly Child[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  const { class: name, data, aria, onclick, hidden, ...others } = attributes;
  if (name) element.className = name;
  for (const [key, value] of Object.entries(others)) element.setAttribute(key, value as string);
  for (const [key, value] of Object.entries(data ?? {})) element.dataset[key] = value;
  for (const [key, value] of Object.entries(aria ?? {})) element.setAttribute(`aria-${key}`, value);
  if (hidden) element.hidden = true;
  if (onclick) element.addEventListener("click", onclick);
  element.append(...children.filter((child): child is Node | string => Boolean(child)));
  return element;
}

export function button(label: Child, onclick: () => void, attributes: Attributes = {}): HTMLButtonElement {
  return h("button", { type: "button", ...attributes, onclick }, label);
}

/** A labelled <select>; `options` are [value, text] pairs. */
export function select(
  label: string,
  options: readonly (readonly [string, string])[],
  chosen: string,
  onchange: (value: string) => void,
): HTMLLabelElement {
  const list = h("select");
  for (const [value, text] of options) {
    const option = h("option", {}, text);
    option.value = value;
    option.selected = value === chosen;
    list.append(option);
  }
  list.addEventListener("change", () => onchange(list.value));
  return h("label", {}, `${label} `, list);
}
