// Elements, made of data only: strings become text nodes and never markup.

/** The element with this id. */
export const $ = (id) => document.getElementById(id);

/**
 * An element. Keys of `with_` that begin with `--` are custom properties of its style, the others attributes; children
 * are elements or strings.
 */
export function el(tag, with_ = {}, ...children) {
  return filled(document.createElement(tag), with_, children);
}

/** The same for SVG. */
export function svg(tag, with_ = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), with_, children);
}

function filled(element, with_, children) {
  for (const [name, value] of Object.entries(with_)) {
    if (name.startsWith("--")) element.style.setProperty(name, String(value));
    else if (value !== false && value !== undefined) element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}
